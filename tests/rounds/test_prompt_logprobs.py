"""Log probabilities of a prompt's own tokens: transformers' values, and the same bits in any batch."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.cli import printer, run
from compiled_mtp.engine import Engine
from compiled_mtp.plan import StepPlan
from compiled_mtp.request import RequestOutput, SamplingParams
from compiled_mtp.rounds.prompt_logprobs import SLICE_ROWS
from compiled_mtp.runner.memory_plan import MemoryPlan, plan_memory
from compiled_mtp.sampling.logprobs import TokenLogprob
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine, prompt_of
from tests.fake_runner import FakeRunner
from tests.oracle import oracle
from tests.scheduling import make_request, make_scheduler, step, stream

VOCAB = 512
CHUNK = 64
# tests/models/test_against_transformers.py measures this error.
TOLERANCE = 5e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prompts")
    write_checkpoint(directory, num_key_heads=1, num_value_heads=2)
    return directory


@cache
def engine_of(directory: Path, mtp_step: int, max_in_flight: int = 0) -> Engine:
    return make_engine(directory, mtp_step=mtp_step, max_in_flight=max_in_flight, prefill_chunk=CHUNK)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 4, "seed": 3, "ignore_eos": True} | fields))


def test_they_are_those_of_transformers_across_chunks(checkpoint: Path) -> None:
    prompt = prompt_of(150, 1, VOCAB)
    (output,) = engine_of(checkpoint, 0).generate([prompt], params(prompt_logprobs=20))
    entries = output.prompt_logprobs
    assert entries is not None
    assert [entry.token_id for entry in entries] == prompt[1:]
    reference = oracle(checkpoint)
    expected = torch.log_softmax(reference.target(torch.tensor(prompt))[1], -1)[:-1]
    itself = 0.0
    for cut in (1, 2, 3, 30):
        part = torch.log_softmax(reference.target(torch.tensor(prompt[:-cut]))[1], -1)[:-1]
        itself = max(itself, float((part - expected[: len(part)]).abs().max()))
    errors = [
        abs(entry.logprob - float(row[entry.token_id])) for entry, row in zip(entries, expected, strict=True)
    ]
    for entry, row in zip(entries, expected, strict=True):
        errors += [abs(one.logprob - float(row[one.token_id])) for one in entry.top]
        order = [(-one.logprob, one.token_id) for one in entry.top]
        assert order == sorted(order)
        assert len(order) == 20
        # Neighbours in a row may swap within the error, and their ranks with them.
        own = float(row[entry.token_id])
        least, most = (int((row > own + error).sum()) for error in (TOLERANCE, -TOLERANCE))
        assert least < entry.rank <= most
        if entry.rank <= 20:
            assert entry.top[entry.rank - 1][::2] == (entry.token_id, entry.logprob)
    print(f"error {max(errors):.2e}, transformers against itself {itself:.2e}")
    assert max(errors) < TOLERANCE
    assert max(errors) < 4 * itself


LENGTHS = (1, 2, CHUNK, CHUNK + 1, 2 * CHUNK, 150)


@cache
def alone(directory: Path, length: int) -> list[TokenLogprob]:
    asked = params(prompt_logprobs=3)
    (output,) = engine_of(directory, 0).generate([prompt_of(length, length, VOCAB)], asked)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == length - 1
    return output.prompt_logprobs


@pytest.mark.parametrize(("mtp_step", "max_in_flight"), [(0, 1), (3, 0), (3, 1)])
def test_they_are_the_same_to_the_bit_in_any_batch_at_any_depth(
    checkpoint: Path, mtp_step: int, max_in_flight: int
) -> None:
    """Beside requests with other options, each of which has the tokens that it has without them."""
    expected = [alone(checkpoint, length) for length in LENGTHS]
    fields = [{}, {"logprobs": 2}, {"temperature": 0}, {"logprobs_mode": "processed", "logprobs": 0}, {}, {}]
    prompts = [prompt_of(length, length, VOCAB) for length in LENGTHS]
    asking = [params(prompt_logprobs=3, **one) for one in fields]
    silent = [params(**one) for one in fields]
    engine = engine_of(checkpoint, mtp_step, max_in_flight)
    outputs = engine.generate([*prompts, *prompts], [*asking, *silent])
    for entries, with_them, without in zip(expected, outputs, outputs[len(prompts) :], strict=False):
        assert with_them.prompt_logprobs == entries
        assert without.prompt_logprobs is None
        assert with_them.new_token_ids == without.new_token_ids
        assert with_them.logprobs == without.logprobs
        assert with_them.logprobs is None or len(with_them.logprobs) == 4


def test_they_come_with_the_first_output_of_choice_0(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, 3, 1)
    engine.add_request(
        prompt_token_ids=prompt_of(150, 150, VOCAB), params=params(prompt_logprobs=3, n=2, max_tokens=9)
    )
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    by_choice = [[one for one in outputs if one.index == index] for index in (0, 1)]
    assert by_choice[0][0].prompt_logprobs == alone(checkpoint, 150)
    assert all(one.prompt_logprobs is None for one in by_choice[0][1:] + by_choice[1])


def test_requests_that_do_not_ask_have_no_extra_work(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are scored only in the chunks of requests that ask."""
    engine = engine_of(checkpoint, 0)
    monkeypatch.setattr("compiled_mtp.runner.programs.score_rows", lambda *_: pytest.fail("rows were scored"))
    engine.generate([prompt_of(150, 1, VOCAB)], params(logprobs=3))
    # The first token has no log probability, so a prompt of one token has none.
    (output,) = engine.generate([[5]], params(prompt_logprobs=3))
    assert output.prompt_logprobs == []


