"""Prompt chunks that share a call; each prefill operator must give them the bits that they have alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from compiled_mtp.graphs.buckets import lay_out
from tests.ops.attention_cases import make
from tests.ops.gdn_cases import Shape, make_cache, make_layer, make_proj, make_prompt
from tests.ops.harness import assert_same_bits

# The last slot has no request: it receives the state snapshots.
SLOTS = 9
SNAPSHOT_OFFSET = 64
Cut = tuple[int, int, int]
CUTS: tuple[Cut, ...] = ((3, 0, 70), (1, 64, 9), (4, 0, 1), (2, 128, 64), (7, 192, 2), (5, 64, 150))
"""(slot, start, length): short and long, new and going on, each end of a tile."""


class Chunks(NamedTuple):
    """Arguments `state_index`, `start`, `length` and `first_row` of a call, and its number of rows."""

    arguments: tuple[torch.Tensor, ...]
    rows: int


def lay_out_cuts(cuts: Sequence[Cut], device: str, padding: int = 0, unused: int = 0) -> Chunks:
    """Lay out the cuts side by side; add `padding` rows after them and `unused` chunks without rows."""
    first_rows, end = lay_out([length for *_, length in cuts])
    columns = [(*cut, row) for cut, row in zip(cuts, first_rows, strict=True)] + [(0, 0, 0, end)] * unused
    slots, *rest = torch.tensor(columns, device=device).t().contiguous().unbind()
    return Chunks((slots.to(torch.int32), *rest), end + padding)


def spread(parts: Sequence[torch.Tensor], chunks: Chunks, value: float) -> torch.Tensor:
    """Put the rows of each chunk at their places in the call; rows of no chunk hold `value`."""
    whole = torch.full(
        (chunks.rows, *parts[0].shape[1:]), value, dtype=parts[0].dtype, device=parts[0].device
    )
    for part, row in zip(parts, chunks.arguments[3].tolist(), strict=False):
        whole[row : row + len(part)] = part
    return whole


def snapshot_offsets(
    chunks: Chunks, snapshot_chunk: int | None, count: int = SNAPSHOT_OFFSET
) -> torch.Tensor:
    """Return a call's snapshot offsets: `count` rows for chunk `snapshot_chunk`, 0 (none) for the others."""
    offsets = torch.zeros_like(chunks.arguments[2])
    if snapshot_chunk is not None:
        offsets[snapshot_chunk] = count
    return offsets


def check_rows(y: torch.Tensor, alone: Sequence[torch.Tensor], chunks: Chunks) -> None:
    """Check that `y` has in each chunk's rows its bits alone, and zeros elsewhere."""
    assert_same_bits([y], [spread(alone, chunks, 0.0)])


def check_gdn(
    call: Callable[..., torch.Tensor],
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    cuts: Sequence[Cut] = CUTS,
) -> None:
    """Check `gdn_prefill`, with NaN in every state that must not be read."""
    layer = make_layer(shape, dtype, device=device)
    state = make_cache(shape, SLOTS, 8, dtype, device).state
    for slot in range(SLOTS):
        if not any(cut[0] == slot and cut[1] for cut in cuts):
            state[slot] = torch.nan
    prompt = make_prompt(layer, sum(length for *_, length in cuts), dtype, device)
    parts = [tensor.split([length for *_, length in cuts]) for tensor in prompt]

    def run(
        inputs: Sequence[torch.Tensor], state: torch.Tensor, chunks: Chunks, *offset: Any
    ) -> torch.Tensor:
        return call(*inputs, layer.norm_weight, state, *chunks.arguments, 1e-6, "silu", *offset)

    expected, alone = state.clone(), []
    snapshot_chunk = next((index for index, cut in enumerate(cuts) if cut[2] > SNAPSHOT_OFFSET), None)
    for index, cut in enumerate(cuts):
        own = [split[index].contiguous() for split in parts]
        if index == snapshot_chunk:
            before, (slot, start, _) = expected.clone(), cut
            run(
                [x[:SNAPSHOT_OFFSET].contiguous() for x in own],
                before,
                lay_out_cuts([(slot, start, SNAPSHOT_OFFSET)], device),
            )
        alone.append(run(own, expected, lay_out_cuts([cut], device)))
    if snapshot_chunk is not None:
        expected[-1] = before[cuts[snapshot_chunk][0]]
    assert all(y.isfinite().all() for y in alone)
    for padding, unused in ((0, 0), (21, 3)):
        chunks, together = lay_out_cuts(cuts, device, padding, unused), state.clone()
        inputs = [spread(split, chunks, torch.nan if i == 5 else 0.0) for i, split in enumerate(parts)]
        check_rows(run(inputs, together, chunks, snapshot_offsets(chunks, snapshot_chunk)), alone, chunks)
        assert_same_bits([together], [expected])


