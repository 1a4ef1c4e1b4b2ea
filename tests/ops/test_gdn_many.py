"""The kernel of gdn_verify for many requests: its Python runs on a CPU (gdn_on_cpu).

That it has the bits of the other kernel is tests/gpu's.
"""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.device import Device
from compiled_mtp.ops.gdn_verify import gdn_verify
from tests.ops.gdn_cases import (
    Shape,
    Stream,
    check_unfolded_states,
    check_windows_equal_single_steps,
    make_cache,
    make_layer,
    make_window,
)
from tests.ops.harness import rel_l2

pytest.importorskip("triton", reason="Triton exists on Linux only")

from compiled_mtp.ops.gdn_verify import many_kernel
from tests.ops import gdn_on_cpu

SHAPE = Shape(1, 3, 64, 32)


@pytest.fixture(params=[1, 4, 100])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """At most so many programs: all items in one, some items in each, one item in each."""
    count: int = request.param
    monkeypatch.setattr(many_kernel, "gdn_many_kernel", gdn_on_cpu.Kernel(many_kernel.gdn_many_kernel))
    monkeypatch.setattr(many_kernel, "PROGRAMS", count)
    monkeypatch.setattr(many_kernel, "device_of", lambda index: Device("sm_90", 227 * 1024, True, True, 1))
    return count


def test_equals_the_specification(programs: int) -> None:
    """Three requests, a ring that wraps, states that are stored and states that are not."""
    layer, cache = make_layer(SHAPE), make_cache(SHAPE, slots=5, ring=8)
    caches = [cache, cache.clone()]
    streams = [Stream(layer, own, [4, 1, 2], [0, 6, 900], [0, 6, 900]) for own in caches]
    for stream in streams:
        stream.max_unfolded = 4
    for number, query_len in enumerate((3, 1, 4, 2)):
        window = make_window(SHAPE, 3 * query_len, seed=number)
        got = streams[0].verify(gdn_on_cpu.verify, window, [0, 1, 2])
        wanted = streams[1].verify(gdn_verify, window, [0, 1, 2])
        assert rel_l2(got, wanted) < 1e-5
        for ours, theirs in zip(caches[0].tensors, caches[1].tensors, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
        for stream in streams:
            for request in range(3):
                stream.accept(request, min(query_len, 1 + request), query_len)


def test_windows_equal_single_steps(programs: int) -> None:
    check_windows_equal_single_steps(gdn_on_cpu.verify, SHAPE, rounds=3)


def test_unfolded_states_change_no_bit(programs: int) -> None:
    check_unfolded_states(gdn_on_cpu.verify, SHAPE, rounds=5)
