"""A chunk's scales, decoded once by a program and kept in shared memory for all of its threads.

Four threads of a tensor core's left operand have columns of one weight row. Each would decode all scales of
that row; here one thread does.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from compiled_mtp.ops.left_assembly import is_affine, is_fp4, is_int4
from compiled_mtp.ops.left_operand import as_float, weight_row
from compiled_mtp.ops.left_scales import (
    fields_of,
    load_fields,
    own_fields,
    scale_of,
    value_scales,
)


@gluon.constexpr_function
def count_groups(kind, fields):
    """Groups of a unit's columns whose numbers are decoded together."""
    if is_int4(kind):
        return fields
    return 8 if kind == "Q6_K" else 4


@gluon.constexpr_function
def group_of(kind, fields, slice, half):
    """The group of the columns of one half of a slice."""
    if is_int4(kind):
        return slice * fields // 4
    if kind == "Q6_K":
        return 2 * slice + half
    return slice // 2 * 2 + half if kind == "NVFP4" else slice


@gluon.constexpr_function
def numbers_of_group(kind):
    """Numbers of 32 bits that a group has: those of `value_scales`, then the scale of its sum."""
    return 2 if is_int4(kind) or is_affine(kind) else 1


@gluon.constexpr_function
def count_numbers(kind, fields):
    """Numbers of a unit of a weight row; a power of two."""
    return count_groups(kind, fields) * numbers_of_group(kind)


