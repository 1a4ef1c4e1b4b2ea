"""Scaled codes of GGUF and FP4 checkpoints on a GPU: tokens do not depend on depth, batch or cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import force_drafts, prompt_of, run_to_end
from tests.gguf.test_tensors import SHAPES
from tests.gguf_files import write_gguf
from tests.gpu.test_four_bits import gpu_engine
from tests.models.test_quantised import FORMATS, every_linear
from tests.models.test_scaled_codes import SIZES, medium
from tests.quantised import quantise

pytestmark = pytest.mark.gpu

NAMES = ("medium", "medium-tied", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "nvfp4", "modelopt-nvfp4", "mxfp4")


def write(directory: Path, name: str) -> Path:
    """A checkpoint of two layers of GDN and two of attention."""
    sizes = SIZES | {"num_layers": 4}
    if name in FORMATS:
        packer, config = FORMATS[name]
        write_checkpoint(directory, **sizes)
        quantise(directory, every_linear(packer), config)
        return directory
    shape = SHAPES["dense-r1-tied" if name == "medium-tied" else "dense-r3"]
    source = write_checkpoint(directory / "source", **(shape | sizes))
    chosen = medium if name.startswith("medium") else lambda _: Type[name]
    return write_gguf(source, directory / "model.gguf", chosen)


@pytest.fixture(scope="module", params=NAMES)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(request.param), request.param)


def streams(
    model: Path, count: int, expected: dict[str, list[int]] | None = None, **options: Any
) -> dict[str, list[int]]:
    """The tokens of some requests, greedy and sampled; with `expected`, some drafts are right."""
    engine = gpu_engine(model, max_batch=max(count, 4), **options)
    formats = engine.runner.spec.weight_formats
    assert sum(bool(form.parts) for form in formats.values()) >= 4 * 4
    if model.suffix == ".gguf":
        assert "embed.weight" in formats
        assert engine.runner.step.target.embed.weight.dtype == torch.int16
    if expected is not None and engine.config.mtp_step:
        force_drafts(engine, expected, lambda name, pos: pos % (engine.config.mtp_step + 1))
    for index in range(count):
        params = SamplingParams(max_tokens=24, temperature=0.8 * (index % 2), seed=index, ignore_eos=True)
        prompt = prompt_of((1, 40, 130)[index % 3], index, engine.model_config.vocab_size)
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=str(index))
    return run_to_end(engine)


def test_tokens_do_not_depend_on_depth_batch_or_cache(model: Path) -> None:
    alone = streams(model, 1, mtp_step=0)
    three = streams(model, 3, mtp_step=0)
    assert alone["0"] == three["0"]
    for depth in (1, 3, 7):
        assert streams(model, 3, three, mtp_step=depth) == three, depth
    many = streams(model, 20, mtp_step=3)
    assert {name: many[name] for name in three} == three
    assert streams(model, 3, mtp_step=3, prefix_cache=False) == three
    assert streams(model, 3, mtp_step="auto") == three
    assert streams(model, 3, mtp_step=3, draft_vocab=64) == three


@pytest.mark.parametrize("name", ["medium-tied", "nvfp4"])
def test_compiled_code_does_not_depend_on_depth_or_batch(tmp_path: Path, name: str) -> None:
    model = write(tmp_path, name)
    three = streams(model, 3, mtp_step=0, compile="on")
    assert streams(model, 3, three, mtp_step=3, compile="on") == three
    assert streams(model, 1, mtp_step=3, compile="on")["0"] == three["0"]
