"""AsyncEngine: an Engine for asyncio programs. One thread steps, each request is an async iterator.

Other threads tokenise requests, compile their grammars and queue them, because that may take longer than a
step. Aborts are commands in an inbox, which the stepping thread runs between two steps. It passes a step's
outputs to each event loop in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, Protocol

from compiled_mtp.errors import check, check_type, quote
from compiled_mtp.request import RequestOutput, SamplingParams
from compiled_mtp.vision.images import PreparedImage

if TYPE_CHECKING:  # Its module imports torch.
    from compiled_mtp.spec.engine_stats import EngineStats

logger = logging.getLogger(__name__)

DEFAULT_MAX_OPEN = 512
DEFAULT_STREAM_BUFFER = 1024
DEFAULT_IMAGE_BYTES = 4 * 2**30
# Every shape is compiled before the first step, so the longest step is a prefill chunk: seconds on a GPU, and
# about four minutes for 512 tokens of a 27B model on a CPU with two cores.
DEFAULT_STEP_TIMEOUT_S = 300.0
# They release the interpreter's lock only while they compile grammars and tokenise.
_ADDING_THREADS = 2
# Seconds between health checks of an engine without requests.
_CHECK_S = 1.0
# Seconds between the checks of `close` whether the step that it waits for hangs.
_JOIN_S = 0.5

Status = Literal["ok", "draining", "hung", "stopped"]


class SteppedEngine(Protocol):
    """The part of an Engine that AsyncEngine uses. Any thread calls `add_request`; one calls the others."""

    def add_request(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        request_id: str | None = None,
    ) -> str: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def has_unfinished_requests(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class Observer(Protocol):
    """Gets every step's outputs, in the stepping thread: its work delays the next step."""

    def on_step(self, outputs: Sequence[RequestOutput], seconds: float, stats: EngineStats) -> None: ...


class QueueFullError(RuntimeError):
    """The queue is full; `retry_after_s`: the seconds after which a running request may have ended."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStoppedError(RuntimeError):
    """The engine takes no more requests: it is shutting down or died. `code`: its name for clients."""

    code = "stopped"


class EngineHungError(EngineStoppedError):
    """A step has run for longer than `step_timeout_s`."""

    code = "hung"


class SlowReaderError(RuntimeError):
    """A stream's outputs were not read in time; its request was aborted."""


