"""Realistic requests in real engines: tokens and log probabilities depend on the request alone."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiled_mtp.engine import Engine
from compiled_mtp.request import RequestOutput, SamplingParams
from compiled_mtp.sampling.grammar import Matcher
from tests.checkpoints import write_checkpoint
from tests.engines import force_drafts, make_engine
from tests.sampling.grammars import (
    END_THINK,
    EOS,
    IM_END,
    MODEL,
    THINK,
    TOKENIZER,
    compiler,
    write_thinking_tokenizer,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "parts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "size", "parts"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}, "count": {"enum": [1, 2]}},
            "required": ["colour"],
        },
    },
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "regex": {"guided_regex": r"[a-f]{3}-[0-9]{2,4}\."},
    "choice": {"guided_choice": ["north", "northeast", "south"]},
    "tool": {"tools": [TOOL], "tool_choice": {"function": {"name": "pick"}}},
    # The prompt opens a reasoning part, which is likely to end anywhere in a window.
    "reasoning": {"guided_choice": ["north", "south"], "logit_bias": {str(END_THINK): 7.0}},
    "bound": {"guided_regex": "[a-z ]{5,30}", "presence_penalty": 1.0, "bad_words": ["e"], "min_tokens": 3},
}
OTHERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {str(i): 12.0 for i in range(40, 60)}, "presence_penalty": 2.0},
    "allowed": {"allowed_token_ids": list(range(60, 70)), "min_tokens": 5, "stop_token_ids": [61, 62, 63]},
    "bad": {"bad_words": ["a", "the"], "logit_bias": {str(i): 6.0 for i in range(66, 90)}},
    "listed": {"logprobs": 5},
    "processed": {"logprobs": 20, "logprobs_mode": "processed", "top_k": 7, "presence_penalty": 0.5},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("requests"))


def write_small_checkpoint(directory: Path, **options: Any) -> Path:
    """Write a checkpoint of random weights with the default tokenizer and tokens for reasoning.

    options: of `write_checkpoint`, in place of the smallest sizes.
    """
    options = options or {"hidden_size": 64, "num_value_heads": 1, "intermediate_size": 64}
    write_checkpoint(directory, vocab_size=4160, **options)
    write_thinking_tokenizer(directory)
    shutil.copy(MODEL / "chat_template.jinja", directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(EOS)}))
    return directory


@cache
def engine_of(directory: Path, mtp_step: int, max_in_flight: int = 0, max_batch: int = 8) -> Engine:
    return make_engine(directory, mtp_step=mtp_step, max_in_flight=max_in_flight, max_batch=max_batch)


def params_of(name: str, temperature: float, **fields: Any) -> SamplingParams:
    own = (GRAMMARS | OTHERS)[name]
    limit = 120 if name in GRAMMARS else 14
    made: dict[str, Any] = {"max_tokens": limit, "temperature": temperature, "seed": 5, "logprobs": 3}
    return SamplingParams(**(made | own | fields))


def prompt_of(name: str) -> list[int]:
    prompt = TOKENIZER.encode(f"def {name}(self):\n    ")
    return [*prompt, THINK] if name == "reasoning" else prompt


@cache
def alone(directory: Path, name: str, temperature: float) -> RequestOutput:
    """Return a request's output without other requests and drafts."""
    return engine_of(directory, 0).generate([prompt_of(name)], params_of(name, temperature))[0]


def same(one: RequestOutput, other: RequestOutput) -> bool:
    """Return whether tokens, text, end and log probabilities are equal to the bit."""
    fields = (
        *("new_token_ids", "new_text", "finish_reason", "error"),
        *("logprobs", "prompt_logprobs", "index"),
    )
    return all(getattr(one, name) == getattr(other, name) for name in fields)


@pytest.mark.parametrize(
    ("mtp_step", "max_in_flight", "max_batch"), [(0, 1, 8), (1, 0, 13), (3, 0, 26), (3, 1, 3), (7, 1, 26)]
)
def test_tokens_and_log_probabilities_are_those_of_a_request_alone_without_drafts(
    checkpoint: Path, mtp_step: int, max_in_flight: int, max_batch: int
) -> None:
    """Together with the other requests, at both temperatures, in batches as they come."""
    keys = [(name, temperature) for name in (*GRAMMARS, *OTHERS) for temperature in (0.0, 1.0)]
    expected = [alone(checkpoint, *key) for key in keys]
    together = engine_of(checkpoint, mtp_step, max_in_flight, max_batch)
    got = together.generate([prompt_of(name) for name, _ in keys], [params_of(*key) for key in keys])
    for key, one, other in zip(keys, expected, got, strict=True):
        assert same(one, other), key
        assert one.logprobs is not None
        assert [entry.token_id for entry in one.logprobs] == one.new_token_ids
    for (name, _), output in zip(keys, got, strict=True):
        if name in GRAMMARS:
            assert output.finish_reason == "stop", name
            check_output(name, output.new_text)


