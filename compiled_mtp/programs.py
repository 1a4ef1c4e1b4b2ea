"""The shapes a step runs in: static inputs for each, compiled ahead or run as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from compiled_mtp.graphs.buckets import Bucket, pick, pick_prefill_length, prefill_lengths
from compiled_mtp.graphs.compile import (
    GraphMode,
    Program,
    capture,
    compile_program,
    compiler_settings,
    mark_static,
)
from compiled_mtp.step import Step

# The first call compiles, the second records a CUDA graph, the third replays it.
_WARM_UP_CALLS = 3


class Programs:
    """Runs decode rounds and prefill chunks of `step` in fixed shapes.

    With a graph mode, `warm_up` compiles every shape and nothing compiles afterwards; without one the step
    runs uncompiled and prefill chunks are not padded. Inputs are copied to the device only when they
    change.
    """

    def __init__(
        self, step: Step, buckets: Sequence[Bucket], prefill_chunk: int, mode: GraphMode | None
    ) -> None:
        self.step = step
        self.buckets = tuple(buckets)
        self.lengths = prefill_lengths(prefill_chunk)
        self.mode = mode
        self.device = step.slots.pos.device
        self._batches: dict[Bucket, tuple[int, ...]] = {}
        self._decode_inputs = {b: self._zeros(b.groups, torch.int32) for b in self.buckets}
        self._prefill_inputs = {n: self._zeros(n, torch.int64) for n in self.lengths}
        self._prefill_slot = self._zeros(1, torch.int32)
        self._start, self._length = self._zeros(1, torch.int64), self._zeros(1, torch.int64)
        self._decode: dict[Bucket, Program] = dict.fromkeys(self.buckets, step.decode)
        self._prefill: dict[int, Program] = dict.fromkeys(self.lengths, step.prefill)
        self._first_token: Program = step.first_token

    @property
    def count(self) -> int:
        """Number of shapes that `warm_up` compiles."""
        return len(self.buckets) + len(self.lengths) + 1

    def decode(self, slots: tuple[int, ...]) -> torch.Tensor:
        """One decode round of the requests in `slots`; returns what `Step.decode` does, padding rows last."""
        bucket = pick(self.buckets, len(slots))
        state_index = self._decode_inputs[bucket]
        if self._batches.get(bucket) != slots:
            self._upload(state_index, slots + (0,) * (bucket.groups - len(slots)))
            self._batches[bucket] = slots
        return self._call(self._decode[bucket], (state_index,))

    def prefill(self, slot: int, token_ids: Sequence[int], start: int, is_last: bool) -> torch.Tensor:
        """One chunk of the prompt in `slot`; returns y_0 [1] after the last one, else an unread [1]."""
        count = len(token_ids)
        length = pick_prefill_length(self.lengths, count)
        buffer = self._prefill_inputs[length]
        # Beyond `count` an uncompiled chunk ends; a compiled one has padding that Step.prefill masks.
        tokens = buffer if self.mode is not None else buffer[:count]
        self._upload(buffer[:count], token_ids)
        self._upload(self._prefill_slot, (slot,))
        self._upload(self._start, (start,))
        self._upload(self._length, (count,))
        inputs = (tokens, self._prefill_slot, self._start, self._length)
        self._call(self._prefill[length], inputs)
        if not is_last:
            return self._length
        return self._call(self._first_token, (self._prefill_slot,))

    @torch.no_grad()
    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every shape, on padding rows alone; with graphs, capture them.

        Mutates nothing that a request reads. Calls progress(done, count) after each shape.
        """
        assert self.mode is not None
        mark_static([*self.step.parameters(), *self.step.buffers()])
        mark_static([*self._decode_inputs.values(), *self._prefill_inputs.values()])
        mark_static([self._prefill_slot, self._start, self._length])
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        done = 0
        if self.device.type == "cuda":
            # What operators keep for ever (counters of split sums) must not lie in a CUDA graph's pool.
            self.step.decode(self._decode_inputs[self.buckets[-1]])
            self.step.first_token(self._prefill_slot)
        with compiler_settings():
            # The largest first, so that the pool of the CUDA graphs need not grow again.
            for bucket in reversed(self.buckets):
                inputs: tuple[torch.Tensor, ...] = (self._decode_inputs[bucket],)
                name = f"decode_{bucket.rows}_rows_{bucket.mtp_step}_drafts"
                self._decode[bucket] = self._prepare(self.step.decode, name, inputs, pool)
                done = self._report(progress, done)
            inputs = (self._prefill_slot,)
            self._first_token = self._prepare(self.step.first_token, "first_token", inputs, pool)
            done = self._report(progress, done)
            for length in reversed(self.lengths):
                # Compute-bound and launched once a chunk: a graph would gain nothing and hold memory.
                program = compile_program(self.step.prefill, f"prefill_{length}", self.mode, is_graph=False)
                self._length.fill_(1)
                program(self._prefill_inputs[length], self._prefill_slot, self._start, self._length)
                self._prefill[length] = program
                done = self._report(progress, done)
        self.step.slots.clear_padding_row()

    def _prepare(self, function: Program, name: str, inputs: tuple[torch.Tensor, ...], pool: Any) -> Program:
        assert self.mode is not None
        program = compile_program(function, name, self.mode, is_graph=self.device.type == "cuda")
        is_captured = self.device.type == "cuda" and self.mode == "replay"
        for _ in range(1 if is_captured or self.device.type == "cpu" else _WARM_UP_CALLS):
            self._call(program, inputs)
        return capture(program, inputs, pool) if is_captured else program

    def _call(self, program: Program, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        return program(*inputs)

    def _report(self, progress: Callable[[int, int], None] | None, done: int) -> int:
        if progress is not None:
            progress(done + 1, self.count)
        return done + 1

    def _zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def _upload(self, static: torch.Tensor, values: Sequence[int]) -> None:
        host = torch.tensor(values, dtype=static.dtype)
        # The caching host allocator keeps a pinned block until the copy that reads it has run.
        static.copy_(host.pin_memory() if static.is_cuda else host, non_blocking=True)
