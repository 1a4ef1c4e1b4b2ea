"""read_window and accept_window on the device, against their reference there."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.window import accept_window, read_window
from tests.ops.harness import check_launch
from tests.ops.window_cases import (
    HASH_LIMIT,
    accept_arguments,
    make_forced,
    make_lookup,
    make_slots,
    read_arguments,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("mtp_step", [0, 1, 2, 3, 7, 15])
@pytest.mark.parametrize("order", [[1], [2, 0], [6, 3, 8], [5, 8, 1, 7, 0, 2, 4, 6, 3, 0]])
@pytest.mark.parametrize("hash_limit", [None, HASH_LIMIT])
@pytest.mark.parametrize("is_forced", [False, True])
def test_windows(mtp_step: int, order: list[int], hash_limit: int | None, is_forced: bool) -> None:
    slots = make_slots(mtp_step, "cuda")
    read = read_arguments(slots, order, mtp_step)
    check_launch(read_window, read, rtol=0, atol=0)
    forced = make_forced(slots, mtp_step) if is_forced else None
    accept = accept_arguments(slots, read_window(*read), order, mtp_step, hash_limit, forced)
    check_launch(accept_window, accept, rtol=0, atol=0, mutated=(6, 7, 8, 10, 11))
    lookup = (*accept, *make_lookup("cuda"))
    check_launch(accept_window, lookup, rtol=0, atol=0, mutated=(6, 7, 8, 10, 11, 17))
    check_launch(accept_window, (*lookup, 5), rtol=0, atol=0, mutated=(6, 7, 8, 10, 11, 17))


def test_a_table_of_several_parts_is_copied_whole() -> None:
    slots = make_slots(3, "cuda")
    slots["block_table"] = torch.arange(9 * 4099, dtype=torch.int32, device="cuda").view(9, 4099)
    read = (*read_arguments(slots, [4, 2, 7], 3)[:-1], 4099 * 16)
    check_launch(read_window, read, rtol=0, atol=0)
