"""Any mix of request parameters gives the same tokens and log probabilities at every depth and batch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.ops.features import RECENT_IDS
from compiled_mtp.plan import SlotSampling, StepPlan, StepResult
from compiled_mtp.runner.runner import Runner
from tests.checkpoints import write_checkpoint
from tests.drivers import BLOCKS_EACH, Driver, make_runner, with_rounds
from tests.engines import prompt_of
from tests.ops.sample_cases import pack_masks

VOCAB = 512
COUNT = 10
PROMPTS = [prompt_of(length, seed, VOCAB) for seed, length in enumerate((20, 9, 66))]
FEW = (3, 17, 40, 41, 99, 200, 511)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Runner]:
    """Runners of depth 0, and of depths up to 3."""
    directory: Path = tmp_path_factory.mktemp("mixes")
    write_checkpoint(directory, hidden_size=64, num_value_heads=1, intermediate_size=64)
    deep = with_rounds(make_runner(directory), product((0, 1, 3), repeat=2))
    return {0: make_runner(directory, mtp_step=0), 3: deep}


@st.composite
def samplings(draw: st.DrawFn, prompt: list[int]) -> SlotSampling:
    few = draw(st.booleans())
    ids = st.sampled_from(FEW) if few else st.integers(0, VOCAB - 1)
    return SlotSampling(
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        temperature=draw(st.sampled_from([0.0, 1e-5, 0.7, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 0, 2, 50])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.05, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        bias=tuple(draw(st.dictionaries(ids, st.floats(-20, 20, width=32), max_size=3)).items()),
        allowed_ids=FEW if few else None,
        min_position=len(prompt) + draw(st.integers(0, 8)),
        stop_ids=tuple(draw(st.lists(ids, max_size=2))),
        bad_words=tuple(map(tuple, draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=4)))),
        prompt_ids=tuple(prompt),
    )


@dataclass
class Mixed:
    """Requests of mixed kinds; a grammar forbids tokens of some, depending on the token before."""

    runner: Runner
    guided: set[str]
    driver: Driver = field(init=False)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.driver = Driver(self.runner)
        self.number = 0

    def mask(self, name: str, before: int) -> list[bool]:
        return [name not in self.guided or (token + before) % 3 != 0 for token in range(VOCAB)]

    def run(self, kind: Any, names: list[str], **fields: Any) -> StepResult | None:
        """Launch a plan, with masks if its kind takes them, and record its result."""
        driver, verify = self.driver, fields["shape"].verify
        slots = tuple(driver.slots[name] for name in names)
        self.number += 1
        listed = {"logprobs": 20, "has_processed_logprobs": True}
        plan = StepPlan(self.number, kind, slots, slots, wants_drafts=True, **listed, **fields)
        if kind in ("first", "accept"):
            rows = []
            for name in names:
                last = driver.tokens[name][-1:] or [0]
                rows += [self.mask(name, t) for t in [*last, *self.drafts.get(name, [])][: verify + 1]]
            self.runner.set_masks(plan, pack_masks(torch.tensor(rows)))
        result = self.runner.run(plan)
        assert result is not None
        assert result.error is None
        assert not result.not_finite
        if kind != "verify":
            for i, name in enumerate(names):
                driver.tokens[name] += result.token_ids[i]
                self.drafts[name] = list(result.drafts[i])
                *raw, processed = result.logprobs[i]
                self.logprobs[name] += zip(*raw, *processed[:-1], strict=True)
        return result

    def start(self, name: str, slot: int, prompt: list[int], sampling: SlotSampling, depth: int) -> bool:
        """Start a request and return whether its first token could be drawn."""
        self.driver.start(name, slot, prompt, sampling=sampling, is_first_apart=True)
        self.logprobs[name] = []
        result = self.run("first", [name], shape=RoundShape(0, depth))
        assert result is not None
        return not result.all_masked

    def round(self, names: list[str], verify: int, chain: int) -> list[str]:
        """Run one round and return the names of requests whose next token could not be drawn."""
        depth = {"shape": RoundShape(verify, chain)}
        self.run("verify", names, **depth)
        result = self.run("accept", names, **depth)
        assert result is not None
        return [names[i] for i in result.all_masked]


def alone(runner: Runner, prompt: list[int], sampling: SlotSampling, is_guided: bool) -> Mixed:
    """Decode one request alone, token by token, up to COUNT or the first position without a legal token."""
    mixed = Mixed(runner, {"a"} if is_guided else set())
    if mixed.start("a", 2, prompt, sampling, 0):
        while len(mixed.driver.tokens["a"]) < COUNT and not mixed.round(["a"], 0, 0):
            pass
    return mixed


@given(data=st.data())
@settings(max_examples=8, deadline=None, derandomize=True, phases=(Phase.generate,))
def test_tokens_and_logprobs_do_not_depend_on_depth_or_batch(
    runners: dict[int, Runner], data: st.DataObject
) -> None:
    every = [data.draw(samplings(prompt)) for prompt in PROMPTS]
    guided = data.draw(st.sets(st.sampled_from("abc")))
    streams = {name: alone(runners[0], PROMPTS[i], every[i], name in guided) for i, name in enumerate("abc")}
    rng = random.Random(data.draw(st.integers(0, 1000)))
    mixed = Mixed(runners[3], guided)
    depth = rng.choice((1, 3))
    live = [name for i, name in enumerate("abc") if mixed.start(name, i + 1, PROMPTS[i], every[i], depth)]
    while live := [name for name in live if len(mixed.driver.tokens[name]) < COUNT]:
        group = rng.sample(live, rng.randint(1, len(live)))
        # A round may verify another number of drafts than the chain left: missing drafts are the request's
        # older ones.
        verify = rng.choice([d for d in (0, 1, 3) if d <= min(len(mixed.drafts[n]) for n in group)])
        ended = mixed.round(group, verify, rng.choice((0, 1, 3)))
        live = [name for name in live if name not in ended]
    for name, stream in streams.items():
        wanted, got = stream.driver.tokens["a"], mixed.driver.tokens[name]
        assert got[:COUNT] == wanted[:COUNT]
        assert mixed.logprobs[name][:COUNT] == stream.logprobs["a"][:COUNT]
        assert len(mixed.logprobs[name]) == len(got)


def test_each_parameter_has_its_effect(tmp_path: Path) -> None:
    """Compare each parameter with the stream without it: the token that it forbids is not drawn."""
    write_checkpoint(tmp_path, hidden_size=64, num_value_heads=1, intermediate_size=64)
    sizes = {"max_batch": 9, "num_blocks": 9 * BLOCKS_EACH + 1}
    runners = {depth: make_runner(tmp_path, mtp_step=depth, **sizes) for depth in (0, 3)}

    def streams(depth: int, wishes: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
        mixed = Mixed(runners[depth], set())
        for slot, (name, wish) in enumerate(wishes.items(), start=1):
            mixed.start(name, slot, PROMPTS[0], SlotSampling(1, 0.0, 0, 1.0, 0.0, **wish), depth)
        while min(map(len, mixed.driver.tokens.values())) < COUNT:
            mixed.round(list(wishes), depth, depth)
        return {name: tokens[:COUNT] for name, tokens in mixed.driver.tokens.items()}

    plain = streams(0, {"nothing": {}})["nothing"]
    first, second, third = plain[:3]
    start = len(PROMPTS[0])
    wishes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "bias": {"bias": ((first, -100.0),)},
        "allowed": {"allowed_ids": (5, 6)},
        "held": {"stop_ids": (first,), "min_position": start + 5},
        "pair": {"bad_words": ((first, second),)},
        "triple": {"bad_words": ((first, second, third),)},
        "frequency": {"frequency_penalty": 100.0},
        "presence": {"presence_penalty": 100.0},
        "repetition": {"repetition_penalty": 1e6, "prompt_ids": tuple(plain[:1])},
    }
    got = streams(3, wishes)
    assert got == streams(0, wishes)
    assert got["nothing"] == plain
    assert got["bias"][0] != first
    assert set(got["allowed"]) <= {5, 6}
    assert first not in got["held"][:5]
    assert got["pair"][0] == first
    assert got["pair"][1] != second
    assert (first, second) not in pairwise(got["pair"])
    assert got["triple"][:2] == [first, second]
    assert got["triple"][2] != third
    assert len(set(got["frequency"])) == COUNT
    assert len(set(got["presence"])) == COUNT
    assert got["repetition"][0] != first


def test_the_last_tokens_of_a_slot_are_those_of_its_request_alone(runners: dict[int, Runner]) -> None:
    """Bad words read them in a ring by position, which the slot's last request has filled."""
    neutral = SlotSampling(1, 0.0, 0, 1.0, 0.0)
    first = alone(runners[0], PROMPTS[0], neutral, False).driver.tokens["a"][0]
    mixed = Mixed(runners[0], set())
    mixed.start("a", 1, PROMPTS[1], replace(neutral, bad_words=((500, 501, 502),)), 0)
    while len(mixed.driver.tokens["a"]) < RECENT_IDS:
        mixed.round(["a"], 0, 0)
    others = runners[0].step.slots.recent_ids[1].tolist()
    assert min(others) >= 0
    banned = tuple((other, first) for other in set(others))
    mixed.start("b", 1, PROMPTS[0], replace(neutral, bad_words=banned), 0)
    assert mixed.driver.tokens["b"] == [first]


def test_masks_are_checked(runners: dict[int, Runner]) -> None:
    plan = StepPlan(0, "accept", (1, 2), (0, 1), shape=RoundShape(3, 3))
    with pytest.raises(ValueError, match=r"masks must have shape \(8, 16\) for a first or accept plan, got"):
        runners[3].set_masks(plan, torch.zeros(7, 16, dtype=torch.int32))
    with pytest.raises(ValueError, match="for decode; give one mask per row"):
        runners[3].set_masks(StepPlan(0, "decode", (1,), (0,)), torch.zeros(1, 16, dtype=torch.int32))
