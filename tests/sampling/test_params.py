"""Sampling parameters: right values get one normal form, wrong ones an error of one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from compiled_mtp.sampling import params
from tests.sampling.grammars import TOKENIZER


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: params.penalty("presence_penalty", 2), 2.0),
        (lambda: params.penalty("frequency_penalty", -1.5), -1.5),
        (lambda: params.repetition_penalty(1.05), 1.05),
        (lambda: params.logit_bias(None), {}),
        (lambda: params.logit_bias({"50": 100, 7: -1.5}), {50: 100.0, 7: -1.5}),
        (lambda: params.min_tokens(3, max_tokens=3), 3),
        (lambda: params.allowed_token_ids(None), None),
        (lambda: params.allowed_token_ids([9, 3, 9]), (3, 9)),
        (lambda: params.stop_token_ids(None), ()),
        (
            lambda: params.stop_token_ids([9, 3, 9, *range(62)]),
            (9, 3, *(i for i in range(62) if i not in (9, 3))),
        ),
        (lambda: params.bad_words(["b", "a", "b"]), ("b", "a")),
        (lambda: params.num_choices(1, temperature=0), 1),
        (lambda: params.num_choices(16, temperature=0.5), 16),
        (lambda: params.logprobs("logprobs", None), None),
        (lambda: params.logprobs("prompt_logprobs", 20), 20),
        (lambda: params.logprobs_mode("processed"), "processed"),
        (lambda: params.only_one_grammar({}), None),
        (lambda: params.only_one_grammar({"response_format": {"type": "text"}, "tool_choice": "auto"}), None),
        (lambda: params.only_one_grammar({"guided_regex": "a", "tool_choice": "none"}), "guided_regex"),
    ],
)
def test_what_is_right_takes_one_form(call: Callable[[], Any], expected: Any) -> None:
    assert call() == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: params.penalty("presence_penalty", 2.5),
            "presence_penalty must be a number from -2 to 2, got 2.5; 0",
        ),
        (lambda: params.penalty("presence_penalty", True), "presence_penalty must be a number .* got True"),
        (lambda: params.penalty("presence_penalty", "1"), "presence_penalty must be a number .* got '1'"),
        (
            lambda: params.penalty("frequency_penalty", float("nan")),
            "frequency_penalty must be a number .* nan",
        ),
        (lambda: params.penalty("frequency_penalty", 10**9999), "frequency_penalty must be a number"),
        (lambda: params.repetition_penalty(0), "repetition_penalty must be above 0, got 0; 1 turns it off"),
        (lambda: params.repetition_penalty(2.1), "repetition_penalty must be a number from 0 to 2, got 2.1"),
        (lambda: params.logit_bias([1]), r"logit_bias must be an object of id: bias, got \[1\]"),
        (lambda: params.logit_bias({"x": 1}), "logit_bias must hold token ids from 0, got 'x'"),
        (lambda: params.logit_bias({"-1": 1}), "logit_bias must hold token ids from 0, got '-1'"),
        (lambda: params.logit_bias({1.0: 1}), "logit_bias must hold token ids from 0, got 1.0"),
        (lambda: params.logit_bias({True: 1}), "logit_bias must hold token ids from 0, got True"),
        (lambda: params.logit_bias({"7": 1, 7: 2}), "logit_bias must name an id once, got 7"),
        (lambda: params.logit_bias({7: 101}), r"logit_bias\[7\] must be a number from -100 to 100, got 101"),
        (
            lambda: params.logit_bias({7: None}),
            r"logit_bias\[7\] must be a number from -100 to 100, got None",
        ),
        (lambda: params.logit_bias(dict.fromkeys(range(1025), 0)), "logit_bias must hold at most 1024 ids"),
        (
            lambda: params.min_tokens(4, max_tokens=3),
            "min_tokens must be an integer from 0 to 3, got 4; raise",
        ),
        (lambda: params.min_tokens(-1, max_tokens=3), "min_tokens must be an integer from 0 to 3, got -1"),
        (lambda: params.min_tokens(1.0, max_tokens=3), "min_tokens must be an integer from 0 to 3, got 1.0"),
        (lambda: params.allowed_token_ids([]), "allowed_token_ids must hold an id"),
        (lambda: params.allowed_token_ids("12"), "allowed_token_ids must be a list of token ids, got '12'"),
        (lambda: params.allowed_token_ids([-1]), "allowed_token_ids must hold token ids from 0, got -1"),
        (lambda: params.stop_token_ids(range(65)), "stop_token_ids must hold at most 64 ids, got 65"),
        (
            lambda: params.stop_token_ids([1 << 31]),
            "stop_token_ids must hold token ids from 0, got 2147483648",
        ),
        (lambda: params.bad_words("word"), "bad_words must be a list of strings, got 'word'"),
        (
            lambda: params.bad_words(["a", "  "]),
            "bad_words must hold strings with more than spaces, got '  '",
        ),
        (lambda: params.bad_words(["a", 3]), "bad_words must hold strings with more than spaces, got 3"),
        (lambda: params.num_choices(17, 1.0), "n must be an integer from 1 to 16, got 17"),
        (lambda: params.num_choices(2, 0), "n must be 1 at temperature 0, got 2"),
        (lambda: params.logprobs("logprobs", 21), "logprobs must be an integer from 0 to 20, got 21"),
        (lambda: params.logprobs("logprobs", True), "logprobs must be an integer from 0 to 20, got True"),
        (
            lambda: params.logprobs_mode("logits"),
            "logprobs_mode must be raw, processed or both, got 'lo",
        ),
        (lambda: params.logprobs_mode([]), r"logprobs_mode must be raw, processed or both, got \[\]"),
        (
            lambda: params.only_one_grammar({"guided_choice": ["a"], "tool_choice": "required"}),
            "tool_choice must be left out with guided_choice",
        ),
        (
            lambda: params.check_ids("stop_token_ids", [3, 4160], 4160),
            "stop_token_ids must be ids below 4160, got 4160",
        ),
    ],
)
def test_what_is_wrong_is_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", params.REFUSED)
def test_names_that_others_know_are_refused_with_their_remedy(name: str) -> None:
    remedy = re.escape(params.REFUSED[name])
    with pytest.raises(ValueError, match=f"^{name} must be left out, got None; {remedy}$"):
        params.check_names({"seed": 1, name: None}, known=("seed",))


@pytest.mark.parametrize("value", [None, 3, True, [1], {"a": 1}, "x" * 10_000_000])
def test_an_unknown_field_of_any_type_is_called_unknown(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^temprature must be a sampling parameter, got an unknown name"
    ) as caught:
        params.check_names({"temprature": value}, known=("temperature",))
    assert len(str(caught.value)) < 200
    params.check_names({"temperature": value}, known=("temperature",))


def test_what_errors_print_is_bounded_and_escaped() -> None:
    for value in ("\ud800\x1b[31m" * 10_000, ["\n" * 1000]):
        with pytest.raises(ValueError, match=r"^logprobs_mode must be raw, processed or both") as caught:
            params.logprobs_mode(value)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 250


def test_a_bad_word_is_forbidden_with_and_without_a_space_before() -> None:
    found = params.bad_word_ids((" class", "class"), TOKENIZER.encode)
    assert sorted(found) == sorted({tuple(TOKENIZER.encode("class")), tuple(TOKENIZER.encode(" class"))})
    with pytest.raises(ValueError, match=r"^bad_words must be at most 16 tokens each"):
        params.bad_word_ids(("x" * 200,), lambda text: list(range(len(text))))
    with pytest.raises(ValueError, match=r"^bad_words must make at most 64 sequences, got 66"):
        params.bad_word_ids([f"w{i}" for i in range(33)], lambda text: [ord(c) for c in text])


def test_seeds_of_choices() -> None:
    """Choice 0 equals n = 1; the others follow splitmix64, whose first outputs for 0 are published."""
    assert params.choice_seed(7, 0) == 7
    assert params.choice_seed(-5, 0) == -5
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [params.choice_seed(0, index) % (1 << 64) for index in (1, 2, 3)] == published
    seeds = {params.choice_seed(seed, index) for seed in range(-50, 50) for index in range(16)}
    assert len(seeds) == 1600
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds)
