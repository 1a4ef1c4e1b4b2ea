"""No token depends on the number of ranks, and neither does a bit of its log probability."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.cache.copy_stream import CopyStream
from compiled_mtp.engine import Engine
from compiled_mtp.models.row_unit import weights_of
from compiled_mtp.ops.packed_weight import find_packed
from compiled_mtp.request import SamplingParams
from compiled_mtp.runner import memory
from tests.checkpoints import FAMILIES, FP8_FAMILIES, write_checkpoint
from tests.communicators.threads import ThreadCommunicator, ThreadRunner, engine_of
from tests.engines import prompt_of
from tests.gguf.test_tensors import mixture
from tests.gguf_files import write_gguf

SIZES: dict[str, Any] = {"num_q_heads": 4, "num_value_heads": 4}
# Checkpoint, dtype, further engine options, and numbers of ranks.
CASES = [
    ("dense-r4", "bfloat16", {"draft_vocab": 200}, (2, 4)),
    ("dense-r1-tied", "float32", {"kv_dtype": "float8_e4m3fn"}, (2, 4)),
    ("next-fp8", "float32", {"weight_recipe": "w8a16"}, (2,)),
    ("moe-mixed", "bfloat16", {}, (2,)),
    ("next-w8a8", "bfloat16", {"draft_dtype": "float8_e4m3fn"}, (2,)),
    ("dense-w8a8", "bfloat16", {}, (4,)),
    ("moe-w8a8", "float32", {}, (2,)),
]
# Sizes of which ranks hold whole blocks and groups; rows are quantised in groups of 128.
W8A8_SIZES: dict[str, dict[str, Any]] = {
    "next-w8a8": {"moe_intermediate_size": 256},
    "dense-w8a8": {"intermediate_size": 512, "num_value_heads": 4},
    "moe-w8a8": {"moe_intermediate_size": 256},
}
LENGTHS = (70, 5, 33)


def write(directory: Path, name: str) -> Path:
    if name in W8A8_SIZES:
        options = dict(FP8_FAMILIES)[name.removesuffix("-w8a8")] | W8A8_SIZES[name]
    else:
        options = dict(FAMILIES)[name]
    heads = SIZES | ({"num_key_heads": 4} if name == "dense-r1-tied" else {})
    return write_checkpoint(directory / name, **(options | heads))


def decode(
    engine: Engine, lengths: tuple[int, ...] = LENGTHS, max_tokens: int = 9
) -> list[tuple[list[int], Any]]:
    """Return tokens and log probabilities of requests that run together; only the shortest prompt's has the
    latter."""
    prompts = [prompt_of(length, length, 512) for length in lengths]
    params = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if length == 33 else 0.8,
            seed=length,
            ignore_eos=True,
            logprobs=2 if length == 5 else None,
        )
        for length in lengths
    ]
    return [(output.new_token_ids, output.logprobs) for output in engine.generate(prompts, params)]


@pytest.mark.parametrize(("name", "dtype", "options", "worlds"), CASES, ids=[case[0] for case in CASES])
def test_ranks_decode_like_one_rank(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    dtype: str,
    options: dict[str, Any],
    worlds: tuple[int, ...],
) -> None:
    monkeypatch.setattr("compiled_mtp.ops.packed_weight.LEAST_ELEMENTS", 1)
    directory = write(tmp_path, name)
    with engine_of(directory, 1, dtype=dtype, **options) as engine:
        wanted = decode(engine)
        kept = engine.runner.step.target.layers[0].ffn
        assert kept.quantizes_rows == name.endswith("w8a8")
    for world in worlds:
        with engine_of(directory, world, dtype=dtype, **options) as engine:
            assert decode(engine) == wanted, world
            # Alone, and resuming from the first run's prefix.
            assert decode(engine, LENGTHS[:1]) == wanted[:1], world
            assert engine.stats().prefix_hits > 0
            runner = engine.runner
            assert isinstance(runner, ThreadRunner)
        # Closed, so that no thread of it is still at work.
        own = runner.step.slots
        assert own.drafts.any()
        if name == "dense-r1-tied" and "fbgemm" in torch.backends.quantized.supported_engines:
            for one in (runner, *runner.followers):
                target = one.step.target
                assert all(find_packed(weight) is not None for weight in weights_of(target.modules()))
                assert find_packed(target.head_weight) is not None
        for follower in runner.followers:
            for held in ("drafts", "last_token", "pos", "last_hidden"):
                assert getattr(own, held).equal(getattr(follower.step.slots, held)), held
    if name in ("dense-r4", "moe-mixed", "moe-w8a8"):
        without_drafts = {**options, "mtp_step": 0, "draft_vocab": None}
        with engine_of(directory, 2, dtype=dtype, **without_drafts) as engine:
            assert decode(engine) == wanted


@pytest.mark.parametrize("name", ["dense-r4", "next-r2", "moe-mixed"])
def test_a_bfloat16_gguf_file_on_ranks_gives_the_tokens_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path, name)
    path = write_gguf(directory, tmp_path / "model.gguf")
    with engine_of(directory, 1) as engine:
        wanted = [tokens for tokens, _ in decode(engine)]
    found = []
    for world in (1, 2, 4):
        with engine_of(path, world) as engine:
            found.append(decode(engine))
        # Log probabilities differ by a rounding: the file has -exp(A_log), in float32.
        assert [tokens for tokens, _ in found[-1]] == wanted, world
    assert found[1:] == found[:-1]


@pytest.mark.parametrize("name", ["dense-r4", "next-r2", "moe-mixed"])
def test_a_file_of_k_quants_gives_the_same_tokens_on_ranks(tmp_path: Path, name: str) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 4}
    directory = write_checkpoint(tmp_path / name, **(dict(FAMILIES)[name] | SIZES | wide))
    path = write_gguf(directory, tmp_path / "model.gguf", mixture)
    found = []
    for world in (1, 2, 4):
        with engine_of(path, world) as engine:
            found.append(decode(engine))
    assert found[1:] == found[:-1]


@pytest.mark.parametrize(("name", "world"), [("dense-r4", 4), ("next-w8a8", 2), ("moe-mixed", 2)])
def test_eight_requests_on_ranks_decode_like_each_on_one_rank(tmp_path: Path, name: str, world: int) -> None:
    directory = write(tmp_path, name)
    lengths = (70, 5, 33, 21, 64, 8, 47, 16)
    options = {"dtype": "bfloat16", "max_batch": 8, "num_blocks": 80}
    with engine_of(directory, 1, mtp_step=0, **options) as engine:
        wanted = [decode(engine, (length,), 6)[0] for length in lengths]
    with engine_of(directory, world, **options) as engine:
        assert decode(engine, lengths, 6) == wanted


@pytest.mark.parametrize("name", ["dense-r4", "next-fp8", "moe-mixed", "dense-w8a8", "moe-w8a8"])
def test_prompts_may_have_other_shards_than_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As on GPUs, where a prompt's sums before a norm have no K splits: a rank has rows of the weight and all
    of x."""
    directory, options = write(tmp_path, name), {"dtype": "bfloat16"}
    if name == "next-fp8":
        options["weight_recipe"] = "w8a16"
    with engine_of(directory, 1, **options) as engine:
        wanted = decode(engine)
    monkeypatch.setattr(ThreadCommunicator, "keeps_prompt_rows", True)
    with engine_of(directory, 2, **options) as engine:
        held = dict(engine.runner.step.named_parameters())
        names = [name for name in held if name.endswith("o_proj.prompt_weight")]
        assert names
        for name in names:
            columns = held[name.replace("prompt_weight", "weight")]
            assert held[name].shape == (columns.shape[0] // 2, columns.shape[1] * 2)
        # The down of experts is cut like this for rounds too.
        assert not any(name.endswith("ffn.prompt_down") for name in held)
        hidden = engine.model_config.hidden_size
        assert all(held[name].shape[1] == hidden // 2 for name in held if name.endswith("ffn.down"))
        assert decode(engine) == wanted


def test_ranks_move_requests_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks suffice for three prompts, not for their tokens: some requests move to host memory on every
    rank.

    Rank 0 plans by its own copies. On a GPU another rank's copies may end later, so its launches wait for
    them.
    """
    directory, lengths = write(tmp_path, "dense-r1-tied"), (17, 18, 20)
    with engine_of(directory, 1) as engine:
        wanted = decode(engine, lengths, 36)
        assert engine.stats().offloads == 0
    shares, plan = [], memory.plan_memory

    def note(*sizes: Any, **given: Any) -> Any:
        shares.append(given["prefix_cache_bytes"])
        return plan(*sizes, **given)

    monkeypatch.setattr(memory, "plan_memory", note)
    held: list[CopyStream] = []
    monkeypatch.setattr(CopyStream, "hold_launches", lambda copy_stream: held.append(copy_stream))
    with engine_of(directory, 2, num_blocks=7, prefix_cache_gb=0.5, lookup="off") as engine:
        engine.scheduler._planner.admission.tokens_ahead = 0
        assert decode(engine, lengths, 36) == wanted
        offloads = engine.stats().offloads
        runner = engine.runner
        assert isinstance(runner, ThreadRunner)
    assert offloads > 0
    # Each rank gets half of prefix_cache_gb.
    assert shares == [1 << 28] * 2
    assert runner.moves._copy_streams["host"] not in held
    # To the host and back.
    assert held.count(runner.followers[0].moves._copy_streams["host"]) >= 2 * offloads
