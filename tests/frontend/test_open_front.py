"""Request processors without weights: their refusals and the engine's; threads of small models."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.cli import run
from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.frontend import processor
from compiled_mtp.frontend.checkpoint import open_frontend
from compiled_mtp.frontend.processor import RequestProcessor
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.request import Request, SamplingParams
from compiled_mtp.runner import spec as engine_spec
from compiled_mtp.scheduler.limits import Limits
from tests.checkpoints import write_checkpoint
from tools.synthetic_tokenizer import write_tokenizer

SMALL: dict[str, Any] = {"device": "cpu", "prefill_chunk": 64, "max_model_len": 64, "mtp_step": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("front")
    write_checkpoint(directory, tokenizer=True, hidden_size=64, num_value_heads=1, intermediate_size=64)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('role ' + m.role) }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    return directory


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def ask(frontend: RequestProcessor, **given: Any) -> None:
    params = given.pop("params", None)
    frontend.make_request(
        "", params, **({"prompt": None, "prompt_token_ids": None, "messages": None} | given)
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt_token_ids": [1] * 64}, "prompt must be shorter than max_model_len=64 tokens, got 64"),
        (
            {"prompt_token_ids": [1] * 4096},
            r"^prompt must be shorter than 4096 tokens, the checkpoint's limit, got 4096; shorten it$",
        ),
        ({"prompt_token_ids": [512]}, r"prompt_token_ids must lie in 0..511, got 512"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "chat template, got: role judge; change"),
        ({"prompt": ""}, "prompt must have at least one token"),
        ({"prompt": "x", "params": SamplingParams(stop_token_ids=(900,))}, "stop_token_ids must lie in 0"),
    ],
)
def test_what_the_engine_would_refuse(checkpoint: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(open_frontend(EngineConfig(model=checkpoint, **SMALL)), **given)


def test_an_engine_goes_on_with_the_front_and_knows_its_blocks(checkpoint: Path) -> None:
    """Every call refuses a request that does not fit into all blocks before the request is queued."""
    config = EngineConfig(model=checkpoint, **SMALL | {"max_model_len": 256}, num_blocks=3)
    frontend, prompt = open_frontend(config), [1] * 128
    ask(frontend, prompt_token_ids=prompt)
    engine = Engine(config, frontend=frontend)
    assert engine.frontend is frontend
    message = r"prompt and a token must fit into 2 blocks of 64 tokens, got a prompt of 128; shorten it or"
    with pytest.raises(ValueError, match=f"^{message}"):
        engine.add_request(prompt_token_ids=prompt)
    with pytest.raises(ValueError, match=f"^{message}"):
        next(engine.stream(prompt_token_ids=prompt))
    with pytest.raises(ValueError, match=rf"^prompts\[1\]: {message}"):
        engine.generate([[1], prompt])
    assert not engine.has_unfinished_requests()
    assert engine.stats().waiting == 0


def test_a_request_is_fitted_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[Request] = []
    fit = Limits.fit

    def note(limits: Limits, request: Request) -> None:
        fitted.append(request)
        fit(limits, request)

    monkeypatch.setattr(Limits, "fit", note)
    Engine(EngineConfig(model=checkpoint, **SMALL)).generate([[1]], SamplingParams(n=2, max_tokens=2))
    assert len(fitted) == 2


def test_an_engine_of_a_path_and_settings(checkpoint: Path) -> None:
    with Engine(checkpoint, **SMALL | {"mtp_step": 3}) as engine:
        assert engine.config == EngineConfig(model=checkpoint, **SMALL | {"mtp_step": 3})
    with pytest.raises(ValueError, match=r"^mtp_step must be a field of the EngineConfig"):
        Engine(EngineConfig(model=checkpoint), mtp_step=3)


def test_run_refuses_before_the_weights_are_loaded(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("compiled_mtp.engine.Runner", load)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n{"messages": [{"role": "judge", "content": "x"}]}\n')
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert run.main([f"--model={checkpoint}", f"--prompt-file={file}", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {file} line 2: messages must satisfy the checkpoint's chat template")


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_small_models_run_on_one_thread(
    checkpoint: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(2)
    assert Engine(EngineConfig(model=checkpoint, **SMALL, num_threads=2)).num_threads == 2
    assert Engine(EngineConfig(model=checkpoint, **SMALL)).num_threads == 1
    monkeypatch.setattr(engine_spec, "_LEAST_THREADED_BYTES", 1)
    torch.set_num_threads(2)
    assert Engine(EngineConfig(model=checkpoint, **SMALL)).num_threads == 2


def built_tries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the sizes of the tries that llguidance builds."""
    llguidance = pytest.importorskip("llguidance")
    sizes: list[int] = []
    build = llguidance.LLTokenizer

    def count(*arguments: Any, n_vocab: int, **options: Any) -> Any:
        sizes.append(n_vocab)
        return build(*arguments, n_vocab=n_vocab, **options)

    monkeypatch.setattr(llguidance, "LLTokenizer", count)
    return sizes


def frontend_of(directory: Path, num_ids: int) -> RequestProcessor:
    """Return the default checkpoint's request processor with a synthetic vocabulary."""
    directory.mkdir()
    write_tokenizer(directory, num_ids)
    frontend = open_frontend(EngineConfig())
    model = dataclasses.replace(frontend.model_config, vocab_size=num_ids, eos_token_ids=(num_ids - 1,))
    return RequestProcessor(directory, model, Tokenizer(directory), frontend.max_model_len)


def test_a_large_vocabulary_is_warmed_up_and_its_first_grammar_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = built_tries(monkeypatch)
    small, large = frontend_of(tmp_path / "small", 50_000), frontend_of(tmp_path / "large", 50_001)
    small.warm_up_grammars()
    assert sizes == [], "left to the first guided request"
    large.warm_up_grammars()
    assert sizes == [50_001]
    ask(large, prompt="x", params=SamplingParams(guided_regex="[ab]+"))
    large.warm_up_grammars()
    assert sizes == [50_001]


def test_without_llguidance_nothing_is_warmed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = frontend_of(tmp_path / "large", 50_001)
    monkeypatch.setattr(processor, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    frontend.warm_up_grammars()
    with pytest.raises(ValueError, match="guided_regex must be left out without llguidance"):
        ask(frontend, prompt="x", params=SamplingParams(guided_regex="[ab]+"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_of_ranks_warms_up_and_one_alone_does_not(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    calls: list[RequestProcessor] = []
    monkeypatch.setattr(RequestProcessor, "warm_up_grammars", lambda frontend: calls.append(frontend))

    def stop(*_: Any, **__: Any) -> None:
        raise ValueError("stopped here")

    monkeypatch.setattr("compiled_mtp.engine.Runner", stop)
    monkeypatch.setattr("compiled_mtp.parallel.leader.LeadRunner", stop)
    with pytest.raises(ValueError, match="stopped here"):
        Engine(EngineConfig(model=checkpoint, **SMALL, tensor_parallel=ranks))
    assert len(calls) == ranks - 1
