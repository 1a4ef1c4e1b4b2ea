"""Drafts from the text: the same tokens and log probabilities with lookup forced, chosen and off."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.engine import Engine
from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.ops.find_drafts import LEAST_THRESHOLD, MOST_THRESHOLD, cpu
from compiled_mtp.request import SamplingParams
from compiled_mtp.rounds import drafters
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.communicators.threads import engine_of as engine_of_ranks
from tests.engine.lookup_runs import VOCAB, Found, crowd, requests, run
from tests.engine.test_request_features import write_small_checkpoint
from tests.engines import LateCopyStream, make_engine, prompt_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense")
    write_checkpoint(directory, num_q_heads=4, num_value_heads=4)
    return directory


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what follows any match, whatever it was worth before."""
    monkeypatch.setattr(drafters, "FIRST_THRESHOLD", LEAST_THRESHOLD)
    monkeypatch.setattr(cpu, "RISE", 0)


@cache
def plain(directory: Path, dtype: str = "float32") -> Found:
    """Each request alone, one token at a time."""
    return run(make_engine(directory, mtp_step=0, max_batch=1, dtype=dtype), requests(), 0)


MODES = [
    (1, 1, 0, {"dtype": "bfloat16"}),
    (3, 1, 0, {}),
    (3, 1, 1, {"dtype": "bfloat16"}),
    (7, 1, 1, {}),
    (3, 6, 1, {}),
    (5, 3, 0, {"prefix_cache": False}),
    (2, 9, 1, {}),
    ("auto", 1, 1, {}),
    ("auto", 3, 0, {}),
]


@pytest.mark.parametrize(("mtp_step", "max_batch", "max_in_flight", "options"), MODES)
def test_forced_drafts_from_the_text_change_no_token(
    checkpoint: Path,
    forced: None,
    mtp_step: int | str,
    max_batch: int,
    max_in_flight: int,
    options: dict[str, Any],
) -> None:
    sizes = {"mtp_step": mtp_step, "max_batch": max_batch, "max_in_flight": max_in_flight}
    engine = make_engine(checkpoint, lookup="auto", **sizes, **options)
    shapes: list[RoundShape] = []
    found = run(engine, requests(), max_batch, shapes)
    assert found == plain(checkpoint, options.get("dtype", "float32"))
    stats = engine.stats().speculation
    assert 0 < stats.lookup_accepted < stats.lookup_drafted
    assert any(shape.verify == 15 for shape in shapes)


@pytest.mark.parametrize(
    ("mtp_step", "max_batch", "max_in_flight", "drafts"),
    [(2, 9, 1, 3), (5, 3, 0, 7), ("auto", 1, 1, 7), (7, 2, 1, 0)],
)
def test_wide_rounds_of_few_drafts_change_no_token(
    checkpoint: Path,
    forced: None,
    monkeypatch: pytest.MonkeyPatch,
    mtp_step: int | str,
    max_batch: int,
    max_in_flight: int,
    drafts: int,
) -> None:
    """Where no memory is left for longer rings."""
    monkeypatch.setattr("compiled_mtp.runner.max_batch._WIDE_SHARE", 0.0)
    sizes = {"mtp_step": mtp_step, "max_batch": max_batch, "max_in_flight": max_in_flight}
    engine = make_engine(checkpoint, lookup="auto", **sizes)
    deepest = engine.runner.spec.mtp_step
    assert engine.runner.spec.max_drafts == max(drafts, deepest)
    shapes: list[RoundShape] = []
    assert run(engine, requests(), max_batch, shapes) == plain(checkpoint)
    assert engine.stats().speculation.lookup_accepted > 0
    assert {shape.verify for shape in shapes if shape.verify > shape.chain} == ({drafts} if drafts else set())


@pytest.mark.parametrize(("mtp_step", "max_batch", "max_in_flight", "options"), [MODES[2], MODES[4]])
def test_chosen_drafts_from_the_text_change_no_token(
    checkpoint: Path, mtp_step: int | str, max_batch: int, max_in_flight: int, options: dict[str, Any]
) -> None:
    sizes = {"mtp_step": mtp_step, "max_batch": max_batch, "max_in_flight": max_in_flight}
    engine = make_engine(checkpoint, lookup="auto", **sizes, **options)
    assert run(engine, requests(), 7) == plain(checkpoint, options.get("dtype", "float32"))
    assert engine.stats().speculation.lookup_rounds > 0


