"""What a launch gives its requests: one record, and one tensor in which it leaves the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from compiled_mtp.ops.row_logprobs import NUM_TOP, RowLogprobs

_LOGPROB_WIDTH = 2 + 2 * NUM_TOP


class OutputRow(NamedTuple):
    """What one request gained, on the host: the fields of StepOutput.

    is_masked: the row after the first num_finite is not drawn from since every id of it is masked.
    """

    num_new: int
    num_finite: int
    tokens: list[int]
    drafts: list[int]
    is_masked: bool


class StepOutput(NamedTuple):
    """All int64, a row for each of B requests, of which padding rows come last.

    num_new [B]: tokens gained, 0 for padding. num_finite [B]: how many of these, from the first on, could be
    drawn; a request whose num_finite is below num_new must end there. It is -1 - num_finite where the row
    behind these has no id that is not masked, else that row's logits are not finite. tokens [B, W]: of which
    the first num_new are the request's. drafts [B, S]: those of the next round.
    """

    num_new: torch.Tensor
    num_finite: torch.Tensor
    tokens: torch.Tensor
    drafts: torch.Tensor

    def pack(self) -> torch.Tensor:
        """The record as one tensor [B, 2 + W + S], for one copy to the host."""
        return torch.cat((self.num_new[:, None], self.num_finite[:, None], self.tokens, self.drafts), dim=1)

    @staticmethod
    def unpack(packed: torch.Tensor, num_tokens: int, *, has_logprobs: bool = False) -> list[OutputRow]:
        """The requests' rows of `packed` [B, 2 + num_tokens + S], which must be ready to be read.

        has_logprobs: `pack_logprobs` has added to it.
        """
        first = 2 + num_tokens
        end = packed.shape[1] - has_logprobs * num_tokens * _LOGPROB_WIDTH
        rows = []
        for row in packed[:, :end].tolist():
            is_masked = row[1] < 0
            num_finite = -1 - row[1] if is_masked else row[1]
            rows.append(OutputRow(row[0], num_finite, row[2:first], row[first:], is_masked))
        return rows


def pack_logprobs(packed: torch.Tensor, logprobs: RowLogprobs) -> torch.Tensor:
    """`packed` [B, n] with what is known of its B * W tokens behind it: the bits of 32-bit numbers."""
    logprob, rank, top_ids, top_logprobs = logprobs
    columns = [logprob[:, None].view(torch.int32), rank[:, None], top_ids, top_logprobs.view(torch.int32)]
    added = torch.cat(columns, dim=1).to(torch.int64)
    return torch.cat((packed, added.view(packed.shape[0], -1)), dim=1)


def unpack_logprobs(packed: torch.Tensor, num_tokens: int) -> list[RowLogprobs]:
    """Of each request those of its num_tokens tokens, as `pack_logprobs` has added them."""
    added = packed[:, -num_tokens * _LOGPROB_WIDTH :].to(torch.int32)
    rows = added.reshape(packed.shape[0], num_tokens, _LOGPROB_WIDTH)
    values = rows.view(torch.float32)
    split = 2 + NUM_TOP
    return [
        RowLogprobs(own_values[:, 0], own[:, 1], own[:, 2:split], own_values[:, split:])
        for own, own_values in zip(rows, values, strict=True)
    ]
