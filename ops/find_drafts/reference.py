"""The specification of `find_drafts`."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import I32, I64, Remedy

# A match of fewer ids is chance; longer ones are not told apart, and their latest place counts.
LEAST_MATCH, MOST_MATCH = 3, 16
# Thresholds and means are in 1/256. The threshold of a new request, and its bounds: above MOST_MATCH the
# request takes no match until rounds of its chain have lowered it.
UNIT = 256
FIRST_THRESHOLD, LEAST_THRESHOLD, MOST_THRESHOLD = 8 * UNIT, LEAST_MATCH * UNIT, (MOST_MATCH + 2) * UNIT
# The most that a round raises a threshold, and the least mean of a chain that its drafts are compared with.
RISE, LEAST_KEPT = 2 * UNIT, UNIT // 2
# The mean number of drafts that the chain of a new request keeps; a round changes it by 2^-DECAY of the
# difference.
FIRST_CHAIN_KEPT, DECAY = 2 * UNIT, 3

_SLOT_STATE = Remedy("pass the rows of SlotState")


class LookupState(NamedTuple):
    """What decides between looked-up drafts and a chain's, [slots] int32.

    matched: the match length of the slot's drafts, 0 for a chain's. threshold: the least length whose drafts
    the slot takes, in 1/256, LEAST_THRESHOLD to MOST_THRESHOLD. chain_kept: how many drafts a chain kept
    lately, in 1/256.
    """

    matched: Annotated[Tensor, "slots", I32, _SLOT_STATE]
    threshold: Annotated[Tensor, "slots", I32, _SLOT_STATE]
    chain_kept: Annotated[Tensor, "slots", I32, _SLOT_STATE]


class Found(NamedTuple):
    """drafts [B, D] int64: those that the slots are left with. matches [B, 2] int64: the match lengths of the
    drafts that the round verified, and of `drafts`; 0 for a chain's."""

    drafts: Annotated[Tensor, "B num_drafts", I64]
    matches: Annotated[Tensor, "B 2", I64]


# A kernel keeps a length and a place in 31 bits.
_MOST_POSITIONS = 1 << 26


def _sizes_fit(num_drafts: int, S: int, positions: int) -> None:
    if positions > _MOST_POSITIONS:
        raise fail("token_ids", f"have at most {_MOST_POSITIONS} positions", positions, "lower max_model_len")
    if num_drafts < max(S, 1):
        raise fail("drafts", f"hold {max(S, 1)} ids a slot", num_drafts, "make SlotState for that depth")


