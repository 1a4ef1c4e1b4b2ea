"""A process that renders chats and tokenises; the server kills it if a template or a text takes too long.

Reads frames from standard input and writes frames to standard output: four bytes of length, big-endian, then
JSON. Imports neither torch nor FastAPI.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from compiled_mtp.frontend.tokenizer import Tokenizer

# Address space of the process, with Python and the tokenizer.
_MEMORY_BYTES = 8 * 2**30


def prepare(tokenizer: Tokenizer, job: Mapping[str, Any], max_chars: int) -> dict[str, Any]:
    """Return {"ids": token ids} of one job: {"text"} or {"messages", "variables"}.

    Raises ValueError if the tokenizer or the template refuses the job, or its text has more than `max_chars`
    characters.
    """
    is_chat = "messages" in job
    text = tokenizer.apply_chat_template(job["messages"], **job["variables"]) if is_chat else str(job["text"])
    if len(text) > max_chars:
        raise ValueError(
            f"{'messages' if is_chat else 'prompt'} must have at most {max_chars} characters, got "
            f"{len(text)}; shorten it"
        )
    return {"ids": tokenizer.encode(text)}


def main(path: str, max_chars: int, chat_template: str) -> None:
    """Answer jobs until standard input ends. chat_template: as of `Tokenizer`, "" for None."""
    _limit_memory()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = Tokenizer(path, Path(chat_template) if chat_template else None)
    _write(sink, {"ready": True})
    while (frame := _read(source)) is not None:
        try:
            answer = prepare(tokenizer, json.loads(frame), max_chars)
        except ValueError as error:
            answer = {"error": str(error)[:4000]}
        except (MemoryError, RecursionError) as error:
            answer = {"error": f"prompt must be simpler, got {type(error).__name__}; shorten it"}
        _write(sink, answer)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(4)
    return source.read(int.from_bytes(head, "big")) if len(head) == 4 else None


def _write(sink: BinaryIO, answer: Mapping[str, Any]) -> None:
    frame = json.dumps(answer).encode()
    sink.write(len(frame).to_bytes(4, "big") + frame)
    sink.flush()
