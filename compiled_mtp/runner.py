"""Turns plans into results: launches them in order and fetches what came of them."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

import torch

from compiled_mtp.build import Fill, Progress, build
from compiled_mtp.config import EngineConfig
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.request import StepPlan, StepResult

logger = logging.getLogger(__name__)


@dataclass
class _Launch:
    """A step the device may still be working on. `output` lies in host memory once `ready` has happened."""

    plan: StepPlan
    output: torch.Tensor
    ready: torch.Event | None


class Runner:
    """Runs plans; `run` returns the result of the launch `max_in_flight` plans ago, or None.

    `waited_s` sums the seconds that `run` was blocked on the device. `fill` writes the parameters instead
    of the checkpoint's loader (benchmarks: no weights of that size are at hand). Raises ValueError while it
    is created for a checkpoint that does not fit its config.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        num_valid_ids: int,
        progress: Progress | None = None,
        fill: Fill | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        assembly = build(config, model_config, num_valid_ids, progress, fill)
        self.device = assembly.device
        self.max_model_len = assembly.max_model_len
        self.num_blocks = assembly.num_blocks
        self.fp8 = assembly.fp8
        self.step = assembly.step
        self.programs = assembly.programs
        self.cache_key = assembly.cache_key
        self.max_in_flight = config.resolve_max_in_flight(self.device.type)
        self.waited_s = 0.0
        self._launches: deque[_Launch] = deque()
        self._host_buffers: dict[torch.Size, list[tuple[torch.Tensor, torch.Event | None]]] = {}

    def run(self, plan: StepPlan | None) -> StepResult | None:
        """Launch `plan`, if any, and return the oldest result if it is due: more launches than may be in
        flight.

        Without a plan the oldest launch is waited for. Mutates the device's state as the plan says. A launch
        that fails (memory, the device) has its error as its result, at once; what it mutated is not known.
        """
        if plan is not None:
            try:
                self._launches.append(self._launch(plan))
            except AssertionError:  # A bug of ours.
                raise
            except Exception as error:
                return _failed(plan, error)
        is_due = len(self._launches) > self.max_in_flight or plan is None
        return self._finish(self._launches.popleft()) if self._launches and is_due else None

    def drop_launches(self) -> None:
        """Forget every launch, and what an interrupted one may have left half done."""
        self._launches.clear()
        self.programs.forget_batches()

    def close(self) -> None:
        """Wait for the device and drop every launch; their results are lost."""
        self.drop_launches()
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:  # Whoever ran a request has been told already.
                logger.error("the device failed", exc_info=error)

    def _launch(self, plan: StepPlan) -> _Launch:
        self.step.slots.install(plan)
        if plan.kind == "decode":
            output = self.programs.decode(plan.slots)
        else:
            output = self.programs.prefill(plan.slots[0], plan.token_ids, plan.start, plan.is_last)
        return self._fetch(plan, output)

    def _fetch(self, plan: StepPlan, output: torch.Tensor) -> _Launch:
        """Start the copy of `output` to a host buffer that no unread launch uses."""
        free = self._host_buffers.setdefault(output.shape, [])
        if free:
            host, ready = free.pop()
        else:
            is_cuda = self.device.type == "cuda"
            host = torch.empty(output.shape, dtype=torch.int64, pin_memory=is_cuda)
            # torch.cuda.Event would ask for the current stream in Python, at every step.
            ready = torch.Event(self.device) if is_cuda else None
        host.copy_(output, non_blocking=True)
        if ready is not None:
            ready.record()
        return _Launch(plan, host, ready)

    def _finish(self, launch: _Launch) -> StepResult:
        if launch.ready is not None:
            begin = time.perf_counter()
            try:
                launch.ready.synchronize()
            except Exception as error:
                return _failed(launch.plan, error)
            self.waited_s += time.perf_counter() - begin
        plan, values = launch.plan, launch.output.tolist()
        self._host_buffers[launch.output.shape].append((launch.output, launch.ready))
        if plan.kind == "prefill":
            return StepResult(plan, [[values[0]] if plan.is_last else []])
        tokens = [row[1 : 1 + row[0]] for row in values[: len(plan.slots)]]
        return StepResult(plan, tokens)


def _failed(plan: StepPlan, error: Exception) -> StepResult:
    logger.error("a %s step failed", plan.kind, exc_info=error)
    return StepResult(plan, [], f"{type(error).__name__}: {error}")
