"""`draft_dtype` rounds what drafts alone read: tokens stay equal, at every depth and on every rank."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.engine import Engine
from compiled_mtp.graphs.buckets import Bucket
from compiled_mtp.models.draft_weights import DraftPlan, plan_drafts
from compiled_mtp.models.weight_format import FP8
from compiled_mtp.ops import int4
from compiled_mtp.ops.fp8 import dequantize, quantize_weight
from compiled_mtp.request import SamplingParams
from tests.checkpoints import FAMILIES, FP8_FAMILIES, write_checkpoint
from tests.communicators.threads import ThreadRunner, engine_of
from tests.engines import make_engine, prompt_of, run_to_end

VOCAB = 512
FP8_DRAFTS = "float8_e4m3fn"
NAMES = ("dense-r3", "dense-r1-tied", "moe-mixed", "next-r2")
LINEARS = ("fc.", "layer.mixer.qkv.", "layer.mixer.o_proj.", "layer.ffn.gate_up", "layer.ffn.down")


def streams(engine: Engine, count: int = 3) -> dict[str, list[int]]:
    """Greedy and sampled requests that run together."""
    for index in range(count):
        params = SamplingParams(max_tokens=9, temperature=0.8 * (index % 2), seed=index, ignore_eos=True)
        prompt = prompt_of(5 + 31 * (index % 3), index, VOCAB)
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=str(index))
    return run_to_end(engine)


def linears(engine: Engine) -> dict[str, torch.Tensor]:
    """The MTP layer's weights and factors that FP8 products could read, by name."""
    draft = engine.runner.step.draft
    assert draft is not None
    named = dict(draft.named_parameters())
    return {name: p for name, p in named.items() if name.startswith(LINEARS)}


def values_of(weight: torch.Tensor) -> torch.Tensor:
    """The values in FP8 of a matrix, or of each of a stack, in its dtype."""
    matrices = weight if weight.dim() == 3 else weight[None]
    rounded = torch.stack([dequantize(*quantize_weight(matrix)) for matrix in matrices]).to(weight.dtype)
    return rounded.view(weight.shape)


