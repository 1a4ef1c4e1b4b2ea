"""PromptPool: separate processes turn prompts into token ids, within limits of time and size."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_mtp.server.errors import ApiError
from compiled_mtp.server.prompt_worker import Limits, image_of
from compiled_mtp.vision.images import PreparedImage

logger = logging.getLogger("compiled_mtp.server")

_START_TIMEOUT_S = 120.0
# Not `-m`: with this package's own path, workers import the same package even if it is not installed.
_ROOT = Path(__file__).parents[2]
_CODE = (
    f"import pickle, sys; sys.path.insert(0, {str(_ROOT)!r}); "
    "from compiled_mtp.server.prompt_worker import main; "
    "main(sys.argv[1], pickle.loads(bytes.fromhex(sys.argv[2])), sys.argv[3])"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids of a text or a chat, with all pads of its images."""

    token_ids: list[int]
    images: tuple[PreparedImage, ...] = ()


class PromptPool:
    """`num_workers` processes that render, tokenise and decode images, for the checkpoint at `path`, and with
    the chat template of the file `chat_template` instead of the checkpoint's, if it is given.

    Used from one event loop. If a job takes more than `timeout_s` seconds, the pool kills its process and
    starts another. At most `max_waiting` jobs wait for a process.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_workers: int,
        timeout_s: float,
        limits: Limits,
        max_waiting: int = 128,
        chat_template: Path | None = None,
    ) -> None:
        self._path = path
        self._chat_template = chat_template
        self._timeout_s = timeout_s
        self._limits = limits
        self.max_waiting = max_waiting
        self._num_workers = num_workers
        # None: a process that could not be started again.
        self._idle: asyncio.LifoQueue[asyncio.subprocess.Process | None] = asyncio.LifoQueue()
        self._workers: set[asyncio.subprocess.Process] = set()
        self._num_jobs = 0
        self._is_closed = False

    async def start(self) -> None:
        """Start the processes; wait until they have read the tokenizer. Raises ValueError if one fails."""
        await asyncio.gather(*(self._add_worker() for _ in range(self._num_workers)))

    async def close(self) -> None:
        """End the processes; their open jobs end with an ApiError."""
        self._is_closed = True
        workers = tuple(self._workers)
        for worker in workers:
            _kill(worker)
        for worker in workers:
            await worker.wait()
        self._workers.clear()

    async def encode(self, text: str) -> Prompt:
        """Return the token ids of a text.

        Raises ApiError if the text is refused, too slow or too large, or too many jobs wait.
        """
        return await self._run({"text": text})

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Prompt:
        """Return the token ids and the images of a chat; `variables` go to its template.

        messages: as `MediaLoader.load` returns them. Raises as `encode` does.
        """
        chat, images = _without_images(messages)
        sizes = [{"is_address": is_address, "num_bytes": len(content)} for is_address, content in images]
        job = {"messages": chat, "variables": dict(variables), "images": sizes}
        return await self._run(job, [content for _, content in images])

    async def _run(self, job: Mapping[str, Any], images: Sequence[bytes] = ()) -> Prompt:
        if self._num_jobs >= self._num_workers + self.max_waiting:
            raise ApiError(
                429,
                f"waiting prompts must be at most {self.max_waiting}, got one more; try again later",
                code="queue_full",
                retry_after_s=1,
            )
        self._num_jobs += 1
        try:
            while (worker := await self._idle.get()) is None:
                if not await asyncio.shield(self._refill()):
                    raise ApiError(
                        503, "the server cannot start a process for prompts; try again later", retry_after_s=5
                    )
            answer = await self._ask(worker, job, images)
        finally:
            self._num_jobs -= 1
        if "error" in answer:
            raise ApiError(400, answer["error"], param="messages" if "messages" in job else "prompt")
        return Prompt(answer["ids"], tuple(answer["images"]))

    async def _ask(
        self, worker: asyncio.subprocess.Process, job: Mapping[str, Any], images: Sequence[bytes]
    ) -> dict[str, Any]:
        """Return one job's answer, with its images; afterwards the worker, or its replacement, is idle
        again."""
        try:
            frame = json.dumps(job).encode()
            assert worker.stdin is not None
            async with asyncio.timeout(self._timeout_s):
                worker.stdin.write(len(frame).to_bytes(4, "big") + frame)
                for content in images:
                    worker.stdin.write(content)
                await worker.stdin.drain()
                answer = await _read(worker)
        except TimeoutError:
            await self._replace(worker)
            raise ApiError(
                400,
                f"a prompt must be rendered and tokenised in {self._timeout_s:g} seconds, got a longer one; "
                "shorten it",
                code="prompt_timeout",
            ) from None
        except (OSError, EOFError):
            await self._replace(worker)
            if self._is_closed:
                raise ApiError(503, "the server is shutting down; try another or later") from None
            raise ApiError(
                400, "a prompt must be tokenised in bounded memory, got a larger one; shorten it"
            ) from None
        except BaseException:
            # The worker may still answer this job, and the next job would read that answer.
            await self._replace(worker)
            raise
        self._idle.put_nowait(worker)
        return answer

    async def _replace(self, worker: asyncio.subprocess.Process) -> None:
        _kill(worker)
        self._workers.discard(worker)
        if not self._is_closed:
            await asyncio.shield(self._refill())

    async def _refill(self) -> bool:
        """Replace a process that ended; return whether that worked. If not, the next job tries again."""
        try:
            await self._add_worker()
        except (ValueError, OSError) as error:
            logger.error("a process for prompts could not be started: %s", error)
            self._idle.put_nowait(None)
            return False
        return True

    async def _add_worker(self) -> None:
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _CODE,
            str(self._path),
            pickle.dumps(self._limits).hex(),
            "" if self._chat_template is None else str(self._chat_template),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Keeps Ctrl-C from the workers: the server ends them itself.
            start_new_session=True,
        )
        self._workers.add(worker)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await _read(worker)
        except (TimeoutError, EOFError, OSError):
            _kill(worker)
            self._workers.discard(worker)
            raise ValueError(
                f"model must have a tokenizer that can be read, got {self._path}; see standard error"
            ) from None
        self._idle.put_nowait(worker)


def _without_images(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[tuple[bool, bytes]]]:
    """Return a chat with bare image parts, and what they held: whether it is an address, and the bytes."""
    chat, images = list[Mapping[str, Any]](), list[tuple[bool, bytes]]()
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                is_address = part.get("type") == "image_url"
                if is_address:
                    images.append((True, part["image_url"]["url"].encode(errors="replace")))
                elif isinstance(part.get("image"), bytes):
                    images.append((False, part["image"]))
                else:
                    parts.append(part)
                    continue
                parts.append({"type": "image"})
            message = {**message, "content": parts}
        chat.append(message)
    return chat, images


async def _read(worker: asyncio.subprocess.Process) -> dict[str, Any]:
    """Return a worker's next answer; its images are PreparedImages."""
    stream = worker.stdout
    assert stream is not None
    head = await stream.readexactly(4)
    answer: dict[str, Any] = json.loads(await stream.readexactly(int.from_bytes(head, "big")))
    found = answer.get("images", ())
    return answer | {"images": [image_of(one, await stream.readexactly(one["num_bytes"])) for one in found]}


def _kill(worker: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.kill()
