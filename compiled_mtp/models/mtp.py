"""The draft model: the checkpoint's MTP layer, which reads a token and the hidden state before it."""

from __future__ import annotations

import torch
from torch import nn

from compiled_mtp.cache.kv_cache import KVLayer
from compiled_mtp.communicators.communicator import Communicator
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.layers import Attention, DecoderLayer, RMSNorm
from compiled_mtp.models.linear import Linear
from compiled_mtp.models.resident import choose_resident
from compiled_mtp.models.rows import Rows
from compiled_mtp.models.weight_format import NO_FORMATS, Formats, ParameterFactory
from compiled_mtp.ops.rms_norm import pair_norm

# Entry j of the draft's KV is made of the pair (token j, hidden j - 1): entry 0 has none and is never read.
FIRST_DRAFT_KEY = 1


class DraftModel(nn.Module):
    """h' = norm(layer(fc [norm_e(embedding); norm_h(hidden)])), the embedding half first.

    `forward(table [V, H], token_ids [M], hidden [M, H], rows, kv, cos_sin, kept_rows)` returns h' [M, H], or
    only the rows kept_rows [N] int64 of it. The shared head reads h', and the next pass of a chain takes it
    as `hidden`. `table` is the target's embedding; `hidden` of a first pass is the target's hidden state
    after its final norm. Writes the pairs' keys and values into `kv`. To pass embeddings [M, H] instead of
    token ids, pass them as the table with the ids 0 .. M-1. `formats`: those of the parameters by their full
    names, which begin with 'mtp.' here. `communicator`: connects the ranks if `config` is one rank's share.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        formats: Formats = NO_FORMATS,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__()
        make = ParameterFactory(dtype, device, formats, "mtp.", communicator)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Linear(make.part("fc").whole(), 2 * size, size)
        self.norm_embedding = RMSNorm(make.part("norm_embedding"), size, eps)
        self.norm_hidden = RMSNorm(make.part("norm_hidden"), size, eps)
        layer = make.part("layer")
        self.layer = DecoderLayer(layer, config, is_full_attention=True, first_key=FIRST_DRAFT_KEY)
        self.norm = RMSNorm(make.part("norm"), size, eps)
        choose_resident(self)

    def forward(
        self,
        table: torch.Tensor,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        rows: Rows,
        kv: KVLayer,
        cos_sin: torch.Tensor,
        kept_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x, residual = self.layer(self._pairs(table, token_ids, hidden, rows), None, rows, kv, cos_sin)
        return self.norm.add(x, residual, kept_rows)[0]

    def write_keys(
        self,
        table: torch.Tensor,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        rows: Rows,
        kv: KVLayer,
        cos_sin: torch.Tensor,
    ) -> None:
        """Write the pairs' keys and values into `kv` as `forward` does, and compute nothing else: in a model
        of one layer they depend on the pair alone."""
        x = self._pairs(table, token_ids, hidden, rows)
        attention = self.layer.mixer
        assert isinstance(attention, Attention)
        attention.write_keys(self.layer.input_norm.add(x, None)[0], rows, kv, cos_sin)

    def _pairs(
        self, table: torch.Tensor, token_ids: torch.Tensor, hidden: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        norms = (self.norm_embedding.weight, self.norm_hidden.weight)
        return self.fc(pair_norm(table, token_ids, hidden, *norms, self.norm.eps), rows)
