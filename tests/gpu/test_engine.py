"""The contract on a GPU: the same tokens for depths, batches, drafts and graph modes; equal hidden states.

Hidden states are equal bit for bit.
"""

from __future__ import annotations

import random
import subprocess
import sys
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.graphs.compile import compile_program, compiler_settings, mark_static
from compiled_mtp.request import SamplingParams
from compiled_mtp.rounds.first_token import rows_at
from compiled_mtp.step import Step
from tests import tiny
from tests.checkpoints import write_checkpoint
from tests.drivers import Driver, make_runner, with_rounds
from tests.engines import collect, force_drafts, free_drafts, make_engine, prompt_of, run_to_end

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "compiled_mtp" / "default_model"
COUNT = 40
COMPILED_BATCHES = (1, 3, 8)
# Eight requests of 512 tokens in blocks of 64, and the padding's block.
COMPILED_BLOCKS = 65
TEXTS = (
    "def quicksort(items):\n",
    "import os\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "    for index in range(10):\n        print(",
    '"""A module."""\n\nfrom collections import deque\n\n\ndef main():\n',
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {"default": DEFAULT}
    for family in ("qwen3_5", "qwen3_next", "qwen3_5_moe"):
        made[family] = tmp_path_factory.mktemp(family)
        write_checkpoint(made[family], family)
    return made


def requests(engine: Engine) -> dict[str, tuple[list[int], SamplingParams]]:
    made = {}
    for index, text in enumerate(TEXTS):
        for temperature in (0.0, 0.8):
            if engine.tokenizer is not None:
                ids = engine.tokenizer.encode(text)
            else:
                ids = prompt_of(1 + 37 * index, index, engine.model_config.vocab_size)
            params = SamplingParams(max_tokens=COUNT, temperature=temperature, seed=index, ignore_eos=True)
            made[f"{index}-{temperature}"] = (ids, params)
    return made


def gpu_engine(directory: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"device": "cuda", "prefill_chunk": 128, "block_size": 64}
    return make_engine(directory, **(defaults | options))


@cache
def plain_streams(directory: Path, dtype: str, compile: str) -> dict[str, list[int]]:
    engine = gpu_engine(directory, mtp_step=0, max_batch=1, dtype=dtype, compile=compile, graph_mode="off")
    for name, (prompt, params) in requests(engine).items():
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=name)
    return run_to_end(engine)


def decode_mixed(engine: Engine, seed: int, batch: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    waiting = list(requests(engine).items())
    rng.shuffle(waiting)
    tokens: dict[str, list[int]] = {}
    while waiting or engine.has_unfinished_requests():
        stats = engine.stats()
        while waiting and stats.running + stats.waiting < batch and rng.random() < 0.5:
            name, (prompt, params) = waiting.pop()
            engine.add_request(prompt_token_ids=prompt, params=params, request_id=name)
            stats = engine.stats()
        collect(tokens, engine.step())
    assert engine.stats().blocks_used == 0
    return tokens


@pytest.mark.parametrize("name", ["default", "qwen3_5", "qwen3_next", "qwen3_5_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_same_tokens_uncompiled(directories: dict[str, Path], name: str, dtype: str) -> None:
    """With graphs of uncompiled code; the expected tokens come from separate kernel launches."""
    directory = directories[name]
    expected = plain_streams(directory, dtype, "off")
    for mtp_step, batch, drafts in ((1, 3, "random"), (3, 1, "own"), (3, 8, "random"), (7, 8, "right")):
        engine = gpu_engine(directory, mtp_step=mtp_step, dtype=dtype, compile="off")
        if drafts != "own":
            rng = random.Random(batch)
            least = mtp_step if drafts == "right" else 0
            force_drafts(engine, expected, lambda name, pos, r=rng, lo=least, s=mtp_step: r.randint(lo, s))
        assert decode_mixed(engine, mtp_step, batch) == expected


@cache
def compiled_engine(directory: Path, mtp_step: int, dtype: str, graph_mode: str) -> Engine:
    """One engine compiles every batch that the tests need: compiling takes most of their time."""
    return gpu_engine(
        directory,
        mtp_step=mtp_step,
        dtype=dtype,
        graph_mode=graph_mode,
        batch_sizes=COMPILED_BATCHES,
        num_blocks=COMPILED_BLOCKS,
    )


@cache
def compiled_streams(directory: Path, dtype: str) -> dict[str, list[int]]:
    """The tokens of each request alone, one token at a time, in compiled code."""
    engine = compiled_engine(directory, 0, dtype, "replay")
    tokens: dict[str, list[int]] = {}
    with torch.compiler.set_stance("fail_on_recompile"):
        for name, (prompt, params) in requests(engine).items():
            engine.add_request(prompt_token_ids=prompt, params=params, request_id=name)
            tokens |= run_to_end(engine)
    return tokens


@pytest.mark.parametrize(
    ("name", "dtype", "graph_mode", "mtp_step"),
    [
        ("default", "bfloat16", "replay", 0),
        ("default", "bfloat16", "replay", 1),
        ("default", "bfloat16", "replay", 3),
        ("default", "bfloat16", "replay", 7),
        ("default", "bfloat16", "reduce-overhead", 0),
        ("default", "bfloat16", "reduce-overhead", 3),
        ("default", "bfloat16", "reduce-overhead", 7),
        ("qwen3_5_moe", "bfloat16", "replay", 3),
        ("qwen3_5_moe", "bfloat16", "reduce-overhead", 3),
        ("qwen3_5", "float32", "replay", 3),
    ],
)
def test_same_tokens_compiled(
    directories: dict[str, Path], name: str, dtype: str, graph_mode: str, mtp_step: int
) -> None:
    """Batches grow and shrink through all buckets; drafts are the model's own, right, wrong and mixed."""
    expected = compiled_streams(directories[name], dtype)
    engine = compiled_engine(directories[name], mtp_step, dtype, graph_mode)
    if dtype == "float32":
        # In bfloat16 the padding of a compiled prefill may change a prompt's last bit, in both engines alike.
        assert expected == plain_streams(directories[name], dtype, "off")
    rng = random.Random(mtp_step)
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in COMPILED_BATCHES:
            assert decode_mixed(engine, batch, batch) == expected
        ranges = ((mtp_step, mtp_step), (0, 0), (0, mtp_step)) if mtp_step else ()
        for least, most in ranges:
            force_drafts(engine, expected, lambda name, pos, low=least, high=most: rng.randint(low, high))
            try:
                assert decode_mixed(engine, most, max(COMPILED_BATCHES)) == expected
            finally:
                free_drafts(engine)


@pytest.mark.parametrize("graph_mode", ["replay", "reduce-overhead"])
def test_log_probabilities_of_prompts_and_outputs_compiled(graph_mode: str) -> None:
    """Equal to the bit to each request alone without drafts, beside requests that do not ask."""
    prompts = [prompt_of(length, length, 4096) for length in (1, 65, 128, 300)]
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True, prompt_logprobs=5, logprobs=2)
    silent = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    plain = compiled_engine(DEFAULT, 0, "bfloat16", "replay")
    drafting = compiled_engine(DEFAULT, 3, "bfloat16", graph_mode)
    with torch.compiler.set_stance("fail_on_recompile"):
        alone = [plain.generate([prompt], params)[0] for prompt in prompts]
        together = drafting.generate([*prompts, *prompts], [params] * 4 + [silent] * 4)
    for prompt, one, other, without in zip(prompts, alone, together, together[4:], strict=False):
        assert one.prompt_logprobs is not None
        assert [entry.token_id for entry in one.prompt_logprobs] == prompt[1:]
        assert one.prompt_logprobs == other.prompt_logprobs
        assert one.logprobs == other.logprobs
        assert one.new_token_ids == other.new_token_ids == without.new_token_ids


def test_auto_chooses_trees_for_a_large_model_and_a_caches_own_mode(tmp_path: Path) -> None:
    """From 1 GiB of weights on; a graph cache, which cannot hold trees, is replayed."""
    model, file = tmp_path / "large", tmp_path / "large.graphs"
    write_checkpoint(model, hidden_size=2048, intermediate_size=24576)
    options = {"mtp_step": 3, "max_batch": 3, "num_blocks": 25, "max_model_len": 512}
    options |= {"prefill_chunk": 128, "block_size": 64}
    command = [sys.executable, str(ROOT / "tools" / "export_graphs.py"), "--device=cuda", f"--model={model}"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    exported = subprocess.Popen([*command, "--batch-sizes=1,3", f"--output={file}"])
    streams = []
    for graph_mode in ("reduce-overhead", "replay"):
        cached: dict[str, Any] = {"graph_cache": file} if graph_mode == "replay" else {}
        if cached:
            assert exported.wait() == 0
        engine = gpu_engine(model, **options, batch_sizes=(1, 3), **cached)
        assert engine.runner.programs.graph_mode == graph_mode
        with torch.compiler.set_stance("fail_on_recompile"):
            streams.append([decode_mixed(engine, batch, batch) for batch in (1, 3)])
        engine.close()
    assert streams[0] == streams[1]
    assert streams[0][0] == streams[0][1]


def verify(step: Step, state_index: torch.Tensor) -> torch.Tensor:
    """Return the hidden states of a decode round, before its commit."""
    index, query_len = state_index.to(torch.int64), step.mtp_step + 1
    pos, last_token = step.slots.pos[index], step.slots.last_token[index][:, None]
    tokens = torch.cat((last_token, step.slots.drafts[index][:, : step.mtp_step]), dim=1).flatten()
    rows = rows_at(step, state_index, index, pos, query_len, step.slots.base[index])
    return step.target(tokens, rows, step.kv_cache, step.state_cache, step.cos_sin)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compiled_hidden_states_are_bit_equal_between_buckets(dtype: str) -> None:
    """Between every pair of compiled buckets; compiled code agrees with uncompiled code."""
    engine = gpu_engine(DEFAULT, mtp_step=3, dtype=dtype, compile="off", num_blocks=COMPILED_BLOCKS)
    step = engine.runner.step
    assert engine.tokenizer is not None
    tiny.install(step, 1, tuple((1, index, index + 1) for index in range(4)))
    tiny.prefill(step, 1, engine.tokenizer.encode(TEXTS[0]))
    mark_static([*step.parameters(), *step.buffers()])
    hidden = []
    with torch.no_grad(), compiler_settings():
        for groups in COMPILED_BATCHES:
            state_index = torch.tensor([1] + [0] * (groups - 1), dtype=torch.int32, device="cuda")
            program = compile_program(partial(verify, step), f"verify_{groups}", None)
            hidden.append(program(state_index)[:4])
        plain = verify(step, torch.ones(1, dtype=torch.int32, device="cuda"))
        logits, plain_logits = step.target.logits(hidden[0]), step.target.logits(plain)
    assert all(torch.equal(hidden[0], other) for other in hidden[1:])
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    torch.testing.assert_close(logits, plain_logits, rtol=tolerance, atol=tolerance)
    assert dtype == "bfloat16" or torch.equal(logits.argmax(-1), plain_logits.argmax(-1))


@pytest.mark.parametrize("mtp_step", [0, 3])
def test_hidden_states_are_bit_equal_between_buckets(directories: dict[str, Path], mtp_step: int) -> None:
    """The last token's logits decide little; the whole hidden state shows a changed bit."""
    hidden = []
    for max_batch in (1, 2, 8, 32):
        engine = Engine(
            EngineConfig(
                model=DEFAULT,
                device="cuda",
                mtp_step=mtp_step,
                max_batch=max_batch,
                compile="off",
                graph_mode="off",
            )
        )
        step = engine.runner.step
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(TEXTS[0])
        tiny.install(step, 1, tuple((1, index, index + 1) for index in range(4)))
        tiny.prefill(step, 1, ids)
        kept: list[torch.Tensor] = []

        def keep(kept: list[torch.Tensor], logits: Any, rows: torch.Tensor, *head: Any) -> Any:
            kept.append(rows.clone())
            return logits(rows, *head)

        step.target.logits = partial(keep, kept, step.target.logits)  # type: ignore[method-assign]
        step.slots.drafts[1] = 5
        tiny.decode(step, [1] + [0] * (max_batch - 1))
        hidden.append(kept[0][: mtp_step + 1])
    assert all(torch.equal(hidden[0], other) for other in hidden[1:])


def test_a_decode_step_does_not_synchronise(directories: dict[str, Path]) -> None:
    engine = gpu_engine(directories["default"], mtp_step=3, compile="off", graph_mode="off", max_batch=2)
    step = engine.runner.step
    tiny.install(step, 1, tuple((1, index, index + 1) for index in range(4)))
    tiny.prefill(step, 1, [1, 2, 3])
    index = torch.tensor([1, 0], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        step.decode(index, RoundShape(3, 3))
        torch.cuda.set_sync_debug_mode("error")
        try:
            step.decode(index, RoundShape(3, 3))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def depths_phases_and_moves(driver: Driver) -> dict[str, list[int]]:
    """Run rounds of depths 1 and 3, in one phase or two by turns, while one request goes to the host and
    back.

    After every copy comes a round of the other requests, which runs beside it.
    """
    prompts = {name: prompt_of(length, length, 512) for name, length in (("a", 20), ("b", 70), ("c", 65))}
    driver.start("a", 1, prompts["a"], chain=1)
    driver.decode("a", verify=1, chain=3)
    driver.start("b", 2, prompts["b"])
    for round_index, (verify, chain) in enumerate(((3, 3), (3, 1), (1, 3), (3, 3))):
        depth = {"shape": RoundShape(verify, chain)}
        driver.run("verify", ("a", "b"), **depth)
        if round_index == 1:
            driver.start("c", 3, prompts["c"])
        driver.run("accept", ("a", "b"), **depth)
        driver.decode("b", "a", verify=chain, chain=3)
    driver.offload("a", 0)
    driver.decode("c", "b")
    driver.bring_back("a", 0, 1)
    driver.decode("b", "c")
    driver.decode("a", "b", "c")
    driver.offload("c", 1)
    driver.decode("b", "a")
    driver.bring_back("c", 1, 3)
    driver.decode("a", "b")
    for _ in range(3):
        driver.decode("c", "a", "b")
    return driver.drain()


@pytest.mark.parametrize("max_in_flight", [0, 1])
@pytest.mark.parametrize("graph_mode", ["off", "uncompiled", "replay", "reduce-overhead"])
def test_depths_phases_and_moves(directories: dict[str, Path], graph_mode: str, max_in_flight: int) -> None:
    directory = directories["qwen3_5"]
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_in_flight": max_in_flight}
    plain = Driver(make_runner(directory, mtp_step=0, compile="off", graph_mode="off", **options))
    for slot, (name, length) in enumerate((("a", 20), ("b", 70), ("c", 65)), start=1):
        plain.start(name, slot, prompt_of(length, length, 512), chain=0)
        for _ in range(50):
            plain.decode(name, verify=0, chain=0)
    expected = plain.drain()
    modes: dict[str, dict[str, Any]] = {
        "off": {},
        "uncompiled": {"graph_mode": "replay"},
        "replay": {"is_compiled": True, "graph_mode": "replay"},
        "reduce-overhead": {"is_compiled": True, "graph_mode": "reduce-overhead"},
    }
    runner = make_runner(directory, compile="off", graph_mode="off", batch_sizes=(3,), **options)
    driver = Driver(with_rounds(runner, product((1, 3), repeat=2), **modes[graph_mode]))
    with torch.compiler.set_stance("fail_on_recompile"):
        tokens = depths_phases_and_moves(driver)
    for name, gained in tokens.items():
        assert len(gained) > 5
        assert gained == expected[name][: len(gained)]


@pytest.mark.parametrize("graph_mode", ["replay", "reduce-overhead"])
def test_phases_become_graphs_after_their_first_run(graph_mode: str) -> None:
    """Grammars and log probabilities give the tokens of uncompiled rounds, alone and in batches."""
    params = [
        SamplingParams(max_tokens=COUNT, temperature=0.8, seed=1, guided_regex="([a-z]+ = [0-9]+\n){99}"),
        SamplingParams(max_tokens=COUNT, temperature=0.8, seed=2, ignore_eos=True, logprobs=3),
        SamplingParams(max_tokens=COUNT, temperature=0.0, seed=3, ignore_eos=True),
    ]

    def decode(engine: Engine) -> list[list[int]]:
        together = engine.generate(TEXTS[:3], params)
        alone = [engine.generate([text], one)[0] for text, one in zip(TEXTS, params, strict=False)]
        tokens = [output.new_token_ids for output in together]
        assert [output.error for output in (*together, *alone)] == [None] * 6
        assert [output.new_token_ids for output in alone] == tokens
        return tokens

    expected = decode(gpu_engine(DEFAULT, mtp_step=0, dtype="bfloat16", compile="off"))
    engine = compiled_engine(DEFAULT, 3, "bfloat16", graph_mode)
    programs = engine.runner.programs
    with torch.compiler.set_stance("fail_on_recompile"):
        assert decode(engine) == expected
        assert decode(engine) == expected
    chains = [bucket for bucket in programs.buckets if bucket.shape.verify == bucket.shape.chain]
    small = [bucket for bucket in chains if bucket.groups <= 3]
    phases = {(name, bucket) for name in ("verify", "accept") for bucket in small}
    assert len(phases) == 4
    assert phases.isdisjoint(programs._uncaptured)
