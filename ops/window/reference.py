"""The specifications of `read_window` and `accept_window`, and the placement of rows in the KV cache."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.features import ALL_MASKED, BAD_WORDS, DRAWN, PENALTIES, RECENT_IDS
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import CONTIGUOUS, I32, I64, Remedy

MAX_DRAFTS = 15
"""The most drafts of a window; with the last token they fill a row tile of 16."""
# HASH_FACTOR alone, Knuth's multiplicative hash, would space the accepted positions evenly: mix again.
HASH_FACTOR, MIX_FACTOR = 2654435761, 0x45D9F3B


def position_hash(positions: Tensor, slots: Tensor | int) -> Tensor:
    """Return a pseudorandom number in 0 .. 65535 for each position of a slot, both int64.

    A fraction p of the numbers lies below p * 65536. The slot enters the hash: otherwise slots at equal
    positions would all keep the same number of drafts.
    """
    word = (positions + slots * MIX_FACTOR) * HASH_FACTOR & 0xFFFFFFFF
    word = (word ^ (word >> 16)) * MIX_FACTOR & 0xFFFFFFFF
    return word >> 16


def place_rows(
    start: Tensor, count: int, end: int | Tensor, block_table: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return positions and kv_index, [B, count] int64, of rows start [B], start + 1, ... of each request.

    Positions are clamped below `end` (an int, or [B, 1]). kv_index is -1, which means no write, from `end` on
    and where block_table [B, blocks] int32 has no reserved block (-1) or the padding's block (0).
    """
    wanted = start[:, None] + torch.arange(count, device=start.device)
    positions = wanted.clamp(max=end - 1)
    block = block_table.gather(1, positions // block_size).to(torch.int64)
    is_written = (block > 0) & (wanted < end)
    return positions, torch.where(is_written, block * block_size + positions % block_size, -1)


def place_chain(
    start: Tensor, mtp_step: int, end: int, block_table: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return `place_rows` of the drafts at start + 1 .. start + mtp_step, transposed: [mtp_step, P] int64.

    P is B rounded up to an even number: every draft's rows then begin at a multiple of 16 bytes. The padding
    column has position 0 and kv_index -1.
    """
    batch = start.shape[0]
    positions, slots = place_rows(start + 1, mtp_step, end, block_table, block_size)
    padded_positions = positions.new_zeros((mtp_step, batch + batch % 2))
    padded_slots = torch.full_like(padded_positions, -1)
    padded_positions[:, :batch] = positions.t()
    padded_slots[:, :batch] = slots.t()
    return padded_positions, padded_slots


def committed_ids(sampled: Tensor, positions: Tensor, slots: Tensor, forced_ids: Tensor) -> Tensor:
    """Return the ids that are committed at `positions` [B, n] int64 of `slots` [B] int64: `sampled` [B, n],
    except where forced_ids [slots, max_model_len] holds an id of at least 0.
    """
    width = forced_ids.shape[1]
    forced = forced_ids[slots[:, None], positions.clamp(max=width - 1)].to(torch.int64)
    return torch.where((forced >= 0) & (positions < width), forced, sampled)


_SLOT_STATE = Remedy("pass the rows of SlotState")
_WINDOW = Remedy("pass what read_window returned")
_W_ROWS = Remedy("pass mtp_step + 1 rows a request")


class Cursors(NamedTuple):
    """Progress of each slot, [slots] int64: base and pos (see gdn_verify), and the token at pos."""

    base: Annotated[Tensor, "slots", I64, _SLOT_STATE]
    pos: Annotated[Tensor, "slots", I64, _SLOT_STATE]
    last_token: Annotated[Tensor, "slots", I64, _SLOT_STATE]


class History(NamedTuple):
    """Output history of the slots whose features have PENALTIES or BAD_WORDS.

    output_counts: how often each id was emitted; recent_ids: the id at position p in column p % RECENT_IDS.
    """

    features: Annotated[Tensor, "slots", I32, _SLOT_STATE]
    output_counts: Annotated[Tensor, "slots num_ids", I32, _SLOT_STATE]
    recent_ids: Annotated[Tensor, f"slots {RECENT_IDS}", I64, CONTIGUOUS, _SLOT_STATE]


class Window(NamedTuple):
    """The B * W verify rows, W = mtp_step + 1, and the cursors of their requests.

    base, pos [B]; tokens, positions (below `end`), kv_slots (kv_index, -1: no write) and sampled_positions
    (pos + 1 + k, the position of the token that row k samples) [B * W], all int64; block_table [B, blocks]
    int32.
    """

    base: Annotated[Tensor, "B", I64]
    pos: Annotated[Tensor, "B", I64]
    tokens: Annotated[Tensor, "B*(mtp_step+1)", I64]
    positions: Annotated[Tensor, "B*(mtp_step+1)", I64]
    kv_slots: Annotated[Tensor, "B*(mtp_step+1)", I64]
    sampled_positions: Annotated[Tensor, "B*(mtp_step+1)", I64]
    block_table: Annotated[Tensor, "B blocks", I32]


class Accepted(NamedTuple):
    """The result of verification, and the placement of the draft's rows; all int64.

    packed [B, 2 + W]: num_new, num_finite (see `accept_window`), then the W samples, or the ids forced in
    their place; the first num_new of them are the request's new tokens. accepted_row [B]: the row of B * W
    whose sample is the last new token; bonus [B]: that token. positions, kv_slots (kv_index) [B * W]: of the
    pairs (sample k, hidden k), at start + 1 + k. chain_positions, chain_slots [mtp_step, P], P = B + B % 2:
    row i of the chain, at start + num_new + 1 + i, in the first B columns.
    """

    packed: Annotated[Tensor, "B mtp_step+3", I64]
    accepted_row: Annotated[Tensor, "B", I64]
    bonus: Annotated[Tensor, "B", I64]
    positions: Annotated[Tensor, "B*(mtp_step+1)", I64]
    kv_slots: Annotated[Tensor, "B*(mtp_step+1)", I64]
    chain_positions: Annotated[Tensor, "mtp_step B+B%2", I64]
    chain_slots: Annotated[Tensor, "mtp_step B+B%2", I64]


def _table_holds_window(mtp_step: int, block_size: int, end: int, blocks: int) -> None:
    if not 0 <= mtp_step <= MAX_DRAFTS:
        raise fail("mtp_step", f"be 0 to {MAX_DRAFTS}", mtp_step, "draft fewer tokens")
    if end < 1 or blocks * block_size < end:
        rule = f"be 1 to {blocks} blocks of {block_size} positions"
        raise fail("end", rule, end, "pass max_model_len, and a block table that holds it")


def _drafts_hold_window(mtp_step: int, block_size: int, end: int, blocks: int, num_drafts: int) -> None:
    _table_holds_window(mtp_step, block_size, end, blocks)
    if num_drafts < mtp_step:
        raise fail("drafts", f"hold {mtp_step} ids a slot", num_drafts, "make SlotState for that depth")


@operator(check=_drafts_hold_window, has_cpu_route=True)
def read_window(
    state_index: Annotated[Tensor, "B", I32],
    cursors: Cursors,
    drafts: Annotated[Tensor, "slots num_drafts", I64, _SLOT_STATE],
    block_table: Annotated[Tensor, "slots blocks", I32, _SLOT_STATE],
    mtp_step: int,
    block_size: int,
    end: int,
) -> Window:
    """Return the W = mtp_step + 1 rows that verify the drafts of B requests: last token, then drafts.

    state_index [B], 0 for padding; cursors [slots]; drafts [slots, >= mtp_step]; block_table [slots, blocks],
    -1 for a block that is not reserved. Nothing is written at positions from `end` (max_model_len) on.
    """
    index, query_len = state_index.to(torch.int64), mtp_step + 1
    start, table = cursors.pos[index], block_table[index]
    tokens = torch.cat((cursors.last_token[index][:, None], drafts[index][:, :mtp_step]), dim=1)
    positions, kv_slots = place_rows(start, query_len, end, table, block_size)
    sampled_positions = start[:, None] + 1 + torch.arange(query_len, device=start.device)
    return Window(
        cursors.base[index],
        start,
        tokens.flatten(),
        positions.flatten(),
        kv_slots.flatten(),
        sampled_positions.flatten(),
        table,
    )


def _remember(history: History, index: Tensor, start: Tensor, drawn: Tensor, num_new: Tensor) -> None:
    """Add the first num_new [B] ids of drawn [B, W] to the histories of the slots that keep one."""
    is_kept = (history.features[index] & (PENALTIES | BAD_WORDS)) != 0
    for b in is_kept.nonzero().flatten().tolist():
        new = drawn[b, : int(num_new[b])]
        places = (start[b] + 1 + torch.arange(len(new), device=start.device)) % RECENT_IDS
        history.output_counts[index[b]].index_add_(0, new, torch.ones_like(new, dtype=torch.int32))
        history.recent_ids[index[b], places] = new


# The window and the features of its slots are written before the head, a fence.
@operator(
    mutates=("base", "pos", "last_token", "output_counts", "recent_ids", "token_ids"),
    launches=(
        Launch("accept_window_kernel", reads_early=("tokens", "state_index", "start", "table", "features")),
    ),
    check=_table_holds_window,
    has_cpu_route=True,
)
def accept_window(
    tokens: Annotated[Tensor, "B*(mtp_step+1)", I64, _W_ROWS],
    sampled: Annotated[Tensor, "B*(mtp_step+1)", I64, _W_ROWS],
    outcome: Annotated[Tensor, "B*(mtp_step+1)", torch.uint8, _W_ROWS],
    state_index: Annotated[Tensor, "B", I32],
    start: Annotated[Tensor, "B", I64, _WINDOW],
    table: Annotated[Tensor, "B blocks", I32, CONTIGUOUS, _WINDOW],
    cursors: Cursors,
    history: History,
    mtp_step: int,
    block_size: int,
    end: int,
    hash_limit: Annotated[Tensor, "1", I64] | None = None,
    forced_ids: Annotated[Tensor, "slots max_model_len", I32, CONTIGUOUS, _SLOT_STATE] | None = None,
    token_ids: Annotated[Tensor, "slots positions", I32, _SLOT_STATE] | None = None,
    matched: Annotated[Tensor, "slots", I32, _SLOT_STATE] | None = None,
    max_unfolded: int = 0,
) -> Accepted:
    """Accept the leading drafts that agree with the samples, commit them, and place the draft's rows.

    tokens [B * W], W = mtp_step + 1: the window. sampled [B * W]: row k's sample is the token after row k if
    the k drafts before it are right. outcome [B * W]: from `sample`. start [B] and table [B, blocks]: pos and
    block_table from read_window, which also took state_index, block_size and end.
    Mutates the cursors: base becomes start unless `gdn_verify`, with the same max_unfolded, left the states
    unfolded; pos becomes start + num_new, last_token the last of the num_new = num_accepted + 1 new tokens.
    Padding keeps zeros and has num_new 0. Mutates the history of slots that
    keep one: adds the new tokens.
    num_finite is the number of leading new tokens that were drawn. Below num_new, the row after them has a
    logit that is not finite; if instead all ids of that row are masked, packed holds -1 - num_finite.
    hash_limit [1], for benchmarks: if not negative, a draft counts as right where `position_hash` is below
    it, whatever its token.
    forced_ids [slots, max_model_len], to score given tokens: an id of at least 0 at a position is committed
    there in the place of the sample, and drafts are compared with it.
    token_ids [slots, N], N >= end, for lookup: the new tokens are also written at their positions below
    `end`. matched [slots], with both: hash_limit decides no drafts of a slot where it is above 0, which were
    looked up in the text.
    """
    index, is_live, query_len = state_index.to(torch.int64), state_index > 0, mtp_step + 1
    batch = start.shape[0]
    drawn = sampled.view(batch, query_len)
    if forced_ids is not None:
        after = start[:, None] + torch.arange(1, query_len + 1, device=start.device)
        drawn = committed_ids(drawn, after, index, forced_ids)
    agrees = tokens.view(batch, query_len)[:, 1:] == drawn[:, :-1]
    if hash_limit is not None:
        places = start[:, None] + torch.arange(1, query_len, device=start.device)
        is_compared = hash_limit < 0 if matched is None else (hash_limit < 0) | (matched[index, None] > 0)
        agrees = torch.where(is_compared, agrees, position_hash(places, index[:, None]) < hash_limit)
    num_accepted = agrees.to(torch.int64).cumprod(dim=1).sum(dim=1)
    num_new = torch.where(is_live, num_accepted + 1, 0)
    by_row = outcome.view(batch, query_len)
    leading = (by_row == DRAWN).to(torch.int64).cumprod(dim=1).sum(dim=1)
    broken = by_row.gather(1, leading.clamp(max=mtp_step)[:, None]).squeeze(1)
    is_masked = (leading < num_new) & (broken == ALL_MASKED)
    num_finite = torch.where(is_masked, -1 - leading, torch.minimum(leading, num_new))
    bonus = torch.where(is_live, drawn.gather(1, num_accepted[:, None])[:, 0], 0)
    base = cursors.base[index]
    is_unfolded = start - base + query_len <= max_unfolded
    cursors.base[index] = torch.where(is_unfolded, base, start)
    cursors.pos[index] = start + num_new
    cursors.last_token[index] = bonus
    _remember(history, index, start, drawn, num_new)
    if token_ids is not None:
        for b, first in enumerate(start.tolist()):
            count = max(min(int(num_new[b]), end - 1 - first), 0)
            token_ids[index[b], first + 1 : first + 1 + count] = drawn[b, :count].to(torch.int32)
    positions, kv_slots = place_rows(start + 1, query_len, end, table, block_size)
    chain_positions, chain_slots = place_chain(start + num_new, mtp_step, end, table, block_size)
    return Accepted(
        torch.cat((num_new[:, None], num_finite[:, None], drawn), dim=1),
        torch.arange(batch, device=start.device) * query_len + num_accepted,
        bonus,
        positions.flatten(),
        kv_slots.flatten(),
        chain_positions,
        chain_slots,
    )
