"""Engines for tests: every slot and block holds NaN when it is handed out, and drafts can be forced."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.cache.copy_stream import CopyStream, _UnderWay
from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.plan import Admit, Copy, StepPlan
from compiled_mtp.request import RequestOutput
from compiled_mtp.runner.assemble import Progress
from compiled_mtp.step import Step
from tests import tiny


def make_engine(
    directory: Path, progress: Progress | None = None, save_to: Path | None = None, **options: Any
) -> Engine:
    """Return a CPU engine with poisoned free slots and blocks; by default blocks and chunks are small."""
    defaults: dict[str, Any] = {
        "device": "cpu",
        "mtp_step": 3,
        "block_size": 16,
        "prefill_chunk": 64,
        "max_model_len": 512,
        "max_batch": 8,
    }
    config = EngineConfig(model=directory, **(defaults | options))
    engine = Engine(config, progress=progress, save_to=save_to)
    step = engine.runner.step
    tiny.poison(step)
    carry_out = engine.runner.moves.carry_out

    def poison_then_carry_out(plan: StepPlan) -> tuple[int, ...]:
        # Shared or kept blocks hold the keys and values from which a request resumes.
        pool = engine.scheduler.pool
        # The prefix cache's evictions are copied before their blocks are written.
        evictions = tuple(m for m in plan.moves if isinstance(m, Copy) and m.target.tier == "prefix_host")
        failed = carry_out(replace(plan, moves=evictions, block_updates=()))
        poison_new(step, plan, lambda block: pool._holders[block] > 1 or block in pool._kept)
        return failed + carry_out(replace(plan, moves=plan.moves[len(evictions) :]))

    engine.runner.moves.carry_out = poison_then_carry_out  # type: ignore[method-assign]
    return engine


class LateCopyStream(CopyStream):
    """Reports every copy some results late, like a copy stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.is_apart = True

    def record(self, step_id: int, copy_id: int) -> None:
        self._under_way.append(_UnderWay(step_id, copy_id, _LateEvent()))  # type: ignore[arg-type]


class _LateEvent:
    def __init__(self) -> None:
        self.num_left = 3

    def query(self) -> bool:
        self.num_left -= 1
        return self.num_left < 0

    def synchronize(self) -> None:
        self.num_left = 0


def poison_new(step: Step, plan: StepPlan, is_shared: Callable[[int], bool] = lambda _: False) -> None:
    """Fill with NaN what a plan gives to a request: the rows of its slot, and blocks that no other request
    shares."""
    nan = float("nan")
    for move in plan.moves:
        if isinstance(move, Admit):
            for layer in step.state_cache.layers:
                for buffer in layer.buffers():
                    buffer[move.slot] = nan
            step.slots.last_hidden[move.slot] = nan
            if step.mtp_step:
                step.slots.deferred_hidden[move.slot] = nan
    # After a lost launch, a plan repeats which blocks are owned: these already hold keys.
    table, block_size = step.slots.block_table, step.kv_cache.block_size
    # Blocks before a prompt's resume point keep their contents, even if the cache evicts them in the same
    # plan.
    starts = {
        slot: prompt_chunk.start for slot, prompt_chunk in zip(plan.slots, plan.prompt_chunks, strict=False)
    }
    own = [u for u in plan.block_updates if u.column * block_size >= starts.get(u.slot, 0)]
    changed = [u.block_id for u in own if int(table[u.slot, u.column]) != u.block_id]
    new = [block for block in changed if not is_shared(block)]
    blocks = torch.tensor(new, dtype=torch.int64)
    draft = [] if step.kv_cache.draft is None else [step.kv_cache.draft]
    for layer in [*step.kv_cache.layers, *draft]:
        layer.kv[blocks] = nan


Chooser = Callable[[str, int], int]


def force_drafts(engine: Engine, streams: Mapping[str, Sequence[int]], num_right: Chooser) -> None:
    """Before every round, set the first num_right(request_id, pos) drafts of a request to its stream's
    tokens.

    The other drafts are wrong. `streams` holds the tokens that each request must give. Masks of grammars are
    made for the forced drafts where no launch is in flight. `free_drafts` ends it.
    """
    step, programs = engine.runner.step, engine.runner.programs
    decode, verify = programs.decode, programs.verify

    def force(slots: tuple[int, ...], verify: int) -> None:
        for slot in slots:
            request = engine.scheduler.running[slot]
            stream, pos = streams[request.request_id], int(step.slots.pos[slot])
            done = pos - request.prompt_len + 1
            right = num_right(request.request_id, pos)
            drafts = []
            for k in range(verify):
                following = stream[done + k] if done + k < len(stream) else 0
                drafts.append(following if k < right else (following + 1) % step.num_valid_ids)
                step.slots.drafts[slot, k] = drafts[-1]
            engine.scheduler._resources.owners[slot].drafts = drafts

    def forced_decode(slots: tuple[int, ...], shape: RoundShape) -> torch.Tensor:
        force(slots, shape.verify)
        return decode(slots, shape)

    def forced_verify(slots: tuple[int, ...], shape: RoundShape) -> None:
        force(slots, shape.verify)
        verify(slots, shape)

    programs.decode, programs.verify = forced_decode, forced_verify  # type: ignore[method-assign]


def free_drafts(engine: Engine) -> None:
    """Give a shared engine the model's own drafts again: the class's methods apply."""
    programs = engine.runner.programs
    del programs.decode, programs.verify


def run_to_end(engine: Engine, *, before_step: Callable[[], None] | None = None) -> dict[str, list[int]]:
    """Step until no request is left; return the tokens of each request."""
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        if before_step is not None:
            before_step()
        collect(tokens, engine.step())
    return tokens


def collect(tokens: dict[str, list[int]], outputs: list[RequestOutput]) -> None:
    """Append the new tokens of `outputs` to `tokens`."""
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)


def prompt_of(length: int, seed: int, vocab_size: int) -> list[int]:
    """Return random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(length)]