class Stream:
    """The outputs of one request, all choices of it, for one reader on the event loop that added it.

    Ends when every choice has had its output with a finish_reason. Raises SlowReaderError or
    EngineStoppedError in place of lost outputs, after the outputs before them. The writer calls `put` and
    `fail` on the same loop. on_abort is called at most once, from any thread, when the reader stops reading.
    """

    def __init__(
        self,
        on_abort: Callable[[Stream], None],
        loop: asyncio.AbstractEventLoop,
        limit: int,
        num_choices: int,
        image_bytes: int = 0,
    ) -> None:
        self.request_id = ""
        self.is_aborted = False
        self.loop = loop
        self.num_choices = num_choices
        # Those of its pixels.
        self.image_bytes = image_bytes
        # Choices whose last outputs have not reached the stepping thread, and this stream.
        self.num_running = num_choices
        self._num_due = num_choices
        self._on_abort = on_abort
        self._limit = limit * num_choices
        self._outputs: deque[RequestOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._is_complete = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if self._is_complete:
                raise StopAsyncIteration
            self._waiter = self.loop.create_future()
            await self._waiter
        return self._outputs.popleft()

    def abort(self) -> None:
        """End the request within a step, from any thread; does nothing for one that has ended."""
        if not self._is_complete and not self.is_aborted:
            self.is_aborted = True
            self._on_abort(self)

    def take_ready(self) -> list[RequestOutput]:
        """Return the unread outputs, without waiting."""
        ready = list(self._outputs)
        self._outputs.clear()
        return ready

    def put(self, output: RequestOutput) -> None:
        """Add an output; aborts the request of a reader that has fallen behind."""
        if self._is_complete:
            return
        if len(self._outputs) >= self._limit and output.finish_reason is None:
            self.abort()
            self.fail(
                SlowReaderError(f"the reader fell {self._limit} outputs behind; the request was aborted")
            )
            return
        self._outputs.append(output)
        self._num_due -= output.finish_reason is not None
        self._is_complete = not self._num_due
        self._wake()

    def fail(self, error: Exception) -> None:
        """End with an error, unless all outputs have come."""
        if not self._is_complete:
            self._error, self._is_complete = error, True
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
            self._waiter = None


class AsyncEngine:
    """Steps an engine in a thread of its own; requests are added, read and aborted from any event loop.

    max_open bounds the choices that run or wait, max_image_bytes the pixels of their prepared images, which
    are kept until the request ends, and stream_buffer the unread outputs of one choice. An engine whose step
    has run for more than `step_timeout_s` seconds is hung: it takes no request until that step ends. Owns the
    engine: nothing else may call it, and `close` closes it too.
    """

    def __init__(
        self,
        engine: SteppedEngine,
        *,
        max_open: int = DEFAULT_MAX_OPEN,
        max_image_bytes: int = DEFAULT_IMAGE_BYTES,
        stream_buffer: int = DEFAULT_STREAM_BUFFER,
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
        observer: Observer | None = None,
    ) -> None:
        for name, value in (("max_open", max_open), ("stream_buffer", stream_buffer)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}; raise it")
        if not step_timeout_s > 0:
            raise ValueError(f"step_timeout_s must be above 0, got {step_timeout_s}; raise it")
        self.max_open = max_open
        self._max_image_bytes = max_image_bytes
        self.stats = engine.stats()
        self._engine = engine
        self._observer = observer
        self._stream_buffer = stream_buffer
        self._step_timeout_s = step_timeout_s
        # When the stepping thread began its current loop iteration; None while it waits for a command.
        self._turn_began_s: float | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._mean_total_s = 1.0
        # Guards the fields below, and the inbox: no command may enter it after the stepping thread has ended.
        self._lock = threading.Lock()
        self._num_open = 0
        self._image_bytes = 0
        self._closing: EngineStoppedError | None = None
        self._is_stopping = False
        self._stopped: EngineStoppedError | None = None
        self._adders = ThreadPoolExecutor(_ADDING_THREADS, thread_name_prefix="compiled-mtp-add")
        self._thread = threading.Thread(target=self._run, name="compiled-mtp-step", daemon=True)
        self._thread.start()

    @property
    def status(self) -> Status:
        """The state of the engine: "ok" while it takes requests, "draining" while it only ends those it has,
        "hung" while a step takes too long, "stopped" when it decodes no more.
        """
        if self._stopped is not None:
            return "stopped"
        if self._is_hung:
            return "hung"
        return "ok" if self._closing is None else "draining"

    @property
    def step_age_s(self) -> float:
        """Seconds that the running step has taken; 0 while there is nothing to step."""
        began_s = self._turn_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    @property
    def num_open(self) -> int:
        """Choices that run, wait or are about to be added."""
        return self._num_open

    async def generate(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one request, as `Engine.add_request` takes it. Leaving early aborts it.

        Raises what `add` and `Stream` raise.
        """
        stream = await self.add(
            prompt=prompt,
            params=params,
            prompt_token_ids=prompt_token_ids,
            messages=messages,
            # Only engines that take images know the argument.
            **({} if images is None else {"images": images}),
            request_id=request_id,
            priority=priority,
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.abort()

    async def add(self, **request: Any) -> Stream:
        """Add one request with the arguments of `Engine.add_request`; return its stream.

        Raises its ValueError, QueueFullError, and EngineStoppedError.
        """
        return (await self.add_all([request]))[0]

    async def add_all(self, requests: Sequence[Mapping[str, Any]]) -> list[Stream]:
        """Add several requests; if one of them is refused, none. Raises as `add`."""
        loop = asyncio.get_running_loop()
        streams = [
            Stream(self._abort, loop, self._stream_buffer, _count_choices(one), count_image_bytes(one))
            for one in requests
        ]
        num_choices = sum(stream.num_choices for stream in streams)
        with self._lock:
            self._check_open(num_choices)
            check_image_bytes(streams, self._image_bytes, self._max_image_bytes)
            self._register(streams, requests)
            # One job, so that the engine numbers the requests in their order.
            adding = self._adders.submit(self._add_in_order, streams, requests)
        try:
            await asyncio.wrap_future(adding)
        except BaseException:
            for stream in streams:
                stream.abort()
                if adding.cancelled():  # The job never began.
                    self._forget(stream)
            raise
        return streams

    async def between_steps(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine in the stepping thread, between two steps: `update_weights`, `sleep`,
        `wake_up`; return its result.

        Outputs of requests that end meanwhile come afterwards. No limit of a step's time applies, because the
        call may decode requests to their ends. Raises what the method raises, and EngineStoppedError.
        """
        done: Future[Any] = Future()

        def call() -> None:
            # The caller may have gone.
            if done.set_running_or_notify_cancel():
                self._turn_began_s = None
                try:
                    done.set_result(getattr(self._engine, name)(*args, **kwargs))
                except Exception as error:
                    done.set_exception(error)
                self._turn_began_s = time.monotonic()

        with self._lock:
            self._check_open(0)
            self._inbox.put(call)
        waiting = asyncio.wrap_future(done)
        while not waiting.done():
            if self._stopped is not None:
                raise EngineStoppedError(*self._stopped.args)
            await asyncio.wait((waiting,), timeout=_CHECK_S)
        return await waiting

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests, wait for the open ones, and close; return whether all of them ended.

        After `timeout_s` seconds the others end with EngineStoppedError, after the outputs that they have.
        """
        self._closing = EngineStoppedError("the server is shutting down; try another or later")
        deadline = time.monotonic() + timeout_s
        while self._num_open and self._stopped is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        is_empty = not self._num_open
        await asyncio.get_running_loop().run_in_executor(None, self.close)
        return is_empty

    def check_step(self) -> None:
        """Raise EngineHungError while a step takes longer than `step_timeout_s`."""
        if self._is_hung:
            raise self._hung_error()

    def close(self) -> None:
        """End the thread and the engine, from any thread; open streams raise EngineStoppedError.

        A step that hangs is abandoned: its thread closes the engine if the step ever ends.
        """
        with self._lock:
            if self._stopped is None:
                self._inbox.put(self._stop)
        while self._thread.is_alive() and not self._is_hung:
            self._thread.join(min(_JOIN_S, self._step_timeout_s))
        if self._thread.is_alive():
            error = self._hung_error()
            logger.critical("%s; the engine is abandoned", error)
            self._fail_all(error)

    @property
    def _is_hung(self) -> bool:
        return self.step_age_s > self._step_timeout_s

    def _hung_error(self) -> EngineHungError:
        return EngineHungError(
            f"a step must end within {self._step_timeout_s:g} s (step_timeout_s), got one that has run for "
            f"{self.step_age_s:.1f} s; restart the process, or raise step_timeout_s for a slow device"
        )

    def _check_open(self, num_more: int) -> None:
        if (error := self._stopped or self._closing) is not None:
            raise EngineStoppedError(*error.args)
        self.check_step()
        if num_more > self.max_open:
            raise ValueError(
                f"n must be at most {self.max_open} (max_open) over all requests, got {num_more}; ask for "
                "fewer"
            )
        if self._num_open + num_more > self.max_open:
            running = max(1, self.stats.running)
            raise QueueFullError(
                f"the queue must have room for {num_more} more, got {self._num_open} of {self.max_open} "
                "taken; try again later",
                retry_after_s=min(60, max(1, math.ceil(self._mean_total_s / running))),
            )

    def _abort(self, stream: Stream) -> None:
        with self._lock:
            if self._stopped is None:
                self._inbox.put(lambda: self._abort_now(stream))

    def _add_in_order(self, streams: Sequence[Stream], requests: Sequence[Mapping[str, Any]]) -> None:
        """Queue requests, in an adding thread, up to the first that is refused."""
        for index, (stream, request) in enumerate(zip(streams, requests, strict=True)):
            try:
                self._add_now(stream, request)
            except BaseException:
                for rest in streams[index + 1 :]:
                    self._forget(rest)
                raise

    def _add_now(self, stream: Stream, request: Mapping[str, Any]) -> None:
        try:
            if self._stopped is not None or stream.is_aborted:
                raise EngineStoppedError("the request was aborted before it was added")
            self._engine.add_request(**{**request, "request_id": stream.request_id})
        except BaseException as error:
            self._forget(stream)
            if self._stopped is not None:
                raise EngineStoppedError(*self._stopped.args) from error
            raise
        if stream.is_aborted:
            # The engine did not have the request yet when `abort` was called.
            self._abort(stream)
        self._inbox.put(_wake)

    def _register(self, streams: Sequence[Stream], requests: Sequence[Mapping[str, Any]]) -> None:
        """Open streams under their request ids; the caller holds the lock. An id in use is refused.

        Runs before the requests are queued, because their outputs may come at once.
        """
        names: dict[str, Stream] = {}
        for stream, request in zip(streams, requests, strict=True):
            name = request.get("request_id")
            if name is None:
                name = f"request-{uuid.uuid4().hex[:16]}"
            if name in self._streams or name in names:
                raise ValueError(f"request_id must be unused, got {quote(name)}; choose another")
            stream.request_id = name
            names[name] = stream
        self._streams.update(names)
        self._num_open += sum(stream.num_choices for stream in streams)
        self._image_bytes += sum(stream.image_bytes for stream in streams)

    def _forget(self, stream: Stream) -> None:
        """Close the stream of a request that was not added."""
        with self._lock:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]
            if self._stopped is None:
                self._num_open -= stream.num_choices
                self._image_bytes -= stream.image_bytes

    # The methods below run in the stepping thread.

    def _run(self) -> None:
        engine = self._engine
        reason = "the server was shut down"
        try:
            while not self._is_stopping:
                self._turn_began_s = time.monotonic()
                self._obey(is_idle=not engine.has_unfinished_requests())
                if not self._is_stopping and engine.has_unfinished_requests():
                    start = time.perf_counter()
                    outputs = engine.step()
                    self.stats = engine.stats()
                    # Before the outputs are passed on: a client with an answer must find it in the metrics.
                    if self._observer is not None:
                        self._observer.on_step(outputs, time.perf_counter() - start, self.stats)
                    self._dispatch(outputs)
        except BaseException as error:
            reason = f"the engine died: {error!r}"
            logger.critical("%s; restart the process to decode requests again", reason)
            logger.debug("traceback of the engine's error", exc_info=error)
        self._end(EngineStoppedError(reason))

    def _obey(self, is_idle: bool) -> None:
        """Run the commands of the inbox; wait for one if there is nothing to step."""
        if is_idle:
            self._turn_began_s = None
            command = self._wait_for_command()
            self._turn_began_s = time.monotonic()
            command()
        while not self._inbox.empty():
            self._inbox.get()()

    def _wait_for_command(self) -> Callable[[], None]:
        """Return the next command of the inbox. Raises the error that ended the engine, if one did."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=_CHECK_S)
            self._engine.check()

    def _dispatch(self, outputs: Sequence[RequestOutput]) -> None:
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput]]] = {}
        num_ended = image_bytes = 0
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            batches.setdefault(stream.loop, []).append((stream, output))
            if output.finish_reason is not None:
                stream.num_running -= 1
                if not stream.num_running:
                    del self._streams[output.request_id]
                    image_bytes += stream.image_bytes
                num_ended += 1
                self._mean_total_s += (output.metrics.total_s - self._mean_total_s) / 16
        if num_ended:
            with self._lock:
                self._num_open -= num_ended
                self._image_bytes -= image_bytes
        for loop, batch in batches.items():
            if not _call(loop, _deliver, batch):
                for stream, _ in batch:
                    self._abort_now(stream)

    def _abort_now(self, stream: Stream) -> None:
        # Another request may use its id by now.
        if self._streams.get(stream.request_id) is stream:
            # The engine does not know a request that has just ended; its last output is on its way.
            with contextlib.suppress(ValueError):
                self._engine.abort(stream.request_id)

    def _stop(self) -> None:
        self._is_stopping = True

    def _end(self, error: EngineStoppedError) -> None:
        """End every stream with an error, and close the engine."""
        self._fail_all(error)
        try:
            self._engine.close()
        except Exception as failure:  # The engine died, so `close` may fail; all streams have ended.
            logger.debug("the engine could not be closed", exc_info=failure)

    def _fail_all(self, error: EngineStoppedError) -> None:
        """End every stream with an error; calls that are about to add one raise it too."""
        with self._lock:
            self._stopped = error
            streams, self._streams = list(self._streams.values()), {}
            self._num_open = self._image_bytes = 0
        self._adders.shutdown(wait=False)
        for stream in streams:
            _call(stream.loop, stream.fail, type(error)(*error.args))


