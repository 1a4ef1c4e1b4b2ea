"""The same tokens for each request, exactly, whatever its batch, drafts, threads and launches in flight."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from compiled_mtp.request import SamplingParams
from tests import tiny
from tests.checkpoints import write_checkpoint
from tests.engines import collect, force_drafts, make_engine, prompt_of, run_to_end

VOCAB = 512
PROMPT_LENGTHS = (1, 2, 3, 63, 64, 65, 300)
COUNT = 17


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense")
    write_checkpoint(directory, num_key_heads=1, num_value_heads=3)
    return directory


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    """One greedy and one seeded request for each prompt length."""
    made = {}
    for length in PROMPT_LENGTHS:
        for temperature in (0.0, 0.8):
            params = SamplingParams(
                max_tokens=COUNT, temperature=temperature, seed=length, ignore_eos=True, top_k=40, top_p=0.95
            )
            made[f"{length}-{temperature}"] = (prompt_of(length, length, VOCAB), params)
    return made


@cache
def plain_streams(directory: Path, dtype: str, num_threads: int) -> dict[str, list[int]]:
    """Each request decoded alone, one token at a time, max_in_flight 0."""
    with tiny.threads(num_threads):
        engine = make_engine(directory, mtp_step=0, max_batch=1, dtype=dtype)
        for name, (prompt, params) in requests().items():
            engine.add_request(prompt_token_ids=prompt, params=params, request_id=name)
        return run_to_end(engine)


def decode_mixed(
    directory: Path, dtype: str, mtp_step: int, max_in_flight: int, drafts: str, seed: int, num_threads: int
) -> dict[str, list[int]]:
    """Run all requests together: they are added at random moments, up to eight run at once."""
    streams = plain_streams(directory, dtype, num_threads)
    rng = random.Random(seed)
    engine = make_engine(directory, mtp_step=mtp_step, dtype=dtype, max_in_flight=max_in_flight)
    if drafts == "nan":
        assert engine.runner.step.draft is not None
        engine.runner.step.draft.norm.weight.data.fill_(float("nan"))
    elif drafts != "own":
        choose = {"right": lambda: mtp_step, "wrong": lambda: 0, "random": lambda: rng.randint(0, mtp_step)}
        force_drafts(engine, streams, lambda name, pos: choose[drafts]())
    waiting = list(requests().items())
    rng.shuffle(waiting)
    tokens: dict[str, list[int]] = {}
    while waiting or engine.has_unfinished_requests():
        while waiting and (rng.random() < 0.3 or not engine.has_unfinished_requests()):
            name, (prompt, params) = waiting.pop()
            engine.add_request(prompt_token_ids=prompt, params=params, request_id=name)
        collect(tokens, engine.step())
    assert engine.stats().blocks_used == 0
    return tokens


# In float32 and bfloat16 by turns: they differ in arithmetic, not in what a round does.
@pytest.mark.parametrize(
    ("mtp_step", "max_in_flight", "drafts", "dtypes"),
    [
        (0, 1, "own", ("float32", "bfloat16")),
        (1, 0, "random", ("float32", "bfloat16")),
        (1, 1, "right", ("bfloat16",)),
        (2, 1, "random", ("float32",)),
        (3, 0, "own", ("bfloat16",)),
        (3, 0, "right", ("float32",)),
        (3, 1, "random", ("float32", "bfloat16")),
        (3, 1, "nan", ("float32",)),
        (7, 0, "random", ("bfloat16",)),
        (7, 1, "wrong", ("float32",)),
    ],
)
def test_mixed_traffic(
    checkpoint: Path, mtp_step: int, max_in_flight: int, drafts: str, dtypes: tuple[str, ...]
) -> None:
    for dtype in dtypes:
        tokens = decode_mixed(checkpoint, dtype, mtp_step, max_in_flight, drafts, mtp_step, 1)
        assert tokens == plain_streams(checkpoint, dtype, 1)


@pytest.mark.parametrize("num_threads", [2, 3, 8])
def test_mixed_traffic_with_threads(checkpoint: Path, num_threads: int) -> None:
    with tiny.threads(num_threads):
        tokens = decode_mixed(checkpoint, "float32", 3, 1, "random", num_threads, num_threads)
    assert tokens == plain_streams(checkpoint, "float32", num_threads)


@pytest.mark.parametrize("options", [{"family": "qwen3_next"}, {"family": "qwen3_5_moe"}])
def test_other_families(tmp_path: Path, options: dict[str, str]) -> None:
    write_checkpoint(tmp_path, **options)
    for max_in_flight in (0, 1):
        tokens = decode_mixed(tmp_path, "float32", 3, max_in_flight, "random", 5, 1)
        assert tokens == plain_streams(tmp_path, "float32", 1)


def test_right_drafts_are_accepted_whole(checkpoint: Path) -> None:
    """The other tests would also pass if no draft were ever accepted."""
    name, (prompt, params) = next(iter(requests().items()))
    engine = make_engine(checkpoint, mtp_step=3, max_batch=1)
    force_drafts(engine, plain_streams(checkpoint, "float32", 1), lambda name, pos: 3)
    engine.add_request(prompt_token_ids=prompt, params=params, request_id=name)
    run_to_end(engine)
    stats = engine.stats().speculation
    assert stats.rounds == -(-(COUNT - 1) // 4)
    assert stats.mean_new_tokens == pytest.approx((COUNT - 1) / stats.rounds)
