"""Weight formats: how a matrix lies in memory and in a checkpoint, what its values are, and who reads it.

A format is one record. `PLAIN` weights have the activations' dtype. `FP8` weights are e4m3 with a float32
factor for each block of 128 by 128, as the FP8 releases store them; where nothing reads them as they are, the
loader multiplies them out. `W8A8` weights are FP8 weights whose products quantise their rows, in groups of
128 columns, as the FP8 releases are run; `W8A8_VALUES` are the same multiplied out. `four_bits` weights
are the codes of a four-bit checkpoint, as a GPU's products read them. No weight is ever quantised here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch
from torch import nn

from compiled_mtp.communicators.communicator import Communicator
from compiled_mtp.errors import check, fail
from compiled_mtp.ops import fp8, int4
from compiled_mtp.ops.device import shared_bytes_of

Recipe: TypeAlias = Literal["w8a8", "w8a16"]
"""How FP8 weights are multiplied: with rows quantised in groups of 128, or with rows as they are."""


@dataclass(frozen=True)
class WeightFormat:
    """How a weight [..., N, K] is stored.

    storage: dtype of the values in memory, None for the activations' own, without factors. block: rows, and
    columns, that share a factor in the checkpoint. group: columns that share a scale and a zero point where
    weights are four-bit codes, as ops.int4 packs them, else 0. scale_dtype: of factors or scales.
    quantizes_rows: products take their rows in e4m3, with a factor for each 128 columns. header_dtype: what a
    file's header calls the dtype. scale_suffix: what a checkpoint adds to the name of a weight for that of
    its factors. values(weight [N, K], scale) gives the weight's float32 values [N, K]. parameters: matches
    the names of the parameters whose operators take the format. is_read_on(device) says whether the operators
    read it there without multiplying it out.
    """

    name: str
    storage: torch.dtype | None = None
    block: int = 0
    quantizes_rows: bool = False
    header_dtype: str = ""
    scale_suffix: str = ""
    values: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda weight, scale: weight.float()
    group: int = 0
    scale_dtype: torch.dtype = torch.float32
    parameters: re.Pattern[str] = re.compile("")
    is_read_on: Callable[[torch.device], bool] = lambda device: True

    @property
    def has_factors(self) -> bool:
        """Whether a parameter's factors lie beside it."""
        return self.storage is not None

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the parameter of a weight [..., N, K]."""
        return (*shape[:-1], shape[-1] // 4) if self.group else shape

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the factors of a weight [..., N, K]: [..., ceil(N / block), ceil(K / block)], or
        [K / group, N, 2] of four-bit codes."""
        if self.group:
            return (shape[-1] // self.group, shape[-2], 2)
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

_DENSE = re.compile(r"\.(mixer\.(qkv|o_proj|in_proj|out_proj)|ffn\.(gate_up|down))\.weight$")


@functools.cache
def four_bits(group: int, scale_dtype: torch.dtype) -> WeightFormat:
    """Four-bit codes with a scale and a zero point for each `group` columns, 32, 64 or 128, of a row."""
    dtype = str(scale_dtype).removeprefix("torch.")
    return WeightFormat(
        name=f"int4 in groups of {group}, scales in {dtype}",
        storage=torch.int16,
        block=int4.UNIT,
        parameters=_DENSE,
        is_read_on=lambda device: reads_int4(device),
        group=group,
        scale_dtype=scale_dtype,
    )


def reads_int4(device: torch.device) -> bool:
    """Whether products read four-bit codes there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


# What its largest tile takes.
W8A8_SHARED_BYTES = 144 * 1024
W8A8 = replace(FP8, name="fp8 in blocks of 128, rows in groups of 128", quantizes_rows=True)
# Of a mixture's two stacks, which one operator reads.
_PARTNER = re.compile(r"(?<=\.ffn\.)(gate_up|down)$")
W8A8_VALUES = replace(W8A8, name=f"{W8A8.name}, multiplied out", storage=None)

Formats = Mapping[str, WeightFormat]
"""The formats of a model's parameters by their full names; those that are not listed are plain."""

NO_FORMATS: Formats = MappingProxyType({})


def resolve_recipe(asked: str, *, has_fp8: bool, device: torch.device) -> Recipe | None:
    """The recipe for `weight_recipe` in EngineConfig: None for a checkpoint without FP8 weights.

    "auto" is how the FP8 releases are run, W8A8, but W8A16 on a GPU older than Hopper and on one whose shared
    memory the tiles of W8A8's kernels do not fit into (a GeForce's). Raises ValueError for a recipe without
    FP8 weights, and for W8A8 on such a GPU.
    """
    if not has_fp8:
        rule, remedy = "be auto for a checkpoint without FP8 weights", "drop it or use an FP8 release"
        check(asked == "auto", "weight_recipe", rule, asked, remedy)
        return None
    if asked == "w8a16":
        return "w8a16"
    if device.type == "cpu":
        return "w8a8"
    found = torch.cuda.get_device_capability(device)
    if found >= (9, 0) and shared_bytes_of(found) >= W8A8_SHARED_BYTES:
        return "w8a8"
    if asked == "auto":
        return "w8a16"
    rule = (
        "be w8a16 below compute capability 9.0, and where a program has less than "
        f"{W8A8_SHARED_BYTES >> 10} KiB of shared memory"
    )
    raise fail("weight_recipe", rule, f"{asked} on {found[0]}.{found[1]}", "use auto or another GPU")


def formats_for(
    recipe: Recipe | None, able: Mapping[str, int], device: torch.device
) -> Mapping[str, WeightFormat]:
    """The formats under `recipe` on `device` of the parameters `able`, each with its number of columns, that
    could be kept in FP8.

    Rows are quantised for weights whose columns are whole groups of 128, a mixture's gate|up and down both or
    neither; others are W8A16. What no operator reads in FP8 is multiplied out.
    """
    is_read = FP8.is_read_on(device)
    formats: dict[str, WeightFormat] = {}
    for name, columns in able.items():
        partner = _PARTNER.sub(lambda match: "down" if match[0] == "gate_up" else "gate_up", name)
        if recipe == "w8a8" and columns % W8A8.block == able[partner] % W8A8.block == 0:
            formats[name] = W8A8 if is_read else W8A8_VALUES
        elif is_read:
            formats[name] = FP8
    return formats


def describe_recipe(recipe: Recipe | None, formats: Mapping[str, WeightFormat]) -> str:
    """What the line of a start says of FP8 and four-bit weights; nothing for a checkpoint without them."""
    four_bits = sum(form.group > 0 for form in formats.values())
    if recipe is None:
        return f" ({four_bits} matrices in four bits)" if four_bits else ""
    is_kept = any(form.has_factors for form in formats.values())
    return f" (FP8 as {recipe}{'' if is_kept else ', multiplied out'})"


@dataclass(frozen=True)
class ParameterFactory:
    """Allocates the parameters of a module, each in its format; `name` is where in the model the module is.

    Nothing is initialised: the loader fills parameters and nothing trains them. exchange: the way to the
    other ranks where the module holds one of several pieces, else None.
    """

    dtype: torch.dtype
    device: torch.device
    formats: Formats
    name: str = ""
    communicator: Communicator | None = None

    def part(self, name: str) -> ParameterFactory:
        """The factory of the part `name` of this module."""
        return replace(self, name=f"{self.name}{name}.")

    def whole(self) -> ParameterFactory:
        """The factory of a module that every rank holds as it is."""
        return replace(self, communicator=None)

    def format_of(self, name: str) -> WeightFormat:
        """The format of this module's parameter `name`."""
        return self.formats.get(self.name + name, PLAIN)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """A parameter without a format of its own, in the activations' dtype or another."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)

    def add_weight(self, module: nn.Module, name: str, *shape: int, like: str | None = None) -> None:
        """Give `module` the weight `name` [..., N, K] in its format, or that of `like`, and its factors, or
        None, as `name`_scale."""
        form = self.format_of(like or name)
        module.register_parameter(name, self.empty(*form.stored_shape(shape), dtype=form.storage))
        scale = self.empty(*form.scale_shape(shape), dtype=form.scale_dtype) if form.has_factors else None
        module.register_parameter(f"{name}_scale", scale)
