"""What `bench_op.py` measures: one module an operator, each with `cases(shape, rows, settings)`.

A module returns the OpCases of one operator at one model's shapes for `rows` rows in all. `settings` holds
the integers given by --set NAME=VALUE (query_len, keys, ...); a module reads those it knows with a default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of one published checkpoint that the operators' cases are made from."""

    name: str
    hidden: int
    linear_key_heads: int
    linear_value_heads: int
    query_heads: int
    kv_heads: int
    intermediate: int  # 0 for a mixture of experts
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    head_dim: int = 256
    linear_head_dim: int = 128
    vocab: int = 248320


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("0.8b", 1024, 16, 16, 8, 2, 3584),
        ModelShape("4b", 2560, 16, 32, 16, 4, 9216),
        ModelShape("9b", 4096, 16, 32, 16, 4, 12288),
        ModelShape("27b", 5120, 16, 48, 24, 4, 17408),
        ModelShape("35b-a3b", 2048, 16, 32, 16, 2, 0, experts=256, top_k=8, expert_intermediate=512),
    )
}


@dataclass(frozen=True)
class OpCase:
    """One line of the table.

    label: what is measured, without the shape and the rows. make_inputs(device, seed): the arguments of one
    call, random and new for every seed; the benchmark rotates through several so that they do not stay in L2.
    call, alternative: take those arguments; the alternative is the obvious other way (cuBLAS, SDPA, the
    reference). bytes_moved: each input and output once. check(arguments): raises AssertionError unless the
    operator is right on them; it compares with the reference or with float64, at the operator's tolerance.
    """

    label: str
    make_inputs: Callable[[str, int], tuple[Any, ...]]
    call: Callable[..., Any]
    bytes_moved: int
    check: Callable[[tuple[Any, ...]], None]
    alternative: Callable[..., Any] | None = None
    alternative_name: str = "none"
