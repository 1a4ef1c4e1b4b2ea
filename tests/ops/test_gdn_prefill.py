"""gdn_prefill: equal to the recurrence, segment by segment, and to the functions of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_mtp.ops.gdn_prefill import gdn_prefill
from compiled_mtp.ops.gdn_verify import gdn_verify
from tests.ops.gdn_cases import (
    Shape,
    Stream,
    gated_norm_float64,
    make_cache,
    make_layer,
    make_prompt,
    make_window,
    recurrence_float64,
    select_rows,
)
from tests.ops.harness import (
    assert_same_bits,
    check_compiles,
    check_equal,
    check_registration,
    poisoned_allocations,
    rel_l2,
)

SHAPES = (Shape(2, 4, 16, 16), Shape(1, 3, 32, 16), Shape(2, 6, 16, 32))
EPS = 1e-6


def run(
    prompt: tuple[torch.Tensor, ...],
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    slot: int,
    start: int,
    length: int,
) -> torch.Tensor:
    index = torch.tensor([slot], dtype=torch.int32)
    cursors = (torch.tensor([start]), torch.tensor([length]), torch.tensor([0]))
    return gdn_prefill(*prompt, norm_weight, state, index, *cursors, EPS, "silu")


@pytest.mark.parametrize("start, length", [(0, 70), (5, 64), (9, 1)])
def test_the_cpu_computes_the_specification(start: int, length: int) -> None:
    layer, cache = make_layer(SHAPES[0]), make_cache(SHAPES[0], 3, 16)
    index = torch.tensor([2], dtype=torch.int32)
    cursors = (index, torch.tensor([start]), torch.tensor([length]), torch.tensor([0]))
    args = (*make_prompt(layer, 70), layer.norm_weight, cache.state, *cursors, EPS, "silu")
    check_equal(gdn_prefill, gdn_prefill.reference, args, rtol=2e-5, atol=2e-5, mutated=(7,))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", [(1,), (2,), (63,), (64,), (65,), (150,), (128, 64, 37)], ids=str)
def test_segments_equal_float64_recurrence(shape: Shape, lengths: tuple[int, ...]) -> None:
    """Padding rows hold NaN in z and zeros in the other inputs, as conv_prefill leaves them."""
    layer, cache = make_layer(shape), make_cache(shape, 3, 16)
    cache.state[:] = torch.nan
    total = sum(lengths)
    prompt = make_prompt(layer, total)
    q, k, v, g, beta, z = prompt
    out, final = recurrence_float64(q, k, v, g.exp(), beta, torch.zeros_like(cache.state[1]))
    expected = gated_norm_float64(out, z, layer.norm_weight, EPS, "silu")
    start = 0
    for length in lengths:
        padded = [torch.cat((t[start : start + length], torch.zeros_like(t[:1]))) for t in prompt]
        padded[5][length:] = torch.nan
        y = run(tuple(padded), layer.norm_weight, cache.state, 1, start, length)
        assert rel_l2(y[:length], expected[start : start + length]) < 2e-6
        assert torch.equal(y[length:], torch.zeros_like(y[length:]))
        start += length
    assert rel_l2(cache.state[1], final) < 2e-6
    assert cache.state[[0, 2]].isnan().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_transformers(shape: Shape) -> None:
    """Compare with both functions of transformers, on inputs before the l2norm, with an initial state."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    layer, cache = make_layer(shape), make_cache(shape, 3, 16)
    group = shape.num_v_heads // shape.num_k_heads
    q, k, v, g, beta, z = make_prompt(layer, 100)
    # transformers scales q itself and stores the state as [nv, dk, dv].
    heads = [(t * s).repeat_interleave(group, dim=1)[None] for t, s in ((q, shape.head_k_dim**0.5), (k, 1.0))]
    arguments = (*heads, v[None], g[None], beta[None])
    initial = cache.state[1].transpose(1, 2)[None].contiguous()
    y = run((q, k, v, g, beta, z), layer.norm_weight, cache.state, 1, 64, 100)
    for function in (modeling.torch_chunk_gated_delta_rule, modeling.torch_recurrent_gated_delta_rule):
        out, final = function(*arguments, initial_state=initial, output_final_state=True)
        expected = gated_norm_float64(out[0], z, layer.norm_weight, EPS, "silu")
        assert rel_l2(y, expected) < 5e-6
        assert rel_l2(cache.state[1], final[0].transpose(1, 2)) < 5e-6


