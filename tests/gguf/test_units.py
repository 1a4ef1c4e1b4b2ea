"""Blocks of GGUF tensors as codes and scales: the values that the package gguf gives them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from compiled_mtp.gguf.block_types import BLOCK_TYPES
from compiled_mtp.gguf.units import UNITS
from compiled_mtp.ops.blocks import KINDS, pack, pack_scales, unpack, unpack_scales, values

FORMS = {form.name: form for form in BLOCK_TYPES.values()}


def random_blocks(name: str, n: int, k: int) -> np.ndarray:
    """Any bytes, but scales that are finite."""
    form, rng = FORMS[name], np.random.default_rng(0)
    raw = rng.integers(0, 256, (n, k // form.block, form.block_bytes), dtype=np.uint8)
    halves = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (), "NVFP4": ()}.get(name, (0,))
    for at in halves:
        half = rng.standard_normal(raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = half[..., None].view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = rng.integers(2, 253, raw.shape[:2])
    if name == "NVFP4":
        raw[..., :4] &= 127
    return raw


@pytest.mark.parametrize("name", UNITS)
def test_values_are_those_of_the_package(name: str) -> None:
    n, k, kind = 32, 768, KINDS[name]
    raw = random_blocks(name, n, k)
    codes, fields = UNITS[name](torch.from_numpy(raw))
    assert fields.shape == (n, k // 128, kind.fields)
    factor = torch.ones(n) if kind.has_factor else None
    words, scales = pack(codes, kind), pack_scales(fields, kind, factor)
    assert torch.equal(unpack(words, kind), codes)
    assert torch.equal(unpack_scales(scales, kind)[0], fields)
    wanted = dequantize(raw.reshape(n, -1), Type[name])
    assert torch.equal(values(words, scales, kind), torch.from_numpy(wanted))
