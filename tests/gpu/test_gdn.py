"""The GDN operators on the device: real head counts against float64, windows against single steps, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_mtp.ops.gdn_prefill import gdn_prefill
from compiled_mtp.ops.gdn_verify import gdn_verify
from compiled_mtp.ops.spec_conv1d import conv_prefill, spec_conv1d
from tests.ops.gdn_cases import (
    Cache,
    Layer,
    Shape,
    Stream,
    check_unfolded_states,
    check_windows_equal_single_steps,
    conv_float64,
    gated_norm_float64,
    make_cache,
    make_layer,
    make_proj,
    make_prompt,
    make_window,
    recurrence_float64,
    select_rows,
)
from tests.ops.harness import assert_same_bits, check_registration, poisoned_allocations, rel_l2

pytestmark = pytest.mark.gpu

SHAPES = {
    "0.8b": Shape(16, 16, 128, 128),
    "4b": Shape(16, 32, 128, 128),
    "27b": Shape(16, 48, 128, 128),
    "8x": Shape(4, 32, 128, 128),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROUNDING = {torch.bfloat16: 3e-3, torch.float32: 1e-6}


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


def cuda(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cuda")


def slots_of(*values: int) -> torch.Tensor:
    return cuda(*values, dtype=torch.int32)


def weights_of(layer: Layer, cache: Cache) -> tuple[torch.Tensor, ...]:
    return layer.conv_weight, layer.a_log, layer.dt_bias, cache.conv_ring


def test_verify_equals_float64(shape: Shape, dtype: torch.dtype) -> None:
    """Three requests, windows of 8; the second window comes after five of the first eight were accepted."""
    layer = make_layer(shape, dtype, device="cuda")
    cache = make_cache(shape, 5, 16, dtype, "cuda")
    stream = Stream(layer, cache, [4, 1, 2], [0, 13, 1000], [0, 13, 1000], "sigmoid")
    states = [cache.state[slot].clone() for slot in stream.slots]
    for round_number in range(3):
        window = make_window(shape, 24, dtype, seed=round_number, device="cuda")
        with poisoned_allocations():
            y = stream.verify(gdn_verify, window, [0, 1, 2])
        for request in range(3):
            kept = list(range(8 * request, 8 * request + 5))
            q, k, v, exp_g, beta, z = select_rows(window, kept)
            out, states[request] = recurrence_float64(q, k, v, exp_g, beta, states[request])
            expected = gated_norm_float64(out, z, layer.norm_weight, 1e-6, "sigmoid")
            assert rel_l2(y[kept], expected) < ROUNDING[dtype]
            stream.accept(request, 5, 8)
    for got, exact in zip(stream.folded(gdn_verify), states, strict=True):
        assert rel_l2(got, exact) < 1e-6


@pytest.fixture(params=[2, 32])
def least_many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of two requests and more by the kernel of many requests, or by that of few."""
    monkeypatch.setattr("compiled_mtp.ops.gdn_verify.kernel.LEAST_MANY", request.param)


def test_verify_windows_equal_single_steps(shape: Shape, dtype: torch.dtype, least_many: None) -> None:
    """Windows of three requests against steps of one."""
    check_windows_equal_single_steps(gdn_verify, shape, rounds=24, dtype=dtype, device="cuda")


def test_unfolded_states_change_no_bit(shape: Shape, dtype: torch.dtype, least_many: None) -> None:
    check_unfolded_states(gdn_verify, shape, rounds=21, dtype=dtype, device="cuda")


