"""Where requests and aborts of any thread wait for the thread that steps."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Sequence

from compiled_mtp.errors import quote
from compiled_mtp.request import Request, derive_seed
from compiled_mtp.sampling.params import choice_seed
from compiled_mtp.scheduler import Scheduler


class Inbox:
    """Names requests, numbers them in the order of arrival, and keeps them until `hand_over`.

    `seed` is the engine's: the seeds of requests that bring none are derived from it. Any thread may call
    every method but `hand_over`, `pass_aborts` and `forget`, which belong to the thread that steps. A
    signal's handler may call `put`, `new_id` and `abort` too, wherever it interrupts its thread.
    """

    def __init__(self, scheduler: Scheduler, seed: int | None) -> None:
        self._scheduler = scheduler
        self._seed = seed
        # Its thread may be interrupted by a handler that asks for it again: what is between two statements
        # must then be true.
        self._lock = threading.RLock()
        # By id, all choices of each.
        self._requests: dict[str, Sequence[Request]] = {}
        self._aborts: set[str] = set()
        self._names = itertools.count(1)
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, list(self._requests.values())))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to hand over."""
        return not (self._requests or self._aborts)

    def put(self, choices: Sequence[Request]) -> str:
        """Take a request, given as all of its choices; return its id, which is made here if it is empty.

        Mutates ids and seeds: the seeds of choices follow from the first one's (`choice_seed`). Raises
        ValueError for an id in use.
        """
        first = choices[0]
        with self._lock:
            request_id = first.request_id
            # Of one of the same name that ended by itself in the meantime.
            is_stale = request_id in self._aborts
            if not request_id:
                request_id = self._new_id()
            elif self._has_id(request_id):
                raise id_in_use(request_id)
            seed, number = first.history.seed, next(self._numbers)
            if first.params.seed is None and self._seed is not None:
                seed = derive_seed(self._seed, number)
            for request in choices:
                request.request_id, request.history.seed = request_id, choice_seed(seed, request.index)
            if self._requests.setdefault(request_id, choices) is not choices:
                raise id_in_use(request_id)
            if is_stale:
                self._aborts.discard(request_id)
        return request_id

    def new_id(self) -> str:
        """An id of our own that nobody has taken, and that is not given again."""
        with self._lock:
            return self._new_id()

    def abort(self, request_id: str) -> None:
        """Note that a request is to end. Raises ValueError for an id that names none that is live."""
        with self._lock:
            is_live = request_id in self._requests or self._scheduler.is_live(request_id)
            if not is_live or request_id in self._aborts:
                raise ValueError(
                    f"request_id must name a request that has not finished, got {quote(request_id)}; give a "
                    "live one"
                )
            self._aborts.add(request_id)

    def hand_over(self) -> None:
        """Give the scheduler the requests that have come since. Interrupted anywhere it is called again
        before the scheduler plans.
        """
        if not self._requests:
            return
        with self._lock:
            for request_id, choices in list(self._requests.items()):
                self._scheduler.add(*choices)
                del self._requests[request_id]

    def pass_aborts(self) -> None:
        """End the requests that are to end and have been handed over. After an interrupt the scheduler must
        recover.
        """
        if not self._aborts:
            return
        with self._lock:
            for request_id in self._aborts - self._requests.keys():
                if self._scheduler.is_live(request_id):
                    self._scheduler.abort(request_id)
                self._aborts.discard(request_id)

    def forget(self, request_ids: Collection[str] | None = None) -> None:
        """Drop these requests, or all."""
        with self._lock:
            for request_id in list(self._requests) if request_ids is None else request_ids:
                self._requests.pop(request_id, None)
                self._aborts.discard(request_id)

    def _has_id(self, request_id: str) -> bool:
        # In this order: a request is handed over before it leaves the inbox.
        return request_id in self._requests or self._scheduler.has_id(request_id)

    def _new_id(self) -> str:
        while True:
            if not self._has_id(request_id := f"request-{next(self._names)}"):
                return request_id


def id_in_use(request_id: str) -> ValueError:
    """What an id that a request still has is refused with."""
    return ValueError(f"request_id must be unused, got {quote(request_id)}; choose another")
