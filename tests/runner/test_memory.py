"""Bytes to blocks and state rows."""

from __future__ import annotations

import gc
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_mtp.benchmarks.released_shapes import model_config
from compiled_mtp.cache.slot_state import sampling_bytes
from compiled_mtp.cache.state_cache import ring_length
from compiled_mtp.config import EngineConfig
from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.plan import SPARE_SLOTS
from compiled_mtp.runner.device_memory import free_device_bytes
from compiled_mtp.runner.host_tiers import plan_host, plan_host_memory, plan_prefix_host, prefix_tier_bytes
from compiled_mtp.runner.max_batch import default_max_batch, fit_wide_rounds, resolve_max_batch
from compiled_mtp.runner.memory import limits_of, resolve_memory
from compiled_mtp.runner.memory_plan import MemoryPlan, plan_memory
from compiled_mtp.runner.sizes import CacheShape, cache_shape, length_bytes
from compiled_mtp.runner.spec import EngineSpec, resolve
from tests.checkpoints import write_checkpoint
from tests.communicators.threads import thread_communicators
from tests.engines import make_engine

# Qwen3.5-27B in bfloat16, mtp_step 3: 16 attention layers and the MTP layer, 48 GDN layers.
STATE_27B, RECORDS_27B = 48 * 48 * 128 * 128 * 4, 48 * 8 * (16 * 128 + 48 * 129) * 4
CONV_27B = 48 * 8 * 10240 * 2
CHECKPOINT_27B = STATE_27B + CONV_27B + 5120 * 2
SHAPE_27B = CacheShape(
    token_bytes=68 * 1024,
    state_row_bytes=STATE_27B + RECORDS_27B + CONV_27B,
    snapshot_bytes=STATE_27B + CONV_27B,
)

MIB = 2**20


def spec_27b(**settings: Any) -> EngineSpec:
    model = model_config("27b")
    config = EngineConfig(device="cpu", dtype="bfloat16", mtp_step=3, lookup="off", **settings)
    return resolve(config, model, model.vocab_size, is_checkpoint=False)


def test_bytes_of_a_released_shape() -> None:
    spec = spec_27b()
    shape = cache_shape(spec)
    # 64 KiB a token in the trunk and 4 KiB in the MTP layer; a state of 144 MiB.
    assert shape.block_bytes(64) == 64 * 68 * 1024
    assert STATE_27B == 144 * 2**20
    tables = sampling_bytes(spec.model.vocab_size, 0)
    tables += sum(row.num_bytes for row in spec.draft_rows(spec.max_model_len))
    assert shape.state_row_bytes == SHAPE_27B.state_row_bytes + tables
    assert shape.snapshot_bytes == CHECKPOINT_27B


def test_memory_utilization_is_the_share_of_the_caches(tmp_path: Path) -> None:
    model = read_model_config(write_checkpoint(tmp_path))
    blocks = []
    for share in (0.25, 0.5, 1.0):
        config = EngineConfig(model=tmp_path, device="cpu", memory_utilization=share, offload_gb=0)
        spec = resolve(config, model, model.vocab_size)
        sizes = {"free_bytes": 2**28, "host_bytes": 2**28, "draft_head_bytes": 0}
        memory = resolve_memory(spec, **sizes, max_batch=8, rounds=[(8, 4)])
        assert memory.total_bytes <= share * 2**28
        blocks.append(memory.num_blocks)
    assert blocks[0] < blocks[1] < blocks[2]


