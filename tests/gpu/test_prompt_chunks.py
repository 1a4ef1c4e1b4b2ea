"""Prompts that share a launch on a GPU: operators, programs and engines give each prompt its bits alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.engine import Engine
from compiled_mtp.ops.gdn_prefill import gdn_prefill
from compiled_mtp.ops.paged_attention import paged_attention
from compiled_mtp.ops.spec_conv1d import conv_prefill
from compiled_mtp.plan import PromptChunk
from compiled_mtp.request import SamplingParams
from tests import tiny
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine, prompt_of
from tests.ops.gdn_cases import Shape
from tests.ops.harness import assert_same_bits, poisoned_allocations
from tests.ops.prompt_chunk_cases import check_attention, check_conv, check_gdn
from tests.step.test_prompt_chunks import left_by

pytestmark = pytest.mark.gpu

DEFAULT = Path(__file__).parents[2] / "compiled_mtp" / "default_model"
SHAPES = {"4b": Shape(16, 32, 128, 128), "27b": Shape(16, 48, 128, 128)}
HEADS = {"0.8b": (8, 2, 256), "27b": (24, 4, 256), "narrow": (4, 2, 64)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Each end of a tile, and one chunk that makes the launch wide.
CUTS = ((3, 0, 70), (1, 64, 9), (4, 0, 1), (2, 128, 64), (7, 192, 2), (5, 64, 700), (6, 0, 129))
LENGTHS = {1: 150, 2: 1, 3: 64, 4: 9, 5: 331, 6: 70}
# Every launch, as (slot, start, end).
PACKINGS = (
    [
        [(2, 0, 1), (4, 0, 9), (1, 0, 128), (3, 0, 64), (5, 0, 256)],
        [(5, 256, 331), (1, 128, 150), (6, 0, 70)],
    ],
    [
        [(6, 0, 64)],
        [(6, 64, 70), (5, 0, 192), (3, 0, 64), (2, 0, 1)],
        [(1, 0, 64), (5, 192, 331)],
        [(4, 0, 9), (1, 64, 150)],
    ],
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gdn_and_convolution(shape: str, dtype: str) -> None:
    with poisoned_allocations():
        check_gdn(gdn_prefill, SHAPES[shape], DTYPES[dtype], "cuda", CUTS)
        check_conv(conv_prefill, SHAPES[shape], DTYPES[dtype], "cuda", CUTS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_attention(heads: str, dtype: str) -> None:
    with poisoned_allocations():
        check_attention(paged_attention, HEADS[heads], DTYPES[dtype], "cuda", CUTS)
        check_attention(paged_attention, HEADS[heads], DTYPES[dtype], "cuda", CUTS, first_key=1)


def admit_all(engine: Engine) -> None:
    """Give every slot its blocks; states, keys and values are NaN."""
    step, vocab_size = engine.runner.step, engine.model_config.vocab_size
    assert vocab_size > 17
    tiny.poison(step)
    each = step.slots.block_table.shape[1]
    for slot in LENGTHS:
        tiny.install(step, slot, tuple((slot, i, 1 + (slot - 1) * each + i) for i in range(each)), slot, 0.8)


def prefill(engine: Engine, cuts: Sequence[tuple[int, int, int]]) -> None:
    prompts = {slot: prompt_of(LENGTHS[slot], slot, engine.model_config.vocab_size) for slot, *_ in cuts}
    prompt_chunks = [
        PromptChunk(tuple(prompts[slot][start:end]), start, LENGTHS[slot]) for slot, start, end in cuts
    ]
    engine.runner.programs.prefill([slot for slot, *_ in cuts], prompt_chunks)


def finish(engine: Engine, slots: Sequence[int]) -> dict[int, tuple[Any, ...]]:
    """Return first tokens and drafts of these slots together, and each prompt's states and keys."""
    rows = engine.runner.programs.first_token(slots, 3).tolist()
    return {s: (rows[i], left_by(engine.runner.step, s, LENGTHS[s])) for i, s in enumerate(slots)}


@pytest.mark.parametrize(
    ("name", "dtype", "compile"),
    [
        ("default", "bfloat16", "off"),
        ("default", "float32", "off"),
        ("qwen3_5_moe", "bfloat16", "off"),
        ("default", "bfloat16", "on"),
    ],
)
def test_prompts_states_and_first_tokens(tmp_path: Path, name: str, dtype: str, compile: str) -> None:
    """In two packings; when compiled, prompts are padded to other lengths than alone."""
    directory = DEFAULT if name == "default" else write_checkpoint(tmp_path, name)
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "compile": compile, "mtp_step": 3}
    options |= {"prefill_chunk": 512, "block_size": 64, "max_batch": 6, "num_blocks": 49}
    if compile == "on":
        options |= {"graph_mode": "replay", "batch_sizes": (6,)}
    engine = make_engine(directory, prefix_cache=False, **options)
    with torch.compiler.set_stance("fail_on_recompile" if compile == "on" else "default"):
        alone: dict[int, tuple[Any, ...]] = {}
        for slot, length in LENGTHS.items():
            admit_all(engine)
            for start in range(0, length, 128):
                prefill(engine, [(slot, start, min(start + 128, length))])
            alone |= finish(engine, [slot])
        for launches in PACKINGS:
            admit_all(engine)
            for cuts in launches:
                prefill(engine, cuts)
            for slot, (row, left) in finish(engine, [4, 1, 5, 6, 2, 3]).items():
                if slot in {cut[0] for cuts in launches for cut in cuts}:
                    assert row == alone[slot][0], f"slot {slot}"
                    assert_same_bits(left, alone[slot][1], f"of slot {slot}")


@pytest.mark.parametrize("compile", ["off", "on"])
def test_engines_give_each_prompts_output_alone(compile: str) -> None:
    """Short prompts that arrive together, with and without log probabilities."""
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "compile": compile, "mtp_step": 3}
    options |= {"prefill_chunk": 256, "block_size": 64, "max_batch": 8, "num_blocks": 65}
    if compile == "on":
        options |= {"graph_mode": "replay", "batch_sizes": (1, 8)}
    engine = make_engine(DEFAULT, **options)
    prompts = [prompt_of(length, length, 4096) for length in (3, 20, 41, 64, 65, 7, 130, 2)]
    params = [
        SamplingParams(
            max_tokens=12, seed=i, temperature=0.8, ignore_eos=True, logprobs=2 if i % 3 == 1 else None
        )
        for i in range(len(prompts))
    ]
    with torch.compiler.set_stance("fail_on_recompile" if compile == "on" else "default"):
        together = engine.generate(prompts, params)
        alone = [engine.generate([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert (one.error, one.new_token_ids, one.logprobs) == (None, other.new_token_ids, other.logprobs)