def test_the_memory_plan_leaves_room_for_a_slice(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[int] = []

    def spy(free_bytes: int, *args: Any, **fields: Any) -> MemoryPlan:
        others.append(fields["other_bytes"])
        return plan_memory(free_bytes, *args, **fields)

    monkeypatch.setattr("compiled_mtp.runner.assemble._free_bytes", lambda device: 10**9)
    monkeypatch.setattr("compiled_mtp.runner.memory.plan_memory", spy)
    make_engine(checkpoint, mtp_step=0, offload_gb=0)
    monkeypatch.setattr("compiled_mtp.runner.memory.SLICE_ROWS", 0)
    make_engine(checkpoint, mtp_step=0, offload_gb=0)
    assert others[0] == others[1] + SLICE_ROWS * VOCAB * 4


def test_a_line_of_a_file_asks_for_them_and_has_them(checkpoint: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt_token_ids": prompt_of(64, 64, VOCAB), "prompt_logprobs": 3},
        {"prompt_token_ids": [1, 2]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--prompt-file", file, "--output", output, "--model", checkpoint, "--max-tokens", "2"]
    flags += ["--device", "cpu", "--max-model-len", "512", "--mtp-step", "0", "--seed", "1", "--in-order"]
    flags += ["--prefill-chunk", str(CHUNK)]
    assert run.main([str(flag) for flag in flags]) == 0
    asked, silent = map(json.loads, output.read_text().splitlines())
    assert silent["prompt_logprobs"] is None
    assert asked["logprobs"] is None
    got = asked["prompt_logprobs"]
    for entry, line in zip(alone(checkpoint, 64), got, strict=True):
        top = [{"id": one.token_id, "bytes": [], "logprob": one.logprob} for one in entry.top]
        assert line == {
            "id": entry.token_id,
            "bytes": [],
            "logprob": entry.logprob,
            "rank": entry.rank,
            "top": top,
            "entropy": entry.entropy,
        }


def test_a_row_that_is_not_finite_has_no_number() -> None:
    entry = TokenLogprob(5, b"a", float("-inf"), 9, (), 0.0)
    fields = {"id": 5, "bytes": [97], "logprob": None, "rank": 9, "top": [], "entropy": 0.0}
    assert json.loads(json.dumps(printer._entry_fields(entry))) == fields
    both = replace(entry, processed=entry)
    assert printer._entry_fields(both) == fields | {"processed": fields}


@pytest.mark.parametrize("delay", [0, 1])
def test_a_request_that_ends_before_its_prompt_was_read_gives_none(delay: int) -> None:
    scheduler = make_scheduler(max_in_flight=delay)
    runner = FakeRunner(scheduler, delay)
    scheduler.add(make_request("a", 20, 4, prompt_logprobs=1))
    scheduler.add(make_request("b", 20, 4, seed=1, prompt_logprobs=0, ignore_eos=True))
    outputs = [*step(scheduler, runner), *step(scheduler, runner)]
    scheduler.abort("a")
    outputs += stream(scheduler, runner)
    first, *others = [one for one in outputs if one.request_id == "b"]
    assert first.prompt_logprobs is not None
    # The fake runner returns the ids to score: token i of a prompt is 100 + i.
    assert [one.token_id for one in first.prompt_logprobs] == list(range(101, 120))
    assert [one.logprob for one in first.prompt_logprobs] == [-float(i) for i in range(101, 120)]
    assert all(one.top == () for one in first.prompt_logprobs)
    assert all(one.prompt_logprobs is None for one in others)
    assert all(one.prompt_logprobs is None for one in outputs if one.request_id == "a")


def test_a_repeated_chunk_changes_no_output() -> None:
    """A request may be prefilled twice, if its first run was lost."""
    scheduler = make_scheduler(max_in_flight=0)
    runner = FakeRunner(scheduler, 0)
    request = make_request("a", 20, 4, prompt_logprobs=1)
    scheduler.add(request)
    results = []
    while not request.output_token_ids:
        plan = scheduler.schedule()
        assert isinstance(plan, StepPlan)
        result = runner.run(plan)
        assert result is not None
        results.append(result)
        if not plan.ended and result.prompt_logprobs is not None:
            request.add_prompt_logprobs(plan.prompt_chunks[0].start, plan.next_ids, result.prompt_logprobs)
        scheduler.update(result)
    (output,) = scheduler.take_outputs()
    assert output.prompt_logprobs is not None
    assert [one.token_id for one in output.prompt_logprobs] == list(range(101, 120))
    for result in results:
        assert result.prompt_logprobs is not None
        request.add_prompt_logprobs(
            result.plan.prompt_chunks[0].start, result.plan.next_ids, result.prompt_logprobs
        )
    assert request.take_prompt_logprobs() is None


def test_log_probabilities_need_every_row_of_a_prompt() -> None:
    """A cached prefix must be computed again if its log probabilities are asked for."""
    assert make_request("a", 3, 4, prompt_logprobs=0).has_prompt_logprobs
    assert not make_request("a", 3, 4, logprobs=5).has_prompt_logprobs
