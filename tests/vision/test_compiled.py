"""Compiled programs with images, and a graph cache of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiled_mtp.cli import export
from compiled_mtp.request import SamplingParams
from tests.engines import make_engine, run_to_end
from tests.vision.traffic import SIZES, add, make_prompt, pad_of

pytestmark = pytest.mark.soak

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SHAPES = {"mtp_step": 1, "max_batch": 1, "prefill_chunk": 64, "num_blocks": 33, "block_size": 16}


def test_a_graph_cache_holds_prompts_with_images(dense: Path, tmp_path: Path) -> None:
    prompt, cache = make_prompt(SIZES[2], 2, pad_of(dense)), tmp_path / "images.graphs"
    plain = make_engine(dense, max_images=2, **SHAPES)
    add(plain, "a", prompt, PARAMS)
    want = run_to_end(plain)["a"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPES.items()]
    flags += [f"--model={dense}", f"--output={cache}", "--device=cpu", "--max-model-len=512"]
    assert export.main([*flags, "--max-images=2"]) == 0
    for max_images in (1, 2):
        engine = make_engine(dense, max_images=max_images, graph_cache=cache, **SHAPES)
        assert engine.is_compiled
    with torch.compiler.set_stance("fail_on_recompile"):
        add(engine, "a", prompt, PARAMS)
        assert run_to_end(engine)["a"] == want
    with pytest.raises(ValueError, match=r"graph_cache must .*model.vision"):
        make_engine(dense, graph_cache=cache, **SHAPES)
