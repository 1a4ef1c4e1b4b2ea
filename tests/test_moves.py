"""A request that moves goes on as if it had stayed; whatever is registered moves with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiled_mtp.build_order import Features
from compiled_mtp.cache.slot_tensors import SlotTensor, SlotTensors
from compiled_mtp.plan import Admit, Copy, Draft, Place, SlotSampling, StepPlan
from tests.checkpoints import write_checkpoint
from tests.drivers import BLOCKS_EACH, Driver, make_runner
from tests.engines import prompt_of

VOCAB = 512
PROMPTS = {"a": prompt_of(20, 1, VOCAB), "b": prompt_of(70, 2, VOCAB)}
HOST = Features(host_records=2, host_blocks=2 * BLOCKS_EACH)
SIZES = {"hidden_size": 64, "num_value_heads": 1, "intermediate_size": 64}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moves")
    write_checkpoint(directory, **SIZES)
    return directory


def begin(directory: Path, **options: object) -> Driver:
    """Two requests with a few tokens each."""
    driver = Driver(make_runner(directory, HOST, **options))
    for slot, (name, prompt) in enumerate(PROMPTS.items(), start=1):
        driver.start(name, slot, prompt)
    driver.decode("a", "b")
    driver.decode("b", "a")
    return driver


@pytest.fixture(scope="module")
def streams(checkpoint: Path) -> dict[str, list[int]]:
    driver = begin(checkpoint)
    for _ in range(14):
        driver.decode("a", "b")
    return driver.drain()


def check(driver: Driver, streams: dict[str, list[int]]) -> None:
    for name, tokens in driver.drain().items():
        assert len(tokens) > 6
        assert tokens == streams[name][: len(tokens)]


@pytest.mark.parametrize("max_in_flight", [0, 1])
@pytest.mark.parametrize("with_blocks", [False, True])
def test_a_request_moves_to_another_slot(
    checkpoint: Path, streams: dict[str, list[int]], max_in_flight: int, with_blocks: bool
) -> None:
    driver = begin(checkpoint, max_in_flight=max_in_flight)
    for slot in (3, 1, 3):
        driver.move("a", slot, with_blocks=with_blocks)
        driver.decode("b", "a")
        driver.decode("a")
    driver.move("b", 1, with_blocks=with_blocks)
    for _ in range(3):
        driver.decode("a", "b")
    check(driver, streams)


@pytest.mark.parametrize("max_in_flight", [0, 1])
@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn"])
def test_a_request_goes_to_host_memory_and_comes_back(
    checkpoint: Path, streams: dict[str, list[int]], max_in_flight: int, kv_dtype: str
) -> None:
    if kv_dtype != "auto":
        plain = begin(checkpoint, kv_dtype=kv_dtype)
        for _ in range(14):
            plain.decode("a", "b")
        streams = plain.drain()
    driver = begin(checkpoint, max_in_flight=max_in_flight, kv_dtype=kv_dtype)
    driver.offload("a", 1)
    driver.decode("b")
    driver.bring_back("a", 1, 3)
    driver.decode("a", "b")
    driver.offload("b", 0)
    driver.offload("a", 1)
    driver.bring_back("b", 0, 1)
    driver.bring_back("a", 1, 2)
    for _ in range(3):
        driver.decode("b", "a")
    check(driver, streams)
    done = [copy_id for result in driver.results for copy_id in result.copies_done]
    assert done == [101, 201, 100, 101, 200, 201]
    assert all(result.plan.kind == "move" for result in driver.results if result.copies_done)


def test_what_a_test_registers_is_admitted_and_moved(checkpoint: Path) -> None:
    driver = Driver(make_runner(checkpoint, HOST))
    moves = driver.runner.moves
    dummy = torch.full((4, 5), -1, dtype=torch.int32)
    moves.slot_tensors.register(SlotTensor("dummy", dummy, initial=9))
    moves.allocate_host(2, 2 * BLOCKS_EACH)
    driver.start("a", 1, PROMPTS["a"])
    assert dummy[1].tolist() == [9] * 5
    dummy[1] = torch.arange(5)
    driver.move("a", 3, with_blocks=False)
    driver.offload("a", 0)
    assert dummy[3].tolist() == [3] * 5
    driver.bring_back("a", 0, 2)
    assert dummy.tolist() == [[-1] * 5, [3] * 5, list(range(5)), [3] * 5]


def test_a_checkpoint_takes_what_a_later_chunk_reads_and_gives_it_to_another_slot(checkpoint: Path) -> None:
    driver = Driver(make_runner(checkpoint))
    moves = driver.runner.moves
    for name, is_in_checkpoint in (("kept", True), ("left", False)):
        tensor = torch.zeros((4, 5), dtype=torch.int32)
        moves.slot_tensors.register(SlotTensor(name, tensor, is_in_checkpoint=is_in_checkpoint))
    moves.allocate_checkpoints(2)
    slot, place, other = Place("slot", 1), Place("checkpoint", 1), Place("slot", 2)
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


def test_moves_are_carried_out_in_the_order_of_the_plan(checkpoint: Path) -> None:
    driver = begin(checkpoint)
    slots = driver.runner.step.slots
    last = int(slots.last_token[1])
    admit = Admit(1, SlotSampling(5, 0.5, 3, 0.25, 0.125))
    copies = [Copy(i, Place("slot", 1), Place("slot", 3)) for i in (0, 1)]
    driver.run("move", moves=(copies[0], admit))
    assert int(slots.last_token[3]) == last
    assert int(slots.last_token[1]) == int(slots.pos[1]) == int(slots.base[1]) == 0
    given = [getattr(slots, name)[1].item() for name in ("seed", "temperature", "top_k", "top_p", "min_p")]
    assert given == [5, 0.5, 3, 0.25, 0.125]
    driver.run("move", moves=(admit, copies[1]))
    assert int(slots.last_token[3]) == 0


def test_a_place_that_does_not_exist_is_an_error_of_its_plan(checkpoint: Path) -> None:
    runner, bare = make_runner(checkpoint, HOST), make_runner(checkpoint, offload_gb=0, prefix_cache=False)
    slot, record = Place("slot", 1), Place("host", 0)
    wrong = (
        (bare, slot, record, (), "target must lie in a tier that was allocated, got 'host'; give the runner"),
        (bare, slot, Place("checkpoint", 0), (), "target must lie in a tier that was allocated, got 'check"),
        (runner, slot, Place("checkpoint", 99), (), "target must be checkpoint 0 to "),
        (runner, Place("slot", 0), record, (), "source must be slot 1 to 3, got 0; give the runner room for"),
        (runner, Place("slot", 4), record, (), "source must be slot 1 to 3, got 4; give the runner room for"),
        (runner, Place("host", -1), slot, (), "source must be host 0 to 1, got -1; give the runner room for"),
        (runner, slot, Place("host", 2), (), "target must be host 0 to 1, got 2; give the runner room for m"),
        (runner, slot, record, ((0, 0),), "source must have blocks 1 to 32, got 0; give the runner room for"),
        (runner, slot, record, ((1, 16),), "target must have blocks 0 to 15, got 16; give the runner room f"),
    )
    for one, source, target, blocks, text in wrong:
        result = one.run(StepPlan(0, "move", moves=(Copy(0, source, target, blocks),)))
        assert result is not None
        assert result.error is not None
        assert result.copies_done == ()
        assert text in result.error


def test_a_copy_without_memory_fails_alone(
    checkpoint: Path, streams: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = begin(checkpoint)
    assert driver.runner.moves.host is not None
    assert driver.runner.moves.host.allocated_bytes == 0
    monkeypatch.setattr("compiled_mtp.cache.host_tier._allocate", _refuse)
    pairs = tuple((block, index) for index, block in enumerate(driver.blocks["a"]))
    copy = Copy(7, Place("slot", driver.slots["a"]), Place("host", 0), pairs)
    driver.decode("b", moves=(copy,))
    driver.decode("b", "a")
    (result,) = (result for result in driver.results if result.copies_failed)
    assert (result.copies_failed, result.copies_done, result.error) == ((7,), (), None)
    for name, tokens in driver.drain().items():
        assert len(tokens) > 3
        assert tokens == streams[name][: len(tokens)]


def _refuse(like: object, count: int | None) -> None:
    raise RuntimeError("no memory")


def test_uploaded_drafts_are_verified(checkpoint: Path, streams: dict[str, list[int]]) -> None:
    driver = Driver(make_runner(checkpoint, HOST))
    for slot, (name, prompt) in enumerate(PROMPTS.items(), start=1):
        driver.start(name, slot, prompt)
    for begin in (1, 5, 9):
        known = [tuple(streams[name][begin : begin + 3]) for name in PROMPTS]
        moves = (Draft(2, known[1]), Draft(1, known[0]))
        driver.decode("a", "b", moves=moves)
    assert driver.drain() == {name: stream[:13] for name, stream in streams.items()}


def test_memory_for_the_host_tier_of_a_cpu_is_planned(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled_mtp.build.available_bytes", lambda: 1 << 29)
    assert make_runner(checkpoint, HOST).num_blocks == 4 * BLOCKS_EACH + 1
    for features in (Features(host_records=10**5), Features(host_records=1, host_blocks=10**6)):
        with pytest.raises(ValueError, match=r"^free memory must hold .* of caches"):
            make_runner(checkpoint, features)


def test_registration_is_checked() -> None:
    tensors = SlotTensors([SlotTensor("a", torch.zeros(3, 2))])
    with pytest.raises(ValueError, match=r"^name must be unused, got 'a'; choose another"):
        tensors.register(SlotTensor("a", torch.zeros(3)))
    with pytest.raises(ValueError, match=r"^b must have 3 slots, got 4; make a row"):
        tensors.register(SlotTensor("b", torch.zeros(4)))
