"""How much may be open at a time: choices, and bytes of the pixels of their images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compiled_mtp.errors import check
from compiled_mtp.streams.status import QueueFullError
from compiled_mtp.streams.stream import Stream
from compiled_mtp.vision.images import PreparedImage

DEFAULT_IMAGE_BYTES = 4 * 2**30


def check_choices(num_more: int, num_open: int, most: int, retry_after_s: int) -> None:
    """Raise unless `num_more` choices fit beside `num_open` open ones into `most`, a service's max_open.

    Raises ValueError for more than ever fit, and else QueueFullError, which carries retry_after_s.
    """
    rule = f"be at most {most} (max_open) over all requests"
    check(num_more <= most, "n", rule, num_more, "ask for fewer")
    if num_open + num_more > most:
        raise QueueFullError(
            f"the queue must have room for {num_more} more, got {num_open} of {most} taken; try again later",
            retry_after_s,
        )


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
