"""New weights on a GPU, with graphs and FP8 drafts: the tokens of a new engine, and no memory lost."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compiled_mtp.request import SamplingParams
from tests.checkpoints import FP8_FAMILIES, write_checkpoint
from tests.engine.test_weight_updates import LONG, PROMPTS, check_sleeps, check_traffic
from tests.engines import make_engine, prompt_of

pytestmark = pytest.mark.gpu

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({"family": "qwen3_5", "hidden_size": 256}, {"draft_dtype": "float8_e4m3fn"}),
    "moe": ({"family": "qwen3_5_moe"}, {}),
    "tied": ({"tied": True}, {"draft_vocab": 300}),
    **{f"fp8_{name}": (options, {}) for name, options in FP8_FAMILIES},
}
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_engine_gives_the_same_tokens(kind: str, compile: str, tmp_path: Path) -> None:
    options, settings = KINDS[kind]
    prompts = [prompt_of(length, length, 500) for length in (3, 70, 140)]
    settings = settings | {"device": "cuda", "block_size": 64, "prefill_chunk": 128, "compile": compile}
    paths = [write_checkpoint(tmp_path / str(seed), seed=seed, **options) for seed in (0, 1)]
    expected = []
    for path in paths:
        fresh = make_engine(path, **settings)
        expected.append([(one.new_token_ids, one.logprobs) for one in fresh.generate(prompts, PARAMS)])
        fresh.close()
        del fresh
    engine = make_engine(paths[0], **settings)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(paths[0].glob("*.safetensors")):
        tensors |= load_file(file, device="cuda")
    manifest = {name: (one.shape, one.dtype) for name, one in tensors.items()}
    allocated = []
    for turn in range(6):
        number = (turn + 1) % 2
        engine.update_weights(paths[1] if number else (manifest, iter(tensors.items())))
        found = [(one.new_token_ids, one.logprobs) for one in engine.generate(prompts, PARAMS)]
        assert found == expected[number], turn
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert max(allocated[2:]) <= max(allocated[:2])
    engine.close()


def small_weights(directory: Path) -> tuple[list[Path], list[list[int]], dict[str, Any]]:
    """Return two checkpoints, the tokens of one request with each, and settings of an engine with graphs."""
    settings: dict[str, Any] = {"device": "cuda", "block_size": 64, "prefill_chunk": 128, "compile": "off"}
    paths = [write_checkpoint(directory / str(seed), seed=seed, hidden_size=64) for seed in (0, 1)]
    expected = []
    for path in paths:
        engine = make_engine(path, mtp_step=0, **settings)
        expected.append(engine.generate([PROMPTS[1]], LONG)[0].new_token_ids)
        engine.close()
    return paths, expected, settings


def allocated_bytes() -> int:
    """Bytes of the device in the tensors of this process."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_a_hundred_updates_under_traffic(tmp_path: Path) -> None:
    paths, expected, settings = small_weights(tmp_path)
    assert min(check_traffic(paths, expected, 100, allocated_bytes, **settings)) > 0


def test_fifty_sleeps_leave_nothing_behind(tmp_path: Path) -> None:
    paths, expected, settings = small_weights(tmp_path)
    check_sleeps(paths, expected, 50, allocated_bytes, max_batch=2, num_blocks=200, **settings)


@pytest.mark.parametrize("graph_mode", ["replay", "reduce-overhead"])
def test_sleep_gives_the_memory_back_to_the_driver(graph_mode: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_5", hidden_size=1024, intermediate_size=8192, num_layers=8)
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    settings: dict[str, Any] = {"device": "cuda", "block_size": 64, "prefill_chunk": 128}
    engine = make_engine(tmp_path, compile="on", graph_mode=graph_mode, memory_utilization=0.2, **settings)
    prompts = [prompt_of(length, length, 500) for length in (3, 70, 140)]
    expected = [one.new_token_ids for one in engine.generate(prompts, PARAMS)]
    for _ in range(3):
        awake, _ = torch.cuda.mem_get_info()
        engine.sleep()
        asleep, _ = torch.cuda.mem_get_info()
        # The context, compiled kernels and a few counters stay.
        assert before - asleep < 0.1 * (before - awake) + (256 << 20)
        engine.wake_up()
        assert [one.new_token_ids for one in engine.generate(prompts, PARAMS)] == expected
    engine.close()
