"""Scores of given tokens are, to the bit, the log probabilities of a request that draws these tokens."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from compiled_mtp.engine import Engine
from compiled_mtp.plan import StepPlan, StepResult
from compiled_mtp.request import Request, RequestOutput, SamplingParams
from compiled_mtp.sampling.logprobs import TokenLogprob
from tests.engine.test_request_features import GRAMMARS, MIXES, prompt_of, write_small_checkpoint
from tests.engines import make_engine
from tests.sampling.grammars import EOS, TOKENIZER

# Depth, largest batch, launches in flight.
ENGINES: tuple[tuple[int | str, int, int], ...] = ((0, 1, 0), (3, 8, 0), (7, 8, 1), ("auto", 8, 1), (7, 1, 0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("score"))


@cache
def engine_of(directory: Path, mtp_step: int | str, max_batch: int, max_in_flight: int) -> Engine:
    return make_engine(
        directory, mtp_step=mtp_step, max_batch=max_batch, max_in_flight=max_in_flight, scoring=True
    )


def params_of(mix: dict[str, Any]) -> SamplingParams:
    """Return the parameters of a mix, with both kinds of log probabilities."""
    grammar = {} if mix["grammar"] is None else GRAMMARS[mix["grammar"]]
    fields = {name: value for name, value in mix.items() if name not in ("grammar", "include_drafts")}
    return SamplingParams(**(fields | grammar | {"logprobs": 4, "logprobs_mode": "both"}))


def entries(outputs: list[RequestOutput]) -> list[list[TokenLogprob]]:
    """Return each output's log probabilities; every token has an entry of both kinds."""
    found = []
    for output in outputs:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.new_token_ids
        for entry in output.logprobs:
            assert entry.processed is not None
            assert entry.processed.token_id == entry.token_id
        found.append(output.logprobs)
    return found


