"""Reading regions of tensors: the bytes, the threads, and files that change."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from compiled_mtp.files import reader
from compiled_mtp.files.reader import FileReader, runs_of

START = 24


def write(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Write a tensor of int16 behind START bytes; return it."""
    values = np.random.default_rng(0).integers(-(1 << 15), 1 << 15, shape).astype(np.int16)
    path.write_bytes(bytes(START) + values.tobytes())
    return values


@pytest.mark.parametrize("shape", [(7,), (6, 9), (4, 5, 6), (3, 1, 8)])
def test_regions_are_those_of_numpy(tmp_path: Path, shape: tuple[int, ...]) -> None:
    file, draw = tmp_path / "file", random.Random(0)
    values, files = write(file, shape), FileReader()
    for _ in range(40):
        ends = [sorted((draw.randint(0, n), draw.randint(0, n))) for n in shape]
        pairs = zip(ends, shape, strict=True)
        region = [slice(*end) if draw.random() < 0.6 else slice(0, size) for end, size in pairs]
        found = files.read(file, runs_of(START, shape, region, 2)).view(torch.int16)
        assert np.array_equal(found.numpy(), values[tuple(region)].reshape(-1))


def test_a_region_without_gaps_is_one_run() -> None:
    whole = slice(0, 8)
    assert list(runs_of(100, (4, 8), (slice(1, 3), whole), 2)) == [(116, 32)]
    assert list(runs_of(100, (4, 8), (slice(0, 4), whole), 2)) == [(100, 64)]
    assert list(runs_of(100, (2, 4, 8), (slice(1, 2), slice(2, 4), whole), 1)) == [(148, 16)]
    assert list(runs_of(100, (), (), 4)) == [(100, 4)]


def test_several_threads_read_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_TASK_BYTES", 1000)
    file = tmp_path / "file"
    values, files = write(file, (64, 128)), FileReader()
    for region in ((slice(0, 64), slice(0, 128)), (slice(3, 60), slice(1, 100))):
        found = files.read(file, runs_of(START, values.shape, region, 2)).view(torch.int16)
        assert np.array_equal(found.numpy(), values[region].reshape(-1))


def test_a_file_that_became_shorter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write(file, (64, 128))
    files = FileReader()
    files.read(file, [(0, 8)])
    with file.open("r+b") as stream:
        stream.truncate(9000)
    for task_bytes in (1 << 20, 1000):
        monkeypatch.setattr(reader, "_TASK_BYTES", task_bytes)
        with pytest.raises(ValueError, match="file must stay unchanged while it is loaded"):
            files.read(file, [(0, START + 64 * 128 * 2)])


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent must be a readable file, got .*; check the path"):
        FileReader().read(tmp_path / "absent", [(0, 1)])


def test_files_are_closed_with_their_reader(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write(file, (4,))
    before = set(Path("/proc/self/fd").iterdir())
    files = FileReader()
    files.read(file, [(0, 8)])
    del files
    assert set(Path("/proc/self/fd").iterdir()) <= before
