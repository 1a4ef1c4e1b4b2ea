"""Four-bit weights on a GPU, of experts too: rows have the same bits in every tile, tokens at every depth and
batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.engine import Engine
from compiled_mtp.ops.int4 import dequantize
from compiled_mtp.ops.k_splits import add_tree
from compiled_mtp.ops.linear_w4a16 import linear_w4a16, linear_w4a16_partials, linear_w4a16_silu_mul
from compiled_mtp.ops.moe_experts import moe_experts_w4a16
from compiled_mtp.ops.moe_experts.codes import ExpertTile, Tiles, launch_experts
from compiled_mtp.ops.silu_mul import silu_mul
from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import force_drafts, make_engine, prompt_of, run_to_end
from tests.gpu.test_moe import float64_block
from tests.models.test_four_bits import EXPERTS
from tests.models.test_quantised import FORMATS, SMALL, every_linear
from tests.ops.harness import poisoned_allocations, rel_l2
from tests.ops.test_linear_w4a16 import four_bits
from tests.ops.test_moe_w4a16 import arguments, case_of, first_rows, two_products
from tests.ops.test_moe_w4a16 import values_of as stack_values
from tests.quantised import quantise

pytestmark = pytest.mark.gpu

ROWS = (1, 4, 16, 17, 32, 33, 64, 65, 128)
SIZES: dict[str, Any] = SMALL | {"hidden_size": 256, "intermediate_size": 512, "num_layers": 4}
MIXTURE: dict[str, Any] = EXPERTS | {"num_layers": 4, "moe_intermediate_size": 512}


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(34816, 5120), (5120, 17408), (16384, 5120), (1024, 3584), (48, 256)])
def test_rows_have_the_same_bits_and_the_values_of_float64(n: int, k: int, group: int) -> None:
    torch.manual_seed(n + k + group)
    dtype = torch.bfloat16 if group == 64 else torch.float16
    weight, scale = (tensor.cuda() for tensor in four_bits(n, k, group, dtype))
    x = torch.randn(129, k, device="cuda").bfloat16()
    exact = x.double() @ dequantize(weight, scale).double().T
    whole = linear_w4a16(x, weight, scale, True)
    assert (whole - exact).norm() / exact.norm() < 1e-5
    gated = linear_w4a16_silu_mul(x, weight, scale)
    assert torch.equal(gated, silu_mul(linear_w4a16(x, weight, scale)))
    sums = linear_w4a16_partials(x, weight, scale, 1)[0]
    for rows in ROWS:
        assert torch.equal(linear_w4a16(x[:rows], weight, scale, True), whole[:rows]), rows
        assert torch.equal(linear_w4a16_silu_mul(x[:rows], weight, scale), gated[:rows]), rows
        for count in (1, 2, 4, 8) if k % 1024 == 0 else (1,):
            partials = linear_w4a16_partials(x[:rows], weight, scale, count)
            assert torch.equal(add_tree(partials).bfloat16(), sums[:rows]), (rows, count)
    prompt = linear_w4a16(x, weight, scale, True, True)
    assert (prompt - exact).norm() / exact.norm() < 4e-3


@pytest.mark.parametrize("is_shared_plain", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("experts", "top_k", "width", "inner"), [(24, 4, 2048, 512), (6, 2, 256, 128)])
def test_experts_have_the_same_bits_and_the_values_of_float64(
    experts: int, top_k: int, width: int, inner: int, group: int, is_shared_plain: bool
) -> None:
    dtype = torch.bfloat16 if group == 64 else torch.float16
    how: dict[str, Any] = {"is_shared_plain": is_shared_plain, "dtype": dtype}
    case = case_of(300, experts, top_k, width, inner, group, **how)
    case = {name: tensor.cuda() for name, tensor in case.items()}
    stacks = [stack_values(case, name) for name in ("gate_up", "down")]
    exact = float64_block(case["x"], case["weights"], case["ids"], *stacks, None, None)
    whole = moe_experts_w4a16(**case)
    assert rel_l2(whole, exact) < 4e-3
    for rows in (1, 3, 4, 16, 17, 33, 64, 100, 129):
        with poisoned_allocations():
            got = moe_experts_w4a16(**first_rows(case, rows))
        assert torch.equal(got, whole[:rows]), rows
    check_tiles(arguments(moe_experts_w4a16, first_rows(case, 129)), whole[:129])


def check_tiles(args: Any, wanted: torch.Tensor) -> None:
    """Compare the bits of tiles of 8 to 64 pairs, whatever their weight rows. args: of `launch_experts`."""
    for gate_up, down in (
        ((8, 32, 2, 4, 3), (8, 64, 4, 2, 3)),
        ((8, 64, 4, 2, 2, 2), (8, 64, 4, 2, 2, 4)),
        ((16, 64, 2, 1, 4), (16, 128, 4, 1, 3)),
        ((32, 64, 4, 1, 3), (32, 32, 2, 2, 2)),
        ((64, 128, 4, 1, 3), (64, 64, 4, 1, 3)),
    ):
        tiles = Tiles(ExpertTile(*gate_up), ExpertTile(*down))
        assert torch.equal(launch_experts(tiles, *args), wanted), tiles


@pytest.mark.parametrize("is_shared_plain", [False, True])
def test_shards_of_experts_have_the_bits_of_the_whole(is_shared_plain: bool) -> None:
    case = case_of(40, 6, 2, 2048, 512, 64, is_shared_plain=is_shared_plain)
    case = {name: tensor.cuda() for name, tensor in case.items()}
    whole = moe_experts_w4a16(**case)
    assert torch.equal(two_products(case, "__call__"), whole)


# The name of a format, and for a mixture of experts how its shared expert is stored.
CHECKPOINTS = (
    *("gptq", "awq", "pack-g64", "gptq-g32-bf16", "pack-channel-asym", "auto-round-gptq"),
    *("gptq moe", "pack-g64 moe", "gptq moe, shared expert plain"),
)


def write_four_bits(path: Path, name: str) -> Path:
    packer, config = FORMATS[name.split()[0]]
    write_checkpoint(path, **(MIXTURE if "moe" in name else SIZES))
    choose, keeps_shared = every_linear(packer), name.endswith("plain")
    quantise(path, lambda module: None if keeps_shared and "shared" in module else choose(module), config)
    return path


@pytest.fixture(scope="module", params=CHECKPOINTS)
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_four_bits(tmp_path_factory.mktemp("checkpoint"), request.param)


def gpu_engine(directory: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "prefill_chunk": 128, "block_size": 64}
    return make_engine(directory, **(defaults | {"compile": "off"} | options))


def streams(
    directory: Path, count: int, expected: dict[str, list[int]] | None = None, **options: Any
) -> dict[str, list[int]]:
    """Return the tokens of some requests, greedy and sampled; with `expected`, some drafts are right."""
    engine = gpu_engine(directory, max_batch=max(count, 4), **options)
    kept = [form for form in engine.runner.spec.weight_formats.values() if form.group]
    assert kept
    for layer in engine.runner.step.target.layers if engine.model_config.is_moe else ():
        assert layer.ffn.has_codes
    if expected is not None and engine.config.mtp_step:
        force_drafts(engine, expected, lambda name, pos: pos % (engine.config.mtp_step + 1))
    for index in range(count):
        params = SamplingParams(max_tokens=24, temperature=0.8 * (index % 2), seed=index, ignore_eos=True)
        prompt = prompt_of((1, 40, 130)[index % 3], index, engine.model_config.vocab_size)
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=str(index))
    return run_to_end(engine)


def test_tokens_do_not_depend_on_depth_batch_or_cache(directory: Path) -> None:
    alone = streams(directory, 1, mtp_step=0)
    three = streams(directory, 3, mtp_step=0)
    assert alone["0"] == three["0"]
    for depth in (1, 3, 7):
        assert streams(directory, 3, three, mtp_step=depth) == three, depth
    many = streams(directory, 20, mtp_step=3)
    assert {name: many[name] for name in three} == three
    assert streams(directory, 3, mtp_step=3, prefix_cache=False) == three
    assert streams(directory, 3, mtp_step="auto") == three
    assert streams(directory, 3, mtp_step=3, draft_vocab=64) == three


@pytest.mark.parametrize("name", ["awq", "gptq moe", "gptq moe, shared expert plain"])
def test_compiled_code_does_not_depend_on_depth_or_batch(tmp_path: Path, name: str) -> None:
    write_four_bits(tmp_path, name)
    three = streams(tmp_path, 3, mtp_step=0, compile="on")
    assert streams(tmp_path, 3, three, mtp_step=3, compile="on") == three
    assert streams(tmp_path, 1, mtp_step=3, compile="on")["0"] == three["0"]