def check_scores(
    directory: Path, mixes: list[dict[str, Any]], engine_of: Callable[..., Engine] = engine_of
) -> None:
    """Decode every mix alone without drafts; compare the scores of its tokens in every engine.

    engine_of: returns the engine of a checkpoint and of one of ENGINES.
    """
    plain = engine_of(directory, 0, 1, 0)
    prompts = [prompt_of(f"f{index}") for index in range(len(mixes))]
    params = [params_of(mix) for mix in mixes]
    decoded = [plain.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    # A request whose first row has no legal token draws none.
    assert all(output.error_kind != "engine" for output in decoded)
    kept = [index for index, output in enumerate(decoded) if output.new_token_ids]
    prompts, params, decoded = ([every[i] for i in kept] for every in (prompts, params, decoded))
    if not kept:
        return
    expected = entries(decoded)
    for key in ENGINES:
        scored = engine_of(directory, *key).score(prompts, [one.new_token_ids for one in decoded], params)
        assert [output.new_token_ids for output in scored] == [output.new_token_ids for output in decoded]
        assert entries(scored) == expected, key
        engine_of(directory, *key).scheduler.check_integrity()


@given(mixes=st.lists(MIXES, min_size=2, max_size=6))
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
def test_scores_of_random_mixes_are_those_of_decoding(checkpoint: Path, mixes: list[dict[str, Any]]) -> None:
    check_scores(checkpoint, mixes)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@given(mixes=st.lists(MIXES, min_size=10, max_size=10))
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_scores_of_500_random_mixes_are_those_of_decoding(
    checkpoint: Path, mixes: list[dict[str, Any]]
) -> None:
    check_scores(checkpoint, mixes)


def foreign(count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts, and continuations that no model would draw, with eos ids inside."""
    rng = random.Random(7)
    prompts = [[rng.randrange(5, 4000) for _ in range(rng.randint(1, 150))] for _ in range(count)]
    continuations = [[rng.randrange(5, 4000) for _ in range(rng.randint(1, 30))] for _ in range(count)]
    for continuation in continuations[::3]:
        continuation[len(continuation) // 2] = EOS[0]
    return prompts, continuations


def test_scores_of_any_tokens_do_not_depend_on_depth_batch_or_cache(checkpoint: Path) -> None:
    prompts, continuations = foreign(10)
    shared = [(3 * i) % 4000 for i in range(70)]
    prompts = [shared + prompt[:60] for prompt in prompts]
    params = SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=0.5, stop=["e"], min_tokens=2)
    expected = None
    for key in ENGINES:
        engine = engine_of(checkpoint, *key)
        scored = engine.score(prompts, continuations, params)
        assert [output.new_token_ids for output in scored] == continuations
        assert {output.finish_reason for output in scored} == {"length"}
        expected = expected or entries(scored)
        assert entries(scored) == expected, key
        assert not any(output.metrics.cached_tokens for output in scored[:1])
        # Prompts resume after the cached prefix that they share.
        assert engine.stats().prefix_hits > 0


def test_a_forced_text_has_the_scores_of_its_grammar(checkpoint: Path) -> None:
    """Raw log probabilities of a text that a grammar forces equal the scores of its tokens without one."""
    text = "north by northwest, or so"
    engine = engine_of(checkpoint, 3, 8, 0)
    params = SamplingParams(guided_choice=[text], logprobs=3, max_tokens=60, temperature=0.0)
    (drawn,) = engine.generate(["def f():"], params)
    assert drawn.new_text == text
    (scored,) = engine.score(["def f():"], [drawn.new_token_ids], SamplingParams(logprobs=3))
    assert drawn.logprobs is not None
    assert scored.logprobs is not None
    for one, other in zip(drawn.logprobs, scored.logprobs, strict=True):
        assert (one.logprob, one.rank, one.top, one.entropy) == (
            other.logprob,
            other.rank,
            other.top,
            other.entropy,
        )
    (of_text,) = engine.score("def f():", text)
    assert of_text.new_token_ids == TOKENIZER.encode(text)
    assert of_text.new_text == text


@pytest.mark.parametrize(("offload_gb", "how"), [(0, "recomputes"), (0.1, "offloads")])
def test_preempted_requests_keep_their_scores(checkpoint: Path, offload_gb: float, how: str) -> None:
    prompts, continuations = foreign(6)
    prompts = [(prompt * 30)[:30] for prompt in prompts]
    continuations = [(continuation * 250)[:250] for continuation in continuations]
    expected = entries(engine_of(checkpoint, 3, 8, 0).score(prompts, continuations))
    engine = make_engine(checkpoint, num_blocks=26, offload_gb=offload_gb, scoring=True)
    assert entries(engine.score(prompts, continuations)) == expected
    assert getattr(engine.stats(), how) > 0
    assert engine.scheduler.pool.num_used == 0


def test_scored_requests_do_not_disturb_others(checkpoint: Path) -> None:
    prompts, continuations = foreign(6)
    engine = engine_of(checkpoint, 3, 8, 0)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    (alone,) = engine.generate([[7, 8, 9]], params)
    expected = entries(engine.score(prompts, continuations))
    engine.add_request(prompt_token_ids=[7, 8, 9], params=params, request_id="beside")
    assert entries(engine.score(prompts, continuations)) == expected
    tokens = []
    while engine.has_unfinished_requests():
        tokens += [token for output in engine.step() for token in output.new_token_ids]
    assert tokens == alone.new_token_ids
    # Their slots hold no given ids any more.
    assert engine.generate([[7, 8, 9]] * 8, params)[7].new_token_ids == alone.new_token_ids


def shapes_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Return the list that gets each round of the engine: its requests, verified drafts and chain."""
    found, run = [], engine.runner.run

    def recorded(plan: StepPlan | None) -> StepResult | None:
        if plan is not None and plan.kind == "verify":
            found.append((len(plan.slots), *plan.shape))
        return run(plan)

    monkeypatch.setattr(engine.runner, "run", recorded)
    return found


@pytest.mark.parametrize("mtp_step", [0, 3, 7])
def test_rounds_of_given_tokens_verify_as_many_as_are_left(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, mtp_step: int
) -> None:
    engine = engine_of(checkpoint, mtp_step, 1 if mtp_step != 3 else 8, 0)
    shapes = shapes_of(engine, monkeypatch)
    # The first token comes from prefill.
    for count, expected in ((25, [15, 7]), (18, [15, 3]), (5, [3]), (1, [])):
        (scored,) = engine.score([[5, 6, 7]], [list(range(20, 20 + count))])
        assert [verify for _, verify, _ in shapes] == expected
        assert {chain for *_, chain in shapes} <= {0}
        assert scored.metrics.rounds == len(expected)
        shapes.clear()


def test_rounds_of_many_given_requests_are_narrower(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled_mtp.runner.spec._MOST_GIVEN_ROWS", 64)
    engine = make_engine(checkpoint, max_batch=10, scoring=True)
    lengths = [120, 120, 80, 80, 60, 60, 60, 60, 40, 40]
    prompts = [[5, 6, index] for index in range(10)]
    continuations = [[(7 * i + 3 * index) % 4000 for i in range(n)] for index, n in enumerate(lengths)]
    shapes = shapes_of(engine, monkeypatch)
    scored = engine.score(prompts, continuations)
    alone = engine_of(checkpoint, 3, 8, 0).score(prompts, continuations)
    assert entries(scored) == entries(alone)
    most = {3: 10, 7: 8, 15: 4}
    assert all(count <= most[verify] for count, verify, _ in shapes)
    assert {verify for _, verify, _ in shapes} == most.keys()


def test_scores_show_nothing_of_drafts(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, mtp_step="auto", scoring=True)
    engine.score([[5, 6, 7]] * 3, [list(range(20, 60))] * 3)
    stats = engine.stats()
    assert (stats.finished, stats.output_tokens) == (3, 120)
    assert stats.speculation.rounds == sum(stats.speculation.drafted_by_index) == 0
    assert sum(sum(reasons.values()) for reasons in stats.rounds_by_depth.values()) == 0


def live_requests() -> int:
    """The requests of the whole process that something still holds."""
    gc.collect()
    return sum(type(one) is Request for one in gc.get_objects())


def test_many_scores_report_progress_and_may_be_interrupted(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    interrupt_at = 0

    def progress(what: str, done: int, total: int) -> None:
        if what == "requests":
            seen.append((done, total))
            if done == interrupt_at:
                raise KeyboardInterrupt

    engine = make_engine(checkpoint, progress, mtp_step=7, scoring=True)
    prompts, continuations = [[5, 6, index % 90] for index in range(200)], [[9, 10]] * 200
    before = live_requests()
    scored = engine.score(prompts, continuations)
    assert len(scored) == 200
    assert seen[-1] == (200, 200)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    # Memory does not grow with the number of scores: the planner alone holds the last round's requests.
    assert live_requests() <= before + 8
    interrupt_at = seen[3][0]
    seen.clear()
    with pytest.raises(KeyboardInterrupt):
        engine.score(prompts, continuations)
    assert len(seen) == 4
    assert not engine.has_unfinished_requests()
    engine.scheduler.check_integrity()
    assert (engine.stats().running, engine.stats().waiting, engine.stats().blocks_used) == (0, 0, 0)
    interrupt_at = 0
    assert entries(engine.score(prompts[:9], continuations[:9])) == entries(scored[:9])
    assert live_requests() <= before + 8


def test_a_token_that_a_grammar_forbids_ends_its_score(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, 3, 8, 0)
    good, bad = TOKENIZER.encode("no"), TOKENIZER.encode("x")
    params = SamplingParams(guided_regex="(no)+")
    (scored,) = engine.score([[5, 6]], [good * 3 + bad], params)
    assert scored.finish_reason == "error"
    assert scored.new_token_ids == good * 3
    assert scored.error is not None
    assert "grammar" in scored.error


def test_mistakes_are_named(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, 3, 8, 0)
    plain = make_engine(checkpoint)
    for call, text in (
        (lambda: plain.score([[1]], [[2]]), "scoring must be set to score tokens, got False; make Engine"),
        (lambda: engine.score([[1]], []), "continuations must be as many as prompts, got 0 for 1"),
        (lambda: engine.score([[1]], [[]]), r"prompts\[0\]: continuation must have at least one token"),
        (lambda: engine.score([[1]], [[-1]]), r"prompts\[0\]: continuation must lie in 0..4159, got -1"),
        (lambda: engine.score([[1]], 5), "continuations must be a list, got 5"),
        (
            lambda: engine.score([[1]] * 3, [[2], [2], None]),  # type: ignore[list-item]
            r"continuations\[2\] must be a text or token ids, got None; give one for each prompt",
        ),
        (
            lambda: engine.score([[1]] * 2, [[2], [2] * 512]),
            r"prompts\[1\]: prompt and continuation must have at most 512 tokens, got 1 and 512",
        ),
        (
            lambda: engine.score([[1]], [[2]], SamplingParams(n=2)),
            r"prompts\[0\]: n must be 1 with a continuation, got 2",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call()
        assert not engine.has_unfinished_requests()
