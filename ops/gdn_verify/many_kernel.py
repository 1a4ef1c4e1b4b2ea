"""The gated delta rule of many requests on Hopper: the copy engine brings the next state during a step.

An item is a tile of a head's state, stepped over a request's window. A program of one warp takes items in
turn. A state comes to shared memory past the caches of the processor, in which the rows of tokens would wait
behind it, and leaves it at once for registers: the next one is on its way all the time. Each value is
computed as in `gdn_verify_kernel`, so both give the same bits.

The kernel is written in Gluon, because Triton cannot keep a copy on its way from one item to the next. On a
CPU, tests run its Python with a stand-in (tests/ops/gdn_on_cpu.py).
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.gdn_triton import BLOCK_V, LANES, OPTIONS
from compiled_mtp.ops.persistent_load import copy_numbers, copy_tile
from compiled_mtp.ops.persistent_slots import wait_for_warps

# A program has 128 registers per thread, and a processor room for 16 programs.
REGISTERS = 128
PROGRAMS = 16


@gluon.jit
def sum_over_keys(products):
    """Sum [DK / LANES, BLOCK_V, LANES] over keys, in the order of `gdn_verify_kernel`."""
    return gl.sum(gl.sum(products, 0), 1)


@gluon.jit
def widen_key(key, tile):
    """Repeat a vector over keys [DK / LANES, LANES] for every value of a tile."""
    return gl.broadcast(gl.expand_dims(key, 1), tile)[0]


@gluon.jit
def apply_record(tile, wide_key, update, exp_g):
    """Return exp_g * S + u k^T by one product and one fma, as in ops/gdn_triton.py."""
    wide = gl.broadcast(gl.expand_dims(gl.expand_dims(update, 1), 0), tile)[0]
    return gl.fma(wide, wide_key, tile * exp_g)


@gluon.jit
def place_of(item, NV: gl.constexpr, TILES: gl.constexpr):
    """Return request, value head and tile of an item."""
    return item // (NV * TILES), item // TILES % NV, item % TILES


@gluon.jit
def load_record(
    ring_k, ring_u, ring_g, k_rows, v_rows, position, value, key_at,
    DK: gl.constexpr, DV: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Load the key, the update of the rows `value`, and exp_g of one position."""
    row = position % RING
    key = gl.load(ring_k + (k_rows + row) * DK + key_at)
    return key, gl.load(ring_u + (v_rows + row) * DV + value), gl.load(ring_g + v_rows + row)