def check_conv(
    call: Callable[..., Sequence[torch.Tensor]],
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    cuts: Sequence[Cut] = CUTS,
) -> None:
    """Check `conv_prefill`, with NaN in every ring row that must not be read."""
    layer = make_layer(shape, dtype, device=device)
    ring = make_cache(shape, SLOTS, 8, dtype, device).conv_ring
    for slot, start, _ in cuts:
        for position in range(max(start - 3, 0), start):
            ring[slot, position % 8] = 0.01 * position + 0.1 * slot
    parts = [make_proj(shape, length, dtype, seed=slot, device=device) for slot, _, length in cuts]

    def run(proj: torch.Tensor, ring: torch.Tensor, chunks: Chunks, *offset: Any) -> Sequence[torch.Tensor]:
        weights = (layer.conv_weight, layer.a_log, layer.dt_bias)
        return call(proj, *weights, ring, *chunks.arguments, *shape.dims, *offset)

    expected = ring.clone()
    alone = [run(part, expected, lay_out_cuts([cut], device)) for part, cut in zip(parts, cuts, strict=True)]
    snapshot_chunk, last = next(((i, cut[2] - 1) for i, cut in enumerate(cuts) if cut[2] > 4), (None, 0))
    if snapshot_chunk is not None:
        for row in range(last - 3, last):
            expected[-1, (cuts[snapshot_chunk][1] + row) % 8] = parts[snapshot_chunk][
                row, : expected.shape[2]
            ]
    assert all(y.isfinite().all() for results in alone for y in results)
    for padding, unused in ((0, 0), (21, 3)):
        chunks, together = lay_out_cuts(cuts, device, padding, unused), ring.clone()
        offset = snapshot_offsets(chunks, snapshot_chunk, last)
        results = run(spread(parts, chunks, torch.nan), together, chunks, offset)
        for index, y in enumerate(results):
            check_rows(y, [one[index] for one in alone], chunks)
        assert_same_bits([together], [expected])


def check_attention(
    call: Callable[..., torch.Tensor],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    cuts: Sequence[Cut] = CUTS,
    first_key: int = 0,
) -> None:
    """Check `paged_attention`; pages hold NaN after each prompt's end."""
    lengths = [start + length for _, start, length in cuts]
    *_, kv, scale, table, _, softmax_scale, _ = make(lengths, 1, *heads, dtype=dtype, device=device)
    g = torch.Generator(device).manual_seed(1)
    parts = [
        torch.randn(length, 2, heads[0], heads[2], generator=g, device=device).to(dtype)
        for *_, length in cuts
    ]

    def run(rows: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, chunks: Chunks) -> torch.Tensor:
        q, gate = rows[:, 0].contiguous(), rows[:, 1]
        _, _, length, first_row = chunks.arguments
        own = (kv, scale, table, positions, softmax_scale, first_key, first_row, length)
        return call(q, gate, *own)

    positions = [torch.arange(start, start + length, device=device) for _, start, length in cuts]
    alone = [
        run(part, table[i : i + 1], positions[i], lay_out_cuts([cut], device))
        for i, (part, cut) in enumerate(zip(parts, cuts, strict=True))
    ]
    assert all(y.isfinite().all() for y in alone)
    for padding, unused in ((0, 0), (21, 3)):
        chunks = lay_out_cuts(cuts, device, padding, unused)
        tables = torch.cat((table, torch.full_like(table[:1], -1).expand(unused, -1)))
        rows = spread(parts, chunks, torch.nan)
        check_rows(run(rows, tables, spread(positions, chunks, 0), chunks), alone, chunks)
