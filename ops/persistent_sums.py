"""The main loops of `persistent_kernel`: a warpgroup sums the products of a chain's steps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from compiled_mtp.ops.persistent_slots import keep, sums_layout


@gluon.jit
def start_product(
    before, shared_x, shared_weights, ready, count, USE_SUMS, STRIP: gl.constexpr, FIRST: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Start a strip's product of a step, with USE_SUMS added to `before`. The first waits for the tiles."""
    stage = count % STAGES
    if STRIP == 0:
        mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
    left = shared_x.index(stage).slice(FIRST, 64, 0)
    right = shared_weights[STRIP].index(stage).permute([1, 0])
    return warpgroup_mma(left, right, before, use_acc=USE_SUMS, is_async=True)


@gluon.jit
def await_products(products, PENDING: gl.constexpr):
    """Return the sums of a step's products, when all except the last PENDING products have ended."""
    if len(products) == 1:
        return (warpgroup_mma_wait(PENDING, deps=[products[0]]),)
    else:
        return warpgroup_mma_wait(PENDING, deps=[products[0], products[1]])


@gluon.jit
def add_columns(
    sums, shared_x, shared_weights, ready, free, count, number,
    FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return `sums` plus the bfloat16 products of `number` steps, and the steps so far."""
    # As traceable values, sums of a slot would make the assembler wait for each product.
    kept = ()
    for strip in gl.static_range(len(sums)):
        kept += (keep(sums[strip]),)
    sums = kept
    for step in range(number):
        products = ()
        for strip in gl.static_range(len(sums)):
            products += (
                start_product(
                    sums[strip], shared_x, shared_weights, ready, count, True, strip, FIRST, STAGES
                ),
            )
        # The products of the step before have ended: its stage is free.
        sums = await_products(products, len(sums))
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        count += 1
    sums = await_products(sums, 0)
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1)
    return sums, count


@gluon.jit
def load_scale(shared_scale, count, layout: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr):
    """Return the scales of the products of a step's block, for each row."""
    stage = count % STAGES
    x_scale = shared_scale.index(2 * stage).slice(FIRST, 64).load(gl.SliceLayout(1, layout))
    return x_scale * shared_scale.index(2 * stage + 1).slice(FIRST, 64).load(gl.SliceLayout(1, layout))


@gluon.jit
def add_flights(
    sums, shared_x, shared_weights, shared_scale, ready, free, count, number,
    FLIGHT: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`add_blocks` of FLIGHT blocks at a time, as many of which as fit into `number`.

    Two products are in flight until the last of them, in registers that they take in turn.
    """
    layout: gl.constexpr = sums_layout(sums.shape[1], True)
    zeros = gl.zeros_like(sums)
    # No number is negative, which the compiler cannot know: a product keeps the registers of the one before.
    never = keep(number) < 0
    for _ in range(number // FLIGHT):
        one = start_product(zeros, shared_x, shared_weights, ready, count, False, 0, FIRST, STAGES)
        other = one
        if FLIGHT > 1:
            other = start_product(zeros, shared_x, shared_weights, ready, count + 1, False, 0, FIRST, STAGES)
        for index in gl.static_range(FLIGHT):
            scale = load_scale(shared_scale, count, layout, FIRST, STAGES)
            product = warpgroup_mma_wait(1 if index + 1 < FLIGHT else 0, deps=[one])
            mbarrier.arrive(free.index(count % STAGES), count=1)
            # Untraceable: these sums are complete before the next product takes the registers.
            sums = keep(gl.fma(product, scale[:, None] + zeros, sums))
            one = other
            if index + 2 < FLIGHT:
                other = start_product(
                    product, shared_x, shared_weights, ready, count + 2, never, 0, FIRST, STAGES
                )
            count += 1
    return sums, count


@gluon.jit
def add_blocks(
    sums, shared_x, shared_weights, shared_scale, ready, free, count, number,
    ALONE: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return `sums` plus the FP8 products of `number` blocks of 128 columns, scaled, and the steps so far.

    What a tensor core adds is imprecise: never more than a block, whose sum is multiplied in float32. The
    product of a block runs while that of the block before is scaled; ALONE: after it, if registers hold only
    one.
    """
    total = sums[0]
    if not ALONE:
        total, count = add_flights(
            total, shared_x, shared_weights, shared_scale, ready, free, count, number, 8, FIRST, STAGES
        )
        number = number % 8
        total, count = add_flights(
            total, shared_x, shared_weights, shared_scale, ready, free, count, number, 2, FIRST, STAGES
        )
        number = number % 2
    total, count = add_flights(
        total, shared_x, shared_weights, shared_scale, ready, free, count, number, 1, FIRST, STAGES
    )
    return (total,), count