@gluon.jit
def copy_window(
    shared_rows, shared_values, q, k, v, request, head, block, query_len, row_at, lane_v,
    NK: gl.constexpr, NV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Begin to copy an item's keys and queries, in turn, and the values of its tile."""
    key_at = (request * query_len * NK + head // (NV // NK)) * DK + row_at
    value_at = (request * query_len * NV + head) * DV + block * shared_values.shape[1] + lane_v
    for token in range(query_len):
        copy_numbers(shared_rows.index(2 * token), k + key_at)
        copy_numbers(shared_rows.index(2 * token + 1), q + key_at)
        copy_numbers(shared_values.index(token), v + value_at)
        key_at += NK * DK
        value_at += NV * DV
    async_copy.commit_group()


@gluon.jit
def copy_state(
    state_tiles, ready, shared_state, slot, head, block, NV: gl.constexpr, DV: gl.constexpr,
    BLOCK_V: gl.constexpr, DK: gl.constexpr,
):  # fmt: skip
    """Begin to copy the tile of a head's state."""
    mbarrier.expect(ready, BLOCK_V * DK * 4)
    first = ((slot * NV + head) * DV + block * BLOCK_V).to(gl.int32)
    copy_tile(state_tiles, [first, 0], ready, shared_state)


# One binary for every window length: Triton would specialise on 1 and on multiples of 16.
@gluon.jit(do_not_specialize=["query_len", "max_unfolded", "items"])
def gdn_many_kernel(
    state_tiles,
    q,
    k,
    v,
    exp_g,
    beta,
    out,
    state,
    ring_k,
    ring_u,
    ring_g,
    state_index,
    base,
    pos,
    query_len,
    max_unfolded,
    items,
    NK: gl.constexpr,
    NV: gl.constexpr,
    DK: gl.constexpr,
    DV: gl.constexpr,
    RING: gl.constexpr,
    BLOCK_V: gl.constexpr,
    LANES: gl.constexpr,
    MOST_TOKENS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Step the program's items; state_tiles: descriptor of tiles [BLOCK_V, DK] of the states' rows."""
    if PDL:
        gdc_launch_dependents()
    TILES: gl.constexpr = DV // BLOCK_V
    # Element (v, k) of a state tile [DK / LANES, BLOCK_V, LANES] has the thread that has it in
    # gdn_verify_kernel; so has an element of a vector over keys that is summed with another one.
    TILE: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 128 // LANES, LANES // 4], [1, 1, 1], [2, 1, 0])
    STORED: gl.constexpr = gl.BlockedLayout([1, 4], [128 // LANES, LANES // 4], [1, 1], [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1, 4], [DK // LANES, 32 * LANES // DK], [1, 1], [1, 0])
    KEY: gl.constexpr = gl.SliceLayout(1, TILE)
    VALUE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, TILE))
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    shared_state = gl.allocate_shared_memory(gl.float32, [BLOCK_V, DK], state_tiles.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shared_rows = gl.allocate_shared_memory(gl.float32, [2 * MOST_TOKENS, DK // LANES, LANES], flat)
    values: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared_values = gl.allocate_shared_memory(gl.float32, [MOST_TOKENS, BLOCK_V], values)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()

    first = gl.program_id(0)
    programs = gl.num_programs(0)
    turns = (items - first + programs - 1) // programs
    request, head, block = place_of(first, NV, TILES)
    slot = gl.load(state_index + request).to(gl.int64)
    # Earlier kernels may still be writing the window's inputs, but not states (reference.py says why).
    copy_state(state_tiles, ready, shared_state, slot, head, block, NV, DV, BLOCK_V, DK)
    if PDL:
        gdc_wait()
    own_value = gl.arange(0, BLOCK_V, VALUE)
    lane_v = gl.arange(0, BLOCK_V, ONE)
    row_at = (
        gl.expand_dims(gl.arange(0, DK // LANES, gl.SliceLayout(1, ROW)), 1) * LANES
        + gl.expand_dims(gl.arange(0, LANES, gl.SliceLayout(0, ROW)), 0)
    )  # fmt: skip
    key_at = (
        gl.expand_dims(gl.arange(0, DK // LANES, gl.SliceLayout(1, KEY)), 1) * LANES
        + gl.expand_dims(gl.arange(0, LANES, gl.SliceLayout(0, KEY)), 0)
    )  # fmt: skip
    stored_at = (
        gl.expand_dims(gl.arange(0, BLOCK_V, gl.SliceLayout(1, STORED)), 1) * DK
        + gl.expand_dims(gl.arange(0, DK, gl.SliceLayout(0, STORED)), 0)
    )  # fmt: skip
    copy_window(
        shared_rows, shared_values, q, k, v, request, head, block, query_len, row_at, lane_v, NK, NV, DK, DV
    )
    for turn in range(turns):
        folded = gl.load(base + request)
        position = gl.load(pos + request)
        count = (position - folded).to(gl.int32)
        first_row = (position % RING).to(gl.int32)
        value = block * BLOCK_V + own_value
        k_rows = (slot * NK + head // (NV // NK)) * RING
        v_rows = (slot * NV + head) * RING
        has_next = turn + 1 < turns
        next_item = gl.where(has_next, first + (turn + 1) * programs, first)
        next_request, next_head, next_block = place_of(next_item, NV, TILES)
        next_slot = gl.load(state_index + next_request).to(gl.int64)

        mbarrier.wait(ready, turn & 1)
        stored = shared_state.load(STORED)
        # The copy of the next state may begin when all threads have this one.
        wait_for_warps()
        if has_next:
            copy_state(
                state_tiles, ready, shared_state, next_slot, next_head, next_block, NV, DV, BLOCK_V, DK
            )
        tile = gl.permute(gl.reshape(stored, (BLOCK_V, DK // LANES, LANES)), (1, 0, 2))
        tile = gl.convert_layout(tile, TILE, assert_trivial=True)
        if count > 0:
            last = folded + count - 1
            key, update, decay = load_record(
                ring_k, ring_u, ring_g, k_rows, v_rows, folded, value, key_at, DK, DV, RING
            )
            for step in range(count):
                # The next record loads while one is applied; the last step loads the last record again.
                next_key, next_update, next_decay = load_record(
                    ring_k, ring_u, ring_g, k_rows, v_rows, gl.minimum(folded + step + 1, last), value,
                    key_at, DK, DV, RING,
                )  # fmt: skip
                tile = apply_record(tile, widen_key(key, tile), update, decay)
                key, update, decay = next_key, next_update, next_decay
            if count + query_len > max_unfolded:
                stored = gl.reshape(gl.permute(tile, (1, 0, 2)), (BLOCK_V, DK))
                stored = gl.convert_layout(stored, STORED, assert_trivial=True)
                gl.store(state + ((slot * NV + head) * DV + block * BLOCK_V) * DK + stored_at, stored)

        async_copy.wait_group(0)
        wait_for_warps()
        head_at = request * query_len * NV + head
        for token in range(query_len):
            decay = gl.load(exp_g + head_at)
            own_beta = gl.load(beta + head_at)
            key = shared_rows.index(2 * token).load(ROW)
            query = shared_rows.index(2 * token + 1).load(ROW)
            value_row = shared_values.index(token).load(VALUE)
            # gdn_verify_kernel says what these are.
            wide_key = widen_key(shared_rows.index(2 * token).load(KEY), tile)
            read = sum_over_keys(tile * wide_key)
            answer = sum_over_keys(tile * widen_key(shared_rows.index(2 * token + 1).load(KEY), tile))
            update = own_beta * (value_row - decay * read)
            dot = gl.broadcast(gl.sum(key * query), update)[0]
            gl.store(out + head_at * DV + value, gl.fma(update, dot, decay * answer))
            if token + 1 < query_len:
                tile = apply_record(tile, wide_key, update, decay)
            ring_row = ((first_row + token) % RING).to(gl.int64)
            gl.store(ring_u + (v_rows + ring_row) * DV + value, update)
            if block == 0:
                gl.store(ring_g + v_rows + ring_row, decay)
                if head % (NV // NK) == 0:
                    gl.store(ring_k + (k_rows + ring_row) * DK + row_at, key)
            head_at += NV
        # All threads have read the window: the next one may take its place.
        wait_for_warps()
        request, head, block, slot = next_request, next_head, next_block, next_slot
        if has_next:
            copy_window(
                shared_rows, shared_values, q, k, v, request, head, block, query_len, row_at, lane_v, NK, NV,
                DK, DV,
            )  # fmt: skip


def describe_states(state: torch.Tensor) -> TensorDescriptor:
    """Return a descriptor of tiles of BLOCK_V rows of state [slots, nv, dv, dk]."""
    rows = state.view(-1, state.shape[3])
    # Not swizzled: eight threads read 128 neighbouring bytes, and a tile is one copy instead of four.
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [BLOCK_V, rows.shape[1]], layout)


def launch_many(args: Any, out: torch.Tensor) -> None:
    """Do what `gdn_verify_kernel` does, on a GPU with a copy engine."""
    rows, num_v_heads, head_v_dim = args.v.shape
    num_k_heads, head_k_dim = args.k.shape[1:]
    batch = args.state_index.shape[0]
    device = device_of(args.v.device.index)
    items = batch * num_v_heads * (head_v_dim // BLOCK_V)
    gdn_many_kernel[(min(items, PROGRAMS * device.num_processors),)](
        describe_states(args.state), args.q, args.k, args.v, args.exp_g, args.beta, out, args.state,
        args.ring_k, args.ring_u, args.ring_g, args.state_index, args.base, args.pos, rows // batch,
        args.max_unfolded, items,
        NK=num_k_heads, NV=num_v_heads, DK=head_k_dim, DV=head_v_dim, RING=args.ring_k.shape[2],
        BLOCK_V=BLOCK_V, LANES=LANES, MOST_TOKENS=1 << (rows // batch - 1).bit_length(),
        PDL=device.has_dependent_launch, num_warps=1, maxnreg=REGISTERS,
        launch_pdl=device.has_dependent_launch, **OPTIONS,
    )  # fmt: skip
