"""A request that is offloaded and resumed continues unchanged; all registered rows move with it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_mtp.cache.copy_stream import CopyStream
from compiled_mtp.cache.host_tier import _powers_of_two
from compiled_mtp.cache.row_layout import RowLayout
from compiled_mtp.cache.slot_tensors import SlotTensor, SlotTensors
from compiled_mtp.plan import Admit, Copy, Draft, Location, SlotSampling, StepPlan
from tests.checkpoints import write_checkpoint
from tests.drivers import BLOCKS_EACH, Driver, make_runner
from tests.engines import prompt_of

VOCAB = 512
PROMPTS = {"a": prompt_of(20, 1, VOCAB), "b": prompt_of(70, 2, VOCAB)}
SIZES = {"hidden_size": 64, "num_value_heads": 1, "intermediate_size": 64}


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moves")
    write_checkpoint(directory, **SIZES)
    return directory


def begin(directory: Path, **options: object) -> Driver:
    """Two requests with a few tokens each."""
    driver = Driver(make_runner(directory, **options))
    for slot, (name, prompt) in enumerate(PROMPTS.items(), start=1):
        driver.start(name, slot, prompt)
    driver.decode("a", "b")
    driver.decode("b", "a")
    return driver


@pytest.fixture(scope="module")
def streams(snapshot: Path) -> dict[str, list[int]]:
    driver = begin(snapshot)
    for _ in range(14):
        driver.decode("a", "b")
    return driver.drain()


def check(driver: Driver, streams: dict[str, list[int]]) -> None:
    for name, tokens in driver.drain().items():
        assert len(tokens) > 6
        assert tokens == streams[name][: len(tokens)]


@pytest.mark.parametrize("max_in_flight", [0, 1])
@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn"])
def test_a_request_goes_to_host_memory_and_comes_back(
    snapshot: Path, streams: dict[str, list[int]], max_in_flight: int, kv_dtype: str
) -> None:
    if kv_dtype != "auto":
        plain = begin(snapshot, kv_dtype=kv_dtype)
        for _ in range(14):
            plain.decode("a", "b")
        streams = plain.drain()
    driver = begin(snapshot, max_in_flight=max_in_flight, kv_dtype=kv_dtype)
    driver.offload("a", 1)
    driver.decode("b")
    driver.bring_back("a", 1, 3)
    driver.decode("b")
    driver.decode("a", "b")
    driver.offload("b", 0)
    driver.offload("a", 1)
    driver.bring_back("b", 0, 1)
    driver.bring_back("a", 1, 2)
    for _ in range(3):
        driver.decode("b", "a")
    check(driver, streams)
    done = [copy_id for result in driver.results for copy_id in result.copies_done]
    assert done == list(range(6))
    assert all(result.plan.kind == "move" for result in driver.results if result.copies_done)


def test_what_a_test_registers_is_admitted_and_moved(snapshot: Path) -> None:
    driver = Driver(make_runner(snapshot))
    moves = driver.runner.moves
    dummy = torch.full((5, 5), -1, dtype=torch.int32)
    moves.slot_tensors.register(SlotTensor("dummy", dummy, initial=9))
    moves.allocate_host(2, 2 * BLOCKS_EACH)
    driver.start("a", 1, PROMPTS["a"])
    assert dummy[1].tolist() == [9] * 5
    dummy[1] = torch.arange(5)
    driver.offload("a", 0)
    assert dummy[1].tolist() == [3] * 5
    driver.bring_back("a", 0, 2)
    assert dummy.tolist() == [[-1] * 5, [3] * 5, list(range(5)), [-1] * 5, [-1] * 5]


def test_a_snapshot_brings_what_the_next_chunk_reads_to_another_slot(snapshot: Path) -> None:
    driver = Driver(make_runner(snapshot))
    moves = driver.runner.moves
    for name, is_in_snapshot in (("kept", True), ("left", False)):
        tensor = torch.zeros((5, 5), dtype=torch.int32)
        moves.slot_tensors.register(SlotTensor(name, tensor, is_in_snapshot=is_in_snapshot))
    moves.allocate_snapshots(2)
    slot, place, other = Location("slot", 1), Location("snapshot", 1), Location("slot", 2)
    for entry in moves.slot_tensors:
        entry.tensor[1], entry.tensor[2] = 1, 0
    moves.save(StepPlan(0, "move", saves=(Copy(0, slot, place),)))
    for entry in moves.slot_tensors:
        entry.tensor[1] = 0
    moves.carry_out(StepPlan(1, "move", moves=(Copy(1, place, other),)))
    found = {entry.name.rpartition(".")[2]: entry.tensor[2].unique().tolist() for entry in moves.slot_tensors}
    taken = {name for name, values in found.items() if values == [1]}
    assert taken == {"state", "conv_ring", "last_hidden", "kept"}
    assert all(values == [0] for name, values in found.items() if name not in taken)


class Launches(TorchDispatchMode):
    """Counts what a device would launch: everything but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and not name.startswith(("empty", "lift", "detach", "_to_copy")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_launches_wait_for_copies_of_what_they_write_or_read(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot is overwritten after its copy to the host; a state from the host is read whole."""
    moves = make_runner(snapshot).moves
    moves.allocate_snapshots(1)
    moves.allocate_prefix_host(1, 1)
    tiers = {id(stream): name for name, stream in moves._copy_streams.items()}
    order = []
    for name in ("pack", "unpack"):
        monkeypatch.setattr(RowLayout, name, lambda *_, name=name: order.append(name))
    monkeypatch.setattr(CopyStream, "hold_launches", lambda stream: order.append(tiers[id(stream)]))
    slot, saved = Location("slot", 1), Location("snapshot", 0)
    moves.save(StepPlan(0, "prefill", saves=(Copy(1, slot, saved),)))
    assert order == ["prefix_host", "pack"]
    host = Location("prefix_host", 0)
    moves.carry_out(StepPlan(1, "move", moves=(Copy(2, saved, host),)))
    order.clear()
    moves.carry_out(StepPlan(2, "move", moves=(Copy(3, host, slot),)))
    assert order == ["unpack", "prefix_host"]


def test_a_slot_moves_in_a_few_copies_however_many_layers_there_are(snapshot: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_layers=24, **SIZES)
    slot, record = Location("slot", 1), Location("host", 0)
    pairs = tuple((block, block - 1) for block in range(1, BLOCKS_EACH + 1))
    back = tuple((target, source) for source, target in pairs)
    copies = {
        "save": Copy(1, slot, Location("snapshot", 0)),
        "resume": Copy(2, Location("snapshot", 0), Location("slot", 2)),
        "out": Copy(3, slot, record, pairs),
        "in": Copy(4, record, Location("slot", 2), back),
    }
    counts = []
    for directory in (snapshot, tmp_path):
        moves = make_runner(directory).moves
        counts.append({})
        for name, copy in copies.items():
            with Launches() as launches:
                moves.carry_out(StepPlan(0, "move", moves=(copy,)))
            counts[-1][name] = len(launches.names)
    assert counts[0] == counts[1]
    # Five kinds of GDN state, the other rows together (one launch per dtype on the way back), and the blocks.
    assert counts[0] == {"save": 3, "resume": 3, "out": 7, "in": 10}


def test_scattered_blocks_in_any_order_come_back(snapshot: Path) -> None:
    moves = make_runner(snapshot).moves
    (pages,) = moves._block_layout._spread
    for block in range(33):
        pages.tensor[block] = block
    pairs = ((9, 15), (4, 3), (7, 2), (32, 0), (1, 4))
    moves.carry_out(StepPlan(0, "move", moves=(Copy(0, Location("slot", 1), Location("host", 0), pairs),)))
    pages.tensor[1:] = -1
    back = tuple((target, 20 + index) for index, (_, target) in enumerate(pairs))
    moves.carry_out(StepPlan(0, "move", moves=(Copy(0, Location("host", 0), Location("slot", 1), back),)))
    found = [pages.tensor[20 + index].unique().tolist() for index in range(len(pairs))]
    assert found == [[source] for source, _ in pairs]


def test_pinned_memory_is_taken_in_powers_of_two() -> None:
    # A request's rows at 27B: 163.6 MiB.
    sizes = _powers_of_two(171_540_480)
    assert sum(sizes) == 171_540_480
    assert len(sizes) < 9
    assert all(size & (size - 1) == 0 for size in sizes[:-1])
    taken = sum(1 << (size - 1).bit_length() for size in sizes)
    assert taken < 1.01 * sum(sizes)
    assert _powers_of_two(0) == []


def test_moves_are_carried_out_in_the_order_of_the_plan(snapshot: Path) -> None:
    driver = begin(snapshot)
    slots = driver.runner.step.slots
    last = int(slots.last_token[1])
    admit = Admit(1, SlotSampling(5, 0.5, 3, 0.25, 0.125))
    record = Location("host", 0)
    out = [Copy(i, Location("slot", 1), record) for i in (0, 1)]
    back = [Copy(i, record, Location("slot", 3)) for i in (2, 3)]
    driver.run("move", moves=(out[0], admit, back[0]))
    assert int(slots.last_token[3]) == last
    assert int(slots.last_token[1]) == int(slots.pos[1]) == int(slots.base[1]) == 0
    given = [getattr(slots, name)[1].item() for name in ("seed", "temperature", "top_k", "top_p", "min_p")]
    assert given == [5, 0.5, 3, 0.25, 0.125]
    driver.run("move", moves=(admit, out[1], back[1]))
    assert int(slots.last_token[3]) == 0


def test_a_location_that_does_not_exist_is_an_error_of_its_plan(snapshot: Path) -> None:
    runner, bare = make_runner(snapshot), make_runner(snapshot, offload_gb=0, prefix_cache=False)
    runner.moves.allocate_host(2, 2 * BLOCKS_EACH)
    slot, record = Location("slot", 1), Location("host", 0)
    wrong = (
        (bare, slot, record, (), "target must be in an allocated tier, got 'host'; give the runner"),
        (bare, slot, Location("snapshot", 0), (), "target must be in an allocated tier, got 'snap"),
        (runner, slot, Location("snapshot", 99), (), "target must be snapshot 0 to "),
        (
            runner,
            Location("slot", 0),
            record,
            (),
            "source must be slot 1 to 4, got 0; give the runner memory",
        ),
        (
            runner,
            Location("slot", 5),
            record,
            (),
            "source must be slot 1 to 4, got 5; give the runner memory",
        ),
        (
            runner,
            Location("host", -1),
            slot,
            (),
            "source must be host 0 to 1, got -1; give the runner memory",
        ),
        (
            runner,
            slot,
            Location("host", 2),
            (),
            "target must be host 0 to 1, got 2; give the runner memory",
        ),
        (runner, slot, record, ((0, 0),), "source must have blocks 1 to 32, got 0; give the runner memory"),
        (runner, slot, record, ((1, 16),), "target must have blocks 0 to 15, got 16; give the runner memory"),
    )
    for one, source, target, blocks, text in wrong:
        result = one.run(StepPlan(0, "move", moves=(Copy(0, source, target, blocks),)))
        assert result is not None
        assert result.error is not None
        assert result.copies_done == ()
        assert text in result.error


@pytest.mark.parametrize("short", ["_allocate", "Staging.reserve"], ids=["host", "device"])
@pytest.mark.parametrize("tier", ["host", "prefix_host"])
def test_a_copy_without_memory_fails_alone(
    snapshot: Path,
    streams: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tier: Literal["host", "prefix_host"],
    short: str,
) -> None:
    driver = begin(snapshot)
    assert driver.runner.moves.host_bytes == 0
    driver.runner.moves.allocate_snapshots(1)
    driver.runner.moves.allocate_prefix_host(1, BLOCKS_EACH)
    monkeypatch.setattr(f"compiled_mtp.cache.host_tier.{short}", _refuse)
    pairs = tuple((block, index) for index, block in enumerate(driver.blocks["a"]))
    source = Location("slot", driver.slots["a"]) if tier == "host" else Location("snapshot", 0)
    copy = Copy(7, source, Location(tier, 0), pairs)
    driver.decode("b", moves=(copy,))
    driver.decode("b", "a")
    (result,) = (result for result in driver.results if result.copies_failed)
    assert (result.copies_failed, result.copies_done, result.error) == ((7,), (), None)
    for name, tokens in driver.drain().items():
        assert len(tokens) > 3
        assert tokens == streams[name][: len(tokens)]


def _refuse(*_: object) -> None:
    raise torch.OutOfMemoryError("no memory")


def test_moves_that_are_dropped_without_close_wait_for_their_copies(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator reuses freed device memory at once."""
    gc.collect()  # Runners of other tests wait for their copies too.
    runner = make_runner(snapshot)
    caches = (runner.step.kv_cache, runner.step.slots)
    memory = [StorageWeakRef(next(cache.buffers()).untyped_storage()) for cache in caches]
    seen = []
    monkeypatch.setattr(CopyStream, "wait", lambda *_: seen.append([one.expired() for one in memory]))
    del runner, caches
    gc.collect()
    assert seen == [[False, False]] * 2
    assert [one.expired() for one in memory] == [True, True]


def test_uploaded_drafts_are_verified(snapshot: Path, streams: dict[str, list[int]]) -> None:
    driver = Driver(make_runner(snapshot))
    for slot, (name, prompt) in enumerate(PROMPTS.items(), start=1):
        driver.start(name, slot, prompt)
    for begin in (1, 5, 9):
        known = [tuple(streams[name][begin : begin + 3]) for name in PROMPTS]
        moves = (Draft(2, known[1]), Draft(1, known[0]))
        driver.decode("a", "b", moves=moves)
    assert driver.drain() == {name: stream[:13] for name, stream in streams.items()}


def test_uploaded_drafts_do_not_count_as_looked_up(snapshot: Path) -> None:
    driver = begin(snapshot)
    slots = driver.runner.step.slots
    assert slots.matched is not None
    slots.matched[1:3] = 5
    driver.run("move", moves=(Draft(1, (3, 4)),))
    assert slots.drafts[1, :2].tolist() == [3, 4]
    assert slots.matched[1:3].tolist() == [0, 5]


def test_memory_for_the_host_tier_of_a_cpu_is_planned(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled_mtp.runner.assemble.available_bytes", lambda: 1 << 29)
    assert make_runner(snapshot, offload_gb=0.3).memory.num_blocks == 4 * BLOCKS_EACH + 1
    with pytest.raises(ValueError, match=r"^free memory must hold .* of caches"):
        make_runner(snapshot, offload_gb=0.5)


def test_registration_is_checked() -> None:
    tensors = SlotTensors([SlotTensor("a", torch.zeros(3, 2))])
    with pytest.raises(ValueError, match=r"^name must be unused, got 'a'; choose another"):
        tensors.register(SlotTensor("a", torch.zeros(3)))
    with pytest.raises(ValueError, match=r"^b must have 3 slots, got 4; make a row"):
        tensors.register(SlotTensor("b", torch.zeros(4)))
