"""The main loops of `persistent_kernel`: a warpgroup sums the products of a chain's steps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from compiled_mtp.ops.persistent_slots import keep


@gluon.constexpr_function
def sums_layout(width, is_fp8):
    """Return the layout of a warpgroup's sums of `width` weight rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32 if is_fp8 else 16])


@gluon.jit
def start_step(
    sums, shared_x, shared_weight, ready, count, USE_SUMS: gl.constexpr,
    FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start a step's product as soon as its tiles are there, with USE_SUMS added to `sums`."""
    stage = count % STAGES
    mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
    left = shared_x.index(stage).slice(FIRST, 64, 0)
    right = shared_weight.index(stage).permute([1, 0])
    return warpgroup_mma(left, right, sums, use_acc=USE_SUMS, is_async=True)


@gluon.jit
def add_columns(
    sums, shared_x, shared_weight, ready, free, count, number,
    FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return `sums` plus the bfloat16 products of `number` steps, and the steps so far."""
    # As traceable values, sums of a slot would make the assembler wait for each product.
    sums = keep(sums)
    for step in range(number):
        sums = start_step(sums, shared_x, shared_weight, ready, count, True, FIRST, STAGES)
        # The product of the step before has ended: its stage is free.
        sums = warpgroup_mma_wait(1, deps=[sums])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        count += 1
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1)
    return sums, count


@gluon.jit
def load_scale(shared_scale, count, layout: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr):
    """Return the scales of the products of a step's block, for each row."""
    stage = count % STAGES
    x_scale = shared_scale.index(2 * stage).slice(FIRST, 64).load(gl.SliceLayout(1, layout))
    return x_scale * shared_scale.index(2 * stage + 1).slice(FIRST, 64).load(gl.SliceLayout(1, layout))


@gluon.jit
def add_product(sums, product, scale, free, count, STAGES: gl.constexpr):
    """Return `sums` plus the finished product of a block, scaled; its stage is free."""
    mbarrier.arrive(free.index(count % STAGES), count=1)
    return gl.fma(product, scale[:, None] + gl.zeros_like(product), sums)


@gluon.jit
def add_blocks(
    sums, shared_x, shared_weight, shared_scale, ready, free, count, number,
    layout: gl.constexpr, FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return `sums` plus the FP8 products of `number` blocks of 128 columns, scaled, and the steps so far.

    What a tensor core adds is imprecise: never more than a block, whose sum is multiplied in float32. The
    product of a block runs while that of the block before is scaled.
    """
    zeros = gl.zeros_like(sums)
    for _ in range(number // 2):
        one = start_step(zeros, shared_x, shared_weight, ready, count, False, FIRST, STAGES)
        other = start_step(zeros, shared_x, shared_weight, ready, count + 1, False, FIRST, STAGES)
        scale = load_scale(shared_scale, count, layout, FIRST, STAGES)
        one = warpgroup_mma_wait(1, deps=[one])
        sums = add_product(sums, one, scale, free, count, STAGES)
        scale = load_scale(shared_scale, count + 1, layout, FIRST, STAGES)
        other = warpgroup_mma_wait(0, deps=[other])
        sums = add_product(sums, other, scale, free, count + 1, STAGES)
        count += 2
    if number % 2 == 1:
        one = start_step(zeros, shared_x, shared_weight, ready, count, False, FIRST, STAGES)
        scale = load_scale(shared_scale, count, layout, FIRST, STAGES)
        one = warpgroup_mma_wait(0, deps=[one])
        sums = add_product(sums, one, scale, free, count, STAGES)
        count += 1
    return sums, count
