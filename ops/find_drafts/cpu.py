"""`find_drafts` on a CPU: each id of the suffix narrows the few places where those before it stand."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_mtp.ops.find_drafts.reference import (
    DECAY,
    LEAST_KEPT,
    LEAST_MATCH,
    LEAST_THRESHOLD,
    MOST_MATCH,
    MOST_THRESHOLD,
    RISE,
    UNIT,
    Found,
    LookupState,
)

# So few places are compared in Python, each at once.
FEW = 8


def find_drafts(
    token_ids: Tensor,
    state_index: Tensor,
    pos: Tensor,
    chain: Tensor,
    lookup: LookupState,
    drafts: Tensor,
    accepted: Tensor | None,
    early: bool = True,
) -> Found:
    index, slots = state_index.long(), state_index.tolist()
    columns = [column[index].tolist() for column in (*lookup, pos)]
    kept = None if accepted is None else accepted[:, 0].tolist()
    verify = 0 if accepted is None else accepted.shape[1] - 3
    width = drafts.shape[1]
    padded = torch.nn.functional.pad(chain, (0, width - chain.shape[1])).tolist()
    states, matches = [], []
    for request, (slot, verified, threshold, chain_kept, last) in enumerate(
        zip(slots, *columns, strict=True)
    ):
        length = 0
        if not slot:
            padded[request] = [0] * width
        else:
            verified = verified if verify else 0
            if kept is not None and verified:
                gained = (kept[request] - 1) * UNIT - max(min(chain_kept, verify * UNIT), LEAST_KEPT)
                threshold = min(max(threshold - max(gained, -RISE), LEAST_THRESHOLD), MOST_THRESHOLD)
            elif kept is not None:
                if verify:
                    chain_kept += ((kept[request] - 1) * UNIT - chain_kept) >> DECAY
                if threshold > MOST_MATCH * UNIT:
                    threshold -= UNIT
            length, place = _longest_match(token_ids[slot], last)
            if length * UNIT < threshold:
                length = 0
            else:
                padded[request] = _continue(token_ids[slot], place, last, width)
        states.append((length, threshold, chain_kept))
        matches.append((verified if slot else 0, length))
    made = torch.tensor(padded)
    drafts[index] = made
    for column, values in zip(lookup, torch.tensor(states, dtype=torch.int32).unbind(1), strict=True):
        column[index] = values
    return Found(made, torch.tensor(matches))


def _longest_match(ids: Tensor, last: int) -> tuple[int, int]:
    """Return the length of the longest match of ids[: last + 1], 0 below LEAST_MATCH, and where it ends."""
    suffix = ids[max(last + 1 - MOST_MATCH, 0) : last + 1].flip(0).tolist()
    if last >= len(ids) or suffix[0] < 0:
        return 0, 0
    places = (ids[:last] == suffix[0]).nonzero().flatten()
    length = 1
    while len(places) > FEW and length < len(suffix) and suffix[length] >= 0:
        # Positions below `length` have no id that far before them.
        enough = places if int(places[0]) >= length else places[places >= length]
        longer = enough[ids[enough - length] == suffix[length]]
        if not len(longer):
            break
        length, places = length + 1, longer
    # More than a few places that are left match equally far: the latest counts.
    best, end = 0, 0
    for place in places[-1:].tolist() if len(places) > FEW else places.tolist():
        before = ids[max(place + 1 - MOST_MATCH, 0) : place + 1].flip(0).tolist()
        pairs = enumerate(zip(before, suffix, strict=False))
        own = next(
            (at for at, (one, wanted) in pairs if one != wanted or one < 0), min(len(before), len(suffix))
        )
        if own >= best:
            best, end = own, place
    return (best, end) if best >= LEAST_MATCH else (0, 0)


def _continue(ids: Tensor, place: int, last: int, count: int) -> list[int]:
    """Return `count` drafts: what follows position `place`, again and again up to position `last`."""
    after = ids[place + 1 : min(last, place + count) + 1].tolist()
    period = last - place
    drafts = [after[k % period] for k in range(count)]
    end = next((k for k, draft in enumerate(drafts) if draft < 0), count)
    return drafts[:end] + [0] * (count - end)
