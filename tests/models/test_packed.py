"""The default checkpoint, whose matrices are packed on a CPU, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiled_mtp import EngineConfig
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.row_unit import find_row_unit, weights_of
from compiled_mtp.ops.packed_weight import find_packed
from compiled_mtp.rounds.first_token import rows_at
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import resolve
from tests import tiny
from tests.checkpoints import write_checkpoint

PROMPT, WINDOWS, CHUNK = 150, (1, 2, 3, 4) * 5, 64
# The bound that docs/numerics.md states for this checkpoint.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def runner() -> Runner:
    config = EngineConfig(device="cpu", mtp_step=3, max_batch=2, max_model_len=256, num_blocks=40)
    model = read_model_config(Path(config.model))
    return Runner(resolve(config, model, model.vocab_size))


@torch.no_grad()
def test_logits_of_packed_weights_are_those_of_transformers(runner: Runner) -> None:
    transformers = pytest.importorskip("transformers")
    step, target = runner.step, runner.step.target
    if "fbgemm" in torch.backends.quantized.supported_engines:
        weights = [*weights_of(target.modules()), target.head_weight]
        assert sum(find_packed(weight) is not None for weight in weights) > len(weights) // 2
    path = EngineConfig().model
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4000, (PROMPT + sum(WINDOWS),), generator=generator)
    expected = oracle(tokens[None]).logits[0]
    assert expected.abs().max() > 5

    tiny.poison(step)
    tiny.install(step, 1, tuple((1, i, i + 1) for i in range(step.slots.block_table.shape[1])))
    caches, ours = (step.kv_cache, step.state_cache, step.cos_sin), []
    for begin in range(0, PROMPT, CHUNK):
        part = tokens[begin : min(begin + CHUNK, PROMPT)]
        hidden = target(part, tiny.prefill_rows(step, 1, begin, len(part)), *caches)
        ours.append(target.logits(hidden))
    state_index = torch.tensor([1], dtype=torch.int32)
    base = pos = PROMPT
    for window in WINDOWS:
        rows = rows_at(
            step, state_index, state_index.long(), torch.tensor([pos]), window, torch.tensor([base])
        )
        hidden = target(tokens[pos : pos + window], rows, *caches)
        ours.append(target.logits(hidden))
        base, pos = pos, pos + window
    error = (torch.cat(ours)[:, : expected.shape[1]] - expected).abs().max()
    print(f"packed weights: error {error:.2e} on logits of {expected.abs().max():.1f}")
    assert error < TOLERANCE


def test_only_matrices_that_the_models_hold_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of a weight is a new tensor at every call, so a packed copy of it would never be found."""
    family = {"num_key_heads": 1, "num_value_heads": 2, "fp8_scale": torch.bfloat16}
    write_checkpoint(tmp_path, **family, hidden_size=256, intermediate_size=512)
    model = read_model_config(tmp_path)
    tried: list[torch.Tensor] = []

    def pack(weight: torch.Tensor, k_splits: int, exponent: int) -> bool:
        tried.append(weight)
        return False

    monkeypatch.setattr("compiled_mtp.models.packing.pack", pack)
    config = EngineConfig(model=tmp_path, device="cpu", mtp_step=1, max_batch=1, max_model_len=64)
    step = Runner(resolve(config, model, model.vocab_size)).step
    assert step.draft is not None
    held = {id(weight) for module in (step.target, step.draft) for weight in module.parameters()}
    assert tried
    assert {id(weight) for weight in tried} <= held
    assert len({id(weight) for weight in tried}) == len(tried)


def test_a_weight_that_is_not_finite_does_not_change_the_row_unit() -> None:
    """Otherwise the engine would warn that tokens depend on the batch, and take rows by eight."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    unit = find_row_unit([weight], (1, 8, 12))
    weight[0, 0], weight[1, 0] = float("nan"), float("inf")
    assert unit is not None
    assert find_row_unit([weight], (1, 8, 12)) == unit
