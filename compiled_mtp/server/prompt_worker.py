"""A process that renders chats and tokenises: it can be killed when a template or a text takes too long.

Reads and writes frames, four bytes of length (big end first) and JSON, on its standard input and output. No
torch, no FastAPI.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from compiled_mtp.frontend.tokenizer import Tokenizer

# Beside what the tokenizer itself takes.
_MEMORY_BYTES = 8 * 2**30


def prepare(tokenizer: Tokenizer, job: Mapping[str, Any], max_chars: int) -> dict[str, Any]:
    """Return the ids of one job: {"text"} or {"messages", "variables"}.

    Raises ValueError for what the tokenizer or the template refuses and for a text of more than `max_chars`.
    """
    is_chat = "messages" in job
    text = tokenizer.apply_chat_template(job["messages"], **job["variables"]) if is_chat else str(job["text"])
    if len(text) > max_chars:
        raise ValueError(
            f"{'messages' if is_chat else 'prompt'} must have at most {max_chars} characters, got "
            f"{len(text)}; shorten it"
        )
    return {"ids": tokenizer.encode(text)}


def main(path: str, max_chars: int) -> None:
    """Answer jobs until standard input ends."""
    _limit_memory()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = Tokenizer(path)
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
