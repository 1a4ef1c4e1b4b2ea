"""Where a step's time goes, as `compiled-mtp bench step` reports it, and the saved rows beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_mtp.benchmarks import kernel_times
from compiled_mtp.benchmarks import step_time as tool
from compiled_mtp.benchmarks.gpu_rates import Rates
from compiled_mtp.benchmarks.released_shapes import model_config
from compiled_mtp.benchmarks.saved_rows import Row, read_rows, rows_beside
from compiled_mtp.benchmarks.step_floor import floor_bytes, product_flops, roof_ms
from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.state_cache import StateCache
from compiled_mtp.models.draft_weights import DraftPlan, plan_drafts
from compiled_mtp.models.family import FAMILIES
from compiled_mtp.models.weight_format import W8A8
from compiled_mtp.models.weights import read_formats
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine


def event(name: str, start: float, end: float, device: str = "DeviceType.CUDA") -> Any:
    return SimpleNamespace(
        name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end, elapsed_us=None)
    )


def test_a_kernel_that_waits_for_another_counts_from_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [
        event("launch", 0.0, 90.0, "DeviceType.CPU"),
        event("product", 10.0, 30.0),
        # The kernel was launched early and waits until 30.
        event("norm", 12.0, 33.0),
        event("product", 33.0, 50.0),
        event("norm", 34.0, 55.0),
    ]
    spans = kernel_times.own_spans(reversed(events))
    assert spans == [("product", 20.0), ("norm", 3.0), ("product", 17.0), ("norm", 5.0)]
    monkeypatch.setattr(kernel_times, "TRACED_STEPS", 2)
    kernel_times.print_kernels(spans)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [["1", "18.5", "18.50", "product"], ["1", "4.0", "4.00", "norm"]]


def test_all_is_timed_before_a_profiler_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def start_loop(runner: Any, batch: int, context: int) -> Any:
        done.append(f"start {batch}")
        return SimpleNamespace(batch=batch)

    def measure(loop: Any, batch: int, context: int, rates: Rates) -> dict[str, Any]:
        done.append(f"time {batch}")
        return {"batch": batch}

    def trace_kernels(loop: Any, batch: int) -> list[tuple[str, float]]:
        done.append(f"trace {batch} of {loop.batch}")
        return [("product", float(batch))]

    for function in (start_loop, measure, trace_kernels):
        monkeypatch.setattr(tool, function.__name__, function)
    monkeypatch.setattr(tool, "end_loop", lambda loop: done.append(f"end {loop.batch}"))
    rows = list(tool.measure_all(None, [1, 8], 512, Rates(1.0, 1.0, 1.0)))
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


def test_the_floor_counts_what_drafts_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def plan(*given: Any, **named: Any) -> DraftPlan:
        # As on a GPU.
        return replace(plan_drafts(*given, **named), is_multiplied_out=False)

    monkeypatch.setattr("compiled_mtp.runner.spec.plan_drafts", plan)
    directory = write_checkpoint(tmp_path, "qwen3_5_moe")
    plain, rounded, cut = (
        make_engine(directory, dtype="bfloat16", draft_dtype=asked, draft_vocab=ids).runner
        for asked, ids in (("weights", None), ("float8_e4m3fn", None), ("float8_e4m3fn", 127))
    )
    for batch in (1, 20):
        wanted = tool.floor_bytes(plain, batch, 64)
        assert tool.floor_bytes(rounded, batch, 64, has_own_drafts=False) == wanted
        items = tool.floor_bytes(rounded, batch, 64)
        assert {name for name in items if items[name] != wanted[name]} == {"draft_layers", "draft_heads"}
        assert 0.5 < items["draft_layers"] / wanted["draft_layers"] < 0.55
    assert tool.floor_bytes(rounded, 1, 64)["draft_heads"] == 3 * (512 * 128 + 4 * 4)
    # 127 ids and the eos id, at every size.
    assert tool.floor_bytes(cut, 20, 64)["draft_heads"] == 3 * (128 * 128 + 4)
    assert tool.floor_bytes(cut, 20, 64, has_own_drafts=False)["draft_heads"] == 3 * 128 * 128 * 2


def shape_runner(name: str, is_fp8: bool) -> Any:
    """A stand-in for a runner of a released shape at mtp_step 3, whose tensors have no memory."""
    model, device, dtype = model_config(name, is_fp8), torch.device("meta"), torch.bfloat16
    able = read_formats(model, None, torch.device("cpu"), "w8a8" if is_fp8 else None, dtype)
    # As on a GPU.
    formats = dict.fromkeys(able, W8A8)
    family = FAMILIES[model.family]
    step = SimpleNamespace(
        mtp_step=3,
        target=family.target(model, dtype, device, formats),
        draft=family.draft(model, dtype, device, formats),
        kv_cache=KVCache(model, 2, 64, dtype, device, with_draft=True),
        state_cache=StateCache(model, 2, 3, dtype, device),
        draft_head=None,
        draft_head_scale=None,
        quantizes_draft_rows=False,
    )
    spec = SimpleNamespace(model=model, dtype=dtype, drafts=DraftPlan(), weight_formats=formats)
    return SimpleNamespace(spec=spec, step=step)


@pytest.mark.parametrize(
    ("name", "is_fp8", "wanted"),
    [
        ("27b", False, (15.6, 22.3, 44.7, 89.4)),
        ("27b", True, (10.3, 14.9, 29.7, 59.5)),
        ("4b", False, (3.6, 4.9, 9.7, 19.4)),
        ("35b-a3b", False, (16.9, 18.3, 20.3, 24.1)),
    ],
)
def test_the_roof_of_released_shapes(name: str, is_fp8: bool, wanted: tuple[float, ...]) -> None:
    """At 32, 64, 128 and 256 requests on an H200: bytes of weights decide first, then tensor cores."""
    runner, rates = shape_runner(name, is_fp8), Rates(4.6e12, 790e12, 1500e12)
    roofs = [
        roof_ms(floor_bytes(runner, batch, 512), product_flops(runner, batch), rates)
        for batch in (32, 64, 128, 256)
    ]
    assert roofs == pytest.approx(wanted, rel=0.03)


class Profile:
    """Stands in for torch's profiler: returns the given events, whatever runs meanwhile."""

    def __init__(self, events: list[Any]) -> None:
        self.events = lambda: events

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The traces of a profiler that always sees one step of two GPUs."""
    names = ("product", "gather_kernel", "void at::native::vectorized_gather_kernel<16>(char*)", "sum_kernel")
    names += ("ncclDevKernel_AllGather", "product")
    events = [event(name, 1e3 * index, 1e3 * (index + 1)) for index, name in enumerate(names)]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("torch.profiler.profile", lambda **_: Profile(events))
    return kernel_times


def test_as_many_requests_are_traced_as_were_timed(traced: Any) -> None:
    launched: list[Any] = []
    programs = SimpleNamespace(decode=lambda slots, shape: launched.append((slots, shape)))
    runner = SimpleNamespace(programs=programs, step=SimpleNamespace(mtp_step=3))
    loop = SimpleNamespace(runner=runner, scheduler=SimpleNamespace(running={7: "a", 2: "b", 5: "c"}))
    assert len(traced.trace_kernels(loop, 2)) == 6
    assert launched == [((2, 5), (3, 3))] * (1 + traced.TRACED_STEPS)


def test_several_gpus_are_traced_by_steps_that_every_rank_knows(
    traced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced, "LeadRunner", SimpleNamespace)
    monkeypatch.setattr(traced, "TRACED_STEPS", 2)
    steps: list[int] = []
    loop = SimpleNamespace(runner=SimpleNamespace(), step=lambda: steps.append(1))
    kernels = traced.trace_kernels(loop, 2)
    assert len(steps) == 3
    # Three kernels of a millisecond in two steps.
    assert traced.communicator_ms(kernels) == 1.5


ROW = {
    "engine": "vLLM 0.26.0",
    "device": "NVIDIA H200",
    "shape": "27b",
    "weights": "bf16",
    "mtp_step": 3,
    "batch": 8,
    "context": 512,
    "step_ms": 20.0,
}


def read(path: Path) -> list[Row]:
    return read_rows(path, tool.SAVED_FIELDS, {"ranks": 1})


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("27b: read bandwidth 4.6 TB/s\n" + "".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_saved_rows_of_the_same_case_are_shown_beside_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"device": "NVIDIA H100", "shape": "4b", "weights": "fp8", "mtp_step": 0, "batch": 1}
    others = [ROW | {name: value} for name, value in (other | {"context": 32768, "ranks": 2}).items()]
    older = ROW | {"engine": "compiled-mtp", "step_ms": 16}
    path = write(tmp_path / "rows", *others, ROW, older, ROW | {"step_ms": 22.0, "note": "again"})
    times = dict.fromkeys(("host_us", "host_min_us", "host_max_us", "startup_s", "communicator_ms"), 1.0)
    ours = (
        ROW | times | {"ranks": 1, "step_ms": 17.6, "graph_mode": "replay", "kernels": 9, "tokens_per_s": 1}
    )
    tool.print_row(ours, read(path))
    _, text, line = capsys.readouterr().out.splitlines()
    assert text.endswith(
        "vLLM 0.26.0 20.000 to 22.000 ms (1.14 to 1.25 of ours), compiled-mtp 16.000 ms (0.91 of ours)"
    )
    assert json.loads(line)["beside"] == {"vLLM 0.26.0": [20.0, 22.0], "compiled-mtp": [16.0]}
    # The printed output is such a file.
    (tmp_path / "printed").write_text(text + "\n" + line)
    assert read(tmp_path / "printed")[0]["step_ms"] == 17.6
    assert rows_beside([], ours, tool.CASE_FIELDS, "step_ms") == {}


def test_a_file_without_rows_or_fields_is_refused(tmp_path: Path) -> None:
    torn = {name: value for name, value in ROW.items() if name != "device"}
    for rows, got in (([], "no row"), ([ROW, torn], "none of \\['device'\\]")):
        with pytest.raises(ValueError, match=f"beside must hold rows with .*, got {got}"):
            read(write(tmp_path / "rows", *rows))


def test_weights_have_one_format(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.make_parser().parse_args(["--shape", "4b", "--fp8", "--int4"])
    assert ended.value.code == 2
    assert "argument --int4: not allowed with argument --fp8" in capsys.readouterr().err
