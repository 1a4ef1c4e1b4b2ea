"""The static tensors from which prefill programs read the images of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_mtp.plan import PromptChunk
from compiled_mtp.vision.encoder import Encoder
from compiled_mtp.vision.positions import rotary_positions


class ImageInputs:
    """Rotary positions, and the features that take the place of embeddings, for launches of `lengths` rows or
    fewer than the longest; all share the memory.
    """

    def __init__(
        self,
        encoder: Encoder,
        lengths: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._encoder, longest = encoder, max(lengths)
        self._rotary = torch.zeros(6 * longest, dtype=torch.int64, device=device)
        self._is_image = torch.zeros(longest, dtype=torch.bool, device=device)
        self._features = torch.zeros((longest, hidden_size), dtype=dtype, device=device)
        # A CUDA graph takes the very tensors that it was captured with.
        self._of_lengths = {length: self._views(length) for length in lengths}

    def of(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors of a launch of `rows` rows, as `prefill` takes them; always the same for a length."""
        return self._of_lengths.get(rows) or self._views(rows)

    def _views(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            self._rotary[: 6 * rows].view(2, 3, rows),
            self._is_image[:rows],
            self._features[:rows],
        )

    def write(
        self, rows: int, slots: Sequence[int], prompt_chunks: Sequence[PromptChunk], first_rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tensors of a launch with these chunks, whose images have been encoded."""
        static = rotary, is_image, features = self.of(rows)
        host = torch.zeros((2, 3, rows), dtype=torch.int64)
        flags = torch.zeros(rows, dtype=torch.bool)
        for slot, prompt_chunk, first_row in zip(slots, prompt_chunks, first_rows, strict=True):
            start, count = prompt_chunk.start, len(prompt_chunk.token_ids)
            positions = rotary_positions(prompt_chunk.images, start - 1, start + count)
            host[0, :, first_row : first_row + count] = positions[:, 1:]
            # The draft's row of a token follows the token before it.
            host[1, :, first_row : first_row + count] = positions[:, :-1] + 1
            for image, span in enumerate(prompt_chunk.images):
                begin, end = max(span.start, start), min(span.end, start + count)
                if begin < end:
                    own = slice(first_row + begin - start, first_row + end - start)
                    flags[own] = True
                    part = self._encoder.features(slot, image)[begin - span.start : end - span.start]
                    features[own].copy_(part)
        for target, values in ((rotary, host), (is_image, flags)):
            # The caching host allocator keeps a pinned block until the copy that reads it has run.
            target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
        return static
