"""Turns plans into results: launches plans in order and fetches their outputs."""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.errors import check
from compiled_mtp.ops.row_logprobs import RowLogprobs as DeviceRowLogprobs
from compiled_mtp.plan import Release, RowLogprobs, StepPlan, StepResult
from compiled_mtp.request import RoutedExperts
from compiled_mtp.rounds.prompt_logprobs import SLICE_ROWS
from compiled_mtp.runner.assemble import Fill, Progress, build, make_buckets
from compiled_mtp.runner.cache_key import early_key, late_key
from compiled_mtp.runner.spec import EngineSpec
from compiled_mtp.runner.weight_updates import WeightSource, WeightUpdate, check_update, replace_weights
from compiled_mtp.step_output import StepOutput, pack_logprobs, split_logprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _HostBuffer:
    """A host buffer for a launch's packed output, None for a launch without one.

    `ready` is the event after which the output is complete; None on a CPU, where it is so at once.
    """

    packed: torch.Tensor | None
    ready: torch.Event | None


class Runner:
    """Runs plans; `run` returns the result of the launch `max_in_flight` plans ago, or None.

    `waited_s` sums the seconds that `run` waited for the device. `fill` writes the parameters in place of the
    checkpoint's loader, for benchmarks of models without weights. `save_to`: a directory to create, into
    which every compiled program is written, for a graph_cache. Every rank runs the same plans. The
    constructor raises ValueError for a checkpoint, a machine or a graph_cache that does not fit the config.
    """

    def __init__(
        self,
        spec: EngineSpec,
        progress: Progress | None = None,
        fill: Fill | None = None,
        *,
        save_to: Path | None = None,
    ) -> None:
        parts = build(spec, progress, fill, save_to)
        self.spec, self.memory, self.step, self.programs, self.moves, self.later, self.encoder = parts
        self._progress, self._fill = progress, fill
        self.waited_s = 0.0
        # Plans whose launch has succeeded so far.
        self.num_launched = 0
        # Images that the vision tower has encoded so far.
        self.num_encoded = 0
        self._is_wait_due = False
        # Launches whose results are unread, with the ids of their failed copies.
        self._launches: deque[tuple[StepPlan, torch.Event | None, _HostBuffer, tuple[int, ...]]] = deque()
        # By step_id of plans that are not launched yet; on the host.
        self._masks: dict[int, torch.Tensor] = {}
        # Events of `_mark_begin` that no unread launch uses.
        self._free_events: list[torch.Event] = []
        # By shape of the output, the buffers that no unread launch uses.
        self._free_buffers: dict[torch.Size | None, list[_HostBuffer]] = {}

    def cache_key(self) -> dict[str, Any]:
        """The key of a graph_cache with these programs."""
        programs = self.programs
        late = late_key(self.spec, programs.buckets, self.memory, programs.graph_mode)
        return early_key(self.spec) | late

    def run(self, plan: StepPlan | None) -> StepResult | None:
        """Launch `plan`, if any; return the oldest unread result if more than max_in_flight are unread.

        Without a plan wait for the oldest launch. Mutates the device's state as the plan says. A failed
        launch (memory, device) returns its error as its result at once; what it mutated is unknown.
        """
        if self._is_wait_due:
            self.moves.wait()
            self._is_wait_due = False
        if plan is not None:
            self._enter_device()
            try:
                self._launches.append((plan, *self._launch(plan)))
                self.num_launched += 1
            except AssertionError:  # A bug of ours.
                raise
            except Exception as error:
                return self.fail(plan, error)
        is_due = len(self._launches) > self.spec.max_in_flight or plan is None
        return self._finish(*self._launches.popleft()) if self._launches and is_due else None

    def read_experts(self, block_ids: Sequence[int], count: int) -> RoutedExperts:
        """Return the recorded experts of the first `count` tokens of a request with these blocks.

        Waits for the device.
        """
        experts = self.step.kv_cache.experts
        assert experts is not None
        top_k, blocks = self.spec.model.num_experts_per_tok, torch.tensor(block_ids, device=experts.device)
        by_layer = experts[:, blocks].view(experts.shape[0], -1, top_k)[:, :count]
        ids = by_layer.transpose(0, 1).contiguous().cpu()
        tokens, layers, _ = ids.shape
        return RoutedExperts((tokens, layers, top_k), ctypes.string_at(ids.data_ptr(), ids.nbytes))

    def set_masks(self, plan: StepPlan, masks: torch.Tensor) -> None:
        """Set the masks of `plan`, which is of kind first or accept and is launched next.

        masks [rows, ceil(vocab_size / 32)] int32 on the host, one bit per id, the lowest id first; the plan's
        slots have shape.verify + 1 rows each, a first token has one. The caller may overwrite it after the
        launch. Raises ValueError for another shape or kind.
        """
        rows = len(plan.slots) * (plan.shape.verify + 1)
        shape = (rows, -(-self.spec.model.vocab_size // 32))
        if plan.kind not in ("first", "accept") or tuple(masks.shape) != shape:
            raise ValueError(
                f"masks must have shape {shape} for a first or accept plan, got {tuple(masks.shape)} for "
                f"{plan.kind}; give one mask per row"
            )
        # The launch copies them: a copy may fail for lack of memory.
        self._masks[plan.step_id] = masks

    def drop_launches(self) -> None:
        """Forget every launch and all that an interrupted launch may have left half done; wait for copies."""
        self._launches.clear()
        self._masks.clear()
        if self.is_asleep:
            return
        if self.encoder is not None:
            self.encoder.clear()
        self.programs.forget_batches()
        # If the wait is interrupted, `run` waits before the next launch: copies may still write to memory
        # that other requests own by then.
        self._is_wait_due = True
        self.moves.wait()
        self._is_wait_due = False

    def check_update(self, source: WeightSource) -> WeightUpdate:
        """Return new weights that fit these; raises ValueError as `weight_updates.check_update` does."""
        return check_update(self.spec, source)

    def replace_weights(self, update: WeightUpdate) -> None:
        """Replace the weights between two launches, none of which may be unread, and derive the others.

        Returns when every rank has replaced its own.
        """
        assert not self._launches
        self._enter_device()
        with self._at_own_pace():
            replace_weights(self.spec, self.step, update, self._progress)
            buckets = make_buckets(self.spec, self.step.target, self.memory.max_batch)
        rule = "keep their rows' bits at the batch sizes of the engine's programs"
        is_kept = buckets == (self.programs.drawn_buckets, self.programs.given_buckets)
        check(is_kept, "weights", rule, "products that this CPU packs otherwise", "make another engine")

    def replace_from(self, path: Path) -> None:
        """Check and replace the weights by those in `path`, which rank 0 has checked already."""
        self.replace_weights(self.check_update(path))

    def sleep(self) -> None:
        """Give back the memory of weights, caches and graphs; nothing can be launched until `wake_up`.

        No launch may be unread. Returns when every rank has given its memory back.
        """
        assert not self._launches
        with self._at_own_pace():
            Runner.drop_launches(self)
            self._wait_for_device()
            programs = self.programs
            # First: an exception leaves a runner that is whole or asleep.
            del self.step, self.programs, self.moves
            programs.drop()
            del programs
            self._free_buffers.clear()
            self.later = None
            self.encoder = None
            gc.collect()
            if self.spec.device.type == "cuda":
                torch.cuda.empty_cache()

    def wake_up(self, path: Path | None) -> None:
        """Build again what `sleep` gave back, of the same sizes, with the weights in `path`; None: those that
        the engine began with.

        Returns when every rank is awake. Raises as `build` does; the runner then stays asleep.
        """
        config = self.spec.config if path is None else self.spec.config.model_copy(update={"model": path})
        fill = self._fill if path is None else None
        spec = replace(self.spec, config=config)
        # Updates replace no weight of the vision tower.
        with self._at_own_pace():
            parts = build(spec, self._progress, fill, memory=self.memory, tower_path=self.spec.config.model)
            _, _, step, self.programs, self.moves, self.later, self.encoder = parts
            # Last, because a runner that has a step counts as awake.
            self.step = step

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` has given the memory back."""
        return not hasattr(self, "step")

    def check(self) -> None:
        """Raise the error that has ended the runner between two calls, if any; callable from any thread."""

    def close(self) -> None:
        """Wait for the device and drop every launch; their results are lost."""
        if self.is_asleep:
            return
        self.drop_launches()
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        """Wait for the device, and end the thread that loads further depths."""
        if self.later is not None:
            self.later.close()
        if self.spec.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.spec.device)
            except RuntimeError as error:  # Every request's caller has got this error already.
                logger.error("the device failed", exc_info=error)

    @contextmanager
    def _at_own_pace(self) -> Iterator[None]:
        """Let each rank take its time in the block, as at a start, and wait for all of them at its end."""
        communicator = self.spec.communicator
        if communicator is None:
            yield
            return
        communicator.expect_steps(False)
        yield
        communicator.least(0)
        communicator.expect_steps()

    def _enter_device(self) -> None:
        """Make the engine's GPU the calling thread's current one: kernels are launched there."""
        device = self.spec.device
        if device.type == "cuda" and torch.cuda.current_device() != device.index:
            torch.cuda.set_device(device)

    def _launch(self, plan: StepPlan) -> tuple[torch.Event | None, _HostBuffer, tuple[int, ...]]:
        failed = self.moves.carry_out(plan)
        if self.encoder is not None:
            self.encoder.release({move.slot for move in plan.moves if isinstance(move, Release)})
        begun = self._mark_begin()
        output = self._start(plan)
        self.moves.save(plan)
        return begun, self._fetch(output), failed

    def _mark_begin(self) -> torch.Event | None:
        """The event before the programs that are queued next; None on a CPU."""
        if self.spec.device.type != "cuda":
            return None
        begun = self._free_events.pop() if self._free_events else self._make_event()
        begun.record()
        return begun

    def _start(self, plan: StepPlan) -> torch.Tensor | None:
        """Queue the plan's programs; return their packed StepOutput, None for programs without one."""
        programs = self.programs
        if plan.catches_up:
            programs.catch_up(plan.slots)
        if plan.kind == "decode":
            return programs.decode(plan.slots, plan.shape)
        if plan.kind == "encode":
            assert self.encoder is not None
            assert plan.encoded is not None
            self.encoder.encode(plan.slots[0], plan.encoded)
            self.num_encoded += plan.encoded.is_last
            return None
        if plan.kind == "prefill":
            scored = programs.prefill(plan.slots, plan.prompt_chunks)
            self._drop_features(plan)
            ended = [plan.slots[index] for index in plan.ended]
            output = programs.first_token(ended, plan.shape.chain) if ended else None
            if scored is None:
                return output
            empty = torch.empty((1, 0), dtype=torch.int64, device=self.spec.device)
            return pack_logprobs(empty if output is None else output, scored)
        masks = self._upload_masks(plan)
        wants = {
            "with_logprobs": plan.logprobs >= 0,
            "with_processed": plan.has_processed_logprobs,
            "is_given": plan.is_given,
        }
        if plan.kind == "first":
            return programs.first(plan.slots[0], plan.shape.chain, masks, **wants)
        if plan.kind == "accept":
            return programs.accept(plan.slots, plan.shape, masks, **wants)
        if plan.kind == "verify":
            programs.verify(plan.slots, plan.shape)
        return None

    def _drop_features(self, plan: StepPlan) -> None:
        """Free the features that a planned prefill has read."""
        if self.encoder is not None:
            for slot, prompt_chunk in zip(plan.slots, plan.prompt_chunks, strict=True):
                self.encoder.drop_used(slot, prompt_chunk.start + len(prompt_chunk.token_ids))

    def _upload_masks(self, plan: StepPlan) -> torch.Tensor | None:
        """The masks of a plan on the device; None for a plan without masks."""
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
        return _HostBuffer(packed, self._make_event() if is_cuda else None)

    def _make_event(self) -> torch.Event:
        # torch.cuda.Event would look up the current stream in Python at every step.
        return torch.Event(self.spec.device, enable_timing=True)

    def _finish(
        self, plan: StepPlan, begun: torch.Event | None, buffer: _HostBuffer, failed: tuple[int, ...]
    ) -> StepResult:
        # A CPU computes while it launches.
        is_late, device_s = True, None
        if buffer.ready is not None:
            begin = time.perf_counter()
            try:
                is_late = buffer.ready.query()
                buffer.ready.synchronize()
                self.waited_s += time.perf_counter() - begin
                if begun is not None:
                    # The host itself sees the end of a launch that is not late.
                    device_s = begun.elapsed_time(buffer.ready) / 1e3 if is_late else None
                    self._free_events.append(begun)
            except Exception as error:
                return self.fail(plan, error)
        result = self._read(plan, buffer.packed, failed, is_late, device_s)
        self._free_buffers[None if buffer.packed is None else buffer.packed.shape].append(buffer)
        return result

    def fail(self, plan: StepPlan, error: Exception) -> StepResult:
        """The result of a failed launch, after a wait for its copies."""
        logger.error("a %s step failed", plan.kind, exc_info=error)
        self._masks.pop(plan.step_id, None)
        self.moves.wait(plan)
        return StepResult(plan, error=f"{type(error).__name__}: {error}")

    def _read(
        self,
        plan: StepPlan,
        packed: torch.Tensor | None,
        failed: tuple[int, ...],
        is_late: bool,
        device_s: float | None,
    ) -> StepResult:
        """The result of a plan, from its packed StepOutput."""
        copies_done = self.moves.take_done(plan, failed)
        prompt_logprobs = None
        if packed is not None and (count := len(plan.next_ids)):
            packed, (scored,) = split_logprobs(packed, -(-count // SLICE_ROWS) * SLICE_ROWS)
            prompt_logprobs = _on_host(scored, count)
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
        # Raw log probabilities, then processed ones.
        num_logprobs = 0
        if plan.logprobs >= 0 and plan.kind in ("first", "accept"):
            num_logprobs = 2 if plan.has_processed_logprobs else 1
        # In a prefill only prompts that end have a row.
        owners = plan.ended if plan.kind == "prefill" else range(len(plan.slots))
        has_lookup, count = self.spec.has_lookup, len(owners)
        output = StepOutput.unpack(
            packed,
            num_tokens,
            num_logprobs=num_logprobs,
            has_matches=has_lookup,
            wants_drafts=plan.wants_drafts,
        )
        tokens, undrawn = output.drawn_tokens(count), output.undrawn(count)
        drafts = output.drafts(count) if plan.wants_drafts else []
        matches = output.matches(count) if has_lookup else []
        if count < len(plan.slots):
            spread = [_spread(found, owners, len(plan.slots)) for found in (tokens, drafts, matches)]
            tokens, drafts, matches = spread
        return StepResult(
            plan,
            tokens,
            tuple([owners[i] for i in undrawn if not output[i].is_masked]),
            drafts,
            copies_done,
            failed,
            all_masked=tuple([owners[i] for i in undrawn if output[i].is_masked]),
            logprobs=_logprobs(packed, num_tokens, tokens, num_logprobs),
            prompt_logprobs=prompt_logprobs,
            is_late=is_late,
            device_s=device_s,
            matches=matches,
        )


def _spread(found: list[list[int]], owners: Sequence[int], count: int) -> list[list[int]]:
    """Lists for `count` slots: those of `found` at the indices `owners`, else empty; [] without `found`."""
    spread: list[list[int]] = [[] for _ in range(count)] if found else []
    for owner, values in zip(owners, found, strict=False):
        spread[owner] = values
    return spread


def _logprobs(
    packed: torch.Tensor, num_tokens: int, tokens: list[list[int]], count: int
) -> list[RowLogprobs]:
    """The log probabilities of each request's drawn tokens, which were appended `count` times."""
    found: list[RowLogprobs] = []
    for _ in range(count):
        # Those of the processed logits come last.
        processed: Sequence[RowLogprobs | None] = found or [None] * len(tokens)
        packed, columns = split_logprobs(packed, num_tokens)
        found = [
            _on_host(own, len(drawn), one)
            for own, drawn, one in zip(columns, tokens, processed, strict=False)
        ]
    return found


def _on_host(rows: DeviceRowLogprobs, count: int, processed: RowLogprobs | None = None) -> RowLogprobs:
    """The first `count` rows as lists."""
    logprobs, ranks, top_ids, top_logprobs, entropies = (column[:count].tolist() for column in rows)
    return RowLogprobs(logprobs, ranks, top_ids, top_logprobs, entropies, processed)
