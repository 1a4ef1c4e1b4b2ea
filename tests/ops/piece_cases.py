"""Pieces of prompts side by side; each operator of prefill must give them the bits that they have alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from compiled_mtp.graphs.buckets import lay_out
from tests.ops.attention_cases import make
from tests.ops.gdn_cases import Shape, make_cache, make_layer, make_proj, make_prompt
from tests.ops.harness import assert_same_bits

# The last is nobody's: what is marked goes there.
SLOTS = 9
MARKED = 64
Cut = tuple[int, int, int]
CUTS: tuple[Cut, ...] = ((3, 0, 70), (1, 64, 9), (4, 0, 1), (2, 128, 64), (7, 192, 2), (5, 64, 150))
"""(slot, start, length): short and long, new and going on, each end of a tile."""


class Pieces(NamedTuple):
    """`state_index`, `start`, `length` and `first_row` of a call, and its number of rows."""

    arguments: tuple[torch.Tensor, ...]
    rows: int


def lay(cuts: Sequence[Cut], device: str, padding: int = 0, unused: int = 0) -> Pieces:
    """Cuts side by side, with rows of nobody behind them and pieces that have none."""
    first_rows, end = lay_out([length for *_, length in cuts])
    columns = [(*cut, row) for cut, row in zip(cuts, first_rows, strict=True)] + [(0, 0, 0, end)] * unused
    slots, *rest = torch.tensor(columns, device=device).t().contiguous().unbind()
    return Pieces((slots.to(torch.int32), *rest), end + padding)


def spread(parts: Sequence[torch.Tensor], pieces: Pieces, value: float) -> torch.Tensor:
    """The rows of each piece where they lie, and `value` in those of nobody."""
    whole = torch.full(
        (pieces.rows, *parts[0].shape[1:]), value, dtype=parts[0].dtype, device=parts[0].device
    )
    for part, row in zip(parts, pieces.arguments[3].tolist(), strict=False):
        whole[row : row + len(part)] = part
    return whole


def marks_of(pieces: Pieces, marked: int | None, count: int = MARKED) -> torch.Tensor:
    """`mark` of a call in which the piece `marked` has one after `count` rows."""
    marks = torch.zeros_like(pieces.arguments[2])
    if marked is not None:
        marks[marked] = count
    return marks


def check_rows(y: torch.Tensor, alone: Sequence[torch.Tensor], pieces: Pieces) -> None:
    """`y` has in each piece's rows what it has alone, and zeros elsewhere."""
    assert_same_bits([y], [spread(alone, pieces, 0.0)])


def check_gdn(
    call: Callable[..., torch.Tensor],
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    cuts: Sequence[Cut] = CUTS,
) -> None:
    """`gdn_prefill`, with NaN in every state that must not be read or written."""
    layer = make_layer(shape, dtype, device=device)
    state = make_cache(shape, SLOTS, 8, dtype, device).state
    for slot in range(SLOTS):
        if not any(cut[0] == slot and cut[1] for cut in cuts):
            state[slot] = torch.nan
    prompt = make_prompt(layer, sum(length for *_, length in cuts), dtype, device)
    parts = [tensor.split([length for *_, length in cuts]) for tensor in prompt]

    def run(inputs: Sequence[torch.Tensor], state: torch.Tensor, pieces: Pieces, *mark: Any) -> torch.Tensor:
        return call(*inputs, layer.norm_weight, state, *pieces.arguments, 1e-6, "silu", *mark)

    expected, alone = state.clone(), []
    marked = next((index for index, cut in enumerate(cuts) if cut[2] > MARKED), None)
    for index, cut in enumerate(cuts):
        own = [split[index].contiguous() for split in parts]
        if index == marked:
            before, (slot, start, _) = expected.clone(), cut
            run([x[:MARKED].contiguous() for x in own], before, lay([(slot, start, MARKED)], device))
        alone.append(run(own, expected, lay([cut], device)))
    if marked is not None:
        expected[-1] = before[cuts[marked][0]]
    assert all(y.isfinite().all() for y in alone)
    for padding, unused in ((0, 0), (21, 3)):
        pieces, together = lay(cuts, device, padding, unused), state.clone()
        inputs = [spread(split, pieces, torch.nan if i == 5 else 0.0) for i, split in enumerate(parts)]
        check_rows(run(inputs, together, pieces, marks_of(pieces, marked)), alone, pieces)
        assert_same_bits([together], [expected])


