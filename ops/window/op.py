"""Checks and registration of read_window and accept_window."""

from __future__ import annotations

from typing import Any

import torch

from compiled_mtp.ops.checks import check_contiguous, check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.registry import register
from compiled_mtp.ops.window import reference


def _check(
    state_index: torch.Tensor,
    cursors: dict[str, torch.Tensor],
    table: torch.Tensor,
    mtp_step: int,
    block_size: int,
    end: int,
) -> None:
    """What both operators ask of the slots' rows."""
    check_shape("state_index", state_index, (None,), "pass one slot a request")
    check_dtype("state_index", state_index, (torch.int32,), "cast it")
    check_contiguous("state_index", state_index)
    for name, tensor in cursors.items():
        check_shape(name, tensor, (None,), "pass the rows of SlotState")
        check_dtype(name, tensor, (torch.int64,), "keep cursors and token ids in int64")
        check_contiguous(name, tensor)
    check_dtype("block table", table, (torch.int32,), "keep block ids in int32")
    check_last_contiguous("block table", table)
    if not 0 <= mtp_step <= reference.MAX_MTP_STEP:
        raise fail("mtp_step", f"be 0 to {reference.MAX_MTP_STEP}", mtp_step, "draft fewer tokens")
    if end < 1 or table.shape[1] * block_size < end:
        raise fail(
            "end",
            f"be 1 to {table.shape[1]} blocks of {block_size} positions",
            end,
            "pass max_model_len, and a block table that holds it",
        )


def _fake_read_window(
    state_index: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
    last_token: torch.Tensor,
    drafts: torch.Tensor,
    block_table: torch.Tensor,
    mtp_step: int,
    block_size: int,
    end: int,
) -> tuple[torch.Tensor, ...]:
    batch = state_index.shape[0]
    rows = [pos.new_empty((batch * (mtp_step + 1),)) for _ in range(4)]
    table = block_table.new_empty((batch, block_table.shape[1]))
    return (pos.new_empty((batch,)), pos.new_empty((batch,)), *rows, table)


def _launch_read_window(*args: Any) -> Any:
    from compiled_mtp.ops.window.kernel import launch_read_window

    return launch_read_window(*args)


def _check_read_window(
    state_index: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
    last_token: torch.Tensor,
    drafts: torch.Tensor,
    block_table: torch.Tensor,
    mtp_step: int,
    block_size: int,
    end: int,
) -> None:
    check_shape("block_table", block_table, (None, None), "pass SlotState.block_table")
    cursors = {"base": base, "pos": pos, "last_token": last_token}
    _check(state_index, cursors, block_table, mtp_step, block_size, end)
    check_shape("drafts", drafts, (pos.shape[0], None), "pass SlotState.drafts")
    check_dtype("drafts", drafts, (torch.int64,), "keep token ids in int64")
    check_last_contiguous("drafts", drafts)
    if drafts.shape[1] < mtp_step:
        raise fail("drafts", f"hold {mtp_step} ids a slot", drafts.shape[1], "make SlotState for that depth")


_read_window = register(
    "read_window",
    reference.read_window,
    _fake_read_window,
    launch=_launch_read_window,
    check=_check_read_window,
)


def read_window(
    state_index: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
    last_token: torch.Tensor,
    drafts: torch.Tensor,
    block_table: torch.Tensor,
    mtp_step: int,
    block_size: int,
    end: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The W = mtp_step + 1 rows that verify the drafts of B requests: last token, then the drafts.

    state_index [B] int32, 0 for padding; base, pos, last_token [slots], drafts [slots, >= mtp_step] int64;
    block_table [slots, blocks] int32, -1 where nothing is reserved. `end` is the position from which on
    nothing is written (max_model_len). Mutates nothing. Returns base [B], pos [B], tokens [B * W], positions
    [B * W] (below `end`), KV slots [B * W] (-1: no write), positions of the tokens that the rows sample
    [B * W] (pos + 1 + k), all int64, and the requests' block tables [B, blocks] int32. Raises ValueError for
    shapes and dtypes that do not fit.
    """
    return _read_window(state_index, base, pos, last_token, drafts, block_table, mtp_step, block_size, end)


def _fake_accept_window(
    tokens: torch.Tensor,
    sampled: torch.Tensor,
    state_index: torch.Tensor,
    start: torch.Tensor,
    table: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
    last_token: torch.Tensor,
    mtp_step: int,
    *_: int,
) -> tuple[torch.Tensor, ...]:
    batch, window = start.shape[0], mtp_step + 1
    shapes = ((batch, 1 + window), (batch,), (batch,), (batch * window,), (batch * window,))
    chain = (mtp_step, batch + batch % 2)
    return tuple(start.new_empty(shape) for shape in (*shapes, chain, chain))


def _launch_accept_window(*args: Any) -> Any:
    from compiled_mtp.ops.window.kernel import launch_accept_window

    return launch_accept_window(*args)


def _check_accept_window(
    tokens: torch.Tensor,
    sampled: torch.Tensor,
    state_index: torch.Tensor,
    start: torch.Tensor,
    table: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
    last_token: torch.Tensor,
    mtp_step: int,
    block_size: int,
    end: int,
    hash_limit: int,
) -> None:
    batch = state_index.shape[0]
    check_shape("table", table, (batch, None), "pass what read_window returned")
    cursors = {"tokens": tokens, "sampled": sampled, "start": start}
    cursors |= {"base": base, "pos": pos, "last_token": last_token}
    _check(state_index, cursors, table, mtp_step, block_size, end)
    check_shape("start", start, (batch,), "pass what read_window returned")
    for name, tensor in (("tokens", tokens), ("sampled", sampled)):
        check_shape(name, tensor, (batch * (mtp_step + 1),), "pass mtp_step + 1 rows a request")
    check_contiguous("table", table)


_accept_window = register(
    "accept_window",
    reference.accept_window,
    _fake_accept_window,
    mutates=("base", "pos", "last_token"),
    launch=_launch_accept_window,
    check=_check_accept_window,
)


def accept_window(
    tokens: torch.Tensor,
    sampled: torch.Tensor,
    state_index: torch.Tensor,
    start: torch.Tensor,
    table: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
    last_token: torch.Tensor,
    mtp_step: int,
    block_size: int,
    end: int,
    hash_limit: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keep the leading drafts that agree with what was sampled, commit them, and place the draft's rows.

    tokens, sampled [B * W] int64, W = mtp_step + 1: the window, and row k's sample, the request's token after
    row k if the k drafts before it are right. start [B] int64 and table [B, blocks] int32 are read_window's,
    as are state_index, block_size and end. Mutated [slots] int64: base becomes start, pos start + num_new,
    last_token the last of the num_new = num_accepted + 1 new tokens; a padding row keeps zeros, with num_new
    0. hash_limit -1; else, for benchmarks, drafts agree where a hash of their position is below hash_limit of
    65536.
    Returns, all int64: num_new and the samples [B, 1 + W]; the row [B] among B * W whose sample is the last
    new token, and that token [B]; positions and KV slots [B * W] of the pairs (sample k, hidden k) at
    start + 1 + k; and those of the chain [mtp_step, P], row i at start + num_new + 1 + i, in the first B of
    P = B + B % 2 columns. Raises ValueError for shapes and dtypes that do not fit.
    """
    return _accept_window(
        tokens, sampled, state_index, start, table, base, pos, last_token,
        mtp_step, block_size, end, hash_limit,
    )  # fmt: skip
