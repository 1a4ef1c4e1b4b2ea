"""Drives a runner with plans made by hand: rounds of any depth and of two phases, and moves; no scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.graphs.buckets import RoundShape, ladders
from compiled_mtp.graphs.compile import GraphMode
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.plan import (
    Admit,
    BlockUpdate,
    Copy,
    Location,
    Move,
    PlanKind,
    PromptChunk,
    Release,
    SlotSampling,
    StepPlan,
    StepResult,
)
from compiled_mtp.runner.programs import Programs
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import resolve
from tests import tiny

MAX_MODEL_LEN, BLOCK_SIZE = 128, 16
BLOCKS_EACH = MAX_MODEL_LEN // BLOCK_SIZE


def make_runner(directory: Path, **options: Any) -> Runner:
    """Return a runner of three slots with blocks for four requests; every row and block holds NaN."""
    defaults: dict[str, Any] = {
        "device": "cpu",
        "mtp_step": 3,
        "block_size": BLOCK_SIZE,
        "prefill_chunk": 64,
        "max_model_len": MAX_MODEL_LEN,
        "max_batch": 3,
        "num_blocks": 4 * BLOCKS_EACH + 1,
    }
    config = EngineConfig(model=directory, **(defaults | options))
    model_config = read_model_config(directory)
    runner = Runner(resolve(config, model_config, model_config.vocab_size))
    tiny.poison(runner.step)
    return runner


def with_rounds(
    runner: Runner,
    shapes: Iterable[tuple[int, int]],
    *,
    is_compiled: bool = False,
    graph_mode: GraphMode | None = None,
) -> Runner:
    """Return the uncompiled runner with rounds of all these shapes."""
    config = runner.spec.config
    assert config.prefill_chunk is not None
    buckets = ladders(8, starmap(RoundShape, shapes), runner.memory.max_batch, config.batch_sizes)
    runner.programs = Programs(
        runner.step, buckets, config.prefill_chunk, is_compiled=is_compiled, graph_mode=graph_mode
    )
    if runner.programs.has_shapes:
        runner.programs.warm_up()
    return runner


@dataclass
class Driver:
    """Keeps the slot and blocks of each request; `tokens` holds the tokens of results that were read.

    On a GPU a copy to or from host memory may run beside later launches. Until a result says that the copy is
    done, its source keeps its contents and belongs to no request, and its target is not used. Other requests'
    launches go on meanwhile. A request that needs the source or the target waits for results, as in the
    scheduler.
    """

    runner: Runner
    slots: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    # By copy id: the slot, blocks and host record of a request that leaves; the name of one that comes back.
    leaving: dict[int, tuple[int, list[int], int]] = field(default_factory=dict)
    coming: dict[int, str] = field(default_factory=dict)
    step_ids: Iterator[int] = field(default_factory=itertools.count)
    copy_ids: Iterator[int] = field(default_factory=itertools.count)

    def run(self, kind: PlanKind, names: tuple[str, ...] = (), **fields: Any) -> None:
        """Launch a plan of the requests `names` and take the result that is due."""
        self.wait(copy_id for copy_id, name in self.coming.items() if name in names)
        slots = tuple(self.slots[name] for name in names)
        # A request's generation is its index in `names`: a result may arrive after the request has moved.
        generations = tuple(self.names.index(name) for name in names)
        plan = StepPlan(next(self.step_ids), kind, slots, generations, **fields)
        self.take(self.runner.run(plan))

    def take(self, result: StepResult | None) -> None:
        if result is None:
            return
        assert result.error is None, result.error
        self.results.append(result)
        for generation, new in zip(result.plan.generations, result.token_ids, strict=True):
            self.tokens[self.names[generation]] += new
        for copy_id in result.copies_done:
            self.coming.pop(copy_id, None)
            if copy_id in self.leaving:
                slot, blocks, _ = self.leaving.pop(copy_id)
                self.poison(slot, blocks)

    def wait(self, copy_ids: Iterable[int]) -> None:
        """Take results until these copies are done."""
        wanted = set(copy_ids)
        while not wanted.isdisjoint((*self.leaving, *self.coming)):
            result = self.runner.run(None)
            assert result is not None, "a copy is never done"
            self.take(result)

    def wait_for_slot(self, slot: int, record: int = -1) -> None:
        """Take results until no copy leaves the slot or goes to the record."""
        self.wait(c for c, (source, _, target) in self.leaving.items() if slot == source or record == target)

    def drain(self) -> dict[str, list[int]]:
        """Read every result; return the tokens of all requests."""
        while (result := self.runner.run(None)) is not None:
            self.take(result)
        return self.tokens

    def start(
        self,
        name: str,
        slot: int,
        prompt: list[int],
        *,
        temperature: float = 0.8,
        chain: int = 3,
        sampling: SlotSampling | None = None,
        is_first_apart: bool = False,
        chunk: int = 64,
    ) -> None:
        """Give `name` a slot and the lowest free blocks, and prefill its prompt, `chunk` tokens per launch.

        is_first_apart: its first token is left to a plan of its own.
        """
        self.wait_for_slot(slot)
        self.names.append(name)
        self.slots[name], self.tokens[name] = slot, []
        self.blocks[name] = self.free_blocks()
        if sampling is None:
            sampling = SlotSampling(7 + len(prompt), temperature, 40, 0.95, 0.0)
        moves: tuple[Move, ...] = (Release(slot), Admit(slot, sampling))
        updates = self.updates(name)
        for begin in range(0, len(prompt), chunk):
            token_ids = tuple(prompt[begin : begin + chunk])
            is_last = begin + chunk >= len(prompt) and not is_first_apart
            prompt_chunks = (PromptChunk(token_ids, begin, len(prompt), is_last),)
            shape = RoundShape(0, chain if is_last else 0)
            self.run(
                "prefill",
                (name,),
                moves=moves,
                block_updates=updates,
                shape=shape,
                prompt_chunks=prompt_chunks,
            )
            moves, updates = (), ()

    def decode(self, *names: str, verify: int = 3, chain: int = 3, **fields: Any) -> None:
        self.run("decode", names, shape=RoundShape(verify, chain), **fields)

    def free_blocks(self) -> list[int]:
        """Return blocks that no request owns or is leaving, the highest first: tables are not in order."""
        leaving = [blocks for _, blocks, _ in self.leaving.values()]
        used = {block for blocks in (*self.blocks.values(), *leaving) for block in blocks}
        free = [block for block in range(1, self.runner.memory.num_blocks) if block not in used]
        return free[:BLOCKS_EACH][::-1]

    def updates(self, name: str) -> tuple[BlockUpdate, ...]:
        own = enumerate(self.blocks[name])
        return tuple(BlockUpdate(self.slots[name], column, block) for column, block in own)

    def offload(self, name: str, record: int) -> None:
        """Move a request to host memory; its old slot and blocks are poisoned when the copy is done."""
        source, old = self.slots.pop(name), self.blocks.pop(name)
        pairs = tuple((block, record * BLOCKS_EACH + index) for index, block in enumerate(old))
        copy = Copy(next(self.copy_ids), Location("slot", source), Location("host", record), pairs)
        self.leaving[copy.copy_id] = (source, old, record)
        self.run("move", moves=(copy, Release(source)))

    def bring_back(self, name: str, record: int, slot: int) -> None:
        """Move a request from host memory to a slot and to other blocks than before."""
        self.wait_for_slot(slot, record)
        self.blocks[name] = self.free_blocks()
        self.slots[name] = slot
        own = self.blocks[name]
        pairs = tuple((record * BLOCKS_EACH + index, block) for index, block in enumerate(own))
        copy = Copy(next(self.copy_ids), Location("host", record), Location("slot", slot), pairs)
        self.coming[copy.copy_id] = name
        self.run("move", moves=(copy,), block_updates=self.updates(name))

    def poison(self, slot: int, blocks: list[int]) -> None:
        """Fill a slot that a request left with NaN or wrong numbers, and its blocks with NaN."""
        step = self.runner.step
        for entry in step.slot_tensors:
            entry.tensor[slot] = float("nan") if entry.tensor.is_floating_point() else 3
        for pages in step.kv_cache.buffers():
            pages[torch.tensor(blocks, dtype=torch.int64, device=pages.device)] = float("nan")
