"""spec_conv1d: equal to a plain causal convolution, whatever the windows are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_mtp.ops.spec_conv1d import spec_conv1d
from tests.ops.gdn_cases import (
    Shape,
    conv_float64,
    gates_apart,
    make_cache,
    make_layer,
    make_proj,
    torch_threads,
)
from tests.ops.harness import (
    assert_same_bits,
    check_compiles,
    check_equal,
    check_launch,
    check_registration,
    clone_args,
    rel_l2,
)

SHAPES = (Shape(2, 4, 16, 16), Shape(1, 3, 32, 16), Shape(3, 6, 16, 32))


def arguments(
    shape: Shape, requests: int, query_len: int, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Any, ...]:
    """Return requests whose rings hold real rows, at positions 0, 1, 2, 3 and later; the last request is
    padding."""
    layer, cache = make_layer(shape, dtype), make_cache(shape, requests + 1, 32, dtype)
    proj = make_proj(shape, requests * query_len, dtype, seed, padding=4)
    cache.conv_ring.copy_(torch.randn(cache.conv_ring.shape, generator=torch.Generator().manual_seed(9)))
    slots = torch.arange(requests, 0, -1, dtype=torch.int32)
    slots[-1] = 0
    pos = torch.tensor([(0, 1, 2, 3, 30, 1000)[r % 6] for r in range(requests)])
    pos[-1] = 0
    return proj, layer.conv_weight, layer.a_log, layer.dt_bias, cache.conv_ring, slots, pos, *shape.dims


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_windows_equal_whole_sequence(shape: Shape, dtype: torch.dtype) -> None:
    """Two requests in windows of changing length with rejected tails, against one convolution in float64."""
    layer, cache = make_layer(shape, dtype), make_cache(shape, 4, 32, dtype)
    length = 61
    inputs = [make_proj(shape, length, dtype, seed, padding=8) for seed in (3, 4)]
    slots = torch.tensor([3, 1], dtype=torch.int32)
    rejected = make_proj(shape, 16, dtype, seed=5, padding=8)
    untouched = cache.conv_ring[[0, 2]].clone()
    got: list[list[torch.Tensor]] = [[], [], [], [], []]
    done = 0
    for query_len in (1, 8, 2, 3, 16, 5, 4, 1, 1, 8, 7, 15, 6, 8, 8, 8):
        kept = min(max(1, query_len - 2), length - done)
        rows = [torch.cat((x[done : done + kept], rejected[: query_len - kept])) for x in inputs]
        pos = torch.tensor([done, done])
        outputs = spec_conv1d(
            torch.cat(rows),
            layer.conv_weight,
            layer.a_log,
            layer.dt_bias,
            cache.conv_ring,
            slots,
            pos,
            *shape.dims,
        )
        for total, output in zip(got, outputs, strict=True):
            total.append(output.view(2, query_len, *output.shape[1:])[:, :kept])
        done += kept
        if done == length:
            break
    assert done == length
    for request, x in enumerate(inputs):
        expected = conv_float64(layer, x)
        for total, exact in zip(got, expected, strict=True):
            actual = torch.cat(total, dim=1)[request]
            assert actual.dtype == torch.float32
            assert rel_l2(actual, exact) < 1e-6
    assert_same_bits([cache.conv_ring[[0, 2]]], [untouched])


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [Shape(3, 6, 128, 128), Shape(1, 3, 128, 128)], ids=str)
def test_rows_do_not_depend_on_batch_or_threads(shape: Shape, dtype: torch.dtype, threads: int) -> None:
    whole = arguments(shape, requests=40, query_len=3, dtype=dtype)
    with torch_threads(threads):
        together = spec_conv1d(*whole)
    proj, *weights, ring, slots, pos = whole[:7]
    assert whole[0].shape[0] * shape.channels > 65536
    for request in (0, 3, 5, 38):
        rows = slice(3 * request, 3 * request + 3)
        fresh = arguments(shape, requests=40, query_len=3, dtype=dtype)[4]
        cursors = slots[request : request + 1], pos[request : request + 1]
        with torch_threads(threads):
            alone = spec_conv1d(proj[rows], *weights, fresh, *cursors, *shape.dims)
        assert_same_bits(alone, [t[rows] for t in together], f"request {request}")
        slot = int(slots[request])
        assert_same_bits([fresh[slot]], [ring[slot]])


def test_rows_of_a_window_equal_single_rows() -> None:
    shape = SHAPES[0]
    whole = arguments(shape, requests=1, query_len=16)
    whole[5][0] = 1
    single = arguments(shape, requests=1, query_len=16)
    single[5][0] = 1
    together = spec_conv1d(*whole)
    for token in range(16):
        rows = slice(token, token + 1)
        alone = spec_conv1d(single[0][rows], *single[1:6], single[6] + token, *shape.dims)
        assert_same_bits(alone, [t[rows] for t in together], f"token {token}")
    assert_same_bits([single[4]], [whole[4]])


def test_history_before_position_zero_is_zero_and_never_read() -> None:
    shape = SHAPES[0]
    args = arguments(shape, requests=2, query_len=2)
    args[4].fill_(torch.nan)
    args[6].zero_()
    assert all(torch.isfinite(t).all() for t in spec_conv1d(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("requests, query_len", [(2, 1), (1, 4), (6, 3), (1, 16)])
def test_the_cpu_computes_the_specification(requests: int, query_len: int, dtype: torch.dtype) -> None:
    for shape in (SHAPES[2], Shape(2, 4, 128, 128)):
        args = arguments(shape, requests, query_len, dtype)
        check_equal(spec_conv1d, spec_conv1d.reference, args, rtol=3e-6, atol=1e-6, mutated=(4,))


def test_gates_may_be_a_tensor_of_their_own() -> None:
    shape = SHAPES[0]
    args = arguments(shape, 3, 4, torch.bfloat16)
    num_gates = 2 * shape.dims[1]
    proj, gates = gates_apart(args[0], shape.columns - num_gates, num_gates)
    for call in (spec_conv1d, spec_conv1d.reference):
        wanted, got = call(*clone_args(args)), call(*clone_args((proj, *args[1:], gates)))
        assert_same_bits(got, wanted)
    with pytest.raises(ValueError, match="gates"):
        spec_conv1d(proj, *args[1:], gates[:, 1:])
    with pytest.raises(ValueError, match="columns"):
        spec_conv1d(proj, *args[1:])


def test_registration_and_compilation() -> None:
    shape = SHAPES[1]
    args = arguments(shape, requests=3, query_len=2)
    check_registration(torch.ops.compiled_mtp.spec_conv1d.default, (*args, None))
    check_compiles(spec_conv1d, [args, arguments(shape, requests=2, query_len=4)])


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t[:, :-16], "columns"),
        (0, lambda t: t[:, ::2].contiguous(), "columns"),
        (0, lambda t: t.half(), "dtype"),
        (0, lambda t: t[:5], "same number of rows"),
        (1, lambda t: t[:, :3], "conv_weight"),
        (2, lambda t: t.bfloat16(), "a_log"),
        (4, lambda t: t[:, :4], "conv_ring"),
        (4, lambda t: t.bfloat16(), "conv_ring"),
        (8, lambda n: n + 1, "conv_weight must have shape"),
    ],
)
def test_rejects(index: int, change: Callable[[Any], Any], message: str) -> None:
    args = list(arguments(SHAPES[0], requests=2, query_len=4))
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        spec_conv1d(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_in_interpreter(interpreter: None, dtype: torch.dtype) -> None:
    """Unequal head dims, a head count that is no power of two, positions 0 to 2, a padding request."""
    widest = arguments(Shape(1, 3, 32, 16), requests=1, query_len=16, dtype=dtype)
    check_launch(spec_conv1d, widest, rtol=2e-6, atol=2e-6, mutated=(4,))
    args = arguments(Shape(1, 3, 32, 16), requests=4, query_len=2, dtype=dtype)
    check_launch(spec_conv1d, args, rtol=2e-6, atol=2e-6, mutated=(4,))
    proj, gates = gates_apart(args[0], args[0].shape[1] - 4 - 6, 6)
    apart = (proj, *args[1:], gates)
    check_launch(spec_conv1d, apart, rtol=2e-6, atol=2e-6, mutated=(4,))
    assert_same_bits(spec_conv1d.launch(*clone_args(apart)), spec_conv1d.launch(*clone_args(args)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query_len", [2, 4, 8])
def test_programs_of_a_window_have_the_bits_of_those_of_a_row(
    interpreter: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, query_len: int
) -> None:
    """The bits include minus zero, before position 0 and after it."""
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from compiled_mtp.ops.spec_conv1d import kernel

    args = arguments(Shape(1, 3, 32, 16), requests=6, query_len=query_len, dtype=dtype)
    args[0][::3] = -0.0
    args[4][::2] = -0.0
    ways = []
    for least_rows in (1, 1000):
        monkeypatch.setattr(kernel, "LEAST_ROWS_OF_WINDOWS", least_rows)
        own = clone_args(args)
        ways.append([*spec_conv1d.launch(*own), own[4]])
    assert_same_bits(*ways)
