"""What is taken as an image, and sixty files and pictures that are not."""

from __future__ import annotations

import base64
import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import ExifTags, Image

from compiled_mtp.model_config import VisionConfig
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.vision.images import MOST_BYTES, prepare_image
from tests.vision.checkpoints import picture


@pytest.fixture(scope="module")
def vision(dense: Path) -> VisionConfig:
    config = read_model_config(dense, max_pixels=1 << 20).vision
    assert config is not None
    return config


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return the bytes of a file."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png_of(width: int, height: int, depth: int = 8, kind: int = 2, content: bytes = b"") -> bytes:
    """Return a PNG file whose header claims a size, whatever its content."""

    def part(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = part(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + part(b"IDAT", content) + part(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_files_of_every_format(vision, tmp_path, kind):
    image = picture(70, 40)
    content = encoded(image, kind)
    (tmp_path / "image").write_bytes(content)
    made = prepare_image(content, vision)
    assert (made.rows, made.columns, len(made.pixels)) == (1, 2, 32 * 64 * 3)
    assert made == prepare_image(tmp_path / "image", vision) == prepare_image(str(tmp_path / "image"), vision)
    assert made == prepare_image(Image.open(io.BytesIO(content)), vision)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA"])
def test_modes_that_become_rgb(vision, mode):
    image = picture(64, 64).convert("RGBA" if mode == "PA" else "RGB").convert(mode)
    assert prepare_image(image, vision).pixels == image.convert("RGB").tobytes()
    assert prepare_image(picture(64, 64), vision).pixels == picture(64, 64).tobytes()


def test_a_transparent_palette_causes_no_warning(vision, recwarn):
    image = picture(64, 64).convert("P")
    image.info["transparency"] = bytes(range(255))
    prepare_image(image, vision)
    assert not recwarn.list


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_file_is_turned_as_transformers_turns_it(vision, kind, orientation):
    from transformers.image_utils import load_image

    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    content = encoded(picture(96, 64, seed=1), kind, exif=exif)
    made = prepare_image(content, vision)
    assert (made.rows, made.columns) == ((2, 3) if orientation < 5 else (3, 2))
    # transformers takes base64 in place of an address.
    assert made == prepare_image(load_image(base64.b64encode(content).decode()), vision)
    # An image of Pillow is the caller's: transformers' processors do not turn it either.
    opened = prepare_image(Image.open(io.BytesIO(content)), vision)
    assert (opened.rows, opened.columns) == (2, 3)
    assert (opened == made) == (orientation == 1)


def test_the_digest_is_that_of_pixels_and_shape(vision):
    black = {(w, h): prepare_image(Image.new("RGB", (w, h)), vision) for w, h in ((64, 32), (32, 64))}
    assert black[64, 32].pixels == black[32, 64].pixels
    assert black[64, 32].digest != black[32, 64].digest
    assert (
        prepare_image(picture(64, 64, 1), vision).digest != prepare_image(picture(64, 64, 2), vision).digest
    )


def damaged() -> Iterator[tuple[str, Callable[[], Any], str]]:
    """Yield a name, a function that makes a wrong image, and what the error says."""
    picture_of = picture(96, 96)
    readable = "be a readable image|be a PNG"
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        whole = encoded(picture_of, kind)
        for share in (0.3, 0.7, 0.95):
            cut = whole[: int(len(whole) * share)]
            yield f"{kind} cut at {share}", lambda cut=cut: cut, readable
        yield f"{kind} header alone", lambda whole=whole: whole[:16], readable
        yield f"{kind} with a wrong begin", lambda whole=whole: b"xx" + whole[2:], readable
    noise = bytes(range(256)) * 8
    yield "nothing", lambda: b"", readable
    yield "noise", lambda: noise, readable
    yield "text", lambda: b"<html>not found</html>", readable
    yield "svg", lambda: b"<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'/>", readable
    yield "pdf", lambda: encoded(picture_of, "PDF"), readable
    yield "eps", lambda: encoded(picture_of, "EPS"), readable
    yield "tiff", lambda: encoded(picture_of, "TIFF"), readable
    yield "ico", lambda: encoded(picture_of, "ICO"), readable
    yield "ppm", lambda: encoded(picture_of, "PPM"), readable
    yield "tga", lambda: encoded(picture_of, "TGA"), readable
    yield "zip", lambda: b"PK\x03\x04" + noise, readable
    yield "elf", lambda: b"\x7fELF" + noise, readable
    yield "png of 1e9 x 1e9", lambda: png_of(10**9, 10**9), "at most 67108864 pixels"
    yield "png of 60000 x 60000", lambda: png_of(60000, 60000), "at most 67108864 pixels"
    yield "png of 9000 x 9000", lambda: png_of(9000, 9000), "at most 67108864 pixels"
    yield "png of no width", lambda: png_of(0, 9), "have pixels|be a readable|be a PNG"
    yield "png that lies", lambda: png_of(4000, 4000, content=zlib.compress(b"\0" * 100)), readable
    yield "png bomb", lambda: png_of(30000, 30000, content=zlib.compress(bytes(1 << 24))), "67108864 pixels"
    yield "png without zlib", lambda: png_of(64, 64, content=noise), readable
    yield "png of depth 3", lambda: png_of(64, 64, depth=3), readable
    yield "png of kind 9", lambda: png_of(64, 64, kind=9), readable
    yield "png of 16 bits", lambda: encoded(Image.new("I;16", (64, 64)), "PNG"), "have one of the modes"
    for kind in (2, 4, 6):
        wide = png_of(64, 64, depth=16, kind=kind, content=zlib.compress(bytes(64 * (1 + 64 * 8))))
        yield f"png of 16 bits, kind {kind}", lambda wide=wide: wide, "have 8 bits a channel, got 16 bits"
    yield "gif that moves", lambda: _animated("GIF"), "be a still picture, got an animation"
    yield "webp that moves", lambda: _animated("WEBP"), "be a still picture, got an animation"
    yield "png that moves", lambda: _animated("PNG"), "be a still picture, got an animation"
    yield "jpeg of cmyk", lambda: encoded(picture_of.convert("CMYK"), "JPEG"), "modes.*got CMYK"
    for mode in ("CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16", "RGBX"):
        yield f"mode {mode}", lambda mode=mode: Image.new(mode, (64, 64)), f"one of the modes.*got {mode}"
    yield "too narrow", lambda: Image.new("RGB", (3, 900)), "longer side of at most 200 times"
    yield "too flat", lambda: Image.new("L", (4001, 20)), "longer side of at most 200 times"
    yield "too large", lambda: Image.new("L", (8200, 8200)), "at most 67108864 pixels"
    yield "a number", lambda: 7, "be a picture, got 7"
    yield "none", lambda: None, "be a picture, got None"
    yield "no file", lambda: "/nowhere/image.png", "be a file that exists"
    yield "a directory", lambda: "/", "be a file that exists"
    yield "too many bytes", lambda: bytes(MOST_BYTES + 1), "have at most 64 MiB"


def _animated(kind: str) -> bytes:
    frames = [picture(64, 64, seed) for seed in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


DAMAGED = list(damaged())


def damaged_files() -> Iterator[tuple[str, bytes, str]]:
    """Yield those of `damaged` that can be sent: a name, the bytes and what the error says."""
    for name, make, says in DAMAGED:
        content = make()
        if isinstance(content, bytes) and len(content) <= MOST_BYTES:
            yield name, content, says


def test_there_are_sixty() -> None:
    assert len({name for name, _, _ in DAMAGED}) == len(DAMAGED) >= 60


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("name", "make", "says"), DAMAGED, ids=[name for name, _, _ in DAMAGED])
def test_a_wrong_image_is_one_line_and_takes_no_memory(vision, name, make, says):
    image = make()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=says) as caught:
            prepare_image(image, vision)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert text.startswith("image must ")
    assert "; " in text
    assert "\n" not in text
    assert len(text) < 600
    assert peak < 2 << 20
