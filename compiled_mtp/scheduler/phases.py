"""Where a request stands, and what may follow."""

from __future__ import annotations

from enum import Enum


class RequestPhase(Enum):
    """A request owns a slot while it is prefilling or running, and a host record while it is offloaded.

    One that must leave its slot and cannot be copied waits again, and its tokens are then replayed.
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
"""What may follow each phase; nothing else may."""


def check_transition(old: RequestPhase, new: RequestPhase) -> None:
    """Raise AssertionError unless `new` may follow `old`: anything else is a bug of ours."""
    if new not in TRANSITIONS[old]:
        allowed = ", ".join(sorted(phase.name for phase in TRANSITIONS[old])) or "nothing"
        raise AssertionError(f"{old.name} must be followed by {allowed}, got {new.name}")
