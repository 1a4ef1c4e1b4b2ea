"""Device functions of the sampler's noise: Philox4x32-10 and an accurate Gumbel transform."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox_words(block, seed, position):
    """Return four uint32 words for each counter (block, 0, position low, position high), key `seed`."""
    c0 = block.to(tl.uint32)
    c1 = tl.zeros_like(c0)
    c2 = c1 + (position & 0xFFFFFFFF).to(tl.uint32)
    c3 = c1 + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    second = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        next0 = tl.umulhi(second, c2) ^ c1 ^ k0
        next2 = tl.umulhi(first, c0) ^ c3 ^ k1
        c1 = second * c2
        c3 = first * c0
        c0 = next0
        c2 = next2
        k0 += tl.full((), 0x9E3779B9, tl.uint32)
        k1 += tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def log_near_one(f):
    """Return log(1 + f) for f in sqrt(1/2) - 1 .. sqrt(2) - 1, to 1.5 * 2^-24 relative; a Chebyshev fit."""
    q = tl.fma(f, -0.08101558685302734, 0.12712307274341583)
    q = tl.fma(q, f, -0.12972238659858704)
    q = tl.fma(q, f, 0.14202174544334412)
    q = tl.fma(q, f, -0.16642247140407562)
    q = tl.fma(q, f, 0.20001468062400818)
    q = tl.fma(q, f, -0.25000298023223877)
    q = tl.fma(q, f, 0.333333283662796)
    square = f * f
    return f + tl.fma(q, square * f, -0.5 * square)


@triton.jit
def split(x):
    """Split positive x = mantissa * 2^exponent into exponent and mantissa in sqrt(1/2) .. sqrt(2)."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    return exponent, (bits - (exponent << 23)).to(tl.float32, bitcast=True)


@triton.jit
def log_one_minus(u):
    """Return log(1 - u) for u in 0 .. 1 - 2^-24, with a small relative error even for the smallest u."""
    exponent, mantissa = split(1.0 - u)
    f = tl.where(exponent == 0, -u, mantissa - 1.0)
    return tl.fma(exponent.to(tl.float32), 0.6931471805599453, log_near_one(f))


@triton.jit
def gumbel_of_word(word):
    u = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.9999999403953552)
    return -tl.log(-log_one_minus(u))


@triton.jit
def gumbel_of_blocks(block, seed, position, LENGTH: tl.constexpr):
    """Return the noise [4 * len(block)] of ids 4 * block .. 4 * block + 3 of each block."""
    w0, w1, w2, w3 = philox_words(block, seed, position)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (LENGTH,))
    return gumbel_of_word(word)


@triton.jit
def gumbel_of_ids(ids, seed, position):
    """Return the noise of ids in any order; computes four words per id and uses one."""
    w0, w1, w2, w3 = philox_words(ids >> 2, seed, position)
    lane = ids & 3
    return gumbel_of_word(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))
