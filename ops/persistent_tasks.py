"""The warpgroups of `persistent_kernel` that multiply: a task's chains, their tree, and its result."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from compiled_mtp.ops.persistent_load import columns_of, part_of, place_of
from compiled_mtp.ops.persistent_slots import (
    add_sums,
    await_flag,
    close_chain,
    keep,
    load_slot,
    set_flag,
    store_slot,
    sums_layout,
    zero_sums,
)
from compiled_mtp.ops.persistent_sums import add_blocks, add_columns


@gluon.constexpr_function
def row_layout(width):
    """Return the layout of sums in which a thread has 8 neighbours of a row, in the warp that summed them."""
    return gl.DistributedLinearLayout(
        reg_bases=[
            [0, 1],
            [0, 2],
            [0, 4],
            [8, 0],
            *[[0, 1 << bit] for bit in range(5, width.bit_length() - 1)],
        ],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, width],
    )


@gluon.jit
def halves(tile):
    """Return the left and the right half of a tile."""
    WIDTH: gl.constexpr = tile.shape[1]
    return gl.split(gl.permute(gl.reshape(tile, [64, 2, WIDTH // 2]), [0, 2, 1]))


@gluon.jit
def round_sums(sums):
    """Return sums rounded to bfloat16, as float32: two neighbours share a conversion."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xffff0000;
        }
        """,
        "=r,=r,r,r", [sums], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def store_sums(
    sums, out, first_row, first_column, rows, width, GATED: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Round and store a strip; gated, silu(gate) * up with silu_mul's bits on rounded sums."""
    dtype: gl.constexpr = out.dtype.element_ty
    if GATED:
        gate, up = halves(round_sums(sums))
        result = (gate / (1.0 + gl.exp(-gate)) * up).to(dtype)
    else:
        result = sums.to(dtype)
    WIDTH: gl.constexpr = result.shape[1]
    store_layout: gl.constexpr = layout if dtype == gl.float32 else row_layout(WIDTH)
    result = gl.convert_layout(result, store_layout)
    row = keep(first_row) + gl.arange(0, 64, gl.SliceLayout(1, store_layout))
    column = first_column + gl.arange(0, WIDTH, gl.SliceLayout(0, store_layout))
    at = row.to(gl.int64)[:, None] * width + column.to(gl.int64)[None, :]
    gl.store(out + at, result, mask=(row < rows)[:, None] & (column < width)[None, :])


@gluon.constexpr_function
def tree_levels(chains):
    """Return the most nodes of the tree of chains that wait for their right half."""
    return chains.bit_length() - 1


