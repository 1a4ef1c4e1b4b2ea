"""FP8 on a GPU: FP8 weights and an FP8 cache, each with the same tokens for all depths and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from compiled_mtp.rounds.prefill import prefill
from tests import tiny
from tests.checkpoints import FP8_FAMILIES, write_checkpoint
from tests.engines import force_drafts, make_engine, prompt_of, run_to_end

pytestmark = pytest.mark.gpu

LENGTHS = (1, 40, 130)
# Logits of scale 4.5: in float32 both engines multiply the same numbers in another order (the CPU's bound is
# 5e-4, the GPU's exponentials are less exact).
FLOAT32_TOLERANCE = 2e-3


@pytest.fixture(scope="module", params=FP8_FAMILIES, ids=lambda family: family[0])
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, options = request.param
    return write_checkpoint(tmp_path_factory.mktemp(name), **options)


def gpu_engine(directory: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"device": "cuda", "prefill_chunk": 128, "block_size": 64, "compile": "off"}
    return make_engine(directory, **(defaults | options))


def streams(
    directory: Path,
    expected: dict[str, list[int]] | None = None,
    logprobs: int | None = None,
    **options: Any,
) -> dict[str, list[int]]:
    """Return the tokens of three requests, greedy and sampled; with `expected`, some drafts are right.

    With log probabilities, rounds have two phases.
    """
    engine = gpu_engine(directory, **options)
    if expected is not None and engine.config.mtp_step:
        force_drafts(engine, expected, lambda name, pos: pos % (engine.config.mtp_step + 1))
    for index, length in enumerate(LENGTHS):
        params = SamplingParams(
            max_tokens=24,
            temperature=0.8 * (index % 2),
            seed=index,
            ignore_eos=True,
            logprobs=logprobs,
        )
        prompt = prompt_of(length, index, engine.model_config.vocab_size)
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=str(index))
    return run_to_end(engine)


@torch.no_grad()
def prefill_logits(engine: Engine, tokens: list[int]) -> torch.Tensor:
    step, device = engine.runner.step, engine.runner.spec.device
    tiny.install(step, 1, tuple((1, i, i + 1) for i in range(step.slots.block_table.shape[1])))
    prompt_chunks = torch.tensor([[1], [0], [len(tokens)], [0], [0]], device=device)
    return step.target.logits(prefill(step, torch.tensor(tokens, device=device), prompt_chunks))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn"])
def test_same_tokens_with_fp8_weights(directory: Path, dtype: str, recipe: str, kv_dtype: str) -> None:
    options = {"dtype": dtype, "weight_recipe": recipe, "kv_dtype": kv_dtype}
    expected = streams(directory, mtp_step=0, max_batch=1, **options)
    for mtp_step, batch in ((0, 3), (3, 1), (3, 3)):
        assert streams(directory, expected, mtp_step=mtp_step, max_batch=batch, **options) == expected


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
def test_same_tokens_compiled(directory: Path, recipe: str) -> None:
    """Replayed graphs with both kinds of FP8: a compiling engine against one that does not compile."""
    options = {"weight_recipe": recipe, "dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "compile": "auto"}
    torch._dynamo.reset()
    expected = streams(directory, mtp_step=0, max_batch=1, **options)
    torch._dynamo.reset()
    assert streams(directory, expected, mtp_step=3, max_batch=3, **options) == expected
    # The compiler must not launch a side product before its product.
    torch._dynamo.reset()
    assert streams(directory, expected, 1, mtp_step=3, max_batch=3, **options) == expected


def test_logits_are_those_of_the_dequantised_weights(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept weights are exact, those dequantised to bfloat16 are rounded: the former must err no more."""
    tokens = prompt_of(120, 1, 512)
    kept, plain = {}, {}
    for dtype in ("float32", "bfloat16"):
        engine = gpu_engine(directory, mtp_step=0, dtype=dtype, weight_recipe="w8a16")
        layers = engine.runner.step.target.layers
        in_fp8 = sum(p.nbytes for p in layers.parameters() if p.dtype == torch.float8_e4m3fn)
        assert in_fp8 > 0.9 * sum(p.numel() for p in layers.parameters())
        kept[dtype] = prefill_logits(engine, tokens)
    monkeypatch.setattr("compiled_mtp.ops.fp8.converts_fp8", lambda device: False)
    for dtype in ("float32", "bfloat16"):
        engine = gpu_engine(directory, mtp_step=0, dtype=dtype, weight_recipe="w8a16")
        assert not engine.runner.spec.weight_formats
        plain[dtype] = prefill_logits(engine, tokens)

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).square().mean().sqrt())

    exact = plain["float32"]
    apart = distance(kept["float32"], exact)
    errors = distance(kept["bfloat16"], exact), distance(plain["bfloat16"], exact)
    print(f"{directory.name}: float32 {apart:.2e}, bfloat16 kept {errors[0]:.2e}, plain {errors[1]:.2e}")
    assert apart < FLOAT32_TOLERANCE
    assert errors[0] < 1.25 * errors[1]


