"""The layers of the hybrid models: straight modules that take their caches as arguments.

Residual adds live in `add_rms_norm`, never beside a matmul: Inductor would turn `x + y @ W` into an addmm
whose residual is copied device to device first. A layer therefore maps (x, residual) to (x, residual),
where the true activation is their sum; in decode x may still lie in parts [P, M, H] (`linear_parts`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from compiled_mtp.cache.kv_cache import KVLayer
from compiled_mtp.cache.state_cache import GDNLayer
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.fp8 import below
from compiled_mtp.models.moe import MoE
from compiled_mtp.ops.fp8 import scale_shape
from compiled_mtp.ops.gdn_prefill import gdn_prefill
from compiled_mtp.ops.gdn_verify import gdn_verify
from compiled_mtp.ops.linear import count_parts, linear, linear_parts, linear_silu_mul
from compiled_mtp.ops.paged_attention import paged_attention
from compiled_mtp.ops.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from compiled_mtp.ops.rms_norm import add_rms_norm, rms_norm
from compiled_mtp.ops.silu_mul import silu_mul
from compiled_mtp.ops.spec_conv1d import conv_prefill, spec_conv1d


@dataclass(frozen=True)
class Rows:
    """Where the M rows of a forward lie. B requests of M // B rows each, request-major.

    positions [M] int64: rotary position and last visible key of a row.
    slot_mapping [M] int64: KV slot (block id * block_size + offset), -1 for no write.
    block_table [B, max_blocks] int32, state_index [B] int32.
    start [B] int64: absolute position of a request's first row (`pos` in decode, the chunk's start in
    prefill). base [B] int64: position up to which the stored GDN state is folded (decode only). length [B]
    int64: valid rows (prefill only).
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    state_index: torch.Tensor
    start: torch.Tensor
    base: torch.Tensor
    length: torch.Tensor
    is_prefill: bool


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised weight: the loader fills it, nothing trains it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T without bias; weight [out_features, in_features].

    With `is_fp8` the weight is float8_e4m3fn, and `weight_scale` [ceil(out/128), ceil(in/128)] float32 holds
    a factor for each of its blocks; otherwise `weight_scale` is None. x and y have the activations' dtype.
    """

    weight_scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
        is_fp8: bool = False,
    ) -> None:
        super().__init__()
        shape = (out_features, in_features)
        weight_dtype = torch.float8_e4m3fn if is_fp8 else dtype
        self.weight = empty_parameter(*shape, dtype=weight_dtype, device=device)
        scale = empty_parameter(*scale_shape(shape), dtype=torch.float32, device=device) if is_fp8 else None
        self.register_parameter("weight_scale", scale)
        self.num_parts = count_parts(self.weight)

    def forward(self, x: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        return linear(x, self.weight, self.weight_scale, False, is_prefill)

    def parts(self, x: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        """y for `RMSNorm.add`: in decode [P, M, out_features], P parts that it adds up."""
        if is_prefill:
            return self(x, True)
        return linear_parts(x, self.weight, self.weight_scale, self.num_parts)


class RMSNorm(nn.Module):
    """Zero-centred RMSNorm: factor (1 + weight), float32 inside."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None, kept_rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual); a missing residual counts as zero.

        x [M, H], or with a residual the parts [P, M, H] of it, of which kept_rows [N] may name some.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps, kept_rows)


