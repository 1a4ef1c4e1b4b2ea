"""Which tile a product with decoded weight rows on the left has. No tile changes a bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from compiled_mtp.ops.blocks import KINDS
from compiled_mtp.ops.device import Device
from compiled_mtp.ops.k_splits import NARROW_ROWS

# Of an H100's and an H200's 132 processors: of fewer programs a tile is too large.
MIN_PROGRAMS = 120
GROUP_ROWS = 64
"""Weight rows of a warp group of a large-M product."""

# Of an H100 and an H200.
PROCESSORS = 132
# Registers of a processor, and the shared memory that it keeps for itself in each program.
REGISTERS, RESERVED_BYTES = 1 << 16, 1024
# Kinds whose codes take the most instructions.
SLOW_KINDS = ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
# A K split of at most so many units is short.
SHORT_UNITS = 8
# With fewer programs a processor has too few warps.
LEAST_PROGRAMS = 4
# Cutting tasks costs more than processors lose that are idle for less than this share.
CUT_WASTE = 1.15
# Cycles of a large-M product on an H200: of a round of tasks besides those of its units, and what programs
# that cut tasks take longer, for each row of a tile.
START_CYCLES, CUT_CYCLES = 8_000, (4_000, 80)


@dataclass(frozen=True)
class LeftForm:
    """How a weight's codes are stored and decoded.

    kind: a name that ops.left_decode knows. width: neighbouring columns that are decoded at a time. words:
    words of a unit of a row. above: those of them that hold what codes have above four bits. fields: numbers
    of scales of a unit of a row; of INT4, groups of a unit. parts_per_scale: how many times `width` columns
    share a scale that multiplies their sum; 0 where it multiplies values.
    """

    kind: str
    width: int
    words: int
    above: int
    fields: int
    parts_per_scale: int

    @property
    def scale_words(self) -> int:
        """Words of 32 bits that hold the scales of a unit of a row."""
        return self.fields if is_int4(self) else (self.fields + 1) // 2

    @property
    def numbers(self) -> int:
        """Numbers of 32 bits into which a program of `left_kernel` decodes the scales of a unit of a row."""
        if is_int4(self):
            return 2 * self.fields
        return 8 if self.kind in ("Q4_K", "Q5_K", "Q6_K") else 4

    def constants(self) -> dict[str, Any]:
        """The kernels' arguments of these names."""
        return {
            "KIND": self.kind,
            "WIDTH": self.width,
            "FIELDS": self.fields,
            "ABOVE": self.above,
            "BLOCK_WORDS": 16 * self.words,
            "PARTS": self.parts_per_scale,
        }


