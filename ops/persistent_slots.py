"""Float32 sums that leave a program of `persistent_kernel` and return: to it, or to the next program.

A slot holds the sums [rows, weight rows] of one warpgroup. The thread that stores a number is the one that
loads it, in whichever program.
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


@gluon.jit
def slot_addresses(slots, slot, PIECES: gl.constexpr):
    """Return the addresses of a slot, [PIECES, threads, 4]."""
    layout: gl.constexpr = slot_layout()
    # Unless it depends on an untraceable number, the compiler computes every address early and spills it.
    first = slots + keep(slot).to(gl.int64) * (PIECES * 512)
    piece = gl.arange(0, PIECES, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    thread = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return first + ((piece[:, None] * 512 + thread[None, :] * 4)[:, :, None] + number[None, None, :])


@gluon.jit
def store_slot(sums, slots, slot):
    """Store sums in a slot."""
    gl.store(slot_addresses(slots, slot, sums.shape[0] * sums.shape[1] // 512), by_thread(sums))


@gluon.jit
def load_slot(like, slots, slot, layout: gl.constexpr):
    """Return the sums of a slot, which has the shape of `like`."""
    HEIGHT: gl.constexpr = like.shape[0]
    WIDTH: gl.constexpr = like.shape[1]
    # Past L1, which does not see what other processors store.
    tile = gl.load(slot_addresses(slots, slot, HEIGHT * WIDTH // 512), cache_modifier=".cg")
    return by_row(tile, HEIGHT, WIDTH, layout)


@gluon.jit
def close_chain(sums, slots, slot, chain, CHAINS: gl.constexpr, layout: gl.constexpr):
    """Return the largest finished node of the tree of CHAINS chains.

    Left halves of one, two and four chains wait for their right half in `slot` and the two slots after it.
    """
    if chain & 1 == 0:
        store_slot(sums, slots, slot)
    else:
        sums = load_slot(sums, slots, slot, layout) + sums
        if CHAINS > 2:
            if chain & 2 == 0:
                store_slot(sums, slots, slot + 1)
            else:
                sums = load_slot(sums, slots, slot + 1, layout) + sums
                if CHAINS > 4:
                    if chain & 4 == 0:
                        store_slot(sums, slots, slot + 2)
                    else:
                        sums = load_slot(sums, slots, slot + 2, layout) + sums
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