def test_bytes_of_an_fp8_cache() -> None:
    spec = spec_27b()
    shape = cache_shape(replace(spec, kv_dtype=torch.float8_e4m3fn))
    # Half a bfloat16 cache's, and 4 bytes for each of the 17 * 4 heads' keys and values a token.
    assert shape.block_bytes(64) == 64 * (68 * 1024 // 2 + 17 * 4 * 2 * 4)
    assert shape.state_row_bytes == cache_shape(spec).state_row_bytes


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
    rows = (max_batch + 2) * SHAPE_27B.state_row_bytes
    needed = rows + 2 * SHAPE_27B.block_bytes(block_size)
    if needed > free_bytes:
        with pytest.raises(ValueError, match="free memory must hold"):
            plan_memory(free_bytes, SHAPE_27B, **numbers)
        return
    plan = plan_memory(free_bytes, SHAPE_27B, **numbers)
    assert plan.num_state_rows == max_batch + 2
    assert plan.total_bytes <= free_bytes
    assert 2 <= plan.num_blocks <= max_batch * blocks_of_one + 1
    is_full = plan.num_blocks == max_batch * blocks_of_one + 1
    assert is_full or plan.total_bytes + plan.block_bytes > free_bytes


def test_given_num_blocks_is_taken_or_refused_with_the_numbers() -> None:
    numbers = {"block_size": 64, "max_batch": 2, "max_model_len": 1000}
    assert plan_memory(2**33, SHAPE_27B, num_blocks=40, **numbers).num_blocks == 40
    # Fewer than one request of max_model_len may use.
    assert plan_memory(2**33, SHAPE_27B, num_blocks=16, **numbers).num_blocks == 16
    with pytest.raises(
        ValueError, match=r"must hold 662.8 MiB .* \(4 state rows of 163.6 MiB, 2 blocks .* got 100.0 MiB;"
    ):
        plan_memory(100 * 2**20, SHAPE_27B, **numbers)
    with pytest.raises(ValueError, match="free memory must hold"):
        plan_memory(2**30, SHAPE_27B, num_blocks=1000, **numbers)


def test_host_memory_holds_at_most_what_the_device_does() -> None:
    plan = MemoryPlan(
        num_blocks=41, num_state_rows=6, max_model_len=100, block_bytes=1000, state_row_bytes=3000
    )
    assert plan_host(10**6, plan) == (4, 40)
    # Half for rows, the rest for blocks.
    assert plan_host(20_000, plan) == (3, 11)
    assert plan_host(6999, plan) == (1, 3)
    # A request needs both.
    assert plan_host(5999, plan) == plan_host(0, plan, 0) == (0, 0)
    assert plan_host(6000, plan, 6000)[0] == 1
    with pytest.raises(ValueError, match=r"^offload_gb must be at most the 2.00 GiB of host memory .*3.00;"):
        plan_host(3 << 30, plan, 2 << 30)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux' /proc")
def test_the_engine_takes_what_it_says(tmp_path: Path) -> None:
    """What was touched, when everything is written that it has; and tensors to the byte, or nearly."""
    write_checkpoint(tmp_path, hidden_size=64, num_value_heads=1, intermediate_size=64)
    make_engine(tmp_path, mtp_step=3).generate([[1, 2, 3]])
    before = _anonymous_bytes()
    engine = make_engine(tmp_path, mtp_step=3, num_blocks=6000, prefix_cache_gb=0.25)
    step, moves, plan = engine.runner.step, engine.runner.moves, engine.runner.memory
    moves.snapshots.fill_(1)
    engine.generate([[1, 2, 3]])
    touched = _anonymous_bytes() - before
    assert plan.total_bytes > 300 << 20
    assert touched == pytest.approx(plan.total_bytes, rel=0.02)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in step.buffers()}
    tensors = moves.snapshots.nbytes + sum(storage.nbytes() for storage in storages.values())
    assert tensors == pytest.approx(plan.total_bytes, rel=0.01)


def _anonymous_bytes() -> int:
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def test_the_host_tier_of_the_prefix_cache_holds_chunks_with_their_blocks() -> None:
    sizes = {"num_blocks": 41, "num_state_rows": 6, "max_model_len": 100, "block_bytes": 1000}
    sizes["state_row_bytes"] = 3000
    plan = MemoryPlan(**sizes, num_snapshots=3, snapshot_bytes=2000)
    assert plan_prefix_host(43_000, plan, 4) == (7, 28)
    assert plan_prefix_host(5999, plan, 4) == (0, 0)
    assert plan_prefix_host(43_000, MemoryPlan(**sizes), 4) == (0, 0)