def form_of_int4(scale_dtype: torch.dtype, per_unit: int) -> LeftForm:
    """How products read codes of ops.int4 with `per_unit` groups a unit."""
    kind = "INT4_BF16" if scale_dtype == torch.bfloat16 else "INT4"
    return LeftForm(kind, width=32, words=32, above=0, fields=per_unit, parts_per_scale=4 // per_unit)


def form_of_kind(kind: str) -> LeftForm:
    """How products read a kind of ops.blocks."""
    own = KINDS[kind]
    above = {5: 16, 6: 16, 8: 32}.get(own.bits, 0)
    return LeftForm(kind, own.width, own.words, above, own.fields, int(own.scales_sums))


@dataclass(frozen=True)
class LeftTile:
    """One launch configuration of `left_kernel`.

    A tile has `block_m` rows and `block_n` weight rows, one or more blocks of 16 for each warp. chunk: units
    that a stage of shared memory holds. ahead: chunks whose scales are loaded early. per_processor: programs
    of a processor that share more tasks than these evenly; 0: a program has one task.
    """

    block_m: int
    block_n: int
    num_warps: int
    chunk: int
    num_stages: int
    ahead: int = 1
    per_processor: int = 0

    @property
    def most_registers(self) -> int:
        """Registers of a thread with which `per_processor` programs fit."""
        return min(255, REGISTERS // (32 * self.num_warps * self.per_processor) // 8 * 8)

    def shared_bytes(self, form: LeftForm) -> int:
        """Shared memory of a program: rows in bfloat16, words, and a chunk's scales."""
        copied = self.num_stages * (self.block_m * 256 + self.block_n * 2 * form.words)
        return self.chunk * (copied + self.block_n * 4 * form.numbers)


@dataclass(frozen=True)
class LargeMTile:
    """One launch configuration of `left_large_m_kernel`.

    A tile has `block_m` rows, and 64 weight rows for each of `groups` warp groups. registers: those of a
    thread of the warp groups that multiply. num_stages: chunks of `chunk` units of 128 columns in shared
    memory. ahead: chunks whose scales are loaded early; with 0, scales are copied to shared memory. cycles:
    what a unit takes on an H200.
    """

    block_m: int
    groups: int
    registers: int
    num_stages: int
    chunk: int = 1
    ahead: int = 2
    cycles: int = 1000

    def shared_bytes(self, form: LeftForm) -> int:
        """Shared memory of a program: rows in bfloat16, words, and scales where they are copied."""
        scales = 0 if self.ahead else 4 * form.scale_words
        unit = self.block_m * 256 + self.groups * GROUP_ROWS * (2 * form.words + scales)
        return self.num_stages * self.chunk * unit


@dataclass(frozen=True)
class Shares:
    """How programs share a product's tasks: `share` units of `unit` chunks each, the first `more` programs
    one unit more. cycles: estimated, on an H200."""

    programs: int
    share: int
    more: int
    unit: int
    cycles: float


def share_tasks(tile: LargeMTile, rows: int, n: int, split: int, units: int, processors: int) -> Shares:
    """How programs share the tiles of `rows` rows and `n` weight rows in `split` K splits of `units` units:
    a task each or, where the last round of tasks would leave many processors idle, equally many chunks."""
    tasks = -(-n // (GROUP_ROWS * tile.groups)) * -(-rows // tile.block_m) * split
    length = -(-units // tile.chunk)
    whole = -(-tasks // processors) * (units * tile.cycles + START_CYCLES)
    fixed, per_row = CUT_CYCLES
    cut = tasks * units * tile.cycles / processors + START_CYCLES + fixed + per_row * tile.block_m
    # With fewer tasks a program could wait for another that waits itself.
    if tasks <= processors or whole <= cut:
        return Shares(tasks, 1, 0, length, whole)
    return Shares(processors, *divmod(tasks * length, processors), 1, cut)


def is_int4(form: LeftForm) -> bool:
    return form.kind.startswith("INT4")


def programs_that_fit(tile: LeftTile, form: LeftForm, device: Device) -> int:
    """Programs of `left_kernel` that the shared memory of a processor holds."""
    return (device.shared_bytes + RESERVED_BYTES) // (tile.shared_bytes(form) + RESERVED_BYTES)


def left_tile(rows: int, n: int, split: int, gated: bool, form: LeftForm, device: Device) -> LeftTile:
    """The tile for `rows` rows of a weight of `n` rows, whose K `split` programs sum.

    Measured on an H200 in stacks of 27B's, 9B's and 4B's layers with 4, 16 and 32 rows; 64 and 128 rows on an
    H100.
    """
    if rows > 32:
        return LeftTile(64, 128, 4, 1, 3)
    tasks = -(-n // 64) * split
    each = math.ceil(tasks / device.num_processors)
    if rows > 16:
        if tasks < MIN_PROGRAMS:
            return LeftTile(32, 32, 2, 1, 4)
        is_slow = form.kind in SLOW_KINDS or device.arch != "sm_90"
        return LeftTile(32, 64, 4, 1, 4) if is_slow else LeftTile(32, 64, 4, 2, 2)
    if rows > 8:
        if tasks < MIN_PROGRAMS and not gated:
            return LeftTile(16, 32, 2, 1, 4)
        large, small = LeftTile(16, 64, 4, 2, 3), LeftTile(16, 64, 2, 1, 4)
        if split > 1:
            return large if programs_that_fit(large, form, device) >= each else small
    else:
        tile = LeftTile(8, 32, 2, 4, 3)
        at_once = programs_that_fit(tile, form, device) * device.num_processors
        if split == 1 and not gated and -(-n // tile.block_n) <= at_once:
            return tile
        large, small = LeftTile(8, 64, 4, 2, 3), LeftTile(8, 32, 2, 2, 3)
    tile = large if programs_that_fit(large, form, device) >= min(LEAST_PROGRAMS, each) else small
    if device.arch != "sm_90":
        return tile
    return replace(tile, per_processor=shared_programs(tile, n, split, form, device))


def shared_programs(tile: LeftTile, n: int, split: int, form: LeftForm, device: Device) -> int:
    """How many programs of a processor share the tasks of one tile of rows evenly; 0: a program has one task.

    Whole tasks leave processors idle: some have one task fewer than others, and where more tasks than fit at
    once run in rounds, the last round may have few.
    """
    each = -(-n // tile.block_n) * split / device.num_processors
    fitting = programs_that_fit(tile, form, device)
    most = math.ceil(each)
    rounds = most if most <= fitting else -(-most // fitting) * fitting
    return min(fitting, int(each)) if each >= 2 and rounds > CUT_WASTE * each else 0


# Tiles of at most 8 and 16 rows on Hopper.
FEW_ROWS_TILES = (LargeMTile(8, 2, 232, 4, 4, 0, cycles=460), LargeMTile(16, 2, 232, 3, 4, 0, cycles=530))
# With fewer tasks too many processors would be idle.
FEW_ROWS_TASKS = 80


def few_rows_tile(
    rows: int, n: int, split: int, form: LeftForm, processors: int = PROCESSORS
) -> LargeMTile | None:
    """The tile on Hopper for at most 16 rows of x and a weight of `n` rows, its K in `split` K splits; None
    where `left_kernel` is faster in a step.

    That is so for K splits, whose tasks are short, for weights of few rows, and for kinds whose codes take
    many instructions: of NVFP4's weights only one round of tasks is faster here.
    """
    few, more = FEW_ROWS_TILES
    tasks = -(-n // (few.groups * GROUP_ROWS))
    if split > 1 or not (is_int4(form) or form.kind == "NVFP4"):
        return None
    if rows <= few.block_m:
        return few if is_int4(form) and tasks > processors else None
    return more if tasks >= FEW_ROWS_TASKS and (is_int4(form) or tasks <= processors) else None


# Tiles of large-M products: of kinds with one scale a unit, which multiplies its sum, of kinds that scale
# values, and of the others.
SUM_TILES = (
    LargeMTile(32, 5, 88, 4, cycles=1680),
    LargeMTile(32, 3, 152, 5, cycles=1030),
    LargeMTile(32, 2, 232, 3, 4, 0, cycles=660),
    LargeMTile(64, 3, 152, 4, cycles=1320),
    LargeMTile(64, 2, 232, 4, cycles=1040),
    LargeMTile(128, 2, 232, 4, ahead=3, cycles=1470),
)
VALUE_TILES = (
    LargeMTile(32, 5, 88, 4, cycles=2400),
    LargeMTile(32, 3, 152, 5, cycles=1460),
    LargeMTile(32, 2, 232, 5, cycles=1050),
    LargeMTile(64, 3, 152, 4, cycles=1760),
    LargeMTile(64, 2, 232, 4, cycles=1250),
    LargeMTile(128, 3, 152, 3, cycles=2340),
    LargeMTile(128, 2, 232, 4, cycles=1640),
)
OTHER_TILES = (
    LargeMTile(32, 3, 152, 5, cycles=1750),
    LargeMTile(32, 2, 232, 5, cycles=1180),
    LargeMTile(64, 2, 232, 3, cycles=1590),
)


def large_m_tile(
    rows: int, n: int, split: int, units: int, form: LeftForm, processors: int = PROCESSORS
) -> LargeMTile:
    """The tile for 17 rows and more of a weight of `n` rows on Hopper, whose K has `split` splits of `units`
    units: the one with which the processors take the least time."""
    tiles = {0: VALUE_TILES, 128 // form.width: SUM_TILES}.get(form.parts_per_scale, OTHER_TILES)
    # A tile of fewer rows decodes a weight more than once.
    least = min(max(tile.block_m for tile in tiles), 32 if rows <= 32 else 64 if rows <= 64 else 128)
    fitting = (tile for tile in tiles if tile.block_m >= least)
    return min(fitting, key=lambda tile: share_tasks(tile, rows, n, split, units, processors).cycles)


def hopper_tile(
    rows: int, n: int, split: int, units: int, form: LeftForm, processors: int = PROCESSORS
) -> LargeMTile | None:
    """The tile of `left_large_m_kernel` for any number of rows; None where `left_kernel` is faster."""
    if rows <= NARROW_ROWS:
        return few_rows_tile(rows, n, split, form, processors)
    if rows <= 32 and split > 1 and (form.kind in SLOW_KINDS or units <= SHORT_UNITS):
        return None
    return large_m_tile(rows, n, split, units, form, processors)