def _count_choices(request: Mapping[str, Any]) -> int:
    params = request.get("params")
    check_type("params", params, SamplingParams, "make one with SamplingParams(...)")
    check_type("request_id", request.get("request_id"), str, "leave it out for a new id")
    return 1 if params is None else int(params.n)


def count_image_bytes(request: Mapping[str, Any]) -> int:
    """Return the bytes of the pixels of a request's prepared images."""
    images = request.get("images") or ()
    return sum(len(image.pixels) for image in images if isinstance(image, PreparedImage))


def check_image_bytes(streams: Sequence[Stream], num_open: int, most: int) -> None:
    """Raise unless the images of new streams fit beside those of open ones, num_open bytes, into `most`.

    Raises ValueError for images that never do, QueueFullError for others.
    """
    more = sum(stream.image_bytes for stream in streams)
    rule, got = f"have at most {most} bytes of pixels (max_image_bytes)", f"{more} bytes"
    check(more <= most, "images", rule, got, "send fewer or smaller ones")
    if num_open + more > most:
        raise QueueFullError(
            f"open requests must {rule}, got {num_open} and {more} more; try again later", retry_after_s=1
        )


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> bool:
    """Run `function` on a loop of another thread; return False if that loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True


def _deliver(batch: Sequence[tuple[Stream, RequestOutput]]) -> None:
    for stream, output in batch:
        stream.put(output)


def _wake() -> None:
    """Do nothing; the command wakes the stepping thread, because a request was queued."""
