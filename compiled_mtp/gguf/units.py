"""Takes the blocks of GGUF tensors apart into codes and scales, in units of 128 columns (ops.blocks).

Each function takes blocks [n, blocks of a row, bytes] uint8, on any device, and returns codes [n, columns]
uint8 and fields [n, units, S] int16 of the kind of that name. Nothing is computed: the numbers are the
file's. A super-block of 256 columns becomes two units, each with the super-block's d and dmin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from compiled_mtp.ops.blocks import UNIT, pack_affine

Parts = tuple[Tensor, Tensor]


def _bits(b: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of `dtype` stored in the last dimension."""
    # A clone has the alignment that a view needs.
    return b.clone(memory_format=torch.contiguous_format).view(dtype)


def _nibbles(b: Tensor) -> Tensor:
    """[..., m] -> [..., 2, m]: the low four bits of each byte, then the high four."""
    return torch.stack((b & 15, b >> 4), -2)


def _fields(b: Tensor, bits: int) -> Tensor:
    """[..., m] -> [..., 8 / bits, m]: each byte's fields of `bits` bits, the lowest first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=b.device)
    return b[..., None, :] >> shifts[:, None] & (1 << bits) - 1


def _halved(numbers: Tensor) -> Tensor:
    """[n, super-blocks, m] -> [n, units, m / 2]: the halves of a super-block are two units."""
    return numbers.unflatten(-1, (2, -1)).flatten(1, 2)


def _doubled(numbers: Tensor) -> Tensor:
    """[n, super-blocks, ...] -> [n, units, ...]: both units have the super-block's numbers."""
    return numbers.repeat_interleave(2, 1)


def _affine_fields(b: Tensor) -> Tensor:
    """The fields of Q4_K and Q5_K: d, dmin, and 12 bytes of eight scales and eight minima of six bits."""
    both = _doubled(_bits(b[..., :4], torch.float16))
    first, second, third = b[..., 4:16].split(4, -1)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), -1)
    mins = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), -1)
    return pack_affine(both[..., 0], both[..., 1], _halved(scales), _halved(mins))


def _q4_k(b: Tensor) -> Parts:
    return _nibbles(b[..., 16:].unflatten(-1, (4, 32))).flatten(1), _affine_fields(b)


def _q5_k(b: Tensor) -> Parts:
    low = _nibbles(b[..., 48:].unflatten(-1, (4, 32))).flatten(-3, -2)
    return (low | _fields(b[..., 16:48], 1) << 4).flatten(1), _affine_fields(b)


def _q6_k(b: Tensor) -> Parts:
    low = _nibbles(b[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (2, 32)).flatten(-3, -2)
    high = _fields(b[..., 128:192].unflatten(-1, (2, 32)), 2)
    d = _doubled(_bits(b[..., 208:], torch.int16))
    scales = _bits(_halved(b[..., 192:208]), torch.int16)
    return (low | high << 4).flatten(1), torch.cat((d, scales), -1)


def _q8_0(b: Tensor) -> Parts:
    # Signed bytes; the kind's codes are 128 more.
    return b[..., 2:].flatten(1) ^ 128, _bits(b[..., :2], torch.int16).reshape(len(b), -1, UNIT // 32)


def _q4_0(b: Tensor) -> Parts:
    return _nibbles(b[..., 2:]).flatten(1), _bits(b[..., :2], torch.int16).reshape(len(b), -1, UNIT // 32)


def _iq4_xs(b: Tensor) -> Parts:
    high = _fields(b[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    low = _nibbles(b[..., 4:8]).transpose(-1, -2).flatten(-2)
    six = _halved(low | high << 4).to(torch.int16).unflatten(-1, (2, 2))
    d = _doubled(_bits(b[..., :2], torch.int16))
    codes = _nibbles(b[..., 8:].unflatten(-1, (8, 16))).flatten(1)
    return codes, torch.cat((d, six[..., 0] | six[..., 1] << 6), -1)


def _mxfp4(b: Tensor) -> Parts:
    exponents = b[..., 0].reshape(len(b), -1, UNIT // 32)
    return _nibbles(b[..., 1:]).flatten(1), _bits(exponents, torch.int16)


def _nvfp4(b: Tensor) -> Parts:
    # ggml ignores the sign, and takes 127 for 0; 255 becomes NaN, which the loader refuses.
    scales = b[..., :4]
    scales = torch.where(scales == 127, torch.zeros_like(scales), scales & 127)
    codes = _nibbles(b[..., 4:].unflatten(-1, (4, 8)))
    return codes.flatten(1), _bits(scales.reshape(len(b), -1, UNIT // 16), torch.int16)


UNITS: Mapping[str, Callable[[Tensor], Parts]] = MappingProxyType(
    {
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "Q8_0": _q8_0,
        "Q4_0": _q4_0,
        "IQ4_XS": _iq4_xs,
        "MXFP4": _mxfp4,
        "NVFP4": _nvfp4,
    }
)
"""By the name of the blocks' type."""
