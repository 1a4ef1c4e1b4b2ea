"""Images in prompts: out of a chat's content parts, and into the token ids. No torch."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_mtp.errors import check, fail, quote, shown
from compiled_mtp.model_config import VisionConfig
from compiled_mtp.plan import ImageSpan
from compiled_mtp.request import PromptImage
from compiled_mtp.vision.images import PreparedImage, prepare_image

# What a chat template reads of an image.
_PLACEHOLDER = {"type": "image"}
_DATA = "data:"


def split_chat(
    messages: Sequence[Mapping[str, Any]], images: Sequence[object]
) -> tuple[list[Mapping[str, Any]], list[object]]:
    """Return a chat whose image parts hold no image any more, and all images in order.

    A part is {"type": "image", "image": ...} with an `ImageInput` or a data URI, {"type": "image_url",
    "image_url": {"url": ...}} with a data URI, or {"type": "image"} for the next of `images`. Raises
    ValueError for other parts with media, for addresses, and unless `images` has one for each bare part.
    """
    given, found, plain = list(images), list[object](), list[Mapping[str, Any]]()
    num_bare = 0
    for message in messages:
        content = message.get("content")
        if not isinstance(content, Sequence) or isinstance(content, str):
            plain.append(message)
            continue
        parts = []
        for part in content:
            is_image, image = _image_of(part)
            parts.append(_PLACEHOLDER if is_image else part)
            if is_image and image is None:
                found.append(given[num_bare] if num_bare < len(given) else None)
                num_bare += 1
            elif is_image:
                found.append(image)
        plain.append({**message, "content": parts})
    rule = f"have one image for each of {num_bare} content parts without one"
    remedy = 'put {"type": "image"} where an image belongs'
    check(num_bare == len(given), "images", rule, len(given), remedy)
    return plain, found


def _image_of(part: object) -> tuple[bool, object]:
    """Return whether a content part is an image, and the image, None if it is given elsewhere."""
    if not isinstance(part, Mapping):
        return False, None
    kind = part.get("type")
    if kind in ("video", "video_url", "input_video") or "video" in part:
        raise fail("messages", "have only text and images", "a video", "give some of its frames as images")
    if kind == "image_url" or "image_url" in part:
        address = part.get("image_url")
        if isinstance(address, Mapping):
            address = address.get("url")
        return True, decode_address(address)
    image = part.get("image")
    if isinstance(image, str) and image[: len(_DATA)].lower() == _DATA:
        image = decode_address(image)
    return kind == "image" or "image" in part, image


def decode_address(address: object) -> bytes:
    """Return the bytes of a data URI in base64. Raises ValueError for any other address."""
    if not isinstance(address, str):
        raise fail("image_url", "be a data URI", type(address).__name__, 'give {"url": "data:..."}')
    if not address.lower().startswith(_DATA):
        scheme = shown(address.partition(":")[0][:40])
        remedy = "send the image itself, as data:image/png;base64,..."
        raise fail("image_url", "be a data URI", f"one of {scheme}:", remedy)
    head, comma, content = address.partition(",")
    is_base64 = bool(comma) and head.lower().endswith(";base64")
    check(is_base64, "image_url", "hold base64 after a comma", head[:60], "write data:image/png;base64,...")
    return decode_base64(content)


def decode_base64(content: str) -> bytes:
    """Return the bytes that `content` encodes. Raises ValueError for text that is not base64."""
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise fail("image", "be valid base64", error, "encode the file's bytes") from None


def check_count(count: int, max_images: int) -> None:
    """Raise ValueError for more than max_images images; 0: the engine takes none."""
    if count and not max_images:
        remedy = "start the engine with max_images, or --max-images, if the checkpoint has a vision tower"
        raise fail("images", "be left out", f"{count}", remedy)
    check(count <= max_images, "images", f"be at most {max_images}", count, "raise max_images")


def prepare_images(
    images: Sequence[object], vision: VisionConfig | None, max_images: int
) -> list[PreparedImage]:
    """Return all images of a request, decoded and resized.

    Raises ValueError for more than max_images, before any is decoded, and as `prepare_image` does.
    """
    check_count(len(images), 0 if vision is None else max_images)
    prepared = []
    for number, image in enumerate(images, start=1):
        if isinstance(image, PreparedImage):
            prepared.append(image)
            continue
        assert vision is not None
        try:
            prepared.append(prepare_image(image, vision))
        except ValueError as error:
            if len(images) == 1:
                raise
            raise ValueError(f"image {number} of {len(images)}: {error}") from None
    return prepared


def place_images(
    token_ids: Sequence[int], images: Sequence[PreparedImage], vision: VisionConfig
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return the prompt with as many pads as each image has tokens, and the images in their places.

    token_ids: with one pad for each image, or already with all. Raises ValueError for another number of pads,
    which text may spell, and for a video's pad.
    """
    pad = vision.image_token_id
    videos = token_ids.count(vision.video_token_id)
    check(not videos, "prompt", "have no videos", f"{videos} video pads", "give frames as images")
    count, whole = token_ids.count(pad), sum(image.rows * image.columns for image in images)
    is_expanded = count == whole and count != len(images)
    if count != len(images) and not is_expanded:
        rule = f"have one image pad for each of {len(images)} images"
        raise fail("prompt", rule, f"{count} pads", "leave out text that spells the pad")
    ids: list[int] = []
    placed: list[PromptImage] = []
    waiting, at = list(images), 0
    while at < len(token_ids):
        if token_ids[at] != pad:
            ids.append(token_ids[at])
            at += 1
            continue
        image = waiting.pop(0)
        num_tokens = image.rows * image.columns
        if is_expanded and any(token != pad for token in token_ids[at : at + num_tokens]):
            raise fail("prompt", "have an image's pads in one run", quote(num_tokens), "correct the ids")
        span = ImageSpan(len(ids), image.rows, image.columns)
        placed.append(PromptImage(span, image.pixels, image.digest))
        ids += [pad] * num_tokens
        at += num_tokens if is_expanded else 1
    return ids, tuple(placed)
