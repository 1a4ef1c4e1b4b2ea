"""Fine-tunes saved by transformers: without the MTP head, with other shards, configs and prefixes."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.cli import run
from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.frontend.checkpoint import open_frontend
from compiled_mtp.request import SamplingParams
from tests.checkpoints import read_stored, write_checkpoint

PROMPT = "def quicksort(items):"
NUM_TOKENS = 12
SMALL: dict[str, Any] = {"device": "cpu", "prefill_chunk": 64, "max_model_len": 64, "max_batch": 1}
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 4}

# Of each family: a save with the class for text, and one with the class for images.
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("text", {"family": "qwen3_next", "num_key_heads": 2, "num_value_heads": 4}),
    "dense-tied": ("text", {"family": "qwen3_5", "tied": True}),
    "dense-flat": ("text", {"family": "qwen3_5", "flat": True}),
    "dense-images": ("images", {"family": "qwen3_5", "vision": False, "tied": True}),
    "moe": ("text", {"family": "qwen3_5_moe"}),
    "moe-images": ("images", {"family": "qwen3_5_moe", "vision": False}),
}


@dataclass(frozen=True)
class Resaved:
    """base: the checkpoint with its head; path: transformers' save of it, which gives token_ids."""

    base: Path
    path: Path
    token_ids: list[int]


@pytest.fixture(scope="module", params=BASES)
def resaved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Resaved:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    kind, options = BASES[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    base, path = write_checkpoint(directory / "base", tokenizer=True, **options), directory / "saved"
    if kind == "images":
        config = json.loads((base / "config.json").read_text())
        config["vision_config"] |= VISION | {"out_hidden_size": 128}
        (base / "config.json").write_text(json.dumps(config))
    loader = AutoModelForImageTextToText if kind == "images" else AutoModelForCausalLM
    model = loader.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model.save_pretrained(path, max_shard_size="1MB")
    tokenizer.save_pretrained(path)
    assert (path / "model.safetensors.index.json").is_file()
    assert not any(name.startswith("mtp.") for name in read_stored(path))
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    # The engine draws no id that the tokenizer lacks.
    lacking = list(range(len(tokenizer), 512))
    found = model.generate(
        ids, do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None, suppress_tokens=lacking
    )
    return Resaved(base, path, found[0, ids.shape[1] :].tolist())


def decode(engine: Engine) -> list[int]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    (output,) = engine.generate([PROMPT], params)
    return output.new_token_ids


def bring_back_the_head(resaved: Resaved, path: Path) -> None:
    """Copy the head from the base, as docs/command-line.md says."""
    shutil.copytree(resaved.path, path)
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    block = page.split("```python\n")[1].split("```")[0]
    assert block.count('Path("base-model")') == block.count('Path("fine-tune")') == 1
    block = block.replace('"base-model"', repr(str(resaved.base))).replace('"fine-tune"', repr(str(path)))
    exec(block, {})


def test_an_engine_decodes_as_transformers_does_and_says_why_it_drafts_nothing(
    resaved: Resaved, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Engine(EngineConfig(model=resaved.path, **SMALL)) as engine:
        assert decode(engine) == resaved.token_ids
        assert engine.config.mtp_step == 0
        assert engine.stats().rounds_by_depth == {}
    (line,) = [record.getMessage() for record in caplog.records if "mtp" in record.getMessage()]
    assert line.startswith(f"mtp_step=auto is 0: {resaved.path} stores no mtp.* tensors")
    assert "mtp.safetensors" in line


def test_the_command_line_decodes_as_transformers_does(
    resaved: Resaved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results.jsonl"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    flags += ["--temperature=0", f"--max-tokens={NUM_TOKENS}", "--ignore-eos", f"--output={output}"]
    assert run.main([f"--model={resaved.path}", f"--prompt={PROMPT}", *flags]) == 0
    assert json.loads(output.read_text())["token_ids"] == resaved.token_ids
    assert "mtp_step 0" in capsys.readouterr().err


def test_the_head_of_the_base_beside_it_brings_drafts_back(resaved: Resaved, tmp_path: Path) -> None:
    bring_back_the_head(resaved, tmp_path / "whole")
    with Engine(EngineConfig(model=tmp_path / "whole", **SMALL)) as engine:
        assert engine.config.mtp_step == "auto"
        assert decode(engine) == resaved.token_ids
    with Engine(EngineConfig(model=tmp_path / "whole", **SMALL, mtp_step=3)) as engine:
        assert decode(engine) == resaved.token_ids
        assert sum(engine.stats().speculation.drafted_by_index) > 0


def test_an_explicit_depth_stays_an_error(resaved: Resaved) -> None:
    message = "mtp_step must be 0 for a checkpoint without mtp.* tensors, got 3"
    with pytest.raises(ValueError, match=message.replace("*", r"\*")) as error:
        open_frontend(EngineConfig(model=resaved.path, **SMALL, mtp_step=3))
    assert "mtp.safetensors" in str(error.value)


def test_compare_has_nothing_to_compare(resaved: Resaved, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([f"--model={resaved.path}", "--prompt=x", "--device=cpu", "--compare"]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("error: mtp_step must be at least 1 with --compare")
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_minimal_save_is_enough(tmp_path: Path, dtype: torch.dtype) -> None:
    """One file, another dtype, other names, tokenizer.json alone, no generation_config.json."""
    from transformers import AutoModelForCausalLM

    base, path = write_checkpoint(tmp_path / "base", "qwen3_5_moe", tokenizer=True), tmp_path / "saved"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.save_pretrained(path, save_original_format=False)
    (path / "generation_config.json").unlink()
    shutil.copy(base / "tokenizer.json", path)
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    with Engine(base, **SMALL, mtp_step=0) as engine:
        expected = decode(engine)
    with Engine(path, **SMALL) as engine:
        assert decode(engine) == expected
