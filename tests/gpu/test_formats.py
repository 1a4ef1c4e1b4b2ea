"""On a GPU: checkpoints in formats that the loader multiplies out have the tokens of their plain twins."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import force_drafts, prompt_of, run_to_end
from tests.gpu.test_four_bits import SIZES, gpu_engine
from tests.models.test_quantised import FORMATS, every_linear
from tests.quantised import quantise

pytestmark = pytest.mark.gpu
MULTIPLIED_OUT = ("gptq-8", "pack-8-asym", "fp8-channel", "fp8-tensor", "modelopt-fp8")


def streams(model: Path, mtp_step: int, expected: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    """The tokens of three requests, greedy and sampled; with `expected`, some drafts are right."""
    engine = gpu_engine(model, max_batch=4, mtp_step=mtp_step)
    assert not any(form.is_packed for form in engine.runner.spec.weight_formats.values())
    if expected is not None:
        force_drafts(engine, expected, lambda name, pos: pos % (mtp_step + 1))
    for index in range(3):
        params = SamplingParams(max_tokens=24, temperature=0.8 * (index % 2), seed=index, ignore_eos=True)
        prompt = prompt_of((1, 40, 130)[index], index, engine.model_config.vocab_size)
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=str(index))
    return run_to_end(engine)


@pytest.mark.parametrize("name", MULTIPLIED_OUT)
def test_a_checkpoint_has_the_tokens_of_its_plain_twin(tmp_path: Path, name: str) -> None:
    packer, config = FORMATS[name]
    write_checkpoint(tmp_path / "model", **SIZES)
    twin = quantise(tmp_path / "model", every_linear(packer), config)
    plain = streams(tmp_path / "model", 0)
    assert streams(twin, 0) == plain
    assert streams(tmp_path / "model", 3, plain) == plain
