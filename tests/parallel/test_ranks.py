"""Processes of ranks: they serve, and what ends one ends all, in seconds, with one error that names it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.async_engine import AsyncEngine
from compiled_mtp.benchmarks.released_shapes import fill_random
from compiled_mtp.communicators import gloo
from compiled_mtp.communicators.communicator import CommunicatorError
from compiled_mtp.engine import Engine
from compiled_mtp.parallel import leader, ranks
from compiled_mtp.parallel.leader import LeadRunner, _delayed_interrupts
from compiled_mtp.parallel.ranks import Fault, RankError, Ranks, _Processes
from compiled_mtp.runner.spec import EngineSpec
from compiled_mtp.streams.status import EngineStoppedError
from tests.adapters import write_adapter
from tests.checkpoints import write_checkpoint
from tests.communicators.threads import thread_communicators
from tests.engines import prompt_of
from tests.parallel.rank_engines import GUIDED, MOST_S, PARAMS, config_of, pids_of, processes_of, spec_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ranks"), tokenizer=True)


def decode(engine: Engine) -> list[list[int]]:
    prompts = [prompt_of(70, 1, 300), prompt_of(5, 2, 300)]
    return [output.new_token_ids for output in engine.generate(prompts, [PARAMS, GUIDED])]


def check_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def ends_with(engine: Engine, message: str, lose: Callable[[int], None]) -> None:
    """Lose rank 1 while a request is decoded."""
    processes = processes_of(engine)
    pids = pids_of(processes)
    engine.add_request(prompt_token_ids=prompt_of(5, 5, 300), params=PARAMS)
    engine.step()
    begin = time.monotonic()
    lose(pids[0])
    with pytest.raises(RankError, match=message):
        engine.generate([prompt_of(5, 6, 300)], PARAMS.model_copy(update={"max_tokens": 100}))
    assert time.monotonic() - begin < MOST_S
    check_gone(pids)
    with pytest.raises(RankError, match=message):
        engine.step()
    engine.close()
    assert not processes.folder.exists()


def test_ranks_serve_until_one_is_killed(directory: Path) -> None:
    with Engine(config_of(directory, 1)) as engine:
        wanted = decode(engine)
    # With a launch in flight, as on GPUs: the others then answer later too.
    engine = Engine(config_of(directory, max_in_flight=1))
    assert decode(engine) == wanted
    message = r"^tensor_parallel=2 must keep its ranks, got rank 1: process \d+ was ended by SIGKILL.*; cr"
    ends_with(engine, message, lambda pid: os.kill(pid, signal.SIGKILL))


def test_a_rank_that_never_comes_is_named(directory: Path) -> None:
    ends_with(
        Engine(config_of(directory)),
        r"got rank 1: (process \d+ sent no heartbeat for 5 s|it did not enter a collective within 7 s);",
        lambda pid: os.kill(pid, signal.SIGSTOP),
    )


def test_ranks_end_with_their_engine(directory: Path) -> None:
    engine = Engine(config_of(directory))
    processes = processes_of(engine)
    pids = pids_of(processes)
    process = processes._by_rank[1]
    engine.close()
    assert process.returncode == 0
    check_gone(pids)
    assert not processes.folder.exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import compiled_mtp.runner.assemble as build\n"
            "def fail(*arguments): raise MemoryError('not a byte is left')\n"
            "build._make_moves = fail\n",
            r"got rank 1: MemoryError: not a byte is left;",
        ),
        ("sys.exit('no such library')\n", r"got rank 1: .*ended with code 1, 'no such library'"),
    ],
    ids=["memory", "import"],
)
def test_a_rank_that_cannot_start_ends_the_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    first, import_main, call = ranks._CODE.rpartition("from compiled_mtp")
    monkeypatch.setattr(ranks, "_CODE", f"{first}\n{code}\n{import_main}{call}")
    started: list[_Processes] = []
    start = _Processes.start

    def keep(processes: _Processes, *arguments: Any) -> None:
        started.append(processes)
        start(processes, *arguments)

    monkeypatch.setattr(_Processes, "start", keep)
    with pytest.raises(RankError, match=message):
        Engine(config_of(directory))
    check_gone(pids_of(started[0]))
    assert not started[0].folder.exists()


def test_a_rank_that_is_killed_before_it_meets_the_others_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "_CONNECT_S", 1.0)
    first, import_main, call = ranks._CODE.rpartition("from compiled_mtp")
    code = (
        "import compiled_mtp.parallel.follower as follower\n"
        "follower.join = lambda *arguments: os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setattr(ranks, "_CODE", f"{first}\n{code}{import_main}{call}")
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"got rank 1: process \d+ was ended by SIGKILL"):
        Engine(config_of(directory))
    assert time.monotonic() - begin < MOST_S


def test_ranks_of_other_versions_are_refused_and_end_with_rank_0(directory: Path) -> None:
    own = leader.fingerprint(directory, has_files=True)
    alone = Ranks(spec_of(config_of(directory)), None)
    message = f"got rank 1: its torch must be rank 0's, 1.0, got {re.escape(own['torch'])};"
    process = alone._processes._by_rank[1]
    while not alone._processes.hellos:
        alone.check()
        time.sleep(0.01)
    # As when rank 0 is killed: it closes nothing, and the pipes that it writes to end.
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(MOST_S) == 1
    alone._processes.fault = None
    with pytest.raises(RankError, match=message):
        alone.connect(own | {"torch": "1.0"})
    alone.end()


def test_weights_may_be_made_up(directory: Path) -> None:
    """As benchmarks do: by a function that ranks import, each for what it holds."""
    with Engine(config_of(directory), fill=fill_random) as engine:
        (output,) = engine.generate([prompt_of(5, 2, 300)], PARAMS)
    assert len(output.new_token_ids) == PARAMS.max_tokens


def test_other_files_have_another_fingerprint(directory: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", intermediate_size=128, tokenizer=True)
    one, two = leader.fingerprint(directory, has_files=True), leader.fingerprint(other, has_files=True)
    assert [name for name in one if one[name] != two[name]] == ["checkpoint"]
    adapter = write_adapter(tmp_path / "lora", directory)
    three = leader.fingerprint(directory, adapter, has_files=True)
    assert [name for name in one if one[name] != three[name]] == ["checkpoint"]


class AloneRanks(Ranks):
    """Rank 0 without others: what it tells them is kept."""

    def __init__(self, spec: EngineSpec, *_: Any) -> None:
        self.world = spec.config.tensor_parallel
        self.told: list[str] = []
        self._processes = _Processes(self.world)
        self._end = weakref.finalize(self, self._processes.end)

    def connect(self, own: Mapping[str, str]) -> Any:
        return thread_communicators(1)[0]

    def wait_until_ready(self) -> None:
        pass

    def send(self, *message: Any) -> None:
        self.check()
        self.told.append(message[0])


def test_what_is_told_and_what_ends_the_ranks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "Ranks", AloneRanks)
    engine = Engine(config_of(directory))
    runner = engine.runner
    assert isinstance(runner, LeadRunner)
    alone = runner._ranks
    assert isinstance(alone, AloneRanks)
    decode(engine)
    assert {*alone.told} == {"settings", "run", "set_masks"}
    assert alone.told.count("settings") == 1
    upload = runner.programs.inputs.upload

    def interrupt(*arguments: Any) -> None:
        runner.programs.inputs.upload = upload  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGINT)
        upload(*arguments)

    # A first Ctrl-C waits for the end of a launch: the ranks stay in step.
    engine.add_request(prompt_token_ids=prompt_of(5, 5, 300), params=PARAMS)
    runner.programs.inputs.upload = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert alone.told[-1] == "drop_launches"
    assert [output.finish_reason for output in engine.step()] == ["error"]
    assert alone.is_whole

    def fail(*arguments: Any) -> None:
        raise MemoryError("no room for the launch")

    runner.programs.inputs.upload = fail  # type: ignore[method-assign]
    engine.add_request(prompt_token_ids=prompt_of(5, 5, 300), params=PARAMS)
    with pytest.raises(RankError, match="got rank 0: MemoryError: no room for the launch; create the engine"):
        engine.step()
    assert not alone.is_whole
    assert alone.told[-1] == "run"
    with pytest.raises(RankError, match="no room for the launch"):
        engine.check()
    with pytest.raises(RankError, match="no room for the launch"):
        engine.step()
    engine.close()


def test_an_interrupt_while_ranks_start_stays_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[AloneRanks] = []

    def interrupt(ranks: AloneRanks, own: Mapping[str, str]) -> None:
        started.append(ranks)
        raise KeyboardInterrupt

    monkeypatch.setattr(leader, "Ranks", AloneRanks)
    monkeypatch.setattr(AloneRanks, "connect", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Engine(config_of(directory))
    assert not started[0]._processes.folder.exists()


def test_what_kernels_missed_ends_the_engine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a token is taken from the step."""
    monkeypatch.setattr(leader, "Ranks", AloneRanks)
    monkeypatch.setattr(ranks, "_CAUSE_S", 0.1)
    engine = Engine(config_of(directory))
    assert isinstance(engine.runner, LeadRunner)

    def check() -> None:
        raise CommunicatorError("rank 1 did not enter a collective within 7 s")

    engine.runner._communicator.check = check  # type: ignore[method-assign]
    with pytest.raises(
        RankError, match="CommunicatorError: rank 1 did not enter a collective within 7 s; cr"
    ):
        engine.generate([prompt_of(5, 5, 300)], PARAMS)
    engine.close()


