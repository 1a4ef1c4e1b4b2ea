"""Float32 sums that leave a program of `persistent_kernel` and return: to it, or to the next program.

A slot holds the sums of one warpgroup: of 64 rows of x, strip by strip. A tile's weight rows are one strip or
two, since a layout's width is a power of two. The thread that stores a number is the one that loads it, in
whichever program.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Triton 3.9 renames the function.
wait_for_warps = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def keep(tile):
    """Return `tile` as values that the compiler cannot trace."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=1
    )


@gluon.constexpr_function
def sums_layout(width, is_fp8):
    """Return the layout of a warpgroup's sums of `width` weight rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32 if is_fp8 else 16])


@gluon.jit
def zero_sums(STRIPS: gl.constexpr, FP8: gl.constexpr):
    """Return zeros as a warpgroup's sums of 64 rows and so many weight rows per strip."""
    sums = ()
    for strip in gl.static_range(len(STRIPS)):
        sums += (gl.zeros([64, STRIPS[strip]], gl.float32, sums_layout(STRIPS[strip], FP8)),)
    return sums


@gluon.constexpr_function
def slot_layout():
    """Return the layout of [pieces, threads, 4] in which each thread has a row of 4 numbers, 16 bytes."""
    return gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])


@gluon.jit
def by_thread(sums):
    """Return sums as [pieces, threads, 4]: what a thread has, in pieces of 16 bytes. No number moves."""
    HEIGHT: gl.constexpr = sums.shape[0]
    WIDTH: gl.constexpr = sums.shape[1]
    tile = gl.reshape(sums, [HEIGHT // 64, 4, 2, 8, WIDTH // 8, 4, 2])
    tile = gl.reshape(gl.permute(tile, [0, 4, 1, 3, 5, 2, 6]), [HEIGHT * WIDTH // 512, 128, 4])
    return gl.convert_layout(tile, slot_layout(), assert_trivial=True)


@gluon.jit
def by_row(tile, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Return the sums [HEIGHT, WIDTH] of what threads have, as `by_thread` gives it."""
    tile = gl.permute(gl.reshape(tile, [HEIGHT // 64, WIDTH // 8, 4, 8, 4, 2, 2]), [0, 2, 5, 3, 1, 4, 6])
    return gl.convert_layout(gl.reshape(tile, [HEIGHT, WIDTH]), layout, assert_trivial=True)


@gluon.constexpr_function
def numbers_before(strips, strip):
    """Return how many numbers of a slot come before those of a strip."""
    return 64 * sum(strips[:strip])


@gluon.jit
def slot_addresses(slots, slot, STRIPS: gl.constexpr, STRIP: gl.constexpr):
    """Return the addresses of a strip of a slot's sums, [pieces, threads, 4]."""
    layout: gl.constexpr = slot_layout()
    PIECES: gl.constexpr = STRIPS[STRIP] // 8
    # Unless it depends on an untraceable number, the compiler computes every address early and spills it.
    first = slots + keep(slot).to(gl.int64) * numbers_before(STRIPS, len(STRIPS))
    first += numbers_before(STRIPS, STRIP)
    piece = gl.arange(0, PIECES, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    thread = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return first + ((piece[:, None] * 512 + thread[None, :] * 4)[:, :, None] + number[None, None, :])


@gluon.jit
def store_slot(sums, slots, slot, STRIPS: gl.constexpr):
    """Store sums in a slot."""
    for strip in gl.static_range(len(STRIPS)):
        gl.store(slot_addresses(slots, slot, STRIPS, strip), by_thread(sums[strip]))


@gluon.jit
def load_slot(slots, slot, STRIPS: gl.constexpr, FP8: gl.constexpr):
    """Return the sums of a slot."""
    sums = ()
    for strip in gl.static_range(len(STRIPS)):
        # Past L1, which does not see what other processors store.
        tile = gl.load(slot_addresses(slots, slot, STRIPS, strip), cache_modifier=".cg")
        sums += (by_row(tile, 64, STRIPS[strip], sums_layout(STRIPS[strip], FP8)),)
    return sums


@gluon.jit
def add_sums(left, right):
    """Return left + right, strip by strip."""
    total = ()
    for strip in gl.static_range(len(left)):
        total += (left[strip] + right[strip],)
    return total


@gluon.jit
def close_chain(
    sums, slots, slot, chain, CHAINS: gl.constexpr, STRIPS: gl.constexpr, FP8: gl.constexpr,
    SIZE: gl.constexpr = 1,
):  # fmt: skip
    """Return the largest finished node of the tree of CHAINS chains, from a node of SIZE chains on.

    Left halves of one, two, four and more chains wait for their right half in `slot` and the slots after it.
    """
    if chain & SIZE == 0:
        store_slot(sums, slots, slot, STRIPS)
    else:
        sums = add_sums(load_slot(slots, slot, STRIPS, FP8), sums)
        if CHAINS > 2 * SIZE:
            sums = close_chain(sums, slots, slot + 1, chain, CHAINS, STRIPS, FP8, 2 * SIZE)
    return sums


@gluon.jit
def set_flag(flag):
    """Announce what all threads of the warpgroup have stored."""
    wait_for_warps()
    gl.atomic_xchg(flag, 1, sem="release")


@gluon.jit
def await_flag(flag):
    """Wait until a flag is set, and clear it for the next launch."""
    found = gl.atomic_cas(flag, 1, 0, sem="acquire")
    while found == 0:
        found = gl.atomic_cas(flag, 1, 0, sem="acquire")
