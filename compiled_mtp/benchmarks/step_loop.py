"""The engine's loop over requests of random ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_mtp.errors import check
from compiled_mtp.graphs.buckets import RoundShape, prompt_chunk_limit
from compiled_mtp.request import Request, SamplingParams
from compiled_mtp.runner.runner import Runner
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.limits import Limits

WARM_UP_STEPS, TIMED_STEPS = 20, 80


@dataclass
class Loop:
    """The engine's loop over requests of random ids, without text."""

    runner: Runner
    scheduler: Scheduler

    def step(self) -> int:
        """Run one step; return the number of new tokens."""
        self.scheduler.update(self.runner.run(self.scheduler.schedule()))
        return sum(len(output.new_token_ids) for output in self.scheduler.take_outputs())


def count_launches(batch: int, context: int, chunk: int) -> int:
    """The launches, each of at most `chunk` rows, that prefill `batch` prompts of `context` tokens."""
    return -(-batch // max(chunk // context, 1)) * -(-context // chunk)


def most_gained(runner: Runner, batch: int, context: int) -> int:
    """The most tokens that a request of a loop gains: the first one decodes a round for every launch of the
    others' prefill."""
    rounds = count_launches(batch, context, runner.spec.prefill_chunk) + WARM_UP_STEPS + TIMED_STEPS + 64
    return rounds * (runner.spec.mtp_step + 1)


def start_loop(runner: Runner, batch: int, context: int) -> Loop:
    """Return a loop with `batch` prefilled requests of `context` tokens each."""
    spec, memory = runner.spec, runner.memory
    chunk = spec.prefill_chunk
    limits = Limits(
        max_batch=batch,
        num_blocks=memory.num_blocks,
        block_size=spec.config.block_size,
        max_model_len=memory.max_model_len,
        prefill_chunk=chunk,
        mtp_step=spec.mtp_step,
        max_drafts=spec.max_drafts,
        max_in_flight=spec.max_in_flight,
        max_prompt_chunks=prompt_chunk_limit(chunk, batch),
    )
    scheduler = Scheduler(limits)
    generator = torch.Generator().manual_seed(batch)
    most = min(most_gained(runner, batch, context), memory.max_model_len - context)
    for index in range(batch):
        ids = torch.randint(0, spec.model.vocab_size, (context,), generator=generator).tolist()
        params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True, seed=index)
        request = Request(str(index), ids, params)
        limits.fit(request)
        scheduler.add(request)
    loop = Loop(runner, scheduler)
    while len(scheduler.running) < batch:
        loop.step()
    return loop


def check_blocks(runner: Runner, batch: int, context: int) -> None:
    """Raise ValueError unless the blocks hold `batch` requests of a loop to its end, without preemption."""
    memory, tokens = runner.memory, context + most_gained(runner, batch, context)
    needed = batch * -(-tokens // runner.spec.config.block_size)
    rule = f"be at least {needed + 1} for {batch} requests of {tokens} tokens"
    check(needed < memory.num_blocks, "num_blocks", rule, memory.num_blocks, "time fewer requests")


def end_loop(loop: Loop) -> None:
    """Forget the requests that still run; the runner and its ranks stay."""
    loop.scheduler.forget_all()
    loop.runner.drop_launches()


def launch(loop: Loop, batch: int) -> None:
    """Launch one round of `batch` of the loop's requests on the GPU; its result is not read."""
    slots = tuple(sorted(loop.scheduler.running))[:batch]
    loop.runner.programs.decode(slots, RoundShape(*[loop.runner.step.mtp_step] * 2))