def check_output(name: str, text: str) -> None:
    """Check that the text fits the grammar."""
    if name == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif name == "reasoning":
        assert text.rpartition("</think>")[2].removeprefix("\n\n") in ("north", "south")
    elif name == "bound":
        assert 5 <= len(text) <= 30
        assert "e" not in TOKENIZER.encode(text)
    elif name == "choice":
        assert text in GRAMMARS["choice"]["guided_choice"]
    elif name == "tool":
        assert text.startswith("<tool_call>\n<function=pick>\n<parameter=colour>\n")
        assert text.endswith("</function>\n</tool_call>")
    else:
        assert len(text) in (7, 8, 9)
        assert text.endswith(".")


@pytest.mark.parametrize("is_right", [True, False])
def test_accepted_and_rejected_drafts_change_no_token(checkpoint: Path, is_right: bool) -> None:
    """Every processor sees the drafts before its row, right ones and wrong ones."""
    keys = {f"{name} {t}": (name, t) for name in (*GRAMMARS, *OTHERS) for t in (0.0, 1.0)}
    expected = {key: alone(checkpoint, *one) for key, one in keys.items()}
    engine = make_engine(checkpoint, mtp_step=3, max_batch=len(keys))
    streams = {key: output.new_token_ids for key, output in expected.items()}
    force_drafts(engine, streams, lambda key, pos: 3 if is_right else (pos * 7 + len(key)) % 4)
    for key, (name, temperature) in keys.items():
        engine.add_request(
            prompt_token_ids=prompt_of(name), params=params_of(name, temperature), request_id=key
        )
    outputs: dict[str, list[RequestOutput]] = {key: [] for key in keys}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    for name, parts in outputs.items():
        assert [token for one in parts for token in one.new_token_ids] == streams[name], name
        assert [entry for one in parts for entry in one.logprobs or []] == expected[name].logprobs, name
        assert parts[-1].finish_reason == expected[name].finish_reason, name
    metrics = outputs["schema 1.0"][-1].metrics
    if is_right:
        assert metrics.output_tokens > 3.5 * metrics.rounds


def test_the_trained_model_accepts_drafts_under_a_grammar_and_gives_the_same_tokens() -> None:
    names = [name for name in GRAMMARS if name != "reasoning"]  # the tokenizer has no reasoning tokens
    keys = [(name, float(index % 2)) for index, name in enumerate(names)]
    prompts, params = [prompt_of(name) for name, _ in keys], [params_of(*key) for key in keys]
    outputs = {
        mtp_step: make_engine(MODEL, mtp_step=mtp_step, max_batch=len(keys)).generate(prompts, params)
        for mtp_step in (0, 3)
    }
    for (name, _), one, other in zip(keys, outputs[0], outputs[3], strict=True):
        assert same(one, other), name
        assert one.finish_reason == "stop"
        check_output(name, one.new_text)
    assert sum(sum(output.metrics.accepted_by_index) for output in outputs[3]) > 0


MIXES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0]),
        "max_tokens": st.integers(3, 16),
        "seed": st.integers(-5, 5),
        "grammar": st.sampled_from([None, None, "schema", "regex", "choice", "bound"]),
    },
    optional={
        "top_k": st.sampled_from([1, 5, 500]),
        "top_p": st.sampled_from([0.1, 0.7, 0.99]),
        "min_p": st.sampled_from([0.01, 0.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.7, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.7, 2.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.05, 1.8]),
        "logit_bias": st.dictionaries(st.integers(0, 4098).map(str), st.sampled_from([-9.0, 6.0, 12.0])),
        "min_tokens": st.integers(0, 3),
        "stop_token_ids": st.lists(st.integers(60, 90), max_size=3),
        "stop": st.lists(st.sampled_from(["e", "ab", '":', "  "]), max_size=2),
        "bad_words": st.lists(st.sampled_from(["a", "the", "self", "return x"]), max_size=3),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 20),
        "logprobs_mode": st.sampled_from(["raw", "processed"]),
        "prompt_logprobs": st.integers(0, 20),
        "include_drafts": st.booleans(),
    },
)


