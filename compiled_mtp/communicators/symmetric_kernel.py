"""Collectives of several GPUs in memory that each can write: one or two barriers, all inside a kernel.

Every program is a separate channel: program i of a rank meets only program i of the other ranks. A channel
has an epoch, a signal from each rank, and a region in each of two halves of memory, which alternate. The
epoch counts the channel's barriers on the device, since all replays of a graph are identical. A rank may
write to a half of a peer's memory once it has the peer's signal of the barrier before: the peer sent it after
its last read of that half.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

# Words of `control`, in host memory. Word 0 is the fault: 0, -1 after the host's abort, or the missing
# rank + 1; kernels stop waiting unless it is 0. Word 1 is the limit: how many nanoseconds a kernel waits.


@triton.jit
def send_signal(at, epoch):
    """Store `epoch` at a peer; if the peer reads it, it also sees this program's earlier stores."""
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
    """Wait until the signal reaches `epoch`, the host aborts, or the limit is over, which sets the fault."""
    turns = 0
    begin = globaltimer()
    is_waiting = read_signal(signal) - epoch < 0
    while is_waiting:
        is_waiting = read_signal(signal) - epoch < 0
        turns += 1
        # Reads of host memory are slow.
        if turns % TURNS == 0:
            if tl.load(control + 0, volatile=True) != 0:
                is_waiting = False
            elif globaltimer() - begin > tl.load(control + 1, volatile=True):
                tl.store(control + 0, peer + 1)
                is_waiting = False


@triton.jit
def memory_of(peers, rank, dtype: tl.constexpr):
    """Return the address of a rank's memory, which begins at a page."""
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def meet(peers, channel, epoch, control, RANK: tl.constexpr, WORLD: tl.constexpr, TURNS: tl.constexpr):
    """Run a channel's barrier: after it every rank's program sees what all of them stored before it."""
    # Wait for the stores of all threads.
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
    """Return the sum, added as a tree, of COUNT neighbouring partials of one rank or of several."""
    if COUNT == 1:
        total = tl.load(at, mask=inside, cache_modifier=".cg")
    else:
        total = load_tree(at, stride, inside, COUNT // 2)
        total += load_tree(at + COUNT // 2 * stride, stride, inside, COUNT // 2)
    return total


@triton.jit
def gather_kernel(
    partials, out, peers, epochs, control, size, partial_stride, out_stride,
    PARTIALS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr, TURNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write to out [WORLD, size] the tree's sum of each rank's partials [PARTIALS, size] float32.

    With PARTIALS = 1 the words may be any 32 bits. One barrier.
    """
    if PDL:
        gdc_launch_dependents()
    channel = tl.program_id(0)
    offsets = channel * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
    epoch = tl.load(epochs + channel) + 1
    # The halves come after the signals: [2, WORLD, CHANNELS * CHUNK].
    half = CHANNELS * WORLD + (epoch & 1) * (WORLD * CHANNELS * CHUNK)
    mine = load_tree(partials + offsets, partial_stride, offsets < size, PARTIALS)
    dtype: tl.constexpr = partials.dtype.element_ty
    tl.store(out + RANK * out_stride + offsets, mine, mask=offsets < size)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            memory = memory_of(peers, peer, dtype)
            tl.store(memory + half + RANK * (CHANNELS * CHUNK) + offsets, mine, mask=offsets < size)
    meet(peers, channel, epoch, control, RANK, WORLD, TURNS)
    own = memory_of(peers, RANK, dtype)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            at = own + half + peer * (CHANNELS * CHUNK) + offsets
            theirs = tl.load(at, mask=offsets < size, cache_modifier=".cg")
            tl.store(out + peer * out_stride + offsets, theirs, mask=offsets < size)
    tl.store(epochs + channel, epoch)


@triton.jit
def sum_kernel(
    partials, out, peers, epochs, control, size, partial_stride,
    PARTIALS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr, TURNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write to out [size], in its dtype, the tree's sum of all ranks' partials [PARTIALS, size] float32.

    Two barriers. A rank sends the sums of its own partials; then it adds one of a channel's WORLD chunks and
    sends the rounded sums.
    """
    if PDL:
        gdc_launch_dependents()
    channel = tl.program_id(0)
    first = channel * (WORLD * CHUNK)
    columns = tl.arange(0, CHUNK)
    offsets = channel * CHUNK + columns
    if PDL:
        gdc_wait()
    epoch = tl.load(epochs + channel) + 1
    half = CHANNELS * WORLD + (epoch & 1) * (WORLD * CHANNELS * CHUNK)
    for peer in tl.static_range(WORLD):
        at = first + peer * CHUNK + columns
        part = load_tree(partials + at, partial_stride, at < size, PARTIALS)
        memory = memory_of(peers, peer, tl.float32)
        tl.store(memory + half + RANK * (CHANNELS * CHUNK) + offsets, part, mask=at < size)
    meet(peers, channel, epoch, control, RANK, WORLD, TURNS)
    own = memory_of(peers, RANK, tl.float32)
    at = first + RANK * CHUNK + columns
    total = load_tree(own + half + offsets, CHANNELS * CHUNK, at < size, WORLD)
    # The sums come after both halves. Between two uses of them the first barrier's signal is enough.
    sums = CHANNELS * WORLD + 2 * WORLD * CHANNELS * CHUNK
    dtype = out.dtype.element_ty
    rounded = total.to(dtype)
    for peer in tl.static_range(WORLD):
        memory = (memory_of(peers, peer, tl.float32) + sums).to(tl.pointer_type(dtype))
        tl.store(memory + RANK * (CHANNELS * CHUNK) + offsets, rounded, mask=at < size)
    meet(peers, channel, epoch + 1, control, RANK, WORLD, TURNS)
    results = (own + sums).to(tl.pointer_type(dtype))
    for peer in tl.static_range(WORLD):
        at = first + peer * CHUNK + columns
        result = tl.load(results + peer * (CHANNELS * CHUNK) + offsets, mask=at < size, cache_modifier=".cg")
        tl.store(out + at, result, mask=at < size)
    tl.store(epochs + channel, epoch + 1)
