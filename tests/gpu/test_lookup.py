"""Drafts from the text on a GPU: the search, windows of 16 rows in graphs, the tokens of plain decoding."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.engine import Engine
from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.ops.find_drafts import LEAST_THRESHOLD, find_drafts
from compiled_mtp.request import SamplingParams
from compiled_mtp.rounds import drafters
from tests.checkpoints import write_checkpoint
from tests.engine.lookup_runs import Found, crowd, requests, run
from tests.engines import make_engine
from tests.ops.harness import check_launch
from tests.ops.test_find_drafts import MUTATED, arguments, at_the_end, random_text

pytestmark = pytest.mark.gpu


def on_gpu(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        type(one)(*on_gpu(one)) if isinstance(one, tuple) else one if one is None else one.cuda()
        for one in args
    )


@pytest.mark.parametrize("verify", [None, 0, 3, 15])
@pytest.mark.parametrize("length", [1, 20, 1025, 40_000])
@pytest.mark.parametrize("count", [1, 5, 32])
def test_find_drafts(count: int, length: int, verify: int | None) -> None:
    rng = random.Random(length)
    texts = []
    for _ in range(count):
        ids = [rng.randrange(50) for _ in range(rng.randint(1, length))]
        texts.append([*ids, *ids[len(ids) // 3 :][: rng.choice((2, 5, 30))]])
    args = on_gpu(arguments(texts, count, verify=verify, width=length))
    check_launch(find_drafts, args, rtol=0, atol=0, mutated=MUTATED)


def test_find_drafts_in_small_texts() -> None:
    rng = random.Random(1)
    for seed in range(20):
        args = on_gpu(arguments([random_text(rng, 60) for _ in range(100)], seed))
        check_launch(find_drafts, args, rtol=0, atol=0, mutated=MUTATED)


@pytest.mark.parametrize("extra", [0, 1, 40])
def test_the_end_of_a_row(extra: int) -> None:
    check_launch(find_drafts, on_gpu(at_the_end(extra)), rtol=0, atol=0, mutated=MUTATED)


def test_find_drafts_in_a_graph_follows_the_text() -> None:
    """Replays read positions and texts that change, and learn from the rounds before."""
    args = on_gpu(arguments([list(range(20)) * 4] * 3, 2))
    find_drafts(*args)
    own = tuple(type(one)(*map(torch.clone, one)) if isinstance(one, tuple) else one.clone() for one in args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = find_drafts(*own)
    for step in range(6):
        for one in (args, own):
            one[2][1:] = 79 - 7 * step
        wanted = find_drafts.reference(*args)
        graph.replay()
        assert torch.equal(found.drafts, wanted.drafts)
        assert torch.equal(found.matches, wanted.matches)
        assert all(torch.equal(a, b) for a, b in zip(own[4], args[4], strict=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dense"), num_q_heads=4, num_value_heads=4)


def gpu_engine(directory: Path, **options: Any) -> Engine:
    return make_engine(directory, **({"device": "cuda", "prefill_chunk": 128, "block_size": 64} | options))


@cache
def plain(directory: Path, compile: str) -> Found:
    engine = gpu_engine(directory, mtp_step=0, max_batch=1, compile=compile, graph_mode="off")
    return run(engine, requests(), 0)


@pytest.mark.parametrize(
    ("mtp_step", "max_batch", "options"),
    [
        (3, 1, {"compile": "off"}),
        (3, 6, {"compile": "off"}),
        (7, 2, {"compile": "off", "graph_mode": "off"}),
        (2, 9, {"compile": "off"}),
        ("auto", 2, {"compile": "off"}),
        (3, 2, {"compile": "on", "batch_sizes": (1, 2)}),
        (1, 2, {"compile": "on", "batch_sizes": (1, 2), "graph_mode": "reduce-overhead"}),
    ],
)
def test_forced_drafts_from_the_text_change_no_token(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    mtp_step: int | str,
    max_batch: int,
    options: dict[str, Any],
) -> None:
    from compiled_mtp.ops.find_drafts import kernel

    monkeypatch.setattr(drafters, "FIRST_THRESHOLD", LEAST_THRESHOLD)
    monkeypatch.setattr(kernel, "RISE", 0)
    engine = gpu_engine(checkpoint, mtp_step=mtp_step, max_batch=max_batch, lookup="auto", **options)
    shapes: list[RoundShape] = []
    found = run(engine, requests(), max_batch, shapes)
    assert found == plain(checkpoint, options["compile"])
    stats = engine.stats().speculation
    assert 0 < stats.lookup_accepted < stats.lookup_drafted
    assert any(shape.verify == 15 for shape in shapes)


def test_wide_rounds_of_seven_drafts_change_no_token(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no memory is left for longer rings."""
    from compiled_mtp.ops.find_drafts import kernel

    monkeypatch.setattr(drafters, "FIRST_THRESHOLD", LEAST_THRESHOLD)
    monkeypatch.setattr(kernel, "RISE", 0)
    monkeypatch.setattr("compiled_mtp.runner.max_batch._WIDE_SHARE", 0.0)
    engine = gpu_engine(checkpoint, mtp_step="auto", max_batch=12, lookup="auto", compile="off")
    shapes: list[RoundShape] = []
    assert run(engine, requests(), 2, shapes) == plain(checkpoint, "off")
    assert {shape.verify for shape in shapes if shape.verify > shape.chain} == {7}


def test_a_text_may_repeat_itself_up_to_its_last_position(checkpoint: Path) -> None:
    """A launch in flight reads a slot whose last round kept drafts beyond max_model_len."""
    params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True, allowed_token_ids=(5,))
    engine = gpu_engine(checkpoint, max_model_len=128, max_batch=3, lookup="auto", compile="off")
    for output, length in zip(
        engine.generate([[5] * n for n in (20, 101, 33)], params), (20, 101, 33), strict=True
    ):
        assert output.new_token_ids == [5] * (128 - length)
        assert output.error is None
    assert engine.stats().speculation.lookup_accepted > 50


@pytest.mark.parametrize("offload_gb", [0.0, None])
def test_preempted_requests_keep_their_text(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, offload_gb: float | None
) -> None:
    from compiled_mtp.ops.find_drafts import kernel

    monkeypatch.setattr(drafters, "FIRST_THRESHOLD", LEAST_THRESHOLD)
    monkeypatch.setattr(kernel, "RISE", 0)
    sizes = {"max_batch": 4, "num_blocks": 7, "offload_gb": offload_gb, "compile": "off"}
    engine = gpu_engine(checkpoint, lookup="auto", **sizes)
    crowd(engine, -400)
    assert run(engine, requests(), 1, arrivals=0.8) == plain(checkpoint, "off")
    stats = engine.stats()
    assert stats.offloads + stats.recomputes > 0
    assert stats.speculation.lookup_accepted > 0
