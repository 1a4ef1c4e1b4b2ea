"""Weight formats: how a matrix is stored in memory and in a checkpoint, and which operators read it.

Every format is one `WeightFormat`. `PLAIN` weights have the activations' dtype. `FP8` weights are e4m3 with a
float32 factor per block of 128 by 128, as in the FP8 releases; where no operator reads FP8, the loader
multiplies them out. `W8A8` weights are FP8 weights whose products quantise their rows in groups of 128
columns, as the FP8 releases are meant to run; `W8A8_VALUES` are the same multiplied out. `four_bits` weights
are the codes of a four-bit checkpoint, and `scaled_codes` those of a GGUF file or of FP4, as a GPU's products
read them. This module never quantises a weight.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch
from torch import nn

from compiled_mtp.communicators.communicator import Communicator
from compiled_mtp.errors import check, fail
from compiled_mtp.ops import blocks, fp8, int4
from compiled_mtp.ops.blocks import KINDS, Kind
from compiled_mtp.ops.device import capability_of, shared_bytes_of

Recipe: TypeAlias = Literal["w8a8", "w8a16"]
"""How FP8 weights are multiplied: by rows quantised in groups of 128 columns, or by plain rows."""


@dataclass(frozen=True)
class CodedRows:
    """Consecutive rows of a weight in scaled codes of the kind `name` (ops.blocks)."""

    rows: int
    name: str

    @property
    def kind(self) -> Kind:
        """How they are stored."""
        return KINDS[self.name]


@dataclass(frozen=True)
class WeightFormat:
    """How a weight [..., N, K] is stored.

    storage: dtype of the values in memory; None for the activations' dtype, without factors. block: rows, and
    columns, that share a factor in the checkpoint. group: columns that share a scale and a zero point in
    four-bit codes, as ops.int4 packs them; 0 for other weights. parts: the consecutive parts of the rows of a
    weight of scaled codes, as ops.blocks packs them; empty for other weights. Of several parts, words lie one
    after another in one dimension, and so do scales. Each expert of a stack has one part. scale_dtype: of
    factors or scales. quantizes_rows: products take their rows in e4m3, with a factor per 128 columns.
    header_dtype: the dtype's name in a file's header. scale_suffix: the suffix that a checkpoint adds to a
    weight's name for its factors. values(weight [N, K], scale) returns the weight's float32 values [N, K].
    parameters: matches the names of the parameters whose operators take the format. is_read_on(device):
    whether the operators read the format on that device without multiplying it out.
    """

    name: str
    storage: torch.dtype | None = None
    block: int = 0
    quantizes_rows: bool = False
    header_dtype: str = ""
    scale_suffix: str = ""
    values: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda weight, scale: weight.float()
    group: int = 0
    parts: tuple[CodedRows, ...] = ()
    scale_dtype: torch.dtype = torch.float32
    parameters: re.Pattern[str] = re.compile("")
    is_read_on: Callable[[torch.device], bool] = lambda device: True

    @property
    def has_factors(self) -> bool:
        """Whether a parameter in this format has a second parameter with its factors."""
        return self.storage is not None

    @property
    def is_packed(self) -> bool:
        """Whether a parameter in this format holds codes, so that its size is not the weight's."""
        return self.group > 0 or bool(self.parts)

    def bytes_of(self, rows: range, columns: int) -> int:
        """Bytes of codes and scales of some rows of a weight, all in one part."""
        if self.group:
            return len(rows) * columns // 2 + len(rows) * columns // self.group * 4
        kind = self.part_at(rows.start)[1].kind
        scales = kind.units(columns) * kind.fields * len(rows)
        return 2 * (len(rows) * columns // blocks.UNIT * kind.words + scales)

    def part_at(self, row: int) -> tuple[int, CodedRows]:
        """The part that holds a row of a weight of scaled codes, and the part's first row."""
        first = 0
        for part in self.parts:
            if row < first + part.rows:
                return first, part
            first += part.rows
        raise IndexError(row)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the parameter of a weight [..., N, K]."""
        if self.parts:
            words = [(part.rows, shape[-1] // blocks.UNIT * part.kind.words) for part in self.parts]
            if len(words) == 1:
                return (*shape[:-2], *words[0])
            return (sum(rows * width for rows, width in words),)
        return (*shape[:-1], shape[-1] // 4) if self.group else shape

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the factors of a weight [..., N, K]: [..., ceil(N / block), ceil(K / block)], or
        [..., K / group, N, 2] of four-bit codes, or [..., units, N, S] of scaled codes."""
        if self.parts:
            sizes = [(p.kind.units(shape[-1]), p.rows, p.kind.fields) for p in self.parts]
            return (*shape[:-2], *sizes[0]) if len(sizes) == 1 else (sum(map(math.prod, sizes)),)
        if self.group:
            return (*shape[:-2], shape[-1] // self.group, shape[-2], 2)
        return (*shape[:-2], *(-(-size // self.block) for size in shape[-2:]))

    def dequantize(self, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values of `weight` [N, K] with factors `scale`, rounded once to `dtype`.

        Despite its stored name, `scale_inv`, an FP8 scale is a factor; edge blocks may be partial.
        """
        out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        # One row of blocks at a time: a float32 copy of a whole weight may not fit into memory.
        for index, factors in enumerate(scale.split(1)):
            rows = slice(index * self.block, (index + 1) * self.block)
            out[rows] = self.values(weight[rows], factors)
        return out


PLAIN = WeightFormat("plain")
FP8 = WeightFormat(
    name="fp8 in blocks of 128",
    storage=torch.float8_e4m3fn,
    block=fp8.FP8_BLOCK,
    header_dtype="F8_E4M3",
    scale_suffix="_scale_inv",
    values=fp8.dequantize,
    # The weights of `linear` and `moe_experts`. Embedding and head stay plain: rows are gathered from them.
    parameters=re.compile(
        r"\.(mixer\.(qkv|o_proj|in_proj|out_proj)\.weight|ffn\.(gate_up|down)(\.weight)?)$"
    ),
    # A CPU's reference would multiply the weight out in every call, and older GPUs cannot convert e4m3.
    is_read_on=lambda device: fp8.converts_fp8(device),
)

_DENSE = re.compile(r"\.(mixer\.(qkv|o_proj|in_proj|out_proj)|ffn\.(gate_up|down))\.weight$")
# A mixture's stacks, and the shared expert's weights where the stacks do not hold it.
EXPERTS = re.compile(r"\.ffn\.(shared_)?(gate_up|down)$")


@functools.cache
def four_bits(group: int, scale_dtype: torch.dtype) -> WeightFormat:
    """Four-bit codes with a scale and a zero point per `group` columns of a row: 32, 64 or 128."""
    dtype = str(scale_dtype).removeprefix("torch.")
    return WeightFormat(
        name=f"int4 in groups of {group}, scales in {dtype}",
        storage=torch.int16,
        block=int4.UNIT,
        parameters=re.compile(rf"{_DENSE.pattern}|{EXPERTS.pattern}|^lm_head\.weight$"),
        is_read_on=lambda device: reads_codes(device),
        group=group,
        scale_dtype=scale_dtype,
    )


_CODED = re.compile(rf"{_DENSE.pattern}|\.ffn\.(gate_up|down)$|^(embed|lm_head|mtp\.fc)\.weight$")


def scaled_codes(parts: Sequence[CodedRows]) -> WeightFormat:
    """Scaled codes of the kinds in `parts`, each for some consecutive rows of a weight."""
    names = " and ".join(dict.fromkeys(part.name for part in parts))
    return WeightFormat(
        name=f"{names} as {', '.join(f'{part.rows} rows' for part in parts)}",
        storage=torch.int16,
        block=blocks.UNIT,
        parameters=_CODED,
        is_read_on=lambda device: reads_codes(device),
        parts=tuple(parts),
        scale_dtype=torch.int16,
    )


def coded_part(
    form: WeightFormat, words: torch.Tensor, scales: torch.Tensor, first: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The words [N, W] and scales [units, N, S] of the part that begins at row `first`: views."""
    if len(form.parts) == 1:
        return words, scales
    at = word = field = 0
    for part in form.parts:
        kind = part.kind
        size = (part.rows, columns // blocks.UNIT * kind.words)
        units = (kind.units(columns), part.rows, kind.fields)
        word_end, field_end = word + size[0] * size[1], field + units[0] * units[1] * units[2]
        if at == first:
            return words[word:word_end].view(size), scales[field:field_end].view(units)
        at, word, field = at + part.rows, word_end, field_end
    raise IndexError(first)


def reads_codes(device: torch.device) -> bool:
    """Whether products on `device` read packed codes, four-bit and scaled ones."""
    return device.type == "cuda" and capability_of(device) >= (8, 0)


# Shared memory that the largest tile of a W8A8 product takes.
W8A8_SHARED_BYTES = 144 * 1024
W8A8 = replace(FP8, name="fp8 in blocks of 128, rows in groups of 128", quantizes_rows=True)
# The names of a mixture's two stacks, which one operator reads.
_PARTNER = re.compile(r"(?<=\.ffn\.)(gate_up|down)$")
W8A8_VALUES = replace(W8A8, name=f"{W8A8.name}, multiplied out", storage=None)

Formats = Mapping[str, WeightFormat]
"""The formats of a model's parameters by full name; parameters that are not listed are plain.

A mixture whose stacks do not hold the shared expert lists the parameters that hold it, though they are plain.
"""

NO_FORMATS: Formats = MappingProxyType({})


def resolve_recipe(asked: str, *, has_fp8: bool, device: torch.device) -> Recipe | None:
    """The recipe for `weight_recipe` in EngineConfig; None for a checkpoint without FP8 weights.

    "auto" is W8A8, as the FP8 releases are meant to run, but W8A16 on a GPU older than Hopper and on one
    whose shared memory is too small for the tiles of W8A8's kernels (a GeForce). Raises ValueError for a
    recipe without FP8 weights, and for W8A8 on such a GPU.
    """
    if not has_fp8:
        rule, remedy = "be auto for a checkpoint without FP8 weights", "drop it or use an FP8 release"
        check(asked == "auto", "weight_recipe", rule, asked, remedy)
        return None
    if asked == "w8a16":
        return "w8a16"
    if device.type == "cpu":
        return "w8a8"
    found = capability_of(device)
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
    """The formats under `recipe` on `device` of the parameters that could stay in FP8.

    able: their names, each with its number of columns. Products quantise rows for weights whose columns are
    whole groups of 128 (a mixture's gate|up and down both or neither); other weights are W8A16. Weights that
    no operator reads in FP8 on `device` are multiplied out.
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


def kept_by_name(formats: Mapping[str, WeightFormat]) -> dict[str, list[str]]:
    """The parameters that keep packed codes or FP8, by what they hold; several names for parts of several
    kinds."""
    kept: dict[str, list[str]] = {}
    for parameter, form in formats.items():
        codes = ["four bits"] if form.group else [part.name for part in form.parts]
        for name in dict.fromkeys(codes or (["FP8"] if form.has_factors else [])):
            kept.setdefault(name, []).append(parameter)
    return kept


def describe_recipe(recipe: Recipe | None, formats: Mapping[str, WeightFormat]) -> str:
    """The log text about FP8 and packed weights; empty for a checkpoint without them."""
    if recipe is None:
        kept = kept_by_name(formats).items()
        texts = [f"{describe_kept(parameters)} in {name}" for name, parameters in kept]
        return f" ({', '.join(texts)})" if texts else ""
    is_kept = any(form.has_factors for form in formats.values())
    return f" (FP8 as {recipe}{'' if is_kept else ', multiplied out'})"


def describe_kept(names: Iterable[str]) -> str:
    """How many of the parameters `names` are matrices and how many are stacks; empty without any."""
    is_stack = [EXPERTS.search(name) is not None for name in names]
    counts = {"matrices": is_stack.count(False), "stacks of experts": is_stack.count(True)}
    return " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)


@dataclass(frozen=True)
class ParameterFactory:
    """Allocates the parameters of a module, each in its format; `name` is the module's name in the model.

    Nothing is initialised: the loader fills parameters, and nothing trains them. communicator: connects the
    ranks if the module holds one of several shards, else None.
    """

    dtype: torch.dtype
    device: torch.device
    formats: Formats
    name: str = ""
    communicator: Communicator | None = None

    def part(self, name: str) -> ParameterFactory:
        """The factory of this module's submodule `name`."""
        return replace(self, name=f"{self.name}{name}.")

    def whole(self) -> ParameterFactory:
        """This factory for a module that every rank holds whole."""
        return replace(self, communicator=None)

    def format_of(self, name: str) -> WeightFormat:
        """The format of this module's parameter `name`."""
        return self.formats.get(self.name + name, PLAIN)

    def lists(self, name: str) -> bool:
        """Whether the formats list this module's parameter `name`, in any format."""
        return self.name + name in self.formats

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised parameter without a format, in the activations' dtype or another."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)

    def add_weight(self, module: nn.Module, name: str, *shape: int, like: str | None = None) -> None:
        """Register in `module` the weight `name` [..., N, K] and its factors `name`_scale, None without any.

        The format is that of the parameter `like`, or of `name` itself.
        """
        form = self.format_of(like or name)
        module.register_parameter(name, self.empty(*form.stored_shape(shape), dtype=form.storage))
        scale = self.empty(*form.scale_shape(shape), dtype=form.scale_dtype) if form.has_factors else None
        module.register_parameter(f"{name}_scale", scale)