def test_a_result_is_not_used_once_a_rank_is_lost(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's aborted collectives on a device end without an error."""
    monkeypatch.setattr(leader, "Ranks", AloneRanks)
    engine = Engine(config_of(directory))
    runner = engine.runner
    assert isinstance(runner, LeadRunner)
    processes, read = runner._ranks._processes, runner._read

    def read_late(*arguments: Any) -> Any:
        processes.abort(Fault(1, "process 7 was ended by SIGKILL"))
        return read(*arguments)

    runner._read = read_late  # type: ignore[method-assign]
    engine.add_request(prompt_token_ids=prompt_of(5, 5, 300), params=PARAMS)
    with pytest.raises(RankError, match="got rank 1: process 7 was ended by SIGKILL; create"):
        engine.step()
    engine.close()


class NeverReady:
    """The event of a launch whose kernels wait for a rank until the communicator is aborted: NCCL's."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.aborted.is_set()

    def synchronize(self) -> None:
        assert self.aborted.wait(20)


@pytest.mark.parametrize(
    ("launched", "message"),
    [
        (0, "got rank 1: it did not enter a collective within 0 s: it has launched 0 of 1 plans; create"),
        (1, "got rank 0: its device was not done within 0 s, though every rank has launched the plan; cr"),
    ],
)
def test_a_step_that_a_device_never_ends_is_aborted(
    directory: Path, monkeypatch: pytest.MonkeyPatch, launched: int, message: str
) -> None:
    """Who is behind is known by what each rank said last."""
    monkeypatch.setattr(leader, "Ranks", AloneRanks)
    monkeypatch.setattr(ranks, "DEVICE_S", 0.1)
    engine = Engine(config_of(directory))
    runner, ready = engine.runner, NeverReady()
    assert isinstance(runner, LeadRunner)
    processes, made = runner._ranks._processes, runner._make_buffer
    processes.communicator, processes.launched[1] = runner._communicator, launched
    runner._communicator.abort = ready.aborted.set  # type: ignore[method-assign]
    # As NCCL's.
    runner._communicator.waits_for_graphs = True
    monkeypatch.setattr(runner, "_make_buffer", lambda shape: replace(made(shape), ready=ready))
    listener = threading.Thread(target=processes._listen, daemon=True)
    listener.start()
    engine.add_request(prompt_token_ids=prompt_of(5, 5, 300), params=PARAMS)
    with pytest.raises(RankError, match=message):
        engine.step()
    assert not any((runner.programs._decode, runner.programs._prefill, runner.programs._first_token))
    with pytest.raises(RankError, match=message):
        engine.step()
    engine.close()
    listener.join()


def test_the_cause_of_a_failed_collective_is_another_rank(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the rank that has come less often than the others."""
    monkeypatch.setattr(ranks, "_CAUSE_S", 0.1)
    for counts, rank, text in (
        ({1: 7, 2: 6, 3: 7}, 2, "it did not enter a collective within 7 s"),
        ({1: 7, 2: 7, 3: 7}, 0, "CommunicatorError: timed out"),
    ):
        alone = AloneRanks(spec_of(config_of(directory, 4)))
        alone._processes.counts |= counts
        assert alone.fail("CommunicatorError: timed out", 7) == Fault(rank, text)
    # A kernel that waits on a device for the lost rank is told to end, since the rank will not come.
    communicator, told = thread_communicators(1)[0], list[str]()
    communicator.abort = lambda: told.append("abort")  # type: ignore[method-assign]
    communicator.release = lambda: told.append("release")  # type: ignore[method-assign]
    alone = AloneRanks(spec_of(config_of(directory)))
    alone._processes.communicator = communicator
    alone.fail("RuntimeError: bad")
    assert told == ["abort", "release"]
    refusal = Fault(1, "model must be whole, got half; download it", is_refusal=True).error(2)
    assert isinstance(refusal, ValueError)
    assert str(refusal) == "rank 1: model must be whole, got half; download it"


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Signals that came through."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    yield came
    signal.signal(signal.SIGINT, before)


def test_a_second_interrupt_does_not_wait(handled: list[int]) -> None:
    with _delayed_interrupts():
        signal.raise_signal(signal.SIGINT)
        assert handled == []
        signal.raise_signal(signal.SIGINT)
        assert handled == [signal.SIGINT]
    assert handled == [signal.SIGINT] * 2
    with _delayed_interrupts():
        pass
    assert handled == [signal.SIGINT] * 2
    # Where signals do not arrive nothing is changed.
    other = threading.Thread(target=lambda: _delayed_interrupts().__enter__())
    other.start()
    other.join()
    signal.raise_signal(signal.SIGINT)
    assert handled == [signal.SIGINT] * 3


def test_an_idle_service_notices_a_lost_rank(directory: Path) -> None:
    engine = Engine(config_of(directory))
    (pid,) = pids_of(processes_of(engine))
    service = AsyncEngine(engine)
    assert service.status == "ok"
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + MOST_S
    while service.status == "ok":
        assert time.monotonic() < until
        time.sleep(0.05)
    assert service.status == "stopped"
    with pytest.raises(EngineStoppedError, match=r"the engine died: RankError.*rank 1: process"):
        asyncio.run(service.add(prompt_token_ids=prompt_of(5, 5, 300), params=PARAMS))
    service.close()
