"""The layers of the hybrid models: plain modules that take their caches as arguments.

Only `add_rms_norm` adds residuals: Inductor would turn `x + y @ W` into an addmm that first copies the
residual on the device. A layer therefore maps (x, residual) to (x, residual), and the activation is their
sum; x may still be split-K partials [P, M, H] (`linear_partials`).
"""

from __future__ import annotations

import torch
from torch import nn

from compiled_mtp.cache.kv_cache import KVLayer
from compiled_mtp.cache.state_cache import GDNLayer
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.activations import Activations, QuantizedRows, plain
from compiled_mtp.models.linear import Linear
from compiled_mtp.models.moe import MoE
from compiled_mtp.models.rows import DecodeRows, PrefillRows, Rows
from compiled_mtp.models.weight_format import PLAIN, ParameterFactory
from compiled_mtp.ops.gdn_prefill import gdn_prefill
from compiled_mtp.ops.gdn_verify import gdn_verify
from compiled_mtp.ops.linear import linear_side
from compiled_mtp.ops.paged_attention import paged_attention
from compiled_mtp.ops.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from compiled_mtp.ops.rms_norm import add_rms_norm, add_rms_norm_quantized, rms_norm
from compiled_mtp.ops.silu_mul import silu_mul_quantized
from compiled_mtp.ops.spec_conv1d import conv_prefill, spec_conv1d


class RMSNorm(nn.Module):
    """Zero-centred RMSNorm: factor (1 + weight), float32 inside."""

    def __init__(self, make: ParameterFactory, size: int, eps: float) -> None:
        super().__init__()
        self.weight = make.empty(size)
        self.eps = eps
        self.resident = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None, kept_rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual); a missing residual counts as zero.

        x: [M, H], or with a residual its partials [P, M, H]. kept_rows [N]: with a residual the rows to
        return, None for all.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps, kept_rows, self.resident)

    def add_for(
        self, reader: nn.Module, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Activations, torch.Tensor]:
        """Do what `add` does, and also quantise the norm if `reader` multiplies quantised rows."""
        # Narrower rows have fewer groups of 128 than the norm's program has blocks.
        if residual is None or not reader.quantizes_rows or self.weight.shape[0] < 256:
            return self.add(x, residual)
        norm, residual, values, factors = add_rms_norm_quantized(x, residual, self.weight, self.eps)
        return QuantizedRows(values, factors, norm), residual


