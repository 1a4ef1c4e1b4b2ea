"""Sampling parameters: right values get one normal form, wrong ones an error of one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from compiled_mtp.sampling import parameter_checks as checks
from tests.sampling.grammars import TOKENIZER


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: checks.penalty("presence_penalty", 2), 2.0),
        (lambda: checks.penalty("frequency_penalty", -1.5), -1.5),
        (lambda: checks.repetition_penalty(1.05), 1.05),
        (lambda: checks.logit_bias(None), {}),
        (lambda: checks.logit_bias({"50": 100, 7: -1.5}), {50: 100.0, 7: -1.5}),
        (lambda: checks.min_tokens(3, max_tokens=3), 3),
        (lambda: checks.allowed_token_ids(None), None),
        (lambda: checks.allowed_token_ids([9, 3, 9]), (3, 9)),
        (lambda: checks.stop_token_ids(None), ()),
        (
            lambda: checks.stop_token_ids([9, 3, 9, *range(62)]),
            (9, 3, *(i for i in range(62) if i not in (9, 3))),
        ),
        (lambda: checks.bad_words(["b", "a", "b"]), ("b", "a")),
        (lambda: checks.num_choices(1, temperature=0), 1),
        (lambda: checks.num_choices(16, temperature=0.5), 16),
        (lambda: checks.logprobs("logprobs", None), None),
        (lambda: checks.logprobs("prompt_logprobs", 20), 20),
        (lambda: checks.logprobs_mode("processed"), "processed"),
        (lambda: checks.only_one_grammar({}), None),
        (lambda: checks.only_one_grammar({"response_format": {"type": "text"}, "tool_choice": "auto"}), None),
        (lambda: checks.only_one_grammar({"guided_regex": "a", "tool_choice": "none"}), "guided_regex"),
    ],
)
def test_what_is_right_takes_one_form(call: Callable[[], Any], expected: Any) -> None:
    assert call() == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: checks.penalty("presence_penalty", 2.5),
            "presence_penalty must be a number from -2 to 2, got 2.5; 0",
        ),
        (lambda: checks.penalty("presence_penalty", True), "presence_penalty must be a number .* got True"),
        (lambda: checks.penalty("presence_penalty", "1"), "presence_penalty must be a number .* got '1'"),
        (
            lambda: checks.penalty("frequency_penalty", float("nan")),
            "frequency_penalty must be a number .* nan",
        ),
        (lambda: checks.penalty("frequency_penalty", 10**9999), "frequency_penalty must be a number"),
        (lambda: checks.repetition_penalty(0), "repetition_penalty must be above 0, got 0; 1 turns it off"),
        (lambda: checks.repetition_penalty(2.1), "repetition_penalty must be a number from 0 to 2, got 2.1"),
        (lambda: checks.logit_bias([1]), r"logit_bias must be an object of id: bias, got \[1\]"),
        (lambda: checks.logit_bias({"x": 1}), "logit_bias must hold token ids from 0, got 'x'"),
        (lambda: checks.logit_bias({"-1": 1}), "logit_bias must hold token ids from 0, got '-1'"),
        (lambda: checks.logit_bias({1.0: 1}), "logit_bias must hold token ids from 0, got 1.0"),
        (lambda: checks.logit_bias({True: 1}), "logit_bias must hold token ids from 0, got True"),
        (lambda: checks.logit_bias({"7": 1, 7: 2}), "logit_bias must name an id once, got 7"),
        (lambda: checks.logit_bias({7: 101}), r"logit_bias\[7\] must be a number from -100 to 100, got 101"),
        (
            lambda: checks.logit_bias({7: None}),
            r"logit_bias\[7\] must be a number from -100 to 100, got None",
        ),
        (lambda: checks.logit_bias(dict.fromkeys(range(1025), 0)), "logit_bias must hold at most 1024 ids"),
        (
            lambda: checks.min_tokens(4, max_tokens=3),
            "min_tokens must be an integer from 0 to 3, got 4; raise",
        ),
        (lambda: checks.min_tokens(-1, max_tokens=3), "min_tokens must be an integer from 0 to 3, got -1"),
        (lambda: checks.min_tokens(1.0, max_tokens=3), "min_tokens must be an integer from 0 to 3, got 1.0"),
        (lambda: checks.allowed_token_ids([]), "allowed_token_ids must hold an id"),
        (lambda: checks.allowed_token_ids("12"), "allowed_token_ids must be a list of token ids, got '12'"),
        (lambda: checks.allowed_token_ids([-1]), "allowed_token_ids must hold token ids from 0, got -1"),
        (lambda: checks.stop_token_ids(range(65)), "stop_token_ids must hold at most 64 ids, got 65"),
        (
            lambda: checks.stop_token_ids([1 << 31]),
            "stop_token_ids must hold token ids from 0, got 2147483648",
        ),
        (lambda: checks.bad_words("word"), "bad_words must be a list of strings, got 'word'"),
        (
            lambda: checks.bad_words(["a", "  "]),
            "bad_words must hold strings with more than spaces, got '  '",
        ),
        (lambda: checks.bad_words(["a", 3]), "bad_words must hold strings with more than spaces, got 3"),
        (lambda: checks.num_choices(17, 1.0), "n must be an integer from 1 to 16, got 17"),
        (lambda: checks.num_choices(2, 0), "n must be 1 at temperature 0, got 2"),
        (lambda: checks.logprobs("logprobs", 21), "logprobs must be an integer from 0 to 20, got 21"),
        (lambda: checks.logprobs("logprobs", True), "logprobs must be an integer from 0 to 20, got True"),
        (
            lambda: checks.logprobs_mode("logits"),
            "logprobs_mode must be raw, processed or both, got 'lo",
        ),
        (lambda: checks.logprobs_mode([]), r"logprobs_mode must be raw, processed or both, got \[\]"),
        (
            lambda: checks.only_one_grammar({"guided_choice": ["a"], "tool_choice": "required"}),
            "tool_choice must be left out with guided_choice",
        ),
    ],
)
def test_what_is_wrong_is_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", checks.REFUSED)
def test_names_that_others_know_are_refused_with_their_remedy(name: str) -> None:
    remedy = re.escape(checks.REFUSED[name])
    with pytest.raises(ValueError, match=f"^{name} must be left out, got None; {remedy}$"):
        checks.check_names({"seed": 1, name: None}, known=("seed",))


@pytest.mark.parametrize("value", [None, 3, True, [1], {"a": 1}, "x" * 10_000_000])
def test_an_unknown_field_of_any_type_is_called_unknown(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^temprature must be a sampling parameter, got an unknown name"
    ) as caught:
        checks.check_names({"temprature": value}, known=("temperature",))
    assert len(str(caught.value)) < 200
    checks.check_names({"temperature": value}, known=("temperature",))


def test_what_errors_print_is_bounded_and_escaped() -> None:
    for value in ("\ud800\x1b[31m" * 10_000, ["\n" * 1000]):
        with pytest.raises(ValueError, match=r"^logprobs_mode must be raw, processed or both") as caught:
            checks.logprobs_mode(value)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 250


def test_a_bad_word_is_forbidden_with_and_without_a_space_before() -> None:
    found = checks.bad_word_ids((" class", "class"), TOKENIZER.encode)
    assert sorted(found) == sorted({tuple(TOKENIZER.encode("class")), tuple(TOKENIZER.encode(" class"))})
    with pytest.raises(ValueError, match=r"^bad_words must be at most 16 tokens each"):
        checks.bad_word_ids(("x" * 200,), lambda text: list(range(len(text))))
    with pytest.raises(ValueError, match=r"^bad_words must make at most 64 sequences, got 66"):
        checks.bad_word_ids([f"w{i}" for i in range(33)], lambda text: [ord(c) for c in text])


def test_seeds_of_choices() -> None:
    """Choice 0 equals n = 1; the others follow splitmix64, whose first outputs for 0 are published."""
    assert checks.choice_seed(7, 0) == 7
    assert checks.choice_seed(-5, 0) == -5
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [checks.choice_seed(0, index) % (1 << 64) for index in (1, 2, 3)] == published
    seeds = {checks.choice_seed(seed, index) for seed in range(-50, 50) for index in range(16)}
    assert len(seeds) == 1600
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds)
