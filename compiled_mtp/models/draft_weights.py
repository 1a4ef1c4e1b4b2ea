"""What drafts read in place of the target's head and of the MTP layer's linears: fewer rows, or FP8.

A draft decides no token, so rounding and missing ids may cost acceptance and never change a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from compiled_mtp.errors import check
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.weight_format import FP8, PLAIN, W8A8, Formats, resolve_recipe
from compiled_mtp.ops.device import memory_of
from compiled_mtp.ops.fp8 import FP8_BLOCK, quantize_weight, scale_shape

# The largest share of a GPU's memory that "auto" takes for an FP8 copy of the whole head.
_HEAD_SHARE = 1 / 32


class DraftHead(NamedTuple):
    """weight [n, H] of the target's dtype, or FP8 with scale [ceil(n/128), ceil(H/128)]; None: the target's.

    ids [n] int64: those of the rows; None for 0, 1, ... quantizes_rows: hidden states are multiplied in e4m3.
    """

    weight: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    quantizes_rows: bool = False


@dataclass(frozen=True)
class DraftPlan:
    """Which rows of the target's head drafts read, ascending, None for all, and which weights are FP8.

    has_fp8_head: drafts read a copy of these rows, rounded to FP8. has_fp8_linears: the MTP layer's linears
    are replaced by theirs, except those that the checkpoint stores in a format of its own.
    is_multiplied_out: no product of the device reads FP8, so the rounded values keep the weights' dtype.
    quantizes_rows: products of FP8 weights quantise their rows, if these are whole groups of 128 columns on
    each of `world` ranks.
    """

    ids: tuple[int, ...] | None = None
    has_fp8_head: bool = False
    has_fp8_linears: bool = False
    is_multiplied_out: bool = False
    quantizes_rows: bool = False
    world: int = 1

    @property
    def num_ids(self) -> int | None:
        """How many rows, None for all."""
        return None if self.ids is None else len(self.ids)

    def make_head(
        self, take_rows: Callable[[torch.Tensor | None], torch.Tensor], device: torch.device
    ) -> DraftHead:
        """Return the draft head on `device`, copied from the target's head [V, H].

        take_rows(ids [n]) gives rows of the whole head, take_rows(None) all rows, or those that a rank has.
        """
        ids = None
        if self.ids is not None:
            ids = torch.tensor(self.ids, dtype=torch.int64, device=device)
        if self.has_fp8_head:
            weight, scale = self._rounded(take_rows(ids))
            is_quantised = self.quantizes_rows and scale is not None and weight.shape[1] % FP8_BLOCK == 0
            return DraftHead(weight, scale, ids, is_quantised)
        return DraftHead() if ids is None else DraftHead(take_rows(ids), None, ids)

    def head_bytes(self, num_rows: int, width: int, itemsize: int) -> int:
        """What `make_head` takes of the device's memory, of a head [num_rows, width] of such items."""
        rows = self.num_ids or num_rows
        if not self.has_fp8_head or self.is_multiplied_out:
            return rows * width * itemsize if self.has_fp8_head or self.ids is not None else 0
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
                        matrix.copy_(self._rounded(matrix)[0])
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
        parts = ["the MTP layer"] if self.has_fp8_linears else []
        if self.has_fp8_head:
            parts.append(f"a head of {head_bytes / 2**20:.1f} MiB")
        how = ", multiplied out" if self.is_multiplied_out else ""
        return f", drafts in FP8{how} ({' and '.join(parts)})" if parts else ""

    def _rounded(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A matrix in FP8 with its factors, or its rounded values."""
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

    "auto" is FP8 for bfloat16 models on a GPU that converts it; a copy of the whole head also has to fit a
    32nd of the memory, free or not, that the process may take of the GPU, so that every start decides alike.
    A head that is stored in fewer bits than bfloat16 is read as it is. Rows are quantised wherever FP8
    releases quantise them. Raises ValueError for FP8 on a GPU that cannot convert it.
    """
    if asked == "weights" or (asked == "auto" and dtype != torch.bfloat16):
        return DraftPlan(ids)
    is_read = FP8.is_read_on(device)
    if asked == "auto" and not is_read:
        return DraftPlan(ids)
    remedy = "its kernels need compute capability 8.9, pass auto"
    can_have = is_read or device.type == "cpu"
    check(can_have, "draft_dtype", "be auto or weights on this GPU", asked, remedy)
    has_head = not formats.get(_head(model), PLAIN).has_factors
    plan = DraftPlan(
        ids,
        has_head,
        has_fp8_linears=any(name not in formats for name in _linears(model)),
        is_multiplied_out=not is_read,
        quantizes_rows=resolve_recipe("auto", has_fp8=True, device=device) == "w8a8",
        world=world,
    )
    # Without FP8 the rows of draft_vocab are a copy too, twice as large.
    if asked == "auto" and has_head and ids is None:
        most = memory_of(device) * _HEAD_SHARE
        size = plan.head_bytes(model.vocab_size // world, model.hidden_size, dtype.itemsize)
        return replace(plan, has_fp8_head=size <= most)
    return plan


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
