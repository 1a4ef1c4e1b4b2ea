"""On a GPU, batch sizes that share a program give the tokens of single uncompiled requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine, prompt_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("graph_mode", ["replay", "reduce-overhead"])
@pytest.mark.parametrize("draft_dtype", ["weights", "float8_e4m3fn"])
def test_sizes_that_share_a_program_have_the_tokens_of_one(
    tmp_path: Path, family: str, graph_mode: str, draft_dtype: str
) -> None:
    """Up to 16 rows and more: products before a norm have other numbers of partials."""
    write_checkpoint(tmp_path, family)
    prompts = [prompt_of(3 + 7 * n, n, 512) for n in range(24)]
    params = [SamplingParams(max_tokens=12, temperature=0.8, seed=n, ignore_eos=True) for n in range(24)]
    given: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "prefill_chunk": 64, "max_model_len": 256}
    plain = make_engine(tmp_path, mtp_step=0, max_batch=1, compile="off", graph_mode="off", **given)
    expected = [plain.generate([p], s)[0].new_token_ids for p, s in zip(prompts, params, strict=True)]
    plain.close()
    sizes = (1, 2, 8, 24)
    torch._dynamo.utils.counters.clear()
    given |= {"graph_mode": graph_mode, "draft_dtype": draft_dtype}
    engine = make_engine(tmp_path, mtp_step=3, max_batch=24, batch_sizes=sizes, compile="on", **given)
    # The program of one request, and the shared one.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        for size in reversed(sizes):
            outputs = engine.generate(prompts[:size], params[:size])
            assert [output.new_token_ids for output in outputs] == expected[:size]
    engine.close()
