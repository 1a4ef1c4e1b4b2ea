"""The shapes a step runs in: static inputs for each, compiled ahead or run as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.graphs.buckets import Bucket, pick, pick_prefill_length, prefill_lengths
from compiled_mtp.graphs.compile import (
    GraphMode,
    Program,
    capture,
    compile_program,
    compiler_settings,
    load_program,
    mark_static,
    save_program,
    without_collector,
)
from compiled_mtp.step import Step

# The first call compiles, the second records a CUDA graph, the third replays it.
_WARM_UP_CALLS = 3
_LAYOUT_NAME = "layout.json"


@dataclass(frozen=True)
class _Shape:
    """One program: a method of Step, and the static inputs it is compiled for."""

    name: str
    method: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    key: Bucket | int | None = None


class Programs:
    """Runs decode rounds and prefill chunks of `step` in fixed shapes.

    Compiled, `warm_up` compiles every shape and nothing compiles afterwards; uncompiled, prefill chunks are
    not padded. graph_mode says how compiled code becomes CUDA graphs, None that it does not. Inputs are
    copied to the device only when they change.
    """

    def __init__(
        self,
        step: Step,
        buckets: Sequence[Bucket],
        prefill_chunk: int,
        *,
        is_compiled: bool,
        graph_mode: GraphMode | None,
    ) -> None:
        self.step = step
        self.buckets = tuple(buckets)
        self.lengths = prefill_lengths(prefill_chunk)
        self.is_compiled = is_compiled
        self.graph_mode = graph_mode
        self.device = step.slots.pos.device
        self._batches: dict[Bucket, tuple[int, ...]] = {}
        self._decode_inputs = {b: self._zeros(b.groups, torch.int32) for b in self.buckets}
        self._prefill_inputs = {n: self._zeros(n, torch.int64) for n in self.lengths}
        self._prefill_slot = self._zeros(1, torch.int32)
        self._start, self._length = self._zeros(1, torch.int64), self._zeros(1, torch.int64)
        # A captured graph records no gradients anyhow: only what runs as code has to be told.
        without_gradients = torch.no_grad()
        self._decode: dict[Bucket, Program] = dict.fromkeys(self.buckets, without_gradients(step.decode))
        self._prefill: dict[int, Program] = dict.fromkeys(self.lengths, without_gradients(step.prefill))
        self._first_token: Program = without_gradients(step.first_token)

    @property
    def count(self) -> int:
        """Number of shapes that `warm_up` compiles."""
        return len(self.buckets) + len(self.lengths) + 1

    def decode(self, slots: tuple[int, ...]) -> torch.Tensor:
        """One decode round of the requests in `slots`; returns what `Step.decode` does, padding rows last."""
        bucket = pick(self.buckets, len(slots))
        state_index = self._decode_inputs[bucket]
        if self._batches.get(bucket) != slots:
            self._batches.pop(bucket, None)  # in case the upload fails
            self._upload(state_index, slots + (0,) * (bucket.groups - len(slots)))
            self._batches[bucket] = slots
        return self._call(self._decode[bucket], (state_index,))

    def prefill(self, slot: int, token_ids: Sequence[int], start: int, is_last: bool) -> torch.Tensor:
        """One chunk of the prompt in `slot`; returns y_0 [1] after the last one, else an unread [1]."""
        count = len(token_ids)
        length = pick_prefill_length(self.lengths, count)
        buffer = self._prefill_inputs[length]
        # Beyond `count` an uncompiled chunk ends; a compiled one has padding that Step.prefill masks.
        tokens = buffer if self.is_compiled else buffer[:count]
        self._upload(buffer[:count], token_ids)
        self._upload(self._prefill_slot, (slot,))
        self._upload(self._start, (start,))
        self._upload(self._length, (count,))
        inputs = (tokens, self._prefill_slot, self._start, self._length)
        self._call(self._prefill[length], inputs)
        if not is_last:
            return self._length
        return self._call(self._first_token, (self._prefill_slot,))

    def forget_batches(self) -> None:
        """Upload every batch again: an upload may have been interrupted."""
        self._batches.clear()

    @torch.no_grad()
    def warm_up(self, progress: Callable[[int, int], None] | None = None, saved: Path | None = None) -> None:
        """Compile every shape, on padding rows alone; with graphs, capture them.

        With `saved`, a directory that `save` has filled, nothing is compiled: programs are loaded. Mutates
        nothing that a request reads. Calls progress(done, count) after each shape. Raises ValueError if the
        saved programs were made for tensors of another layout.
        """
        assert self.is_compiled
        with nullcontext() if saved is None else without_collector():
            self._prepare_all(progress, saved)

    def _prepare_all(self, progress: Callable[[int, int], None] | None, saved: Path | None) -> None:
        self._mark_static()
        if saved is not None:
            self._check_layout(saved)
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        if self.device.type == "cuda":
            # What operators keep for ever (counters of split sums) must not lie in a CUDA graph's pool.
            self.step.decode(self._decode_inputs[self.buckets[-1]])
            self.step.first_token(self._prefill_slot)
        self._length.fill_(1)
        with compiler_settings():
            for done, shape in enumerate(self._shapes()):
                program = self._prepare(shape, pool, saved)
                if isinstance(shape.key, Bucket):
                    self._decode[shape.key] = program
                elif shape.key is None:
                    self._first_token = program
                else:
                    self._prefill[shape.key] = program
                if progress is not None:
                    progress(done + 1, self.count)
        self.step.slots.clear_padding_row()

    @torch.no_grad()
    def save(self, directory: Path) -> None:
        """Write every program to `directory`, for `warm_up` in another process.

        CUDA-graph trees live in the process that recorded them: with "reduce-overhead" nothing is written,
        and what the compiler cached has to do.
        """
        if self.graph_mode == "reduce-overhead":
            return
        self._mark_static()
        directory.mkdir()
        with compiler_settings():
            for shape in self._shapes():
                save_program(shape.method, self.step, shape.inputs, directory / shape.name)
        (directory / _LAYOUT_NAME).write_text(json.dumps(self._layout()))

    def _shapes(self) -> Iterator[_Shape]:
        """The largest first, so that the pool of the CUDA graphs need not grow again."""
        for bucket in reversed(self.buckets):
            name = f"decode_{bucket.rows}_rows_{bucket.mtp_step}_drafts"
            yield _Shape(name, Step.decode, (self._decode_inputs[bucket],), bucket)
        yield _Shape("first_token", Step.first_token, (self._prefill_slot,))
        for length in reversed(self.lengths):
            inputs = (self._prefill_inputs[length], self._prefill_slot, self._start, self._length)
            yield _Shape(f"prefill_{length}", Step.prefill, inputs, length)

    def _prepare(self, shape: _Shape, pool: Any, saved: Path | None) -> Program:
        # Prefill is compute-bound and launched once a chunk: a graph would gain nothing and hold memory.
        graph_mode = None if shape.method is Step.prefill else self.graph_mode
        if saved is not None:
            program = load_program(saved / shape.name, self.step)
        else:
            bound = partial(shape.method, self.step)
            program = compile_program(bound, shape.name, graph_mode)
        for _ in range(_WARM_UP_CALLS if graph_mode == "reduce-overhead" else 1):
            self._call(program, shape.inputs)
        return capture(program, shape.inputs, pool) if graph_mode == "replay" else torch.no_grad()(program)

    def _mark_static(self) -> None:
        mark_static([*self.step.parameters(), *self.step.buffers()])
        mark_static([*self._decode_inputs.values(), *self._prefill_inputs.values()])
        mark_static([self._prefill_slot, self._start, self._length])

    def _layout(self) -> dict[str, Any]:
        """What saved programs assume of the tensors they are given."""
        tensors = [*self.step.named_parameters(), *self.step.named_buffers()]
        return {name: [list(t.shape), list(t.stride()), str(t.dtype)] for name, t in tensors}

    def _check_layout(self, saved: Path) -> None:
        stored, wanted = json.loads((saved / _LAYOUT_NAME).read_text()), self._layout()
        for name in sorted(stored.keys() | wanted.keys()):
            if stored.get(name) != wanted.get(name):
                raise ValueError(
                    f"graph_cache must be made for {name}={wanted.get(name)}, got {stored.get(name)}; export "
                    "it again with tools/export_graphs.py"
                )

    def _call(self, program: Program, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self.graph_mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        return program(*inputs)

    def _zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def _upload(self, static: torch.Tensor, values: Sequence[int]) -> None:
        host = torch.tensor(values, dtype=static.dtype)
        # The caching host allocator keeps a pinned block until the copy that reads it has run.
        static.copy_(host.pin_memory() if static.is_cuda else host, non_blocking=True)