def test_verify_continues_from_it() -> None:
    shape = SHAPES[1]
    layer, cache = make_layer(shape), make_cache(shape, 3, 16)
    prompt = make_prompt(layer, 90)
    run(prompt, layer.norm_weight, cache.state, 2, 0, 90)
    q, k, v, g, beta, _ = prompt
    _, state = recurrence_float64(q, k, v, g.exp(), beta, torch.zeros_like(cache.state[2]))
    stream = Stream(layer, cache, [2], [90], [90])
    for round_number in range(3):
        window = make_window(shape, 4, seed=20 + round_number)
        y = stream.verify(gdn_verify, window, [0])
        q, k, v, exp_g, beta, z = select_rows(window, [0, 1, 2])
        out, state = recurrence_float64(q, k, v, exp_g, beta, state)
        assert rel_l2(y[:3], gated_norm_float64(out, z, layer.norm_weight, EPS, "silu")) < 2e-6
        stream.accept(0, 3, 4)
    assert rel_l2(stream.folded(gdn_verify)[0], state) < 2e-6


def test_bits_depend_on_start_and_length_alone() -> None:
    """A prompt's numbers depend on the prompt alone: more padding rows or another slot change no bit."""
    shape = SHAPES[0]
    layer = make_layer(shape)
    prompt = make_prompt(layer, 150)
    longer = tuple(torch.cat((t, torch.zeros_like(t[:120]))) for t in prompt)
    a, b = make_cache(shape, 3, 16), make_cache(shape, 3, 16)
    b.state[2] = a.state[1]
    assert_same_bits(
        [run(prompt, layer.norm_weight, a.state, 1, 64, 150)],
        [run(longer, layer.norm_weight, b.state, 2, 64, 150)[:150]],
    )
    assert_same_bits([a.state[1]], [b.state[2]])


def test_strong_decay_stays_finite() -> None:
    shape = SHAPES[0]
    layer, cache = make_layer(shape), make_cache(shape, 2, 16)
    q, k, v, g, beta, z = make_prompt(layer, 130)
    g = g - 40.0
    y = run((q, k, v, g, beta, z), layer.norm_weight, cache.state, 1, 0, 130)
    out, _ = recurrence_float64(q, k, v, g.exp(), beta, torch.zeros_like(cache.state[1]))
    assert rel_l2(y, gated_norm_float64(out, z, layer.norm_weight, EPS, "silu")) < 1e-5


def arguments(length: int, rows: int) -> tuple[Any, ...]:
    layer, cache = make_layer(SHAPES[0]), make_cache(SHAPES[0], 2, 16)
    index = torch.tensor([1], dtype=torch.int32)
    cursors = (torch.tensor([64]), torch.tensor([length]), torch.tensor([0]))
    return *make_prompt(layer, rows), layer.norm_weight, cache.state, index, *cursors, EPS, "silu"


def test_registration_and_compilation() -> None:
    given = (*arguments(65, 70), torch.tensor([64]))
    check_registration(torch.ops.compiled_mtp.gdn_prefill.default, given)
    check_compiles(gdn_prefill, [given, (*arguments(10, 10), torch.tensor([0]))])


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t[:5], "k must have shape"),
        (3, lambda t: t[:, :2], "g"),
        (5, lambda t: t[:, :8], "z"),
        (7, lambda t: t.bfloat16(), "state"),
        (9, lambda t: t.repeat(2), "start"),
        (11, lambda t: t[:0], "first_row"),
        (13, lambda _: "swish", "silu"),
    ],
)
def test_rejects(index: int, change: Callable[[Any], Any], message: str) -> None:
    args = list(arguments(10, 12))
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        gdn_prefill(*args)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "lengths"),
    [(torch.float32, 2e-5, (64, 37)), (torch.bfloat16, 5e-3, (101,)), (torch.bfloat16, 5e-3, (1,))],
    ids=str,
)
def test_kernels_in_interpreter(
    interpreter: None, dtype: torch.dtype, tolerance: float, lengths: tuple[int, ...]
) -> None:
    """Compare with float64; the kernels multiply in bfloat16, and split float32 activations in two parts."""
    shape = Shape(1, 2, 32, 16)
    layer, cache = make_layer(shape), make_cache(shape, 2, 16)
    cache.state[1] = torch.nan
    total = sum(lengths)
    *inputs, z = make_prompt(layer, total)
    z = z.to(dtype)
    q, k, v, g, beta = inputs
    out, final = recurrence_float64(q, k, v, g.exp(), beta, torch.zeros_like(cache.state[1]))
    expected = gated_norm_float64(out, z, layer.norm_weight, EPS, "silu")
    index = torch.tensor([1], dtype=torch.int32)
    start = 0
    for length in lengths:
        segment = [torch.cat((t[start : start + length], torch.zeros_like(t[:1]))) for t in (*inputs, z)]
        segment[5][length:] = torch.nan
        cursors = torch.tensor([start]), torch.tensor([length]), torch.tensor([0])
        with poisoned_allocations():
            y = gdn_prefill.launch(*segment, layer.norm_weight, cache.state, index, *cursors, EPS, "silu")
        assert rel_l2(y[:length], expected[start : start + length]) < tolerance
        assert torch.equal(y[length:], torch.zeros_like(y[length:]))
        start += length
    assert rel_l2(cache.state[1], final) < tolerance
