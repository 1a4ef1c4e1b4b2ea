"""The public API: streaming, generate, abort, stops, admission, and every refusal's message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiled_mtp.cache.kv_cache import resolve_kv_dtype
from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.ops.fp8 import dequantize, quantize_weight
from compiled_mtp.request import SamplingParams
from tests import tiny
from tests.checkpoints import write_checkpoint
from tests.engines import collect, force_drafts, make_engine, prompt_of, run_to_end

VOCAB = 512
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engine")
    write_checkpoint(directory, tokenizer=True)
    return directory


@pytest.fixture(scope="module")
def stream(checkpoint: Path) -> list[int]:
    """The greedy tokens of the prompt most tests use."""
    engine = make_engine(checkpoint, mtp_step=0)
    return engine.generate([prompt_of(20, 1, VOCAB)], GREEDY)[0].new_token_ids


@pytest.fixture
def engine(checkpoint: Path) -> Engine:
    return make_engine(checkpoint, mtp_step=3)


def test_step_streams_what_generate_returns(checkpoint: Path) -> None:
    streamed = make_engine(checkpoint)
    ids = [streamed.add_request("def quicksort(items):", GREEDY), streamed.add_request("return", GREEDY)]
    tokens: dict[str, list[int]] = {}
    text = dict.fromkeys(ids, "")
    last = {}
    while streamed.has_unfinished_requests():
        outputs = streamed.step()
        collect(tokens, outputs)
        for output in outputs:
            text[output.request_id] += output.new_text
            last[output.request_id] = output
    whole = make_engine(checkpoint).generate(["def quicksort(items):", "return"], GREEDY)
    assert [tokens[i] for i in ids] == [output.new_token_ids for output in whole]
    assert [text[i] for i in ids] == [output.new_text for output in whole]
    assert [last[i].finish_reason for i in ids] == ["length", "length"]
    metrics = last[ids[0]].metrics
    assert metrics.output_tokens == 12
    assert metrics.rounds >= 3
    assert metrics.time_to_first_token_s is not None
    assert 0 < metrics.time_to_first_token_s < metrics.total_s


def test_a_request_without_a_seed_reports_the_one_it_drew_and_it_reproduces(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, ignore_eos=True)
    first = make_engine(checkpoint).generate(["x = "], params)[0]
    again = params.model_copy(update={"seed": first.metrics.seed})
    assert make_engine(checkpoint).generate(["x = "], again)[0].new_token_ids == first.new_token_ids
    other = make_engine(checkpoint).generate(["x = "], params)[0]
    assert other.metrics.seed != first.metrics.seed


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_a_stop_inside_an_accepted_window_cuts_everything_together(
    checkpoint: Path, stream: list[int], num_right: int
) -> None:
    position = next(i for i in range(4, 12) if stream[i] not in stream[:i])
    engine = make_engine(checkpoint, mtp_step=3)
    force_drafts(engine, {"a": stream, "b": stream}, lambda name, pos: num_right)
    stops = SamplingParams(
        max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(stream[position],)
    )
    engine.add_request(prompt_token_ids=prompt_of(20, 1, VOCAB), params=stops, request_id="a")
    engine.add_request(prompt_token_ids=prompt_of(20, 1, VOCAB), params=GREEDY, request_id="b")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    tokens: dict[str, list[int]] = {}
    collect(tokens, outputs)
    assert tokens == {"a": stream[: position + 1], "b": stream}
    last = {output.request_id: output for output in outputs}
    assert last["a"].finish_reason == "stop"
    assert last["a"].metrics.output_tokens == position + 1
    assert engine.stats().blocks_used == 0


def test_abort_in_every_state_leaves_the_others_alone(checkpoint: Path, stream: list[int]) -> None:
    for abort_after in range(6):
        engine = make_engine(checkpoint, mtp_step=3, max_batch=2, max_in_flight=1)
        engine.add_request(prompt_token_ids=prompt_of(20, 1, VOCAB), params=GREEDY, request_id="stays")
        engine.add_request(prompt_token_ids=prompt_of(100, 2, VOCAB), params=GREEDY, request_id="goes")
        engine.add_request(prompt_token_ids=prompt_of(20, 1, VOCAB), params=GREEDY, request_id="waits")
        tokens: dict[str, list[int]] = {}
        for _ in range(abort_after):
            collect(tokens, engine.step())
        engine.abort("goes")
        reasons = {}
        while engine.has_unfinished_requests():
            outputs = engine.step()
            collect(tokens, outputs)
            reasons |= {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
        assert reasons["goes"] == "abort"
        assert tokens["stays"] == tokens["waits"] == stream
        assert engine.stats().blocks_used == 0


def test_requests_wait_for_blocks_and_all_finish(checkpoint: Path, stream: list[int]) -> None:
    # 33 usable blocks of 16: one request of 512 positions fits, or several short ones together.
    engine = make_engine(checkpoint, mtp_step=3, num_blocks=34)
    long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    engine.add_request(prompt_token_ids=prompt_of(20, 1, VOCAB), params=long, request_id="long")
    for index in range(10):
        engine.add_request(prompt_token_ids=prompt_of(20, 1, VOCAB), params=GREEDY, request_id=str(index))
    tokens = run_to_end(engine)
    assert len(tokens["long"]) == 400
    assert tokens["long"][:12] == stream
    assert all(tokens[str(index)] == stream for index in range(10))


def test_a_request_ends_at_max_model_len(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    ends = []
    for mtp_step in (0, 3):
        engine = make_engine(checkpoint, mtp_step=mtp_step, max_model_len=64)
        ends.append(engine.generate([prompt_of(50, 3, VOCAB)], params)[0])
    assert len(ends[0].new_token_ids) == 14
    assert ends[0].finish_reason == "length"
    assert ends[0].new_token_ids == ends[1].new_token_ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "prompt, prompt_token_ids and messages must be given exactly once, got []"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "exactly once, got ['prompt', 'prompt_token_ids']"),
        ({"prompt": ""}, "prompt must have at least one token"),
        ({"prompt_token_ids": []}, "prompt must have at least one token"),
        ({"prompt_token_ids": [1, 512]}, "prompt_token_ids must lie in 0..511, got 512"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids must lie in 0..511, got -1"),
        ({"prompt_token_ids": [1] * 512}, "prompt must be shorter than max_model_len=512 tokens, got 512"),
        ({"prompt": "a", "request_id": "taken"}, "request_id must be unused, got 'taken'"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "chat template"),
        (
            {"prompt": "a", "params": SamplingParams(stop_token_ids=(600,))},
            "stop_token_ids must lie in 0..511, got 600",
        ),
    ],
)
def test_bad_requests_are_refused_by_name_and_the_others_go_on(
    engine: Engine, stream: list[int], arguments: dict[str, object], message: str
) -> None:
    engine.add_request(prompt_token_ids=prompt_of(20, 1, VOCAB), params=GREEDY, request_id="taken")
    engine.step()
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the text is compared below)
        engine.add_request(**arguments)  # type: ignore[arg-type]
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert run_to_end(engine)["taken"][-11:] == stream[-11:]


def test_generate_queues_nothing_when_one_prompt_is_bad(engine: Engine) -> None:
    with pytest.raises(ValueError, match="prompt must have at least one token"):
        engine.generate(["fine", ""], GREEDY)
    run_to_end(engine)
    assert engine.stats().output_tokens == 0
    for ids in ([1, 2], (1, 2), range(1, 3)):
        with pytest.raises(
            ValueError,
            match=r"^prompts must be a list of prompts, got ids: \[1, 2\]; write \[\[1, 2\]\] for one",
        ):
            engine.generate(ids, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^prompts\[1\]: prompt must be text, ids or a chat, got 2; give a list for each"
    ):
        engine.generate(["a", 2], GREEDY)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"^prompt_token_ids must be a list of ids, got 5; write \[5\]"):
        engine.add_request(prompt_token_ids=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="params must be one or as many as prompts, got 1 for 2"):
        engine.generate(["a", "b"], [GREEDY])


def test_an_unknown_request_cannot_be_aborted(engine: Engine) -> None:
    with pytest.raises(ValueError, match="request_id must"):
        engine.abort("unknown")


def test_a_checkpoint_without_an_mtp_head_decodes_plainly_and_says_so(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, mtp=False)
    with pytest.raises(ValueError, match=r"mtp_step must be 0 for a checkpoint without mtp"):
        Engine(EngineConfig(model=tmp_path, device="cpu", mtp_step=3))
    engine = make_engine(tmp_path, mtp_step=0)
    assert len(engine.generate([[1, 2, 3]], GREEDY)[0].new_token_ids) == 12
    with pytest.raises(ValueError, match=r"prompt must be token ids, got text; .* has no tokenizer\.json"):
        engine.add_request("text")


def test_a_missing_device_is_named(checkpoint: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match="device must be available, got cuda"):
        Engine(EngineConfig(model=checkpoint, device="cuda"))


def test_nan_in_one_request_ends_it_alone(checkpoint: Path, stream: list[int]) -> None:
    """A request whose state becomes NaN ends with an error that names the position; its neighbour goes on."""
    engine = make_engine(checkpoint, mtp_step=3)
    engine.add_request(prompt_token_ids=prompt_of(30, 9, VOCAB), params=GREEDY, request_id="broken")
    engine.add_request(prompt_token_ids=prompt_of(20, 1, VOCAB), params=GREEDY, request_id="sound")
    tokens: dict[str, list[int]] = {}
    while len(tokens.get("sound", ())) < 2:
        collect(tokens, engine.step())
    slot = next(s for s, r in engine.scheduler.running.items() if r.request_id == "broken")
    for layer in engine.runner.step.state_cache.layers:
        layer.state[slot] = float("nan")
    before, last = len(tokens["broken"]), {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        collect(tokens, outputs)
        last |= {output.request_id: output for output in outputs if output.finish_reason is not None}
    assert tokens["sound"] == stream
    assert last["sound"].finish_reason == "length"
    assert len(tokens["broken"]) == before
    assert last["broken"].finish_reason == "error"
    assert f"for position {30 + before}; look for such numbers" in str(last["broken"].error)


def test_an_fp8_cache_gives_the_same_tokens_over_depths_and_batches(checkpoint: Path) -> None:
    lengths = (1, 20, 63, 130, 16)
    params = [
        SamplingParams(max_tokens=20, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(5)
    ]
    streams: list[dict[str, list[int]]] = []
    for mtp_step, batch in ((0, 1), (0, 5), (1, 3), (3, 1), (3, 5)):
        engine = make_engine(checkpoint, mtp_step=mtp_step, max_batch=batch, kv_dtype="float8_e4m3fn")
        assert engine.runner.step.kv_cache.layers[0].kv.dtype == torch.float8_e4m3fn
        if mtp_step:
            force_drafts(engine, streams[0], lambda name, pos: pos % 4)
        for index, length in enumerate(lengths):
            engine.add_request(
                prompt_token_ids=prompt_of(length, index, VOCAB), params=params[index], request_id=str(index)
            )
        streams.append(run_to_end(engine))
    assert all(stream == streams[0] for stream in streams[1:])


@torch.no_grad()
def test_an_fp8_cache_changes_logits_little_and_halves_its_bytes(checkpoint: Path) -> None:
    logits, bytes_a_token = [], []
    for kv_dtype in ("auto", "float8_e4m3fn"):
        engine = make_engine(checkpoint, mtp_step=0, kv_dtype=kv_dtype, dtype="bfloat16", num_blocks=34)
        cache = engine.runner.step.kv_cache
        bytes_a_token.append(sum(buffer.nbytes for buffer in cache.buffers()) / (34 * 16))
        engine = make_engine(checkpoint, mtp_step=0, kv_dtype=kv_dtype)
        step = engine.runner.step
        tiny.install(step, 1, tuple((1, i, i + 1) for i in range(step.slots.block_table.shape[1])))
        rows = tiny.prefill_rows(step, 1, 0, 200)
        tokens = torch.tensor(prompt_of(200, 1, VOCAB))
        hidden = step.target(tokens, rows, step.kv_cache, step.state_cache, step.cos_sin)
        logits.append(step.target.logits(hidden))
    # Keys and values of 256 dims and two scales, one KV head.
    assert bytes_a_token == [2 * 256 * 2, 2 * (256 + 4)]
    # Measured on logits of scale 4.6: 0.039 root mean square, 0.3 at most; 0.062 and 1.6 for Qwen3-Next,
    # whose router may choose another expert; 0.024 and 0.19 for the default checkpoint (scale 3.2).
    error = (logits[0] - logits[1]).abs()
    print(f"mean square {float(error.square().mean().sqrt()):.3f}, at most {float(error.max()):.3f}")
    assert 0 < float(error.square().mean().sqrt()) < 0.08
    assert float(error.max()) < 0.6


def test_an_fp8_cache_is_refused_where_kernels_cannot_read_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    cuda = torch.device("cuda", 0)
    assert resolve_kv_dtype("auto", torch.bfloat16, cuda) == torch.bfloat16
    with pytest.raises(
        ValueError,
        match=r"kv_dtype must be auto below compute capability 8\.9, got float8_e4m3fn on 8\.6; use",
    ):
        resolve_kv_dtype("float8_e4m3fn", torch.bfloat16, cuda)
    # The engine checks before it reads weights or plans memory.
    monkeypatch.setattr("compiled_mtp.runner.spec.resolve_device", lambda name: cuda)
    with pytest.raises(ValueError, match="kv_dtype must be auto below"):
        Engine(EngineConfig(model=checkpoint, kv_dtype="float8_e4m3fn"))


def test_a_graph_cache_is_made_for_one_kv_dtype(checkpoint: Path) -> None:
    keys = [
        make_engine(checkpoint, mtp_step=0, kv_dtype=d, num_blocks=34).runner.cache_key()
        for d in ("auto", "float8_e4m3fn")
    ]
    assert {name for name in keys[0] if keys[0][name] != keys[1][name]} == {"kv_dtype"}


def test_a_cut_draft_vocabulary_changes_no_token(checkpoint: Path, stream: list[int]) -> None:
    engine = make_engine(checkpoint, mtp_step=3, draft_vocab=100)
    step = engine.runner.step
    assert step.draft_head is not None
    assert step.draft_head.shape[0] >= 100
    drafted: set[int] = set()
    engine.add_request(prompt_token_ids=prompt_of(20, 1, VOCAB), params=GREEDY, request_id="a")
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        collect(tokens, engine.step())
        drafted |= set(step.slots.drafts[1:].flatten().tolist())
    assert tokens["a"] == stream
    assert all(i < 100 or i in engine.model_config.eos_token_ids or i == 13 for i in drafted)
    assert len(drafted) > 5


def test_a_ranked_draft_head_in_fp8_changes_no_token(
    checkpoint: Path, stream: list[int], tmp_path: Path
) -> None:
    ranked = tmp_path / "ids.txt"
    ranked.write_text("\n".join(map(str, range(199, 20, -2))), encoding="utf-8")
    engine = make_engine(checkpoint, mtp_step=3, draft_vocab=ranked, draft_dtype="float8_e4m3fn")
    step, eos_ids = engine.runner.step, engine.model_config.eos_token_ids
    assert step.draft_head is not None
    assert step.draft_ids is not None
    # Rounded: a CPU multiplies FP8 out.
    rows = step.target.head_weight[step.draft_ids]
    assert torch.equal(step.draft_head, dequantize(*quantize_weight(rows)))
    named = {*range(21, 200, 2), *eos_ids}
    assert step.draft_ids.tolist() == sorted(named)
    drafted: set[int] = set()
    params = [GREEDY, GREEDY.model_copy(update={"temperature": 0.8, "seed": 3})]
    for name, chosen in zip("ab", params, strict=True):
        engine.add_request(prompt_token_ids=prompt_of(20, 1, VOCAB), params=chosen, request_id=name)
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        collect(tokens, engine.step())
        drafted |= set(step.slots.drafts[1:].flatten().tolist())
    assert tokens["a"] == stream
    plain = make_engine(checkpoint, mtp_step=0)
    assert plain.generate([prompt_of(20, 1, VOCAB)], params[1])[0].new_token_ids == tokens["b"]
    # Slots hold 13 until they hold a draft.
    assert drafted <= named | {0, 13}
    assert len(drafted) > 5


def test_progress_reports_weights_and_prompts_longer_than_a_chunk(checkpoint: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    config = EngineConfig(model=checkpoint, device="cpu", mtp_step=0, prefill_chunk=64, max_model_len=512)
    engine = Engine(config, progress=lambda *what: seen.append(what))
    assert seen[-1][0] == "weights"
    assert seen[-1][1] == seen[-1][2]
    seen.clear()
    engine.generate([prompt_of(150, 1, VOCAB), prompt_of(20, 1, VOCAB)], GREEDY)
    prefill = [("prefill", 64, 150), ("prefill", 128, 150), ("prefill", 150, 150)]
    # The two prompts share the last launch.
    assert seen == [*prefill, ("requests", 2, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_callers_default_dtype_has_no_effect(
    checkpoint: Path, stream: list[int], dtype: torch.dtype
) -> None:
    torch.set_default_dtype(dtype)
    try:
        engine = make_engine(checkpoint, mtp_step=3)
        (output,) = engine.generate([prompt_of(20, 1, VOCAB)], GREEDY)
    finally:
        torch.set_default_dtype(torch.float32)
    assert output.new_token_ids == stream
