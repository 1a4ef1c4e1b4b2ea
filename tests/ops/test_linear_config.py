"""The configurations of linear: one split of K for every number of rows, tiles that fit, shards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_mtp.ops.device import Device
from compiled_mtp.ops.k_splits import K_SPLIT_UNIT, count_k_splits
from compiled_mtp.ops.linear import count_partials
from compiled_mtp.ops.linear.config import NAMED_DTYPES, block_rows, linear_config, read_table


@pytest.mark.parametrize("rows", [1, 64, 100, 512, 2048])
@pytest.mark.parametrize("out_bytes, shared_kib", [(2, 227), (4, 227), (2, 163), (4, 99)])
def test_a_tile_of_prefill_fits(rows: int, out_bytes: int, shared_kib: int) -> None:
    from compiled_mtp.ops.prefill_triton import choose_tile

    device = Device("sm_90", shared_kib * 1024, True, True, 132)
    for n in (257, 2560, 5120, 34816):
        tile = choose_tile(device, rows, n, out_bytes)
        assert tile.shared_bytes(out_bytes) <= device.shared_bytes
        # Except with the lowest tile, at most half of a tile's rows are padding.
        assert tile.block_m == 64 or rows > tile.block_m // 2


def test_one_split_for_every_number_of_rows() -> None:
    weights = [(n, k, d) for n in (257, 1024, 5120, 34816) for k in (1024, 6144) for d in (torch.bfloat16,)]
    for entry in read_table().get("sm_90", {}):
        shape, dtype = entry.split()
        n, k = map(int, shape.split("x"))
        weights.append((n, k, NAMED_DTYPES[dtype]))
    for n, k, dtype in weights:
        shape, rows_of = (n, k, torch.bfloat16, dtype), (1, 17, 33, 65, 512)
        configs = [linear_config("sm_90", 227 * 1024, *shape, block_rows(rows), False) for rows in rows_of]
        assert len({(config.part_length(k), config.chains) for config in configs}) == 1
        for split in (count for count in (1, 2, 4, 8) if count <= count_k_splits(k)):
            shared = [
                linear_config("sm_90", 227 * 1024, *shape, block_rows(rows), False, split) for rows in rows_of
            ]
            assert {(config.split, config.part_length(k)) for config in shared} == {
                (split, k // count_k_splits(k))
            }
            configs += shared
        for config in configs:
            assert config.is_one_step(k) or K_SPLIT_UNIT % config.block_k == 0
            assert config.num_stages * config.stage_bytes(2, dtype.itemsize) <= 227 * 1024
            if dtype == torch.float8_e4m3fn:
                # A tile must lie in one block of scales, and a step must be one block.
                assert config.block_k == 128
                assert 128 % config.block_n == 0
                # Products of a warp group (64 rows, 4 warps) read converted weights' columns in another
                # order.
                assert config.block_m < 64 or config.num_warps < 4


def test_the_table_holds_k_splits_for_products_before_a_norm() -> None:
    """Otherwise `linear_partials` would run with other K splits than were measured."""
    for entry, fields in read_table()["sm_90"].items():
        shape, _ = entry.split()
        n, k = map(int, shape.split("x"))
        split, chains = fields[4:6]
        assert all(count in (1, 2, 4, 8) for count in (split, chains)), entry
        is_mtp_fc = k == 2 * n
        if k > n and not is_mtp_fc and n != 257:
            assert split * chains == count_k_splits(k), entry


@pytest.mark.parametrize(
    ("k", "rows", "counts"),
    # 27B's down, and its o_proj and out_proj: on one GPU, and one shard of two, four and eight.
    [
        (17408, 4, (4, 4, 2, 1)),
        (17408, 128, (4, 4, 2, 1)),
        (6144, 4, (1, 1, 1, 1)),
        (6144, 128, (4, 4, 2, 1)),
        # Persistent programs sum whole weights.
        (17408, 129, (2, 4, 2, 1)),
        (6144, 129, (2, 4, 2, 1)),
    ],
)
def test_a_shard_has_as_many_programs_as_the_whole(
    k: int, rows: int, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it has K splits: with half the programs, half of a GPU would read the shard."""
    on_gpu = torch.device("cuda", 0)
    hopper = Device("sm_90", 227 * 1024, True, True, 132)
    monkeypatch.setattr("compiled_mtp.ops.linear.config.device_of", lambda index: hopper)

    def count(shards: int) -> int:
        weight: Any = SimpleNamespace(device=on_gpu, dtype=torch.bfloat16, shape=(5120, k // shards))
        return count_partials(weight, rows, 0, k)

    assert tuple(count(shards) for shards in (1, 2, 4, 8)) == counts
