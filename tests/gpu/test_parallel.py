"""Two GPUs hold one model: they give one GPU's tokens, and a rank's end ends the engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.parallel.leader import LeadRunner
from compiled_mtp.parallel.ranks import RankError
from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import prompt_of
from tests.models.test_quantised import FORMATS, every_linear
from tests.quantised import quantise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one machine"),
]

# Heads that two ranks divide, and sums of at least two K splits; FP8 is cut at its blocks.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "num_key_heads": 2,
    "num_value_heads": 4,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tied": True},
    "fp8": {"fp8_scale": torch.bfloat16},
    "moe": {"family": "qwen3_5_moe"},
    "moe-fp8": {"family": "qwen3_5_moe", "fp8_scale": torch.bfloat16},
    "moe-int4": {"family": "qwen3_5_moe", "trunk_experts": "per_expert", "mtp_experts": "per_expert"},
    "next": {"family": "qwen3_next"},
    # Both ranks hold the same KV head and the same key head.
    "few-heads": {"num_kv_heads": 1, "num_key_heads": 1},
}
# Prompts of one chunk and of three. One shape of a round and one of a prompt: starts take most of the time.
LENGTHS = (40, 5, 140)
BATCH = 8
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    written = {
        name: write_checkpoint(tmp_path_factory.mktemp(name), **(SIZES | options))
        for name, options in CHECKPOINTS.items()
    }
    packer, config = FORMATS["gptq"]
    choose, plain = every_linear(packer), "layers.0.mlp.shared_expert."
    # Some shared experts stay plain, the others are codes.
    quantise(written["moe-int4"], lambda module: None if plain in module else choose(module), config)
    return written


# Otherwise the whole memory of a GPU would be filled with zeros first.
SHAPE: dict[str, Any] = {
    "device": "cuda",
    "prefill_chunk": 64,
    "max_batch": BATCH,
    "max_model_len": 512,
    "block_size": 64,
    "num_blocks": 200,
    "offload_gb": 0.0,
}


def engine_of(directory: Path, world: int, **options: Any) -> Engine:
    given = SHAPE | {"batch_sizes": (options.get("max_batch", BATCH),)} | options
    return Engine(EngineConfig(model=directory, tensor_parallel=world, **given))


def decode(engine: Engine, batch: int) -> list[list[int]]:
    """Return tokens of requests that run together, every other one greedy."""
    lengths = [LENGTHS[index % len(LENGTHS)] for index in range(batch)]
    prompts = [prompt_of(length, index, 512) for index, length in enumerate(lengths)]
    params = [
        SamplingParams(max_tokens=20, temperature=0.8 * (index % 2), seed=index, ignore_eos=True)
        for index in range(batch)
    ]
    return [output.new_token_ids for output in engine.generate(prompts, params)]


@cache
def wanted(directory: Path, recipe: str, batch: int) -> list[list[int]]:
    """One GPU's tokens, uncompiled and without drafts. It leaves its compiled kernels on disk."""
    options: dict[str, Any] = {"compile": "off", "weight_recipe": recipe, "mtp_step": 0}
    with engine_of(directory, 1, **options, max_batch=max(batch, BATCH)) as engine:
        return decode(engine, batch)


@pytest.mark.parametrize(
    ("name", "recipe", "communicator", "compile", "mtp_step"),
    [
        ("dense", "auto", "symmetric", "off", 3),
        ("moe", "auto", "symmetric", "off", 3),
        ("moe-int4", "auto", "symmetric", "off", 3),
        ("moe-fp8", "w8a8", "symmetric", "off", 3),
        ("fp8", "w8a8", "symmetric", "off", 3),
        ("fp8", "w8a16", "symmetric", "off", 3),
        ("few-heads", "auto", "symmetric", "off", 3),
        ("moe-fp8", "w8a16", "symmetric", "off", 3),
        ("next", "auto", "symmetric", "off", 3),
        ("dense", "auto", "nccl", "off", 3),
        ("moe-fp8", "w8a8", "nccl", "off", 3),
        ("tied", "auto", "symmetric", "off", 3),
        *((name, "auto", "symmetric", "off", 0) for name in CHECKPOINTS),
        ("dense", "auto", "symmetric", "on", 3),
        ("moe", "auto", "symmetric", "on", 3),
        ("dense", "auto", "nccl", "on", "auto"),
    ],
)
def test_two_gpus_decode_like_one(
    directories: dict[str, Path], name: str, recipe: str, communicator: str, compile: str, mtp_step: int | str
) -> None:
    directory = directories[name]
    options = {
        "weight_recipe": recipe,
        "communicator": communicator,
        "compile": compile,
        "mtp_step": mtp_step,
    }
    expected = wanted(directory, recipe, BATCH)
    with engine_of(directory, 2, **options) as engine:
        for batch in (1, 3, BATCH):
            # A request's tokens do not depend on the others.
            assert decode(engine, batch) == expected[:batch]


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_the_communicator_adds_partials_of_many_rows(directories: dict[str, Path], name: str) -> None:
    """80 rows per round: two barriers per collective, the same bits."""
    directory = directories[name]
    expected = wanted(directory, "auto", 20)
    with engine_of(directory, 2, compile="off", mtp_step=3, max_batch=20) as engine:
        assert decode(engine, 20) == expected


def test_ranks_load_an_exports_programs(directories: dict[str, Path], tmp_path: Path) -> None:
    """Ranks give one GPU's tokens and rank 0 traces nothing; test_rank_caches.py checks that no rank does."""
    directory, file = directories["dense"], tmp_path / "ranks.graphs"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items()]
    flags += [f"--batch-sizes={BATCH}", "--mtp-step=3", "--tensor-parallel=2", f"--model={directory}"]
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "export_graphs.py"), *flags, f"--output={file}"], check=True
    )
    expected = wanted(directory, "auto", BATCH)
    counters.clear()
    with engine_of(directory, 2, mtp_step=3, graph_cache=file) as engine:
        assert engine.is_compiled
        with torch.compiler.set_stance("fail_on_recompile"):
            for batch in (1, BATCH):
                assert decode(engine, batch) == expected[:batch]
    assert counters["stats"]["calls_captured"] == 0


@pytest.mark.parametrize("communicator", ["symmetric", "nccl"])
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_engine(directories: dict[str, Path], communicator: str, ending: int) -> None:
    """In seconds, though its peer's kernels wait for it; no process is left."""
    engine = engine_of(directories["dense"], 2, communicator=communicator, compile="off", mtp_step=1)
    runner = engine.runner
    assert isinstance(runner, LeadRunner)
    process = runner._ranks._processes._by_rank[1]
    decode(engine, 1)
    engine.add_request(prompt_token_ids=prompt_of(5, 1, 512), params=SamplingParams(max_tokens=9))
    engine.step()
    begin = time.monotonic()
    os.kill(process.pid, ending)
    with pytest.raises(RankError, match=r"got rank 1:|rank 1 did not come"):
        engine.generate([prompt_of(5, 2, 512)], SamplingParams(max_tokens=400, ignore_eos=True))
    assert time.monotonic() - begin < 15
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    # The GPU has its free memory back.
    assert torch.ones(4, device="cuda").sum() == 4
