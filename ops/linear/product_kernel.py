"""The product's device code: one tile of rows and weight rows, over the K splits of one program."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def e4m3_to_bf16(weight):
    """Return the bfloat16 values of e4m3 bytes, exact for all finite numbers.

    An e4m3 number shifted into bfloat16's fields is the number times 2^-120, also if subnormal. The
    conversion instructions run at a quarter of this speed, and would bound the speed of the whole product.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, low_rest, high_rest, factor, zero;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        shr.u32 low_rest, low, 4;
        shr.u32 high_rest, high, 4;
        and.b32 low_rest, low_rest, 0x07f007f0;
        and.b32 high_rest, high_rest, 0x07f007f0;
        lop3.b32 low, low, 0x80008000, low_rest, 0xea;
        lop3.b32 high, high, 0x80008000, high_rest, 0xea;
        mov.b32 factor, 0x7b807b80;
        mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 $0, low, factor, zero;
        fma.rn.bf16x2 $1, high, factor, zero;
        }
        """,
        "=&r,=&r,r",
        [weight],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def opaque(tile, PACK: tl.constexpr):
    """Return `tile` as values that the compiler cannot trace; PACK elements have 4 bytes."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=PACK
    )


@triton.jit
def multiply_add(x_tile, weight_tile, scale, total, FP8: tl.constexpr, ON_DEVICE: tl.constexpr):
    """Return total + x_tile @ weight_tile.T; with FP8 weights times `scale`, a number or [1, BN]."""
    if FP8:
        if ON_DEVICE and x_tile.dtype == tl.bfloat16:
            values = e4m3_to_bf16(weight_tile)
        else:
            values = weight_tile.to(x_tile.dtype)
        product = tl.dot(x_tile, values.T, input_precision="ieee")
        return tl.fma(product, tl.zeros_like(product) + scale, total)
    else:
        return tl.dot(x_tile, weight_tile.T, total, input_precision="ieee")