def test_verify_rows_do_not_depend_on_batch() -> None:
    shape = SHAPES["27b"]
    layer = make_layer(shape, torch.bfloat16, device="cuda")
    whole = make_cache(shape, 34, 8, torch.bfloat16, "cuda")
    requests = list(range(32))
    slots, start = [r + 1 for r in requests], [3 * r for r in requests]
    window = make_window(shape, 128, torch.bfloat16, device="cuda")

    def rounds(groups: list[list[int]]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        stream = Stream(layer, whole.clone(), slots, list(start), list(start))
        outputs: dict[int, torch.Tensor] = {}
        for _ in range(2):
            for group in groups:
                rows = [4 * r + t for r in group for t in range(4)]
                y = stream.verify(gdn_verify, select_rows(window, rows), group)
                outputs |= {r: y[4 * place : 4 * place + 4] for place, r in enumerate(group)}
            for r in requests:
                stream.accept(r, 1 + r % 4, 4)
        return outputs, stream.cache.state

    together, state = rounds([requests])
    for groups in ([[r] for r in requests], [requests[:3], requests[3:8], requests[31:7:-1]]):
        apart, apart_state = rounds(groups)
        assert_same_bits([apart[r] for r in requests], [together[r] for r in requests])
        assert_same_bits([apart_state], [state])


def test_verify_graph_follows_slots_and_cursors(least_many: None) -> None:
    """The graph is captured once; slots, cursors and inputs then change in place, also those of a padding
    row."""
    shape = SHAPES["4b"]
    layer = make_layer(shape, torch.bfloat16, device="cuda")
    cache = make_cache(shape, 6, 8, torch.bfloat16, "cuda")
    proj = make_proj(shape, 12, torch.bfloat16, device="cuda")
    index, base, pos = slots_of(1, 2, 3), cuda(0, 0, 0), cuda(0, 0, 0)

    def step(
        cache: Cache, proj: torch.Tensor, index: torch.Tensor, base: torch.Tensor, pos: torch.Tensor
    ) -> Any:
        inputs = spec_conv1d(proj, *weights_of(layer, cache), index, pos, *shape.dims)
        z = proj[:, shape.channels : shape.channels + shape.value]
        return gdn_verify(
            *inputs, z, layer.norm_weight, cache.state, cache.ring_k, cache.ring_u, cache.ring_g,
            index, base, pos, 1e-6, "silu",
        )  # fmt: skip

    step(cache.clone(), proj, index, base, pos)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(cache, proj, index, base, pos)
    plain = make_cache(shape, 6, 8, torch.bfloat16, "cuda")
    for ours, theirs in zip(cache.tensors, plain.tensors, strict=True):
        ours.copy_(theirs)
    plan = [
        ((5, 2, 4), (0, 0, 0), (0, 0, 0)),
        ((2, 0, 5), (0, 0, 0), (3, 0, 4)),
        ((4, 5, 2), (0, 4, 3), (1, 6, 7)),
    ]
    for number, (slots, first, last) in enumerate(plan):
        fresh = make_proj(shape, 12, torch.bfloat16, seed=30 + number, device="cuda")
        for static, value in (
            (proj, fresh),
            (index, slots_of(*slots)),
            (base, cuda(*first)),
            (pos, cuda(*last)),
        ):
            static.copy_(value)
        expected = step(plain, fresh, slots_of(*slots), cuda(*first), cuda(*last))
        graph.replay()
        assert_same_bits([captured], [expected])
        assert_same_bits(cache.tensors, plain.tensors)
        assert torch.isfinite(captured).all()


@pytest.mark.parametrize("first_many", [1, 32])
def test_verify_reaches_slots_beyond_two_to_the_31(first_many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel of many requests and by that of few."""
    monkeypatch.setattr("compiled_mtp.ops.gdn_verify.kernel.LEAST_MANY", first_many)
    shape = SHAPES["27b"]
    slots = 2**31 // shape.value // 128 + 3
    layer = make_layer(shape, torch.bfloat16, device="cuda")
    small = make_cache(shape, 2, 8, torch.bfloat16, "cuda")
    last = slots - 1
    large = Cache(*(t.new_empty((slots, *t.shape[1:])) for t in small.tensors))
    for ours, theirs in zip(large.tensors, small.tensors, strict=True):
        ours[last] = theirs[1]
    window = make_window(shape, 2, torch.bfloat16, device="cuda")
    results = []
    for cache, slot in ((small, 1), (large, last)):
        stream = Stream(layer, cache, [slot], [0], [0])
        first = stream.verify(gdn_verify, window, [0])
        stream.accept(0, 2, 2)
        results.append((first, stream.verify(gdn_verify, window, [0]), cache.state[slot]))
    assert_same_bits(results[1], results[0])


def test_conv_equals_float64_and_single_rows(shape: Shape, dtype: torch.dtype) -> None:
    """A prompt in segments, then windows of changing length; single rows have the bits of windows."""
    layer = make_layer(shape, dtype, device="cuda")
    cache = make_cache(shape, 4, 16, dtype, "cuda")
    proj = make_proj(shape, 230, dtype, padding=16, device="cuda")
    expected = conv_float64(layer, proj)
    start = 0
    for length in (128, 64, 1, 2):
        rows = torch.cat((proj[start : start + length], torch.full_like(proj[:5], torch.nan)))
        with poisoned_allocations():
            outputs = conv_prefill(
                rows, *weights_of(layer, cache), slots_of(2), cuda(start), cuda(length), cuda(0), *shape.dims
            )
        exact = (*expected[:3], expected[3].log(), expected[4])
        for output, wanted in zip(outputs, exact, strict=True):
            assert rel_l2(output[:length], wanted[start : start + length]) < 1e-6
            assert torch.equal(output[length:], torch.zeros_like(output[length:]))
        start += length
    single = cache.clone()
    for length in (1, 8, 3, 8, 5, 8):
        rows = proj[start : start + length]
        with poisoned_allocations():
            outputs = spec_conv1d(rows, *weights_of(layer, cache), slots_of(2), cuda(start), *shape.dims)
        for output, wanted in zip(outputs, expected, strict=True):
            assert rel_l2(output, wanted[start : start + length]) < 1e-6
        for token in range(length):
            alone = spec_conv1d(
                rows[token : token + 1],
                *weights_of(layer, single),
                slots_of(2),
                cuda(start + token),
                *shape.dims,
            )
            assert_same_bits(alone, [t[token : token + 1] for t in outputs])
        start += length
    assert_same_bits([single.conv_ring], [cache.conv_ring])
    assert cache.conv_ring[[0, 1, 3]].isnan().all()


def test_conv_rows_do_not_depend_on_batch() -> None:
    shape = SHAPES["27b"]
    layer = make_layer(shape, torch.bfloat16, device="cuda")
    proj = make_proj(shape, 256, torch.bfloat16, device="cuda")
    slots = slots_of(*range(1, 65))
    pos = torch.arange(64, device="cuda") * 5

    def run(first: int, last: int) -> tuple[torch.Tensor, ...]:
        cache = make_cache(shape, 65, 8, torch.bfloat16, "cuda")
        cache.conv_ring.fill_(0.25)
        rows = proj[4 * first : 4 * last]
        return spec_conv1d(rows, *weights_of(layer, cache), slots[first:last], pos[first:last], *shape.dims)

    together = run(0, 64)
    for first, last in ((0, 1), (7, 8), (3, 20), (32, 64)):
        assert_same_bits(run(first, last), [t[4 * first : 4 * last] for t in together])


@pytest.mark.parametrize("lengths", [(1,), (63,), (64, 1), (128, 64, 65), (1024,)], ids=str)
def test_prefill_equals_float64(shape: Shape, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    layer = make_layer(shape, dtype, device="cuda")
    cache = make_cache(shape, 3, 16, dtype, "cuda")
    cache.state[:] = torch.nan
    prompt = make_prompt(layer, sum(lengths), dtype, "cuda")
    q, k, v, g, beta, z = prompt
    out, final = recurrence_float64(q, k, v, g.exp(), beta, torch.zeros_like(cache.state[1]))
    expected = gated_norm_float64(out, z, layer.norm_weight, 1e-6, "silu")
    tolerance = {torch.bfloat16: 6e-3, torch.float32: 2e-5}[dtype]
    start = 0
    for length in lengths:
        padded = [torch.cat((t[start : start + length], torch.zeros_like(t[:3]))) for t in prompt]
        padded[5][length:] = torch.nan
        with poisoned_allocations():
            cursors = slots_of(1), cuda(start), cuda(length), cuda(0)
            y = gdn_prefill(*padded, layer.norm_weight, cache.state, *cursors, 1e-6, "silu")
        assert rel_l2(y[:length], expected[start : start + length]) < tolerance
        assert torch.equal(y[length:], torch.zeros_like(y[length:]))
        start += length
    assert rel_l2(cache.state[1], final) < tolerance
    assert cache.state[[0, 2]].isnan().all()


def test_prefill_bits_do_not_depend_on_padding_or_slot() -> None:
    shape = SHAPES["4b"]
    layer = make_layer(shape, torch.bfloat16, device="cuda")
    prompt = make_prompt(layer, 300, torch.bfloat16, "cuda")
    longer = [torch.cat((t, torch.zeros_like(t[:212]))) for t in prompt]
    results = []
    for inputs, slot in ((prompt, 1), (longer, 2)):
        state = make_cache(shape, 3, 8, device="cuda").state
        state[slot] = 0.1
        cursors = slots_of(slot), cuda(64), cuda(300), cuda(0)
        y = gdn_prefill(*inputs, layer.norm_weight, state, *cursors, 1e-6, "silu")
        results.append((y[:300], state[slot]))
    assert_same_bits(*results)


def test_prefill_repeats_its_bits(shape: Shape, dtype: torch.dtype) -> None:
    """Shared memory that is read or overwritten at the wrong time shows as changing bits."""
    layer = make_layer(shape, dtype, device="cuda")
    prompt = make_prompt(layer, 1000, dtype, "cuda")
    state = make_cache(shape, 2, 8, device="cuda").state
    results = []
    for _ in range(20):
        current = state.clone()
        cursors = slots_of(1), cuda(64), cuda(1000), cuda(0)
        y = gdn_prefill(*prompt, layer.norm_weight, current, *cursors, 1e-6, "silu")
        results.append((y, current))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("name", ["gdn_verify", "gdn_prefill", "spec_conv1d", "conv_prefill"])
def test_registration(name: str) -> None:
    shape = Shape(2, 6, 128, 128)
    layer = make_layer(shape, torch.bfloat16, device="cuda")
    cache = make_cache(shape, 4, 8, torch.bfloat16, "cuda")
    for tensor in cache.tensors:
        tensor.nan_to_num_()
    rings = cache.ring_k, cache.ring_u, cache.ring_g
    window = make_window(shape, 6, torch.bfloat16, device="cuda")
    proj = make_proj(shape, 6, torch.bfloat16, device="cuda")
    index, base, pos = slots_of(3, 1), cuda(4, 9), cuda(5, 9)
    one = slots_of(2), cuda(64), cuda(5), cuda(0)
    norm = 1e-6, "silu"
    arguments: dict[str, tuple[Any, ...]] = {
        "gdn_verify": (*window, layer.norm_weight, cache.state, *rings, index, base, pos, *norm, False, 4),
        "gdn_prefill": (
            *make_prompt(layer, 6, torch.bfloat16, "cuda"),
            layer.norm_weight,
            cache.state,
            *one,
            *norm,
            cuda(0),
        ),
        "spec_conv1d": (proj, *weights_of(layer, cache), index, pos, *shape.dims, None),
        "conv_prefill": (proj, *weights_of(layer, cache), *one, *shape.dims, cuda(4), None),
    }
    operator: Callable[..., Any] = getattr(torch.ops.compiled_mtp, name).default
    check_registration(operator, arguments[name])
