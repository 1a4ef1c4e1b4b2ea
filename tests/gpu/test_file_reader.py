"""On a GPU: bytes that pass through the pinned buffers are those of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiled_mtp.files import reader
from compiled_mtp.files.reader import FileReader

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def test_bytes_pass_through_the_buffers_by_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_BUFFER_BYTES", 5000)
    monkeypatch.setattr(reader, "_TASK_BYTES", 700)
    values = torch.randint(0, 256, (200_000,), dtype=torch.uint8)
    file = tmp_path / "file"
    file.write_bytes(values.numpy().tobytes())
    files = FileReader()
    # Work that the copies wait for, so that buffers would be filled again too soon.
    busy = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(20):
        busy = busy @ busy * 0.01
    whole = files.read(file, [(0, len(values))], DEVICE)
    some = files.read(file, [(at, 37) for at in range(11, len(values) - 37, 101)], DEVICE)
    assert torch.equal(whole.cpu(), values)
    assert torch.equal(
        some.cpu(), torch.cat([values[at : at + 37] for at in range(11, len(values) - 37, 101)])
    )