@triton.jit
def add_step(
    total,
    x_at,
    weight_at,
    scale_at,
    offset,
    k_left,
    row_inside,
    in_k,
    EVEN_K: tl.constexpr,
    FP8: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Return total + x_tile @ weight_tile.T at column `offset`, from where on `k_left` columns are inside."""
    if EVEN_K:
        x_tile = tl.load(x_at + offset, mask=row_inside, other=0.0)
        weight_tile = tl.load(weight_at + offset)
    else:
        k_inside = (in_k < k_left)[None, :]
        x_tile = tl.load(x_at + offset, mask=row_inside & k_inside, other=0.0)
        weight_tile = tl.load(weight_at + offset, mask=k_inside, other=0.0)
    scale = 1.0
    if FP8:
        if not EVEN_K:
            # Beyond K, load the row's last scale: memory there may hold NaN, and a product of zero and NaN is
            # NaN.
            scale_at -= tl.where(k_left > 0, 0, -k_left // 128 + 1)
        scale = tl.load(scale_at)
    return multiply_add(x_tile, weight_tile, scale, total, FP8, ON_DEVICE)


@triton.jit
def add_chains(
    inputs,
    weights,
    scale_at,
    first: tl.constexpr,
    count: tl.constexpr,
    FP8: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Return the products of `count` neighbouring chains, each summed from zero, added as a tree."""
    if count == 1:
        x_tile = inputs[first]
        sums = tl.zeros((x_tile.shape[0], weights[first].shape[0]), tl.float32)
        if ON_DEVICE:
            # If it saw the zero, the compiler could start from another chain's sum: other bits.
            sums = opaque(sums, 1)
        scale = 1.0
        if FP8:
            scale = tl.load(scale_at + first)
        return multiply_add(x_tile, weights[first], scale, sums, FP8, ON_DEVICE)
    else:
        half: tl.constexpr = count // 2
        left = add_chains(inputs, weights, scale_at, first, half, FP8, ON_DEVICE)
        return left + add_chains(inputs, weights, scale_at, first + half, half, FP8, ON_DEVICE)


@triton.jit
def load_tree(at, part_stride, inside, count: tl.constexpr):
    """Load `count` neighbouring partials and add them as a tree."""
    if count == 1:
        return tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        half: tl.constexpr = count // 2
        left = load_tree(at, part_stride, inside, half)
        return left + load_tree(at + half * part_stride, part_stride, inside, half)


@triton.jit
def store_tile(
    total, out, row, row_inside, first_column, n, BM: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr
):
    """Round and store a tile of sums.

    GATED: store silu(gate) * up of neighbouring columns, with the bits of silu_mul on the rounded sums.
    """
    if GATED:
        gate, up = tl.split(tl.reshape(total.to(out.dtype.element_ty).to(tl.float32), (BM, BN // 2, 2)))
        total = gate / (1.0 + tl.exp(-gate)) * up
        width = n // 2
        column = first_column // 2 + tl.arange(0, BN // 2)
    else:
        width = n
        column = first_column + tl.arange(0, BN)
    at = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=row_inside & (column < width)[None, :])


# Otherwise Triton would compile further kernels, for values of 1 and for multiples of 16.
@triton.jit(do_not_specialize=["rows", "scale_stride", "prefetch_bytes"])
def linear_kernel(
    x,
    weight,
    weight_scale,
    out,
    partials,
    counters,
    rows,
    n,
    k,
    x_stride,
    weight_stride,
    scale_stride,
    part_length,
    prefetch_bytes,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    CHAINS: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    FP8: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH_PARTS: tl.constexpr,
    GATED: tl.constexpr,
    KEEP_PARTS: tl.constexpr,
    ONE_STEP: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    # Neighbouring programs share a weight tile, so that all except the first find it in L2.
    row_tiles = tl.cdiv(rows, BM)
    tile = tl.program_id(0)
    row = (tile % row_tiles) * BM + tl.arange(0, BM)
    first_column = (tile // row_tiles) * BN
    column = first_column + tl.arange(0, BN)
    if GATED:
        # Alternate weight rows of gate and up, so that a thread of the product holds both.
        column = tl.minimum(first_column // 2 + tl.arange(0, BN) // 2, n // 2 - 1) + n // 2 * (
            tl.arange(0, BN) % 2
        )
    partial = tl.program_id(1)
    first_k = partial * (part_length * CHAINS)
    in_k = tl.arange(0, BK)
    # Weight rows beyond N load the last row; their sums are never stored.
    weight_rows = weight + tl.minimum(column, n - 1).to(tl.int64) * weight_stride + first_k
    # The weight does not depend on the kernel before: load it while that kernel finishes. If a program's
    # weights are few (ONE_STEP), load all into registers, else prefetch the first columns to L2.
    if ONE_STEP:
        weights = ()
        for chain in tl.static_range(CHAINS):
            weights += (tl.load(weight_rows[:, None] + (chain * BK + in_k)[None, :]),)
        if ON_DEVICE:
            # The compiler cannot move a load below the barrier, nor a use of opaque values above it: all
            # loads are in flight at once.
            tl.debug_barrier()
            arrived = ()
            for chain in tl.static_range(CHAINS):
                arrived += (opaque(weights[chain], 4 if FP8 else 2),)
            weights = arrived
    if PDL:
        if PREFETCH_PARTS > 0:
            address = weight_rows.to(tl.uint64, bitcast=True)[:, None]
            address += tl.arange(0, PREFETCH_PARTS)[None, :].to(tl.uint64) * prefetch_bytes
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [address, tl.zeros((BN, PREFETCH_PARTS), tl.int32) + prefetch_bytes],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        gdc_wait()
        # Let the next kernel start only after the wait: measured, two waiting kernels slow down a third.
        gdc_launch_dependents()

    row_inside = (row < rows)[:, None]
    x_at = x + row.to(tl.int64)[:, None] * x_stride + (first_k + in_k)[None, :]
    weight_at = weight_rows[:, None] + in_k[None, :]
    # A tile has one row of scales (gated tiles: one row per column), a step lies in one block of 128 columns.
    if FP8 and GATED:
        scale_at = weight_scale + (column // 128 * scale_stride)[None, :] + first_k // 128
    elif FP8:
        scale_at = weight_scale + (first_column // 128) * scale_stride + first_k // 128
    else:
        scale_at = x  # never read
    total = tl.zeros((BM, BN), tl.float32)
    if ONE_STEP:
        inputs = ()
        for chain in tl.static_range(CHAINS):
            inputs += (tl.load(x_at + chain * BK, mask=row_inside, other=0.0),)
        total = add_chains(inputs, weights, scale_at, 0, CHAINS, FP8, ON_DEVICE)
    elif SEQUENTIAL:
        # Sums of one, two and four chains that wait for the right half of their node in the tree.
        one = total
        two = total
        four = total
        chain = 0
        chain_left = part_length
        # One loop over all chains: with a loop per chain, the pipeline would run empty between them.
        for at in range(0, part_length * CHAINS, BK):
            scale = scale_at + at // 128
            left = k - first_k - at
            total = add_step(
                total, x_at, weight_at, scale, at, left, row_inside, in_k, EVEN_K, FP8, ON_DEVICE
            )
            if CHAINS > 1:
                chain_left -= BK
                if chain_left == 0:
                    chain_left = part_length
                    if chain & 1 == 0:
                        one = total
                    else:
                        total = one + total
                        if CHAINS > 2:
                            if chain & 2 == 0:
                                two = total
                            else:
                                total = two + total
                                if CHAINS > 4:
                                    if chain & 4 == 0:
                                        four = total
                                    else:
                                        total = four + total
                    chain += 1
                    if chain < CHAINS:
                        total = tl.zeros((BM, BN), tl.float32)
    else:
        sum_1 = total
        sum_2 = total
        sum_3 = total
        blocks = part_length // 128
        for at in range(0, part_length, BK):
            left = k - first_k - at
            scale = scale_at + at // 128
            total = add_step(
                total, x_at, weight_at, scale, at, left, row_inside, in_k, EVEN_K, FP8, ON_DEVICE
            )
            if CHAINS > 1:
                at_1 = at + part_length
                left -= part_length
                scale += blocks
                sum_1 = add_step(
                    sum_1, x_at, weight_at, scale, at_1, left, row_inside, in_k, EVEN_K, FP8, ON_DEVICE
                )
            if CHAINS > 2:
                at_2 = at + 2 * part_length
                left -= part_length
                scale += blocks
                sum_2 = add_step(
                    sum_2, x_at, weight_at, scale, at_2, left, row_inside, in_k, EVEN_K, FP8, ON_DEVICE
                )
                at_3 = at + 3 * part_length
                left -= part_length
                scale += blocks
                sum_3 = add_step(
                    sum_3, x_at, weight_at, scale, at_3, left, row_inside, in_k, EVEN_K, FP8, ON_DEVICE
                )
        if CHAINS > 1:
            total += sum_1
        if CHAINS > 2:
            total += sum_2 + sum_3

    if KEEP_PARTS:
        part_out = out + partial.to(tl.int64) * rows * n
        store_tile(total, part_out, row, row_inside, first_column, n, BM, BN, False)
    elif SPLIT == 1:
        store_tile(total, out, row, row_inside, first_column, n, BM, BN, GATED)
    else:
        in_tile = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        part_stride = tl.num_programs(0).to(tl.int64) * (BM * BN)
        first_partial = partials + tile.to(tl.int64) * (BM * BN) + in_tile
        tl.store(first_partial + partial * part_stride, total, mask=row_inside)
        # All threads must have written their sums before one of them announces the partial.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            total = load_tree(first_partial, part_stride, row_inside, SPLIT)
            store_tile(total, out, row, row_inside, first_column, n, BM, BN, GATED)
            # Reset for the next launch, which may be a replay of the same graph.
            tl.store(counters + tile, 0)
