"""Requests whose answers repeat ids, and engines that decode them, for tests of drafts from the text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from compiled_mtp.engine import Engine
from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.request import RequestOutput, SamplingParams
from compiled_mtp.sampling.logprobs import TokenLogprob
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest

VOCAB = 512
Given = dict[str, tuple[list[int], SamplingParams]]
Found = dict[str, tuple[list[int], list[TokenLogprob]]]


def requests() -> Given:
    """Answers of few ids, which stand in the text again and again, and others that repeat nothing."""
    made: Given = {}
    for length, temperature, few, logprobs in (
        (9, 0.0, 2, None),
        (70, 0.9, 2, None),
        (33, 0.7, 3, 2),
        (130, 0.9, 2, 1),
        (64, 0.8, None, None),
        (12, 1.0, 4, None),
    ):
        params = SamplingParams(
            max_tokens=26,
            temperature=temperature,
            seed=length,
            ignore_eos=True,
            logprobs=logprobs,
            allowed_token_ids=None if few is None else range(5, 5 + few),
            include_drafts=length == 70,
            frequency_penalty=0.2 if length == 12 else 0.0,
        )
        rng = random.Random(length)
        prompt = [rng.randrange(5, 5 + (few or VOCAB - 5)) for _ in range(length)]
        made[f"{length}"] = (prompt, params)
    return made


def run(
    engine: Engine, given: Given, seed: int, shapes: list[RoundShape] | None = None, arrivals: float = 0.1
) -> Found:
    """Add the requests at random moments; return the tokens and log probabilities of each.

    shapes: gets the shape of every round. arrivals: the chance that another request arrives before a step.
    """
    rng, waiting = random.Random(seed), list(given.items())
    rng.shuffle(waiting)
    found: Found = {name: ([], []) for name in given}
    if shapes is not None:
        record_shapes(engine, shapes)
    while waiting or engine.has_unfinished_requests():
        while waiting and (rng.random() < arrivals or not engine.has_unfinished_requests()):
            name, (prompt, params) = waiting.pop()
            engine.add_request(prompt_token_ids=prompt, params=params, request_id=name)
        for output in engine.step():
            take(found, output)
    engine.scheduler.check_integrity()
    assert engine.stats().blocks_used == 0
    return found


def record_shapes(engine: Engine, shapes: list[RoundShape]) -> None:
    programs = engine.runner.programs

    def recorded(launch: Callable[..., Any]) -> Callable[..., Any]:
        def call(slots: tuple[int, ...], shape: RoundShape) -> Any:
            shapes.append(shape)
            return launch(slots, shape)

        return call

    programs.decode, programs.verify = recorded(programs.decode), recorded(programs.verify)  # type: ignore[method-assign]


def take(found: Found, output: RequestOutput) -> None:
    assert output.error is None, output.error
    tokens, logprobs = found[output.request_id]
    tokens += output.new_token_ids
    logprobs += output.logprobs or []
    for one in output.drafts or []:
        # The rounds of an output are those of its tokens.
        assert one.token_ids[: one.num_accepted] == output.new_token_ids[: one.num_accepted]


def crowd(engine: Engine, tokens_ahead: int) -> None:
    """Admit more requests than there are blocks for, until one has been offloaded or 500 were
    recomputed.

    For good, a request might be admitted and preempted in turn for ever.
    """
    planner = engine.scheduler._planner
    preempt, usual, left = planner._preempt, planner.admission.tokens_ahead, iter(range(500))
    planner.admission.tokens_ahead = tokens_ahead

    def count(scheduled: ScheduledRequest) -> None:
        if planner.num_offloaded or next(left, None) is None:
            planner.admission.tokens_ahead = usual
        preempt(scheduled)

    planner._preempt = count  # type: ignore[method-assign]
