"""One compiled configuration of a Triton kernel, described so that it can be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KernelVariant:
    """One configuration that a `launch()` really launches; each kernel.py lists its own in `variants()`.

    name: unique within the operator, and stable, since the recorded resource table is keyed by it.
    function: the `@triton.jit` function. signature: Triton type of every argument that is not a constexpr
    ("*bf16", "*fp8e4nv", "fp32", "i32"). constexprs: the value of every constexpr argument.
    aligned: arguments (pointers, strides) that are multiples of 16 whenever `launch()` sees real shapes;
    without them loads are narrow and the compiled code is not the one that runs.
    options: further compiler options, such as enable_fp_fusion.
    min_capability: the first compute capability (major * 10 + minor) it is meant for.
    """

    name: str
    function: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    aligned: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    min_capability: int = 80
