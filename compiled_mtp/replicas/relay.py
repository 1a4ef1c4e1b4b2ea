"""One request from the replicas to its stream: begun again elsewhere when a replica is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from compiled_mtp.async_engine import EngineStoppedError, QueueFullError, Stream
from compiled_mtp.errors import quote
from compiled_mtp.replicas.delivery import Delivery, ReplicasDifferError
from compiled_mtp.replicas.messages import Accepted, Call, Message, Refused
from compiled_mtp.replicas.silence import SilenceWatch
from compiled_mtp.request import RequestOutput

logger = logging.getLogger("compiled_mtp.replicas")

# Replicas that say that they are full, before the request is refused as they refuse it.
_MOST_FULL = 3
# Replicas that a request may lose without a new token: what kills engines must not go round them all.
_MOST_FRUITLESS = 2
_PAUSE_S = 0.5

# Sends a call to a replica and gives what it says; closing the iterator ends the request there.
OpenReplica = Callable[[Call], AsyncIterator[Message]]


class ReplicasLostError(EngineStoppedError):
    """A request was begun again as often as it may be, and every replica that had it was lost."""

    code = "replicas_lost"


class RelayObserver(Protocol):
    """Is told what is delivered, of every replica that is lost, and of streams that end with an error."""

    def count(self, outputs: Sequence[RequestOutput]) -> None: ...

    def fail(self, request_id: str, num_choices: int) -> None: ...

    def on_failover(self) -> None: ...

    def on_lost(self) -> None: ...


@dataclass(frozen=True)
class RelayLimits:
    """How long a request goes after replicas: begun again at most `max_failovers` times, and at most
    `start_timeout_s` seconds without a replica between one new token and the next. A replica that has it and
    says nothing for `silence_timeout_s` seconds is lost."""

    max_failovers: int
    start_timeout_s: float
    silence_timeout_s: float


class _Loss(NamedTuple):
    message: str
    replica_id: str | None


class _LostError(Exception):
    """A replica died, or ended a choice as no sampling parameter asks for."""


class _NobodyError(Exception):
    """No replica said anything in time."""


class Relay:
    """Carries one request. `accepted` is set when a replica has taken it, or has the error that refused it.

    The first replica's outputs are passed on as they come. When it is lost the request, which has its seed,
    is sent to another; what was delivered is dropped from what that one says.
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
        # Of those, since the last token that was new.
        self._num_fruitless = 0
        self._num_full = 0
        # Without a replica, since the last token that was new.
        self._searched_s = 0.0
        self._has_failed = False
        self._last_id: str | None = None

    async def run(self) -> None:
        """Follow replicas until every choice has ended.

        Raises ValueError for a request that is refused and QueueFullError where no replica has room, both
        only before `accepted` is set, ReplicasLostError and ReplicasDifferError.
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
                # There was no other that could be asked: it is on its way out, and another will come.
                await self._pause(end)
            for delivery in self._deliveries:
                delivery.begin_again()

    def settle(self, task: asyncio.Task[None]) -> None:
        """Tell the stream, and whoever waits for `accepted`, how `run` ended."""
        if task.cancelled():
            error: BaseException | None = EngineStoppedError("the request was aborted before it was added")
            for delivery in self._deliveries:
                if delivery.finish_reason is None:
                    self._put(delivery.abort(self._elapsed_s()))
        elif (error := task.exception()) is not None:
            # What a replica took is no longer the client's mistake.
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
            # Whoever waited for it may be gone.
            self.accepted.exception()

    async def _follow(self) -> _Loss | Refused | None:
        """Follow one replica to the end; why it was not the request's, None if it was."""
        self._last_id = None
        messages = self._open(self._call._replace(avoid=tuple(self._avoid)))
        try:
            first = await self._find(messages)
            if isinstance(first, Refused):
                return first
            if not isinstance(first, Accepted):
                raise _LostError("it ended before it had said anything")
            self._accept(first)
            async with SilenceWatch(self._limits.silence_timeout_s) as watch:
                while (said := await _next(messages)) is not None:
                    watch.heard()
                    assert isinstance(said, list)
                    self._deliver(said)
        except _LostError as error:
            return _Loss(str(error), self._last_id)
        except TimeoutError:
            return _Loss(f"it said nothing for {self._limits.silence_timeout_s:g} s", self._last_id)
        finally:
            await _close(messages)
        if any(delivery.finish_reason is None for delivery in self._deliveries):
            return _Loss("it ended before the request did", self._last_id)
        return None

    async def _find(self, messages: AsyncIterator[Message]) -> Message | None:
        """A replica's first message. All that a request waits for one until its next new token counts."""
        start_s = time.monotonic()
        try:
            return await _next(messages, max(0.0, self._limits.start_timeout_s - self._searched_s))
        except _NobodyError:
            raise self._lost_in_search("none") from None
        finally:
            self._searched_s += time.monotonic() - start_s

    def _refuse(self, refused: Refused) -> None:
        if not self.accepted.done():
            raise ValueError(refused.message)
        raise ReplicasDifferError(
            f"replicas must take the same requests, got a refusal of what another took: "
            f"{quote(refused.message)}; give all replicas one checkpoint, one device and one version"
        )

    def _count_loss(self, loss: _Loss | Refused) -> None:
        self._num_lost += 1
        # A call that found its replica dead says nothing about the request.
        self._num_fruitless += isinstance(loss, _Loss) and loss.replica_id is not None
        logger.warning("a replica was lost (%s): %s", loss.replica_id or "none had it", loss.message)
        if self._num_fruitless >= _MOST_FRUITLESS:
            self._observer.on_lost()
            raise ReplicasLostError(
                f"the request must get a new token from one of {_MOST_FRUITLESS} replicas, got losses alone, "
                f"the last: {quote(loss.message)}; try again later, or another request if this one always "
                "ends so"
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

    def _deliver(self, said: Sequence[RequestOutput]) -> None:
        for one in said:
            self._check_end(one)
            output = self._deliveries[one.index].take(one, self._elapsed_s())
            if output is not None:
                self._has_begun = True
                if output.new_token_ids:
                    self._num_fruitless, self._searched_s = 0, 0.0
                self._put(output)

    def _check_end(self, said: RequestOutput) -> None:
        """Nobody asked for this abort; an error may be the device's, unless another replica says it too or
        none may be asked."""
        # What parameters cause, every replica would say.
        is_doubted = (
            said.finish_reason == "error"
            and said.error_kind != "parameters"
            and not self._has_failed
            and self._may_begin_again()
        )
        if said.finish_reason == "abort" or is_doubted:
            self._has_failed = True
            raise _LostError(said.error or said.finish_reason)

    def _may_begin_again(self) -> bool:
        return self._num_lost < self._limits.max_failovers and self._num_fruitless + 1 < _MOST_FRUITLESS

    def _put(self, output: RequestOutput) -> None:
        self._observer.count((output,))
        self._stream.put(output)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._arrival_s


async def _next(messages: AsyncIterator[Message], timeout_s: float | None = None) -> Message | None:
    """What a replica says next, None at its end. Raises _NobodyError behind timeout_s, _LostError for
    whatever goes wrong there."""
    try:
        async with asyncio.timeout(timeout_s) as clock:
            return await anext(messages, None)
    except Exception as error:
        if clock.expired():
            raise _NobodyError from None
        raise _LostError(f"{type(error).__name__}: {error}") from error


async def _close(messages: AsyncIterator[Message]) -> None:
    close = getattr(messages, "aclose", None)
    if close is not None:
        # The replica is lost, or the request: nobody waits for what it would say.
        with contextlib.suppress(Exception):
            await close()