@pytest.mark.parametrize(
    ("mtp_step", "max_batch", "max_in_flight", "options"), [MODES[1], *MODES[3:6], MODES[8]]
)
def test_either_source_in_any_round_changes_no_token(
    checkpoint: Path, mtp_step: int | str, max_batch: int, max_in_flight: int, options: dict[str, Any]
) -> None:
    """Each slot takes the text's drafts or the chain's at random, so that rounds verify both side by side."""
    sizes = {"mtp_step": mtp_step, "max_batch": max_batch, "max_in_flight": max_in_flight}
    engine = make_engine(checkpoint, lookup="auto", **sizes, **options)
    generator, programs = torch.Generator().manual_seed(max_batch), engine.runner.programs
    threshold = engine.runner.step.slots.threshold
    assert threshold is not None

    def at_random(launch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            is_chain = torch.randint(0, 2, threshold.shape, generator=generator, dtype=torch.int32)
            threshold.copy_(LEAST_THRESHOLD + MOST_THRESHOLD * is_chain)
            return launch(*given, **named)

        return call

    for name in ("decode", "accept", "prefill"):
        setattr(programs, name, at_random(getattr(programs, name)))
    assert run(engine, requests(), 5) == plain(checkpoint, options.get("dtype", "float32"))
    stats = engine.stats().speculation
    assert 0 < stats.lookup_rounds < stats.rounds
    assert sum(stats.drafted_by_index) > 0


# Each with few ids to choose from, so that answers repeat themselves.
FEW: dict[str, Any] = {"allowed_token_ids": range(5, 8), "ignore_eos": True, "max_tokens": 28, "logprobs": 2}
FEATURES: dict[str, dict[str, Any]] = {
    "penalties": FEW | {"presence_penalty": 0.4, "frequency_penalty": 0.05, "repetition_penalty": 1.1},
    "rewards": FEW | {"frequency_penalty": -0.3, "logprobs_mode": "both"},
    "filters": FEW | {"top_k": 2, "top_p": 0.9, "min_p": 0.05},
    "processed": FEW | {"logprobs": 20, "logprobs_mode": "processed", "top_k": 2},
    "bias": {"logit_bias": {"5": 40.0, "6": 39.0}, "max_tokens": 28, "logprobs": 1},
    "prompt": FEW | {"prompt_logprobs": 3, "include_drafts": True},
    "stop": FEW | {"stop_token_ids": [7], "min_tokens": 20},
    "choices": FEW | {"n": 3},
    "one": FEW | {"max_tokens": 1},
    "two": FEW | {"max_tokens": 2},
    "greedy": FEW | {"temperature": 0.0},
}


def features(directory: Path, **options: Any) -> tuple[list[Any], Engine]:
    """What an engine makes of requests with each of FEATURES, and the engine."""
    params = [
        SamplingParams(**({"temperature": 0.9, "seed": i} | one)) for i, one in enumerate(FEATURES.values())
    ]
    prompts = [prompt_of(20 + i, i, VOCAB) + [5, 6, 7] * (i % 4) for i in range(len(params))]
    engine = make_engine(directory, **options)
    named = ("new_token_ids", "logprobs", "prompt_logprobs", "finish_reason", "index", "error")
    return [[getattr(one, name) for name in named] for one in engine.generate(prompts, params)], engine


@cache
def plain_features(directory: Path, kv_dtype: str) -> list[Any]:
    return features(directory, mtp_step=0, max_batch=1, kv_dtype=kv_dtype)[0]


@pytest.mark.parametrize(
    ("mtp_step", "max_batch", "kv_dtype"),
    [(3, 1, "auto"), (1, 5, "auto"), ("auto", 13, "auto"), (6, 4, "float8_e4m3fn")],
)
def test_no_parameter_of_a_request_notices_drafts_from_the_text(
    checkpoint: Path, forced: None, mtp_step: int | str, max_batch: int, kv_dtype: str
) -> None:
    """Tokens, log probabilities and ends."""
    sizes = {"mtp_step": mtp_step, "max_batch": max_batch, "kv_dtype": kv_dtype}
    found, engine = features(checkpoint, lookup="auto", max_in_flight=1, **sizes)
    assert found == plain_features(checkpoint, kv_dtype)
    assert engine.stats().speculation.lookup_accepted > 50


def at_depth_0(engine: Engine) -> None:
    """Let the policy choose depth 0 for every round."""
    policy = engine._steps.depths
    assert policy is not None
    policy.controller.choose = lambda bucket, context: 0  # type: ignore[method-assign]


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_at_depth_0_the_text_still_drafts(checkpoint: Path, forced: None, max_in_flight: int) -> None:
    """Where a chain never pays, rounds of one row leave looked-up drafts for wide rounds without a chain."""
    engine = make_engine(
        checkpoint,
        lookup="auto",
        mtp_step="auto",
        mtp_depths=(0, 1),
        max_batch=1,
        max_in_flight=max_in_flight,
    )
    at_depth_0(engine)
    shapes: list[RoundShape] = []
    assert run(engine, requests(), 4, shapes) == plain(checkpoint)
    # A first round may verify what the first token left.
    assert {(0, 0), (15, 0)} <= set(shapes)
    stats = engine.stats().speculation
    assert stats.lookup_accepted > stats.lookup_rounds > 0
    assert stats.mean_new_tokens > 1.5


def test_a_mixture_of_experts(tmp_path: Path, forced: None) -> None:
    write_checkpoint(tmp_path, **dict(FAMILIES)["moe-mixed"])
    engine = make_engine(tmp_path, lookup="auto", max_batch=3, max_in_flight=1)
    assert run(engine, requests(), 2) == plain(tmp_path)
    assert engine.stats().speculation.lookup_accepted > 0


@pytest.mark.parametrize(
    ("max_model_len", "mtp_step", "max_in_flight"), [(96, 3, 0), (96, 7, 1), (90, "auto", 1), (83, 3, 0)]
)
def test_a_text_may_repeat_itself_up_to_its_last_position(
    checkpoint: Path, max_model_len: int, mtp_step: int | str, max_in_flight: int
) -> None:
    """The last round keeps drafts beyond max_model_len; the requests beside it go on."""
    params = SamplingParams(
        max_tokens=90, temperature=0.0, ignore_eos=True, logprobs=1, allowed_token_ids=(5,)
    )
    prompts = [[5] * length for length in (20, 61, 33)]
    found = []
    for depth in (0, mtp_step):
        options = {"mtp_step": depth, "max_in_flight": max_in_flight, "lookup": "auto"}
        engine = make_engine(checkpoint, max_model_len=max_model_len, max_batch=3, **options)
        outputs = engine.generate(prompts, params)
        assert [output.error for output in outputs] == [None] * 3
        found.append([(output.new_token_ids, output.logprobs) for output in outputs])
    assert found[0] == found[1]
    assert [len(ids) for ids, _ in found[0]] == [max_model_len - len(prompt) for prompt in prompts]
    assert engine.stats().speculation.lookup_accepted > 50


def test_without_lookup_there_is_no_text_on_the_device(checkpoint: Path) -> None:
    for options in ({"lookup": "off"}, {"lookup": "auto", "mtp_step": 0}):
        engine = make_engine(checkpoint, **options)
        spec = engine.runner.spec
        assert (spec.has_lookup, spec.wide_shapes) == (False, ())
        assert spec.max_drafts == spec.mtp_step
        assert engine.runner.step.slots.token_ids is None


@pytest.mark.parametrize("offload_gb", [0.0, 0.01])
def test_preempted_requests_keep_their_text(checkpoint: Path, forced: None, offload_gb: float) -> None:
    """Replayed from their prompts, or copied to host memory and back, with the text in their rows."""
    engine = make_engine(
        checkpoint, lookup="auto", max_batch=4, num_blocks=17, offload_gb=offload_gb, max_in_flight=1
    )
    crowd(engine, -100)
    assert run(engine, requests(), 1, arrivals=0.8) == plain(checkpoint)
    stats = engine.stats()
    assert (stats.offloads if offload_gb else stats.recomputes) > 0
    assert stats.speculation.lookup_accepted > 0


def test_a_prefix_from_host_memory_is_searched_too(
    checkpoint: Path, forced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted from the device between the turns: its keys come back, its text with the admission."""
    monkeypatch.setattr("compiled_mtp.runner.host_tiers.prefix_tier_bytes", lambda *_: 1 << 24)
    monkeypatch.setattr("compiled_mtp.cache.moves.CopyStream", LateCopyStream)
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, logprobs=1, allowed_token_ids=[5, 6])
    prompts = [[5, 6, 6, 5, *prompt_of(150 + 10 * i, 30 + i, VOCAB), 5, 6, 6] for i in range(3)]
    sizes: dict[str, Any] = {"max_model_len": 256, "max_in_flight": 1}
    alone = make_engine(checkpoint, mtp_step=0, max_batch=1, **sizes)
    wanted = [alone.generate([prompt], params)[0] for prompt in prompts]
    engine = make_engine(checkpoint, lookup="auto", num_blocks=17, max_batch=2, **sizes)
    for _ in range(3):
        for prompt, other in zip(prompts, wanted, strict=True):
            (output,) = engine.generate([prompt], params)
            assert (output.new_token_ids, output.logprobs) == (other.new_token_ids, other.logprobs)
            assert output.metrics.lookup_rounds > 0
        engine.scheduler.check_integrity()
    assert engine.stats().prefix_host_hits >= 3


def test_a_cached_prefix_is_searched_too(checkpoint: Path, forced: None) -> None:
    """The engine computes no row of a prompt's first part again, and finds drafts there all the same."""
    prompt = prompt_of(150, 1, VOCAB)
    # Two allowed ids follow each other once in the prompt, in its cached part.
    prompt[20:40] = [5, 6, 6, 5] * 5
    prompt[-4:] = [5, 6, 6, 5]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, allowed_token_ids=[5, 6])
    wanted = make_engine(checkpoint, mtp_step=0, max_batch=1).generate([prompt], params)[0].new_token_ids
    engine = make_engine(checkpoint, lookup="auto", max_batch=1)
    for is_cached in (False, True):
        before = engine.stats().speculation.lookup_rounds
        (output,) = engine.generate([prompt], params)
        assert output.new_token_ids == wanted
        assert (output.metrics.cached_tokens > 0) == is_cached
        assert engine.stats().speculation.lookup_rounds > before
        slots = engine.runner.step.slots
        assert slots.token_ids is not None
        row = slots.token_ids[int((slots.token_ids[:, 0] == prompt[0]).nonzero()[0])]
        assert row[: 150 + 12].tolist() == prompt + wanted


GRAMMARS: dict[str, dict[str, Any]] = {
    "repeats": {"guided_regex": r"(ab-[0-9][0-9]\. ){7}"},
    "copies": {"guided_regex": r"(left|right, left|right; ){12}"},
}


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_a_grammar_masks_the_rows_of_looked_up_drafts(
    tmp_path: Path, forced: None, max_in_flight: int
) -> None:
    """Masks are made for exactly the drafts that a round verifies, from either source."""
    write_small_checkpoint(tmp_path)
    given = {
        f"{name}-{temperature}": SamplingParams(
            max_tokens=90, temperature=temperature, seed=4, logprobs=1, **GRAMMARS[name]
        )
        for name in GRAMMARS
        for temperature in (0.0, 0.9)
    }

    def outputs(**options: Any) -> tuple[list[Any], Engine]:
        engine = make_engine(tmp_path, **options)
        if "mtp_depths" in options:
            at_depth_0(engine)
        prompts = ["ab-11. ab-22. ab-11. left"] * len(given)
        made = engine.generate(prompts, list(given.values()))
        return [(one.new_token_ids, one.logprobs, one.finish_reason) for one in made], engine

    wanted, _ = outputs(mtp_step=0, max_batch=1)
    depth_0 = {"max_batch": 1, "mtp_step": "auto", "mtp_depths": (0, 1)}
    for sizes in ({"max_batch": 1}, {"max_batch": 4}, depth_0):
        found, engine = outputs(lookup="auto", max_in_flight=max_in_flight, **sizes)
        assert found == wanted
        stats = engine.stats().speculation
        assert stats.lookup_accepted > stats.lookup_rounds


@pytest.mark.parametrize(("world", "max_batch"), [(2, 1), (2, 3), (4, 1)])
def test_ranks_look_up_the_same_drafts(tmp_path: Path, forced: None, world: int, max_batch: int) -> None:
    sizes = {"num_q_heads": 4, "num_kv_heads": 4, "num_value_heads": 4, "num_key_heads": 4}
    write_checkpoint(tmp_path, **sizes)
    with engine_of_ranks(tmp_path, 1, mtp_step=0) as engine:
        wanted = run(engine, requests(), 0)
    shapes: list[RoundShape] = []
    with engine_of_ranks(tmp_path, world, lookup="auto", max_batch=max_batch) as engine:
        assert run(engine, requests(), 3, shapes) == wanted
        assert engine.stats().speculation.lookup_accepted > 0
    assert any(shape.verify == 15 for shape in shapes)


def test_a_request_is_told_where_its_drafts_came_from(checkpoint: Path, forced: None) -> None:
    engine = make_engine(checkpoint, lookup="auto", max_batch=1)
    params = SamplingParams(
        max_tokens=40, temperature=0.9, seed=1, ignore_eos=True, include_drafts=True, allowed_token_ids=[5, 6]
    )
    (output,) = engine.generate([[5, 6, 5, 6, 5, 6]], params)
    assert output.drafts is not None
    looked_up = [one for one in output.drafts if one.is_looked_up]
    metrics = output.metrics
    assert len(looked_up) == metrics.lookup_rounds > 0
    assert sum(one.num_accepted for one in looked_up) == metrics.lookup_accepted
    assert sum(len(one.token_ids) for one in looked_up) == metrics.lookup_drafted
    assert sum(metrics.rounds_by_accepted) == metrics.rounds == len(output.drafts)
    chains = [one for one in output.drafts if not one.is_looked_up]
    assert sum(one.num_accepted for one in chains) == sum(metrics.accepted_by_index)


def test_a_released_slot_is_searched_by_no_later_request(checkpoint: Path, forced: None) -> None:
    """What a slot held before lies behind the new request's last position."""
    engine = make_engine(checkpoint, lookup="auto", max_batch=1)
    long = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, allowed_token_ids=[5])
    engine.generate([[5] * 60], long)
    (output,) = engine.generate([[9, 5, 8]], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    assert output.metrics.lookup_rounds == 0
    slots = engine.runner.step.slots
    assert slots.matched is not None
    assert torch.equal(slots.matched, torch.zeros_like(slots.matched))


@pytest.mark.parametrize("depths", [None, (0, 1)])
def test_scores_are_those_of_decoding_with_lookup(
    checkpoint: Path, forced: None, depths: tuple[int, ...] | None
) -> None:
    """Given tokens are the drafts of their rounds; other requests beside them still look theirs up.

    At depth 0 wide rounds have the shape of rounds of given tokens.
    """
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=2, ignore_eos=True, allowed_token_ids=[5, 6])
    params = params.model_copy(update={"logprobs": 1})
    engine = make_engine(
        checkpoint,
        lookup="auto",
        scoring=True,
        max_batch=2,
        **({} if depths is None else {"mtp_step": "auto", "mtp_depths": depths}),
    )
    if depths is not None:
        at_depth_0(engine)
    prompt = [5, 6, 6] * 9
    (decoded,) = engine.generate([prompt], params)
    (scored,) = engine.score([prompt], [decoded.new_token_ids], params)
    assert scored.logprobs is not None
    assert decoded.logprobs is not None
    same = [(one.token_id, one.logprob, one.rank) for one in decoded.logprobs]
    assert [(one.token_id, one.logprob, one.rank) for one in scored.logprobs] == same
    assert engine.generate([prompt], params)[0].new_token_ids == decoded.new_token_ids
    assert engine.stats().speculation.lookup_rounds > 0
