"""The slices of the tower: none costs more than a busy chunk if a part does not, and all are alike."""

from __future__ import annotations

import pytest

from compiled_mtp.scheduler.limits import TowerCost

BUSY_CHUNK = 512


def cost_of(depth: int, size: int, inner: int, weights: float) -> TowerCost:
    """The cost of a tower beside a model of so many weights."""
    per_patch = 4 * size**2 + 2 * size * inner
    return TowerCost(depth, 4, 4096, per_patch, 4 * size, int(BUSY_CHUNK * weights))


SHAPES = {
    "27b": cost_of(27, 1152, 4304, 26e9),
    "4b": cost_of(24, 1024, 4096, 3.5e9),
    "0.8b": cost_of(12, 768, 3072, 0.75e9),
}


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("num_tokens", [1, 64, 300, 1024, 1025, 1280, 8160, 16384])
def test_no_slice_is_longer_than_a_busy_chunk(shape: str, num_tokens: int) -> None:
    cost = SHAPES[shape]
    patches, count, size = num_tokens * 4, cost.count_parts(num_tokens), cost.slice_parts(num_tokens)
    assert count == cost.depth * -(-patches // 4096)
    part = patches * (cost.per_patch + patches * cost.per_pair) * cost.depth / count
    assert part * size <= cost.most or size == 1
    # The first slices are as long as the last, to a part or two.
    slices = cost.count_slices(num_tokens)
    assert size * (slices - 1) < count <= size * slices
    assert size - count / slices < 1


def test_slices_of_released_shapes() -> None:
    of_4k = {shape: (cost.count_slices(8160), cost.slice_parts(8160)) for shape, cost in SHAPES.items()}
    # A layer has eight parts; one of the small model's takes a busy chunk and a seventh.
    assert of_4k == {"27b": (12, 18), "4b": (64, 3), "0.8b": (96, 1)}
    of_default = {shape: (cost.count_slices(1024), cost.slice_parts(1024)) for shape, cost in SHAPES.items()}
    assert of_default == {"27b": (1, 27), "4b": (2, 12), "0.8b": (3, 4)}
