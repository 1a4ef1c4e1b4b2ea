"""Adapters and rope scaling on a GPU: the merged checkpoint's weights, the same tokens at every depth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiled_mtp.request import SamplingParams
from tests.adapters import write_adapter
from tests.checkpoints import YARN, write_checkpoint
from tests.engines import prompt_of
from tests.gpu.test_four_bits import gpu_engine
from tests.models.test_lora import loaded

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 256, "intermediate_size": 256}


def test_an_adapter_with_yarn_decodes_alike_at_every_depth(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", rope=YARN, tokenizer=True, **SIZES)
    adapter = write_adapter(tmp_path / "lora", base)
    wanted = loaded(base, adapter)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    found = []
    for depth in (0, 3):
        with gpu_engine(base, lora=adapter, mtp_step=depth) as engine:
            found.append(engine.generate([prompt_of(130, 3, 300)], params)[0].new_token_ids)
            for name, parameter in engine.runner.step.target.named_parameters():
                own = wanted[name].to(torch.bfloat16).float()
                # A product of another order may end on the other side of a rounding.
                assert torch.allclose(parameter.float().cpu(), own, rtol=2**-7, atol=0), name
    assert found[0] == found[1]