@pytest.mark.parametrize(
    ("options", "device", "gib"),
    [
        ({}, "cuda", 4),
        ({"prefix_cache_gb": 6.0}, "cuda", 6),
        ({"prefix_cache_gb": 99.0}, "cuda", 10),
        ({"prefix_cache": False}, "cuda", 0),
        ({"prefix_cache_gb": 6.0}, "cpu", 0),
    ],
)
def test_the_host_tier_of_the_prefix_cache_is_bounded(options: dict[str, Any], device: str, gib: int) -> None:
    config = EngineConfig(**options)
    assert prefix_tier_bytes(config, device, 10 << 30) == gib << 30
    # What is given is that of all ranks.
    of_two = gib << 29 if options.get("prefix_cache_gb") == 6.0 else gib << 30
    assert prefix_tier_bytes(config, device, 10 << 30, 2) == of_two


def spec_of(**given: Any) -> EngineSpec:
    """That of the checkpoint that ships on a GPU."""
    config = EngineConfig(device="cpu", **given)
    spec = resolve(config, read_model_config(config.model), 4096)
    return replace(spec, device=torch.device("cuda", 0))


def test_the_tiers_in_host_memory_share_what_is_free(caplog: pytest.LogCaptureFixture) -> None:
    gib = 1 << 30
    plan = MemoryPlan(1001, 9, 10**4, 1 << 23, 1 << 27, 8, 1 << 26)

    def sizes(**given: Any) -> list[float]:
        caplog.clear()
        full = plan_host_memory(spec_of(block_size=64, **given), plan, 40 * gib)
        assert full.num_blocks == plan.num_blocks
        host_bytes = full.host_records * plan.state_row_bytes + full.host_blocks * plan.block_bytes
        prefix_host_sum = (
            full.prefix_host_records * plan.snapshot_bytes + full.prefix_host_blocks * plan.block_bytes
        )
        return [host_bytes / gib, prefix_host_sum / gib]

    with caplog.at_level("INFO"):
        assert sizes() == [4, 4]
        (message,) = caplog.messages
        assert message.startswith("host memory on demand: up to 8192 MiB, ")
        # All that is on the device may go there; the rest is the cache's.
        plan = replace(plan, num_blocks=10**4)
        assert sizes(offload_gb=38, prefix_cache_gb=4) == [38, 2]
        assert "free: the prefix cache gets 2048 MiB; lower offload_gb or prefix_cache_gb" in caplog.text
        assert sizes(offload_gb=38, prefix_cache=False) == [38, 0]
        assert "lower" not in caplog.text
    # One of two ranks, with its part of what is free and of offload_gb.
    spec, part = spec_of(block_size=64, offload_gb=12), spec_of(block_size=64, offload_gb=6)
    of_two = replace(spec, communicator=thread_communicators(2)[1])
    assert plan_host_memory(of_two, plan, 20 * gib) == plan_host_memory(part, plan, 20 * gib)
    with pytest.raises(ValueError, match=r"^offload_gb must be at most the 40.00 GiB of host memory"):
        sizes(offload_gb=41)


