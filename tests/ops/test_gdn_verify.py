"""gdn_verify: equal to the recurrence, and W tokens at once equal to W calls of one token, bit for bit."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.gdn_commit import gdn_commit
from compiled_mtp.ops.gdn_verify import gdn_verify
from tests.ops.gdn_cases import (
    Shape,
    Stream,
    check_windows_equal_single_steps,
    gated_norm_float64,
    make_cache,
    make_layer,
    make_window,
    recurrence_float64,
    relative_error,
    select_rows,
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
        assert relative_error(y[rows], expected) < 1e-6
        stream.accept(request, 4, 4)
        assert relative_error(stream.folded(gdn_commit)[request], final) < 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_windows_equal_single_steps(shape: Shape) -> None:
    check_windows_equal_single_steps(gdn_verify, gdn_commit, shape, rounds=10)


def test_windows_equal_single_steps_bfloat16_gate() -> None:
    check_windows_equal_single_steps(gdn_verify, gdn_commit, SHAPES[0], rounds=5, dtype=torch.bfloat16)


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

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = run([[0, 1, 2, 3, 4, 5, 6, 7]])
        apart = run([[3], [0, 1], [7, 2, 5], [4], [6]])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together[0], apart[0])
    assert torch.equal(together[1], apart[1])


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


def test_opcheck() -> None:
    shape = SHAPES[0]
    layer, cache = make_layer(shape), make_cache(shape, slots=3, ring=8)
    for tensor in (cache.ring_k, cache.ring_u, cache.ring_g):
        tensor.fill_(0.5)
    index, pos = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([3, 5])
    arguments = (
        *make_window(shape, rows=4), layer.norm_weight, cache.state, cache.ring_k, cache.ring_u, cache.ring_g,
        index, pos - 1, pos, 1e-6, "silu",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.compiled_mtp.gdn_verify.default, arguments)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ring_k", lambda t: t[:, :, :2], "ring"),
        ("state", lambda t: t.transpose(2, 3), "contiguous"),
        ("state", lambda t: t.bfloat16(), "dtype"),
        ("exp_g", lambda t: t[:, :2], "exp_g"),
        ("z", lambda t: t[:, ::2], "z"),
        ("gate_activation", lambda _: "tanh", "silu"),
        ("v", lambda t: t[:7], "same number of rows"),
    ],
)
def test_rejects(name: str, change: object, message: str) -> None:
    shape = Shape(2, 4, 16, 16)
    layer, cache = make_layer(shape), make_cache(shape, slots=3, ring=8)
    q, k, v, exp_g, beta, z = make_window(shape, rows=8)
    pos = torch.tensor([3, 5])
    arguments = {
        "q": q, "k": k, "v": v, "exp_g": exp_g, "beta": beta, "z": z, "norm_weight": layer.norm_weight,
        "state": cache.state, "ring_k": cache.ring_k, "ring_u": cache.ring_u, "ring_g": cache.ring_g,
        "state_index": torch.tensor([2, 1], dtype=torch.int32), "base": pos, "pos": pos, "eps": 1e-6,
        "gate_activation": "silu",
    }  # fmt: skip
    assert callable(change)
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        gdn_verify(**arguments)
