"""gdn_commit: the same bits as the fold inside gdn_verify, one record at a time or all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_mtp.ops.gdn_commit import gdn_commit
from compiled_mtp.ops.gdn_verify import gdn_verify
from tests.ops.gdn_cases import Cache, Shape, Stream, make_cache, make_layer, make_window, recurrence_float64
from tests.ops.harness import assert_same_bits, check_compiles, check_launch, check_registration, rel_l2

SHAPE = Shape(2, 6, 16, 32)


def recorded(first: list[int], query_len: int = 5) -> tuple[Cache, torch.Tensor]:
    """Caches whose rings hold the records of one window from the positions `first` on, in slots 1.. ."""
    layer, cache = make_layer(SHAPE), make_cache(SHAPE, len(first) + 2, 16)
    slots = list(range(1, len(first) + 1))
    stream = Stream(layer, cache, slots, list(first), list(first))
    stream.verify(gdn_verify, make_window(SHAPE, len(first) * query_len), list(range(len(first))))
    return cache, torch.tensor(slots, dtype=torch.int32)


def commit(cache: Cache, index: torch.Tensor, base: torch.Tensor, target: torch.Tensor) -> None:
    gdn_commit(cache.state, cache.ring_k, cache.ring_u, cache.ring_g, index, base, target)


def test_equals_float64_recurrence() -> None:
    cache, index = recorded([14])
    start = cache.state[1].clone()
    q, k, v, exp_g, beta, _ = make_window(SHAPE, 5)
    commit(cache, index, torch.tensor([14]), torch.tensor([18]))
    _, exact = recurrence_float64(q[:4], k[:4], v[:4], exp_g[:4], beta[:4], start)
    assert rel_l2(cache.state[1], exact) < 1e-6


def test_any_split_and_the_fold_of_verify_give_the_same_bits() -> None:
    first = [0, 14, 200]
    count = torch.tensor([5, 0, 3])
    base = torch.tensor(first)
    cache, index = recorded(first)
    at_once, by_one, by_verify = cache.clone(), cache.clone(), cache.clone()
    commit(at_once, index, base, base + count)
    for step in range(5):
        commit(by_one, index, base + count.clamp(max=step), base + count.clamp(max=step + 1))
    gdn_verify(
        *make_window(SHAPE, 3, seed=8), make_layer(SHAPE).norm_weight,
        by_verify.state, by_verify.ring_k, by_verify.ring_u, by_verify.ring_g,
        index, base, base + count, 1e-6, "silu",
    )  # fmt: skip
    assert_same_bits([by_one.state], [at_once.state])
    assert_same_bits([by_verify.state], [at_once.state])
    assert_same_bits([at_once.state[[0, 2, 4]]], [cache.state[[0, 2, 4]]])
    assert not torch.equal(at_once.state[1], cache.state[1])
    assert_same_bits(
        [at_once.ring_k, at_once.ring_u, at_once.ring_g], [cache.ring_k, cache.ring_u, cache.ring_g]
    )


def arguments(first: list[int]) -> tuple[Any, ...]:
    cache, index = recorded(first)
    base = torch.tensor(first)
    for ring in (cache.ring_k, cache.ring_u, cache.ring_g):
        ring.nan_to_num_()
    return cache.state, cache.ring_k, cache.ring_u, cache.ring_g, index, base, base + 2


def test_registration_and_compilation() -> None:
    check_registration(torch.ops.compiled_mtp.gdn_commit.default, arguments([3, 20]))
    check_compiles(gdn_commit, [arguments([3, 20]), arguments([7])])


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t[0], "state"),
        (1, lambda t: t[:, :, :, :4], "ring_k"),
        (2, lambda t: t[:, :, :4], "ring_u"),
        (3, lambda t: t.double(), "ring_g"),
        (0, lambda t: t.transpose(2, 3).contiguous().transpose(2, 3), "contiguous"),
        (6, lambda t: t[:1], "target"),
    ],
)
def test_rejects(index: int, change: Callable[[Any], Any], message: str) -> None:
    args = list(arguments([3, 20]))
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        gdn_commit(*args)


def test_kernel_in_interpreter(interpreter: None) -> None:
    from compiled_mtp.ops.gdn_commit import reference
    from compiled_mtp.ops.gdn_commit.kernel import launch

    check_launch(launch, reference.gdn_commit, arguments([3, 20]), rtol=2e-6, atol=2e-6, mutated=(0,))