class Attention(nn.Module):
    """Gated full attention with partial rotary embedding over paged keys and values."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        first_key: int,
        fp8: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.num_q_heads = config.num_q_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.first_key = first_key
        hidden, value = config.hidden_size, config.num_q_heads * config.head_dim
        self.qkv = Linear(hidden, config.qkv_dim, dtype, device, "qkv.weight" in fp8)
        self.q_norm = empty_parameter(config.head_dim, dtype=dtype, device=device)
        self.k_norm = empty_parameter(config.head_dim, dtype=dtype, device=device)
        self.o_proj = Linear(value, hidden, dtype, device, "o_proj.weight" in fp8)

    def forward(self, x: torch.Tensor, rows: Rows, kv: KVLayer, cos_sin: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x, rows.is_prefill)
        q = qk_norm_rope_kv_write(
            qkv,
            self.q_norm,
            self.k_norm,
            cos_sin,
            rows.positions,
            rows.slot_mapping,
            kv.kv,
            kv.kv_scale,
            self.num_q_heads,
            self.num_kv_heads,
            self.eps,
        )
        query_and_gate = qkv[:, : 2 * self.num_q_heads * self.head_dim]
        gate = query_and_gate.view(-1, self.num_q_heads, 2, self.head_dim)[:, :, 1]
        y = paged_attention(
            q,
            gate,
            kv.kv,
            kv.kv_scale,
            rows.block_table,
            rows.positions,
            self.head_dim**-0.5,
            self.first_key,
        )
        return self.o_proj.parts(y, rows.is_prefill)


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule; one merged projection q|k|v|z|b|a.

    An FP8 release stores b and a in bfloat16: there in_proj is q|k|v|z and ba_proj, which is None otherwise,
    b|a. The operators read their columns from one row either way, so the two results are joined: one more
    small launch and one copy of a few rows, for half of in_proj's bytes.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        fp8: frozenset[str] = frozenset(),
    ) -> None:
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
        is_fp8 = "in_proj.weight" in fp8
        in_rows = config.linear_proj_dim - gate_rows if is_fp8 else config.linear_proj_dim
        self.in_proj = Linear(hidden, in_rows, dtype, device, is_fp8)
        self.ba_proj = Linear(hidden, gate_rows, dtype, device) if is_fp8 else None
        self.conv_weight = empty_parameter(self.conv_dim, config.conv_kernel, dtype=dtype, device=device)
        self.a_log = empty_parameter(num_value_heads, dtype=torch.float32, device=device)
        self.dt_bias = empty_parameter(num_value_heads, dtype=torch.float32, device=device)
        self.norm_weight = empty_parameter(self.heads[3], dtype=torch.float32, device=device)
        self.out_proj = Linear(self.value_dim, hidden, dtype, device, "out_proj.weight" in fp8)

    def forward(self, x: torch.Tensor, rows: Rows, cache: GDNLayer) -> torch.Tensor:
        proj = self.in_proj(x, rows.is_prefill)
        if self.ba_proj is not None:
            proj = torch.cat((proj, self.ba_proj(x, rows.is_prefill)), dim=-1)
        z = proj[:, self.conv_dim : self.conv_dim + self.value_dim]
        gates = (proj, self.conv_weight, self.a_log, self.dt_bias, cache.conv_ring, rows.state_index)
        if rows.is_prefill:
            q, k, v, g, beta = conv_prefill(*gates, rows.start, rows.length, *self.heads)
            y = gdn_prefill(
                q,
                k,
                v,
                g,
                beta,
                z,
                self.norm_weight,
                cache.state,
                rows.state_index,
                rows.start,
                rows.length,
                self.eps,
                self.gate_activation,
            )
        else:
            q, k, v, exp_g, beta = spec_conv1d(*gates, rows.start, *self.heads)
            y = gdn_verify(
                q,
                k,
                v,
                exp_g,
                beta,
                z,
                self.norm_weight,
                cache.state,
                cache.ring_k,
                cache.ring_u,
                cache.ring_g,
                rows.state_index,
                rows.base,
                rows.start,
                self.eps,
                self.gate_activation,
            )
        return self.out_proj.parts(y, rows.is_prefill)


class MLP(nn.Module):
    """down(silu(gate x) * up x) with gate and up merged."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        fp8: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = Linear(hidden, 2 * inner, dtype, device, "gate_up.weight" in fp8)
        self.down = Linear(inner, hidden, dtype, device, "down.weight" in fp8)

    def forward(self, x: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        if is_prefill:
            y = silu_mul(self.gate_up(x, True))
        else:
            y = linear_silu_mul(x, self.gate_up.weight, self.gate_up.weight_scale)
        return self.down.parts(y, is_prefill)


class DecoderLayer(nn.Module):
    """norm, mixer (attention or GDN), norm, FFN (dense or MoE) around one residual stream.

    `fp8` names the parameters to keep in FP8, as seen from this layer ("mixer.qkv.weight").
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_full_attention: bool,
        first_key: int = 0,
        fp8: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.is_full_attention = is_full_attention
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mixer: nn.Module
        if is_full_attention:
            self.mixer = Attention(config, dtype, device, first_key, below(fp8, "mixer."))
        else:
            self.mixer = GatedDeltaNet(config, dtype, device, below(fp8, "mixer."))
        ffn = MoE if config.is_moe else MLP
        self.ffn: nn.Module = ffn(config, dtype, device, below(fp8, "ffn."))

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rows: Rows,
        cache: KVLayer | GDNLayer,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_norm.add(x, residual)
        x = self.mixer(x, rows, cache, cos_sin) if self.is_full_attention else self.mixer(x, rows, cache)
        x, residual = self.post_norm.add(x, residual)
        return self.ffn(x, rows.is_prefill), residual


def rotary_table(config: ModelConfig, length: int, device: torch.device) -> torch.Tensor:
    """[length, rotary_dim] float32: cosines, then sines, of p * theta^(-2j / rotary_dim), 2j < rotary_dim."""
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    angles = torch.arange(length).float()[:, None] * (1.0 / config.rope_theta**exponent)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