def check_conv(
    call: Callable[..., Sequence[torch.Tensor]],
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    cuts: Sequence[Cut] = CUTS,
) -> None:
    """`conv_prefill`, with NaN in every ring row that must not be read."""
    layer = make_layer(shape, dtype, device=device)
    ring = make_cache(shape, SLOTS, 8, dtype, device).conv_ring
    for slot, start, _ in cuts:
        for position in range(max(start - 3, 0), start):
            ring[slot, position % 8] = 0.01 * position + 0.1 * slot
    parts = [make_proj(shape, length, dtype, seed=slot, device=device) for slot, _, length in cuts]

    def run(proj: torch.Tensor, ring: torch.Tensor, pieces: Pieces, *mark: Any) -> Sequence[torch.Tensor]:
        weights = (layer.conv_weight, layer.a_log, layer.dt_bias)
        return call(proj, *weights, ring, *pieces.arguments, *shape.dims, *mark)

    expected = ring.clone()
    alone = [run(part, expected, lay([cut], device)) for part, cut in zip(parts, cuts, strict=True)]
    marked, last = next(((i, cut[2] - 1) for i, cut in enumerate(cuts) if cut[2] > 4), (None, 0))
    if marked is not None:
        for row in range(last - 3, last):
            expected[-1, (cuts[marked][1] + row) % 8] = parts[marked][row, : expected.shape[2]]
    assert all(y.isfinite().all() for results in alone for y in results)
    for padding, unused in ((0, 0), (21, 3)):
        pieces, together = lay(cuts, device, padding, unused), ring.clone()
        mark = marks_of(pieces, marked, last)
        results = run(spread(parts, pieces, torch.nan), together, pieces, mark)
        for index, y in enumerate(results):
            check_rows(y, [one[index] for one in alone], pieces)
        assert_same_bits([together], [expected])


def check_attention(
    call: Callable[..., torch.Tensor],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    cuts: Sequence[Cut] = CUTS,
    first_key: int = 0,
) -> None:
    """`paged_attention` over pages in which NaN stands behind every prompt."""
    lengths = [start + length for _, start, length in cuts]
    *_, kv, scale, table, _, softmax_scale, _ = make(lengths, 1, *heads, dtype=dtype, device=device)
    g = torch.Generator(device).manual_seed(1)
    parts = [
        torch.randn(length, 2, heads[0], heads[2], generator=g, device=device).to(dtype)
        for *_, length in cuts
    ]

    def run(rows: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        q, gate = rows[:, 0].contiguous(), rows[:, 1]
        _, _, length, first_row = pieces.arguments
        own = (kv, scale, table, positions, softmax_scale, first_key, first_row, length)
        return call(q, gate, *own)

    positions = [torch.arange(start, start + length, device=device) for _, start, length in cuts]
    alone = [
        run(part, table[i : i + 1], positions[i], lay([cut], device))
        for i, (part, cut) in enumerate(zip(parts, cuts, strict=True))
    ]
    assert all(y.isfinite().all() for y in alone)
    for padding, unused in ((0, 0), (21, 3)):
        pieces = lay(cuts, device, padding, unused)
        tables = torch.cat((table, torch.full_like(table[:1], -1).expand(unused, -1)))
        rows = spread(parts, pieces, torch.nan)
        check_rows(run(rows, tables, spread(positions, pieces, 0), pieces), alone, pieces)
