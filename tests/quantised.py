"""Quantised versions of plain checkpoints: packers in NumPy, written from the formats' descriptions.

A packer takes a matrix [N, K]. It returns the tensors to store, by the endings of their names, and the
float32 values that they stand for, computed from the codes before they are packed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
Packer = Callable[[np.ndarray], Packed]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# The positions in a word at which AWQ puts rows 0 .. 7.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Pack codes [M, K] into words [M, ceil(K * bits / 32)], from the lowest bits of a word on."""
    per_word = 32 // bits
    padded = np.pad(codes.astype(np.uint32), ((0, 0), (0, -codes.shape[1] % per_word)))
    words = np.zeros((len(codes), padded.shape[1] // per_word), np.uint32)
    for place in range(per_word):
        words |= padded[:, place::per_word] << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def integers(
    w: np.ndarray, group: int, bits: int, *, symmetric: bool, dtype: torch.dtype, negative: bool = False
) -> tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor]:
    """Return codes [N, K], zero points and scales [N, groups] of groups of columns, and the values."""
    n, k = w.shape
    most, rng = (1 << bits) - 1, np.random.default_rng(n * k)
    groups = [slice(first, min(first + group, k)) for first in range(0, k, group)]
    codes = np.zeros((n, k), np.int64)
    zeros, scales = np.zeros((n, len(groups)), np.int64), np.zeros((n, len(groups)), np.float32)
    for index, columns in enumerate(groups):
        part = w[:, columns]
        if symmetric:
            scale, zero = np.abs(part).max(1) / (most // 2), np.full(n, (most + 1) // 2)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / most
            zero = np.clip(np.rint(-low / scale), 1, most).astype(np.int64)
        if negative:
            scale = scale * rng.choice([-1.0, 1.0], n)
        stored = torch.from_numpy(scale.astype(np.float32)).to(dtype).float().numpy()
        codes[:, columns] = np.clip(np.rint(part / stored[:, None]) + zero[:, None], 0, most)
        zeros[:, index], scales[:, index] = zero, stored
    place = np.arange(k) // group
    values = (codes - zeros[:, place]).astype(np.float32) * scales[:, place]
    return codes, zeros, torch.from_numpy(scales).to(dtype), torch.from_numpy(values)


def order_of(columns: int, *, is_random: bool) -> np.ndarray:
    """The place of each column when columns are put into groups, by its importance or as it stands."""
    return np.random.default_rng(columns).permutation(columns) if is_random else np.arange(columns)


def gptq(
    group: int = 128,
    bits: int = 4,
    *,
    symmetric: bool = True,
    version: int = 1,
    with_indices: bool = True,
    negative: bool = False,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Packer:
    """Pack as GPTQ; without indices and with negative scales as AutoRound does."""

    def pack(w: np.ndarray) -> Packed:
        place = order_of(w.shape[1], is_random=act_order)
        codes, zeros, scales, values = integers(
            w[:, place.argsort()], group, bits, symmetric=symmetric, dtype=dtype, negative=negative
        )
        codes, values = codes[:, place], values[:, torch.from_numpy(place)]
        stored = {
            "qweight": pack_words(codes, bits).T.contiguous(),
            "qzeros": pack_words((zeros - (version == 1)).T, bits),
            "scales": scales.T.contiguous(),
        }
        if with_indices:
            stored["g_idx"] = torch.from_numpy(place).int() // group
        return stored, values

    return pack


def awq(group: int = 128, *, negative: bool = False) -> Packer:
    """Pack in AWQ's gemm format."""

    def interleave(codes: np.ndarray) -> torch.Tensor:
        return pack_words(codes.reshape(len(codes), -1, 8)[..., list(AWQ_ORDER)].reshape(codes.shape), 4)

    def pack(w: np.ndarray) -> Packed:
        codes, zeros, scales, values = integers(
            w, group, 4, symmetric=False, dtype=torch.float16, negative=negative
        )
        return {
            "qweight": interleave(codes.T),
            "qzeros": interleave(zeros.T),
            "scales": scales.T.contiguous(),
        }, values

    return pack


def pack_quantized(
    group: int = 128,
    bits: int = 4,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Packer:
    """Pack compressed-tensors' integers; group -1 is one scale per row."""

    def pack(w: np.ndarray) -> Packed:
        size = w.shape[1] if group < 0 else group
        place = order_of(w.shape[1], is_random=act_order)
        codes, zeros, scales, values = integers(
            w[:, place.argsort()], size, bits, symmetric=symmetric, dtype=dtype
        )
        codes, values = codes[:, place], values[:, torch.from_numpy(place)]
        stored = {
            "weight_packed": pack_words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(w.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = pack_words(zeros.T, bits).T.contiguous()
        if act_order:
            stored["weight_g_idx"] = torch.from_numpy(place).int() // size
        return stored, values

    return pack


def fp8(
    scales: str = "channel",
    dtype: torch.dtype = torch.float32,
    *,
    static: bool = False,
    with_axes: bool = False,
) -> Packer:
    """Pack e4m3 with one scale per row ("channel"), per tensor, or per block of 128 by 128.

    with_axes: the scales of blocks in modelopt's shape.
    """

    def pack(w: np.ndarray) -> Packed:
        weight = torch.from_numpy(w)
        if scales == "block":
            rows, columns = (torch.arange(size) // 128 for size in w.shape)
            scale = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
            for row in range(len(scale)):
                for column in range(scale.shape[1]):
                    scale[row, column] = weight[rows == row][:, columns == column].abs().max() / 448
            scale = scale.to(dtype)
            each = scale.float()[rows][:, columns]
        else:
            largest = weight.abs().amax(1, keepdim=True) if scales == "channel" else weight.abs().max()
            scale = (largest / 448).to(dtype)
            each = scale.float().expand(w.shape)
        codes = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = {"weight": codes, "weight_scale": scale[:, None, :, None] if with_axes else scale}
        if static:
            stored["input_scale"] = torch.tensor(0.5)
        return stored, codes.float() * each

    return pack


def int8(scales: str = "channel") -> Packer:
    """Pack int8 with one scale per row ("channel") or per tensor."""

    def pack(w: np.ndarray) -> Packed:
        weight = torch.from_numpy(w)
        largest = weight.abs().amax(1, keepdim=True) if scales == "channel" else weight.abs().max()
        scale = largest / 127
        codes = (weight / scale).round().to(torch.int8)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale

    return pack


def e2m1_codes(x: np.ndarray) -> np.ndarray:
    """Return the nearest e2m1 codes."""
    magnitude = np.abs(np.abs(x)[..., None] - E2M1).argmin(-1)
    return magnitude | (8 * (x < 0))


def e2m1_values(codes: np.ndarray) -> np.ndarray:
    """Return the values of e2m1 codes."""
    return np.where(codes < 8, 1, -1).astype(np.float32) * E2M1[codes & 7]


def bytes_of(codes: np.ndarray) -> torch.Tensor:
    """Pack two columns into a byte, the even one in the low bits."""
    return torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))


def nvfp4(*, modelopt: bool = False) -> Packer:
    """Pack NVFP4: compressed-tensors' global scale divides, modelopt's multiplies."""

    def pack(w: np.ndarray) -> Packed:
        groups = w.reshape(len(w), -1, 16)
        factor = np.float32(448 * 6 / np.abs(w).max())
        wanted = torch.from_numpy(np.abs(groups).max(2) / np.float32(6) * factor)
        # No library writes negative scales.
        sign = 1 - 2 * (torch.arange(wanted.shape[1]) % 3 == 2).int()
        scale = (wanted.clamp(2**-6, 448) * sign).to(torch.float8_e4m3fn)
        scales = scale.float().numpy()
        codes = e2m1_codes(groups * factor / scales[:, :, None]).reshape(w.shape)
        exact = e2m1_values(codes) * scales.repeat(16, 1)
        if not modelopt:
            stored = {"weight_packed": bytes_of(codes), "weight_scale": scale}
            stored["weight_global_scale"] = torch.tensor([factor])
            stored["input_global_scale"] = torch.tensor([2.0])
            return stored, torch.from_numpy(exact / factor)
        inverse = np.float32(1) / factor
        stored = {"weight": bytes_of(codes), "weight_scale": scale}
        stored |= {"weight_scale_2": torch.tensor(inverse), "input_scale": torch.tensor(0.5)}
        return stored, torch.from_numpy(exact * inverse)

    return pack


def mxfp4() -> Packer:
    """Pack MXFP4: groups of 32 with powers of two."""

    def pack(w: np.ndarray) -> Packed:
        groups = w.reshape(len(w), -1, 32)
        exponents = np.ceil(np.log2(np.maximum(np.abs(groups).max(2), 1e-6) / 6)).astype(np.int64)
        scales = np.ldexp(np.float32(1), exponents).astype(np.float32)
        codes = e2m1_codes(groups / scales[:, :, None]).reshape(w.shape)
        stored = {
            "weight_packed": bytes_of(codes),
            "weight_scale": torch.from_numpy((exponents + 127).astype(np.uint8)),
        }
        return stored, torch.from_numpy(e2m1_values(codes) * scales.repeat(32, 1))

    return pack


def mxfp8() -> Packer:
    """Pack MXFP8: groups of 32 with powers of two; a group of zeros has the least."""

    def pack(w: np.ndarray) -> Packed:
        w = w.copy()
        w[1, :32] = 0
        groups = w.reshape(len(w), -1, 32)
        largest = np.abs(groups).max(2)
        exponents = np.ceil(np.log2(np.maximum(largest, 1e-30) / 448)).astype(np.int64)
        exponents[largest == 0] = -127
        scales = np.ldexp(np.float64(1), exponents).astype(np.float32)
        codes = torch.from_numpy((groups / scales[:, :, None]).reshape(w.shape)).to(torch.float8_e4m3fn)
        stored = {"weight": codes, "weight_scale": torch.from_numpy((exponents + 127).astype(np.uint8))}
        return stored, codes.float() * torch.from_numpy(scales.repeat(32, 1))

    return pack


def quantise(
    directory: Path, choose: Callable[[str], Packer | None], config: Mapping[str, Any] | None = None
) -> Path:
    """Quantise in place every linear X of a plain checkpoint for whose name `choose` returns a packer.

    Returns a copy of the checkpoint in which those linears are plain, in float32, with the values of the
    packed ones. config: the quantization_config to write.
    """
    twin = directory.with_name(f"{directory.name}-plain")
    shutil.copytree(directory, twin)
    weight_map: dict[str, str] = {}
    for file in sorted(directory.glob("*.safetensors")):
        packed: dict[str, torch.Tensor] = {}
        plain: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(file).items():
            module = name.removesuffix(".weight")
            packer = choose(module) if module != name and tensor.dim() == 2 else None
            if packer is None:
                packed[name] = plain[name] = tensor
                continue
            parts, plain[name] = packer(tensor.float().numpy())
            packed |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        save_file(packed, file, metadata={"format": "pt"})
        save_file(plain, twin / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(packed, file.name)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        listed = {name: file for name, file in weight_map.items() if file != "mtp.safetensors"}
        index.write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    if config is not None:
        content = json.loads((directory / "config.json").read_text())
        content["quantization_config"] = dict(config)
        (directory / "config.json").write_text(json.dumps(content))
    return twin
