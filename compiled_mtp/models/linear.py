"""The product of rows and a weight, in every format that a weight may have."""

from __future__ import annotations

import torch
from torch import nn

from compiled_mtp.models.activations import Activations, plain, quantized
from compiled_mtp.models.rows import PrefillRows, Rows
from compiled_mtp.models.weight_format import ParameterFactory, WeightFormat, coded_part
from compiled_mtp.ops.coded_weight import count_partials as count_coded_partials
from compiled_mtp.ops.k_splits import NARROW_ROWS, WIDE_ROWS
from compiled_mtp.ops.linear import count_partials, linear, linear_partials, linear_silu_mul
from compiled_mtp.ops.linear_blocks import linear_blocks, linear_blocks_partials, linear_blocks_silu_mul
from compiled_mtp.ops.linear_w4a16 import linear_w4a16, linear_w4a16_partials, linear_w4a16_silu_mul
from compiled_mtp.ops.linear_w8a8 import count_partials as count_w8a8_partials
from compiled_mtp.ops.linear_w8a8 import linear_w8a8, linear_w8a8_partials
from compiled_mtp.ops.silu_mul import silu_mul


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
        form = make.format_of("weight")
        self.quantizes_rows, self.has_codes = form.quantizes_rows, form.group > 0
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
        self.partial_counts = self._partial_counts(in_features)
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

    def silu_mul(self, x: Activations, rows: Rows) -> torch.Tensor:
        """Return silu(g) * u [M, out_features / 2] for y = g | u.

        A round's rows and a weight of one part take one launch.
        """
        is_split = self.parts is not None and len(self.parts) > 1
        if self.quantizes_rows or is_split or isinstance(rows, PrefillRows):
            return silu_mul(self(x, rows))
        if self.has_codes:
            return linear_w4a16_silu_mul(plain(x), *self.codes)
        if self.parts is not None:
            return linear_blocks_silu_mul(plain(x), *self.codes, self.parts.name)
        how = (self.whole_n, 0, self.resident)
        return linear_silu_mul(plain(x), self.weight, self.weight_scale, *how)

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

    def _partial_counts(self, in_features: int) -> tuple[int, int, int]:
        """The numbers of partials of up to NARROW_ROWS rows, of up to WIDE_ROWS and of more."""
        if self.parts is not None and len(self.parts) > 1:
            return 1, 1, 1
        if self.is_packed:
            few = count_coded_partials(self.weight, in_features, self.whole_k)
            return few, few, few
        count = count_w8a8_partials if self.quantizes_rows else count_partials
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
