"""What drafts read in place of the target's head and of the MTP layer's linears: fewer rows, FP8 or int4.

A draft decides no token, so rounding and missing ids may cost acceptance and never change a token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from compiled_mtp.errors import check
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.weight_format import FP8, PLAIN, W8A8, Formats, four_bits, resolve_recipe
from compiled_mtp.ops import int4
from compiled_mtp.ops.device import memory_of
from compiled_mtp.ops.fp8 import FP8_BLOCK, quantize_weight, scale_shape

HeadDtype = Literal["weights", "float8_e4m3fn", "int4"]
"""What the rows of a draft head are rounded to; "weights" for rows as they are."""

# The largest share of a GPU's memory that "auto" takes for a copy of the whole head.
_HEAD_SHARE = 1 / 32
_INT4 = four_bits(int4.UNIT, torch.bfloat16)


class DraftHead(NamedTuple):
    """weight [n, H] of the target's dtype, or FP8 with scale [ceil(n/128), ceil(H/128)], or words of ops.int4
    [n, H / 4] with groups [H / 128, n, 2]; None: the target's.

    ids [n] int64: those of the rows; None for 0, 1, ... quantizes_rows: hidden states are multiplied in e4m3.
    """

    weight: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    quantizes_rows: bool = False


@dataclass(frozen=True)
class DraftPlan:
    """Which rows of the target's head drafts read, ascending, None for all, and which weights are rounded.

    head: unless "weights", drafts read a copy of these rows, rounded to FP8 or to int4. has_fp8_linears: FP8
    weights replace the MTP layer's linears, except those that the checkpoint stores in a format of its own.
    is_multiplied_out: no product of the device reads them, so the rounded values keep the weights' dtype.
    quantizes_rows: products of FP8 weights quantise their rows, if these are whole groups of 128 columns on
    each of `world` ranks.
    """

    ids: tuple[int, ...] | None = None
    head: HeadDtype = "weights"
    has_fp8_linears: bool = False
    is_multiplied_out: bool = False
    quantizes_rows: bool = False
    world: int = 1

    @property
    def num_ids(self) -> int | None:
        """How many rows, None for all."""
        return None if self.ids is None else len(self.ids)

    @property
    def dtype(self) -> HeadDtype:
        """The head's dtype, or that of the linears where the head's rows stay as they are."""
        return "float8_e4m3fn" if self.head == "weights" and self.has_fp8_linears else self.head

    def make_head(
        self, take_rows: Callable[[torch.Tensor | None], torch.Tensor], device: torch.device
    ) -> DraftHead:
        """Return the draft head on `device`, copied from the target's head [V, H].

        take_rows(ids [n]) gives rows of the whole head, take_rows(None) all rows, or those that a rank has.
        """
        ids = None
        if self.ids is not None:
            ids = torch.tensor(self.ids, dtype=torch.int64, device=device)
        if self.head != "weights":
            weight, scale = self._rounded(take_rows(ids), self.head)
            is_fp8 = self.head == "float8_e4m3fn" and scale is not None
            is_quantised = self.quantizes_rows and is_fp8 and weight.shape[1] % FP8_BLOCK == 0
            return DraftHead(weight, scale, ids, is_quantised)
        return DraftHead() if ids is None else DraftHead(take_rows(ids), None, ids)

    def head_bytes(self, num_rows: int, width: int, itemsize: int) -> int:
        """What `make_head` takes of the device's memory, of a head [num_rows, width] of such items."""
        rows = self.num_ids or num_rows
        if self.head == "weights" or self.is_multiplied_out:
            return rows * width * itemsize if self.head != "weights" or self.ids is not None else 0
        if self.head == "int4":
            return _INT4.bytes_of(range(rows), width)
        blocks = scale_shape((rows, width))
        return rows * width + blocks[0] * blocks[1] * torch.float32.itemsize

    def formats(self, model: ModelConfig, formats: Formats) -> Formats:
        """`formats`, and FP8 for the MTP layer's linears that become FP8 in memory."""
        if not self.has_fp8_linears or self.is_multiplied_out:
            return formats
        widths, form = _linears(model), W8A8 if self.quantizes_rows else FP8
        narrow = {name for name, width in widths.items() if width % (FP8_BLOCK * self.world)}
        if model.is_moe and any(".ffn." in name for name in narrow):
            # One operator reads a mixture's two stacks.
            narrow |= {name for name in widths if ".ffn." in name}
        linears = {name: FP8 if name in narrow else form for name in widths}
        return {**linears, **formats}

    @torch.no_grad()
    def quantize(
        self,
        draft: DraftModel,
        model: ModelConfig,
        formats: Formats,
        allocate: Callable[[Formats], DraftModel],
    ) -> DraftModel:
        """The draft model to decode with: `draft`, whose `formats` these are, or one with FP8 linears.

        `allocate` makes a draft model of other formats. Mutates `draft` where FP8 is multiplied out.
        """
        if not self.has_fp8_linears:
            return draft
        loaded = {f"mtp.{name}": parameter.data for name, parameter in draft.named_parameters()}
        if self.is_multiplied_out:
            for name in _linears(model):
                if name not in formats:
                    for matrix in _matrices(loaded[name]):
                        matrix.copy_(self._rounded(matrix, "float8_e4m3fn")[0])
            return draft
        made = allocate(self.formats(model, formats))
        parameters = {f"mtp.{name}": parameter.data for name, parameter in made.named_parameters()}
        for name, source in loaded.items():
            if parameters[name].dtype == source.dtype:
                parameters[name].copy_(source)
                continue
            stacks = (parameters[name], parameters[f"{name}_scale"], source)
            for weight, scale, matrix in zip(*map(_matrices, stacks), strict=True):
                for own, quantised in zip((weight, scale), quantize_weight(matrix), strict=True):
                    own.copy_(quantised)
        return made

    def describe(self, head_bytes: int) -> str:
        """What the line of a start says of drafts; nothing where they read the weights as they are."""
        parts, dtypes = [], []
        if self.has_fp8_linears:
            parts, dtypes = ["the MTP layer"], ["FP8"]
        if self.head != "weights":
            parts.append(f"a head of {head_bytes / 2**20:.1f} MiB")
            dtypes.append("int4" if self.head == "int4" else "FP8")
        how = ", multiplied out" if self.is_multiplied_out else ""
        return (
            f", drafts in {' and '.join(dict.fromkeys(dtypes))}{how} ({' and '.join(parts)})" if parts else ""
        )

    def _rounded(self, weight: torch.Tensor, dtype: HeadDtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A matrix in FP8 or int4 with its factors, or its rounded values."""
        if dtype == "int4":
            words, groups = int4.quantize_weight(weight)
            if not self.is_multiplied_out:
                return words, groups
            return int4.dequantize(words, groups).to(weight.dtype), None
        values, scale = quantize_weight(weight)
        if not self.is_multiplied_out:
            return values, scale
        return FP8.dequantize(values, scale, weight.dtype), None


def plan_drafts(
    asked: str,
    model: ModelConfig,
    ids: tuple[int, ...] | None,
    formats: Formats,
    *,
    dtype: torch.dtype,
    device: torch.device,
    world: int,
) -> DraftPlan:
    """The plan for `draft_dtype` in EngineConfig, of drafts from `ids` (None for all) on `world` ranks.

    "auto" rounds drafts' weights of bfloat16 models on a GPU. The layer becomes FP8 where the GPU converts
    it. The head's copy is FP8 too; it is int4 where the checkpoint has packed weights, where the GPU does not
    convert FP8, and where an FP8 copy of the whole head exceeds a 32nd of the memory, free or not, that the
    process may take of the GPU. So every start decides alike. A head that is stored in fewer bits than
    bfloat16 is read as it is. Rows are quantised wherever FP8 releases quantise them. Raises ValueError for a
    dtype that the GPU's products do not read, and for int4 rows that are no whole blocks.
    """
    if asked == "weights" or (asked == "auto" and dtype != torch.bfloat16):
        return DraftPlan(ids)
    reads_fp8, is_cpu = FP8.is_read_on(device), device.type == "cpu"
    reads_int4 = _INT4.is_read_on(device) and dtype == torch.bfloat16
    if asked == "auto" and not (reads_fp8 or reads_int4):
        return DraftPlan(ids)
    _check_asked(asked, reads_fp8 or is_cpu, reads_int4 or is_cpu)
    layer = DraftPlan(
        ids,
        has_fp8_linears=(reads_fp8 or is_cpu) and any(name not in formats for name in _linears(model)),
        is_multiplied_out=is_cpu and not reads_fp8,
        quantizes_rows=resolve_recipe("auto", has_fp8=True, device=device) == "w8a8",
        world=world,
    )
    if formats.get(_head(model), PLAIN).has_factors:
        return layer
    in_fp8, in_int4 = replace(layer, head="float8_e4m3fn"), _with_int4_head(layer, model)
    if asked == "float8_e4m3fn":
        return in_fp8
    if asked == "int4":
        rule = (
            f"be float8_e4m3fn, auto or weights for {model.vocab_size // world} rows of {model.hidden_size}"
        )
        multiples = f"int4 takes multiples of {int4.ROWS} rows and of {int4.UNIT} columns"
        check(in_int4 is not None, "draft_dtype", rule, asked, multiples)
        return in_int4 or layer
    is_packed = any(form.is_packed for form in formats.values())
    plans = [in_fp8] if reads_fp8 else []
    if in_int4 is not None and reads_int4:
        plans.insert(0 if is_packed else len(plans), in_int4)
    # Rows of draft_vocab are a copy too, and larger in bfloat16.
    most = memory_of(device) * _HEAD_SHARE if ids is None else math.inf
    shape = (model.vocab_size // world, model.hidden_size, dtype.itemsize)
    return next((plan for plan in plans if plan.head_bytes(*shape) <= most), layer)


def _check_asked(asked: str, takes_fp8: bool, takes_int4: bool) -> None:
    if asked == "float8_e4m3fn":
        remedy = "its kernels need compute capability 8.9, pass auto"
        check(takes_fp8, "draft_dtype", "be auto, int4 or weights on this GPU", asked, remedy)
    elif asked == "int4":
        limit = "its kernels need compute capability 8.0 and bfloat16, pass auto"
        check(takes_int4, "draft_dtype", "be auto or weights on this GPU", asked, limit)


def _with_int4_head(plan: DraftPlan, model: ModelConfig) -> DraftPlan | None:
    """`plan` with a head in int4; None where its rows are no whole blocks of codes. Ids are filled up with
    the lowest others."""
    ids, num_rows = plan.ids, model.vocab_size // plan.world
    if ids is not None:
        missing = itertools.islice(sorted({*range(model.vocab_size)} - {*ids}), -len(ids) % int4.ROWS)
        ids = tuple(sorted((*ids, *missing)))
        num_rows = len(ids)
    if num_rows % int4.ROWS or model.hidden_size % int4.UNIT:
        return None
    return replace(plan, ids=ids, head="int4")


def _head(model: ModelConfig) -> str:
    return "embed.weight" if model.tie_word_embeddings else "lm_head.weight"


def _linears(model: ModelConfig) -> dict[str, int]:
    """The weights of the draft model that FP8 products read, all but the router's, and their columns."""
    hidden, ending = model.hidden_size, "" if model.is_moe else ".weight"
    return {
        "mtp.fc.weight": 2 * hidden,
        "mtp.layer.mixer.qkv.weight": hidden,
        "mtp.layer.mixer.o_proj.weight": model.num_q_heads * model.head_dim,
        f"mtp.layer.ffn.gate_up{ending}": hidden,
        f"mtp.layer.ffn.down{ending}": model.moe_intermediate_size
        if model.is_moe
        else model.intermediate_size,
    }


def _matrices(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A weight's matrices: the weight itself, or the matrices of a stack."""
    return weight.unbind() if weight.dim() == 3 else (weight,)
