"""Turns plans into results: launches them in order and fetches what came of them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.plan import RowLogprobs, StepPlan, StepResult
from compiled_mtp.rounds.prompt_logprobs import SLICE_ROWS
from compiled_mtp.runner.assemble import Fill, Progress, build
from compiled_mtp.runner.cache_key import early_key, late_key
from compiled_mtp.runner.spec import EngineSpec
from compiled_mtp.step_output import StepOutput, pack_logprobs, split_logprobs, unpack_logprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _HostBuffer:
    """Where a launch's packed output lands, None for one without, once `ready` has happened."""

    packed: torch.Tensor | None
    ready: torch.Event | None


class Runner:
    """Runs plans; `run` returns the result of the launch `max_in_flight` plans ago, or None.

    `waited_s` sums the seconds that `run` was blocked on the device. `fill` writes the parameters instead of
    the checkpoint's loader (benchmarks: no weights of that size are at hand). Of several ranks that hold the
    model each runs the same plans. `save_to`: a directory that does not exist yet, into which every compiled
    program is written, for a graph_cache. Raises ValueError while it is created for a checkpoint that does
    not fit its config.
    """

    def __init__(
        self,
        spec: EngineSpec,
        progress: Progress | None = None,
        fill: Fill | None = None,
        *,
        save_to: Path | None = None,
    ) -> None:
        self.spec = spec
        self.memory, self.step, self.programs, self.moves, self.later = build(spec, progress, fill, save_to)
        self.waited_s = 0.0
        # Plans whose launch has succeeded, so far.
        self.num_launched = 0
        self._is_wait_due = False
        # Launched, and not yet read; with the copies that failed.
        self._launches: deque[tuple[StepPlan, _HostBuffer, tuple[int, ...]]] = deque()
        # On the host, of plans that are still to be launched, by step_id.
        self._masks: dict[int, torch.Tensor] = {}
        # Of each shape, those that no unread launch uses.
        self._free_buffers: dict[torch.Size | None, list[_HostBuffer]] = {}

    def cache_key(self) -> dict[str, Any]:
        """What a graph_cache of these programs is made for."""
        programs, num_blocks = self.programs, self.memory.num_blocks
        return early_key(self.spec) | late_key(self.spec, programs.buckets, num_blocks, programs.graph_mode)

    def run(self, plan: StepPlan | None) -> StepResult | None:
        """Launch `plan`, if any, and return the oldest result if it is due: more launches than may be in
        flight.

        Without a plan the oldest launch is waited for. Mutates the device's state as the plan says. A launch
        that fails (memory, the device) has its error as its result, at once; what it mutated is not known.
        """
        if self._is_wait_due:
            self.moves.wait()
            self._is_wait_due = False
        if plan is not None:
            try:
                self._launches.append((plan, *self._launch(plan)))
                self.num_launched += 1
            except AssertionError:  # A bug of ours.
                raise
            except Exception as error:
                return self.fail(plan, error)
        is_due = len(self._launches) > self.spec.max_in_flight or plan is None
        return self._finish(*self._launches.popleft()) if self._launches and is_due else None

    def set_masks(self, plan: StepPlan, masks: torch.Tensor) -> None:
        """Allow `plan`, of kind first or accept, which is launched next, no other ids than its masks do.

        masks [rows, ceil(vocab_size / 32)] int32 on the host, a bit an id, the lowest first; rows are those
        of the plan's slots, shape.verify + 1 each, or the one of a first token. It may be written again at
        once after the launch. Raises ValueError for another shape or kind.
        """
        rows = len(plan.slots) * (plan.shape.verify + 1)
        shape = (rows, -(-self.spec.model.vocab_size // 32))
        if plan.kind not in ("first", "accept") or tuple(masks.shape) != shape:
            raise ValueError(
                f"masks must have shape {shape} for a first or accept plan, got {tuple(masks.shape)} for "
                f"{plan.kind}; give every row its own"
            )
        # Copied by the launch, which may fail for want of memory.
        self._masks[plan.step_id] = masks

    def drop_launches(self) -> None:
        """Forget every launch, and what an interrupted one may have left half done; wait for copies."""
        self._launches.clear()
        self._masks.clear()
        self.programs.forget_batches()
        # Interrupted, it is done before the next launch: copies may still write to what is given away.
        self._is_wait_due = True
        self.moves.wait()
        self._is_wait_due = False

    def check(self) -> None:
        """Raise what has ended the runner between two calls, if anything has; from any thread."""

    def close(self) -> None:
        """Wait for the device and drop every launch; their results are lost."""
        self.drop_launches()
        if self.later is not None:
            self.later.close()
        if self.spec.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.spec.device)
            except RuntimeError as error:  # Whoever ran a request has been told already.
                logger.error("the device failed", exc_info=error)

    def _launch(self, plan: StepPlan) -> tuple[_HostBuffer, tuple[int, ...]]:
        failed = self.moves.carry_out(plan)
        output = self._start(plan)
        self.moves.save(plan)
        return self._fetch(output), failed

    def _start(self, plan: StepPlan) -> torch.Tensor | None:
        """Queue the plan's programs; returns the packed StepOutput of those that have one."""
        programs = self.programs
        if plan.catches_up:
            programs.catch_up(plan.slots)
        if plan.kind == "decode":
            return programs.decode(plan.slots, plan.shape)
        if plan.kind == "prefill":
            scored = programs.prefill(plan.slots, plan.prompt_chunks)
            ended = [plan.slots[index] for index in plan.ended]
            output = programs.first_token(ended, plan.shape.chain) if ended else None
            if scored is None:
                return output
            empty = torch.empty((1, 0), dtype=torch.int64, device=self.spec.device)
            return pack_logprobs(empty if output is None else output, scored)
        masks = self._upload_masks(plan)
        wants = {"with_logprobs": plan.logprobs >= 0, "with_processed": plan.has_processed_logprobs}
        if plan.kind == "first":
            return programs.first(plan.slots[0], plan.shape.chain, masks, **wants)
        if plan.kind == "accept":
            return programs.accept(plan.slots, plan.shape, masks, **wants)
        if plan.kind == "verify":
            programs.verify(plan.slots, plan.shape)
        return None

    def _upload_masks(self, plan: StepPlan) -> torch.Tensor | None:
        """The masks of a plan on the device, None where it has none."""
        masks = self._masks.pop(plan.step_id, None)
        if masks is None or self.spec.device.type != "cuda":
            return masks
        # The caching host allocator keeps a pinned block until the copy that reads it has run.
        staged = torch.empty(masks.shape, dtype=masks.dtype, pin_memory=True).copy_(masks)
        return staged.to(self.spec.device, non_blocking=True)

    def _fetch(self, output: torch.Tensor | None) -> _HostBuffer:
        """Start the copy of `output` to a host buffer that no unread launch uses."""
        shape = None if output is None else output.shape
        free = self._free_buffers.setdefault(shape, [])
        buffer = free.pop() if free else self._make_buffer(shape)
        if output is not None and buffer.packed is not None:
            buffer.packed.copy_(output, non_blocking=True)
        if buffer.ready is not None:
            buffer.ready.record()
        return buffer

    def _make_buffer(self, shape: torch.Size | None) -> _HostBuffer:
        is_cuda = self.spec.device.type == "cuda"
        packed = None if shape is None else torch.empty(shape, dtype=torch.int64, pin_memory=is_cuda)
        # torch.cuda.Event would ask for the current stream in Python, at every step.
        return _HostBuffer(packed, torch.Event(self.spec.device) if is_cuda else None)

    def _finish(self, plan: StepPlan, buffer: _HostBuffer, failed: tuple[int, ...]) -> StepResult:
        is_late = False
        if buffer.ready is not None:
            begin = time.perf_counter()
            try:
                is_late = buffer.ready.query()
                buffer.ready.synchronize()
            except Exception as error:
                return self.fail(plan, error)
            self.waited_s += time.perf_counter() - begin
        result = self._read(plan, buffer.packed, failed, is_late)
        self._free_buffers[None if buffer.packed is None else buffer.packed.shape].append(buffer)
        return result

    def fail(self, plan: StepPlan, error: Exception) -> StepResult:
        """The result of a launch that failed, none of whose copies is under way any more."""
        logger.error("a %s step failed", plan.kind, exc_info=error)
        self._masks.pop(plan.step_id, None)
        self.moves.wait(plan)
        return StepResult(plan, error=f"{type(error).__name__}: {error}")

    def _read(
        self, plan: StepPlan, packed: torch.Tensor | None, failed: tuple[int, ...], is_late: bool
    ) -> StepResult:
        """What the packed StepOutput of a plan means for its slots."""
        copies_done = self.moves.take_done(plan, failed)
        prompt_logprobs = None
        if packed is not None and (count := len(plan.next_ids)):
            packed, scored = split_logprobs(packed, -(-count // SLICE_ROWS) * SLICE_ROWS)
            prompt_logprobs = RowLogprobs(*(column[:count].tolist() for column in scored))
        if packed is None or not packed.shape[1]:
            return StepResult(
                plan,
                [[] for _ in plan.slots],
                copies_done=copies_done,
                copies_failed=failed,
                prompt_logprobs=prompt_logprobs,
                is_late=is_late,
            )
        num_tokens = plan.shape.verify + 1
        has_logprobs = plan.logprobs >= 0 and plan.kind in ("first", "accept")
        # Of a prefill those whose prompts have ended have a row.
        owners = plan.ended if plan.kind == "prefill" else range(len(plan.slots))
        output, count = StepOutput.unpack(packed, num_tokens, has_logprobs=has_logprobs), len(owners)
        tokens, undrawn = output.drawn_tokens(count), output.undrawn(count)
        drafts = output.drafts(count) if plan.wants_drafts else []
        if count < len(plan.slots):
            tokens, drafts = (_spread(found, owners, len(plan.slots)) for found in (tokens, drafts))
        return StepResult(
            plan,
            tokens,
            tuple([owners[i] for i in undrawn if not output[i].is_masked]),
            drafts,
            copies_done,
            failed,
            all_masked=tuple([owners[i] for i in undrawn if output[i].is_masked]),
            logprobs=_logprobs(packed, num_tokens, tokens) if has_logprobs else (),
            prompt_logprobs=prompt_logprobs,
            is_late=is_late,
        )


def _spread(found: list[list[int]], owners: Sequence[int], count: int) -> list[list[int]]:
    """What was found for some of `count` slots, nothing for the others; nothing at all if nobody asked."""
    spread: list[list[int]] = [[] for _ in range(count)] if found else []
    for owner, values in zip(owners, found, strict=False):
        spread[owner] = values
    return spread


def _logprobs(packed: torch.Tensor, num_tokens: int, tokens: list[list[int]]) -> list[RowLogprobs]:
    """Those of each request's drawn tokens."""
    found = unpack_logprobs(packed, num_tokens)
    return [
        RowLogprobs(*(column[: len(drawn)].tolist() for column in columns))
        for columns, drawn in zip(found, tokens, strict=False)
    ]
