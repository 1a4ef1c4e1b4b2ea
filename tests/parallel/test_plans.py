"""Messages reach every reader whole and in order, however long they are."""

from __future__ import annotations

import os
import threading

import pytest

from compiled_mtp.parallel import plans
from compiled_mtp.parallel.plans import CAPACITY, PlanReader, PlanWriter


def reader_of(writer: PlanWriter, rank: int) -> PlanReader:
    return PlanReader(rank, writer.file, writer.pipes[rank][0])


def test_messages_come_in_order_and_of_any_length() -> None:
    writer = PlanWriter(3)
    messages = [("run", n, os.urandom(n)) for n in (0, 1, 300, CAPACITY - 40, 3 * CAPACITY + 5, 7)]
    received: dict[int, list[object]] = {1: [], 2: []}

    def read(rank: int) -> None:
        reader = reader_of(writer, rank)
        received[rank] = [reader.receive() for _ in messages]

    threads = [threading.Thread(target=read, args=(rank,)) for rank in received]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.send(message, lambda: None)
    for thread in threads:
        thread.join(60)
    assert received == {1: messages, 2: messages}
    writer.close()


def test_a_sleeping_reader_wakes() -> None:
    writer = PlanWriter(2)
    reader, received = reader_of(writer, 1), []
    thread = threading.Thread(target=lambda: received.append(reader.receive()))
    thread.start()
    while not reader._word(plans._MOST_RANKS + 1):
        thread.join(0.01)
    writer.send("late", lambda: None)
    thread.join(60)
    assert received == ["late"]
    writer.close()


def test_a_full_ring_asks_whether_its_readers_will_come() -> None:
    writer, asked = PlanWriter(2), []

    def check() -> None:
        asked.append(True)
        if len(asked) == 3:
            raise ChildProcessError("rank 1 is gone")

    with pytest.raises(ChildProcessError, match="gone"):
        writer.send(bytes(2 * CAPACITY), check)
    assert len(asked) == 3
    writer.close()


def test_a_message_that_changed_on_its_way_is_an_error() -> None:
    writer = PlanWriter(2)
    reader = reader_of(writer, 1)
    writer.send("abcdefgh", lambda: None)
    place = writer._memory.find(b"abcd")
    writer._memory[place] = ord("x")
    with pytest.raises(RuntimeError, match=r"the checksum of a message of \d+ bytes is wrong"):
        reader.receive()
    writer.close()