@gluon.jit
def add_steps(
    shared_x, shared_weights, shared_scale, ready, free, slots, cut_slot, count, number, is_cut,
    HELD: gl.constexpr, STRIPS: gl.constexpr, FP8: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return the sums of a chain's next steps, and the steps so far.

    is_cut: another program began the chain, whose sums are in `cut_slot`.
    """
    sums = zero_sums(STRIPS, FP8)
    if is_cut:
        sums = load_slot(slots, cut_slot, STRIPS, FP8)
    if FP8:
        return add_blocks(
            sums, shared_x, shared_weights, shared_scale, ready, free, count, number, HELD > 0, FIRST, STAGES
        )  # fmt: skip
    else:
        return add_columns(sums, shared_x, shared_weights, ready, free, count, number, FIRST, STAGES)


@gluon.jit
def sum_chains(
    shared_x, shared_weights, shared_scale, ready, free, slots, own_slot, cut_slot, nodes, count, from_step,
    to_step, length,
    CHAINS: gl.constexpr, STRIPS: gl.constexpr, FP8: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return the sums of a task from `from_step` to `to_step`, and the steps so far.

    Sums of a task that another program completes go to `own_slot`; cut_slot: those of one that another began.
    nodes: the slots of the waiting nodes of the tree of chains.
    """
    sums = zero_sums(STRIPS, FP8)
    for chain in range(from_step // length, (to_step + length - 1) // length):
        first_step = gl.maximum(from_step, chain * length)
        number = gl.minimum(to_step, (chain + 1) * length) - first_step
        sums, count = add_steps(
            shared_x, shared_weights, shared_scale, ready, free, slots, cut_slot, count, number,
            first_step > chain * length, 0, STRIPS, FP8, FIRST, STAGES,
        )  # fmt: skip
        if CHAINS > 1:  # noqa: SIM102  a constant and a number
            if first_step + number == (chain + 1) * length:
                sums = close_chain(sums, slots, nodes, chain, CHAINS, STRIPS, FP8)
    if to_step < CHAINS * length:
        store_slot(sums, slots, own_slot, STRIPS)
    return sums, count


@gluon.jit
def sum_held_chains(
    shared_x, shared_weights, shared_scale, ready, free, slots, own_slot, cut_slot, nodes, count, from_step,
    to_step, length,
    CHAINS: gl.constexpr, HELD: gl.constexpr, STRIPS: gl.constexpr, FP8: gl.constexpr, FIRST: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """`sum_chains` of 2 or 4 chains, with the waiting nodes of one chain in registers.

    HELD > 1: the node of two chains too; otherwise it waits in the slot nodes + 1.
    """
    sums = zero_sums(STRIPS, FP8)
    one = sums
    two = sums
    if from_step >= length:
        one = load_slot(slots, nodes, STRIPS, FP8)
        if HELD > 1:
            two = load_slot(slots, nodes + 1, STRIPS, FP8)
    for chain in gl.static_range(CHAINS):
        number = gl.minimum(to_step, (chain + 1) * length) - gl.maximum(from_step, chain * length)
        if number > 0:
            sums, count = add_steps(
                shared_x, shared_weights, shared_scale, ready, free, slots, cut_slot, count, number,
                from_step > chain * length, HELD, STRIPS, FP8, FIRST, STAGES,
            )  # fmt: skip
            if chain % 2 == 0:
                one = sums
            elif HELD > 1 and chain == 1:
                two = add_sums(one, sums)
            elif HELD == 1 and chain + 1 < CHAINS:  # noqa: SIM102  constants and a number
                if to_step >= (chain + 1) * length:
                    store_slot(add_sums(one, sums), slots, nodes + 1, STRIPS)
    if to_step < CHAINS * length:
        store_slot(sums, slots, own_slot, STRIPS)
        if to_step >= length:
            store_slot(one, slots, own_slot + 1, STRIPS)
            if HELD > 1:
                store_slot(two, slots, own_slot + 2, STRIPS)
    else:
        sums = add_sums(one, sums)
        if HELD > 1:
            sums = add_sums(two, sums)
        elif CHAINS > 2:
            sums = add_sums(load_slot(slots, nodes + 1, STRIPS, FP8), sums)
    return sums, count


@gluon.jit
def add_parts(
    sums, slots, flags, own, part, part_bits, neighbour, SLOTS: gl.constexpr, STRIPS: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    """Add the sums of a tile's K splits, a program each, as a tree.

    Returns the largest node that ends with `part`, and whether it is the root; other nodes go to the program
    that adds them. neighbour: the distance of the warpgroups that sum neighbouring splits.
    """
    size = 1
    while part & size > 0:
        other = own - size * neighbour
        await_flag(flags + other)
        sums = add_sums(load_slot(slots, other * SLOTS, STRIPS, FP8), sums)
        size *= 2
    is_root = size == 1 << part_bits
    if not is_root:
        store_slot(sums, slots, own * SLOTS, STRIPS)
        set_flag(flags + own)
    return sums, is_root


@gluon.jit
def multiply_tiles(
    shared_x, shared_weight, shared_rest, shared_scale, ready, free, out, slots, flags, rows, n, share, more,
    unit, steps, part_bits,
    GROUP: gl.constexpr, BM: gl.constexpr, STRIPS: gl.constexpr, STAGES: gl.constexpr, CHAINS: gl.constexpr,
    HELD: gl.constexpr, GATED: gl.constexpr, FP8: gl.constexpr, PDL: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """Sum the program's tasks for the 64 rows of warpgroup GROUP."""
    FIRST: gl.constexpr = GROUP * 64
    GROUPS: gl.constexpr = BM // 64
    REST: gl.constexpr = STRIPS[1] if len(STRIPS) > 1 else 0
    # Slots of a warpgroup: the sums of a cut chain and the waiting nodes of its task's tree, from which the
    # next program goes on, and the waiting nodes of the other tasks.
    LEVELS: gl.constexpr = tree_levels(CHAINS)
    SLOTS: gl.constexpr = 1 + 2 * LEVELS
    shared_weights = (shared_weight, shared_rest)
    if PDL:
        gdc_wait()
    row_tiles = gl.num_programs(0)
    begin, end = place_of(share, more, unit)
    own = (gl.program_id(1) * row_tiles + gl.program_id(0)) * GROUPS + GROUP
    before = own - row_tiles * GROUPS
    width = n // 2 if GATED else n
    count = 0
    # Begin with the task that the next program completes: it needs these sums at its end.
    task = (end - 1) // steps
    while task * steps + steps > begin:
        from_step = gl.maximum(begin - task * steps, 0)
        to_step = gl.minimum(end - task * steps, steps)
        nodes = own * SLOTS + 1
        if from_step > 0:
            await_flag(flags + before)
            nodes = before * SLOTS + 1
        elif to_step == steps:
            nodes += LEVELS
        if HELD > 0:
            sums, count = sum_held_chains(
                shared_x, shared_weights, shared_scale, ready, free, slots, own * SLOTS, before * SLOTS,
                nodes, count, from_step, to_step, steps // CHAINS, CHAINS, HELD, STRIPS, FP8, FIRST, STAGES,
            )  # fmt: skip
        else:
            sums, count = sum_chains(
                shared_x, shared_weights, shared_scale, ready, free, slots, own * SLOTS, before * SLOTS,
                nodes, count, from_step, to_step, steps // CHAINS, CHAINS, STRIPS, FP8, FIRST, STAGES,
            )  # fmt: skip
        is_whole = to_step == steps
        if not is_whole:
            set_flag(flags + own)
        part = part_of(task, part_bits)
        part_out = out
        if TOGETHER:
            sums, is_whole = add_parts(
                sums, slots, flags, own, part, part_bits, row_tiles * GROUPS, SLOTS, STRIPS, FP8
            )
        else:
            part_out += part.to(gl.int64) * rows * width
        if is_whole:
            columns = columns_of(task, part_bits, STRIPS[0], REST, GATED)
            for strip in gl.static_range(len(STRIPS)):
                store_sums(
                    sums[strip], part_out, gl.program_id(0) * BM + FIRST, columns[strip], rows, width, GATED,
                    sums_layout(STRIPS[strip], FP8),
                )  # fmt: skip
        task -= 1
