"""What a launch gives its requests: one record, and one tensor in which it leaves the device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class OutputRow(NamedTuple):
    """What one request gained, on the host; the fields of StepOutput."""

    num_new: int
    num_finite: int
    tokens: list[int]
    drafts: list[int]


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
    def unpack(packed: torch.Tensor, num_tokens: int) -> list[OutputRow]:
        """The requests' rows of `packed` [B, 2 + num_tokens + S], which must be ready to be read."""
        end = 2 + num_tokens
        return [OutputRow(row[0], row[1], row[2:end], row[end:]) for row in packed.tolist()]
