"""From which rows of which GGUF tensors each tensor of the original checkpoint is made.

llama.cpp's converter renames tensors, adds 1 to norms, stores -exp(A_log), splits q|k|v|z of Qwen3-Next and
stacks experts. It reorders the value heads of Qwen3.5 in tiles: the first value head of every key head, then
the second. Ollama's does the same with other names: `ssm_dt`, and an MTP head under `mtp.`, in which only the
norms of its layer are changed. This module describes how to undo all that, as data: which rows to take, in
which order, and how to change their values. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from compiled_mtp.errors import check, fail
from compiled_mtp.gguf.config import architecture_of, hf_config
from compiled_mtp.gguf.container import Container, Tensor

Change = Literal["none", "minus 1", "log of minus"]

_BLOCK = re.compile(r"blk\.(\d+)\.(.*)")
# The MTP layer in Ollama's files; the head's other tensors have their names in the checkpoint.
_OLLAMA_MTP = re.compile(r"mtp\.layers\.0\.(.*)")
# The vision tower in Ollama's files.
_TOWER = ("v.", "mm.")
_TOP = {"token_embd.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}
_LAYER = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}
# Norms, which GGUF stores as 1 + weight.
_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_MTP = {"nextn.eh_proj.weight": "mtp.fc.weight"}
_MTP_NORMS = {
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}
# Tensors with one row, or one value, per value head.
_PER_HEAD = {
    "ssm_alpha.weight": "in_proj_a.weight",
    "ssm_beta.weight": "in_proj_b.weight",
    "ssm_dt.bias": "dt_bias",
    "ssm_dt": "dt_bias",
    "ssm_a": "A_log",
}
# The projections that a stack holds for each expert, one after another.
_EXPERTS = {
    "ffn_gate_exps.weight": ("gate_proj",),
    "ffn_up_exps.weight": ("up_proj",),
    "ffn_gate_up_exps.weight": ("gate_proj", "up_proj"),
    "ffn_down_exps.weight": ("down_proj",),
}


@dataclass(frozen=True, slots=True)
class Run:
    """`count` rows of `tensor` from row `start` on; the rows of a stack of matrices are numbered through."""

    tensor: Tensor
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Source:
    """How to make a tensor of the checkpoint: concatenate the rows of `runs` and give them `shape`.

    tiles: (tiles, key heads) of a tensor whose columns are stored as [tiles, key heads, width of a head] and
    must become [key heads, tiles, width]. change: the operation that restores the values. scale: the tensor
    that holds a factor for all values, and the factor's index in it.
    """

    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    change: Change = "none"
    tiles: tuple[int, int] | None = None
    scale: tuple[Tensor, int] | None = None


def checkpoint_sources(container: Container) -> dict[str, Source]:
    """The source of every tensor by its name in the checkpoint, without the trunk's prefix, in file order.

    The vision tower of Ollama's files is left out. A tensor without a name there keeps its own name, and the
    loader refuses it as unused. Raises ValueError as `hf_config` does, and for two tensors of one name there.
    """
    sources: dict[str, Source] = {}
    for target, source in _Names(container).all():
        if target in sources:
            names = " and ".join(one.runs[0].tensor.name for one in (sources[target], source))
            raise fail(str(container.path), f"hold {target} once", names, "convert the model again")
        sources[target] = source
    return sources


class _Names:
    def __init__(self, container: Container) -> None:
        config = hf_config(container)
        self.tensors: Mapping[str, Tensor] = container.tensors
        self.is_next = architecture_of(container) == "qwen3next"
        self.num_layers = int(config["num_hidden_layers"])
        self.has_mtp = bool(config["mtp_num_hidden_layers"])
        self.key_heads = int(config["linear_num_key_heads"])
        self.value_heads = int(config["linear_num_value_heads"])
        self.key_dim, self.value_dim = (int(config[f"linear_{n}_head_dim"]) for n in ("key", "value"))
        self.per_key = self.value_heads // self.key_heads

    def all(self) -> Iterator[tuple[str, Source]]:
        for name, tensor in self.tensors.items():
            if self._is_factor(name) or name.startswith(_TOWER):
                continue
            targets = list(self._targets(name, tensor))
            scale = self.tensors.get(name.removesuffix("weight") + "scale")
            for number, (target, source) in enumerate(targets):
                if scale is not None and name.endswith(".weight"):
                    source = replace(source, scale=(scale, self._index(scale, tensor, number, len(targets))))
                yield target, source

    def _index(self, scale: Tensor, tensor: Tensor, number: int, count: int) -> int:
        """The index in `scale` of the factor of target `number` of `count`: `scale` has one factor in all or
        one per expert."""
        experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
        rule = f"be 1 or {experts} factors in F32"
        is_fine = scale.shape in ((1,), (experts,)) and scale.type.name == "F32"
        got = f"{scale.type.name} of shape {list(scale.shape)} in {scale.file}"
        check(is_fine, scale.name, rule, got, "convert the model again")
        return number * scale.shape[0] // count

    def _is_factor(self, name: str) -> bool:
        """Whether the tensor belongs to a weight: its NVFP4 factor, or the factor of its activations, which
        is not used because activations are not quantised."""
        stem = name.removesuffix(".input_scale").removesuffix(".scale")
        return stem != name and f"{stem}.weight" in self.tensors

    def _targets(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Source]]:
        found, own = _BLOCK.fullmatch(name), _OLLAMA_MTP.fullmatch(name)
        whole = Source(tensor.shape, (Run(tensor, 0, _num_rows(tensor)),))
        layer, part = (int(found[1]), found[2]) if found else (self.num_layers, own[1] if own else name)
        is_mtp = self.has_mtp and layer == self.num_layers
        prefix = "mtp.layers.0." if is_mtp else f"layers.{layer}."
        if found is None and own is None:
            change: Change = "minus 1" if name == "output_norm.weight" else "none"
            yield _TOP.get(name, "norm.weight" if change != "none" else name), replace(whole, change=change)
        elif is_mtp and part in _MTP:
            yield _MTP[part], whole
        elif is_mtp and part in _MTP_NORMS:
            yield _MTP_NORMS[part], replace(whole, change="minus 1")
        elif not is_mtp and layer >= self.num_layers:
            yield name, whole
        elif part in _LAYER:
            yield prefix + _LAYER[part], whole
        elif part in _NORMS:
            yield prefix + _NORMS[part], replace(whole, change="minus 1")
        elif part == "ffn_gate_inp_shexp.weight":
            row = Source((1, tensor.shape[-1]), (Run(tensor, 0, 1),))
            yield prefix + "mlp.shared_expert_gate.weight", row
        elif part in _EXPERTS and len(tensor.shape) == 3:
            yield from self._experts(prefix, tensor, _EXPERTS[part])
        else:
            yield from self._linear_attention(name, prefix, part, whole)

    def _experts(self, prefix: str, tensor: Tensor, parts: tuple[str, ...]) -> Iterator[tuple[str, Source]]:
        count, rows, columns = tensor.shape
        each = rows // len(parts)
        for expert in range(count):
            for number, part in enumerate(parts):
                run = Run(tensor, expert * rows + number * each, each)
                yield f"{prefix}mlp.experts.{expert}.{part}.weight", Source((each, columns), (run,))

    def _linear_attention(
        self, name: str, prefix: str, part: str, whole: Source
    ) -> Iterator[tuple[str, Source]]:
        """The targets of a tensor of a GDN layer; an unknown tensor keeps its name."""
        prefix += "linear_attn."
        tensor = whole.runs[0].tensor
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        values = self.value_heads * self.value_dim
        rows = _num_rows(tensor)
        if part in _PER_HEAD and rows == self.value_heads:
            change: Change = "log of minus" if part == "ssm_a" else "none"
            yield prefix + _PER_HEAD[part], replace(self._untiled(whole, 0, 1), change=change)
        elif part == "ssm_conv1d.weight" and rows == channels:
            source = self._untiled(whole, channels - values, self.value_dim)
            yield prefix + "conv1d.weight", replace(source, shape=(channels, 1, tensor.shape[-1]))
        elif part == "ssm_out.weight" and tensor.shape[-1] == values:
            tiles = (self.per_key, self.key_heads) if self._is_tiled else None
            yield prefix + "out_proj.weight", replace(whole, tiles=tiles)
        elif self.is_next and part == "ssm_ba.weight":
            yield prefix + "in_proj_ba.weight", whole
        elif self.is_next and part == "ssm_in.weight":
            yield prefix + "in_proj_qkvz.weight", whole
        elif self.is_next and part == "attn_qkv.weight" and rows == channels:
            yield from self._interleaved(name, prefix, whole)
        elif self.is_next and part == "attn_gate.weight" and self._is_paired(name):
            return
        elif not self.is_next and part == "attn_qkv.weight" and rows == channels:
            source = self._untiled(whole, channels - values, self.value_dim)
            yield prefix + "in_proj_qkv.weight", source
        elif not self.is_next and part == "attn_gate.weight" and rows == values:
            yield prefix + "in_proj_z.weight", self._untiled(whole, 0, self.value_dim)
        else:
            # Unknown, or with a shape that contradicts the config.
            yield name, whole

    @property
    def _is_tiled(self) -> bool:
        return not self.is_next and self.per_key > 1

    def _untiled(self, source: Source, first: int, width: int) -> Source:
        """`source` with its value heads, each of `width` rows from row `first` on, in the checkpoint's
        order."""
        if not self._is_tiled:
            return source
        tensor = source.runs[0].tensor
        heads = range(self.value_heads)
        tiled = [head % self.per_key * self.key_heads + head // self.per_key for head in heads]
        runs = [Run(tensor, 0, first)] if first else []
        return replace(source, runs=(*runs, *(Run(tensor, first + t * width, width) for t in tiled)))

    def _is_paired(self, gate: str) -> bool:
        """Whether the gate z becomes part of in_proj_qkvz: its layer has attn_qkv, and its rows fit."""
        qkv = self.tensors.get(gate.replace("attn_gate", "attn_qkv"))
        values = self.value_heads * self.value_dim
        return qkv is not None and _num_rows(self.tensors[gate]) == values

    def _interleaved(self, name: str, prefix: str, whole: Source) -> Iterator[tuple[str, Source]]:
        """in_proj_qkvz from attn_qkv and attn_gate: q|k|v|z of one key head after another, as in
        Qwen3-Next."""
        gate_name = name.replace("attn_qkv", "attn_gate")
        gate, qkv = self.tensors.get(gate_name), whole.runs[0].tensor
        if gate is None or not self._is_paired(gate_name) or gate.shape[-1] != qkv.shape[-1]:
            yield name, whole
            return
        key, value = self.key_dim, self.per_key * self.value_dim
        keys = self.key_heads * key
        runs: list[Run] = []
        for head in range(self.key_heads):
            runs += [Run(qkv, head * key, key), Run(qkv, keys + head * key, key)]
            runs += [Run(qkv, 2 * keys + head * value, value), Run(gate, head * value, value)]
        rows = _num_rows(qkv) + _num_rows(gate)
        yield prefix + "in_proj_qkvz.weight", Source((rows, qkv.shape[-1]), tuple(runs))


def _num_rows(tensor: Tensor) -> int:
    """The number of rows of a matrix or a stack of matrices, or of values of a vector."""
    return math.prod(tensor.shape[:-1] or tensor.shape)
