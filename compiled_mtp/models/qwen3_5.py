"""The target model: one module for Qwen3-Next, Qwen3.5, Qwen3.5-MoE and Qwen3.6, which differ in config
alone."""

from __future__ import annotations

import torch
from torch import nn

from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.state_cache import StateCache
from compiled_mtp.communicators.communicator import Communicator
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.layers import DecoderLayer, RMSNorm
from compiled_mtp.models.linear import Linear
from compiled_mtp.models.resident import choose_resident
from compiled_mtp.models.rows import Rows
from compiled_mtp.models.weight_format import NO_FORMATS, Formats, ParameterFactory
from compiled_mtp.ops.int4 import values_of_rows
from compiled_mtp.ops.linear import linear
from compiled_mtp.ops.linear_blocks import block_rows, linear_blocks
from compiled_mtp.ops.linear_w4a16 import linear_w4a16

# Rows of a packed head that are decoded at a time, each to float32.
_ROWS_AT_ONCE = 4096


class Embedding(nn.Module):
    """Token table [vocab_size, hidden_size], plain or in scaled codes; also the output head of a tied
    model."""

    weight: nn.Parameter
    weight_scale: nn.Parameter | None

    def __init__(self, make: ParameterFactory, config: ModelConfig) -> None:
        super().__init__()
        make.add_weight(self, "weight", config.vocab_size, config.hidden_size)
        parts = make.format_of("weight").parts
        self.kind = parts[0].name if parts else None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            return torch.index_select(self.weight, 0, token_ids)
        assert self.weight_scale is not None
        return block_rows(token_ids, self.weight, self.weight_scale, self.kind)

    def table_for(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A table, and the rows of it that are the embeddings of `token_ids`.

        It is the weight, or where that is packed, the embeddings themselves: no copy of the weight exists.
        Embeddings [M, hidden_size] in place of ids are a table of their own.
        """
        if token_ids.is_floating_point():
            return token_ids, torch.arange(token_ids.shape[0], device=token_ids.device)
        if self.kind is None:
            return self.weight, token_ids
        return self(token_ids), torch.arange(token_ids.shape[0], device=token_ids.device)


class TargetModel(nn.Module):
    """Embedding, hybrid layers, final norm and head.

    `forward(inputs, rows, kv_cache, state_cache, cos_sin)` returns the hidden states after the final norm [M,
    hidden_size] and writes keys, values, conv inputs, GDN states and ring entries of its rows to the caches.
    `inputs`: token ids [M] int64, or embeddings [M, hidden_size] in the weights' dtype; for a round a torch
    kernel, which is a fence (`Launch`), must make embeddings after the kernel that makes the rows' positions.
    `formats`: those of the parameters by their full names.
    `communicator`: connects the ranks if `config` is one rank's share. Each rank then has some rows of the
    head, and all ranks get all logits.
    """

    tied_head: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        formats: Formats = NO_FORMATS,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__()
        make = ParameterFactory(dtype, device, formats, communicator=communicator)
        self.communicator = communicator
        self.embed = Embedding(make.part("embed"), config)
        self.layers = nn.ModuleList(
            DecoderLayer(make.part(f"layers.{i}"), config, is_full_attention=is_full_attention)
            for i, is_full_attention in enumerate(config.is_full_attention)
        )
        self.norm = RMSNorm(make.part("norm"), config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(make.part("lm_head"), config.hidden_size, config.head_vocab_size)
        self.is_tied = config.tie_word_embeddings
        if communicator is not None and self.is_tied:
            # Always the same tensor object: a CPU attaches the packed weight to it.
            own = self.embed.weight.chunk(communicator.world)[communicator.rank]
            self.register_buffer("tied_head", own, persistent=False)
        self.vocab_size = config.vocab_size
        choose_resident(self)

    @property
    def head_codes(self) -> tuple[torch.Tensor, torch.Tensor, str] | None:
        """Words, scales and kind of a head in scaled codes; None for another one."""
        if self.is_tied:
            weight, scale, kind = self.embed.weight, self.embed.weight_scale, self.embed.kind
        else:
            head = self.lm_head
            weight, scale = head.weight, head.weight_scale
            kind = None if head.parts is None else head.parts.name
        if kind is None:
            return None
        assert scale is not None
        return weight, scale, kind

    @property
    def is_head_packed(self) -> bool:
        """Whether the head is packed codes, of either kind."""
        return self.head_codes is not None or (not self.is_tied and self.lm_head.has_codes)

    @property
    def head_bytes(self) -> int:
        """Bytes of the head, or of this rank's rows of it, with scales."""
        scale = self.embed.weight_scale if self.is_tied else self.lm_head.weight_scale
        return self.head_weight.nbytes + (0 if scale is None else scale.nbytes)

    @property
    def num_head_rows(self) -> int:
        """Rows of the head, or of this rank's part of it."""
        return self.head_weight.shape[0]

    @property
    def head_weight(self) -> torch.Tensor:
        """The output head of target and draft [vocab_size, hidden_size], or this rank's rows of it; the words
        of a packed head."""
        if not self.is_tied:
            return self.lm_head.weight
        if self.communicator is not None:
            return self.tied_head
        weight: torch.Tensor = self.embed.weight
        return weight

    def head_rows(self, ids: torch.Tensor | None) -> torch.Tensor:
        """Rows [n, hidden_size] of the whole head for ids [n] int64; every rank must pass the same ids. None:
        all rows, or with several ranks this rank's."""
        if ids is None and not self.is_head_packed:
            return self.head_weight
        size = self.num_head_rows
        if ids is None or self.communicator is None:
            every = torch.arange(size, device=self.head_weight.device)
            return self._own_head_rows(every if ids is None else ids)
        own = self._own_head_rows((ids - self.communicator.rank * size).clamp(0, size - 1))
        return self.communicator.gather(own)[ids // size, torch.arange(len(ids), device=ids.device)]

    def _own_head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's part of the head, decoded if they are packed."""
        if self.head_codes is not None:
            return block_rows(ids, *self.head_codes)
        if not self.is_head_packed:
            return self.head_weight[ids]
        rows = [values_of_rows(*self.lm_head.codes, some) for some in ids.split(_ROWS_AT_ONCE)]
        return torch.cat([some.to(self.norm.weight.dtype) for some in rows])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [M, vocab_size] of hidden states [M, hidden_size], also of prompts: M is small."""
        codes = self.head_codes
        if codes is not None:
            return linear_blocks(hidden, *codes, True)
        if self.is_head_packed:
            logits = linear_w4a16(hidden, *self.lm_head.codes, True)
            return logits if self.communicator is None else self.communicator.gather_columns(logits)
        head, communicator = self.head_weight, self.communicator
        if communicator is None:
            return linear(hidden, head, None, True)
        return communicator.gather_columns(
            linear(hidden, head, None, True, False, len(head) * communicator.world)
        )

    def forward(
        self,
        inputs: torch.Tensor,
        rows: Rows,
        kv_cache: KVCache,
        state_cache: StateCache,
        cos_sin: torch.Tensor,
    ) -> torch.Tensor:
        x, residual = inputs if inputs.is_floating_point() else self.embed(inputs), None
        attention_layer = gdn_layer = 0
        for layer in self.layers:
            if layer.is_full_attention:
                cache = kv_cache.layers[attention_layer]
                attention_layer += 1
            else:
                cache = state_cache.layers[gdn_layer]
                gdn_layer += 1
            x, residual = layer(x, residual, rows, cache, cos_sin)
        return self.norm.add(x, residual)[0]
