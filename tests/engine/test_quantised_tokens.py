"""Quantised checkpoints give the tokens of the values of their codes, at every depth and batch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp import default_model
from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.communicators.threads import engine_of
from tests.engines import make_engine, prompt_of, run_to_end
from tests.models.test_quantised import GPTQ_INT4, LINEARS, mixed, pack_config
from tests.quantised import Packer, fp8, gptq, nvfp4, pack_quantized, quantise

VOCAB = 512
DENSE: dict[str, Any] = {"num_value_heads": 2, "num_layers": 2, "interval": 2}
MOE: dict[str, Any] = DENSE | {
    "family": "qwen3_5_moe",
    "trunk_experts": "per_expert",
    "mtp_experts": "per_expert",
    "num_experts": 4,
}
NEXT: dict[str, Any] = MOE | {"family": "qwen3_next", "num_key_heads": 1}


def every(packer: Packer) -> Callable[[str], Packer | None]:
    return lambda module: packer if LINEARS.search(module) else None


CASES: dict[str, tuple[dict[str, Any], Callable[[str], Packer | None], dict[str, Any] | None]] = {
    "int4-dense": (DENSE, every(gptq()), GPTQ_INT4),
    "int4-moe": (MOE, every(pack_quantized(32)), pack_config(32)),
    "nvfp4-next": (NEXT, every(nvfp4()), None),
}


def streams(engine: Engine, lengths: tuple[int, ...] = (5, 70, 33)) -> dict[str, list[int]]:
    """Run greedy and sampled requests together; the last prompt begins like another one."""
    for index, length in enumerate((*lengths, 70)):
        params = SamplingParams(max_tokens=9, temperature=0.8 * (index % 2), seed=index, ignore_eos=True)
        prompt = prompt_of(length, length, VOCAB)
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=str(index))
    return run_to_end(engine)


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_dequantised_weights(tmp_path: Path, name: str) -> None:
    sizes, choose, config = CASES[name]
    directory = write_checkpoint(tmp_path / name, **sizes)
    twin = quantise(directory, choose, config)
    expected = streams(make_engine(twin, mtp_step=0, max_batch=1, dtype="float32"))
    for mtp_step, batch in ((0, 3), (1, 1), (3, 3), ("auto", 3)):
        engine = make_engine(
            directory, mtp_step=mtp_step, max_batch=batch, dtype="float32", prefix_cache=batch == 3
        )
        assert streams(engine) == expected, (mtp_step, batch)
        if batch == 3 and mtp_step:
            # Prompts resume from the prefix cache.
            assert streams(engine) == expected


def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    """Ranks read their rows and columns of every format."""
    sizes = DENSE | {"num_q_heads": 4, "num_value_heads": 4, "num_key_heads": 2, "intermediate_size": 256}
    directory = write_checkpoint(tmp_path / "model", **sizes)
    twin = quantise(directory, mixed)
    options: dict[str, Any] = {"mtp_step": 2, "dtype": "float32", "max_model_len": 256}
    expected = streams(make_engine(twin, **options))
    with engine_of(directory, 2, **options) as engine:
        assert streams(engine) == expected


SHIPPED: dict[str, tuple[Packer, dict[str, Any]]] = {
    "gptq": (gptq(64), GPTQ_INT4 | {"group_size": 64}),
    "fp8": (fp8(), {"quant_method": "compressed-tensors", "format": "float-quantized"}),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_default_checkpoint(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "model"
    packer, config = SHIPPED[name]
    shutil.copytree(Path(default_model.__file__).parent, directory)
    twin = quantise(directory, every(packer), config)
    texts = []
    for each in (directory, twin):
        with Engine(
            each, device="cpu", dtype="float32", mtp_step=2, max_model_len=256, max_batch=1
        ) as engine:
            (output,) = engine.generate(["def quicksort("], SamplingParams(max_tokens=24, temperature=0.0))
            texts.append(output.new_text)
            memory = sum(p.nbytes for p in engine.runner.step.target.parameters())
            assert all(p.dtype == torch.float32 for p in engine.runner.step.target.parameters())
            assert memory > 30 << 20
    assert texts[0] == texts[1]
    assert texts[0].strip()
