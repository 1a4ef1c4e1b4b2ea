"""Weight formats: how a matrix lies in memory and in a checkpoint, what its values are, and who reads it.

A format is one record. `PLAIN` weights have the activations' dtype. `FP8` weights are e4m3 with a float32
factor for each block of 128 by 128, as the FP8 releases store them; where nothing reads them as they are, the
loader multiplies them out. Nothing is ever quantised here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from compiled_mtp.ops import fp8


@dataclass(frozen=True)
class WeightFormat:
    """How a weight [..., N, K] is stored.

    storage: dtype of the stored values, None for the activations' own. block: rows, and columns, that share
    a factor, 0 without factors. header_dtype: what a file's header calls the dtype. scale_suffix: what a
    checkpoint adds to the name of a weight for that of its factors. values(weight [N, K], scale) gives the
    weight's float32 values [N, K]. parameters: matches the names of the parameters whose operators take the
    format. is_read_on(device) says whether the operators read it there without multiplying it out.
    """

    name: str
    storage: torch.dtype | None = None
    block: int = 0
    header_dtype: str = ""
    scale_suffix: str = ""
    values: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda weight, scale: weight.float()
    parameters: re.Pattern[str] = re.compile("")
    is_read_on: Callable[[torch.device], bool] = lambda device: True

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the factors of a weight [..., N, K]: [..., ceil(N / block), ceil(K / block)]."""
        return (*shape[:-2], *(-(-size // self.block) for size in shape[-2:]))

    def dequantize(self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values of `weight` [N, K] with factors `scale`, rounded once to `dtype`.

        Despite its stored name, `scale_inv`, an FP8 scale is a factor; edge blocks may be partial.
        """
        out = torch.empty(weight.shape, dtype=dtype)
        # A row of blocks at a time: a float32 copy of a whole weight may not fit.
        for index, factors in enumerate(scale.split(1)):
            rows = slice(index * self.block, (index + 1) * self.block)
            out[rows] = self.values(weight[rows], factors)
        return out


def _reads_fp8(device: torch.device) -> bool:
    # A CPU's reference would multiply a weight out at every call, and older GPUs cannot convert e4m3.
    return fp8.converts_fp8(device)


PLAIN = WeightFormat("plain")
FP8 = WeightFormat(
    name="fp8 in blocks of 128",
    storage=torch.float8_e4m3fn,
    block=fp8.FP8_BLOCK,
    header_dtype="F8_E4M3",
    scale_suffix="_scale_inv",
    values=fp8.dequantize,
    # What `linear` and `moe_experts` read; embedding and head are gathered and cut, and stay plain.
    parameters=re.compile(
        r"\.(mixer\.(qkv|o_proj|in_proj|out_proj)\.weight|ffn\.(gate_up|down)(\.weight)?)$"
    ),
    is_read_on=_reads_fp8,
)

Formats = Mapping[str, WeightFormat]
"""The formats of a model's parameters by their full names; those that are not listed are plain."""

NO_FORMATS: Formats = MappingProxyType({})


@dataclass(frozen=True)
class ParameterFactory:
    """Allocates the parameters of a module, each in its format; `name` is where in the model the module is.

    Nothing is initialised: the loader fills parameters and nothing trains them.
    """

    dtype: torch.dtype
    device: torch.device
    formats: Formats
    name: str = ""

    def part(self, name: str) -> ParameterFactory:
        """The factory of the part `name` of this module."""
        return ParameterFactory(self.dtype, self.device, self.formats, f"{self.name}{name}.")

    def format_of(self, name: str) -> WeightFormat:
        """The format of this module's parameter `name`."""
        return self.formats.get(self.name + name, PLAIN)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """A parameter without a format of its own, in the activations' dtype or another."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)

    def add_weight(self, module: nn.Module, name: str, *shape: int) -> None:
        """Give `module` the weight `name` [..., N, K] in its format, and its factors, or None, as
        `name`_scale."""
        form = self.format_of(name)
        module.register_parameter(name, self.empty(*shape, dtype=form.storage))
        scale = self.empty(*form.scale_shape(shape), dtype=torch.float32) if form.block else None
        module.register_parameter(f"{name}_scale", scale)
