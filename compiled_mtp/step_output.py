"""The outputs of a launch: a record of tensors, and its packed form for one copy to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from compiled_mtp.ops.row_logprobs import NUM_TOP, RowLogprobs
from compiled_mtp.ops.window import Accepted

# Columns of the packed form: num_new, num_finite, then the tokens.
_FIRST = 2
# Log probability, rank and entropy of a token, then the likeliest ids and their log probabilities.
_LOGPROB_WIDTH = 3 + 2 * NUM_TOP
NUM_MATCHES = 2
# From this many rows on a view without drafts saves the host more than it costs: drafts may be 15 of 23
# columns.
_MANY_ROWS = 16


class OutputRow(NamedTuple):
    """What one request gained, on the host: the fields of StepOutput.

    is_masked: the row after the first num_finite was not drawn from because all its ids are masked. matches
    is empty without lookup.
    """

    num_new: int
    num_finite: int
    tokens: list[int]
    drafts: list[int]
    is_masked: bool
    matches: list[int]


class HostOutput(Sequence[OutputRow]):
    """A packed StepOutput on the host, one row per request.

    Methods read whole columns: at 32 requests, making a record of each row would take longer than all else in
    reading a result.
    """

    def __init__(self, rows: list[list[int]], num_tokens: int, *, has_matches: bool = False) -> None:
        self._rows = rows
        self._end = _FIRST + num_tokens
        self._first_draft = self._end + has_matches * NUM_MATCHES

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[index]
        is_masked = row[1] < 0
        num_finite = -1 - row[1] if is_masked else row[1]
        tokens, matches = row[_FIRST : self._end], row[self._end : self._first_draft]
        return OutputRow(row[0], num_finite, tokens, row[self._first_draft :], is_masked, matches)

    def drawn_tokens(self, count: int) -> list[list[int]]:
        """Return the new tokens of each of the first `count` requests, up to one that could not be drawn."""
        return [row[_FIRST : _FIRST + (row[1] if row[1] >= 0 else -1 - row[1])] for row in self._rows[:count]]

    def undrawn(self, count: int) -> list[int]:
        """Return the indices, among the first `count` requests, of those with a token that could not be
        drawn.
        """
        return [index for index, row in enumerate(self._rows[:count]) if row[1] < row[0]]

    def drafts(self, count: int) -> list[list[int]]:
        """Return the drafts of the first `count` requests."""
        return [row[self._first_draft :] for row in self._rows[:count]]

    def matches(self, count: int) -> list[list[int]]:
        """Return the match lengths of the first `count` requests."""
        return [row[self._end : self._first_draft] for row in self._rows[:count]]


class StepOutput(NamedTuple):
    """The outputs of B requests, int64, one row per request; padding rows come last.

    num_new [B]: tokens gained, 0 for padding. num_finite [B]: how many of these, from the first on, could be
    drawn; a request whose num_finite is below num_new must end there, because the next row's logits are not
    finite. It is -1 - num_finite if all ids of that row are masked instead. tokens [B, W]: the first num_new
    are the request's. drafts [B, S]: the drafts of the next round. matches [B, 2], with lookup: the match
    lengths of the drafts that the round verified and of `drafts`, 0 for a chain's.
    """

    num_new: torch.Tensor
    num_finite: torch.Tensor
    tokens: torch.Tensor
    drafts: torch.Tensor
    matches: torch.Tensor | None = None

    def pack(self) -> torch.Tensor:
        """Return the record as one tensor [B, 2 + W + S], or [B, 2 + W + 2 + S] with matches, for one copy to
        the host."""
        head = (self.num_new[:, None], self.num_finite[:, None], self.tokens)
        matches = () if self.matches is None else (self.matches,)
        return torch.cat((*head, *matches, self.drafts), dim=1)

    @staticmethod
    def unpack(
        packed: torch.Tensor,
        num_tokens: int,
        *,
        num_logprobs: int = 0,
        has_matches: bool = False,
        wants_drafts: bool = True,
    ) -> HostOutput:
        """Return the rows of `packed`, whose copy must be complete.

        num_logprobs: how often `pack_logprobs` has appended columns, which are left out. has_matches: it
        holds matches. Without wants_drafts the rows of many requests have no drafts.
        """
        end = packed.shape[1] - num_logprobs * num_tokens * _LOGPROB_WIDTH
        if not wants_drafts and len(packed) >= _MANY_ROWS:
            end = _FIRST + num_tokens + has_matches * NUM_MATCHES
        rows = (packed if end == packed.shape[1] else packed[:, :end]).tolist()
        return HostOutput(rows, num_tokens, has_matches=has_matches)


class LeftDrafts(NamedTuple):
    """The drafts [B, S] that a launch leaves, and `matches` of StepOutput: None without lookup."""

    ids: torch.Tensor
    matches: torch.Tensor | None


def pack_round(accepted: Accepted, left: LeftDrafts) -> torch.Tensor:
    """Return the packed StepOutput of a round."""
    head = accepted.packed
    return StepOutput(head[:, 0], head[:, 1], head[:, 2:], left.ids, left.matches).pack()


def pack_logprobs(packed: torch.Tensor, logprobs: RowLogprobs) -> torch.Tensor:
    """Return `packed` [B, n] and the logprobs of its B * W tokens as more columns: bits of 32-bit numbers."""
    logprob, rank, top_ids, top_logprobs, entropy = logprobs
    numbers = torch.stack((logprob, entropy), dim=1).view(torch.int32)
    columns = [numbers, rank[:, None], top_ids, top_logprobs.view(torch.int32)]
    added = torch.cat(columns, dim=1).to(torch.int64)
    return torch.cat((packed, added.view(packed.shape[0], -1)), dim=1)


def unpack_logprobs(packed: torch.Tensor, num_tokens: int) -> list[RowLogprobs]:
    """Return what `pack_logprobs` appended last, for each request's num_tokens tokens."""
    added = packed[:, -num_tokens * _LOGPROB_WIDTH :].to(torch.int32)
    rows = added.reshape(packed.shape[0], num_tokens, _LOGPROB_WIDTH)
    values = rows.view(torch.float32)
    split = 3 + NUM_TOP
    return [
        RowLogprobs(own_values[:, 0], own[:, 2], own[:, 3:split], own_values[:, split:], own_values[:, 1])
        for own, own_values in zip(rows, values, strict=True)
    ]


def split_logprobs(packed: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, list[RowLogprobs]]:
    """Undo the last `pack_logprobs` of requests of num_tokens tokens."""
    end = packed.shape[1] - num_tokens * _LOGPROB_WIDTH
    return packed[:, :end], unpack_logprobs(packed, num_tokens)
