"""gdn_verify: equal to the recurrence, and W tokens at once equal to W calls of one token, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_mtp.ops.gdn_verify import gdn_verify
from tests.ops.gdn_cases import (
    Shape,
    Stream,
    check_unfolded_states,
    check_windows_equal_single_steps,
    gated_norm_float64,
    make_cache,
    make_layer,
    make_window,
    recurrence_float64,
    select_rows,
    torch_threads,
)
from tests.ops.harness import (
    assert_same_bits,
    check_compiles,
    check_equal,
    check_launch,
    check_registration,
    rel_l2,
)

SHAPES = (Shape(2, 4, 16, 16), Shape(1, 3, 32, 32), Shape(2, 6, 32, 16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gate_activation", ["silu", "sigmoid"])
def test_equals_float64_recurrence(shape: Shape, gate_activation: str) -> None:
    layer, cache = make_layer(shape), make_cache(shape, slots=3, ring=8)
    start = cache.state.clone()
    stream = Stream(layer, cache, [2, 1], [5, 1000], [5, 1000], gate_activation)
    window = make_window(shape, rows=8, seed=3)
    y = stream.verify(gdn_verify, window, [0, 1])
    assert torch.equal(cache.state, start)
    for request, slot in enumerate(stream.slots):
        rows = list(range(4 * request, 4 * request + 4))
        q, k, v, exp_g, beta, z = select_rows(window, rows)
        out, final = recurrence_float64(q, k, v, exp_g, beta, start[slot])
        expected = gated_norm_float64(out, z, layer.norm_weight, stream.eps, gate_activation)
        assert rel_l2(y[rows], expected) < 1e-6
        stream.accept(request, 4, 4)
        assert rel_l2(stream.folded(gdn_verify)[request], final) < 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_windows_equal_single_steps(shape: Shape) -> None:
    check_windows_equal_single_steps(gdn_verify, shape, rounds=10)


def test_windows_equal_single_steps_bfloat16_gate() -> None:
    check_windows_equal_single_steps(gdn_verify, SHAPES[0], rounds=5, dtype=torch.bfloat16)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [Shape(1, 3, 128, 128), Shape(3, 6, 128, 128)], ids=str)
def test_rows_do_not_depend_on_batch_or_threads(shape: Shape, threads: int) -> None:
    layer = make_layer(shape)
    requests, query_len = 8, 3
    window = make_window(shape, requests * query_len)
    slots = list(range(1, requests + 1))

    def run(groups: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        stream = Stream(layer, make_cache(shape, 10, 8), slots, [0] * 8, [0] * 8)
        outputs = {}
        for _ in range(2):
            for group in groups:
                rows = [r * query_len + t for r in group for t in range(query_len)]
                y = stream.verify(gdn_verify, select_rows(window, rows), group)
                for place, r in enumerate(group):
                    outputs[r] = y[place * query_len : (place + 1) * query_len]
            for r in slots:
                stream.accept(r - 1, 1 + r % 3, query_len)
        return torch.cat([outputs[r] for r in range(requests)]), stream.cache.state

    with torch_threads(threads):
        together = run([[0, 1, 2, 3, 4, 5, 6, 7]])
        apart = run([[3], [0, 1], [7, 2, 5], [4], [6]])
    assert_same_bits(apart, together)


def test_padding_requests_share_slot_zero_and_stay_finite() -> None:
    shape = SHAPES[0]
    layer, cache = make_layer(shape), make_cache(shape, slots=3, ring=8)
    alone_cache = cache.clone()
    window = make_window(shape, rows=4)
    stream = Stream(layer, cache, [0, 2, 0, 0], [0, 9, 0, 0], [0, 9, 0, 0])
    y = stream.verify(gdn_verify, window, [0, 1, 2, 3])
    assert torch.isfinite(y).all()
    alone = Stream(layer, alone_cache, [2], [9], [9]).verify(gdn_verify, select_rows(window, [1]), [0])
    assert torch.equal(y[1], alone[0])
    assert torch.equal(cache.state, alone_cache.state)


def arguments(requests: int, query_len: int) -> tuple[Any, ...]:
    """Return arguments with one ring entry to fold; the rings hold no NaN, which opcheck cannot compare."""
    shape = SHAPES[0]
    layer, cache = make_layer(shape), make_cache(shape, slots=4, ring=8)
    for tensor in (cache.ring_k, cache.ring_u, cache.ring_g):
        tensor.fill_(0.5)
    index, pos = torch.tensor([2, 1, 3][:requests], dtype=torch.int32), torch.tensor([3, 5, 19][:requests])
    return (
        *make_window(shape, rows=requests * query_len), layer.norm_weight,
        cache.state, cache.ring_k, cache.ring_u, cache.ring_g, index, pos - 1, pos, 1e-6, "silu",
    )  # fmt: skip


def test_rejects_unequal_windows() -> None:
    args = arguments(2, 2)
    with pytest.raises(ValueError, match="v must have the same number of rows for each request"):
        gdn_verify(*(tensor[:3] for tensor in args[:6]), *args[6:])


@pytest.mark.parametrize("requests, query_len", [(1, 1), (1, 3), (3, 4)])
def test_the_cpu_computes_the_specification(requests: int, query_len: int) -> None:
    args = arguments(requests, query_len)
    check_equal(gdn_verify, gdn_verify.reference, args, rtol=3e-6, atol=3e-6, mutated=(7, 8, 9, 10))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unfolded_states_change_no_bit(shape: Shape) -> None:
    check_unfolded_states(gdn_verify, shape, rounds=14)


@pytest.mark.parametrize("max_unfolded", [0, 3, 4])
def test_the_cpu_leaves_the_same_states_unfolded(max_unfolded: int) -> None:
    """Entries and window are 2, 3 and 5 tokens together: some states are stored and some are not."""
    args = list(arguments(3, 1))
    args[12] = args[13] - torch.tensor([1, 2, 4])
    last = (*args, False, max_unfolded)
    check_equal(gdn_verify, gdn_verify.reference, last, rtol=3e-6, atol=3e-6, mutated=(7, 8, 9, 10))
    before, state = arguments(3, 1)[7], args[7]
    index = args[11].long()
    gdn_verify(*last)
    is_stored = [not torch.equal(state[slot], before[slot]) for slot in index]
    assert is_stored == [max_unfolded < 2, max_unfolded < 3, True]


def test_rejects_more_unfolded_entries_than_half_of_the_ring() -> None:
    with pytest.raises(ValueError, match="max_unfolded must be 0 to 4, half of the ring, got 5"):
        gdn_verify(*arguments(2, 2), max_unfolded=5)


def test_registration_and_compilation() -> None:
    check_registration(torch.ops.compiled_mtp.gdn_verify.default, (*arguments(2, 2), False, 0))
    check_compiles(gdn_verify, [arguments(2, 2), arguments(3, 4)])


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (8, lambda t: t[:, :, :1], "ring"),
        (7, lambda t: t.transpose(2, 3), "contiguous"),
        (7, lambda t: t.bfloat16(), "dtype"),
        (3, lambda t: t[:, :2], "exp_g"),
        (5, lambda t: t[:, ::2], "z"),
        (15, lambda _: "tanh", "silu"),
        (2, lambda t: t[:3], "v must have shape"),
    ],
)
def test_rejects(index: int, change: Callable[[Any], Any], message: str) -> None:
    args = list(arguments(2, 2))
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        gdn_verify(*args)


def test_kernel_in_interpreter(interpreter: None) -> None:
    check_launch(gdn_verify, arguments(3, 4), rtol=3e-6, atol=3e-6, mutated=(7, 8, 9, 10))


def test_unfolded_states_in_interpreter(interpreter: None) -> None:
    check_unfolded_states(gdn_verify.launch, Shape(1, 2, 16, 16), rounds=4)


def test_kernel_windows_equal_single_steps_in_interpreter(interpreter: None) -> None:
    """Three value heads per key head, dk unlike dv, random acceptance, NaN where nothing may be read."""
    check_windows_equal_single_steps(gdn_verify.launch, Shape(1, 3, 32, 8 * 2), rounds=3)


def test_kernel_rejects_head_dims_it_cannot_tile(interpreter: None) -> None:
    shape = Shape(1, 1, 24, 16)
    layer, cache = make_layer(shape), make_cache(shape, slots=2, ring=8)
    stream = Stream(layer, cache, [1], [0], [0])
    with pytest.raises(ValueError, match="head_k_dim"):
        stream.verify(gdn_verify.launch, make_window(shape, 1), [0])
