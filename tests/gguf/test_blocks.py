"""Every block type against the package gguf, bit for bit, and against published numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from compiled_mtp.gguf.block_types import BLOCK_TYPES, REFUSED_TYPES
from compiled_mtp.gguf.blocks import decode

NUMBERS = {form.name: number for number, form in BLOCK_TYPES.items()}
# Values 0, 1, 31, 32, 63, 64, 128 and 255, and the sum of all, of a block whose byte i is 37 i mod 256, with
# d = 0.01 and dmin = 0.02 in their fields.
GOLDEN = {
    "Q4_K": ([-0.80017, 0.20004, 1.4003, 2.59055, 6.58141, -1.00021, -0.22005, 0.42009], 462.3387),
    "Q5_K": ([-0.80017, 3.40073, 4.60098, 8.29177, 12.28262, -1.00021, 6.82146, 1.52032], 1124.8802),
    "Q6_K": ([20.48438, 7.0415, -7.29156, -3.20068, 5.1711, -26.88574, 7.68164, -1.05022], -150.6722),
}


def decoded(name: str, raw: np.ndarray) -> np.ndarray:
    form = BLOCK_TYPES[NUMBERS[name]]
    out = torch.empty(raw.size // form.block_bytes * form.block)
    decode(form, torch.from_numpy(raw.reshape(-1)), out)
    return out.numpy()


@pytest.mark.parametrize("name", NUMBERS)
def test_sizes_are_those_of_the_package(name: str) -> None:
    form = BLOCK_TYPES[NUMBERS[name]]
    kind = GGMLQuantizationType[name]
    assert NUMBERS[name] == kind.value
    assert GGML_QUANT_SIZES[kind] == (form.block, form.block_bytes)


def test_every_type_of_the_package_is_decoded_or_refused_by_its_name() -> None:
    known = {n: form.name for n, form in BLOCK_TYPES.items()} | REFUSED_TYPES
    assert known == {kind.value: kind.name for kind in GGMLQuantizationType}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("count", [1, 3, 700])
@np.errstate(invalid="ignore", over="ignore")
def test_random_bytes_give_the_bits_of_the_package(name: str, count: int) -> None:
    form = BLOCK_TYPES[NUMBERS[name]]
    raw = np.random.default_rng(count).integers(0, 256, (count, form.block_bytes), dtype=np.uint8)
    got, want = decoded(name, raw), dequantize(raw, GGMLQuantizationType[name]).reshape(-1)
    assert want.dtype == np.float32
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "MXFP4"])
def test_many_threads_decode_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = BLOCK_TYPES[NUMBERS[name]]
    raw = np.random.default_rng(0).integers(0, 256, (50, form.block_bytes), dtype=np.uint8)
    whole = decoded(name, raw)
    monkeypatch.setattr("compiled_mtp.gguf.blocks._VALUES_AT_ONCE", 7 * form.block)
    assert np.array_equal(decoded(name, raw).view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name: str) -> None:
    size = BLOCK_TYPES[NUMBERS[name]].block_bytes
    raw = (37 * np.arange(size) % 256).astype(np.uint8)
    halves = np.array([0.01, 0.02], np.float16).view(np.uint8)
    if name == "Q6_K":
        raw[208:] = halves[:2]
    else:
        raw[:4] = halves
    values, total = GOLDEN[name]
    got = decoded(name, raw)
    assert got[[0, 1, 31, 32, 63, 64, 128, 255]] == pytest.approx(values, abs=6e-6)
    assert got.sum(dtype=np.float64) == pytest.approx(total, abs=1e-4)
