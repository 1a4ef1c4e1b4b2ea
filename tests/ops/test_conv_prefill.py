"""conv_prefill: segments equal the whole prompt, and decoding continues from the ring that they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_mtp.ops.spec_conv1d import conv_prefill, spec_conv1d
from tests.ops.gdn_cases import Shape, conv_float64, gates_apart, make_cache, make_layer, make_proj
from tests.ops.harness import (
    assert_same_bits,
    check_compiles,
    check_launch,
    check_registration,
    clone_args,
    rel_l2,
)

SHAPES = (Shape(2, 4, 16, 16), Shape(1, 3, 32, 16))


def segment(
    shape: Shape, rows: int, start: int, length: int, dtype: torch.dtype = torch.float32, slot: int = 2
) -> tuple[Any, ...]:
    layer, cache = make_layer(shape, dtype), make_cache(shape, 4, 8, dtype)
    return (
        make_proj(shape, rows, dtype, seed=start + 1), layer.conv_weight, layer.a_log, layer.dt_bias,
        cache.conv_ring, torch.tensor([slot], dtype=torch.int32), torch.tensor([start]),
        torch.tensor([length]), torch.tensor([0]), *shape.dims,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", [(150,), (64, 1, 1, 2, 64, 3), (1, 2, 1), (2,), (1,)], ids=str)
def test_segments_equal_whole_sequence(shape: Shape, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    layer, cache = make_layer(shape, dtype), make_cache(shape, 4, 8, dtype)
    total = sum(lengths)
    proj = make_proj(shape, total + 5, dtype, padding=8)
    slot = torch.tensor([2], dtype=torch.int32)
    weights = (layer.conv_weight, layer.a_log, layer.dt_bias, cache.conv_ring, slot)
    got: list[list[torch.Tensor]] = [[], [], [], [], []]
    start = 0
    for length in lengths:
        padded = torch.cat((proj[start : start + length], torch.full_like(proj[:6], torch.nan)))
        cursors = (torch.tensor([start]), torch.tensor([length]), torch.tensor([0]))
        outputs = conv_prefill(padded, *weights, *cursors, *shape.dims)
        for parts, output in zip(got, outputs, strict=True):
            assert torch.equal(output[length:], torch.zeros_like(output[length:]))
            parts.append(output[:length])
        start += length
    q, k, v, exp_g, beta = conv_float64(layer, proj)
    for parts, exact in zip(got, (q, k, v, exp_g.log(), beta), strict=True):
        assert rel_l2(torch.cat(parts), exact[:total]) < 1e-6
    # Decoding continues from the ring that the last segments left.
    outputs = spec_conv1d(proj[total:], *weights, torch.tensor([total]), *shape.dims)
    for output, exact in zip(outputs, (q, k, v, exp_g, beta), strict=True):
        assert rel_l2(output, exact[total:]) < 1e-6
    others = [0, 1, 3]
    assert cache.conv_ring[others].isnan().all()


def test_registration_and_compilation() -> None:
    given = (*segment(SHAPES[0], 8, 0, 6), torch.tensor([4]))
    check_registration(torch.ops.compiled_mtp.conv_prefill.default, (*given, None))
    check_compiles(conv_prefill, [given, (*segment(SHAPES[0], 5, 0, 5), torch.tensor([0]))])


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (6, lambda t: t.repeat(2), "start"),
        (8, lambda t: t.repeat(2), "first_row"),
        (7, lambda t: t[:0], "length"),
        (4, lambda t: t[:, :2], "conv_ring"),
        (3, lambda t: t[:1], "dt_bias"),
    ],
)
def test_rejects(index: int, change: Callable[[Any], Any], message: str) -> None:
    args = list(segment(SHAPES[0], 8, 0, 6))
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        conv_prefill(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "length"), [(0, 18), (64, 1), (1, 2), (0, 2)])
def test_kernel_in_interpreter(interpreter: None, dtype: torch.dtype, start: int, length: int) -> None:
    """The ring's valid rows are those before `start`; a long segment overwrites rows that it reads."""
    args = segment(Shape(1, 3, 32, 16), 20, start, length, dtype)
    for position in range(max(start - 3, 0), start):
        args[4][2, position % 8] = 0.01 * position + 0.5
    check_launch(conv_prefill, args, rtol=2e-6, atol=2e-6, mutated=(4,))
    proj, gates = gates_apart(args[0], Shape(1, 3, 32, 16).columns - 6, 6)
    apart = (proj, *args[1:], None, gates)
    check_launch(conv_prefill, apart, rtol=2e-6, atol=2e-6, mutated=(4,))
    assert_same_bits(conv_prefill.launch(*clone_args(apart)), conv_prefill.launch(*clone_args(args)))
