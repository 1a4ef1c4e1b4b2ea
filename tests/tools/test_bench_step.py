"""Where a step's time goes, as bench_step and bench_ranks tell it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"


def event(name: str, start: float, end: float, device: str = "DeviceType.CUDA") -> Any:
    return SimpleNamespace(
        name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end, elapsed_us=None)
    )


def test_a_kernel_that_waits_for_another_counts_from_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = importlib.import_module("bench_step")
    events = [
        event("launch", 0.0, 90.0, "DeviceType.CPU"),
        event("product", 10.0, 30.0),
        # Launched early, it waits until 30.
        event("norm", 12.0, 33.0),
        event("product", 33.0, 50.0),
        event("norm", 34.0, 55.0),
    ]
    spans = tool.own_spans(reversed(events))
    assert spans == [("product", 20.0), ("norm", 3.0), ("product", 17.0), ("norm", 5.0)]
    tool.print_kernels(spans, steps=2)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [["1", "18.5", "18.50", "product"], ["1", "4.0", "4.00", "norm"]]


def test_all_is_timed_before_a_profiler_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = importlib.import_module("bench_step")
    done: list[str] = []

    def start_loop(runner: Any, batch: int, context: int) -> Any:
        done.append(f"start {batch}")
        return SimpleNamespace(batch=batch)

    def measure(loop: Any, batch: int, context: int, bandwidth: float) -> dict[str, Any]:
        done.append(f"time {batch}")
        return {"batch": batch}

    def trace_kernels(loop: Any, batch: int) -> list[tuple[str, float]]:
        done.append(f"trace {batch} of {loop.batch}")
        return [("product", float(batch))]

    for function in (start_loop, measure, trace_kernels):
        monkeypatch.setattr(tool, function.__name__, function)
    monkeypatch.setattr(tool, "end_loop", lambda loop: done.append(f"end {loop.batch}"))
    rows = list(tool.measure_all(None, [1, 8], 512, 1.0))
    assert [(row["batch"], kernels) for row, kernels in rows] == [
        (1, [("product", 1.0)]),
        (8, [("product", 8.0)]),
    ]
    assert done == [
        *("start 1", "time 1", "end 1", "start 8", "time 8"),
        *("trace 1 of 8", "trace 8 of 8", "end 8"),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_every_expert_has_the_numbers_of_the_first(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = importlib.import_module("bench_step")
    roll = torch.Tensor.roll

    def roll_of_a_gpu(self: torch.Tensor, *arguments: int) -> torch.Tensor:
        assert self.dtype != torch.float8_e4m3fn, "not implemented on a GPU"
        return roll(self, *arguments)

    monkeypatch.setattr(torch.Tensor, "roll", roll_of_a_gpu)
    experts = torch.zeros(3, 4, 256, dtype=dtype)
    tool.fill_random({"up": experts})
    first, second, third = experts.float()
    assert first.std() > 0.01
    assert torch.equal(second, roll(first, 1, 0))
    assert torch.equal(third, roll(first, 2, 0))


class Profile:
    """Stands in for torch's profiler: the events that are given, whatever runs meanwhile."""

    def __init__(self, events: list[Any]) -> None:
        self.events = lambda: events

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_as_many_requests_are_traced_as_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = importlib.import_module("bench_step")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("torch.profiler.profile", lambda **_: Profile([event("norm", 0.0, 2.0)]))
    launched: list[Any] = []
    programs = SimpleNamespace(decode=lambda slots, shape: launched.append((slots, shape)))
    runner = SimpleNamespace(programs=programs, step=SimpleNamespace(mtp_step=3))
    loop = SimpleNamespace(runner=runner, scheduler=SimpleNamespace(running={7: "a", 2: "b", 5: "c"}))
    assert tool.trace_kernels(loop, 2) == [("norm", 2.0)]
    assert launched == [((2, 5), (3, 3))] * 2


def test_what_an_exchange_takes_is_of_our_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = importlib.import_module("bench_ranks")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tool, "TRACED_STEPS", 2)
    names = ("product", "gather_kernel", "void at::native::vectorized_gather_kernel<16>(char*)", "sum_kernel")
    names += ("ncclDevKernel_AllGather", "product")
    events = [event(name, 1e3 * index, 1e3 * (index + 1)) for index, name in enumerate(names)]
    monkeypatch.setattr("torch.profiler.profile", lambda **_: Profile(events))
    steps: list[int] = []
    share = tool.exchange_share(SimpleNamespace(step=lambda: steps.append(1)))
    assert len(steps) == 2
    # Three kernels of a millisecond in two steps.
    assert share == {"exchange_ms": 1.5, "exchanges": 2}
