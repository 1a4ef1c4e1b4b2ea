"""AsyncEngine: an Engine for asyncio programs. One thread steps, each request is an async iterator.

Other threads tokenise requests, compile their grammars and queue them, because that may take longer than a
step. Aborts are commands in an inbox, which the stepping thread runs between two steps. It passes a step's
outputs to each event loop in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from compiled_mtp.errors import check_type
from compiled_mtp.request import RequestOutput, SamplingParams
from compiled_mtp.streams.limits import DEFAULT_IMAGE_BYTES, count_image_bytes
from compiled_mtp.streams.open_streams import OpenStreams
from compiled_mtp.streams.status import EngineStoppedError, Status, StepWatch
from compiled_mtp.streams.stream import Stream

if TYPE_CHECKING:  # Its module imports torch.
    from compiled_mtp.spec.engine_stats import EngineStats

logger = logging.getLogger(__name__)

DEFAULT_MAX_OPEN = 512
DEFAULT_STREAM_BUFFER = 1024
# Every shape is compiled before the first step, so the longest step is a prefill chunk: seconds on a GPU, and
# about four minutes for 512 tokens of a 27B model on a CPU with two cores.
DEFAULT_STEP_TIMEOUT_S = 300.0
# They release the interpreter's lock only while they compile grammars and tokenise.
_ADDING_THREADS = 2
# Seconds between health checks of an engine without requests.
_CHECK_S = 1.0
# Seconds between the checks of `close` whether the step that it waits for hangs.
_JOIN_S = 0.5


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


class AsyncEngine:
    """Steps an engine in a thread of its own; any event loop may add, read and abort requests.

    max_open: the most choices that run or wait. max_image_bytes: the most bytes of their pixels, which are
    kept until a request ends. stream_buffer: the most unread outputs of one choice. step_timeout_s: after a
    step of so many seconds, the engine counts as hung and refuses requests until that step ends. observer:
    gets the outputs of each step. The AsyncEngine owns the engine: nothing else may call it, and `close`
    closes it too. Raises ValueError for a limit below 1.
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
        self._watch = StepWatch(step_timeout_s)
        self.max_open = max_open
        self.stats = engine.stats()
        self._engine = engine
        self._observer = observer
        self._stream_buffer = stream_buffer
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Guards the fields below, and the inbox: no command may enter it after the stepping thread has ended.
        self._lock = threading.Lock()
        self._open = OpenStreams(max_open, max_image_bytes)
        self._closing: EngineStoppedError | None = None
        self._is_stopping = False
        self._stopped: EngineStoppedError | None = None
        self._adders = ThreadPoolExecutor(_ADDING_THREADS, thread_name_prefix="compiled-mtp-add")
        self._thread = threading.Thread(target=self._run, name="compiled-mtp-step", daemon=True)
        self._thread.start()

    @property
    def status(self) -> Status:
        """Whether the engine takes requests; `Status` explains the values."""
        if self._stopped is not None:
            return "stopped"
        if self._watch.is_hung:
            return "hung"
        return "ok" if self._closing is None else "draining"

    @property
    def step_age_s(self) -> float:
        """Seconds since the running step began; 0 while no step runs."""
        return self._watch.age_s

    @property
    def num_open(self) -> int:
        """The number of choices that run, wait or are being added."""
        return self._open.num_choices

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
        """Yield the outputs of one request, with the arguments of `Engine.add_request`.

        Leaving the iterator early aborts the request. Raises what `add` and `Stream` raise.
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

        Raises ValueError as `Engine.add_request` does, QueueFullError, EngineHungError, EngineStoppedError.
        """
        return (await self.add_all([request]))[0]

    async def add_all(self, requests: Sequence[Mapping[str, Any]]) -> list[Stream]:
        """Add several requests, or none if one of them is refused. Raises as `add` does."""
        loop = asyncio.get_running_loop()
        streams = [
            Stream(self._abort, loop, self._stream_buffer, _count_choices(one), count_image_bytes(one))
            for one in requests
        ]
        with self._lock:
            self._check_state()
            self._open.add(streams, requests, self.stats.running)
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
        """Call a method of the engine (`update_weights`, `sleep`, `wake_up`) in the stepping thread, between
        two steps; return its result.

        Outputs of requests that end during the call come after it. `step_timeout_s` does not apply, because
        the call may decode requests to their ends. Raises what the method raises, and EngineStoppedError.
        """
        done: Future[Any] = Future()

        def call() -> None:
            # The caller may have gone.
            if done.set_running_or_notify_cancel():
                self._watch.pause()
                try:
                    done.set_result(getattr(self._engine, name)(*args, **kwargs))
                except Exception as error:
                    done.set_exception(error)
                self._watch.begin()

        with self._lock:
            self._check_state()
            self._inbox.put(call)
        waiting = asyncio.wrap_future(done)
        while not waiting.done():
            if self._stopped is not None:
                raise EngineStoppedError(*self._stopped.args)
            await asyncio.wait((waiting,), timeout=_CHECK_S)
        return await waiting

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests, wait for the open ones, and close; return whether all of them ended.

        After `timeout_s` seconds, the streams that are still open yield their last outputs and then raise
        EngineStoppedError.
        """
        self._closing = EngineStoppedError("the server is shutting down; try another or later")
        deadline = time.monotonic() + timeout_s
        while self.num_open and self._stopped is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        is_empty = not self.num_open
        await asyncio.get_running_loop().run_in_executor(None, self.close)
        return is_empty

    def check_step(self) -> None:
        """Raise EngineHungError while a step takes longer than `step_timeout_s`."""
        self._watch.check()

    def close(self) -> None:
        """End the thread and the engine; open streams raise EngineStoppedError. Any thread may call it.

        It does not wait for a step that hangs: that step's thread closes the engine if the step ever ends.
        """
        with self._lock:
            if self._stopped is None:
                self._inbox.put(self._stop)
        while self._thread.is_alive() and not self._watch.is_hung:
            self._thread.join(min(_JOIN_S, self._watch.timeout_s))
        if self._thread.is_alive():
            error = self._watch.error()
            logger.critical("%s; the engine is abandoned", error)
            self._fail_all(error)

    def _check_state(self) -> None:
        if (error := self._stopped or self._closing) is not None:
            raise EngineStoppedError(*error.args)
        self.check_step()

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

    def _forget(self, stream: Stream) -> None:
        """Close the stream of a request that was not added."""
        with self._lock:
            self._open.forget(stream)

    # The methods below run in the stepping thread.

    def _run(self) -> None:
        engine = self._engine
        reason = "the server was shut down"
        try:
            while not self._is_stopping:
                self._watch.begin()
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
            self._watch.pause()
            command = self._wait_for_command()
            self._watch.begin()
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
        with self._lock:
            batches = self._open.sort(outputs)
        for loop, batch in batches.items():
            if not _call(loop, _deliver, batch):
                for stream, _ in batch:
                    self._abort_now(stream)

    def _abort_now(self, stream: Stream) -> None:
        if stream in self._open:
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
            streams = self._open.take_all()
        self._adders.shutdown(wait=False)
        for stream in streams:
            _call(stream.loop, stream.fail, type(error)(*error.args))


def _count_choices(request: Mapping[str, Any]) -> int:
    params = request.get("params")
    check_type("params", params, SamplingParams, "make one with SamplingParams(...)")
    check_type("request_id", request.get("request_id"), str, "leave it out for a new id")
    return 1 if params is None else int(params.n)


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
