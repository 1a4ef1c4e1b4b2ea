"""How many blocks, state rows and checkpoints fit into memory (pure arithmetic); how much a CPU host has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from compiled_mtp.plan import SPARE_SLOTS

_FLOAT32_BYTES = 4
# Of what is packed into flat memory, as `RowLayout` does it.
_ROW_ALIGNMENT = 64
# Block 0, and one for a request.
_LEAST_BLOCKS = 2
# Of the checkpoints of the prefix cache where nobody says otherwise: at most that many bytes, and that share
# of what is free.
DEFAULT_PREFIX_CACHE_BYTES = 4 << 30
_PREFIX_CACHE_SHARE = 1 / 8
# What a control group's files are called: its limit, its use, the prefix of memory.stat's keys for it and
# those below it. Source: the kernel's documentation, admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
_GROUP_V2 = ("memory.max", "memory.current", "")
_GROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The numbers of a model and its configuration that decide what a request costs.

    num_attention_layers counts every layer that keeps keys and values: the target's and the MTP layer.
    ring_length is slots of the rings of records and conv inputs; kv_bytes and conv_bytes are bytes of one
    element, kv_scale_bytes those of the scale of one head's key or value, 0 for a cache without scales.
    sampling_bytes: of a request's sampling tables; hidden_bytes: of the hidden state of one token.
    """

    num_attention_layers: int
    num_kv_heads: int
    head_dim: int
    kv_bytes: int
    num_gdn_layers: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_dim: int
    conv_bytes: int
    ring_length: int
    kv_scale_bytes: int = 0
    sampling_bytes: int = 0
    hidden_bytes: int = 0

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens in all layers: keys and values, and their scales."""
        vector_bytes = self.head_dim * self.kv_bytes + self.kv_scale_bytes
        return 2 * self.num_attention_layers * block_size * self.num_kv_heads * vector_bytes

    def state_row_bytes(self) -> int:
        """Bytes of one request: in the GDN layers float32 state and records, raw conv inputs; its tables."""
        record = self.num_key_heads * self.key_head_dim + self.num_value_heads * (self.value_head_dim + 1)
        rings = self.num_gdn_layers * self.ring_length * record * _FLOAT32_BYTES
        return self._prefill_state_bytes() + rings + self.sampling_bytes

    def checkpoint_bytes(self) -> int:
        """Bytes of what a prefill chunk leaves to the next: states, conv inputs and a hidden state."""
        flat = self._prefill_state_bytes() + self.hidden_bytes
        return -(-flat // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    def _prefill_state_bytes(self) -> int:
        state = self.num_value_heads * self.key_head_dim * self.value_head_dim
        conv = self.ring_length * self.conv_dim * self.conv_bytes
        return self.num_gdn_layers * (state * _FLOAT32_BYTES + conv)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What to create: num_blocks counts block 0 and num_state_rows SPARE_SLOTS, which belong to nobody.
    num_checkpoints are those of the prefix cache. other_bytes: what the engine takes on the device beside
    them and the weights.
    """

    num_blocks: int
    num_state_rows: int
    block_bytes: int
    state_row_bytes: int
    num_checkpoints: int = 0
    checkpoint_bytes: int = 0
    other_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the device that the engine takes beside the weights and what a launch needs while it runs.
        A CPU gives those of blocks only when they are written.
        """
        rows_bytes = self.num_state_rows * self.state_row_bytes
        blocks_bytes = self.num_blocks * self.block_bytes
        return blocks_bytes + rows_bytes + self.num_checkpoints * self.checkpoint_bytes + self.other_bytes

    def describe(self) -> str:
        """The plan in a line, for a log."""
        counts = f"{self.num_blocks - 1} blocks, {self.num_state_rows - SPARE_SLOTS} slots"
        rest = f"{self.num_checkpoints} checkpoints and what else a step needs"
        return f"{self.total_bytes >> 20} MiB for {counts}, {rest}"


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
    """Return how many blocks, state rows and checkpoints to create in `free_bytes` beside other_bytes, and on
    a CPU beside the host_bytes that requests which leave, and others, may take of the same memory.

    Not more blocks than max_batch requests of max_model_len tokens can use, or exactly `num_blocks`; not more
    checkpoints than there are chunks of so many blocks. prefix_cache_bytes of checkpoints, 0 for none; None
    for DEFAULT_PREFIX_CACHE_BYTES, an eighth of what is free, or what is left, whichever is least. Raises
    ValueError with the numbers if max_batch state rows, those checkpoints and blocks, or one block, do not
    fit.
    """
    all_bytes = free_bytes
    free_bytes -= other_bytes + host_bytes
    rows = max_batch + SPARE_SLOTS
    block_bytes, row_bytes = shape.block_bytes(block_size), shape.state_row_bytes()
    each_bytes = shape.checkpoint_bytes()
    least_bytes = (num_blocks or _LEAST_BLOCKS) * block_bytes + rows * row_bytes
    wanted = _count_checkpoints(prefix_cache_bytes, free_bytes, least_bytes, each_bytes)
    count = num_blocks
    if count is None:
        room = max(free_bytes - rows * row_bytes - wanted * each_bytes, 0) // block_bytes
        count = max(min(room, max_batch * -(-max_model_len // block_size) + 1), _LEAST_BLOCKS)
    needed = count * block_bytes + rows * row_bytes + wanted * each_bytes
    if needed > free_bytes:
        checkpoints = f", {wanted} checkpoints of {_mib(each_bytes)}" if wanted else ""
        others = [(host_bytes, "those who leave"), (other_bytes, "a step")]
        beside = " and ".join(f"{_mib(count)} for {what}" for count, what in others if count)
        beside = f", beside {beside}" if beside else ""
        raise ValueError(
            f"free memory must hold {_mib(needed)} of caches ({rows} state rows of {_mib(row_bytes)}, "
            f"{count} blocks of {_mib(block_bytes)}{checkpoints}){beside}, got {_mib(all_bytes)}; lower "
            f"max_batch{', prefix_cache_gb' if wanted else ''}{', offload_gb' if host_bytes else ''} or "
            "num_blocks"
        )
    num_checkpoints = min(wanted, (count - 1) // blocks_per_chunk)
    return MemoryPlan(count, rows, block_bytes, row_bytes, num_checkpoints, each_bytes, other_bytes)


def _count_checkpoints(given_bytes: int | None, free_bytes: int, least_bytes: int, each_bytes: int) -> int:
    """How many checkpoints are wanted; without a given size they take nothing that a request needs."""
    if given_bytes is None:
        share = min(DEFAULT_PREFIX_CACHE_BYTES, int(free_bytes * _PREFIX_CACHE_SHARE))
        return max(min(share, free_bytes - least_bytes), 0) // each_bytes
    if 0 < given_bytes < each_bytes:
        raise ValueError(
            f"prefix_cache_gb must hold a checkpoint of {_mib(each_bytes)}, got {_mib(given_bytes)}; raise "
            "it, or turn prefix_cache off"
        )
    return given_bytes // each_bytes


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Room in host memory for what leaves the device: rows, and blocks."""

    num_records: int
    num_blocks: int


