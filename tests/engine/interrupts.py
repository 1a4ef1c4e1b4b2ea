"""Traffic that an error or Ctrl-C may strike at any line, and what must hold afterwards."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from compiled_mtp.engine import Engine
from compiled_mtp.request import RequestOutput, SamplingParams
from tests.aimed import Aim, Line
from tests.engines import prompt_of

VOCAB = 512
PLAIN = SamplingParams(max_tokens=4, temperature=0.8, seed=5, ignore_eos=True)
GUIDED = SamplingParams(max_tokens=4, temperature=1.0, seed=6, guided_regex="[a-f ]{20,30}")
SCORED = PLAIN.model_copy(update={"logprobs": 2, "logprobs_mode": "processed", "n": 2})
# The long prompt has whole chunks, so it has keys in the prefix cache; the third request waits for a slot.
REQUESTS: dict[str, tuple[list[int], SamplingParams]] = {
    "plain": (prompt_of(130, 1, VOCAB), PLAIN),
    "guided": (prompt_of(20, 2, VOCAB), GUIDED),
    "scored": (prompt_of(70, 3, VOCAB), SCORED),
}
NAMES = itertools.count()
Scenario = Callable[[Engine, "Told"], None]


class Told:
    """All that the outputs of an engine's requests have told."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        # The kind of each request in REQUESTS, by request id.
        self.asked: dict[str, str] = {}

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.reasons, "output after the end"
            self.tokens.setdefault(key, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason


def salted(params: SamplingParams, salt: str) -> SamplingParams:
    """Return the parameters with a salt, so that the request shares no cached prefix with earlier ones."""
    return params.model_copy(update={"cache_salt": salt})


def add_all(engine: Engine, told: Told) -> None:
    salt = str(next(NAMES))
    for name, (prompt, params) in REQUESTS.items():
        request_id, own = f"{name} {salt}", salted(params, salt)
        engine.add_request(prompt_token_ids=prompt, params=own, request_id=request_id)
        told.asked[request_id] = name


def drain(engine: Engine, told: Told) -> None:
    for _ in range(200):
        if not engine.has_unfinished_requests():
            return
        told.take(engine.step())
    raise AssertionError("a request waits for ever")


def by_steps(engine: Engine, told: Told) -> None:
    add_all(engine, told)
    drain(engine, told)


def by_generate(engine: Engine, told: Told) -> None:
    """While requests of other callers run, which generate must leave alone."""
    add_all(engine, told)
    told.take(engine.step())
    salt = str(next(NAMES))
    prompts = [prompt for prompt, _ in REQUESTS.values()]
    engine.generate(prompts, [salted(params, salt) for _, params in REQUESTS.values()])


def by_stream(engine: Engine, told: Told) -> None:
    """While other requests run, whose outputs only `step` gives and of which one ends within the stream."""
    add_all(engine, told)
    prompt, params = REQUESTS["guided"]
    list(engine.stream(prompt_token_ids=prompt, params=params))


def check(engine: Engine, told: Told, expected: dict[str, list[list[int]]], where: object) -> None:
    """Check that every request was told its end, that all resources are free, and that later tokens are
    right."""
    assert not engine.has_unfinished_requests()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0), where
    engine.scheduler.check_integrity()
    assert not engine._inbox.streams, where
    for request_id, name in told.asked.items():
        for index, tokens in enumerate(expected[name]):
            key = (request_id, index)
            assert key in told.reasons, f"{request_id} was never told how it ended: {where}"
            got = told.tokens.get(key, [])
            if told.reasons[key] == "error":
                assert got == tokens[: len(got)], where
            else:
                assert got == tokens, where
    # Requests without a grammar first: a mask left over from a grammar would forbid their tokens.
    for names in (("plain", "scored"), ("guided",)):
        prompts, params = zip(*(REQUESTS[name] for name in names), strict=True)
        salt = f"later {next(NAMES)}"
        outputs = engine.generate(prompts, [salted(one, salt) for one in params])
        wanted = [tokens for name in names for tokens in expected[name]]
        assert [output.new_token_ids for output in outputs] == wanted, where


def attack(engine: Engine, scenario: Scenario, aim: Aim, told: Told) -> None:
    """Play a scenario with an error aimed at one of its lines, then step until no request is left."""
    with aim.watching():
        try:
            scenario(engine, told)
        except KeyboardInterrupt:
            assert aim.is_hit
    drain(engine, told)
    # Another step forgets ended requests.
    told.take(engine.step())


def sample(targets: Sequence[Line], count: int, seed: int = 0) -> Iterator[Line]:
    """Return `count` targets, or all, in a random order."""
    return iter(random.Random(seed).sample(list(targets), min(count, len(targets))))
