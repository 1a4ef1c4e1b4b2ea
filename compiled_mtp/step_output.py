"""What a launch gives its requests: one record, and one tensor in which it leaves the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

# Columns of the packed form: num_new, num_finite, then the tokens.
_FIRST = 2


class OutputRow(NamedTuple):
    """What one request gained, on the host; the fields of StepOutput."""

    num_new: int
    num_finite: int
    tokens: list[int]
    drafts: list[int]


class HostOutput(Sequence[OutputRow]):
    """A packed StepOutput on the host, a row a request. At 32 requests a record for each would take longer
    than all the rest of reading a result, so whole columns are read without."""

    def __init__(self, rows: list[list[int]], num_tokens: int) -> None:
        self._rows = rows
        self._end = _FIRST + num_tokens

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[index]
        return OutputRow(row[0], row[1], row[_FIRST : self._end], row[self._end :])

    def finite_tokens(self, count: int) -> list[list[int]]:
        """Of the first `count` requests, the new tokens before one that is not drawn from finite logits."""
        return [row[_FIRST : _FIRST + row[1]] for row in self._rows[:count]]

    def not_finite(self, count: int) -> tuple[int, ...]:
        """Those of the first `count` requests, by index, that have such a token."""
        return tuple([index for index, row in enumerate(self._rows[:count]) if row[1] < row[0]])

    def drafts(self, count: int) -> list[list[int]]:
        """The drafts of the first `count` requests."""
        return [row[self._end :] for row in self._rows[:count]]


class StepOutput(NamedTuple):
    """All int64, a row for each of B requests, of which padding rows come last.

    num_new [B]: tokens gained, 0 for padding. num_finite [B]: how many of these, from the first on, were
    drawn from logits that are finite; a request whose num_finite is below num_new must end there. tokens
    [B, W]: of which the first num_new are the request's. drafts [B, S]: those of the next round.
    """

    num_new: torch.Tensor
    num_finite: torch.Tensor
    tokens: torch.Tensor
    drafts: torch.Tensor

    def pack(self) -> torch.Tensor:
        """The record as one tensor [B, 2 + W + S], for one copy to the host."""
        return torch.cat((self.num_new[:, None], self.num_finite[:, None], self.tokens, self.drafts), dim=1)

    @staticmethod
    def unpack(packed: torch.Tensor, num_tokens: int) -> HostOutput:
        """The requests' rows of `packed` [B, 2 + num_tokens + S], which must be ready to be read."""
        return HostOutput(packed.tolist(), num_tokens)