def test_quantised_rows_agree_with_the_cpus(directory: Path) -> None:
    """The GPU's products in e4m3 against the CPU's, which multiply the same numbers in float32.

    The last bits decide to which side a number near the middle of two e4m3 values is rounded, and later
    numbers change with it. On a CPU, embeddings that are off by 1e-5 change these logits as much as the GPU's
    differ. They err by as much, and by half as much as quantising rows does. So the bound is the effect of
    1e-4.
    """
    tokens = prompt_of(120, 1, 512)
    ours = prefill_logits(
        gpu_engine(directory, mtp_step=0, dtype="float32", weight_recipe="w8a8"), tokens
    ).cpu()
    engine = make_engine(directory, mtp_step=0, device="cpu", weight_recipe="w8a8")
    cpu = prefill_logits(engine, tokens)
    embeddings = engine.runner.step.target.embed.weight.data
    noise = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(1))
    embeddings.mul_(1 + 1e-4 * noise.to(embeddings.dtype))
    moved = prefill_logits(engine, tokens)
    apart, bound = (float((a - cpu).square().mean().sqrt()) for a in (ours, moved))
    print(f"{directory.name}: devices {apart:.2e}, embeddings off by 1e-4 {bound:.2e}")
    assert apart < bound


def check_drafts(directory: Path, draft_dtype: str, **options: Any) -> None:
    """Drafts in a dtype give the tokens of no drafts, with few rows and with many."""
    torch._dynamo.reset()
    expected = streams(directory, mtp_step=0, max_batch=1, **options)
    options["draft_dtype"] = draft_dtype
    for given in ({"max_batch": 3}, {"max_batch": 20, "batch_sizes": (20,)}, {"draft_vocab": 200}):
        torch._dynamo.reset()
        assert streams(directory, mtp_step=3, **given, **options) == expected


@pytest.mark.parametrize("compile", ["off", "auto"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_same_tokens_with_drafts_in_fp8(tmp_path: Path, family: str, dtype: str, compile: str) -> None:
    """The MTP layer's linears and the draft's head."""
    directory = write_checkpoint(tmp_path, family)
    check_drafts(directory, "float8_e4m3fn", dtype=dtype, compile=compile)


@pytest.mark.parametrize("compile", ["off", "auto"])
def test_same_tokens_with_a_draft_head_in_int4(tmp_path: Path, compile: str) -> None:
    directory = write_checkpoint(tmp_path, "qwen3_5", hidden_size=256)
    check_drafts(directory, "int4", dtype="bfloat16", compile=compile)
    head = gpu_engine(directory, dtype="bfloat16", draft_dtype="int4").runner.step.draft_head
    assert head is not None
    assert head.dtype == torch.int16


def test_auto_drafts_in_fp8(directory: Path) -> None:
    """Weights that become FP8 leave no copy in another dtype; stored FP8 weights keep their bits."""
    engine = gpu_engine(directory, dtype="bfloat16")
    step, spec = engine.runner.step, engine.runner.spec
    assert spec.drafts.has_fp8_linears
    assert step.draft_head is not None
    assert step.draft_head.dtype == torch.float8_e4m3fn
    assert step.draft is not None
    wide = [name for name, p in step.draft.named_parameters() if p.dim() > 1 and p.dtype == torch.bfloat16]
    assert all(name.endswith("router.weight") for name in wide)
    assert engine.runner.memory.other_bytes >= step.draft_head.nbytes
    plain = gpu_engine(directory, dtype="bfloat16", draft_dtype="weights").runner.step
    assert plain.draft_head is None
    assert plain.draft is not None
    held, kept = (dict(draft.named_parameters()) for draft in (step.draft, plain.draft))
    for name, parameter in kept.items():
        if parameter.dtype == torch.float8_e4m3fn:
            assert torch.equal(parameter.view(torch.uint8), held[name].view(torch.uint8)), name
