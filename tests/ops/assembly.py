"""Runs the PTX of inline assembly on a CPU, for the few instructions that kernels use: one column of a tile
after another, or two neighbouring ones that share registers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Registers = dict[str, torch.Tensor]
# What an instruction computes, its target, and its operands: names of registers, and constants.
Instruction = tuple[Callable[..., torch.Tensor], str, list[str | torch.Tensor]]
WORD = 0xFFFFFFFF


def run(asm: Any, constraints: str, args: Any, dtype: torch.dtype, is_pure: bool, pack: int) -> torch.Tensor:
    """The result of `gl.inline_asm_elementwise` for tensors of one shape."""
    assert is_pure
    tiles = torch.broadcast_tensors(*args)
    registers: Registers = {}
    inputs = [register for tile in tiles for register in to_registers(tile, pack)]
    size = torch.empty(0, dtype=dtype).element_size()
    outputs = pack * size // 4 if pack * size >= 4 else 1
    assert constraints.count(",") + 1 == outputs + len(inputs), constraints
    for index, register in enumerate(inputs):
        registers[f"${outputs + index}"] = register
    for instruction, target, given in parsed(str(getattr(asm, "value", asm))):
        values = [registers[one] if isinstance(one, str) else one for one in given]
        registers[target] = instruction(*values) & WORD
    found = [registers[f"${index}"].expand_as(inputs[0]) for index in range(outputs)]
    return from_registers(found, dtype, tiles[0].shape)


@cache
def parsed(asm: str) -> list[Instruction]:
    found: list[Instruction] = []
    for line in re.split(r"[;\n]", asm):
        text = line.strip()
        if text and text not in "{}" and not text.startswith(".reg"):
            name, operands = text.split(" ", 1)
            if "{" in operands:
                found += moves_of_halves(operands)
                continue
            target, *given = [operand.strip() for operand in operands.split(",")]
            found.append((INSTRUCTIONS[name], target, [operand_of(one) for one in given]))
    return found


def operand_of(text: str) -> str | torch.Tensor:
    if text.startswith("0f"):
        return torch.tensor(int(text[2:], 16))
    return text if re.match("[$%a-z]", text) else torch.tensor(int(text, 0))


def moves_of_halves(operands: str) -> list[Instruction]:
    """`mov.b32 {low, high}, word` takes a register apart; the reverse joins two of 16 bits."""
    first, second, third = re.findall(r"[$%\w]+", operands)
    if operands.startswith("{"):
        return [(lambda word: word & 0xFFFF, first, [third]), (lambda word: word >> 16, second, [third])]
    return [(lambda low, high: low | high << 16, first, [second, third])]


def to_registers(tile: torch.Tensor, pack: int) -> list[torch.Tensor]:
    """Registers as int64 numbers from 0 to 2^32 - 1, for `pack` neighbouring elements."""
    if tile.dtype == torch.int64:
        # The stand-in's integers of 32 bits.
        tile = tile.to(torch.int32)
    if tile.element_size() == 4:
        words = tile.contiguous().view(torch.int32).long() & WORD
        return [words.reshape(-1, pack)[:, index] for index in range(pack)]
    assert pack == 2
    assert tile.element_size() == 2
    halves = (tile.contiguous().view(torch.int16).long() & 0xFFFF).reshape(-1, 2)
    return [halves[:, 0] | halves[:, 1] << 16]


def from_registers(found: list[torch.Tensor], dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    if len(found) > 1 or torch.empty(0, dtype=dtype).element_size() == 4:
        words = torch.stack(found, -1)
    else:
        words = torch.stack((found[0] & 0xFFFF, found[0] >> 16), -1)
        return signed(words, 16).to(torch.int16).view(dtype).reshape(shape)
    return signed(words, 32).to(torch.int32).view(dtype).reshape(shape)


def signed(words: torch.Tensor, bits: int) -> torch.Tensor:
    return words << (64 - bits) >> (64 - bits)


def floats(word: torch.Tensor) -> torch.Tensor:
    return signed(word, 32).to(torch.int32).view(torch.float32).double()


def word_of(number: torch.Tensor) -> torch.Tensor:
    """The bits of a number rounded to float32, denormal numbers included."""
    return number.float().view(torch.int32).long() & WORD


def bfloat16_pair(word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return floats(word << 16 & WORD), floats(word & 0xFFFF0000)


def pair_word(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    bits = [number.float().bfloat16().view(torch.int16).long() & 0xFFFF for number in (low, high)]
    return bits[0] | bits[1] << 16


def choose_bytes(first: torch.Tensor, second: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    both = first | second << 32
    result = torch.zeros_like(both + selector)
    for index in range(4):
        nibble = selector >> 4 * index & 15
        byte = both >> 8 * (nibble & 7) & 0xFF
        # The fourth bit repeats the byte's highest bit.
        byte = torch.where(nibble >= 8, (byte >> 7) * 0xFF, byte)
        result |= byte << 8 * index
    return result


def combine(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor, table: torch.Tensor) -> Any:
    result = torch.zeros_like(first + second + third)
    for bits in range(8):
        if int(table) >> bits & 1:
            terms = (first, second, third)
            chosen = [term if bits >> 2 - index & 1 else ~term for index, term in enumerate(terms)]
            result |= chosen[0] & chosen[1] & chosen[2]
    return result


def multiply_pairs(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> torch.Tensor:
    halves = zip(bfloat16_pair(first), bfloat16_pair(second), bfloat16_pair(third), strict=True)
    low, high = (a * b + c for a, b, c in halves)
    return pair_word(low, high)


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": combine,
    "prmt.b32": choose_bytes,
    "sub.rn.f32": lambda a, b: word_of(floats(a) - floats(b)),
    "mul.rn.f32": lambda a, b: word_of(floats(a) * floats(b)),
    "fma.rn.f32": lambda a, b, c: word_of(floats(a) * floats(b) + floats(c)),
    "cvt.rn.bf16x2.f32": lambda high, low: pair_word(floats(low), floats(high)),
    "fma.rn.bf16x2": multiply_pairs,
}
