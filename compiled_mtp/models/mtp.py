"""The draft model: the checkpoint's MTP layer, which reads a token and the hidden state before it."""

from __future__ import annotations

import torch
from torch import nn

from compiled_mtp.cache.kv_cache import KVLayer
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.fp8 import below
from compiled_mtp.models.layers import DecoderLayer, Linear, RMSNorm, Rows
from compiled_mtp.ops.rms_norm import pair_norm

# Draft KV slot j holds the pair (token j, hidden j - 1), so slot 0 has no pair and is never read.
FIRST_DRAFT_KEY = 1


class DraftModel(nn.Module):
    """h' = norm(layer(fc [norm_e(embedding); norm_h(hidden)])), the embedding half first.

    `forward(table [V, H], token_ids [M], hidden [M, H], rows, kv, cos_sin, kept_rows)` returns h' [M, H]:
    what the shared head reads and what the next pass of a chain takes as `hidden`; with kept_rows [N] int64
    that of those rows alone. `table` is the target's embedding, `hidden` of a first pass the target's after
    its final norm. Writes the pairs' keys and values into `kv`.
    `fp8` names the parameters to keep in FP8; those of this model begin 'mtp.'.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        fp8: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Linear(2 * size, size, dtype, device)
        self.norm_embedding = RMSNorm(size, eps, dtype, device)
        self.norm_hidden = RMSNorm(size, eps, dtype, device)
        self.layer = DecoderLayer(
            config,
            dtype,
            device,
            is_full_attention=True,
            first_key=FIRST_DRAFT_KEY,
            fp8=below(fp8, "mtp.layer."),
        )
        self.norm = RMSNorm(size, eps, dtype, device)

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
        norms = (self.norm_embedding.weight, self.norm_hidden.weight)
        pair = pair_norm(table, token_ids, hidden, *norms, self.norm.eps)
        x, residual = self.layer(self.fc(pair, rows.is_prefill), None, rows, kv, cos_sin)
        return self.norm.add(x, residual, kept_rows)[0]
