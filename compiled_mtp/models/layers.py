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
from compiled_mtp.models.activations import Activations, QuantizedRows, plain, quantized
from compiled_mtp.models.moe import MoE
from compiled_mtp.models.rows import DecodeRows, PrefillRows, Rows
from compiled_mtp.models.weight_format import PLAIN, ParameterFactory, WeightFormat, coded_part
from compiled_mtp.ops.gdn_prefill import gdn_prefill
from compiled_mtp.ops.gdn_verify import gdn_verify
from compiled_mtp.ops.k_splits import NARROW_ROWS, WIDE_ROWS
from compiled_mtp.ops.linear import (
    count_partials,
    linear,
    linear_partials,
    linear_side,
    linear_silu_mul,
)
from compiled_mtp.ops.linear_blocks import count_partials as count_blocks_partials
from compiled_mtp.ops.linear_blocks import linear_blocks, linear_blocks_partials, linear_blocks_silu_mul
from compiled_mtp.ops.linear_w4a16 import count_partials as count_w4a16_partials
from compiled_mtp.ops.linear_w4a16 import linear_w4a16, linear_w4a16_partials, linear_w4a16_silu_mul
from compiled_mtp.ops.linear_w8a8 import count_partials as count_w8a8_partials
from compiled_mtp.ops.linear_w8a8 import linear_w8a8, linear_w8a8_partials
from compiled_mtp.ops.paged_attention import paged_attention
from compiled_mtp.ops.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from compiled_mtp.ops.rms_norm import add_rms_norm, add_rms_norm_quantized, rms_norm
from compiled_mtp.ops.silu_mul import silu_mul, silu_mul_quantized
from compiled_mtp.ops.spec_conv1d import conv_prefill, spec_conv1d


class CodedParts:
    """The parts of a weight in scaled codes, each in one kind."""

    def __init__(self, form: WeightFormat, columns: int) -> None:
        self.form, self.columns = form, columns

    def __len__(self) -> int:
        return len(self.form.parts)

    @property
    def name(self) -> str:
        """The kind of a weight of one part."""
        assert len(self) == 1
        return self.form.parts[0].name

    def product(
        self, x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, is_prefill: bool
    ) -> torch.Tensor:
        """x times the weight's transpose: one launch per part."""
        products, first = [], 0
        for part in self.form.parts:
            own = coded_part(self.form, words, scales, first, self.columns)
            products.append(linear_blocks(x, *own, part.name, False, is_prefill))
            first += part.rows
        return products[0] if len(products) == 1 else torch.cat(products, 1)


