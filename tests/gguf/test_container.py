"""GGUF files from the package are read in full; damaged ones are refused in one line, using no memory."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from compiled_mtp.gguf.config import hf_config
from compiled_mtp.gguf.container import part_files, read_container

U32, F32, STRING, ARRAY = 4, 6, 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def header(tensors: int = 0, entries: int = 0, version: int = 3, order: str = "<") -> bytes:
    return b"GGUF" + struct.pack(f"{order}IQQ", version, tensors, entries)


ARCH = entry("general.architecture", STRING, text("qwen35"))


def padded(raw: bytes, data: int) -> bytes:
    return raw + bytes(-len(raw) % 32 + data)


# Damage: the file's bytes, and the text that the error must contain.
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "must be a GGUF file, got 0 bytes"),
    "no magic": (b"PK\x03\x04" + bytes(60), "must begin with GGUF, got .*PK"),
    "safetensors": (struct.pack("<Q", 2) + b"{}" + bytes(40), "must begin with GGUF"),
    "version 1": (header(version=1), "must be of GGUF version 2 or 3, got 1"),
    "version 9": (header(version=9), "must be of GGUF version 2 or 3, got 9"),
    "big-endian": (header(order=">"), "must be little-endian"),
    "10^9 entries": (header(entries=10**9) + ARCH, "at most 65536 metadata entries, got 1000000000"),
    "2^64 tensors": (header(tensors=2**64 - 1), "at most 65536 tensors"),
    "missing entries": (header(entries=5) + ARCH, "must hold all that it describes"),
    "a key without end": (header(entries=1) + struct.pack("<Q", 2**40) + b"x", "hold all that it describes"),
    "a key that is no text": (header(entries=1) + text(b"\xff\xfe") + bytes(8), "UTF-8"),
    "a key twice": (header(entries=2) + ARCH + ARCH, "each key once, got general.architecture twice"),
    "an unknown type": (header(entries=1) + entry("a.b", 13, bytes(8)), "types 0 to 12, got 13 for a.b"),
    "an array without end": (
        header(entries=1) + entry("a.b", ARRAY, struct.pack("<IQ", U32, 10**9)),
        "at most 16777216 values of a.b, got 1000000000",
    ),
    "an array that is cut short": (
        header(entries=1) + entry("a.b", ARRAY, struct.pack("<IQ", STRING, 10**6)),
        "must hold its arrays whole, got 1000000 values for a.b",
    ),
    "an array of arrays": (
        header(entries=1) + entry("a.b", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64)),
        "must hold no arrays of arrays",
    ),
    "an array of an unknown type": (
        header(entries=1) + entry("a.b", ARRAY, struct.pack("<IQ", 77, 1) + bytes(64)),
        "types 0 to 12, got 77",
    ),
    "an alignment of 3": (
        header(entries=1) + entry("general.alignment", U32, struct.pack("<I", 3)),
        "power of two as general.alignment, got 3",
    ),
    "an alignment of 0": (
        header(entries=1) + entry("general.alignment", U32, struct.pack("<I", 0)),
        "power of two as general.alignment, got 0",
    ),
    "no dimensions": (header(tensors=1) + tensor("t", []), "1 to 4 dimensions, got 0 for t"),
    "many dimensions": (
        header(tensors=1) + struct.pack("<Q1sI", 1, b"t", 10**9),
        "dimensions, got 1000000000",
    ),
    "a dimension of 0": (header(tensors=1) + tensor("t", [32, 0]), "hold all values of its tensors"),
    "dimensions whose product wraps around": (
        padded(header(tensors=1) + tensor("t", [2**32, 2**32]), 64),
        "must hold all values of its tensors",
    ),
    "an offset beyond the file": (
        padded(header(tensors=1) + tensor("t", [8], offset=2**20), 64),
        "must hold its tensors whole, got .* bytes, of which t needs",
    ),
    "an offset that wraps around": (
        padded(header(tensors=1) + tensor("t", [8], offset=2**64 - 32), 64),
        "must hold its tensors whole",
    ),
    "an offset between": (padded(header(tensors=1) + tensor("t", [8], offset=4), 64), "align tensors to 32"),
    "tensors cut short": (padded(header(tensors=1) + tensor("t", [64]), 255), "must hold its tensors whole"),
    "half a block": (
        padded(header(tensors=1) + tensor("t", [128], kind=12), 512),
        "rows of whole blocks of 256 values, got 128 for t",
    ),
    "a refused type": (
        padded(header(tensors=1) + tensor("t", [256], kind=16), 512),
        "must have tensors of the types .*Q4_K.*, got IQ2_XXS for t",
    ),
    "a removed type": (
        padded(header(tensors=1) + tensor("t", [256], kind=4), 512),
        "must have tensors of the types .*, got type number 4 for t",
    ),
    "a tensor twice": (
        padded(header(tensors=2) + tensor("t", [8]) + tensor("t", [8]), 64),
        "hold each tensor once, got t twice",
    ),
}


def refused(call: Callable[[], Any], path: Path) -> str:
    """Return the one-line error that `call` raises, after checking that it allocated no memory for it."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r".") as raised:
            call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(raised.value)
    assert peak < 1 << 20
    assert "\n" not in message
    assert str(path) in message
    assert " must " in message
    assert "; " in message
    return message


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_files_are_refused(what: str, tmp_path: Path) -> None:
    raw, wanted = DAMAGED[what]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    assert re.search(wanted, refused(lambda: read_container(path), path))


