"""Engines short of blocks: each request has the tokens that it has alone, however often requests are
preempted."""

from __future__ import annotations

import json
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.request import RequestOutput, SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import LateCopyStream, make_engine, prompt_of

VOCAB = 512
LONGEST = {"max_tokens": 36, "ignore_eos": True}
# Blocks of 16 tokens, enough for one and a half of the longest requests.
FEW_BLOCKS = 8
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 0.7, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "guided_regex": "[a-f ]{20,30}", "ignore_eos": False},
    {"temperature": 0.0},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pressure")
    sizes = {"hidden_size": 64, "num_value_heads": 1, "intermediate_size": 64}
    return write_checkpoint(directory, **sizes, tokenizer=True)


@cache
def engine_of(directory: Path, num_blocks: int, **options: Any) -> Engine:
    return make_engine(directory, num_blocks=num_blocks, max_batch=4, **options)


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(4)
    made = []
    for index in range(5):
        params = SamplingParams(**(LONGEST | {"seed": index} | KINDS[index % len(KINDS)]))
        made.append((prompt_of(rng.randint(1, 40), index, VOCAB - 1), params))
    return made


@cache
def alone(directory: Path) -> list[RequestOutput]:
    """Return each request's output without drafts and with enough blocks."""
    engine = engine_of(directory, 60, mtp_step=0)
    return engine.generate(*map(list, zip(*requests(), strict=True)))


def run(engine: Engine, order: list[str] | None = None) -> list[RequestOutput]:
    """Run all requests together and check the owners of slots and blocks after every step.

    order: gains the request ids as the requests end.
    """
    made, parts = requests(), {}
    for index, (prompt, params) in enumerate(made):
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=str(index))
        parts[str(index)] = list[RequestOutput]()
    while engine.has_unfinished_requests():
        for output in engine.step():
            parts[output.request_id].append(output)
            if output.finish_reason is not None and order is not None:
                order.append(output.request_id)
        engine.scheduler.check_integrity()
    return [_join(one) for one in parts.values()]


def _join(parts: list[RequestOutput]) -> RequestOutput:
    tokens = [token_id for part in parts for token_id in part.new_token_ids]
    entries = [entry for part in parts for entry in part.logprobs or ()]
    text = "".join(part.new_text for part in parts)
    logprobs = entries if parts[-1].logprobs is not None else None
    return parts[-1]._replace(new_token_ids=tokens, new_text=text, logprobs=logprobs)


def check(directory: Path, got: list[RequestOutput]) -> None:
    for expected, output in zip(alone(directory), got, strict=True):
        for name in ("new_token_ids", "new_text", "finish_reason", "error", "logprobs"):
            assert getattr(output, name) == getattr(expected, name), name


@pytest.mark.parametrize(("mtp_step", "max_in_flight", "offload_gb"), [(0, 0, 0), (3, 1, 0), (3, 1, 0.5)])
def test_a_pool_for_one_and_a_half_requests_runs_all(
    checkpoint: Path, mtp_step: int, max_in_flight: int, offload_gb: float
) -> None:
    # Of wide rounds a request beside one other would leave room for several, and none would be preempted.
    options = {"mtp_step": mtp_step, "max_in_flight": max_in_flight, "offload_gb": offload_gb}
    engine = engine_of(checkpoint, FEW_BLOCKS, lookup="off", **options)
    # Reserve as few tokens ahead as possible, so that requests are preempted again and again.
    engine.scheduler._planner.admission.tokens_ahead = 0
    order: list[str] = []
    check(checkpoint, run(engine, order))
    # All requests but the grammar's have the same length.
    assert mtp_step or [name for name in order if name != "2"] == ["0", "1", "3", "4"]
    stats = engine.stats()
    assert stats.blocks_used == 0
    assert (stats.offloads > 1) == (offload_gb > 0)
    assert (stats.recomputes > 1) == (offload_gb == 0)


def test_copies_that_take_longer_than_launches_change_no_token(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled_mtp.cache.moves.CopyStream", LateCopyStream)
    sizes = {"num_blocks": FEW_BLOCKS, "max_batch": 4, "mtp_step": 3, "lookup": "off"}
    engine = make_engine(checkpoint, max_in_flight=1, offload_gb=0.5, **sizes)
    engine.scheduler._planner.admission.tokens_ahead = 0
    check(checkpoint, run(engine))
    assert engine.stats().offloads > 1
    # After an interrupt in the middle of a copy, the waiting requests go on.
    for index, (prompt, params) in enumerate(requests()):
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=str(index))
    copy_stream = engine.runner.moves._copy_streams["host"]
    while not copy_stream._under_way:
        engine.step()
    monkeypatch.setattr(engine.runner, "run", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not copy_stream._under_way
    monkeypatch.undo()
    outputs = [output for _ in iter(engine.has_unfinished_requests, False) for output in engine.step()]
    assert {output.finish_reason for output in outputs} >= {"error", "length"}
    engine.scheduler.check_integrity()
    assert engine.stats().blocks_used == 0


def _interrupt(plan: object) -> None:
    raise KeyboardInterrupt


def test_a_request_longer_than_the_pool_ends_with_length_and_says_so(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, 6, mtp_step=3, max_in_flight=1, offload_gb=0)
    assert engine.runner.memory.max_model_len == 80
    params = SamplingParams(max_tokens=500, ignore_eos=True, seed=1)
    prompt = prompt_of(50, 1, VOCAB)
    for _ in range(2):
        (output,) = engine.generate([prompt], params)
        assert (len(output.new_token_ids), output.finish_reason) == (30, "length")
    longer = params.model_copy(update={"max_tokens": 32})
    (plain,) = engine_of(checkpoint, 60, mtp_step=0).generate([prompt], longer)
    assert plain.new_token_ids[:30] == output.new_token_ids
    assert plain.error is None
    assert output.error == "5 blocks of 16 tokens hold no more of it; raise num_blocks"
    with pytest.raises(ValueError, match="prompt and a token must fit into 5 blocks of 16 tokens, got a p"):
        engine.add_request(prompt_token_ids=[1] * 80)


def test_a_checkpoint_of_long_requests_starts_with_little_memory(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hidden_size=64, num_value_heads=1, intermediate_size=64)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["max_position_embeddings"] = 262_144
    file.write_text(json.dumps(config))
    before = _resident_bytes()
    engine = Engine(EngineConfig(model=tmp_path, device="cpu"))
    # max_model_len is limited by memory: 2 GiB suffice for 262,144 tokens of this model.
    assert engine.runner.memory.max_model_len > 4096
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    assert len(engine.generate([[1, 2, 3]], params)[0].new_token_ids) == 3
    # The rotary table takes 64 MiB; the cache's pages take no memory before they are written.
    assert _resident_bytes() - before < 400 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
