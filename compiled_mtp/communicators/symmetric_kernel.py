"""The exchange of several GPUs in memory that each can write: one or two barriers, all inside a kernel.

Every program is a channel of its own: program i of a rank meets program i of the others, whatever else is on
its way. A channel has its epochs, which count its barriers on the device since replays of a graph are
identical, a signal for each rank, and its place in two halves of memory that take turns. A rank may write to
a half of its peers' once it has their signal of the barrier before: they sent that behind all they read of
the half when it was last used.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

# Words of `control`, in the host's memory: whether to give up, and as whose fault (the rank + 1); how long a
# rank may be waited for, in nanoseconds.
GIVEN_UP, LIMIT = 0, 1
CONTROL_WORDS = 2


@triton.jit
def send_signal(at, epoch):
    """Store `epoch` at a peer; whoever reads it there also sees what this program's threads stored before."""
    tl.inline_asm_elementwise(
        "st.release.sys.global.b32 [$1], $2; mov.b32 $0, $2;",
        "=r,l,r",
        [at, epoch],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def read_signal(at):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for(signal, epoch, control, peer, TURNS: tl.constexpr):
    """Until the signal has come to `epoch`, or the host gives up, or the time is over, which is noted."""
    turns = 0
    begin = globaltimer()
    is_waiting = read_signal(signal) - epoch < 0
    while is_waiting:
        is_waiting = read_signal(signal) - epoch < 0
        turns += 1
        # The host's memory is far away.
        if turns % TURNS == 0:
            if tl.load(control + 0, volatile=True) != 0:
                is_waiting = False
            elif globaltimer() - begin > tl.load(control + 1, volatile=True):
                tl.store(control + 0, peer + 1)
                is_waiting = False


@triton.jit
def memory_of(peers, rank, dtype: tl.constexpr):
    """The address of a rank's memory, which begins at a page."""
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def meet(peers, channel, epoch, control, RANK: tl.constexpr, WORLD: tl.constexpr, TURNS: tl.constexpr):
    """The barrier of a channel: what every rank's program stored before it, each sees behind it."""
    # All threads have stored.
    tl.debug_barrier()
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            signals = memory_of(peers, peer, tl.int32)
            send_signal(signals + channel * WORLD + RANK, epoch)
    own = memory_of(peers, RANK, tl.int32)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            wait_for(own + channel * WORLD + peer, epoch, control, peer, TURNS)
    tl.debug_barrier()


@triton.jit
def load_tree(at, stride, inside, COUNT: tl.constexpr):
    """The sum of COUNT neighbouring parts, of a rank or of ranks, added as a tree."""
    if COUNT == 1:
        total = tl.load(at, mask=inside, cache_modifier=".cg")
    else:
        total = load_tree(at, stride, inside, COUNT // 2)
        total += load_tree(at + COUNT // 2 * stride, stride, inside, COUNT // 2)
    return total


@triton.jit
def gather_kernel(
    parts, out, peers, epochs, control, size, part_stride, out_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr, TURNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [WORLD, size], the tree's sum of each rank's parts [PARTS, size] float32; of one part any words of
    32 bits. One barrier.
    """
    if PDL:
        gdc_launch_dependents()
    channel = tl.program_id(0)
    place = channel * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
    epoch = tl.load(epochs + channel) + 1
    # Behind the signals: [2, WORLD, CHANNELS * CHUNK].
    half = CHANNELS * WORLD + (epoch & 1) * (WORLD * CHANNELS * CHUNK)
    mine = load_tree(parts + place, part_stride, place < size, PARTS)
    dtype: tl.constexpr = parts.dtype.element_ty
    tl.store(out + RANK * out_stride + place, mine, mask=place < size)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            memory = memory_of(peers, peer, dtype)
            tl.store(memory + half + RANK * (CHANNELS * CHUNK) + place, mine, mask=place < size)
    meet(peers, channel, epoch, control, RANK, WORLD, TURNS)
    own = memory_of(peers, RANK, dtype)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            at = own + half + peer * (CHANNELS * CHUNK) + place
            theirs = tl.load(at, mask=place < size, cache_modifier=".cg")
            tl.store(out + peer * out_stride + place, theirs, mask=place < size)
    tl.store(epochs + channel, epoch)


@triton.jit
def sum_kernel(
    parts, out, peers, epochs, control, size, part_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr, TURNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [size] in its dtype, the tree's sum of all ranks' parts [PARTS, size] float32: two barriers.

    A rank sends the sums of its own parts. Of the WORLD chunks of a channel each adds up one, and sends the
    rounded sums.
    """
    if PDL:
        gdc_launch_dependents()
    channel = tl.program_id(0)
    first = channel * (WORLD * CHUNK)
    lane = tl.arange(0, CHUNK)
    place = channel * CHUNK + lane
    if PDL:
        gdc_wait()
    epoch = tl.load(epochs + channel) + 1
    half = CHANNELS * WORLD + (epoch & 1) * (WORLD * CHANNELS * CHUNK)
    for peer in tl.static_range(WORLD):
        at = first + peer * CHUNK + lane
        part = load_tree(parts + at, part_stride, at < size, PARTS)
        memory = memory_of(peers, peer, tl.float32)
        tl.store(memory + half + RANK * (CHANNELS * CHUNK) + place, part, mask=at < size)
    meet(peers, channel, epoch, control, RANK, WORLD, TURNS)
    own = memory_of(peers, RANK, tl.float32)
    at = first + RANK * CHUNK + lane
    total = load_tree(own + half + place, CHANNELS * CHUNK, at < size, WORLD)
    # Behind both halves, where no signal but that of the first barrier has to come between two uses.
    sums = CHANNELS * WORLD + 2 * WORLD * CHANNELS * CHUNK
    dtype = out.dtype.element_ty
    rounded = total.to(dtype)
    for peer in tl.static_range(WORLD):
        memory = (memory_of(peers, peer, tl.float32) + sums).to(tl.pointer_type(dtype))
        tl.store(memory + RANK * (CHANNELS * CHUNK) + place, rounded, mask=at < size)
    meet(peers, channel, epoch + 1, control, RANK, WORLD, TURNS)
    results = (own + sums).to(tl.pointer_type(dtype))
    for peer in tl.static_range(WORLD):
        at = first + peer * CHUNK + lane
        result = tl.load(results + peer * (CHANNELS * CHUNK) + place, mask=at < size, cache_modifier=".cg")
        tl.store(out + at, result, mask=at < size)
    tl.store(epochs + channel, epoch + 1)
