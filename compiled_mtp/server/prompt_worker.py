"""A process that renders chats and tokenises; the server kills it if a template or a text takes too long.

Reads frames from standard input and writes frames to standard output: four bytes of length, big-endian, then
JSON. The images of a job, and the pixels in its answer, follow the frame as they are: to write or read large
ones as JSON would hold the service's interpreter lock for a tenth of a second. Imports neither torch nor
FastAPI.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from compiled_mtp.frontend.image_prompts import decode_address, place_images, prepare_images, split_chat
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.model_config import VisionConfig
from compiled_mtp.vision.images import PreparedImage

# Address space of the process, with Python and the tokenizer.
_MEMORY_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True)
class Limits:
    """The most characters of a rendered prompt, and what images are made into; None and 0 refuse them."""

    max_chars: int
    vision: VisionConfig | None = None
    max_images: int = 0


def prepare(
    tokenizer: Tokenizer, job: Mapping[str, Any], given: Sequence[bytes], limits: Limits
) -> tuple[list[int], list[PreparedImage]]:
    """Return the token ids and the images of one job: {"text"} or {"messages", "variables", "images"}.

    given: a file, or a data URI where job["images"] says is_address, for each bare image of the messages. The
    ids have all pads of the images, which are decoded here, in a process that may be killed. Raises
    ValueError if the tokenizer or the template refuses the job, its text has more than `max_chars`
    characters, or an image cannot be read.
    """
    is_chat, images = "messages" in job, list[PreparedImage]()
    if is_chat:
        files = [
            decode_address(content.decode()) if one["is_address"] else content
            for one, content in zip(job["images"], given, strict=True)
        ]
        messages, found = split_chat(job["messages"], files)
        images = prepare_images(found, limits.vision, limits.max_images)
        text = tokenizer.apply_chat_template(messages, **job["variables"])
    else:
        text = str(job["text"])
    if len(text) > limits.max_chars:
        raise ValueError(
            f"{'messages' if is_chat else 'prompt'} must have at most {limits.max_chars} characters, got "
            f"{len(text)}; shorten it"
        )
    ids = tokenizer.encode(text)
    if limits.vision is not None:
        ids, _ = place_images(ids, images, limits.vision)
    return ids, images


def _to_json(image: PreparedImage) -> dict[str, Any]:
    """All of an image but its pixels, and their number of bytes."""
    return {
        "rows": image.rows,
        "columns": image.columns,
        "num_bytes": len(image.pixels),
        "digest": image.digest.hex(),
    }


def image_of(fields: Mapping[str, Any], pixels: bytes) -> PreparedImage:
    """Return an image of a job's answer: its entry of `images`, and the bytes that follow the frame."""
    return PreparedImage(fields["rows"], fields["columns"], pixels, bytes.fromhex(fields["digest"]))


def main(path: str, limits: Limits, chat_template: str) -> None:
    """Answer jobs until standard input ends. chat_template: as of `Tokenizer`, "" for None."""
    _limit_memory()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = Tokenizer(path, Path(chat_template) if chat_template else None)
    _write(sink, {"ready": True})
    while (frame := _read(source)) is not None:
        images: Sequence[PreparedImage] = ()
        job = json.loads(frame)
        given = [source.read(one["num_bytes"]) for one in job.get("images", ())]
        try:
            ids, images = prepare(tokenizer, job, given, limits)
            answer: dict[str, Any] = {"ids": ids, "images": [_to_json(image) for image in images]}
        except ValueError as error:
            answer = {"error": str(error)[:4000]}
        except (MemoryError, RecursionError) as error:
            answer = {"error": f"prompt must be simpler, got {type(error).__name__}; shorten it"}
        _write(sink, answer, images)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(4)
    return source.read(int.from_bytes(head, "big")) if len(head) == 4 else None


def _write(sink: BinaryIO, answer: Mapping[str, Any], images: Sequence[PreparedImage] = ()) -> None:
    frame = json.dumps(answer).encode()
    sink.write(len(frame).to_bytes(4, "big") + frame)
    for image in images:
        sink.write(image.pixels)
    sink.flush()
