"""MemoryPlan: the sizes of all caches, and how many blocks, state rows and state snapshots fit a memory."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_mtp.plan import SPARE_SLOTS
from compiled_mtp.runner.sizes import CacheShape

# Block 0, and one of a request.
_LEAST_BLOCKS = 2
# The most bytes of the prefix cache's state snapshots, and their largest share in free memory, where the
# config gives no number.
DEFAULT_PREFIX_CACHE_BYTES = 4 << 30
PREFIX_CACHE_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes of all caches.

    num_blocks counts block 0, and num_state_rows counts SPARE_SLOTS: no request owns these. max_model_len:
    the tokens of one request that num_blocks hold, at most the spec's max_model_len. num_snapshots: state
    snapshots of the prefix cache. other_bytes: bytes of the device for everything except caches and weights.
    host_records and host_blocks: the host tier of offloaded requests; prefix_host_records and
    prefix_host_blocks: the host tier of the prefix cache.
    """

    num_blocks: int
    num_state_rows: int
    max_model_len: int
    block_bytes: int
    state_row_bytes: int
    num_snapshots: int = 0
    snapshot_bytes: int = 0
    other_bytes: int = 0
    host_records: int = 0
    host_blocks: int = 0
    prefix_host_records: int = 0
    prefix_host_blocks: int = 0

    @property
    def max_batch(self) -> int:
        """The most requests decoded together: one for each state row that is not spare."""
        return self.num_state_rows - SPARE_SLOTS

    @property
    def total_bytes(self) -> int:
        """Bytes that the engine takes on the device besides the weights and a launch's temporary buffers.

        A CPU allocates the pages of blocks only when they are written.
        """
        rows_bytes = self.num_state_rows * self.state_row_bytes
        blocks_bytes = self.num_blocks * self.block_bytes
        return blocks_bytes + rows_bytes + self.num_snapshots * self.snapshot_bytes + self.other_bytes

    def describe(self) -> str:
        """The plan as one line of a log."""
        slots = f"{self.max_batch} slots of {self.state_row_bytes / 2**20:.1f} MiB"
        counts = f"{self.num_blocks - 1} blocks, {slots}"
        others = f"{self.num_snapshots} state snapshots and other buffers"
        return f"{self.total_bytes >> 20} MiB for {counts}, {others}"


def plan_memory(
    free_bytes: int,
    shape: CacheShape,
    *,
    block_size: int,
    max_batch: int,
    max_model_len: int,
    num_blocks: int | None = None,
    prefix_cache_bytes: int | None = 0,
    blocks_per_chunk: int = 1,
    other_bytes: int = 0,
    host_bytes: int = 0,
) -> MemoryPlan:
    """Return how many blocks, state rows and state snapshots fit into `free_bytes`.

    other_bytes and host_bytes are subtracted first: buffers of the engine, and on a CPU the host tier of
    offloaded requests, which takes the same memory. Blocks: exactly `num_blocks` if given, else at most those
    that max_batch requests of max_model_len tokens can use. Snapshots: at most one per blocks_per_chunk
    blocks, of prefix_cache_bytes together, 0 for none; None for the least of DEFAULT_PREFIX_CACHE_BYTES, an
    eighth of what is free, and what is left. Raises ValueError with the numbers if max_batch state rows,
    those snapshots and those blocks, or one block, do not fit.
    """
    all_bytes = free_bytes
    free_bytes -= other_bytes + host_bytes
    rows = max_batch + SPARE_SLOTS
    block_bytes, row_bytes = shape.block_bytes(block_size), shape.state_row_bytes
    each_bytes = shape.snapshot_bytes
    least_bytes = (num_blocks or _LEAST_BLOCKS) * block_bytes + rows * row_bytes
    wanted = _count_snapshots(prefix_cache_bytes, free_bytes, least_bytes, each_bytes)
    count = num_blocks
    if count is None:
        room = max(free_bytes - rows * row_bytes - wanted * each_bytes, 0) // block_bytes
        count = max(min(room, max_batch * -(-max_model_len // block_size) + 1), _LEAST_BLOCKS)
    needed = count * block_bytes + rows * row_bytes + wanted * each_bytes
    if needed > free_bytes:
        snapshots = f", {wanted} state snapshots of {mib(each_bytes)}" if wanted else ""
        others = [(host_bytes, "offloaded requests"), (other_bytes, "other buffers")]
        besides = " and ".join(f"{mib(count)} for {what}" for count, what in others if count)
        besides = f", besides {besides}" if besides else ""
        raise ValueError(
            f"free memory must hold {mib(needed)} of caches ({rows} state rows of {mib(row_bytes)}, "
            f"{count} blocks of {mib(block_bytes)}{snapshots}){besides}, got {mib(all_bytes)}; lower "
            f"max_batch{', prefix_cache_gb' if wanted else ''}{', offload_gb' if host_bytes else ''} or "
            "num_blocks"
        )
    num_snapshots = min(wanted, (count - 1) // blocks_per_chunk)
    longest = min(max_model_len, (count - 1) * block_size)
    return MemoryPlan(count, rows, longest, block_bytes, row_bytes, num_snapshots, each_bytes, other_bytes)


def _count_snapshots(given_bytes: int | None, free_bytes: int, least_bytes: int, each_bytes: int) -> int:
    """How many state snapshots to make room for; without given_bytes at most what least_bytes leaves free."""
    if given_bytes is None:
        share = min(DEFAULT_PREFIX_CACHE_BYTES, int(free_bytes * PREFIX_CACHE_SHARE))
        return max(min(share, free_bytes - least_bytes), 0) // each_bytes
    if 0 < given_bytes < each_bytes:
        raise ValueError(
            f"prefix_cache_gb must hold a state snapshot of {mib(each_bytes)}, got {mib(given_bytes)}; "
            "raise it, or turn prefix_cache off"
        )
    return given_bytes // each_bytes


def mib(count: int) -> str:
    """Bytes as text in MiB."""
    return f"{count / 2**20:.1f} MiB"
