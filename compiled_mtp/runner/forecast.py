"""What a start finds: the memory that its weights take, and the caches that fit beside them.

An engine and `compiled-mtp inspect` ask the same functions, one before and one without loading.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from compiled_mtp.graphs.buckets import Bucket, ladder, ladders
from compiled_mtp.models.family import FAMILIES
from compiled_mtp.runner.max_batch import fit_wide_rounds, resolve_max_batch
from compiled_mtp.runner.memory import resolve_memory
from compiled_mtp.runner.memory_plan import MemoryPlan
from compiled_mtp.runner.spec import WIDE_REQUESTS, EngineSpec
from compiled_mtp.vision.tower import empty_tower

# How torch takes memory from a GPU (CUDACachingAllocator): tensors of at least _LARGE_BYTES alone, in whole
# _LARGE_UNITs; smaller ones together, in segments of at most _SEGMENT_BYTES.
_SMALL_UNIT, _LARGE_UNIT = 512, 2 << 20
_LARGE_BYTES, _SEGMENT_BYTES = 10 << 20, 20 << 20
# What loading leaves behind besides the weights: the code of its kernels.
_LEFT_BYTES = 64 << 20


class Buckets(NamedTuple):
    """The decode shapes of rounds that draw tokens, and of rounds whose tokens are all given."""

    drawn: tuple[Bucket, ...]
    given: tuple[Bucket, ...]

    @property
    def every(self) -> tuple[Bucket, ...]:
        """Both, without duplicates: a wide round without a chain has the shape of some rounds of given
        tokens."""
        return tuple(dict.fromkeys((*self.drawn, *self.given)))


def buckets_of(spec: EngineSpec, unit: int, max_batch: int) -> Buckets:
    """The decode shapes; unit: the rows at whose multiples a row's bits do not depend on the others."""
    drawn = ladders(unit, spec.shapes, max_batch, spec.config.batch_sizes)
    drawn += ladders(unit, spec.wide_shapes, WIDE_REQUESTS)
    given = [ladder(unit, shape, spec.given_requests(shape, max_batch)) for shape in spec.given_shapes]
    return Buckets(drawn, tuple(itertools.chain(*given)))


def draft_head_bytes(spec: EngineSpec, num_head_rows: int) -> int:
    """Bytes of the drafts' own head, where the target's head has `num_head_rows` rows."""
    return spec.drafts.head_bytes(num_head_rows, spec.model.hidden_size, spec.dtype.itemsize)


def size_caches(
    spec: EngineSpec, buckets: Buckets, num_head_rows: int, *, free_bytes: int, host_bytes: int
) -> MemoryPlan:
    """The caches that fit into free_bytes of the device, once the weights are there, and into host_bytes.

    buckets: for the max_batch that `resolve_max_batch` gives for free_bytes. num_head_rows: rows of the head
    on this rank. Raises ValueError as `resolve_memory` does.
    """
    return resolve_memory(
        spec,
        free_bytes=free_bytes,
        host_bytes=host_bytes,
        draft_head_bytes=draft_head_bytes(spec, num_head_rows),
        max_batch=resolve_max_batch(spec, free_bytes),
        rounds={(bucket.groups, bucket.shape.verify + 1) for bucket in buckets.every},
    )


def free_beside(models: Iterable[nn.Module], free_bytes: int) -> int:
    """The bytes that are free on a GPU once it holds the parameters of `models`, of `free_bytes` before."""
    taken = small = 0
    for parameter in (parameter for model in models for parameter in model.parameters()):
        if parameter.nbytes < _LARGE_BYTES:
            small += -(-parameter.nbytes // _SMALL_UNIT) * _SMALL_UNIT
        else:
            taken += -(-parameter.nbytes // _LARGE_UNIT) * _LARGE_UNIT
    # torch keeps two kinds of segments for small tensors; the ends of both stay empty.
    taken += -(-small // _SEGMENT_BYTES) * _SEGMENT_BYTES + (_SEGMENT_BYTES if small else 0)
    return max(0, free_bytes - taken - _LEFT_BYTES)


def parameter_bytes(spec: EngineSpec) -> int:
    """The bytes of all parameters of one rank, without a draft head of its own. Reads no weights."""
    return sum(parameter.nbytes for model in _shapes(spec) for parameter in model.parameters())


def forecast(spec: EngineSpec, *, free_bytes: int, host_bytes: int) -> MemoryPlan:
    """The caches of an engine that starts with free_bytes of the device and host_bytes of the host.

    With several ranks, the caches of rank 0. Reads no weights. Raises ValueError as `resolve_memory` does.
    """
    if spec.device.type == "cpu":
        left = max(0, free_bytes - parameter_bytes(spec))
    else:
        left = free_beside(_shapes(spec), free_bytes)
    max_batch = resolve_max_batch(spec, left)
    spec = fit_wide_rounds(spec, max_batch, left)
    buckets = buckets_of(spec, 1, max_batch)
    num_head_rows = spec.model.vocab_size // spec.config.tensor_parallel
    return size_caches(spec, buckets, num_head_rows, free_bytes=left, host_bytes=host_bytes)


def _shapes(spec: EngineSpec) -> list[nn.Module]:
    """The models of rank 0, whose parameters have no memory."""
    shard, family = spec.model.shard(0, spec.config.tensor_parallel), FAMILIES[spec.model.family]
    meta = torch.device("meta")
    models: list[nn.Module] = [family.target(shard, spec.dtype, meta, spec.weight_formats)]
    if spec.mtp_step:
        formats = spec.drafts.formats(spec.model, spec.weight_formats)
        models.append(family.draft(shard, spec.dtype, meta, formats))
    if spec.model.vision is not None:
        models.append(empty_tower(spec.model.vision, spec.dtype, meta))
    return models
