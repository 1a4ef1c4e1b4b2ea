"""FP8 weights on a CPU, in both recipes: kept in FP8 (forced here, as on a GPU) and dequantised."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compiled_mtp.engine import Engine
from compiled_mtp.ops.fp8 import dequantize
from compiled_mtp.ops.quantize_rows import quantize_rows
from compiled_mtp.request import SamplingParams
from compiled_mtp.rounds.prefill import prefill
from tests import tiny
from tests.checkpoints import FP8_FAMILIES, write_checkpoint
from tests.engines import force_drafts, make_engine, prompt_of, run_to_end

# Measured 5e-5, 7e-5 and 1.1e-4 (next, dense, moe) on logits of scale 4.5: the input projection is cut in
# two, and BLAS sums narrower matrices in another order. All other products are the same.
TOLERANCE = 5e-4


@pytest.fixture(scope="module", params=FP8_FAMILIES, ids=lambda family: family[0])
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, options = request.param
    return write_checkpoint(tmp_path_factory.mktemp(name), **options)


def kept_engine(directory: Path, **options: Any) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_mtp.ops.fp8.converts_fp8", lambda device: True)
        engine = make_engine(directory, **options)
    assert engine.runner.spec.weight_formats
    return engine


@torch.no_grad()
def prefill_logits(engine: Engine, tokens: list[int]) -> torch.Tensor:
    step = engine.runner.step
    tiny.install(step, 1, tuple((1, i, i + 1) for i in range(step.slots.block_table.shape[1])))
    pieces = torch.tensor([[1], [0], [len(tokens)], [0], [0]])
    return step.target.logits(prefill(step, torch.tensor(tokens), pieces))


def streams(
    engine: Engine, expected: dict[str, list[int]] | None = None, length: int = 30
) -> dict[str, list[int]]:
    """Return the tokens of three requests, greedy and sampled; with `expected`, some drafts are right."""
    if expected is not None and engine.config.mtp_step:
        force_drafts(engine, expected, lambda name, pos: pos % 4)
    for index in range(3):
        params = SamplingParams(max_tokens=8, temperature=0.8 * (index % 2), seed=index, ignore_eos=True)
        prompt = prompt_of(10 + length * index, index, 512)
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=str(index))
    return run_to_end(engine)


def layer_bytes(engine: Engine) -> int:
    return sum(parameter.nbytes for parameter in engine.runner.step.target.layers.parameters())


def test_logits_are_those_of_the_dequantised_weights(directory: Path) -> None:
    options: dict[str, Any] = {"mtp_step": 0, "weight_recipe": "w8a16"}
    kept, plain = kept_engine(directory, **options), make_engine(directory, **options)
    assert not plain.runner.spec.weight_formats
    tokens = prompt_of(150, 1, 512)
    error = float((prefill_logits(kept, tokens) - prefill_logits(plain, tokens)).abs().max())
    print(f"{directory.name}: {error:.2e}")
    assert error < TOLERANCE
    # One byte instead of four, and one scale per 128 * 128; the rows that stay float32 are under 1 %.
    assert layer_bytes(kept) < 0.26 * layer_bytes(plain)


def test_same_tokens_with_rows_as_they_are(directory: Path) -> None:
    expected = streams(kept_engine(directory, mtp_step=0, max_batch=1, weight_recipe="w8a16"))
    for mtp_step, batch in ((3, 1), (3, 3)):
        engine = kept_engine(directory, mtp_step=mtp_step, max_batch=batch, weight_recipe="w8a16")
        assert streams(engine, expected) == expected


def test_same_tokens_with_quantised_rows(directory: Path) -> None:
    """Over depths, batches and chunks, with weights kept in FP8 and dequantised."""
    expected = streams(make_engine(directory, mtp_step=0, max_batch=1), length=70)
    for mtp_step, batch, chunk, make in (
        (0, 3, 128, kept_engine),
        (3, 1, 128, make_engine),
        (3, 3, 64, kept_engine),
        (3, 3, 64, make_engine),
    ):
        engine = make(directory, mtp_step=mtp_step, max_batch=batch, prefill_chunk=chunk)
        assert streams(engine, expected, length=70) == expected, (mtp_step, batch, chunk, make.__name__)


def test_every_fp8_product_takes_quantised_rows(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates and routers are no FP8 weights and take unquantised rows."""
    engine, with_rows = make_engine(directory, mtp_step=1), kept_engine(directory, weight_recipe="w8a16")
    config, tokens = engine.model_config, prompt_of(20, 1, 512)
    layers = [(f"layers.{i}.", full) for i, full in enumerate(config.is_full_attention)]
    ffn = {"ffn.gate_up", "ffn.down"}
    mixers = ({"mixer.in_proj", "mixer.out_proj"}, {"mixer.qkv", "mixer.o_proj"})
    names = {p + name for p, full in (*layers, ("mtp.layer.", True)) for name in ffn | mixers[full]}
    formats = engine.runner.spec.weight_formats
    assert {n.removesuffix(".weight") for n, form in formats.items() if form.quantizes_rows} == names

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).square().mean().sqrt())

    quantised, unquantised = prefill_logits(engine, tokens), prefill_logits(with_rows, tokens)
    for name in names:
        if name.startswith("mtp.") or (config.is_moe and ".ffn." in name):
            continue
        product = with_rows.runner.step.target.get_submodule(name)
        product.register_forward_pre_hook(lambda module, args: (rounded(args[0]), *args[1:]))
        # Products before a norm.
        partials = partial(lambda whole, x, rows: whole(rounded(x), rows), product.partials)
        monkeypatch.setattr(product, "partials", partials)
    monkeypatch.setattr("compiled_mtp.models.moe.moe_experts", experts_by_hand)
    by_hand = distance(quantised, prefill_logits(with_rows, tokens))
    recipes = distance(quantised, unquantised)
    print(f"{directory.name}: by hand {by_hand:.1e}, W8A16 {recipes:.1e}")
    # Float32 sums in another order sometimes move a value to the next e4m3 value.
    assert by_hand < 0.1 * recipes


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return the values of x's quantised rows."""
    values, factors = quantize_rows(x)
    return values.float() * factors.repeat_interleave(128, 1)


def experts_by_hand(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *stacks: Any) -> torch.Tensor:
    """Compute moe_experts with quantised rows and quantised hidden values, expert by expert."""
    gate_ups, downs, gate_up_scale, down_scale = stacks[:4]
    total = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        gate, up = (rounded(x) @ dequantize(gate_ups[expert], gate_up_scale[expert]).T).chunk(2, 1)
        result = rounded(F.silu(gate) * up) @ dequantize(downs[expert], down_scale[expert]).T
        total += ((ids == expert) * weights).sum(1, keepdim=True) * result
    return total