def test_what_may_leave_is_named_where_a_cpu_cannot_hold_it() -> None:
    numbers: dict[str, Any] = {"block_size": 64, "max_batch": 1, "max_model_len": 512}
    text = r"7168\.0 MiB for offloaded requests, got 8192\.0 MiB; lower max_batch, offload_gb or num_blocks$"
    with pytest.raises(ValueError, match=text):
        plan_memory(8 << 30, SHAPE_27B, host_bytes=7 << 30, num_blocks=10**4, **numbers)
    text = r"besides 9216\.0 MiB for offloaded requests and 1024\.0 MiB for other buffers, got 8192\.0 MiB;"
    with pytest.raises(ValueError, match=text):
        plan_memory(8 << 30, SHAPE_27B, host_bytes=9 << 30, other_bytes=1 << 30, **numbers)
    plan = plan_memory(8 << 30, SHAPE_27B, host_bytes=7 << 30, **numbers)
    assert plan == plan_memory(1 << 30, SHAPE_27B, **numbers)


def test_more_than_a_cpu_has_for_requests_that_leave_is_named(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    with pytest.raises(
        ValueError, match=r"^offload_gb must be at most the \d+\.\d\d GiB of host mem.* got 99999"
    ):
        make_engine(directory, offload_gb=99999)


@pytest.mark.parametrize(
    ("device", "requests", "parts"),
    [("cpu", 32, 0), ("cuda", 8, 8 * 600 * 4 * 24), ("cuda", 32, (2 * 32 + 32 * 360) * 4 * 24)],
)
def test_what_grows_with_the_longest_request_is_counted(device: str, requests: int, parts: int) -> None:
    # 27B at 262,144 tokens, four rows of each request: 0.5 GB of attention's partial results for 8 requests,
    # 1.2 GB for 32, whose splits are in part folded in one program; 64 MiB of rotary table.
    model: Any = SimpleNamespace(rotary_dim=64, num_q_heads=24, num_kv_heads=4, head_dim=256)
    config = SimpleNamespace(block_size=64)
    spec: Any = SimpleNamespace(config=config, model_shard=model, device=torch.device(device))
    tables = 2**18 * 64 * 4 + (34 + 4 * requests) * 4096 * 4
    assert length_bytes(spec, 2**18, 32, [(requests, 4), (1, 4)]) == tables + parts * 258 * 4


GIB = 2**30


@pytest.mark.parametrize(
    ("free_gib", "options", "batch"),
    [
        # 32 requests of 27B: 34 state rows of 163.6 MiB and 2,049 blocks of 4.25 MiB are 13.94 GiB, and
        # 15.93 with the eighth for state snapshots. 16 requests take 8.15 GiB.
        (16.0, {}, 32),
        (15.9, {}, 16),
        (8.2, {}, 16),
        (8.1, {}, 8),
        (1.0, {}, 8),
        # The state rows of 64 requests are a quarter of 42.2 GiB, those of 256 of 164.9.
        (42.1, {}, 32),
        (42.3, {}, 64),
        (165.0, {}, 256),
        # Short requests take fewer blocks; a given number of blocks replaces those of all.
        (8.3, {"max_model_len": 512}, 32),
        (8.3, {"num_blocks": 200}, 32),
        (64.0, {"num_blocks": 20_000}, 8),
    ],
)
def test_the_default_batch_follows_memory(free_gib: float, options: dict[str, int], batch: int) -> None:
    numbers = {"block_size": 64, "max_model_len": 262_144} | options
    free_bytes = int(free_gib * GIB)
    assert default_max_batch(free_bytes, SHAPE_27B, **numbers) == batch
    if batch > 8:
        # The plan with these numbers has those rows, and blocks for 4,096 tokens of each request.
        plan = plan_memory(free_bytes, SHAPE_27B, **numbers, max_batch=batch, prefix_cache_bytes=None)
        assert plan.max_batch == batch
        least = options.get("num_blocks", batch * min(4096, numbers["max_model_len"]) // 64 + 1)
        assert plan.num_blocks >= least


def test_what_decides_max_batch_before_memory() -> None:
    on_gpu = spec_of()
    on_cpu = replace(on_gpu, device=torch.device("cpu"))
    assert resolve_max_batch(on_cpu, 1 << 40) == 8
    assert resolve_max_batch(on_gpu, 1 << 40) == 256
    assert resolve_max_batch(on_gpu, 1 << 20) == 8
    for spec in (spec_of(max_batch=3), replace(spec_of(max_batch=3), device=torch.device("cpu"))):
        assert resolve_max_batch(spec, 1 << 40) == 3
    assert resolve_max_batch(spec_of(batch_sizes=(1, 12)), 1 << 20) == 12


def test_wide_rounds_verify_what_the_rings_have_room_for() -> None:
    """Rings of 16 entries, as a chain of 5 needs, have room for 7 drafts; 15 take at most a 16th of what the
    slots leave."""
    off, spec = spec_of(lookup="off"), spec_of(lookup="auto")
    assert fit_wide_rounds(off, 8, 1 << 40) is off
    seven = spec.narrow(7)
    assert [ring_length(one.max_drafts, 4) for one in (spec.narrow(0), seven, spec)] == [16, 16, 32]
    row_bytes, wide_bytes = (cache_shape(one).state_row_bytes for one in (seven, spec))

    def least_for(batch: int) -> int:
        """The fewest free bytes whose slots leave 16 times what the longer rings take."""
        slots = batch + SPARE_SLOTS
        return int(slots * (row_bytes + 16 * (wide_bytes - row_bytes)) / spec.config.memory_utilization)

    for batch in (1, 8, 256):
        assert fit_wide_rounds(spec, batch, least_for(batch) + MIB) == spec
        assert fit_wide_rounds(spec, batch, least_for(batch) - MIB) == seven
        assert fit_wide_rounds(spec, batch, 0) == seven
    # Blocks that the config asks for come first.
    given = spec_of(lookup="auto", num_blocks=100)
    blocks_bytes = 100 * cache_shape(given).block_bytes(given.config.block_size)
    assert fit_wide_rounds(given, 8, least_for(8) + MIB).wide_drafts == 7
    assert fit_wide_rounds(given, 8, least_for(8) + 2 * blocks_bytes).wide_drafts == 15


@pytest.mark.parametrize(("mtp_step", "drafts"), [(1, 3), (2, 3), (3, 0), (4, 7), (5, 7), (7, 0)])
def test_rings_of_a_chain_have_room_for_some_more_drafts(mtp_step: int, drafts: int) -> None:
    """Without a byte of memory to spare."""
    spec = fit_wide_rounds(spec_of(lookup="auto", mtp_step=mtp_step), 8, 0)
    assert spec.wide_shapes == ((RoundShape(drafts, mtp_step),) if drafts else ())
    assert (spec.wide_drafts, spec.wide_requests) == (drafts, min(drafts, 1))


def test_the_default_number_of_slots_does_not_depend_on_wide_rounds() -> None:
    spec = spec_of(lookup="auto")
    sizes = range(MIB, 1 << 32, 64 * MIB)
    assert [resolve_max_batch(spec, size) for size in sizes] == [
        resolve_max_batch(spec.narrow(0), size) for size in sizes
    ]


def test_checkpoints_take_their_bytes_before_the_blocks_do() -> None:
    shape = replace(SHAPE_27B, snapshot_bytes=CHECKPOINT_27B)
    numbers = {"block_size": 64, "max_batch": 32, "max_model_len": 4096, "blocks_per_chunk": 8}
    free = 40 << 30
    without = plan_memory(free, shape, **numbers)
    assert without.num_snapshots == 0
    given = plan_memory(free, shape, prefix_cache_bytes=8 << 30, **numbers)
    assert given.num_snapshots == (8 << 30) // CHECKPOINT_27B
    taken = given.num_snapshots * CHECKPOINT_27B
    room = free - 33 * given.state_row_bytes - taken
    assert given.num_blocks == min(room // given.block_bytes, 32 * 64 + 1)
    assert given.total_bytes <= free
    # 4 GiB by default, and an eighth of less than 32.
    default = plan_memory(free, shape, prefix_cache_bytes=None, **numbers)
    assert default.num_snapshots == (4 << 30) // CHECKPOINT_27B
    default = plan_memory(16 << 30, shape, prefix_cache_bytes=None, **numbers)
    assert default.num_snapshots == (2 << 30) // CHECKPOINT_27B


@given(
    free_bytes=st.integers(0, 2**34),
    num_blocks=st.one_of(st.none(), st.integers(2, 3000)),
    max_model_len=st.integers(2, 20_000),
)
def test_checkpoints_by_default_take_an_eighth_and_leave_room_for_a_request(
    free_bytes: int, num_blocks: int | None, max_model_len: int
) -> None:
    numbers = {"block_size": 64, "max_batch": 2, "max_model_len": max_model_len, "num_blocks": num_blocks}
    try:
        without = plan_memory(free_bytes, SHAPE_27B, **numbers)
    except ValueError:
        with pytest.raises(ValueError, match="must"):
            plan_memory(free_bytes, SHAPE_27B, prefix_cache_bytes=None, **numbers)
        return
    plan = plan_memory(free_bytes, SHAPE_27B, prefix_cache_bytes=None, blocks_per_chunk=8, **numbers)
    assert plan.total_bytes <= free_bytes
    assert without.num_blocks >= plan.num_blocks >= 2
    assert plan.num_snapshots * plan.snapshot_bytes <= free_bytes / 8
    assert plan.num_snapshots <= (plan.num_blocks - 1) // 8


def test_a_prefix_cache_that_does_not_fit_is_refused_with_the_numbers() -> None:
    numbers = {"block_size": 64, "max_batch": 2, "max_model_len": 1000}
    with pytest.raises(
        ValueError,
        match=r"9752.8 MiB of .* 60 state snapshots of 15.\.. MiB\), got 2048.0 MiB; .*prefix_cache_gb",
    ):
        plan_memory(2 << 30, SHAPE_27B, prefix_cache_bytes=9 << 30, **numbers)
    with pytest.raises(ValueError, match="prefix_cache_gb must hold a state snapshot of"):
        plan_memory(2 << 34, SHAPE_27B, prefix_cache_bytes=1000, **numbers)


def test_a_scheduler_has_the_numbers_of_spec_and_plan() -> None:
    """And no other: of each field of Limits the number is found in one of the two, by its name."""
    spec = spec_of(max_batch=3, max_model_len=4096, num_blocks=20)
    sizes = {"free_bytes": 1 << 30, "host_bytes": 1 << 30, "draft_head_bytes": 0}
    plan = resolve_memory(spec, **sizes, max_batch=3, rounds=[(3, 8)])
    limits = limits_of(spec, plan)
    assert (limits.max_model_len, limits.longest, plan.max_model_len) == (4096, 19 * 64, 19 * 64)
    assert (limits.prefix_step, limits.mtp_step, limits.max_prompt_chunks) == (64, spec.mtp_step, 3)
    assert limits.given == ()
    rows = replace(plan, num_state_rows=30 + SPARE_SLOTS)
    assert limits_of(spec_of(scoring=True), rows).given == ((3, 30), (7, 30), (15, 16))
    both = {"max_model_len", "longest", "prefix_step", "max_prompt_chunks", "given"}
    for one in fields(limits):
        if one.name not in both:
            places = [place for place in (plan, spec, spec.config) if hasattr(place, one.name)]
            assert getattr(limits, one.name) == getattr(places[0], one.name), one.name
    assert limits.num_snapshots > 0
    assert limits.prefix_host_records > 0
    assert limits.host_records > 0


def test_a_limited_share_of_a_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * MIB, 80 * MIB))
    for share, reserved, free in ((1.0, 0, 60), (0.5, 10, 30), (0.5, 50, 0)):
        fraction, held = float(share), reserved * MIB
        monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda _, f=fraction: f)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _, h=held: h)
        assert free_device_bytes(device) == free * MIB
