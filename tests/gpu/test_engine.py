"""The contract on a GPU: same tokens over depths, batches, drafts and graph modes; hidden states bit for
bit."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.graphs.buckets import Bucket
from compiled_mtp.request import SamplingParams
from tests import tiny
from tests.checkpoints import write_checkpoint
from tests.engines import collect, force_drafts, make_engine, prompt_of, run_to_end

pytestmark = pytest.mark.gpu

DEFAULT = Path(__file__).parents[2] / "compiled_mtp" / "default_model"
COUNT = 40
TEXTS = (
    "def quicksort(items):\n",
    "import os\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "    for index in range(10):\n        print(",
    '"""A module."""\n\nfrom collections import deque\n\n\ndef main():\n',
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {"default": DEFAULT}
    for family in ("qwen3_5", "qwen3_next", "qwen3_5_moe"):
        made[family] = tmp_path_factory.mktemp(family)
        write_checkpoint(made[family], family)
    return made


def requests(engine: Engine) -> dict[str, tuple[list[int], SamplingParams]]:
    made = {}
    for index, text in enumerate(TEXTS):
        for temperature in (0.0, 0.8):
            if engine.tokenizer is not None:
                ids = engine.tokenizer.encode(text)
            else:
                ids = prompt_of(1 + 37 * index, index, engine.model_config.vocab_size)
            params = SamplingParams(max_tokens=COUNT, temperature=temperature, seed=index, ignore_eos=True)
            made[f"{index}-{temperature}"] = (ids, params)
    return made


def gpu_engine(directory: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"device": "cuda", "prefill_chunk": 128, "block_size": 64}
    return make_engine(directory, **(defaults | options))


@cache
def plain_streams(directory: Path, dtype: str, compile: str) -> dict[str, list[int]]:
    engine = gpu_engine(directory, mtp_step=0, max_batch=1, dtype=dtype, compile=compile)
    for name, (prompt, params) in requests(engine).items():
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=name)
    return run_to_end(engine)


def decode_mixed(engine: Engine, seed: int, batch: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    waiting = list(requests(engine).items())
    rng.shuffle(waiting)
    tokens: dict[str, list[int]] = {}
    while waiting or engine.has_unfinished_requests():
        stats = engine.stats()
        while waiting and stats.running + stats.waiting < batch and rng.random() < 0.5:
            name, (prompt, params) = waiting.pop()
            engine.add_request(prompt_token_ids=prompt, params=params, request_id=name)
            stats = engine.stats()
        collect(tokens, engine.step())
    assert engine.stats().blocks_used == 0
    return tokens


@pytest.mark.parametrize("name", ["default", "qwen3_5", "qwen3_next", "qwen3_5_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_same_tokens_uncompiled(directories: dict[str, Path], name: str, dtype: str) -> None:
    directory = directories[name]
    expected = plain_streams(directory, dtype, "off")
    for mtp_step, batch, drafts in ((1, 3, "random"), (3, 1, "own"), (3, 8, "random"), (7, 8, "right")):
        engine = gpu_engine(directory, mtp_step=mtp_step, dtype=dtype, compile="off")
        if drafts != "own":
            rng = random.Random(batch)
            least = mtp_step if drafts == "right" else 0
            force_drafts(engine, expected, lambda name, pos, r=rng, lo=least, s=mtp_step: r.randint(lo, s))
        assert decode_mixed(engine, mtp_step, batch) == expected


@pytest.mark.parametrize("graph_mode", ["replay", "reduce-overhead"])
@pytest.mark.parametrize("name", ["default", "qwen3_5_moe"])
def test_same_tokens_compiled(directories: dict[str, Path], name: str, graph_mode: str) -> None:
    directory = directories[name]
    expected = plain_streams(directory, "bfloat16", "auto")
    for mtp_step, batch in ((0, 8), (3, 1), (3, 8), (7, 3)):
        torch._dynamo.reset()
        engine = gpu_engine(directory, mtp_step=mtp_step, dtype="bfloat16", graph_mode=graph_mode)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert decode_mixed(engine, mtp_step, batch) == expected
        engine.close()


@pytest.mark.parametrize("mtp_step", [0, 3])
def test_hidden_states_are_bit_equal_between_buckets(directories: dict[str, Path], mtp_step: int) -> None:
    """The last token's logits decide little; the whole hidden state shows a changed bit."""
    hidden = []
    for max_batch in (1, 2, 8, 32):
        engine = Engine(
            EngineConfig(model=DEFAULT, device="cuda", mtp_step=mtp_step, max_batch=max_batch, compile="off")
        )
        step = engine.runner.step
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(TEXTS[0])
        tiny.install(step, 1, tuple((1, index, index + 1) for index in range(4)))
        tiny.prefill(step, 1, ids)
        kept: list[torch.Tensor] = []
        logits = step.target.logits

        def keep(rows: torch.Tensor, is_prefill: bool = False, kept: Any = kept, logits: Any = logits) -> Any:
            kept.append(rows.clone())
            return logits(rows, is_prefill)

        step.target.logits = keep  # type: ignore[method-assign]
        step.slots.drafts[1] = 5
        tiny.decode(step, [1] + [0] * (Bucket(max_batch * (mtp_step + 1), mtp_step).groups - 1))
        hidden.append(kept[0][: mtp_step + 1])
    assert all(torch.equal(hidden[0], other) for other in hidden[1:])


def test_a_decode_step_does_not_synchronise(directories: dict[str, Path]) -> None:
    engine = gpu_engine(directories["default"], mtp_step=3, compile="off", max_batch=2)
    step = engine.runner.step
    tiny.install(step, 1, tuple((1, index, index + 1) for index in range(4)))
    tiny.prefill(step, 1, [1, 2, 3])
    index = torch.tensor([1, 0], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        step.decode(index)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step.decode(index)
        finally:
            torch.cuda.set_sync_debug_mode("default")
