"""Decodes the blocks of a GGUF tensor to float32 values, in ggml's order of operations.

Each decoder takes blocks [n, bytes per block] uint8 and returns values [n, values per block] float32. The
values of a "sub-block" share a scale. Source: the block layouts of ggml; the tests compare the decoders with
ggml's package gguf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from compiled_mtp.gguf.block_types import BlockType

# The value of each four-bit code: E2M1 times 2, and the codebook of IQ4.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Values that a thread decodes at a time, so that intermediate tensors stay in a core's cache.
_VALUES_AT_ONCE = 1 << 18


def decode(form: BlockType, raw: torch.Tensor, out: torch.Tensor) -> None:
    """Write the values of `raw` [m] uint8, whole blocks of `form`, into `out` [k], contiguous float32."""
    decoder = _DECODERS[form.name]
    blocks, values = raw.view(-1, form.block_bytes), out.view(-1, form.block)
    at_once = out.numel() if out.is_cuda else torch.get_num_threads() * _VALUES_AT_ONCE
    step = max(1, at_once // form.block)
    for source, target in zip(blocks.split(step), values.split(step), strict=True):
        target.copy_(decoder(source))


def _f16(b: torch.Tensor) -> torch.Tensor:
    """The float16 numbers stored in `b` [n, 2m] uint8, as float32 [n, m]."""
    # A clone has the alignment that a view as float16 needs.
    return b.clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _i8(b: torch.Tensor) -> torch.Tensor:
    return b.view(torch.int8).float()


def _nibbles(b: torch.Tensor) -> torch.Tensor:
    """[..., m] -> [..., 2, m]: the low four bits of each byte, then the high four."""
    b = b.contiguous()
    return torch.stack((b & 15, b >> 4), -2)


def _fields(b: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., m] -> [..., 8 / bits, m]: each byte's fields of `bits` bits, the lowest first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=b.device)
    return (b.contiguous()[..., None, :] >> shifts[:, None]).bitwise_and_((1 << bits) - 1)


def _look_up(table: Sequence[float], codes: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(table, dtype=torch.float32, device=codes.device)
    return values.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _q4_0(b: torch.Tensor) -> torch.Tensor:
    return _f16(b[:, :2]) * (_nibbles(b[:, 2:]).flatten(1).float() - 8)


def _q4_1(b: torch.Tensor) -> torch.Tensor:
    return _f16(b[:, :2]) * _nibbles(b[:, 4:]).flatten(1).float() + _f16(b[:, 2:4])


def _five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 31 [n, 32] as float32, from 32 fifth bits [n, 4] and 16 bytes of nibbles [n, 16]."""
    fifth = _fields(high, 1).transpose(1, 2).flatten(1)
    return (_nibbles(low).flatten(1) | (fifth << 4)).float()


def _q5_0(b: torch.Tensor) -> torch.Tensor:
    return _f16(b[:, :2]) * (_five_bits(b[:, 2:6], b[:, 6:]) - 16)


def _q5_1(b: torch.Tensor) -> torch.Tensor:
    return _f16(b[:, :2]) * _five_bits(b[:, 4:8], b[:, 8:]) + _f16(b[:, 2:4])


def _q8_0(b: torch.Tensor) -> torch.Tensor:
    return _f16(b[:, :2]) * _i8(b[:, 2:])


def _affine(
    both: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """d * scale * value - dmin * min for each sub-block.

    both [n, 2]: d and dmin; scales, mins [n, sub-blocks]; values [n, sub-blocks, m]. Returns [n, values].
    """
    factors, offsets = both[:, :1] * scales.float(), both[:, 1:] * mins.float()
    return (values.float().mul_(factors[..., None]).sub_(offsets[..., None])).flatten(1)


def _six_bit_scales(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of 6 bits [n, 8] each from 12 bytes [n, 12]."""
    # Transposed first: operations on rows of four bytes are slow, on long rows fast.
    first, second, third = s.t().contiguous().split(4)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)))
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)))
    return scales.t(), mins.t()


def _q2_k(b: torch.Tensor) -> torch.Tensor:
    scales, values = b[:, :16], _fields(b[:, 16:80].view(-1, 2, 32), 2)
    return _affine(_f16(b[:, 80:]), scales & 15, scales >> 4, values.view(-1, 16, 16))


def _q3_k(b: torch.Tensor) -> torch.Tensor:
    low = _fields(b[:, 32:96].reshape(-1, 2, 32), 2).view(-1, 8, 32)
    # Where the high bit is not set, ggml subtracts 4.
    values = (low | (_fields(b[:, :32], 1) << 2)).float() - 4
    s = b[:, 96:108]
    scales = _nibbles(s[:, :8]).flatten(1) | (_fields(s[:, 8:], 2).flatten(1) << 4)
    factors = _f16(b[:, 108:]) * (scales.float() - 32)
    return (values.view(-1, 16, 16) * factors[..., None]).flatten(1)


def _q4_k(b: torch.Tensor) -> torch.Tensor:
    values = _nibbles(b[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return _affine(_f16(b[:, :4]), *_six_bit_scales(b[:, 4:16]), values)


def _q5_k(b: torch.Tensor) -> torch.Tensor:
    low = _nibbles(b[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    values = low | (_fields(b[:, 16:48], 1) << 4)
    return _affine(_f16(b[:, :4]), *_six_bit_scales(b[:, 4:16]), values)


def _q6_k(b: torch.Tensor) -> torch.Tensor:
    low = _nibbles(b[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    high = _fields(b[:, 128:192].view(-1, 2, 32), 2)
    values = (low | (high << 4)).view(-1, 16, 16).float() - 32
    factors = _f16(b[:, 208:]) * _i8(b[:, 192:208])
    return (values * factors[..., None]).flatten(1)


def _iq4_nl(b: torch.Tensor) -> torch.Tensor:
    return _f16(b[:, :2]) * _look_up(_IQ4, _nibbles(b[:, 2:])).flatten(1)


def _iq4_xs(b: torch.Tensor) -> torch.Tensor:
    # Per sub-block two high bits, from 16 bits, and four low bits, from 32.
    high = _fields(b[:, 2:4], 2).transpose(1, 2).flatten(1)
    low = _nibbles(b[:, 4:8]).transpose(1, 2).flatten(1)
    factors = _f16(b[:, :2]) * ((low | (high << 4)).float() - 32)
    values = _look_up(_IQ4, _nibbles(b[:, 8:].view(-1, 8, 16)))
    return (values.flatten(2) * factors[..., None]).flatten(1)


def _mxfp4(b: torch.Tensor) -> torch.Tensor:
    # Half of 2^(e - 127), because the table of codes is doubled.
    factors = [2.0 ** (e - 128) for e in range(256)]
    values = _look_up(_E2M1, _nibbles(b[:, 1:])).flatten(1)
    return values * _look_up(factors, b[:, :1])


def _nvfp4(b: torch.Tensor) -> torch.Tensor:
    # Halved, because the table of codes is doubled.
    factors = [_unsigned_e4m3(code) / 2 for code in range(256)]
    values = _look_up(_E2M1, _nibbles(b[:, 4:].view(-1, 4, 8)))
    return (values.flatten(2) * _look_up(factors, b[:, :4])[..., None]).flatten(1)


def _unsigned_e4m3(code: int) -> float:
    """ggml's value of each of the 256 codes: the sign bit is ignored, and 127 is 0."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    if code in (0, 127):
        return 0.0
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": lambda b: b.view(torch.float32),
    "F16": lambda b: b.view(torch.float16),
    "BF16": lambda b: b.view(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
