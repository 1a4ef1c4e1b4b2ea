"""Sampling parameters: right values get one normal form, wrong ones an error of one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from compiled_mtp.sampling import parameter_checks as checks
from compiled_mtp.sampling.sampling_params import SamplingParams
from tests.sampling.grammars import TOKENIZER


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: SamplingParams(presence_penalty=2).presence_penalty, 2.0),
        (lambda: SamplingParams(frequency_penalty=-1.5).frequency_penalty, -1.5),
        (lambda: SamplingParams(repetition_penalty=1.05).repetition_penalty, 1.05),
        (lambda: SamplingParams(logit_bias=None).logit_bias, None),
        (lambda: checks.logit_bias({"50": 100, 7: -1.5}), {50: 100.0, 7: -1.5}),
        (lambda: SamplingParams(min_tokens=3, max_tokens=3).min_tokens, 3),
        (lambda: checks.allowed_token_ids(None), None),
        (lambda: checks.allowed_token_ids([9, 3, 9]), (3, 9)),
        (lambda: SamplingParams(stop_token_ids=None).stop_token_ids, ()),
        (
            lambda: SamplingParams(stop_token_ids=[9, 3, 9, *range(64)]).stop_token_ids,
            (9, 3, 9, *range(64)),
        ),
        (lambda: SamplingParams(bad_words=["b", "a"]).bad_words, ("b", "a")),
        (lambda: SamplingParams(n=1, temperature=0).n, 1),
        (lambda: SamplingParams(n=16, temperature=0.5).n, 16),
        (lambda: SamplingParams(logprobs=None).logprobs, None),
        (lambda: SamplingParams(prompt_logprobs=20).prompt_logprobs, 20),
        (lambda: SamplingParams(logprobs_mode="processed").logprobs_mode, "processed"),
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
            lambda: SamplingParams(presence_penalty=2.5),
            "presence_penalty must be a number from -2 to 2, got 2.5; 0",
        ),
        (lambda: SamplingParams(presence_penalty=True), "presence_penalty must not be a boolean, got True"),
        (lambda: SamplingParams(presence_penalty="x"), "presence_penalty must be a valid number.* got 'x'"),
        (
            lambda: SamplingParams(frequency_penalty=float("nan")),
            "frequency_penalty must be a finite number, got nan",
        ),
        (lambda: SamplingParams(frequency_penalty=10**9999), "frequency_penalty must be .* got a number of"),
        (
            lambda: SamplingParams(repetition_penalty=0),
            "repetition_penalty must be above 0, got 0.0; 1 turns it off",
        ),
        (
            lambda: SamplingParams(repetition_penalty=2.1),
            "repetition_penalty must be a number from 0 to 2, got 2.1",
        ),
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
            lambda: SamplingParams(min_tokens=4, max_tokens=3),
            "min_tokens must be an integer from 0 to 3, got 4; raise",
        ),
        (
            lambda: SamplingParams(min_tokens=-1, max_tokens=3),
            "min_tokens must be an integer from 0 to 3, got -1",
        ),
        (lambda: SamplingParams(min_tokens=1.5), "min_tokens must be a valid integer.* got 1.5"),
        (lambda: checks.allowed_token_ids([]), "allowed_token_ids must hold an id"),
        (lambda: SamplingParams(allowed_token_ids="12"), "allowed_token_ids must be a valid tuple, got '12'"),
        (lambda: checks.allowed_token_ids([-1]), "allowed_token_ids must hold token ids from 0, got -1"),
        (lambda: checks.check_stop_ids(range(65)), "stop_token_ids must hold at most 64 ids, got 65"),
        (
            lambda: checks.check_stop_ids([1 << 31]),
            "stop_token_ids must hold token ids from 0, got 2147483648",
        ),
        (lambda: SamplingParams(bad_words="word"), "bad_words must be a valid tuple, got 'word'"),
        (
            lambda: checks.check_bad_words(["a", "  "]),
            "bad_words must hold strings with more than spaces, got '  '",
        ),
        (lambda: SamplingParams(bad_words=["a", 3]), "bad_words.1 .* got 3"),
        (lambda: SamplingParams(n=17), "n must be an integer from 1 to 16, got 17"),
        (lambda: SamplingParams(n=2, temperature=0), "n must be 1 at temperature 0, got 2"),
        (lambda: SamplingParams(logprobs=21), "logprobs must be an integer from 0 to 20, got 21"),
        (lambda: SamplingParams(logprobs=True), "logprobs must not be a boolean, got True"),
        (
            lambda: SamplingParams(logprobs_mode="logits"),
            "logprobs_mode must be 'raw', 'processed' or 'both', got 'lo",
        ),
        (
            lambda: SamplingParams(logprobs_mode=[]),
            r"logprobs_mode must be 'raw', 'processed' or 'both', got \[\]",
        ),
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
        with pytest.raises(ValueError, match=r"^logit_bias must be an object of id: bias") as caught:
            checks.logit_bias(value)
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
