"""The tensors at static addresses from which programs read their batches and prompts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from compiled_mtp.ops.prompt_chunks import PROMPT_CHUNK_MULTIPLE
from compiled_mtp.plan import PromptChunk


class StaticInputs:
    """The static tensors, and the copies of each launch's batch or prompts into them.

    state_indices [size] int32 by batch size; token_ids [length] int64 by padded length of a prompt launch;
    prompt_chunks [5, n] int64, as `prefill` takes it, and ended [n] int32 by number of prompts. A batch is
    copied to the device only if it differs from the last one of its size.
    """

    def __init__(
        self, device: torch.device, sizes: Iterable[int], lengths: Iterable[int], max_prompt_chunks: int
    ) -> None:
        self.device = device
        counts = range(1, max_prompt_chunks + 1)
        self.state_indices = {size: self.zeros(size, torch.int32) for size in sizes}
        self.token_ids = {length: self.zeros(length, torch.int64) for length in lengths}
        self.prompt_chunks = {n: self.zeros(5 * n, torch.int64).view(5, n) for n in counts}
        self.ended = {n: self.zeros(n, torch.int32) for n in counts}
        # The slots that each of state_indices holds, where that is known.
        self._batches: dict[int, tuple[int, ...]] = {}

    def write_batch(self, size: int, slots: tuple[int, ...]) -> torch.Tensor:
        """Return the state indices of that size with `slots`, then padding."""
        state_index = self.state_indices[size]
        if self._batches.get(size) != slots:
            self._batches.pop(size, None)  # The upload may fail.
            self.upload(state_index, slots + (0,) * (size - len(slots)))
            self._batches[size] = slots
        return state_index

    def forget_batches(self) -> None:
        """Upload every batch again: an upload may have been interrupted, or its tensor overwritten."""
        self._batches.clear()

    def write_tokens(
        self, length: int, rows: int, prompt_chunks: Sequence[PromptChunk], first_rows: Sequence[int]
    ) -> torch.Tensor:
        """Return the first `rows` token ids of that padded length, with each chunk from its first row on."""
        token_ids: list[int] = []
        for first_row, prompt_chunk in zip(first_rows, prompt_chunks, strict=True):
            token_ids += [0] * (first_row - len(token_ids))
            token_ids += prompt_chunk.token_ids
        buffer = self.token_ids[length]
        self.upload(buffer[: len(token_ids)], token_ids)
        return buffer if rows == length else buffer[:rows]

    def write_prompt_chunks(
        self,
        count: int,
        slots: Sequence[int],
        prompt_chunks: Sequence[PromptChunk],
        first_rows: Sequence[int],
        end: int,
    ) -> torch.Tensor:
        """Return the table of `count` chunks for `prefill`: the given ones, then chunks without tokens at row
        `end`."""
        columns = [
            (slot, prompt_chunk.start, len(prompt_chunk.token_ids), first_row, prompt_chunk.snapshot_offset)
            for slot, prompt_chunk, first_row in zip(slots, prompt_chunks, first_rows, strict=True)
        ]
        columns += [(0, 0, 0, end, 0)] * (count - len(prompt_chunks))
        table = self.prompt_chunks[count]
        self.upload(table.view(-1), [value for row in zip(*columns, strict=True) for value in row])
        return table

    def write_ended(self, size: int, slots: Sequence[int]) -> torch.Tensor:
        """Return the state indices of `size` ended prompts with `slots`, then padding."""
        state_index = self.ended[size]
        self.upload(state_index, (*slots, *[0] * (size - len(slots))))
        return state_index

    def write_padding(self) -> None:
        """Write one token of the padding slot into every table of chunks, for warm-up runs."""
        for table in self.prompt_chunks.values():
            table[2, 0] = 1
            table[3, 1:] = PROMPT_CHUNK_MULTIPLE

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor [size] on the device."""
        return torch.zeros(size, dtype=dtype, device=self.device)

    def upload(self, static: torch.Tensor, values: Collection[int]) -> None:
        """Copy `values` to a tensor of as many entries without waiting for the device."""
        host = torch.tensor(values, dtype=static.dtype)
        # The caching host allocator keeps a pinned block until the copy that reads it has run.
        static.copy_(host.pin_memory() if static.is_cuda else host, non_blocking=True)