@pytest.mark.parametrize(
    ("name", "remedy"), [("llama", "not supported"), ("clip", "vision tower"), (None, "not supported")]
)
def test_other_architectures_are_refused(name: str | None, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    entries = b"" if name is None else entry("general.architecture", STRING, text(name))
    path.write_bytes(header(entries=int(name is not None)) + entries)
    assert remedy in refused(lambda: hf_config(read_container(path)), path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert "must be a readable file" in refused(lambda: read_container(path), path)
    for name in ("b-Q8_0.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    message = refused(lambda: read_container(path), path)
    assert message.endswith("; its folder has a-00001-of-00002.gguf, b-Q8_0.gguf")


def test_an_unchanged_file_is_read_once(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf")
    raw, before = path.read_bytes(), time.time() - 60
    assert read_container(path) is not read_container(path)  # It may change again within this second.
    os.utime(path, (before, before))
    first = read_container(path)
    assert read_container(path) is first
    path.write_bytes(raw.replace("ä".encode(), "ö".encode()))
    os.utime(path, (before, before))
    assert read_container(path).metadata["n.text"] == "ö"


def test_every_prefix_of_a_file_is_refused(tmp_path: Path) -> None:
    whole, path = written(tmp_path / "whole.gguf").read_bytes(), tmp_path / "cut.gguf"
    for size in [*range(0, len(whole) - 1, 37), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf must "):
            read_container(path)


def test_random_damage_is_read_or_refused(tmp_path: Path) -> None:
    whole, path = written(tmp_path / "whole.gguf").read_bytes(), tmp_path / "model.gguf"
    rng = np.random.default_rng(0)
    for _ in range(150):
        raw = bytearray(whole)
        for at in rng.integers(0, 600, 3):
            raw[at] = rng.integers(256)
        path.write_bytes(raw)
        # Any other error would be a bug.
        with contextlib.suppress(ValueError):
            read_container(path)


def written(path: Path, *, max_tensors: int = 0, is_merged: bool = False) -> Path:
    """Write a file with an entry of each type and four tensors."""
    writer = gguf.GGUFWriter(path, "qwen35", split_max_tensors=max_tensors)
    writer.add_uint8("n.u8", 200)
    writer.add_int8("n.i8", -3)
    writer.add_uint16("n.u16", 60000)
    writer.add_int16("n.i16", -300)
    writer.add_uint32("n.u32", 4_000_000_000)
    writer.add_int32("n.i32", -70000)
    writer.add_uint64("n.u64", 2**63)
    writer.add_int64("n.i64", -(2**60))
    writer.add_float32("n.f32", 0.5)
    writer.add_float64("n.f64", 0.1)
    writer.add_bool("n.bool", True)
    writer.add_string("n.text", "ä")
    writer.add_array("n.texts", ["a", "", "Ġx"])
    writer.add_array("n.numbers", [1, -2, 3])
    writer.add_array("n.floats", [0.5, 1.5])
    if is_merged:
        writer.add_uint16("split.count", 0)
        writer.add_uint16("split.no", 0)
        writer.add_int32("split.tensors.count", 4)
    writer.add_tensor("one", np.arange(7, dtype=np.float32))
    writer.add_tensor("two", np.ones((3, 5), np.float16))
    writer.add_tensor("three", np.zeros((2, 3, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("four", np.full((4, 4), 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


METADATA = {
    "n.u8": 200,
    "n.i8": -3,
    "n.u16": 60000,
    "n.i16": -300,
    "n.u32": 4_000_000_000,
    "n.i32": -70000,
    "n.u64": 2**63,
    "n.i64": -(2**60),
    "n.f32": 0.5,
    "n.f64": 0.1,
    "n.bool": True,
    "n.text": "ä",
    "n.texts": ["a", "", "Ġx"],
    "n.numbers": [1, -2, 3],
    "n.floats": [0.5, 1.5],
}
SHAPES = {"one": (7,), "two": (3, 5), "three": (2, 3, 32), "four": (4, 4)}


def test_files_of_the_package_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf")
    container = read_container(path)
    assert {key: container.metadata[key] for key in METADATA} == METADATA
    assert {name: t.shape for name, t in container.tensors.items()} == SHAPES
    theirs = {t.name: (t.data_offset, t.n_bytes) for t in gguf.GGUFReader(path).tensors}
    assert {name: (t.offset, t.num_bytes) for name, t in container.tensors.items()} == theirs


def test_a_file_that_was_merged_from_parts_is_whole(tmp_path: Path) -> None:
    """llama.cpp's tool leaves a count of 0 parts in it."""
    path = written(tmp_path / "m.gguf", is_merged=True)
    assert {name: t.shape for name, t in read_container(path).tensors.items()} == SHAPES


def test_a_file_in_parts_is_read_in_full_from_any_part(tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", max_tensors=1)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [p.name for p in parts] == [f"m-0000{i}-of-00004.gguf" for i in range(1, 5)]
    for part in parts:
        assert part_files(part) == parts
        container = read_container(part)
        assert {name: t.shape for name, t in container.tensors.items()} == SHAPES
        assert container.metadata["n.u8"] == 200
    (tmp_path / "alone.gguf").write_bytes(parts[1].read_bytes())
    with pytest.raises(
        ValueError, match=r"alone\.gguf must be a whole model, got one of 4 parts; .* as they were published"
    ):
        read_container(tmp_path / "alone.gguf")
    parts[2].rename(tmp_path / "aside")
    with pytest.raises(
        ValueError, match=r"must be in one folder with all 4 parts, got no m-00003-of-00004\.gguf"
    ):
        read_container(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ValueError, match=r"m-00003-of-00004\.gguf must be part number 2, got number 1"):
        read_container(parts[0])
