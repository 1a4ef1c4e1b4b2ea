"""The phases of a request and the transitions between them."""

from __future__ import annotations

from enum import Enum


class RequestPhase(Enum):
    """A request owns a slot while it is prefilling or running, and a host record while it is offloaded.

    A preempted request that cannot be offloaded waits again; its tokens are then recomputed (`Replay`).
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    OFFLOADED = "offloaded"
    FINISHED = "finished"


TRANSITIONS: dict[RequestPhase, frozenset[RequestPhase]] = {
    RequestPhase.WAITING: frozenset({RequestPhase.PREFILLING, RequestPhase.FINISHED}),
    RequestPhase.PREFILLING: frozenset({RequestPhase.RUNNING, RequestPhase.WAITING, RequestPhase.FINISHED}),
    RequestPhase.RUNNING: frozenset({RequestPhase.OFFLOADED, RequestPhase.WAITING, RequestPhase.FINISHED}),
    RequestPhase.OFFLOADED: frozenset({RequestPhase.RUNNING, RequestPhase.FINISHED}),
    RequestPhase.FINISHED: frozenset(),
}
"""The phases that may follow each phase."""


def check_transition(old: RequestPhase, new: RequestPhase) -> None:
    """Raise AssertionError unless `new` may follow `old`."""
    if new not in TRANSITIONS[old]:
        allowed = ", ".join(sorted(phase.name for phase in TRANSITIONS[old])) or "nothing"
        raise AssertionError(f"{old.name} must be followed by {allowed}, got {new.name}")
