"""An engine on a GGUF file gives the tokens of the checkpoint from which the file was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.engine import Engine
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.gguf.test_tensors import BLOCKS, SHAPES, mixture
from tests.gguf_files import multiplied_out, write_gguf

PROMPTS: list[Any] = [[1, 2, 3, 4, 5, 6, 7], list(range(40))]
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "max_batch": 2, "mtp_step": 2}


def tokens_of(model: Path, **options: Any) -> list[list[int]]:
    engine = Engine(model, **(SETTINGS | options))
    greedy, drawn = (
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 1.0)
    )
    outputs = [*engine.generate(PROMPTS, greedy), *engine.generate(PROMPTS, drawn)]
    assert bool(options.get("mtp_step", 2)) == (engine.runner.step.mtp_step > 0)
    return [output.new_token_ids for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["next", "dense-r1-tied", "dense-r3", "moe"])
def test_a_bfloat16_file_gives_the_tokens_of_its_checkpoint(name: str, dtype: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", hidden_size=64, intermediate_size=64, **SHAPES[name])
    path = write_gguf(source, tmp_path / "model.gguf")
    got = tokens_of(path, dtype=dtype)
    assert got == tokens_of(source, dtype=dtype)
    assert len({tuple(tokens) for tokens in got}) == len(got)


def test_a_file_of_ollama_gives_the_tokens_of_its_checkpoint(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", hidden_size=64, intermediate_size=64, **SHAPES["dense-r3"])
    assert tokens_of(write_gguf(source, tmp_path / "model.gguf", ollama=True)) == tokens_of(source)


@pytest.mark.parametrize("name", ["next", "dense-r3", "moe"])
def test_a_mixture_gives_the_tokens_of_its_values(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_checkpoint(tmp_path / "source", **BLOCKS, **SHAPES[name])
    path = write_gguf(source, tmp_path / "model.gguf", mixture, max_tensors=9)
    with caplog.at_level("INFO"):
        got = tokens_of(path)
    assert "in Q4_K" in caplog.text
    assert "MTP head: " in caplog.text
    assert got == tokens_of(multiplied_out(source, tmp_path / "plain", mixture))
    assert got == tokens_of(path, mtp_step=0)


def test_a_file_without_head_decodes_plainly_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_checkpoint(tmp_path / "source", hidden_size=64, intermediate_size=64, **SHAPES["no-head"])
    path = write_gguf(source, tmp_path / "model.gguf")
    got = tokens_of(path, mtp_step=0)
    assert got == tokens_of(source, mtp_step=0)
    Engine(path, **(SETTINGS | {"mtp_step": "auto"}))
    assert "stores no mtp.* tensors" in caplog.text
    with pytest.raises(ValueError, match="mtp_step must be 0 for a checkpoint without"):
        Engine(path, **SETTINGS)


@pytest.mark.parametrize(
    "missing", ["qwen35.attention.head_count", "qwen35.block_count", "qwen35.rope.freq_base"]
)
def test_missing_metadata_are_named(missing: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", hidden_size=64, intermediate_size=64)
    path = write_gguf(source, tmp_path / "model.gguf", changes={missing: None})
    with pytest.raises(ValueError, match=rf"{missing} must be .*, got None in .*model\.gguf; convert"):
        Engine(path, **SETTINGS)


def test_the_default_model_runs_from_a_gguf_file(tmp_path: Path) -> None:
    """Its tokenizer splits text in its own way, so tokenizer.json must lie beside the file."""
    from compiled_mtp import default_model

    source = Path(default_model.__file__).parent
    path = write_gguf(source, tmp_path / "model.gguf", changes={"tokenizer.ggml.model": "gpt2"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    assert Tokenizer(path).encode("def f(x):") == Tokenizer(source).encode("def f(x):")
    params = SamplingParams(max_tokens=24, temperature=0.0)
    texts = [
        [o.new_text for o in Engine(model, **SETTINGS).generate(["def fibonacci(n):"], params)]
        for model in (path, source)
    ]
    assert texts[0] == texts[1]
    assert json.loads((source / "config.json").read_text())["num_hidden_layers"] == 8