@gluon.constexpr_function
def kept_memory(count):
    """A layout of shared memory in which 16 bytes of each of eight neighbouring rows lie in all banks."""
    vector = min(count, 4)
    phases = count // vector
    return gl.SwizzledSharedLayout(vector, 8 // phases if phases > 1 else 1, phases, [1, 0])


@gluon.constexpr_function
def kept_layout(rows, count, num_warps):
    """A layout of [rows, count] in which each thread has all numbers of the rows whose columns it has in a
    tensor core's left operand."""
    registers = [[0, 1 << bit] for bit in range(count.bit_length() - 1)] + [[8, 0]]
    block = 16 * num_warps
    while block < rows:
        registers.append([block, 0])
        block *= 2
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    warps = [[16 << bit, 0] for bit in range(num_warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=registers, lane_bases=lanes, warp_bases=warps, block_bases=[], shape=[rows, count]
    )


@gluon.jit
def scales_from(
    weight_scale, tile, n, BN: gl.constexpr, CHUNK: gl.constexpr, FIELDS: gl.constexpr, KIND: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Where the scales of a tile's weight rows begin, the words from one load to the next, each row in its
    block of 16, and the unit of a chunk that a thread decodes for it: [CHUNK * BN] each but the second."""
    items: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    item = gl.arange(0, CHUNK * BN, items)
    row = weight_row(tile, n, item % BN, BN, GATED)
    fields_at, step = fields_of(weight_scale, row, n, FIELDS, KIND)
    return fields_at, step, row % 16, item // BN


@gluon.jit
def load_chunk_fields(from_memory, first, last, FIELDS: gl.constexpr, KIND: gl.constexpr):
    """The words of the scales of a chunk from unit `first` on, at most `last`.

    from_memory: as `scales_from` returns it.
    """
    fields_at, step, row, unit = from_memory
    return load_fields(fields_at, row, step, first + unit, last, 1, FIELDS, KIND)


@gluon.jit
def as_bits(number):
    """The bits of a number of 32 bits, as int32."""
    return number.to(gl.int32, bitcast=True)


@gluon.jit
def decoded_scales(fields, FIELDS: gl.constexpr, KIND: gl.constexpr, PARTS: gl.constexpr):
    """The numbers of a unit, group after group, each [rows] int32.

    fields: as `own_fields` returns them. PARTS: of the weight's LeftForm.
    """
    PER_GROUP: gl.constexpr = numbers_of_group(KIND)
    numbers = ()
    for slice in gl.static_range(4):
        for half in gl.static_range(2):
            if group_of(KIND, FIELDS, slice, half) * PER_GROUP == len(numbers):
                values = value_scales(fields, slice, half, KIND)
                for index in gl.static_range(len(values)):
                    numbers += (as_bits(values[index]),)
                if PARTS > 0:
                    numbers += (as_bits(scale_of(fields, slice, half, KIND)),)
    return numbers


@gluon.jit
def keep_scales(scales, fields, from_memory, FIELDS: gl.constexpr, KIND: gl.constexpr, PARTS: gl.constexpr):
    """Decode the scales of a chunk and store them in `scales` [CHUNK * BN, numbers] int32.

    fields: as `load_chunk_fields` loads them from `from_memory`.
    """
    own = own_fields(fields, from_memory[2], FIELDS, KIND)
    scales.store(joined(decoded_scales(own, FIELDS, KIND, PARTS)))


@gluon.jit
def joined(numbers):
    """Columns [rows] as a tile [rows, len(numbers)]."""
    COUNT: gl.constexpr = len(numbers)
    if COUNT == 2:
        return gl.join(numbers[0], numbers[1])
    else:
        tile = gl.join(joined(numbers[: COUNT // 2]), joined(numbers[COUNT // 2 :]))
        return gl.reshape(gl.permute(tile, [0, 2, 1]), [tile.shape[0], COUNT])


@gluon.jit
def columns_of(tile, layout: gl.constexpr):
    """The columns of a tile [rows, numbers], each [rows] in `layout`, whose threads have these rows."""
    COUNT: gl.constexpr = tile.shape[1]
    if COUNT == 2:
        first, second = gl.split(tile)
        first = gl.convert_layout(first, layout, assert_trivial=True)
        return (first, gl.convert_layout(second, layout, assert_trivial=True))
    else:
        halves = gl.permute(gl.reshape(tile, [tile.shape[0], 2, COUNT // 2]), [0, 2, 1])
        first, second = gl.split(halves)
        return columns_of(first, layout) + columns_of(second, layout)


@gluon.jit
def kept_scales(scales, UNIT: gl.constexpr, BN: gl.constexpr, layout: gl.constexpr):
    """The numbers of unit UNIT of a chunk, each [BN] int32, for the left operand of products in `layout`."""
    tile = scales.slice(UNIT * BN, BN, 0).load(kept_layout(BN, scales.shape[1], gl.num_warps()))
    return columns_of(tile, gl.SliceLayout(1, gl.DotOperandLayout(0, layout, 2)))


@gluon.jit
def numbers_of_part(
    numbers, PART: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr, KIND: gl.constexpr
):
    """Those of a unit's numbers that belong to part PART of WIDTH columns."""
    COUNT: gl.constexpr = numbers_of_group(KIND)
    AT: gl.constexpr = group_of(KIND, FIELDS, PART * WIDTH // 32, PART * WIDTH % 32 // 16) * COUNT
    return numbers[AT : AT + COUNT]


@gluon.jit
def part_scales(
    scales, PART: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr, KIND: gl.constexpr,
    KEPT: gl.constexpr,
):  # fmt: skip
    """What `value_scales` returns for part PART of WIDTH columns.

    scales: a unit's, as `own_fields` returns them or, KEPT, as `kept_scales` does.
    """
    if not KEPT:
        return value_scales(scales, PART * WIDTH // 32, PART * WIDTH % 32 // 16, KIND)
    else:
        own = numbers_of_part(scales, PART, WIDTH, FIELDS, KIND)
        if is_affine(KIND):
            return as_float(own[0]), as_float(own[1])
        elif is_int4(KIND) or is_fp4(KIND):
            return (own[0],)
        elif KIND == "Q4_0" or KIND == "Q6_K":
            return ()
        else:
            return (as_float(own[0]),)


@gluon.jit
def sum_scale(
    scales, PART: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr, KIND: gl.constexpr,
    KEPT: gl.constexpr,
):  # fmt: skip
    """The scale of the sum of the columns that end with part PART; arguments: see `part_scales`."""
    if not KEPT:
        return scale_of(scales, PART * WIDTH // 32, PART * WIDTH % 32 // 16, KIND)
    else:
        own = numbers_of_part(scales, PART, WIDTH, FIELDS, KIND)
        return as_float(own[len(own) - 1])
