"""Random adds, steps and aborts: tokens are the plain stream's and no slot or block leaks."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_mtp.ops.find_drafts import LEAST_THRESHOLD
from compiled_mtp.request import SamplingParams
from compiled_mtp.rounds import drafters
from tests.checkpoints import write_checkpoint
from tests.engines import collect, force_drafts, make_engine, prompt_of, run_to_end

VOCAB = 512
# All that a request may draw where drafts come from the text: its answers then repeat themselves.
FEW = range(5, 8)
LENGTHS = (1, 2, 17, 64, 90)
# Shared by the session: the machine is built anew for every example.
_DIRECTORY = TemporaryDirectory()


@cache
def checkpoint() -> Path:
    return write_checkpoint(Path(_DIRECTORY.name), hidden_size=64, num_value_heads=1, intermediate_size=64)


def params_of(temperature: float, max_tokens: int, few: bool) -> SamplingParams:
    allowed = FEW if few else None
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=7, ignore_eos=True, allowed_token_ids=allowed
    )


@cache
def plain(length: int, temperature: float, few: bool) -> list[int]:
    engine = make_engine(checkpoint(), mtp_step=0, max_batch=1)
    prompt, params = prompt_of(length, length, VOCAB), params_of(temperature, 30, few)
    engine.add_request(prompt_token_ids=prompt, params=params, request_id="a")
    return run_to_end(engine)["a"]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        mtp_step=st.sampled_from([0, 1, 3]),
        max_batch=st.integers(1, 3),
        max_in_flight=st.integers(0, 1),
        num_blocks=st.sampled_from([None, 9, 14]),
        seed=st.integers(0, 99),
        has_lookup=st.booleans(),
    )
    def create(
        self,
        mtp_step: int,
        max_batch: int,
        max_in_flight: int,
        num_blocks: int | None,
        seed: int,
        has_lookup: bool,
    ) -> None:
        """Drafts are right, wrong or in between; or they come from the text wherever it has any."""
        self.has_lookup = has_lookup
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drafters, "FIRST_THRESHOLD", LEAST_THRESHOLD)
            self.engine = make_engine(
                checkpoint(),
                mtp_step=mtp_step,
                max_batch=max_batch,
                max_in_flight=max_in_flight,
                num_blocks=num_blocks,
                max_model_len=128,
                lookup="auto" if has_lookup else "off",
            )
        self.expected: dict[str, list[int]] = {}
        self.streams: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        rng = random.Random(seed)
        if not has_lookup:
            force_drafts(self.engine, self.streams, lambda name, pos: rng.randint(0, mtp_step))

    @rule(
        length=st.sampled_from(LENGTHS),
        temperature=st.sampled_from([0.0, 0.9]),
        max_tokens=st.integers(1, 30),
    )
    def add(self, length: int, temperature: float, max_tokens: int) -> None:
        name = f"r{len(self.expected)}"
        self.streams[name] = plain(length, temperature, self.has_lookup)
        self.expected[name] = self.streams[name][:max_tokens]
        self.engine.add_request(
            prompt_token_ids=prompt_of(length, length, VOCAB),
            params=params_of(temperature, max_tokens, self.has_lookup),
            request_id=name,
        )

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    @precondition(lambda self: set(self.expected) - set(self.reasons))
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        live = sorted(set(self.expected) - set(self.reasons))
        self.engine.abort(data.draw(st.sampled_from(live)))
        self.take(self.engine.step())

    def take(self, outputs: list[Any]) -> None:
        for output in outputs:
            assert output.request_id not in self.reasons
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
        collect(self.tokens, outputs)

    @invariant()
    def tokens_are_a_prefix_of_the_plain_stream(self) -> None:
        for name, tokens in getattr(self, "tokens", {}).items():
            assert tokens == self.expected[name][: len(tokens)]

    @invariant()
    def every_block_and_slot_has_one_owner(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.has_unfinished_requests():
            self.take(self.engine.step())
        for name, reason in self.reasons.items():
            assert reason in ("length", "abort")
            if reason == "length":
                assert self.tokens[name] == self.expected[name]
        assert set(self.reasons) == set(self.expected)
        assert self.engine.stats().blocks_used == 0


EngineMachine.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestEngineMachine = EngineMachine.TestCase
