"""moe_router and moe_experts on the device: real shapes against float64, row invariance, graph replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_mtp.ops.moe_experts import moe_experts, moe_experts_w8a8
from compiled_mtp.ops.moe_router import moe_router
from compiled_mtp.ops.quantize_rows import quantize_rows
from tests.ops.harness import check_row_invariance, poisoned_allocations, rel_l2
from tests.ops.test_moe_products import two_products

pytestmark = pytest.mark.gpu
# 35B-A3B's and Qwen3-Next 80B-A3B's: experts, top_k, hidden, inner.
SHAPES = [(256, 8, 2048, 512), (512, 10, 2048, 512)]
SIZES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 128, 200, 255, 256)


def random_weights(
    experts: int, n: int, k: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.empty(experts + 1, n, k, dtype=dtype, device="cuda")
    is_fp8 = dtype == torch.float8_e4m3fn
    for expert in range(experts + 1):
        weight[expert] = (torch.randn(n, k, device="cuda") * (50.0 if is_fp8 else k**-0.5)).to(dtype)
    if not is_fp8:
        return weight, None
    scale = torch.rand(experts + 1, -(-n // 128), -(-k // 128), device="cuda")
    return weight, (scale + 0.5) * (k**-0.5 / 50.0)


def make_case(
    rows: int, shape: tuple[int, int, int, int], x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[Any, ...]:
    experts, top_k, width, inner = shape
    gate_up, gate_up_scale = random_weights(experts, 2 * inner, width, weight_dtype)
    down, down_scale = random_weights(experts, width, inner, weight_dtype)
    # Rows as a slice of a wider tensor, as a caller may pass them.
    x = torch.randn(rows, width + 64, device="cuda").to(x_dtype)[:, :width]
    weights, ids = moe_router(torch.randn(rows, experts + 1, device="cuda") * 2, top_k, True)
    return x, weights, ids, gate_up, down, gate_up_scale, down_scale


def float64_block(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
) -> torch.Tensor:
    def matrix(weight: torch.Tensor, scale: torch.Tensor | None, expert: int) -> torch.Tensor:
        if scale is None:
            return weight[expert].double()
        n, k = weight.shape[1:]
        full = scale[expert].double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return weight[expert].double() * full

    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        row, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[row].double() @ matrix(gate_up, gate_up_scale, expert).T).chunk(2, 1)
        result = (gate * torch.sigmoid(gate) * up) @ matrix(down, down_scale, expert).T
        out.index_add_(0, row, weights[row, slot].double()[:, None] * result)
    return out


@pytest.mark.parametrize("experts, top_k", [(256, 8), (512, 10), (60, 4)])
def test_router_equals_reference(experts: int, top_k: int) -> None:
    logits = torch.randn(257, experts + 1, device="cuda") * 2
    logits[3] = logits[3].round()
    logits[4, 7] = float("nan")
    with poisoned_allocations():
        weights, ids = moe_router(logits, top_k, True)
    expected, expected_ids = moe_router(logits.cpu(), top_k, True)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected, rtol=2e-6, atol=1e-9, equal_nan=True)
    check_row_invariance(lambda m: moe_router(logits[:m].nan_to_num(), top_k, True), SIZES, 257)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_bf16_equals_float64_and_rows_are_invariant(
    shape: tuple[int, int, int, int], weight_dtype: torch.dtype
) -> None:
    case = make_case(2048, shape, torch.bfloat16, weight_dtype)
    x, weights, ids, *rest = case
    exact = float64_block(*case)
    for rows in (1, 4, 37, 256, 2048):
        with poisoned_allocations():
            got = moe_experts(x[:rows], weights[:rows], ids[:rows], *rest)
        assert rel_l2(got, exact[:rows]) < 4e-3
    # From 16 pairs per expert on, bfloat16 has taller tiles.
    more = (*SIZES, 456, 457, 512, 746, 747)
    check_row_invariance(lambda m: moe_experts(x[:m], weights[:m], ids[:m], *rest), more, 1024)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float8_e4m3fn])
def test_float32_equals_float64_and_rows_are_invariant(weight_dtype: torch.dtype) -> None:
    case = make_case(70, (16, 4, 640, 320), torch.float32, weight_dtype)
    x, weights, ids, *rest = case
    with poisoned_allocations():
        assert rel_l2(moe_experts(*case), float64_block(*case)) < 1e-6
    check_row_invariance(lambda m: moe_experts(x[:m], weights[:m], ids[:m], *rest), (1, 3, 8, 17), 70)


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("shards", [2, 4])
def test_shards_have_the_bits_of_the_whole(shards: int, prefill: bool) -> None:
    """Each rank has some rows of gate and of up, then some rows of down; few pairs an expert and many."""
    x, weights, ids, gate_up, down, *_ = make_case(300, (16, 4, 1024, 512), torch.bfloat16, torch.bfloat16)
    for rows in (1, 4, 33, 300):
        case = (x[:rows], weights[:rows], ids[:rows], gate_up, down)
        whole = moe_experts(*case, prefill=prefill)
        assert torch.equal(two_products(case, shards, "__call__", prefill), whole), rows


def test_odd_sizes() -> None:
    case = make_case(33, (6, 3, 200, 72), torch.bfloat16, torch.bfloat16)
    with poisoned_allocations():
        assert rel_l2(moe_experts(*case), float64_block(*case)) < 4e-3


def test_graph_replays_with_new_rows() -> None:
    shape = (64, 4, 512, 256)
    static = make_case(5, shape, torch.bfloat16, torch.bfloat16)
    logits = torch.randn(5, 65, device="cuda")

    def block() -> torch.Tensor:
        weights, ids = moe_router(logits, 4, True)
        return moe_experts(static[0], weights, ids, *static[3:])

    block()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block()
    for _ in range(3):
        static[0].copy_(torch.randn(5, 512, device="cuda"))
        logits.copy_(torch.randn(5, 65, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, block())


def test_every_e4m3_code_is_widened_exactly() -> None:
    # Products with one-hot rows are the weights themselves, and `down` shows them by silu(g) * 1.
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes[127], codes[255] = 0, 0
    width, inner = 256, 128
    down = codes.repeat(inner, 1).t().contiguous().view(torch.float8_e4m3fn)[None].repeat(2, 1, 1)
    gate_up = torch.zeros(2, 2 * inner, width, device="cuda")
    gate_up[:, 0, 0] = 64.0
    gate_up[:, inner, 0] = 1.0
    ones = (torch.ones(2, 2, 2, device="cuda"), torch.ones(2, 2, 1, device="cuda"))
    x = torch.zeros(3, width, dtype=torch.bfloat16, device="cuda")
    x[:, 0] = 1.0
    weights = torch.tensor([[0.0, 1.0]] * 3, device="cuda")
    ids = torch.tensor([[0, 1]] * 3, dtype=torch.int32, device="cuda")
    y = moe_experts(x, weights, ids, gate_up.to(torch.float8_e4m3fn), down, *ones)
    # The hidden row is (64, 0, ..., 0).
    assert torch.equal(y.float(), (64.0 * down[0, :, 0].float()).expand(3, width))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_bits_of_a_prompt_do_not_depend_on_its_chunk(weight_dtype: torch.dtype) -> None:
    case = make_case(2048, SHAPES[0], torch.bfloat16, weight_dtype)
    x, weights, ids, *rest = case
    assert rel_l2(moe_experts(*case, prefill=True), float64_block(*case)) < 4e-3

    def first(m: int) -> torch.Tensor:
        return moe_experts(x[:m], weights[:m], ids[:m], *rest, prefill=True)

    check_row_invariance(first, (1, 64, 65, 200, 512, 1024), 2048)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a CUDA device with FP8 products",
)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_rows_have_the_same_bits_for_every_number_of_rows(shape: tuple[int, int, int, int]) -> None:
    """Tiles of 16 pairs and of 64; compared with bfloat16, the error is that of two quantised activations."""
    case = make_case(2048, shape, torch.bfloat16, torch.float8_e4m3fn)
    x, weights, ids, *rest = case
    values, factors = quantize_rows(x)

    def first(m: int) -> torch.Tensor:
        return moe_experts_w8a8(values[:m], factors[:m], weights[:m], ids[:m], *rest)

    with poisoned_allocations():
        assert rel_l2(first(2048), float64_block(*case)) < 6e-2
    check_row_invariance(first, (*SIZES, 512, 1024), 2048)
    cpu = moe_experts_w8a8(
        *(tensor.cpu() for tensor in (values[:4], factors[:4], weights[:4], ids[:4], *rest))
    )
    assert rel_l2(first(4).cpu(), cpu) < 2e-2