@pytest.fixture
def keeps_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: FP8 stays in memory, and the operators multiply it."""

    def plan(*given: Any, **named: Any) -> DraftPlan:
        return replace(plan_drafts(*given, **named), is_multiplied_out=False)

    monkeypatch.setattr("compiled_mtp.runner.spec.plan_drafts", plan)


@pytest.mark.parametrize(
    ("name", "dtype"), [("dense-r3", "bfloat16"), *((name, "float32") for name in NAMES)]
)
def test_tokens_do_not_depend_on_it(tmp_path: Path, name: str, dtype: str) -> None:
    directory = write_checkpoint(tmp_path, **dict(FAMILIES)[name])
    expected = streams(make_engine(directory, mtp_step=0, max_batch=1, dtype=dtype))
    cases: list[dict[str, Any]] = [
        {"mtp_step": 0},
        {"mtp_step": 1},
        {"mtp_step": 3},
        {"mtp_step": "auto"},
        {"mtp_step": 3, "draft_vocab": 200},
    ]
    for options in cases:
        assert streams(make_engine(directory, dtype=dtype, draft_dtype=FP8_DRAFTS, **options)) == expected


@pytest.mark.usefixtures("keeps_fp8")
@pytest.mark.parametrize("name", NAMES)
def test_tokens_do_not_depend_on_fp8_in_memory(tmp_path: Path, name: str) -> None:
    directory = write_checkpoint(tmp_path, **dict(FAMILIES)[name])
    expected = streams(make_engine(directory, mtp_step=0, max_batch=1, dtype="bfloat16"))
    plain = linears(make_engine(directory, dtype="bfloat16"))
    for draft_vocab in (None, 200):
        engine = make_engine(directory, dtype="bfloat16", draft_dtype=FP8_DRAFTS, draft_vocab=draft_vocab)
        step = engine.runner.step
        assert step.draft_head is not None
        assert step.draft_head_scale is not None
        assert step.draft_head.dtype == FP8.storage
        assert streams(engine) == expected
        held = linears(engine)
        for key, weight in plain.items():
            factors = held[f"{key}_scale"]
            assert held[key].dtype == FP8.storage
            assert held[key].nbytes * 2 == weight.nbytes
            pairs = zip(held[key], factors, strict=True) if weight.dim() == 3 else [(held[key], factors)]
            rounded = torch.stack([dequantize(*pair) for pair in pairs]).view(weight.shape)
            assert torch.equal(rounded.bfloat16(), values_of(weight)), key
        assert all(p.dtype != FP8.storage for p in step.target.parameters())


@pytest.mark.parametrize("name", ["dense-r3", "moe-mixed"])
def test_drafts_read_rounded_values(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_checkpoint(tmp_path, **dict(FAMILIES)[name])
    plain = make_engine(directory)
    with caplog.at_level(logging.INFO, "compiled_mtp"):
        engine = make_engine(directory, draft_dtype=FP8_DRAFTS)
    head = engine.runner.step.target.head_weight
    size = f"{head.nbytes / 2**20:.1f} MiB"
    assert f", drafts in FP8, multiplied out (the MTP layer and a head of {size}), " in caplog.text
    memory = [engine.runner.memory.other_bytes for engine in (engine, plain)]
    assert memory[0] - memory[1] == head.nbytes
    own = engine.runner.step.draft_head
    assert own is not None
    assert torch.equal(own, values_of(head))
    held = linears(engine)
    for key, weight in linears(plain).items():
        assert not torch.equal(held[key], weight), key
        assert torch.equal(held[key], values_of(weight)), key
    assert plain.runner.step.draft_head is None


@pytest.mark.usefixtures("keeps_fp8")
@pytest.mark.parametrize("draft_vocab", [None, 90])
def test_many_requests_draft_by_quantised_rows(tmp_path: Path, draft_vocab: int | None) -> None:
    """Where rows are whole groups of 128 columns, in the head and in the layer."""
    directory = write_checkpoint(tmp_path, hidden_size=128, intermediate_size=128)
    expected = streams(make_engine(directory, mtp_step=0, max_batch=1, dtype="bfloat16"), 20)
    options: dict[str, Any] = {"draft_dtype": FP8_DRAFTS, "dtype": "bfloat16", "max_batch": 20}
    engine = make_engine(directory, **options, mtp_step=1, draft_vocab=draft_vocab)
    step = engine.runner.step
    assert step.quantizes_draft_rows
    assert step.draft is not None
    assert step.draft.fc.quantizes_rows
    assert streams(engine, 20) == expected
    programs = engine.runner.programs
    sizes = {bucket.groups for bucket in programs.buckets if isinstance(bucket, Bucket)}
    assert programs._sharing == {size for size in sizes if size > 1}


@pytest.mark.usefixtures("keeps_fp8")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("draft_vocab", [None, 90])
def test_tokens_do_not_depend_on_a_head_in_int4(tmp_path: Path, draft_vocab: int | None, world: int) -> None:
    sizes = {"num_q_heads": 4, "num_value_heads": 4, "num_key_heads": 4, "vocab_size": 640}
    directory = write_checkpoint(tmp_path, hidden_size=128, **sizes)
    expected = streams(make_engine(directory, mtp_step=0, max_batch=1, dtype="bfloat16"))
    options: dict[str, Any] = {"dtype": "bfloat16", "draft_dtype": "int4", "draft_vocab": draft_vocab}
    with engine_of(directory, world, **options) as engine:
        assert streams(engine) == expected
        runner = engine.runner
        step = runner.step
    assert step.draft_head is not None
    assert step.draft_head_scale is not None
    if isinstance(runner, ThreadRunner):
        assert step.slots.drafts.equal(runner.followers[0].step.slots.drafts)
        assert step.slots.drafts.any()
        return
    rows = step.target.head_weight[slice(None) if step.draft_ids is None else step.draft_ids].float()
    error = (int4.dequantize(step.draft_head, step.draft_head_scale) - rows).abs().unflatten(1, (-1, 128))
    groups = rows.unflatten(1, (-1, 128))
    # A code's step, and half of it where no code is in between; the zero point is a code too.
    code_step = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
    assert (error <= code_step[..., None] * 1.01).all()
    assert ((error <= code_step[..., None] * 0.51).float().mean() > 0.98).all()


@pytest.mark.parametrize(("name", "head"), [("dense-r3", 512), ("moe-mixed", 512), ("dense-r1-tied", 640)])
@pytest.mark.parametrize("draft_vocab", [None, 200])
def test_ranks_agree(tmp_path: Path, name: str, head: int, draft_vocab: int | None) -> None:
    """Of 640 rows two ranks have two blocks and a half each."""
    sizes = {"num_q_heads": 4, "num_value_heads": 4, "num_key_heads": 4, "vocab_size": head}
    directory = write_checkpoint(tmp_path, **(dict(FAMILIES)[name] | sizes))
    options: dict[str, Any] = {"dtype": "bfloat16", "draft_dtype": FP8_DRAFTS, "draft_vocab": draft_vocab}
    with engine_of(directory, 1, mtp_step=0, dtype="bfloat16") as engine:
        expected = streams(engine)
    for world in (1, 2):
        with engine_of(directory, world, **options) as engine:
            assert streams(engine) == expected, world
            runner = engine.runner
    assert isinstance(runner, ThreadRunner)
    other = runner.followers[0].step
    assert runner.step.slots.drafts.equal(other.slots.drafts)
    assert runner.step.slots.drafts.any()


@pytest.mark.usefixtures("keeps_fp8")
def test_ranks_agree_with_fp8_in_memory(tmp_path: Path) -> None:
    sizes = {"num_q_heads": 4, "num_value_heads": 4, "num_key_heads": 4, "vocab_size": 640}
    directory = write_checkpoint(tmp_path, **sizes)
    with engine_of(directory, 1, mtp_step=0, dtype="bfloat16") as engine:
        expected = streams(engine)
    with engine_of(directory, 2, dtype="bfloat16", draft_dtype=FP8_DRAFTS) as engine:
        assert streams(engine) == expected
        runner = engine.runner
        assert isinstance(runner, ThreadRunner)
    assert runner.step.draft_head is not None
    assert runner.step.draft_head.dtype == FP8.storage
    assert runner.step.slots.drafts.equal(runner.followers[0].step.slots.drafts)


def test_stored_formats_stay(tmp_path: Path) -> None:
    """Of an FP8 release the layer's weights are as they were; fc, which it stores in bfloat16, is rounded."""
    directory = write_checkpoint(tmp_path, **dict(FP8_FAMILIES)["dense"])
    plain, engine = (make_engine(directory, draft_dtype=asked) for asked in ("weights", FP8_DRAFTS))
    held = linears(engine)
    changed = {key for key, weight in linears(plain).items() if not torch.equal(weight, held[key])}
    assert changed == {"fc.weight"}
    assert streams(engine) == streams(make_engine(directory, mtp_step=0))


def test_a_graph_cache_is_made_for_one_draft_dtype(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hidden_size=128)
    keys = [
        make_engine(tmp_path, draft_dtype=dtype, num_blocks=34).runner.cache_key()
        for dtype in ("auto", FP8_DRAFTS, "int4")
    ]
    for one, other in itertools.combinations(keys, 2):
        assert {name for name in one if one[name] != other[name]} == {"drafts"}
