"""The warpgroups of `persistent_kernel` that multiply: a task's chains, their tree, and its result."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from compiled_mtp.ops.persistent_load import part_of, place_of
from compiled_mtp.ops.persistent_slots import await_flag, close_chain, keep, load_slot, set_flag, store_slot
from compiled_mtp.ops.persistent_sums import add_blocks, add_columns, sums_layout


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


@gluon.constexpr_function
def is_held(chains, width, is_fp8):
    """Return whether registers suffice for the waiting nodes of a tree of chains."""
    return 1 < chains <= 4 and width <= 128 and not is_fp8


@gluon.constexpr_function
def tree_levels(chains):
    """Return the most nodes of the tree of chains that wait for their right half."""
    return chains.bit_length() - 1


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
    """Round and store a warpgroup's sums; gated, silu(gate) * up with silu_mul's bits on rounded sums."""
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


@gluon.jit
def sum_chains(
    shared_x, shared_weight, ready, free, slots, cut_slot, nodes, count, from_step, to_step, length,
    BN: gl.constexpr, CHAINS: gl.constexpr, layout: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sum a task's bfloat16 steps from `from_step` on, in 2 or 4 chains whose tree stays in registers.

    Returns the sums of the last chain, the waiting nodes of one chain and of two, and the steps so far.
    cut_slot: the sums of a chain that another program began. nodes: the slots of its waiting nodes.
    """
    sums = gl.zeros([64, BN], gl.float32, layout)
    one = sums
    two = sums
    if from_step >= length:
        one = load_slot(sums, slots, nodes, layout)
        if CHAINS > 2:
            two = load_slot(sums, slots, nodes + 1, layout)
    for chain in gl.static_range(CHAINS):
        number = gl.minimum(to_step, (chain + 1) * length) - gl.maximum(from_step, chain * length)
        if number > 0:
            sums = gl.zeros([64, BN], gl.float32, layout)
            if from_step > chain * length:
                sums = load_slot(sums, slots, cut_slot, layout)
            sums, count = add_columns(
                sums, shared_x, shared_weight, ready, free, count, number, FIRST, STAGES
            )
            if chain == 1:
                two = one + sums
            elif chain % 2 == 0:
                one = sums
    return sums, one, two, count


@gluon.jit
def multiply_tiles(
    shared_x, shared_weight, shared_scale, ready, free, out, slots, flags, rows, n, share, more, unit, steps,
    part_bits,
    GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CHAINS: gl.constexpr,
    GATED: gl.constexpr, FP8: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Sum the program's tasks for the 64 rows of warpgroup GROUP."""
    FIRST: gl.constexpr = GROUP * 64
    GROUPS: gl.constexpr = BM // 64
    layout: gl.constexpr = sums_layout(BN, FP8)
    # Slots of a warpgroup: the sums of a cut chain and the waiting nodes of its task's tree, from which the
    # next program goes on, and the waiting nodes of the other tasks.
    LEVELS: gl.constexpr = tree_levels(CHAINS)
    SLOTS: gl.constexpr = 1 + 2 * LEVELS
    HELD: gl.constexpr = is_held(CHAINS, BN, FP8)
    if PDL:
        gdc_wait()
    row_tiles = gl.num_programs(0)
    begin, end = place_of(share, more, unit)
    first_row = gl.program_id(0) * BM + FIRST
    own = (gl.program_id(1) * row_tiles + gl.program_id(0)) * GROUPS + GROUP
    before = own - row_tiles * GROUPS
    width = n // 2 if GATED else n
    length = steps // CHAINS
    count = 0
    # Begin with the task that the next program completes: it needs these sums at its end.
    task = (end - 1) // steps
    while task * steps + steps > begin:
        column = (task >> part_bits) * (BN // 2 if GATED else BN)
        from_step = gl.maximum(begin - task * steps, 0)
        to_step = gl.minimum(end - task * steps, steps)
        nodes = own * SLOTS + 1
        if from_step > 0:
            await_flag(flags + before)
            nodes = before * SLOTS + 1
        elif to_step == steps:
            nodes += LEVELS
        sums = gl.zeros([64, BN], gl.float32, layout)
        one = sums
        two = sums
        if HELD:
            sums, one, two, count = sum_chains(
                shared_x, shared_weight, ready, free, slots, before * SLOTS, nodes, count, from_step, to_step,
                length, BN, CHAINS, layout, FIRST, STAGES,
            )  # fmt: skip
        else:
            for chain in range(from_step // length, (to_step + length - 1) // length):
                first_step = gl.maximum(from_step, chain * length)
                number = gl.minimum(to_step, (chain + 1) * length) - first_step
                sums = gl.zeros([64, BN], gl.float32, layout)
                if first_step > chain * length:
                    sums = load_slot(sums, slots, before * SLOTS, layout)
                if FP8:
                    sums, count = add_blocks(
                        sums, shared_x, shared_weight, shared_scale, ready, free, count, number, layout,
                        FIRST, STAGES,
                    )  # fmt: skip
                else:
                    sums, count = add_columns(
                        sums, shared_x, shared_weight, ready, free, count, number, FIRST, STAGES,
                    )  # fmt: skip
                if CHAINS > 1:  # noqa: SIM102  a constant and a number
                    if first_step + number == (chain + 1) * length:
                        sums = close_chain(sums, slots, nodes, chain, CHAINS, layout)
        if to_step < steps:
            store_slot(sums, slots, own * SLOTS)
            if HELD:  # noqa: SIM102
                if to_step >= length:
                    store_slot(one, slots, own * SLOTS + 1)
                    if CHAINS > 2:
                        store_slot(two, slots, own * SLOTS + 2)
            set_flag(flags + own)
        else:
            if HELD:
                sums = one + sums
                if CHAINS > 2:
                    sums = two + sums
            part_out = out + part_of(task, part_bits).to(gl.int64) * rows * width
            store_sums(sums, part_out, first_row, column, rows, width, GATED, layout)
        task -= 1
