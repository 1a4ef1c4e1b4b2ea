"""A round in two phases: between them the host fills the masks of grammars or takes log probabilities.

`verify` runs the forward and leaves its results in buffers that other launches do not write; `accept` draws,
accepts and drafts from them. Together they do what `Step.decode` does.
"""

from __future__ import annotations

import torch

from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.ops.sample import Sampled
from compiled_mtp.ops.window import Accepted, Window
from compiled_mtp.rounds.logprobs import filtered_logits
from compiled_mtp.step import Step
from compiled_mtp.step_output import pack_round


class TwoPhaseRound:
    """The two phases of a step's rounds, and the buffers between them, which `reserve` allocates.

    hidden [rows, H]; logits [rows, V] float32; masks [rows, words] int32, one bit per id as `sample` takes
    them, written by `write_masks` before each `accept`; window: a Window of as many rows.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.reserve(0)

    @property
    def num_rows(self) -> int:
        """The largest number of rows that a round may have."""
        return self.logits.shape[0]

    def reserve(self, rows: int) -> None:
        """Allocate new buffers for rounds of up to `rows` rows.

        An error leaves the old buffers; an interrupt leaves the old ones, the new ones, or ones without rows.
        """
        like, vocab_size = self.step.slots.last_hidden, self.step.target.vocab_size
        hidden = like.new_zeros((rows, like.shape[1]))
        masks = like.new_full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32)
        window = {}
        for name in Window._fields:
            row = self.step.slots.block_table if name == "block_table" else self.step.slots.pos
            window[name] = row.new_zeros((rows, *row.shape[1:]))
        logits = like.new_zeros((rows, vocab_size), dtype=torch.float32)
        # num_rows counts the rows of the logits: shrink these first and replace them last.
        self.logits = logits[:0]
        self.hidden, self.masks, self.window = hidden, masks, Window(**window)
        # The number of leading rows of masks that may forbid ids; later rows allow all ids.
        self._num_masked = 0
        self.logits = logits

    def verify(self, state_index: torch.Tensor, shape: RoundShape) -> None:
        """Run the first phase: leave window, hidden states and logits in the buffers. Mutates the caches."""
        window = self.step.read_window(state_index=state_index, shape=shape)
        # Copy the window before the forward, whose head is a fence: sampling and accepting read the window
        # early, and the second phase has no product before them.
        for kept, part in zip(self._window(len(state_index), shape), window, strict=True):
            kept.copy_(part)
        hidden, logits = self.step.verify(state_index=state_index, window=window)
        self.hidden[: hidden.shape[0]] = hidden
        self.logits[: logits.shape[0]] = logits

    def accept(self, state_index: torch.Tensor, shape: RoundShape) -> torch.Tensor:
        """Run the second phase of the round that `verify` began; return what `Step.decode` does.

        state_index must name the requests of that round; no launch between the phases may change their slots.
        """
        window = self._window(len(state_index), shape)
        sampled, accepted = self._draw_and_commit(state_index, window)
        left = self.step.extend_and_draft(
            state_index=state_index,
            window=window,
            tokens=self.step.round_tokens(sampled, accepted),
            hidden=self.hidden[: window.tokens.shape[0]],
            accepted=accepted,
            shape=shape,
        )
        return pack_round(accepted=accepted, left=left)

    def commit(self, state_index: torch.Tensor, shape: RoundShape) -> torch.Tensor:
        """Do what `accept` does for requests whose whole output is given: nothing reads their drafts.

        The draft model does not run, and its KV stays as it is. The drafts that it returns are ids 0.
        """
        _, accepted = self._draw_and_commit(state_index, self._window(len(state_index), shape))
        return pack_round(accepted=accepted, left=self.step.leave_nothing(state_index, shape.chain))

    def _draw_and_commit(self, state_index: torch.Tensor, window: Window) -> tuple[Sampled, Accepted]:
        rows = window.tokens.shape[0]
        logits, masks = self.logits[:rows], self.masks[:rows]
        sampled = self.step.draw_window(logits=logits, state_index=state_index, window=window, masks=masks)
        return sampled, self.step.accept_and_commit(state_index, window, sampled)

    def filtered(self, state_index: torch.Tensor, shape: RoundShape) -> torch.Tensor:
        """Between the phases: the logits [B * W, V] to which `accept` will add noise; mutates nothing."""
        window = self._window(len(state_index), shape)
        rows = window.tokens.shape[0]
        return filtered_logits(
            self.step,
            logits=self.logits[:rows],
            drafts=window.tokens.view(state_index.shape[0], -1)[:, 1:],
            positions=window.sampled_positions,
            state_index=state_index,
            masks=self.masks[:rows],
        )

    def write_masks(self, masks: torch.Tensor | None) -> None:
        """Mask the first n rows of the next `accept` by `masks` [n, words], and no other rows.

        Every accept needs this call: a failed or interrupted one leaves its masks in the buffer. A round
        without masks after another such round launches nothing here.
        """
        rows, num_stale = 0 if masks is None else masks.shape[0], self._num_masked
        # An error or an interrupt may come between any two lines: count too many masked rows, never too few.
        self._num_masked = max(rows, num_stale)
        if masks is not None:
            self.masks[:rows] = masks
        if num_stale > rows:
            self.masks[rows:num_stale] = -1
        self._num_masked = rows

    def _window(self, batch: int, shape: RoundShape) -> Window:
        """The leading rows of the window buffers, for a round of `batch` requests."""
        rows = batch * (shape.verify + 1)
        by_request = {"base": batch, "pos": batch, "block_table": batch}
        return Window(
            **{name: buffer[: by_request.get(name, rows)] for name, buffer in self.window._asdict().items()}
        )