def check_offload(offload_bytes: int, free_bytes: int) -> None:
    """Raise ValueError if more host memory is asked for than is free."""
    if offload_bytes > free_bytes:
        raise ValueError(
            f"offload_gb must be at most the {free_bytes / 2**30:.2f} GiB of host memory that are free, got "
            f"{offload_bytes / 2**30:.2f}; lower it"
        )


def plan_host(offload_bytes: int, plan: MemoryPlan, free_bytes: int | None = None) -> HostPlan:
    """Return what `offload_bytes` of host memory hold of what `plan` has on the device: at most all of it.

    Half is for rows, as far as they need it. Raises ValueError as `check_offload`; free_bytes is None for a
    number of our own choice.
    """
    if free_bytes is not None:
        check_offload(offload_bytes, free_bytes)
    records = min(plan.num_state_rows - SPARE_SLOTS, offload_bytes // 2 // plan.state_row_bytes)
    blocks = min(plan.num_blocks - 1, (offload_bytes - records * plan.state_row_bytes) // plan.block_bytes)
    return HostPlan(records, blocks) if records and blocks else HostPlan(0, 0)


def plan_shelf(shelf_bytes: int, plan: MemoryPlan, blocks_per_chunk: int) -> HostPlan:
    """Return what `shelf_bytes` of host memory hold of chunks of so many blocks: states, and all blocks."""
    chunks = shelf_bytes // (plan.checkpoint_bytes + blocks_per_chunk * plan.block_bytes)
    return HostPlan(chunks, chunks * blocks_per_chunk) if plan.num_checkpoints else HostPlan(0, 0)


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can take on a CPU host now without swapping or being killed.

    They include the page cache, full after a checkpoint was read, because the kernel gives it back. Every
    control group from the process's own upwards may limit them. Without a /proc/meminfo: all physical memory.
    """
    try:
        meminfo = (proc / "meminfo").read_text()
        room = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([room, *_group_rooms(proc / "self" / "cgroup", cgroups)])


def _group_rooms(membership: Path, cgroups: Path) -> list[int]:
    """The bytes left below each limit on the groups that the file `membership` names and on those above."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not path.startswith("/"):
            continue
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (cgroups / "memory", _GROUP_V1) if controllers else (cgroups, _GROUP_V2)
        own = PurePosixPath(path).relative_to("/")
        # In a container the path may be the host's, of which only the root is to be seen.
        for group in (own, *own.parents):
            room = _group_room(root / group, *names)
            rooms += [] if room is None else [room]
    return rooms


def _group_room(group: Path, limit_name: str, use_name: str, prefix: str) -> int | None:
    """The bytes left below the limit on one group, or None where it has none."""
    try:
        limit = int((group / limit_name).read_text())
        use = int((group / use_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max" is no number
        return None
    cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return max(limit - max(use - cached, 0), 0)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
