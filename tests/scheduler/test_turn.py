"""The right to step: it ends with its call, and one call of many has it."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from compiled_mtp.scheduler.turn import Turn


def test_the_turn_of_an_ended_call_is_free_and_of_a_running_one_taken() -> None:
    turn = Turn()

    def cut_off() -> None:
        turn.take()
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            cut_off()

    def nested() -> None:
        turn.take()

    is_inside, may_go_on = threading.Event(), threading.Event()

    def elsewhere() -> None:
        turn.take()
        is_inside.set()
        may_go_on.wait(60)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert is_inside.wait(60)
    # Another thread has the turn in the middle of its call: this thread's call must not get it, nor a nested
    # call.
    with pytest.raises(ValueError, match="by one thread at a time, got a second one"):
        turn.take()
    may_go_on.set()
    thread.join()
    turn.take()
    with pytest.raises(ValueError, match="got a second one"):
        nested()
    turn.leave()
    nested()


def test_only_one_of_many_threads_has_the_turn() -> None:
    turn, inside, most = Turn(), [0], [0]

    def once() -> None:
        with suppress(ValueError):
            turn.take()
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            sum(range(200))
            inside[0] -= 1

    def often() -> None:
        for _ in range(300):
            once()

    threads = [threading.Thread(target=often) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, inside) == ([1], [0])