class Attention(nn.Module):
    """Gated full attention with partial rotary embedding over paged keys and values."""

    def __init__(self, make: ParameterFactory, config: ModelConfig, first_key: int) -> None:
        super().__init__()
        self.num_q_heads = config.num_q_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.first_key = first_key
        # The ends of the frequencies that take the row and the column of a token; see `angles_of`.
        sections = (0, 0, 0) if config.vision is None else config.vision.mrope_section
        self.row_end, self.column_end = 3 * sections[1], 3 * sections[2]
        hidden, value = config.hidden_size, config.num_q_heads * config.head_dim
        self.qkv = Linear(make.part("qkv"), hidden, config.qkv_dim, may_be_resident=True)
        self.q_norm = make.empty(config.head_dim)
        self.k_norm = make.empty(config.head_dim)
        self.o_proj = Linear(make.part("o_proj"), value, hidden, is_before_norm=True, may_be_resident=True)

    @property
    def quantizes_rows(self) -> bool:
        """Whether what it reads first multiplies quantised rows."""
        return self.qkv.quantizes_rows

    def write_keys(
        self, x: Activations, rows: Rows, kv: KVLayer, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows' keys and values into `kv`; return their q|gate|k|v and their queries."""
        qkv = self.qkv(x, rows)
        q = qk_norm_rope_kv_write(
            qkv,
            self.q_norm,
            self.k_norm,
            cos_sin,
            rows.rotary_positions,
            rows.slot_mapping,
            kv.kv,
            kv.kv_scale,
            self.num_q_heads,
            self.num_kv_heads,
            self.eps,
            self.row_end,
            self.column_end,
        )
        return qkv, q

    def forward(self, x: Activations, rows: Rows, kv: KVLayer, cos_sin: torch.Tensor) -> torch.Tensor:
        qkv, q = self.write_keys(x, rows, kv, cos_sin)
        query_and_gate = qkv[:, : 2 * self.num_q_heads * self.head_dim]
        gate = query_and_gate.view(-1, self.num_q_heads, 2, self.head_dim)[:, :, 1]
        prompt_chunks = (rows.first_row, rows.length) if isinstance(rows, PrefillRows) else (None, None)
        y = paged_attention(
            q,
            gate,
            kv.kv,
            kv.kv_scale,
            rows.block_table,
            rows.causal_positions,
            self.head_dim**-0.5,
            self.first_key,
            *prompt_chunks,
        )
        return self.o_proj.partials(y, rows)


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule; in_proj is one merged projection q|k|v|z|b|a.

    FP8 releases store b and a in bfloat16: if in_proj is not plain, it is q|k|v|z, and ba_proj is b|a; else
    ba_proj is None.
    """

    def __init__(self, make: ParameterFactory, config: ModelConfig) -> None:
        super().__init__()
        self.heads = (
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        num_value_heads = config.linear_num_value_heads
        self.conv_dim = config.linear_conv_dim
        self.value_dim = config.linear_value_dim
        self.eps = config.rms_norm_eps
        self.gate_activation = config.gate_activation
        hidden, gate_rows = config.hidden_size, 2 * num_value_heads
        has_own_gates = make.format_of("in_proj.weight") is not PLAIN
        in_rows = config.linear_proj_dim - gate_rows if has_own_gates else config.linear_proj_dim
        self.in_proj = Linear(make.part("in_proj"), hidden, in_rows, may_be_resident=True)
        self.ba_proj = Linear(make.part("ba_proj"), hidden, gate_rows) if has_own_gates else None
        self.conv_weight = make.empty(self.conv_dim, config.conv_kernel)
        self.a_log = make.empty(num_value_heads, dtype=torch.float32)
        self.dt_bias = make.empty(num_value_heads, dtype=torch.float32)
        self.norm_weight = make.empty(self.heads[3], dtype=torch.float32)
        out = make.part("out_proj")
        self.out_proj = Linear(out, self.value_dim, hidden, is_before_norm=True, may_be_resident=True)

    @property
    def quantizes_rows(self) -> bool:
        """Whether what it reads first multiplies quantised rows."""
        return self.in_proj.quantizes_rows

    def forward(self, x: Activations, rows: Rows, cache: GDNLayer) -> torch.Tensor:
        proj, ba = self.in_proj(x, rows), None
        z = proj[:, self.conv_dim : self.conv_dim + self.value_dim]
        inputs = (proj, self.conv_weight, self.a_log, self.dt_bias, cache.conv_ring, rows.state_index)
        last = (self.eps, self.gate_activation)
        if isinstance(rows, PrefillRows):
            if self.ba_proj is not None:
                ba = self.ba_proj(x, rows)
            prompt_chunks = (rows.start, rows.length, rows.first_row)
            q, k, v, g, beta = conv_prefill(*inputs, *prompt_chunks, *self.heads, rows.snapshot_offset, ba)
            state = (cache.state, rows.state_index, *prompt_chunks)
            y = gdn_prefill(q, k, v, g, beta, z, self.norm_weight, *state, *last, rows.snapshot_offset)
        else:
            assert isinstance(rows, DecodeRows)
            if self.ba_proj is not None:
                # A side product: its few programs run beside in_proj's and take half as long.
                ba = linear_side(plain(x), self.ba_proj.weight)
            q, k, v, exp_g, beta = spec_conv1d(*inputs, rows.start, *self.heads, ba)
            rings = (cache.state, cache.ring_k, cache.ring_u, cache.ring_g)
            cursors = (rows.state_index, rows.base, rows.start)
            is_early = self.out_proj.resident or self.out_proj.is_packed
            how = (*last, is_early, cache.max_unfolded)
            norm = (self.norm_weight, *rings, *cursors, *how)
            y = gdn_verify(q, k, v, exp_g, beta, z, *norm)
        return self.out_proj.partials(y, rows)


class MLP(nn.Module):
    """down(silu(gate x) * up x) with gate and up merged."""

    def __init__(self, make: ParameterFactory, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = Linear(make.part("gate_up"), hidden, 2 * inner, may_be_resident=True, is_gated=True)
        self.down = Linear(make.part("down"), inner, hidden, is_before_norm=True, may_be_resident=True)

    @property
    def quantizes_rows(self) -> bool:
        """Whether what it reads first multiplies quantised rows."""
        return self.gate_up.quantizes_rows

    def forward(self, x: Activations, rows: Rows) -> torch.Tensor:
        y: Activations
        if self.down.quantizes_rows:
            y = QuantizedRows(*silu_mul_quantized(self.gate_up(x, rows)))
        else:
            y = self.gate_up.silu_mul(x, rows)
        return self.down.partials(y, rows)


class DecoderLayer(nn.Module):
    """norm, mixer (attention or GDN), norm, FFN (dense or MoE) around one residual stream."""

    def __init__(
        self, make: ParameterFactory, config: ModelConfig, *, is_full_attention: bool, first_key: int = 0
    ) -> None:
        super().__init__()
        self.is_full_attention = is_full_attention
        self.input_norm = RMSNorm(make.part("input_norm"), config.hidden_size, config.rms_norm_eps)
        self.post_norm = RMSNorm(make.part("post_norm"), config.hidden_size, config.rms_norm_eps)
        self.mixer: nn.Module
        if is_full_attention:
            self.mixer = Attention(make.part("mixer"), config, first_key)
        else:
            self.mixer = GatedDeltaNet(make.part("mixer"), config)
        self.ffn: nn.Module = (MoE if config.is_moe else MLP)(make.part("ffn"), config)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rows: Rows,
        cache: KVLayer | GDNLayer,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_norm.add_for(self.mixer, x, residual)
        caches = (cache, cos_sin) if self.is_full_attention else (cache,)
        x = self.mixer(normed, rows, *caches)
        normed, residual = self.post_norm.add_for(self.ffn, x, residual)
        return self.ffn(normed, rows), residual
