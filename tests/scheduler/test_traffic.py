"""Everything at once: shared prompts, growing chats, priorities, aborts and faults on pools far too small."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiled_mtp.graphs.buckets import prompt_chunk_limit
from compiled_mtp.request import Request, RequestOutput
from compiled_mtp.scheduler import Scheduler
from tests.fake_runner import FakeRunner
from tests.scheduler.test_prefix import request_of
from tests.scheduler.test_pressure import Recorder, check_windows
from tests.scheduling import expected_tokens, make_scheduler, preempt_one

TRAFFIC = st.fixed_dictionaries(
    {
        "mtp_step": st.sampled_from([0, 1, 3, 5]),
        "max_in_flight": st.integers(0, 1),
        "max_batch": st.integers(1, 5),
        "num_blocks": st.integers(8, 60),
        "block_size": st.sampled_from([4, 8]),
        "max_model_len": st.sampled_from([60, 400]),
        "prefill_chunk": st.sampled_from([8, 16, 40]),
        "busy_chunk": st.sampled_from([0, 8]),
        "max_prompt_chunks": st.sampled_from([1, 4, 4]),
        "prefix_step": st.just(8),
        "least_saved": st.sampled_from([0, 16]),
        "num_snapshots": st.integers(0, 6),
        "prefix_host_records": st.integers(0, 4),
        "prefix_host_blocks": st.sampled_from([0, 6, 24]),
        "host_records": st.integers(0, 3),
        "host_blocks": st.integers(0, 40),
        "real_host_blocks": st.sampled_from([None, None, 0, 3]),
        "copy_delay": st.integers(0, 3),
        "has_policies": st.booleans(),
        "has_lengths": st.booleans(),
        "tokens_ahead": st.sampled_from([0, 0, 10, 64]),
        "num_priorities": st.sampled_from([1, 3]),
        "arrival_rate": st.sampled_from([0.05, 0.3, 1.0]),
        "abort_rate": st.sampled_from([0.0, 0.0, 0.05]),
        "fault_rate": st.sampled_from([0.0, 0.0, 0.02]),
        "move_rate": st.sampled_from([0.0, 0.05]),
        "accept": st.sampled_from([None, None, 0]),
        "seed": st.integers(0, 10_000),
    }
)
_SIZES = (
    *("mtp_step", "max_in_flight", "max_batch", "num_blocks", "block_size", "max_model_len", "prefill_chunk"),
    *(
        "busy_chunk",
        "max_prompt_chunks",
        "prefix_step",
        "least_saved",
        "num_snapshots",
        "prefix_host_records",
    ),
    *("prefix_host_blocks", "host_records", "host_blocks"),
)


class Traffic:
    """Random requests, many with the beginning of others, and random faults.

    Ownership is checked after each operation, and each launch's reads and writes by `FakeRunner`.
    """

    def __init__(self, traffic: dict[str, Any]) -> None:
        self.traffic = traffic
        self.rng = rng = random.Random(traffic["seed"])
        policies: dict[str, Any] = {
            "depth": lambda *_: rng.randint(0, traffic["mtp_step"]),
            "is_two_phase": lambda: rng.random() < 0.5,
        }
        sizes = {name: traffic[name] for name in _SIZES}
        if traffic["has_lengths"]:
            chunks = prompt_chunk_limit(128, traffic["max_batch"])
            sizes |= {"prefill_chunk": 128, "prompt_lengths": (64, 128), "max_prompt_chunks": chunks}
        self.scheduler = make_scheduler(**sizes, **(policies if traffic["has_policies"] else {}))
        self.scheduler._planner.admission.tokens_ahead = traffic["tokens_ahead"]
        self.runner = FakeRunner(
            self.scheduler,
            traffic["max_in_flight"],
            traffic["seed"],
            accept=traffic["accept"],
            copy_delay=traffic["copy_delay"],
            host_blocks=traffic["real_host_blocks"],
        )
        self.num_preempted = 0
        self.requests: dict[tuple[str, int], Request] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.chats: list[list[int]] = [[100, 101] * 10, [100] * 17]

    def run(self, num_requests: int) -> Scheduler:
        """Run all requests to their ends."""
        traffic, scheduler, rng, waiting = self.traffic, self.scheduler, self.rng, num_requests
        for _ in range(600 * num_requests):
            while waiting and (rng.random() < traffic["arrival_rate"] or not scheduler.has_unfinished()):
                waiting -= 1
                self.add()
            if not (waiting or scheduler.has_unfinished()):
                break
            self.disturb()
            self.take(self.step())
            self.runner.fails_evictions = False
            self.runner.plans = self.runner.plans[-8:]
        assert self.reasons.keys() == self.requests.keys(), "the requests do not end"
        while self.runner.copies:  # Outputs of requests that were aborted meanwhile.
            self.step()
        assert scheduler.pool.num_used == scheduler.num_running == scheduler.num_waiting == 0
        return scheduler

    def step(self) -> list[RequestOutput]:
        """Do one step, and check the windows of grammars."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None and plan.is_guided:
            check_windows(self.scheduler, self.runner, plan)
        self.scheduler.update(self.runner.run(plan))
        self.scheduler.check_integrity()
        return self.scheduler.take_outputs()

    def add(self) -> None:
        """Add a request that continues the beginning of another, or begins anew."""
        rng, name = self.rng, str(len(self.requests))
        chat = rng.choice([[], *self.chats])
        kept = len(chat) if rng.random() < 0.7 else rng.randint(0, len(chat))
        prompt = chat[:kept] + [rng.randint(100, 102) for _ in range(rng.randint(1, 30))]
        kind = rng.choice(["plain", "plain", "guided", "logprobs", "prompt_logprobs"])
        fields: dict[str, Any] = {kind: 1} if kind.endswith("logprobs") else {}
        fields["ignore_eos"] = rng.random() < 0.7
        fields["cache_salt"] = rng.choice([None, None, "x"])
        fields["include_drafts"] = rng.random() < 0.3
        max_tokens = rng.choice([1, 5, 40, 120])
        priority = rng.randrange(self.traffic["num_priorities"])
        choices = []
        for index in range(rng.choice([1, 1, 1, 3])):
            seed = 10 * int(name) + index
            request = request_of(name, prompt, max_tokens, seed, **fields)
            request.index, request.priority = index, priority
            request.guide = Recorder(seed) if kind == "guided" else None
            choices.append(request)
        try:
            self.scheduler.add(*choices)
        except ValueError:
            assert len(prompt) >= self.scheduler.limits.longest
            return
        self.chats = [*self.chats[-5:], prompt]
        for request in choices:
            self.requests[request.key], self.tokens[request.key] = request, []

    def disturb(self) -> None:
        """Abort a request, or inject a fault."""
        traffic, rng, scheduler = self.traffic, self.rng, self.scheduler
        live = sorted({name for name, _ in self.requests.keys() - self.reasons.keys()})
        live = [name for name in live if scheduler.is_live(name)]
        if live and rng.random() < traffic["abort_rate"]:
            scheduler.abort(rng.choice(live))
            scheduler.check_integrity()
        if live and rng.random() < traffic["fault_rate"]:
            fault = rng.choice(["fail_next", "lose_next", "recover", "fails_evictions", "broken"])
            if fault == "recover":
                self.runner.drop()
                scheduler.recover("interrupted")
                scheduler.check_integrity()
            elif fault == "broken":
                self.runner.broken.add((self.requests[rng.choice(live), 0].history.seed, rng.randint(0, 9)))
            else:
                setattr(self.runner, fault, True)
        # A prompt of 400 tokens takes 50 launches: preempted again and again, it would not end.
        if live and self.num_preempted < 30 and rng.random() < traffic["move_rate"]:
            self.num_preempted += 1
            preempt_one(scheduler, rng.choice(live))

    def take(self, outputs: list[RequestOutput]) -> None:
        """Take the outputs; each request must get the tokens that it gets alone."""
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.reasons, "output after the end"
            request = self.requests[key]
            self.tokens[key] += output.new_token_ids
            expected = expected_tokens(request, self.scheduler.limits.longest)
            tokens = self.tokens[key]
            assert tokens == expected[: len(tokens)]
            if output.finish_reason is None:
                continue
            self.reasons[key] = output.finish_reason
            if output.finish_reason in ("stop", "length"):
                assert tokens == expected
                self.chats = [*self.chats[-5:], request.prompt_token_ids + tokens]
            else:
                faults = self.traffic["abort_rate"] + self.traffic["fault_rate"]
                assert faults, output.error


@given(traffic=TRAFFIC)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_under_all_faults_tokens_are_those_of_each_request_alone(traffic: dict[str, Any]) -> None:
    Traffic(traffic).run(5)
