"""What rank 0 sends in a guided round: no more than its masks, and whole, whatever interrupts it."""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.engine import Engine
from compiled_mtp.parallel import leader, plans, ranks
from compiled_mtp.parallel.leader import LeadRunner
from compiled_mtp.parallel.ranks import RankError
from tests.checkpoints import write_checkpoint
from tests.engines import prompt_of
from tests.parallel.rank_engines import GUIDED, MOST_S, config_of, pids_of, processes_of
from tests.parallel.test_ranks import AloneRanks, check_gone, decode

# In a rank: from the moment that a file is there nothing is read.
HANGING = """
import os, time
word = plans._Ring._word
def word_or_hang(self, line):
    while os.path.exists({hang!r}):
        time.sleep(0.1)
    return word(self, line)
plans._Ring._word = word_or_hang
"""
# Of a plan with one request, beside its masks.
MOST_BYTES = 1000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("messages"), tokenizer=True, num_layers=2, interval=2, vocab_size=4096
    )


class PicklingRanks(AloneRanks):
    """Keeps the bytes of every message."""

    def send(self, *message: Any) -> None:
        super().send(*message)
        self.__dict__.setdefault("sizes", []).append((message[0], len(pickle.dumps(message))))


def test_a_guided_round_sends_its_masks_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "Ranks", PicklingRanks)
    sent: list[int] = []
    set_masks = leader.Runner.set_masks

    def keep(runner: Any, plan: Any, masks: Any) -> None:
        sent.append(masks.nbytes)
        set_masks(runner, plan, masks)

    monkeypatch.setattr(leader.Runner, "set_masks", keep)
    with Engine(config_of(directory, max_batch=32, num_blocks=80)) as engine:
        engine.generate([prompt_of(5, 2, 300)], GUIDED)
        assert isinstance(engine.runner, LeadRunner)
        sizes: list[tuple[str, int]] = engine.runner._ranks.__dict__["sizes"]
        assert engine._steps.masks._buffers is not None
        whole = engine._steps.masks._buffers.nbytes
    found = [size for name, size in sizes if name == "set_masks"]
    assert len(found) == len(sent) > 1
    assert all(size < masks + MOST_BYTES < whole for size, masks in zip(found, sent, strict=True))


@pytest.fixture
def short_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message is longer than the ring, here and in the processes of ranks."""
    monkeypatch.setattr(plans, "CAPACITY", 64)
    first, import_main, call = ranks._CODE.rpartition("from compiled_mtp")
    code = "import compiled_mtp.parallel.plans as plans\nplans.CAPACITY = 64\n"
    monkeypatch.setattr(ranks, "_CODE", f"{first}\n{code}{import_main}{call}")


def interrupt_at(engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str, times: int = 1) -> list[int]:
    """Send real signals amid the next message of that name; returns how many are left."""
    writer, left = processes_of(engine).plans, [times]
    send = writer.send

    def send_interrupted(message: Any, check: Any) -> None:
        write = writer._set_word

        def write_interrupted(line: int, value: int) -> None:
            write(line, value)
            while left[0]:
                left[0] -= 1
                signal.raise_signal(signal.SIGINT)

        if message[0] == name:
            monkeypatch.setattr(writer, "_set_word", write_interrupted)
        send(message, check)
        monkeypatch.setattr(writer, "_set_word", write)

    monkeypatch.setattr(writer, "send", send_interrupted)
    return left


@pytest.mark.usefixtures("short_ring")
def test_an_interrupt_amid_a_message_leaves_the_ranks_in_step(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(config_of(directory, 1)) as engine:
        wanted = decode(engine)
    engine = Engine(config_of(directory))
    for name in ("set_masks", "run", "drop_launches", "settings"):
        if name == "drop_launches":
            # It is sent for an interrupt.
            interrupt_at(engine, monkeypatch, "run")
        if name == "settings":
            assert isinstance(engine.runner, LeadRunner)
            engine.runner._settings = None
        left = interrupt_at(engine, monkeypatch, name)
        with pytest.raises(KeyboardInterrupt):
            decode(engine)
        monkeypatch.undo()
        monkeypatch.setattr(plans, "CAPACITY", 64)
        assert left == [0], name
        assert decode(engine) == wanted, name
    # A second Ctrl-C does not wait, and the engine says what that did.
    interrupt_at(engine, monkeypatch, "set_masks", 2)
    with pytest.raises(KeyboardInterrupt):
        decode(engine)
    with pytest.raises(RankError, match="got rank 0: KeyboardInterrupt: ; create the engine again"):
        decode(engine)
    engine.close()


@pytest.mark.usefixtures("short_ring")
@pytest.mark.parametrize("call", [decode, Engine.close], ids=["guided", "close"])
def test_a_rank_that_reads_no_message_is_lost(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Engine], object]
) -> None:
    """It sends heartbeats, and no collective waits for it."""
    hang, limit = tmp_path / "hang", 2
    first, import_main, rest = ranks._CODE.rpartition("from compiled_mtp")
    monkeypatch.setattr(ranks, "_CODE", f"{first}{HANGING.format(hang=str(hang))}{import_main}{rest}")
    monkeypatch.setattr(ranks, "STEP_S", limit)
    engine = Engine(config_of(directory))
    processes = processes_of(engine)
    hang.touch()
    begin = time.monotonic()
    with suppress(RankError):
        call(engine)
    assert time.monotonic() - begin < MOST_S
    assert processes.fault == ranks.Fault(1, f"it did not read a message within {limit} s")
    check_gone(pids_of(processes))
    engine.close()
    assert not processes.folder.exists()
