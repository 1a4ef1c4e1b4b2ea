"""moe_router: choice, order, weights, invariance and registration."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.moe_router import moe_router, recorded_router
from tests.ops.harness import check_compiles, check_launch, check_registration, poisoned_allocations


@pytest.mark.parametrize(
    "experts, top_k, renormalize", [(8, 2, True), (256, 8, True), (512, 10, False), (3, 3, True)]
)
def test_weights_match_float64(experts: int, top_k: int, renormalize: bool) -> None:
    logits = torch.randn(17, experts + 1, generator=torch.Generator().manual_seed(0)) * 4
    weights, ids = moe_router(logits, top_k, renormalize)
    probability = torch.softmax(logits[:, :-1].double(), -1)
    expected, expected_ids = probability.topk(top_k)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(ids[:, :top_k].long(), expected_ids)
    assert torch.equal(ids[:, top_k], torch.full((17,), experts, dtype=torch.int32))
    torch.testing.assert_close(weights[:, :top_k].double(), expected, rtol=1e-6, atol=1e-9)
    gate = torch.sigmoid(logits[:, -1].double())
    torch.testing.assert_close(weights[:, top_k].double(), gate, rtol=1e-6, atol=0)


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 0.0]])
    _, ids = moe_router(logits, 4, True)
    assert ids.tolist() == [[1, 2, 4, 0, 5]]


def test_nan_logits_give_valid_distinct_ids() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    logits[1] = float("nan")
    logits[2, 5] = float("nan")
    weights, ids = moe_router(logits, 3, True)
    assert all(len(set(row)) == 4 and max(row) == 8 and min(row) >= 0 for row in ids.tolist())
    assert weights[0].isfinite().all()
    assert weights[1, :3].isnan().all()
    assert 5 not in ids[2].tolist()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_rows_do_not_depend_on_other_rows(threads: int) -> None:
    logits = torch.randn(65, 257, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = moe_router(logits, 8, True)
        for rows in (1, 2, 3, 7):
            alone = [moe_router(part, 8, True) for part in logits.split(rows)]
            assert torch.equal(torch.cat([a[0] for a in alone]), together[0])
            assert torch.equal(torch.cat([a[1] for a in alone]), together[1])
    finally:
        torch.set_num_threads(before)


def test_registration_and_compile() -> None:
    cases = [(torch.randn(rows, 9), 2, True) for rows in (1, 5)]
    check_registration(torch.ops.compiled_mtp.moe_router.default, cases[1])
    check_compiles(moe_router, cases)


@pytest.mark.parametrize(
    "logits, top_k, message",
    [
        (torch.zeros(9), 2, "logits must have shape"),
        (torch.zeros(2, 9, dtype=torch.bfloat16), 2, "logits must have dtype"),
        (torch.zeros(9, 2).t(), 2, "logits must have a last dimension of stride 1"),
        (torch.zeros(2, 9), 9, "top_k must be in 1..8, got 9"),
        (torch.zeros(2, 9), 0, "top_k must be in 1..8, got 0"),
    ],
)
def test_errors(logits: torch.Tensor, top_k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_router(logits, top_k, True)


@pytest.mark.filterwarnings("ignore:.*(invalid value|All-NaN):RuntimeWarning")
@pytest.mark.parametrize("experts, top_k, renormalize", [(8, 2, True), (50, 5, False), (512, 10, True)])
def test_kernel_in_interpreter(interpreter: None, experts: int, top_k: int, renormalize: bool) -> None:
    wide = torch.randn(6, experts + 4) * 3
    logits = wide[:, : experts + 1]
    logits[1] = logits[1].round()
    logits[2, 1] = logits[2, 4] = 0.0
    logits[2, 1] *= -1.0
    logits[4, 1] = float("nan")
    logits[5, 3] = float("-inf")
    with poisoned_allocations():
        weights, ids = moe_router.launch(logits, top_k, renormalize)
    expected, expected_ids = moe_router.reference(logits, top_k, renormalize)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-8, equal_nan=True)


def record_arguments(rows: int, experts: int, top_k: int) -> tuple[torch.Tensor, ...]:
    """Return logits, the kv_index of each row, some not recorded, and a record that holds other ids."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, experts + 1, generator=generator) * 3
    slots = torch.randperm(3 * 16, generator=generator)[:rows]
    slots[1::3] = -1
    return logits, slots, torch.full((3, 16 * top_k), -7, dtype=torch.int16)


@pytest.mark.parametrize("top_k", [2, 5])
def test_choices_are_recorded_by_kv_index(top_k: int) -> None:
    logits, slots, record = record_arguments(9, 40, top_k)
    found = recorded_router(logits, top_k, True, slots, record)
    for one, other in zip(found, moe_router(logits, top_k, True), strict=True):
        assert torch.equal(one, other)
    entries = record.view(-1, top_k)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert entries[slot].tolist() == found[1][row, :top_k].tolist()
    assert int((entries == -7).all(1).sum()) == 48 - int((slots >= 0).sum())
    with pytest.raises(ValueError, match="record must hold 2 ids a token in each block, got 33"):
        recorded_router(logits, 2, True, slots, torch.zeros(3, 33, dtype=torch.int16))


def test_the_recording_kernel_in_interpreter(interpreter: None) -> None:
    logits, slots, record = record_arguments(9, 50, 5)
    check_launch(recorded_router, (logits, 5, True, slots, record), rtol=1e-6, atol=1e-8, mutated=(4,))


def test_registration_and_compile_of_the_recording() -> None:
    cases = []
    for rows in (1, 5):
        logits, slots, record = record_arguments(rows, 8, 2)
        cases.append((logits, 2, True, slots, record))
    check_registration(torch.ops.compiled_mtp.recorded_router.default, cases[1])
    check_compiles(recorded_router, cases)