# The search reads the text at once where the draft's first product came after the last tokens.
@operator(
    mutates=("drafts", "matched", "threshold", "chain_kept"),
    launches=(
        Launch("search_kernel", reads_early=("token_ids", "state_index", "pos"), early_if="early"),
        Launch("choose_kernel", reads_early=("state_index",)),
    ),
    check=_sizes_fit,
    has_cpu_route=True,
)
def find_drafts(
    token_ids: Annotated[Tensor, "slots positions", I32, _SLOT_STATE],
    state_index: Annotated[Tensor, "B", I32],
    pos: Annotated[Tensor, "slots", I64, _SLOT_STATE],
    chain: Annotated[Tensor, "B S", I64],
    lookup: LookupState,
    drafts: Annotated[Tensor, "slots num_drafts", I64, _SLOT_STATE],
    accepted: Annotated[Tensor, "B W2", I64, Remedy("pass the first result of accept_window")] | None = None,
    early: bool = True,
) -> Found:
    """Leave each slot with drafts from its own text if its last ids stood there before, else with its
    chain's.

    token_ids [slots, N]: the ids at positions 0 .. pos[slot] of each slot, -1 for one that is neither matched
    nor drafted. state_index [B], 0 for padding. A match is the longest suffix of at most MOST_MATCH ids that
    ends at an earlier position too; of equal lengths, the latest position. The ids after it are the drafts; a
    match that runs into the end continues into itself, so that a period goes on. After an id of -1 drafts are
    id 0. If the match has at least threshold[slot] / 256 ids, the slot gets these drafts; else chain [B, S],
    then id 0. Mutates drafts [slots, D], D >= S, and matched. accepted [B, 2 + W]: `packed` of accept_window
    for the round before, None for a first token. Looked-up drafts of that round lower the threshold by 1 id
    for each that was kept beyond what a chain keeps, chain_kept or all, and raise it by 1 id, at most by
    RISE, for each that was missing. A chain's drafts change chain_kept. In a round without looked-up drafts a
    threshold above MOST_MATCH falls by 1 id. A slot whose pos is N or more matches nothing: its request has
    reached max_model_len. Integers only, so all ranks agree. The padding keeps zeros. early: a fence
    (`Launch`) came after the kernel that wrote the last tokens.
    """
    found = []
    for request, slot in enumerate(state_index.tolist()):
        verify = 0 if accepted is None else accepted.shape[1] - 3
        verified = int(lookup.matched[slot]) if verify else 0
        if not slot:
            found.append(([0] * drafts.shape[1], 0, 0))
            continue
        if accepted is not None:
            _learn(lookup, slot, kept=int(accepted[request, 0]) - 1, verify=verify)
        last = int(pos[slot])
        ids = token_ids[slot, : last + 1]
        length, place = _longest_match(ids) if last < token_ids.shape[1] else (0, 0)
        row = [*chain[request].tolist(), *[0] * (drafts.shape[1] - chain.shape[1])]
        if length * UNIT >= int(lookup.threshold[slot]):
            row = _continue(ids, place, drafts.shape[1])
        else:
            length = 0
        drafts[slot] = torch.tensor(row)
        lookup.matched[slot] = length
        found.append((row, verified, length))
    rows, before, after = zip(*found, strict=True)
    matches = torch.tensor([before, after], dtype=torch.int64, device=drafts.device).t().contiguous()
    return Found(torch.tensor(rows, dtype=torch.int64, device=drafts.device), matches)


def _learn(lookup: LookupState, slot: int, kept: int, verify: int) -> None:
    """Change a slot's threshold or its mean by a round that kept `kept` of `verify` drafts."""
    threshold, chain_kept = int(lookup.threshold[slot]), int(lookup.chain_kept[slot])
    if verify and int(lookup.matched[slot]):
        gained = kept * UNIT - max(min(chain_kept, verify * UNIT), LEAST_KEPT)
        lookup.threshold[slot] = min(max(threshold - max(gained, -RISE), LEAST_THRESHOLD), MOST_THRESHOLD)
        return
    if verify:
        lookup.chain_kept[slot] = chain_kept + ((kept * UNIT - chain_kept) >> DECAY)
    if threshold > MOST_MATCH * UNIT:
        lookup.threshold[slot] = threshold - UNIT


def _longest_match(ids: Tensor) -> tuple[int, int]:
    """Return the length of the longest match in ids [n], 0 if below LEAST_MATCH, and where it ends."""
    last = len(ids) - 1
    lengths, is_open = ids.new_zeros(last), torch.ones(last, dtype=torch.bool, device=ids.device)
    for back in range(min(MOST_MATCH, last)):
        # Position j - back holds the id that is `back` before the last one.
        is_open[:back] = False
        is_open[back:] &= (ids[: last - back] == ids[last - back]) & (ids[last - back] >= 0)
        lengths += is_open
    longest = int(lengths.max()) if last > 0 else 0
    if longest < LEAST_MATCH:
        return 0, 0
    return longest, int((lengths == longest).nonzero()[-1])


def _continue(ids: Tensor, place: int, count: int) -> list[int]:
    """Return `count` drafts: what follows position `place` in ids [n], again and again up to its end."""
    period = len(ids) - 1 - place
    after = ids[place + 1 :].tolist()
    drafts = [after[k % period] for k in range(count)]
    end = next((k for k, draft in enumerate(drafts) if draft < 0), count)
    return drafts[:end] + [0] * (count - end)
