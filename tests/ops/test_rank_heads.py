"""A rank's heads have the bits that they have in the whole, also where ranks share a KV or key head."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.gdn_prefill import gdn_prefill
from compiled_mtp.ops.paged_attention import paged_attention
from tests.ops.rank_cases import check_attention_heads, check_gdn_prefill_heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 4, 20])
def test_attention_on_the_cpu(dtype: torch.dtype, window: int) -> None:
    for heads in ((4, 1, 64), (8, 2, 32)):
        check_attention_heads(paged_attention, heads, dtype, "cpu", window=window, world=4)


@pytest.mark.parametrize("window", [2, 16, 17])
def test_attention_in_interpreter(interpreter: None, window: int) -> None:
    check_attention_heads(paged_attention.launch, (4, 1, 16), torch.bfloat16, "cpu", window=window, world=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gdn_on_the_cpu(dtype: torch.dtype) -> None:
    for heads in ((1, 4, 32), (2, 4, 16)):
        check_gdn_prefill_heads(gdn_prefill, heads, dtype, "cpu", rows=70, world=4)


def test_gdn_in_interpreter(interpreter: None) -> None:
    check_gdn_prefill_heads(gdn_prefill.launch, (1, 2, 16), torch.bfloat16, "cpu", rows=66, world=2)