def check_mixes(directory: Path, mixes: list[dict[str, Any]]) -> None:
    """Check that requests together and with drafts give the outputs of each alone without drafts.

    Outputs are tokens, texts, ends and log probabilities.
    """
    prompts, params = [], []
    for index, mix in enumerate(mixes):
        name = mix["grammar"]
        grammar = {} if name is None else GRAMMARS[name]
        prompts.append(prompt_of(f"f{index}"))
        params.append(SamplingParams(**({k: v for k, v in mix.items() if k != "grammar"} | grammar)))
    plain = engine_of(directory, 0)
    expected = [plain.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    for mtp_step in (1, 3, 7):
        together = engine_of(directory, mtp_step).generate(prompts, params)
        for one, other, got in zip(params, expected, together, strict=True):
            assert same(other, got), (mtp_step, one, other, got)
            check_drafts(one, got)


def check_drafts(params: SamplingParams, output: RequestOutput) -> None:
    """Check that the reported drafts agree with the tokens and with the counts."""
    assert (output.drafts is not None) == params.include_drafts
    if output.drafts is None:
        return
    tokens, metrics = output.new_token_ids[1:], output.metrics
    for drafts, num_accepted, _ in output.drafts:
        assert drafts[:num_accepted] == tokens[:num_accepted]
        if num_accepted < len(drafts) and num_accepted < len(tokens):
            assert drafts[num_accepted] != tokens[num_accepted]
        tokens = tokens[num_accepted + 1 :]
    assert tokens == []
    chains = [one for one in output.drafts if not one.is_looked_up]
    by_index = [[len(one.token_ids) for one in chains], [one.num_accepted for one in chains]]
    assert len(output.drafts) == metrics.rounds == len(chains) + metrics.lookup_rounds
    for counts, own in zip(by_index, (metrics.drafted_by_index, metrics.accepted_by_index), strict=True):
        assert [sum(count > index for count in counts) for index in range(len(own))] == own


@pytest.mark.parametrize(("mtp_step", "max_in_flight"), [(3, 0), (3, 1), (0, 1)])
def test_drafts_are_reported_to_requests_that_ask(
    checkpoint: Path, mtp_step: int, max_in_flight: int
) -> None:
    names = ["schema", "choice", *OTHERS]
    prompts = [prompt_of(name) for name in names]
    # Some rounds have one phase, some two.
    plain = [params_of(name, 0.0, **({} if name == "listed" else {"logprobs": None})) for name in names]
    asking = [one.model_copy(update={"include_drafts": index % 3 < 2}) for index, one in enumerate(plain)]
    engine = engine_of(checkpoint, mtp_step, max_in_flight)
    for before, one, got in zip(
        engine.generate(prompts, plain), asking, engine.generate(prompts, asking), strict=True
    ):
        assert same(before, got)
        check_drafts(one, got)
        assert before.drafts is None
        if got.drafts is not None:
            assert {len(one.token_ids) for one in got.drafts} == ({mtp_step} if got.metrics.rounds else set())


# A request alone takes most of the time, so its output is compared at every depth.
@given(mixes=st.lists(MIXES, min_size=2, max_size=6))
@settings(max_examples=7, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_mixes_do_not_depend_on_other_requests_and_drafts(
    checkpoint: Path, mixes: list[dict[str, Any]]
) -> None:
    check_mixes(checkpoint, mixes)


# After "a", each token of the draft's path costs more parser items; the target takes the other path.
COSTLY = 'start: "a" ("n" "o"{0,9} | "y" amb)\namb: amb amb | "x" | amb amb amb\n'


def test_a_parser_limit_that_rejected_drafts_reach_changes_no_token(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, n, o, x, y = (TOKENIZER.encode(letter)[0] for letter in "anoxy")
    params = SamplingParams(
        max_tokens=20,
        temperature=1.0,
        seed=2,
        guided_grammar=COSTLY,
        logprobs=2,
        logit_bias={a: 90.0, n: 50.0, o: 9.0},
    )
    refills: list[int] = []
    plain_refill = Matcher._fill_alone

    def refill(matcher: Matcher, masks: torch.Tensor, drafts: list[int]) -> None:
        refills.append(len(drafts))
        plain_refill(matcher, masks, drafts)

    monkeypatch.setattr(Matcher, "_fill_alone", refill)
    outputs = {}
    for mtp_step in (0, 7):
        engine = make_engine(checkpoint, mtp_step=mtp_step)
        assert engine.frontend._guidance is not None
        engine.frontend._guidance._compiler = compiler(step_max_items=100)
        force_drafts(engine, {"r": [a, y, *[x] * 30]}, lambda name, pos: 7)
        engine.add_request(prompt_token_ids=[5, 6], params=params, request_id="r")
        parts = []
        while engine.has_unfinished_requests():
            parts += engine.step()
        outputs[mtp_step] = (
            [token for part in parts for token in part.new_token_ids],
            [entry for part in parts for entry in part.logprobs or []],
            [part.error for part in parts],
        )
        assert bool(refills) == (mtp_step == 7)
    assert outputs[0][0][:3] == [a, n, o]
    assert outputs[0][0] == outputs[7][0]
    assert outputs[0][1] == outputs[7][1]
    assert set(outputs[0][2] + outputs[7][2]) == {None}


def test_choice_0_is_what_one_choice_gives_and_the_others_differ(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, 3)
    params = SamplingParams(max_tokens=12, seed=9, ignore_eos=True)
    (single,) = engine.generate(["a b"], params)
    several = engine.generate(["a b", "c"], [params.model_copy(update={"n": 4}), params])
    assert [output.index for output in several] == [0, 1, 2, 3, 0]
    assert several[0].new_token_ids == single.new_token_ids
    assert len({tuple(output.new_token_ids) for output in several[:4]}) == 4
    again = engine.generate(["a b"], params.model_copy(update={"n": 2}))
    assert [one.new_token_ids for one in again] == [one.new_token_ids for one in several[:2]]


def test_an_abort_ends_every_choice(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, 3)
    name = engine.add_request("x", SamplingParams(max_tokens=50, n=5, ignore_eos=True))
    assert engine.stats().waiting == 5
    outputs = [*engine.step(), *engine.step()]
    engine.abort(name)
    outputs += engine.step()
    ends = {output.index: output.finish_reason for output in outputs if output.finish_reason}
    assert ends == dict.fromkeys(range(5), "abort")
    assert not engine.has_unfinished_requests()


def test_generate_takes_chats(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, 0)
    chat = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    (output,) = engine.generate([chat], params)
    text = TOKENIZER.apply_chat_template(chat)
    assert output.new_token_ids == engine.generate([text], params)[0].new_token_ids
    with pytest.raises(ValueError, match=r"^prompts\[0\]: messages\[0\] must be an object with a role"):
        engine.generate([[{"content": "hello"}]])


def test_min_tokens_and_stop_ids(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, 3)
    forced = {"logit_bias": {str(IM_END): 100.0}, "seed": 1, "max_tokens": 20}
    (output,) = engine.generate(["a"], SamplingParams(**forced))
    assert output.new_token_ids == [IM_END]
    (output,) = engine.generate(["a"], SamplingParams(**forced, min_tokens=6))
    assert (len(output.new_token_ids), output.new_token_ids[-1], output.finish_reason) == (7, IM_END, "stop")
    assert IM_END not in output.new_token_ids[:-1]


def test_a_row_without_a_legal_id_is_an_error_that_names_the_parameters(checkpoint: Path) -> None:
    engine = engine_of(checkpoint, 3)
    params = SamplingParams(allowed_token_ids=[IM_END], min_tokens=2, seed=1)
    bad, good = engine.generate(["a", "b"], [params, SamplingParams(max_tokens=4, seed=1, ignore_eos=True)])
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert bad.error.startswith("allowed_token_ids, min_tokens must leave a token to draw, got none for pos")
    assert len(good.new_token_ids) == 4
    assert (bad.error_kind, good.error_kind) == ("parameters", None)


def test_bad_words_ban_ids_and_not_letters(checkpoint: Path) -> None:
    """A token that contains a banned word may be drawn: only the word's own ids are banned."""
    engine = engine_of(checkpoint, 3)
    holder = next(i for i in range(300, 4000) if "Error" in TOKENIZER.decode([i]).strip()[1:])
    text = TOKENIZER.decode([holder])
    params = SamplingParams(bad_words=["Error"], logit_bias={holder: 100.0}, max_tokens=3, temperature=0)
    (output,) = engine.generate(["a"], [params])
    assert text in output.new_text
    (own,) = engine.generate(["a"], [params.model_copy(update={"bad_words": (text,)})])
    assert text not in own.new_text
