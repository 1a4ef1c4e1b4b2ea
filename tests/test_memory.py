"""Bytes to blocks and state rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_mtp.memory import CacheShape, plan_memory

# Qwen3.5-27B in bfloat16, mtp_step 3: 16 attention layers and the MTP layer, 48 GDN layers.
SHAPE_27B = CacheShape(
    num_attention_layers=17,
    num_kv_heads=4,
    head_dim=256,
    kv_bytes=2,
    num_gdn_layers=48,
    num_key_heads=16,
    num_value_heads=48,
    key_head_dim=128,
    value_head_dim=128,
    conv_dim=10240,
    conv_bytes=2,
    ring_length=8,
)


def test_bytes_of_a_released_shape() -> None:
    # 64 KiB a token in the trunk and 4 KiB in the MTP layer; a state of 144 MiB.
    assert SHAPE_27B.block_bytes(64) == 64 * 68 * 1024
    state, records = 48 * 48 * 128 * 128 * 4, 48 * 8 * (16 * 128 + 48 * 129) * 4
    assert state == 144 * 2**20
    assert SHAPE_27B.state_row_bytes() == state + records + 48 * 8 * 10240 * 2


def test_bytes_of_an_fp8_cache() -> None:
    shape = replace(SHAPE_27B, kv_bytes=1, kv_scale_bytes=4)
    # Half a bfloat16 cache's, and 4 bytes for each of the 17 * 4 heads' keys and values a token.
    assert shape.block_bytes(64) == 64 * (68 * 1024 // 2 + 17 * 4 * 2 * 4)
    assert shape.state_row_bytes() == SHAPE_27B.state_row_bytes()


@given(
    free_bytes=st.integers(0, 2**36),
    block_size=st.sampled_from([16, 64, 128]),
    max_batch=st.integers(1, 32),
    max_model_len=st.integers(2, 100_000),
)
def test_the_plan_fits_and_wastes_no_block(
    free_bytes: int, block_size: int, max_batch: int, max_model_len: int
) -> None:
    numbers = {"block_size": block_size, "max_batch": max_batch, "max_model_len": max_model_len}
    blocks_of_one = -(-max_model_len // block_size)
    rows = (max_batch + 1) * SHAPE_27B.state_row_bytes()
    needed = rows + (blocks_of_one + 1) * SHAPE_27B.block_bytes(block_size)
    if needed > free_bytes:
        with pytest.raises(ValueError, match="free memory must hold"):
            plan_memory(free_bytes, SHAPE_27B, **numbers)
        return
    plan = plan_memory(free_bytes, SHAPE_27B, **numbers)
    assert plan.num_state_rows == max_batch + 1
    assert plan.total_bytes <= free_bytes
    assert blocks_of_one < plan.num_blocks <= max_batch * blocks_of_one + 1
    is_full = plan.num_blocks == max_batch * blocks_of_one + 1
    assert is_full or plan.total_bytes + plan.block_bytes > free_bytes


def test_given_num_blocks_is_taken_or_refused_with_the_numbers() -> None:
    numbers = {"block_size": 64, "max_batch": 2, "max_model_len": 1000}
    assert plan_memory(2**33, SHAPE_27B, num_blocks=40, **numbers).num_blocks == 40
    with pytest.raises(
        ValueError, match=r"num_blocks must be at least 17 for max_model_len=1000 .* got 16; raise"
    ):
        plan_memory(2**33, SHAPE_27B, num_blocks=16, **numbers)
    with pytest.raises(
        ValueError, match=r"must hold 563.0 MiB .* \(3 state rows of 163.6 MiB.* got 100.0 MiB;"
    ):
        plan_memory(100 * 2**20, SHAPE_27B, **numbers)
    with pytest.raises(ValueError, match="free memory must hold"):
        plan_memory(2**30, SHAPE_27B, num_blocks=1000, **numbers)
