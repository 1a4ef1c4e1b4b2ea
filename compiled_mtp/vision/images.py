"""Decodes images with Pillow and resizes them to whole cells; refuses what is no plain picture. No torch."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from compiled_mtp.errors import check, fail, quote, shown
from compiled_mtp.model_config import VisionConfig
from compiled_mtp.vision.sizes import smart_resize

if TYPE_CHECKING:
    from PIL import Image

ImageInput: TypeAlias = "Image.Image | bytes | str | Path"
"""A picture: an image of Pillow, the bytes of a file, or a path."""

# Limits of an image as it comes, before it is resized: its pixels, and the bytes of its file.
MOST_PIXELS = 1 << 26
MOST_BYTES = 64 << 20
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Formats in which several frames are an animation. A JPEG may hold further views of a camera.
_ANIMATED = ("PNG", "WEBP", "GIF")
# Modes that Pillow converts to RGB exactly; an alpha channel is dropped.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
_SAVE_ANEW = "save it as an RGB image with 8 bits a channel"


class PreparedImage(NamedTuple):
    """An image of rows by columns cells; pixels: its RGB bytes, row by row.

    digest stands for the pixels and the shape: two images of one digest have the same features.
    """

    rows: int
    columns: int
    pixels: bytes
    digest: bytes


def prepare_image(image: object, vision: VisionConfig) -> PreparedImage:
    """Decode and resize an `ImageInput`. Any thread may call it.

    A file is turned as its EXIF orientation says, and an image of Pillow is taken as it is, as transformers'
    `load_image` and processors do. Resizing is Pillow's, bicubic, as in the slow processor. Checks the size
    that the file claims before anything of that size is allocated. Raises ValueError for an image that cannot
    be read, is animated, too large or too narrow, or has other than 8 bits a channel or four colours, and
    without Pillow.
    """
    if find_spec("PIL") is None:
        raise fail("Pillow", "be installed to read images", "none", "pip install 'compiled-mtp[vision]'")
    from PIL import Image, ImageOps

    is_file = not isinstance(image, Image.Image)
    opened: Any = _open(image) if is_file else image
    _check(opened)
    # Refuses a narrow image before it is decoded.
    smart_resize(opened.height, opened.width, vision)
    with _readable():
        # The first call decodes the file.
        if is_file:
            ImageOps.exif_transpose(opened, in_place=True)
        upright = _as_rgb(opened)
        height, width = smart_resize(upright.height, upright.width, vision)
        pixels = upright.resize((width, height), Image.Resampling.BICUBIC).tobytes()
    rows, columns = height // vision.cell, width // vision.cell
    digest = hashlib.blake2b(f"{rows} {columns} ".encode(), digest_size=32)
    digest.update(pixels)
    return PreparedImage(rows, columns, pixels, digest.digest())


@contextmanager
def _readable() -> Iterator[None]:
    """Name the image in every error of Pillow's decoders, which raise many kinds for damaged files."""
    try:
        yield
    except MemoryError:
        raise fail("image", "fit into memory", "an image that does not", "shrink it") from None
    except Exception as error:
        got = f"{type(error).__name__}: {shown(error)}"
        raise fail("image", "be a readable image", got, "save it again") from None


def _open(image: object) -> Image.Image:
    """Open the bytes or the path of a file; reads no more than its header."""
    from PIL import Image, UnidentifiedImageError

    content: Any = image
    if isinstance(image, str) and "://" in image:
        raise fail("image", "be a file on this machine", shown(image[:60]), "download it")
    if isinstance(image, (str, Path)):
        content = Path(image)
        check(content.is_file(), "image", "be a file that exists", content, "correct the path")
        count = content.stat().st_size
    elif isinstance(image, (bytes, bytearray)):
        count = len(image)
    else:
        remedy = "pass an image of Pillow, the bytes of a file, or a path"
        raise ValueError(f"image must be a picture, got {quote(image)}; {remedy}")
    check(count <= MOST_BYTES, "image", f"have at most {MOST_BYTES >> 20} MiB", f"{count} bytes", "shrink it")
    if not isinstance(content, Path):
        content = io.BytesIO(content)
    with _readable():
        try:
            return Image.open(content, formats=_FORMATS)
        except Image.DecompressionBombError:
            is_bomb = True
        except UnidentifiedImageError:
            is_bomb = False
    if is_bomb:
        raise _too_large("far more")
    raise fail("image", f"be a {', '.join(_FORMATS)} file", "another or a damaged one", "convert it")


def _check(image: Image.Image) -> None:
    """Raise ValueError for an image that is too large, animated, or of a mode that is not converted."""
    pixels = image.width * image.height
    check(pixels > 0, "image", "have pixels", f"{image.width} x {image.height}", "give another")
    if pixels > MOST_PIXELS:
        raise _too_large(f"{image.width} x {image.height}")
    with _readable():
        is_animated = image.format in _ANIMATED and getattr(image, "is_animated", False)
    check(not is_animated, "image", "be a still picture", "an animation", "save one of its frames")
    check(image.mode in _MODES, "image", f"have one of the modes {_MODES}", image.mode, _SAVE_ANEW)
    # Pillow would cut such colours to 8 bits; an image that is decoded already has no tiles.
    tiles = getattr(image, "tile", ()) if image.format == "PNG" else ()
    is_wide = any(str(tile[3]).endswith(";16B") for tile in tiles)
    check(not is_wide, "image", "have 8 bits a channel", "16 bits", _SAVE_ANEW)


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("P", "1", "L") and "transparency" in image.info:
        # Pillow warns if such an image becomes RGB at once.
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _too_large(got: str) -> ValueError:
    return fail("image", f"have at most {MOST_PIXELS} pixels", got, "shrink it")
