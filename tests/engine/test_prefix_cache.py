"""The prefix cache through real engines: hits resume into slots full of NaN and give the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.engine import Engine
from compiled_mtp.plan import Copy, Location, StepPlan
from compiled_mtp.request import RequestOutput, SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engines import LateCopyStream, make_engine, prompt_of

VOCAB = 512
CHUNK = 64
PROMPT = prompt_of(200, 5, VOCAB)
SAMPLED = SamplingParams(max_tokens=8, temperature=0.9, seed=11, ignore_eos=True)
PARAMS = {
    "sampled": SAMPLED,
    "greedy": SAMPLED.model_copy(update={"temperature": 0.0, "seed": 12}),
    # What counts tokens of the prompt counts those of its cached part.
    "penalties": SAMPLED.model_copy(update={"repetition_penalty": 1.9, "presence_penalty": 1.0}),
    # Its first token is a launch of its own.
    "listed": SAMPLED.model_copy(update={"logprobs": 3, "seed": 13}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prefix")
    return write_checkpoint(directory, hidden_size=64, num_value_heads=1, intermediate_size=64)


@cache
def engine_of(directory: Path, mtp_step: int, max_in_flight: int = 0, **options: Any) -> Engine:
    return make_engine(directory, mtp_step=mtp_step, max_in_flight=max_in_flight, **options)


@cache
def alone(directory: Path, prompt: tuple[int, ...], name: str) -> RequestOutput:
    """What a request gives without drafts, company and cache."""
    engine = engine_of(directory, 0, prefix_cache=False)
    output = engine.generate([list(prompt)], PARAMS[name])[0]
    assert output.metrics.cached_tokens == 0
    return output


def check(directory: Path, prompt: Sequence[int], name: str, output: RequestOutput) -> None:
    expected = alone(directory, tuple(prompt), name)
    assert output.new_token_ids == expected.new_token_ids, (name, output.metrics.cached_tokens)
    assert output.logprobs == expected.logprobs


@pytest.mark.parametrize(("mtp_step", "max_in_flight"), [(0, 1), (1, 0), (3, 1)])
def test_hits_give_the_tokens_of_a_request_alone(checkpoint: Path, mtp_step: int, max_in_flight: int) -> None:
    engine = engine_of(checkpoint, mtp_step, max_in_flight)
    # The whole prompt again, one that goes on, ones that part in a chunk and between two, one that is a
    # prefix, and one of whole chunks.
    prompts = [
        PROMPT,
        PROMPT + prompt_of(40, 6, VOCAB),
        PROMPT[:150] + prompt_of(30, 7, VOCAB),
        PROMPT[:128] + prompt_of(70, 8, VOCAB),
        PROMPT[:130],
        PROMPT[:192],
    ]
    cached = []
    for name in PARAMS:
        outputs = engine.generate(prompts, PARAMS[name])
        engine.scheduler.check_integrity()
        for prompt, output in zip(prompts, outputs, strict=True):
            check(checkpoint, prompt, name, output)
        cached += [output.metrics.cached_tokens for output in outputs]
    assert cached[-len(prompts) :] == [192, 192, 128, 192, 128, 128]
    stats = engine.stats()
    assert (stats.prefix_hits, stats.prefix_lookups) == (len(prompts) * 4 - 1, len(prompts) * 4)
    assert stats.cached_tokens == sum(cached)
    assert (stats.blocks_used, stats.prefix_evictions) == (0, 0)


def test_a_chat_that_grows_gives_the_tokens_of_its_turns_alone(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, mtp_step=3, max_in_flight=1)
    prompt, cached = PROMPT[:70], []
    for turn in range(3):
        output = engine.generate([prompt], SAMPLED)[0]
        check(checkpoint, prompt, "sampled", output)
        cached.append(output.metrics.cached_tokens)
        prompt = prompt + output.new_token_ids + prompt_of(60, 20 + turn, VOCAB)
    assert cached == [0, 64, 128]


def test_rounds_by_accepted_count_are_the_same_with_and_without_a_hit(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, mtp_step=3)
    params = SAMPLED.model_copy(update={"max_tokens": 40, "temperature": 0.4})
    first, again = (engine.generate([PROMPT], params)[0] for _ in range(2))
    assert (first.metrics.cached_tokens, again.metrics.cached_tokens) == (0, 192)
    assert first.new_token_ids == again.new_token_ids
    # The draft's keys and values are part of the prefix: a hole in them would cost acceptance.
    assert first.metrics.rounds_by_accepted == again.metrics.rounds_by_accepted


@pytest.mark.parametrize("mtp_step", [0, 3])
def test_pages_and_states_behind_a_hit_are_those_of_a_prefill(checkpoint: Path, mtp_step: int) -> None:
    """To the bit, of target and draft: all that the next chunk and the rounds will read."""
    left = []
    for has_cache in (False, True):
        engine = make_engine(checkpoint, mtp_step=mtp_step, prefix_cache=has_cache)
        for _ in range(1 + has_cache):
            engine.add_request(prompt_token_ids=PROMPT, params=SAMPLED)
            while not engine.scheduler.running:
                engine.step()
            ((slot, _),) = engine.scheduler.running.items()
            left.append(state_of(engine, slot))
            while engine.has_unfinished_requests():
                engine.step()
    for other in left[1:]:
        assert left[0].keys() == other.keys()
        for name, tensor in left[0].items():
            assert torch.equal(tensor, other[name]), name


def state_of(engine: Engine, slot: int) -> dict[str, torch.Tensor]:
    """What a prompt has left in a slot and its blocks."""
    step = engine.runner.step
    blocks = step.slots.block_table[slot, : -(-len(PROMPT) // engine.config.block_size)].long()
    names = ("state", "last_hidden")
    found = {e.name: e.tensor[slot].clone() for e in step.slot_tensors if e.name.endswith(names)}
    for name, pages in step.kv_cache.named_buffers():
        found[name] = pages[blocks].movedim(3, 1).flatten(0, 1)[: len(PROMPT)]
    return found


def test_a_pool_that_is_too_small_for_the_cache_gives_it_up(checkpoint: Path) -> None:
    engine = make_engine(
        checkpoint, mtp_step=2, max_in_flight=1, max_model_len=256, num_blocks=17, max_batch=2
    )
    prompts = [prompt_of(150 + 10 * i, 30 + i, VOCAB) for i in range(3)]
    for _ in range(2):
        for prompt in prompts:
            check(checkpoint, prompt, "sampled", engine.generate([prompt], SAMPLED)[0])
            engine.scheduler.check_integrity()
    assert engine.stats().prefix_evictions > 0


@pytest.mark.parametrize(("mtp_step", "max_in_flight"), [(0, 0), (3, 1)])
@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn"])
def test_what_comes_back_from_host_memory_gives_the_same(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, mtp_step: int, max_in_flight: int, kv_dtype: str
) -> None:
    monkeypatch.setattr("compiled_mtp.runner.host_tiers.prefix_tier_bytes", lambda *_: 1 << 24)
    if max_in_flight:
        monkeypatch.setattr("compiled_mtp.cache.moves.CopyStream", LateCopyStream)
    sizes: dict[str, Any] = {"max_model_len": 256, "num_blocks": 17, "max_batch": 2, "kv_dtype": kv_dtype}
    engine = make_engine(checkpoint, mtp_step=mtp_step, max_in_flight=max_in_flight, **sizes)
    prompts = [prompt_of(150 + 10 * i, 30 + i, VOCAB) for i in range(3)]
    seen: list[list[RequestOutput]] = []
    for _ in range(3):
        seen.append([engine.generate([prompt], PARAMS["listed"])[0] for prompt in prompts])
        engine.scheduler.check_integrity()
    for turn in seen[1:]:
        assert [output.metrics.cached_tokens for output in turn] == [128, 128, 128]
        for first, again in zip(seen[0], turn, strict=True):
            assert (again.new_token_ids, again.logprobs) == (first.new_token_ids, first.logprobs)
            assert again.metrics.rounds_by_accepted == first.metrics.rounds_by_accepted
    for prompt, output in zip(prompts, seen[2], strict=True):
        if kv_dtype == "auto":
            check(checkpoint, prompt, "listed", output)
    stats, memory = engine.stats(), engine.runner.memory
    assert 3 <= stats.prefix_host_hits <= stats.prefix_hits
    prefix_host = engine.scheduler.prefix.prefix_host
    blocks_bytes = prefix_host.num_blocks_used * memory.block_bytes
    assert stats.prefix_host_bytes == prefix_host.num_records_used * memory.snapshot_bytes + blocks_bytes > 0
    assert 0 < stats.prefix_host_bytes <= engine.runner.moves.host_bytes


def test_without_the_cache_nothing_is_copied_and_nothing_kept(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, mtp_step=0, prefix_cache=False)
    for _ in range(2):
        check(checkpoint, PROMPT, "sampled", engine.generate([PROMPT], SAMPLED)[0])
    stats = engine.stats()
    assert (stats.prefix_lookups, stats.prefix_bytes, engine.runner.memory.num_snapshots) == (0, 0, 0)
    with pytest.raises(ValueError, match="source must be in an allocated tier, got 'snapshot'"):
        engine.runner.moves.carry_out(
            StepPlan(0, "move", moves=(Copy(0, Location("snapshot", 0), Location("slot", 1)),))
        )


def test_the_plan_counts_what_snapshots_take(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, mtp_step=3)
    taken, memory = engine.runner.moves.snapshots.nbytes, engine.runner.memory
    assert taken == memory.num_snapshots * memory.snapshot_bytes > 0
    engine.generate([PROMPT], SAMPLED)
    kept = 3 * memory.snapshot_bytes + 12 * memory.block_bytes
    assert engine.stats().prefix_bytes == kept


def test_a_prefix_cache_takes_what_it_is_given(checkpoint: Path) -> None:
    each = engine_of(checkpoint, 0).runner.memory.snapshot_bytes
    engine = make_engine(checkpoint, mtp_step=0, prefix_cache_gb=3.5 * each / 2**30)
    assert engine.runner.memory.num_snapshots == 3
    with pytest.raises(
        ValueError, match=r"prefix_cache_gb must hold a state snapshot of .* MiB, got 0\.0 MiB;"
    ):
        make_engine(checkpoint, mtp_step=0, prefix_cache_gb=1e-9)


@pytest.mark.parametrize("prefill_chunk", [128, 512])
def test_chunks_of_any_length_and_hits_between_them_change_no_token(
    checkpoint: Path, prefill_chunk: int
) -> None:
    """`alone` has chunks of 64 tokens; here they are longer, and what comes again resumes within one."""
    engine = engine_of(checkpoint, 3, 1, prefill_chunk=prefill_chunk)
    prompts = [PROMPT, PROMPT, PROMPT[:150] + prompt_of(30, 7, VOCAB), PROMPT[:130], PROMPT]
    for name in PARAMS:
        cached = []
        for prompt in prompts:
            output = engine.generate([prompt], PARAMS[name])[0]
            check(checkpoint, prompt, name, output)
            cached.append(output.metrics.cached_tokens)
        assert cached[1] == cached[-1] == 192
        engine.scheduler.check_integrity()
