"""Holds requests and aborts from any thread until the stepping thread takes them."""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Collection, Generator, Sequence
from typing import TypeAlias

from compiled_mtp.request import Request, RequestOutput, derive_seed
from compiled_mtp.sampling.parameter_checks import choice_seed
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.live_requests import id_in_use, not_live

StreamRef: TypeAlias = weakref.ref[Generator[RequestOutput, None, None]]
"""The generator that yields a request's outputs, which only its caller keeps alive."""


class Inbox:
    """Gives requests their ids and arrival numbers, and keeps them until `hand_over`.

    seed: the engine's seed, from which requests without a seed derive theirs. streams: the streams of
    requests whose outputs go to a stream of their own, by request id, until their last outputs are delivered.
    Any thread may call every method except `hand_over`, `pass_aborts`, `end_left_streams` and `forget`, which
    belong to the stepping thread. A signal handler may call `put`, `new_id` and `abort` wherever it
    interrupts its thread.
    """

    def __init__(self, scheduler: Scheduler, seed: int | None) -> None:
        self._scheduler = scheduler
        self._seed = seed
        # Reentrant: a signal handler may interrupt the thread that holds the lock and call `put` itself. The
        # fields must therefore be consistent between any two statements.
        self._lock = threading.RLock()
        # All choices of each request, by id.
        self._requests: dict[str, Sequence[Request]] = {}
        self._aborts: set[str] = set()
        self.streams: dict[str, StreamRef] = {}
        self._names = map("request-{}".format, itertools.count(1))
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, list(self._requests.values())))

    @property
    def is_empty(self) -> bool:
        """Whether no request and no abort waits."""
        return not (self._requests or self._aborts)

    def put(self, choices: Sequence[Request], stream: StreamRef | None = None) -> str:
        """Take a request, given as all of its choices; return its id, a new one if it has none.

        stream: where its outputs go, None for `Engine.step`. Sets the id and seed of every choice; the seeds
        derive from the first choice's (`choice_seed`). Raises ValueError for an id in use.
        """
        first = choices[0]
        with self._lock:
            request_id = first.request_id
            # A pending abort may belong to an earlier request of this id, which has finished by itself.
            is_stale = request_id in self._aborts
            if not request_id:
                request_id = self.new_id()
            elif self._has_id(request_id):
                raise id_in_use(request_id)
            seed, number = first.history.seed, next(self._numbers)
            if first.params.seed is None and self._seed is not None:
                seed = derive_seed(self._seed, number)
            for request in choices:
                request.request_id, request.history.seed = request_id, choice_seed(seed, request.index)
            if stream is not None:
                # First, so that no interrupt leaves the request without its stream.
                self.streams[request_id] = stream
            if self._requests.setdefault(request_id, choices) is not choices:
                raise id_in_use(request_id)
            if is_stale:
                self._aborts.discard(request_id)
        return request_id

    def new_id(self) -> str:
        """Return an unused id; never the same one twice."""
        with self._lock:
            return next(name for name in self._names if not self._has_id(name))

    def abort(self, request_id: str) -> None:
        """Record an abort. Raises ValueError for an id without a live request, or with an abort pending."""
        with self._lock:
            is_live = request_id in self._requests or self._scheduler.is_live(request_id)
            if not is_live or request_id in self._aborts:
                raise not_live(request_id)
            self._aborts.add(request_id)

    def hand_over(self) -> None:
        """Pass the waiting requests to the scheduler; after an interrupt, call it again before planning."""
        if not self._requests:
            return
        with self._lock:
            for request_id, choices in list(self._requests.items()):
                self._scheduler.add(*choices)
                del self._requests[request_id]

    def pass_aborts(self) -> None:
        """Pass the aborts to the scheduler, except those of requests that it does not have yet.

        After an interrupt the scheduler must recover.
        """
        if not self._aborts:
            return
        with self._lock:
            for request_id in self._aborts - self._requests.keys():
                if self._scheduler.is_live(request_id):
                    self._scheduler.abort(request_id)
                self._aborts.discard(request_id)

    def end_left_streams(self) -> None:
        """End the requests whose streams were left before their end, without an output."""
        for request_id, reference in list(self.streams.items()):
            stream = reference()
            if stream is None or inspect.getgeneratorstate(stream) == inspect.GEN_CLOSED:
                self.forget((request_id,))
                self._scheduler.forget((request_id,))
                self.streams.pop(request_id, None)

    def forget(self, request_ids: Collection[str] | None = None) -> None:
        """Drop the requests of these ids and their aborts; None drops all."""
        with self._lock:
            for request_id in list(self._requests) if request_ids is None else request_ids:
                self._requests.pop(request_id, None)
                self._aborts.discard(request_id)

    def _has_id(self, request_id: str) -> bool:
        # The order matters: `hand_over` adds a request to the scheduler before it leaves the inbox. A stream
        # would take the outputs of another request with its id, and its end would end that request.
        in_inbox = request_id in self._requests or request_id in self.streams
        return in_inbox or self._scheduler.has_id(request_id)
