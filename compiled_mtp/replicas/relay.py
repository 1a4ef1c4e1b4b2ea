"""Relays one request's outputs from replicas to its stream; restarts the request when a replica is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from compiled_mtp.errors import quote
from compiled_mtp.replicas.delivery import Delivery, ReplicasDifferError
from compiled_mtp.replicas.messages import Accepted, Call, Message, Refused
from compiled_mtp.replicas.silence import SilenceWatch
from compiled_mtp.request import RequestOutput
from compiled_mtp.streams.status import EngineStoppedError, QueueFullError
from compiled_mtp.streams.stream import Stream

logger = logging.getLogger("compiled_mtp.replicas")

# Refusals by full replicas, after which the request is refused.
_MOST_FULL = 3
# Losses without a new token between them, after which the request ends: it may itself kill engines.
_MOST_FRUITLESS = 2
_PAUSE_S = 0.5

# Sends a call to a replica and yields its messages; closing the iterator ends the request there.
OpenReplica = Callable[[Call], AsyncIterator[Message]]


class ReplicasLostError(EngineStoppedError):
    """No replica is left for a request: it has lost as many replicas as it may, or found none in time."""

    code = "replicas_lost"


class RelayObserver(Protocol):
    """Receives delivered outputs, lost replicas and streams that end with an error."""

    def count(self, outputs: Sequence[RequestOutput]) -> None: ...

    def fail(self, request_id: str, num_choices: int) -> None: ...

    def on_failover(self) -> None: ...

    def on_lost(self) -> None: ...


@dataclass(frozen=True)
class RelayLimits:
    """Limits of one request.

    max_failovers: how often it may restart. start_timeout_s: seconds without a replica between one new token
    and the next. silence_timeout_s: seconds without a message after which its replica counts as lost.
    """

    max_failovers: int
    start_timeout_s: float
    silence_timeout_s: float


class _Loss(NamedTuple):
    message: str
    replica_id: str | None


class _LostError(Exception):
    """A replica died, or ended a choice for a reason that is not in the request."""


class _NoReplicaError(Exception):
    """No replica sent a message in time."""


class Relay:
    """Relays one request. `accepted` is done once a replica accepts it; it has the error if they refuse it.

    The relay passes on the first replica's outputs as they come. When that replica is lost, the relay sends
    the request, which has a seed, to another replica and drops from its outputs what was delivered.
    """

    def __init__(
        self,
        call: Call,
        stream: Stream,
        open_replica: OpenReplica,
        limits: RelayLimits,
        observer: RelayObserver,
    ) -> None:
        self.accepted: asyncio.Future[None] = stream.loop.create_future()
        self._call = call
        self._stream = stream
        self._open = open_replica
        self._limits = limits
        self._observer = observer
        self._arrival_s = time.monotonic()
        self._deliveries = [
            Delivery(stream.request_id, index, len(call.prompt_token_ids))
            for index in range(stream.num_choices)
        ]
        self._identity: str | None = None
        self._has_begun = False
        self._avoid: list[str] = []
        self._num_lost = 0
        # Replicas lost since the last new token.
        self._num_fruitless = 0
        self._num_full = 0
        # Seconds without a replica since the last new token.
        self._searched_s = 0.0
        self._has_failed = False
        self._last_id: str | None = None

    async def run(self) -> None:
        """Follow replicas until every choice has ended.

        Raises ValueError for an invalid request and QueueFullError if no replica has room, both only before
        `accepted` is done; raises ReplicasLostError and ReplicasDifferError.
        """
        while (end := await self._follow()) is not None:
            is_known = end.replica_id in self._avoid
            if end.replica_id is not None and not is_known:
                self._avoid.append(end.replica_id)
            if isinstance(end, _Loss):
                self._count_loss(end)
            elif end.kind == "invalid":
                self._refuse(end)
            elif end.kind == "full":
                self._count_full(end)
                is_known = self.accepted.done()
            elif not is_known:
                self._count_loss(end)
            if is_known:
                # Ray had no other replica; this one is about to be replaced.
                await self._pause(end)
            for delivery in self._deliveries:
                delivery.begin_again()

    def settle(self, task: asyncio.Task[None]) -> None:
        """Pass the end of `run`, the finished `task`, to the stream and to `accepted`."""
        if task.cancelled():
            error: BaseException | None = EngineStoppedError("the request was aborted before it was added")
            for delivery in self._deliveries:
                if delivery.finish_reason is None:
                    self._put(delivery.abort(self._elapsed_s()))
        elif (error := task.exception()) is not None:
            # A request that a replica has accepted is not the client's mistake.
            is_refusal = isinstance(error, (QueueFullError, ValueError)) and not self.accepted.done()
            if not isinstance(error, EngineStoppedError) and not is_refusal:
                logger.error("a request ended with a bug", exc_info=error)
                error = EngineStoppedError(f"the request failed: {error!r}")
            assert isinstance(error, Exception)
            self._stream.fail(error)
            if self.accepted.done():
                num_left = sum(delivery.finish_reason is None for delivery in self._deliveries)
                self._observer.fail(self._stream.request_id, num_left)
        if error is not None and not self.accepted.done():
            self.accepted.set_exception(error)
            # Mark the error as retrieved: the waiting caller may have ended.
            self.accepted.exception()

    async def _follow(self) -> _Loss | Refused | None:
        """Relay one replica's messages to their end; return None if the request ended, else the reason."""
        self._last_id = None
        messages = self._open(self._call._replace(avoid=tuple(self._avoid)))
        try:
            first = await self._find(messages)
            if isinstance(first, Refused):
                return first
            if not isinstance(first, Accepted):
                raise _LostError("it ended without a message")
            self._accept(first)
            async with SilenceWatch(self._limits.silence_timeout_s) as watch:
                while (outputs := await _next(messages)) is not None:
                    watch.heard()
                    assert isinstance(outputs, list)
                    self._deliver(outputs)
        except _LostError as error:
            return _Loss(str(error), self._last_id)
        except TimeoutError:
            return _Loss(f"it sent nothing for {self._limits.silence_timeout_s:g} s", self._last_id)
        finally:
            await _close(messages)
        if any(delivery.finish_reason is None for delivery in self._deliveries):
            return _Loss("it ended before the request did", self._last_id)
        return None

    async def _find(self, messages: AsyncIterator[Message]) -> Message | None:
        """Return a replica's first message; the wait counts in `_searched_s` until the next new token."""
        start_s = time.monotonic()
        try:
            return await _next(messages, max(0.0, self._limits.start_timeout_s - self._searched_s))
        except _NoReplicaError:
            raise self._lost_in_search("none") from None
        finally:
            self._searched_s += time.monotonic() - start_s

    def _refuse(self, refused: Refused) -> None:
        if not self.accepted.done():
            raise ValueError(refused.message)
        raise ReplicasDifferError(
            f"replicas must accept the same requests, got a refusal of an accepted one: "
            f"{quote(refused.message)}; give all replicas one checkpoint, one device and one version"
        )

    def _count_loss(self, loss: _Loss | Refused) -> None:
        self._num_lost += 1
        # A replica that was dead before it got the call was not killed by the request.
        self._num_fruitless += isinstance(loss, _Loss) and loss.replica_id is not None
        logger.warning("a replica was lost (%s): %s", loss.replica_id or "before it accepted", loss.message)
        if self._num_fruitless >= _MOST_FRUITLESS:
            self._observer.on_lost()
            raise ReplicasLostError(
                f"the request must get a new token from one of {_MOST_FRUITLESS} replicas, got losses alone, "
                f"the last: {quote(loss.message)}; try again later, or change the request if it always ends "
                "like this"
            )
        if self._num_lost > self._limits.max_failovers:
            self._observer.on_lost()
            raise ReplicasLostError(
                f"the request must be decoded by one of {self._num_lost} replicas, got losses alone, the "
                f"last: {quote(loss.message)}; try again later"
            )
        self._observer.on_failover()

    def _count_full(self, refused: Refused) -> None:
        self._num_full += 1
        if self._num_full >= _MOST_FULL and not self.accepted.done():
            raise QueueFullError(refused.message, refused.retry_after_s)

    async def _pause(self, loss: _Loss | Refused) -> None:
        self._searched_s += _PAUSE_S
        if self._searched_s > self._limits.start_timeout_s:
            raise self._lost_in_search(quote(loss.message))
        await asyncio.sleep(_PAUSE_S)

    def _lost_in_search(self, got: str) -> ReplicasLostError:
        self._observer.on_lost()
        return ReplicasLostError(
            f"the request must find a replica within {self._limits.start_timeout_s:g} s, got {got}; try "
            "again later"
        )

    def _accept(self, accepted: Accepted) -> None:
        self._last_id = accepted.replica_id
        self._num_full = 0
        if self._has_begun and accepted.identity != self._identity:
            raise ReplicasDifferError(
                f"replicas must be equal for a stream to go on, got {quote(accepted.identity)} after "
                f"{quote(self._identity)}; give all replicas one checkpoint, one device and one version"
            )
        self._identity = accepted.identity
        if not self.accepted.done():
            self.accepted.set_result(None)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for one in outputs:
            self._check_end(one)
            output = self._deliveries[one.index].take(one, self._elapsed_s())
            if output is not None:
                self._has_begun = True
                if output.new_token_ids:
                    self._num_fruitless, self._searched_s = 0, 0.0
                self._put(output)

    def _check_end(self, output: RequestOutput) -> None:
        """Raise _LostError if a choice ended for a reason that may be the replica's, not the request's.

        That is so for an abort, which the ingress did not ask for, and for the request's first error that
        its parameters do not cause, if the request may restart. A second error counts as the request's.
        """
        # An error that parameters cause would come from every replica.
        may_be_replicas = (
            output.finish_reason == "error"
            and output.error_kind != "parameters"
            and not self._has_failed
            and self._may_begin_again()
        )
        if output.finish_reason == "abort" or may_be_replicas:
            self._has_failed = True
            raise _LostError(output.error or output.finish_reason)

    def _may_begin_again(self) -> bool:
        return self._num_lost < self._limits.max_failovers and self._num_fruitless + 1 < _MOST_FRUITLESS

    def _put(self, output: RequestOutput) -> None:
        self._observer.count((output,))
        self._stream.put(output)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._arrival_s


async def _next(messages: AsyncIterator[Message], timeout_s: float | None = None) -> Message | None:
    """Return a replica's next message, None at its end.

    Raises _NoReplicaError after timeout_s seconds and _LostError for any other error.
    """
    try:
        async with asyncio.timeout(timeout_s) as clock:
            return await anext(messages, None)
    except Exception as error:
        if clock.expired():
            raise _NoReplicaError from None
        raise _LostError(f"{type(error).__name__}: {error}") from error


async def _close(messages: AsyncIterator[Message]) -> None:
    close = getattr(messages, "aclose", None)
    if close is not None:
        # The replica is lost or the request has ended, so an error of the replica has no effect.
        with contextlib.suppress(Exception):
            await close()
