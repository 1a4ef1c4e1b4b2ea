"""Ranks take new weights together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.engine import Engine
from compiled_mtp.parallel.ranks import RankError
from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import prompt_of

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
PROMPTS = [prompt_of(length, length, 500) for length in (5, 70)]


OPTIONS: dict[str, Any] = {"device": "cpu", "mtp_step": 3, "max_model_len": 256, "block_size": 16}


def tokens_of(engine: Engine) -> list[list[int]]:
    return [one.new_token_ids for one in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    sizes: dict[str, Any] = {"num_q_heads": 4, "num_value_heads": 4, "tied": True}
    root = tmp_path_factory.mktemp("ranks")
    return [write_checkpoint(root / str(seed), seed=seed, **sizes) for seed in (0, 1)]


@pytest.fixture(scope="module")
def expected(paths: list[Path]) -> list[list[list[int]]]:
    """The tokens of one rank with each of the weights."""
    found = []
    for path in paths:
        with Engine(path, **OPTIONS) as alone:
            found.append(tokens_of(alone))
    assert found[0] != found[1]
    return found


def test_two_ranks_change_their_weights_and_sleep_together(
    paths: list[Path], expected: list[list[list[int]]]
) -> None:
    with Engine(paths[0], tensor_parallel=2, **OPTIONS) as engine:
        assert tokens_of(engine) == expected[0]
        with pytest.raises(ValueError, match="weights must be a directory with several ranks, got tensors"):
            engine.update_weights(({}, iter(())))
        engine.update_weights(paths[1])
        assert tokens_of(engine) == expected[1]
        engine.add_request(prompt_token_ids=PROMPTS[0], params=PARAMS, request_id="last")
        engine.sleep()
        assert [token for output in engine.step() for token in output.new_token_ids] == expected[1][0]
        with pytest.raises(ValueError, match="it sleeps; call wake_up"):
            engine.add_request(prompt_token_ids=[1])
        with pytest.raises(ValueError, match="nowhere"):
            engine.wake_up(paths[0] / "nowhere")
        engine.wake_up()
        assert tokens_of(engine) == expected[1]
        engine.sleep(running="abort")
        engine.wake_up(paths[0])
        assert tokens_of(engine) == expected[0]
        engine.sleep()


def test_a_rank_that_cannot_wake_ends_the_engine_by_name(
    paths: list[Path], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    path = tmp_path / "moved"
    path.mkdir()
    for file in paths[0].iterdir():
        (path / file.name).symlink_to(file)
    with Engine(path, tensor_parallel=2, **OPTIONS) as engine:
        engine.sleep()
        for file in path.iterdir():
            file.unlink()
        with pytest.raises(RankError, match=r"must keep its ranks, got rank \d: .* must have \*.safetensors"):
            engine.wake_up()