class Linear(nn.Module):
    """y = x W^T without bias; weight [out_features, in_features] in its format, with factors if it has any.

    x and y have the activations' dtype; if the format quantises rows, x is multiplied in e4m3. With several
    ranks each holds some of the weight's rows or, if is_before_norm, a range of its columns. If prompts are
    summed without K splits (keeps_prompt_rows), it then also holds some rows of the whole weight,
    prompt_weight.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter | None
    prompt_weight: nn.Parameter
    prompt_weight_scale: nn.Parameter | None

    def __init__(
        self,
        make: ParameterFactory,
        in_features: int,
        out_features: int,
        *,
        is_before_norm: bool = False,
        may_be_resident: bool = False,
        is_gated: bool = False,
    ) -> None:
        super().__init__()
        make.add_weight(self, "weight", out_features, in_features)
        self.quantizes_rows = make.format_of("weight").quantizes_rows
        self.has_codes = make.format_of("weight").group > 0
        form = make.format_of("weight")
        self.parts = CodedParts(form, in_features) if form.parts else None
        assert self.parts is None or len(self.parts) == 1 or not is_before_norm
        self.is_before_norm = is_before_norm
        self.is_float32 = make.dtype == torch.float32
        self.communicator = communicator = make.communicator
        # Choices that decide bits depend on the rows of the whole weight.
        self.whole_n = 0 if communicator is None or is_before_norm else out_features * communicator.world
        self.has_prompt_rows = communicator is not None and is_before_norm and communicator.keeps_prompt_rows
        if communicator is not None and self.has_prompt_rows:
            shape = (out_features // communicator.world, in_features * communicator.world)
            make.add_weight(self, "prompt_weight", *shape, like="weight")
        # A GPU sums a prompt's products of quantised rows without K splits.
        self.has_prompt_order = make.device.type != "cpu"
        self.whole_k = in_features * communicator.world if communicator is not None and is_before_norm else 0
        # The partials of this rank's shard; the communicator adds the partials of all ranks.
        self.partial_counts = self._partial_counts()
        # `choose_resident` decides. A communicator needs fences. So does a draft's layer, which reads early
        # positions and slots that were written just before it: fc, which is never resident, is that fence.
        self.may_be_resident = may_be_resident and communicator is None
        self.is_gated = is_gated
        self.resident = False

    def forward(self, x: Activations, rows: Rows) -> torch.Tensor:
        if self.quantizes_rows:
            return linear_w8a8(*quantized(x), self.weight, self.weight_scale, self.is_float32)
        is_prefill = isinstance(rows, PrefillRows)
        if self.has_codes:
            return linear_w4a16(plain(x), *self.codes, False, is_prefill)
        if self.parts is not None:
            return self.parts.product(plain(x), *self.codes, is_prefill)
        how = (is_prefill, self.whole_n, 0, self.resident and not is_prefill)
        return linear(plain(x), self.weight, self.weight_scale, False, *how)

    def partials(self, x: Activations, rows: Rows) -> torch.Tensor:
        """y for `RMSNorm.add`: split-K partials [P, M, out_features], or stacked as by `linear_partials`.

        For a prompt's quantised rows on a GPU the sum [M, out_features]. With several ranks one partial per
        rank, or only the sum of these.
        """
        is_prefill, communicator = isinstance(rows, PrefillRows), self.communicator
        if is_prefill and self.has_prompt_rows:
            return self._prompt_sums(x)
        weight, factors, whole_k = self.weight, self.weight_scale, self.whole_k
        # Several ranks have one program per number of rows, so that they need no stacked form.
        is_stacked = self._is_stacked and not is_prefill and communicator is None
        if self.quantizes_rows:
            if is_prefill and self.has_prompt_order:
                return self(x, rows)
            values, x_scale = quantized(x)
            count = 1 if is_prefill else self._count_of(values)
            last = (count, whole_k, self.is_float32, is_stacked)
            partials = linear_w8a8_partials(values, x_scale, weight, factors, *last)
            dtype = torch.float32 if self.is_float32 else torch.bfloat16
        elif self.has_codes:
            x = plain(x)
            count, dtype = 1 if is_prefill else self._count_of(x), x.dtype
            partials = linear_w4a16_partials(x, *self.codes, count, whole_k, is_prefill, is_stacked)
        elif self.parts is not None:
            x = plain(x)
            count, dtype = 1 if is_prefill else self._count_of(x), x.dtype
            kind = self.parts.name
            partials = linear_blocks_partials(x, *self.codes, kind, count, whole_k, is_prefill, is_stacked)
        else:
            x = plain(x)
            count, dtype = 1 if is_prefill else self._count_of(x), x.dtype
            how = (is_prefill, is_stacked, self.resident and not is_prefill)
            partials = linear_partials(x, weight, factors, count, 0, whole_k, *how)
        return partials if communicator is None else communicator.gather_partials(partials, dtype)

    @property
    def is_packed(self) -> bool:
        """Whether the weight is packed codes, of either kind."""
        return self.has_codes or self.parts is not None

    @property
    def codes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The words and scales of a weight in packed codes."""
        assert self.weight_scale is not None
        return self.weight, self.weight_scale

    def _partial_counts(self) -> tuple[int, int, int]:
        """The numbers of partials of up to NARROW_ROWS rows, of up to WIDE_ROWS and of more."""
        count = count_w8a8_partials if self.quantizes_rows else count_partials
        if self.has_codes:
            count = count_w4a16_partials
        if self.parts is not None:
            if len(self.parts) > 1:
                return 1, 1, 1
            few = count_blocks_partials(self.weight, 1, self.parts.name, self.whole_k)
            return few, few, few
        sizes = (1, NARROW_ROWS + 1, WIDE_ROWS + 1)
        few, many, most = (count(self.weight, rows, whole_k=self.whole_k) for rows in sizes)
        return few, many, most

    @property
    def _is_stacked(self) -> bool:
        """Whether the number of partials depends on the number of rows; see `linear_partials`."""
        return len(set(self.partial_counts)) > 1

    def _count_of(self, x: torch.Tensor) -> int:
        """The number of partials for the rows of x: an expression that holds for every batch size.

        A branch would decide once per program, which serves several batch sizes.
        """
        few, many, most = self.partial_counts
        if not self._is_stacked:
            return few
        rows = x.shape[0] - 1
        count = few + (many - few) * min(1, rows // NARROW_ROWS) + (most - many) * min(1, rows // WIDE_ROWS)
        # The compiler does not see that the count stays positive.
        return max(1, count)

    def _prompt_sums(self, x: Activations) -> torch.Tensor:
        """A prompt's sums [1, M, out_features]: each rank multiplies the whole x by its rows of a weight."""
        communicator, weight, factors = self.communicator, self.prompt_weight, self.prompt_weight_scale
        assert communicator is not None
        if self.has_codes:
            whole = communicator.gather_columns(plain(x))
            assert factors is not None
            sums = linear_w4a16_partials(whole, weight, factors, 1, 0, True)[0]
        elif not self.quantizes_rows:
            whole = communicator.gather_columns(plain(x))
            whole_n = weight.shape[0] * communicator.world
            sums = linear_partials(whole, weight, factors, 1, whole_n, 0, True)[0]
        elif self.has_prompt_order:
            sums = linear_w8a8(
                *communicator.gather_quantized(*quantized(x)), weight, factors, self.is_float32
            )
        else:
            rows = communicator.gather_quantized(*quantized(x))
            sums = linear_w8a8_partials(*rows, weight, factors, 1, 0, self.is_float32)[0]
        return communicator.gather_columns(sums)[None]


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
        elif isinstance(rows, PrefillRows) or self.quantizes_rows:
            y = silu_mul(self.gate_up(x, rows))
        elif self.gate_up.has_codes:
            y = linear_w4a16_silu_mul(plain(x), *self.gate_up.codes)
        elif self.gate_up.parts is not None:
            if len(self.gate_up.parts) > 1:
                y = silu_mul(self.gate_up(x, rows))
            else:
                y = linear_blocks_silu_mul(plain(x), *self.gate_up.codes, self.gate_up.parts.name)
        else:
            gate_up = self.gate_up
            how = (gate_up.whole_n, 0, gate_up.resident)
            y = linear_silu_mul(plain(x), gate_up.weight, gate_up.weight_scale, *how)
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
