"""Ranks as threads of the test: they compute what ranks in processes compute, and they start at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from compiled_mtp.communicators.communicator import Communicator
from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.plan import StepPlan, StepResult
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import EngineSpec

_TIMEOUT_S = 120.0


class ThreadCommunicator(Communicator):
    """Connects threads that share `barrier` and `tensors`."""

    def __init__(self, rank: int, barrier: threading.Barrier, tensors: list[torch.Tensor]) -> None:
        super().__init__(rank, barrier.parties)
        self.barrier, self.tensors = barrier, tensors

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        self.tensors[self.rank] = x
        self.barrier.wait(_TIMEOUT_S)
        gathered = torch.stack(self.tensors)
        self.barrier.wait(_TIMEOUT_S)
        return gathered


def thread_communicators(world: int) -> list[ThreadCommunicator]:
    """Return one communicator for each rank."""
    barrier, tensors = threading.Barrier(world), [torch.empty(0)] * world
    return [ThreadCommunicator(rank, barrier, tensors) for rank in range(world)]


class ThreadRunner(Runner):
    """Rank 0's runner; the other ranks' runners, in `followers` once they are built, run in threads."""

    def __init__(self, spec: EngineSpec, *_: Any, save_to: Path | None = None) -> None:
        own, *others = thread_communicators(spec.config.tensor_parallel)
        self.messages: list[SimpleQueue[tuple[Any, ...]]] = [SimpleQueue() for _ in others]
        self.followers: list[Runner] = []
        self.errors: list[BaseException] = []

        def follow(communicator: ThreadCommunicator, messages: SimpleQueue[tuple[Any, ...]]) -> None:
            try:
                runner = Runner(spec.of_rank(communicator))
                self.followers.append(runner)
                while (message := messages.get())[0] != "close":
                    result = getattr(runner, message[0])(*message[1:])
                    assert result is None or (result.error is None and not result.copies_failed)
            except BaseException as error:
                self.errors.append(error)
                communicator.barrier.abort()

        self._threads = [
            threading.Thread(target=follow, args=pair, daemon=True)
            for pair in zip(others, self.messages, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        super().__init__(spec.of_rank(own))

    def tell(self, *message: Any) -> None:
        for messages in self.messages:
            messages.put(message)

    def run(self, plan: StepPlan | None) -> StepResult | None:
        if plan is not None:
            self.tell("run", plan)
        result = super().run(plan)
        assert not self.errors
        return result

    def set_masks(self, plan: StepPlan, masks: torch.Tensor) -> None:
        super().set_masks(plan, masks)
        self.tell("set_masks", plan, masks.clone())

    def close(self) -> None:
        super().close()
        self.tell("close")
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
        assert not self.errors


@contextmanager
def engine_of(directory: Path, world: int, **options: Any) -> Iterator[Engine]:
    """Yield a small CPU engine of `world` ranks."""
    defaults: dict[str, Any] = {
        "device": "cpu",
        "mtp_step": 3,
        "block_size": 16,
        "prefill_chunk": 64,
        "max_model_len": 256,
        "num_blocks": 40,
        "max_batch": 4,
        "offload_gb": 0.1,
        "num_threads": 1,
    }
    config = EngineConfig(model=directory, tensor_parallel=world, **(defaults | options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_mtp.parallel.leader.LeadRunner", ThreadRunner)
        engine = Engine(config)
    with engine:
        yield engine
