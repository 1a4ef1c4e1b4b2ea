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


@gluon.jit
def slot_addresses(like, slots, slot, layout: gl.constexpr):
    """Return the addresses of a slot for sums like `like`."""
    HEIGHT: gl.constexpr = like.shape[0]
    WIDTH: gl.constexpr = like.shape[1]
    # Unless it depends on an untraceable number, the compiler computes every address early and spills it.
    first = keep(slot).to(gl.int64) * (HEIGHT * WIDTH)
    row = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout)).to(gl.int64)
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout)).to(gl.int64)
    return slots + ((first + row * WIDTH)[:, None] + column[None, :])


@gluon.jit
def store_slot(sums, slots, slot, layout: gl.constexpr):
    """Store sums in a slot."""
    gl.store(slot_addresses(sums, slots, slot, layout), sums)


@gluon.jit
def load_slot(like, slots, slot, layout: gl.constexpr):
    """Return the sums of a slot, which has the shape of `like`."""
    # Past L1, which does not see what other processors store.
    return gl.load(slot_addresses(like, slots, slot, layout), cache_modifier=".cg")


@gluon.jit
def close_chain(sums, slots, slot, chain, CHAINS: gl.constexpr, layout: gl.constexpr):
    """Return the largest finished node of the tree of CHAINS chains.

    Left halves of one, two and four chains wait for their right half in `slot` and the two slots after it.
    """
    if chain & 1 == 0:
        store_slot(sums, slots, slot, layout)
    else:
        sums = load_slot(sums, slots, slot, layout) + sums
        if CHAINS > 2:
            if chain & 2 == 0:
                store_slot(sums, slots, slot + 1, layout)
            else:
                sums = load_slot(sums, slots, slot + 1, layout) + sums
                if CHAINS > 4:
                    if chain & 4 == 0:
                        store_slot(sums, slots, slot + 2, layout)
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
