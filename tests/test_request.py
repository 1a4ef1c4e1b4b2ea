"""Sampling parameters, stops, and what a request keeps of a window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_mtp.errors import escape, quote
from compiled_mtp.request import Request, SamplingParams, derive_seed
from compiled_mtp.stop_strings import StopStrings


class CharDetokenizer:
    """Token i is the character chr(i)."""

    def add(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def make_request(max_tokens: int = 100, eos: str = "", **fields: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    eos_ids = frozenset(map(ord, eos))
    request = Request("r", [1, 2, 3], params, eos_token_ids=eos_ids, detokenizer=CharDetokenizer())
    request.history.mtp_step = 7
    return request


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_tokens": 0}, r"^max_tokens must be at least 1, got 0; "),
        ({"temperature": -0.1}, r"^temperature must be from 0 to 2, got -0.1; "),
        ({"temperature": 2.5}, r"^temperature must be from 0 to 2, got 2.5; "),
        ({"temperature": float("nan")}, r"^temperature must be a finite number, got nan; "),
        ({"temperature": "hot"}, r"^temperature must be a valid number.*got 'hot'; "),
        ({"top_k": -2}, r"^top_k must be -1 or more, got -2; "),
        ({"top_p": 0.0}, r"^top_p must be above 0 and at most 1, got 0.0; use temperature=0"),
        ({"top_p": 1.5}, r"^top_p must be above 0"),
        ({"min_p": 1.5}, r"^min_p must be from 0 to 1, got 1.5; "),
        ({"stop": ("a", "")}, r"^stop must hold no empty string"),
        ({"stop": ("a", "\ud800")}, r"^stop must hold Unicode text, got \('a', '\\ud800'\); leave lone"),
        ({"stop": ("a",) * 65}, r"^stop must hold at most 64 strings, got \('a', .*\.\.\.\); leave some out"),
        ({"stop": "a" * 257}, r"^stop must hold strings of at most 256 characters, got \('a+\.\.\.a+',\); "),
        ({"x\x1b[31m": 1}, r"^x\\x1b\[31m must be a sampling parameter"),
        ({"stop_token_ids": (-1,)}, r"^stop_token_ids must hold no negative id"),
        ({"seed": 2**63}, r"^seed must fit into 64 signed bits"),
        ({"presence_penalty": 0.5}, r"^presence_penalty must be 0.0, got 0.5; .* is not in this version"),
        ({"frequency_penalty": 0.5}, r"^frequency_penalty .* not in this version"),
        ({"repetition_penalty": 1.1}, r"^repetition_penalty must be 1.0, got 1.1; .* not in this version"),
        ({"logit_bias": {5: 1.0}}, r"^logit_bias .* not in this version"),
        ({"min_tokens": 3}, r"^min_tokens .* not in this version"),
        ({"logprobs": 1}, r"^logprobs .* not in this version"),
        ({"n": 2}, r"^n must be 1, got 2; n is not in this version"),
        ({"topp": 0.5}, r"^topp must be a sampling parameter, got an unknown name; known are max_tokens, "),
    ],
)
def test_bad_parameter_is_refused_by_name_in_one_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["temperature", "stop_token_ids", "seed", "logit_bias", "unknown" * 10**6])
@pytest.mark.parametrize("value", ["x" * 5_000_000, ["x" * 5_000_000] * 3, "\x1b[2J\n" * 99, 10**4000])
def test_what_a_caller_gave_is_told_short_and_on_one_printable_line(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="must") as error:
        SamplingParams(**{name: value})
    assert len(str(error.value)) < 1000
    assert str(error.value).isprintable()


@given(st.one_of(st.text(), st.binary(), st.integers(), st.lists(st.text())))
def test_a_quoted_value_is_short_and_printable(value: object) -> None:
    assert len(quote(value)) <= 400
    assert quote(value).isprintable()
    assert escape("\x07" * 50 + "a" * 50, 60).isprintable()


def test_the_seeds_of_requests_are_apart_and_the_first_is_the_engines() -> None:
    seeds = [derive_seed(7, index) for index in range(1000)]
    assert seeds[0] == 7
    assert seeds == [derive_seed(7, index) for index in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert set(seeds[1:]).isdisjoint(derive_seed(8, index) for index in range(1000))


def test_many_long_stops_cost_little_a_token() -> None:
    stops = StopStrings(["a" * 200 + str(index) for index in range(64)], include_stop=False)
    looks, advance = [0], stops._advance

    def counted(node: int, char: str) -> int:
        looks[0] += 1
        return advance(node, char)

    stops._advance = counted  # type: ignore[method-assign]
    shown = "".join(stops.add("aaaa")[0] for _ in range(500))
    assert len(shown) == 2000 - 200
    assert looks[0] == 2000


def test_parameters_are_frozen_and_a_single_stop_may_be_a_string() -> None:
    params = SamplingParams(stop="end", top_k=-1)  # type: ignore[arg-type]
    assert params.stop == ("end",)
    with pytest.raises(ValueError, match="frozen"):
        params.top_k = 3  # type: ignore[misc]


def test_defaults_of_the_checkpoint_fill_only_what_the_caller_left_out() -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "pad_token_id": 7}
    params = SamplingParams(temperature=1.0, max_tokens=5).with_defaults(generation)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 20, 0.95, 0.0)
    assert params.max_tokens == 5
    assert SamplingParams().with_defaults({}) == SamplingParams()


def test_defaults_that_this_version_lacks_are_refused_and_can_be_overridden() -> None:
    with pytest.raises(ValueError, match=r"generation_config.json of the checkpoint: repetition_penalty"):
        SamplingParams().with_defaults({"repetition_penalty": 1.05})
    params = SamplingParams(repetition_penalty=1.0).with_defaults({"repetition_penalty": 1.05})
    assert params.repetition_penalty == 1.0


def test_seed_is_drawn_when_not_given_and_reported() -> None:
    drawn = [make_request().metrics.seed for _ in range(3)]
    assert len(set(drawn)) == 3
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert make_request(seed=-5).metrics.seed == -5


def test_request_refuses_an_empty_prompt_and_stops_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="prompt must have at least one token"):
        Request("r", [], SamplingParams())
    with pytest.raises(ValueError, match="stop must be empty without a tokenizer"):
        Request("r", [1], SamplingParams(stop=("x",)))


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, int] | None:
    """The obvious way: grow the text by a character until it ends with a stop."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3).map(tuple),
    include_stop=st.booleans(),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(
    pieces: list[str], stops: tuple[str, ...], include_stop: bool
) -> None:
    matcher, shown, is_found = StopStrings(stops, include_stop), "", False
    text = "".join(pieces)
    expected = first_stop(text, stops)
    seen = ""
    for piece in pieces:
        new, is_found = matcher.add(piece)
        shown, seen = shown + new, seen + piece
        if is_found:
            break
        # What is held back may be the beginning of a stop, and nothing else is held back.
        tails = [n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stops)]
        held = max((n for n in tails if n and any(n < len(s) for s in stops)), default=0)
        assert len(seen) - len(shown) <= held
    if expected is None:
        assert not is_found
        assert shown + matcher.flush() == text
    else:
        assert is_found
        assert shown == text[: expected[1] if include_stop else expected[0]]
        assert matcher.flush() == ""


def test_text_is_held_back_only_while_it_may_begin_a_stop() -> None:
    matcher = StopStrings(("</s>", "stop"), include_stop=False)
    assert matcher.add("a<") == ("a", False)
    assert matcher.add("/") == ("", False)
    assert matcher.add("b st") == ("</b ", False)
    assert matcher.add("op!") == ("", True)


def test_eos_inside_a_window_cuts_tokens_text_and_metrics_together() -> None:
    request = make_request(eos="$")
    assert request.append([ord("a")], num_drafts=None, now_s=0.0) == ([ord("a")], "a")
    kept, text = request.append([ord(c) for c in "b$cd"], num_drafts=3, now_s=0.0)
    assert kept == [ord("b"), ord("$")]
    assert text == "b"
    assert request.finish_reason == "stop"
    metrics = request.metrics
    assert metrics.output_tokens == 3
    assert metrics.rounds == 1
    assert metrics.accepted_by_index == [1, 1, 0, 0, 0, 0, 0]
    assert metrics.drafted_by_index == [1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "fields, text, reason, kept",
    [
        ({"eos": "$"}, "ab", "stop", 3),
        ({"eos": "$", "include_stop": True}, "ab$", "stop", 3),
        ({"eos": "$", "ignore_eos": True}, "ab$cd", None, 5),
        ({"eos": "$", "ignore_eos": True, "stop_token_ids": (ord("c"),)}, "ab$", "stop", 4),
        ({"stop": ("b$", "cd")}, "a", "stop", 3),
        ({"stop": ("b$",), "include_stop": True}, "ab$", "stop", 3),
        ({"stop": ("dx",)}, "ab$c", None, 5),
        ({"stop": ("dx",), "max_tokens": 5}, "ab$cd", "length", 5),
        ({"max_tokens": 2}, "ab", "length", 2),
        ({"max_tokens": 3, "eos": "$"}, "ab", "stop", 3),
    ],
)
@pytest.mark.parametrize("window", [1, 2, 5])
def test_stops_do_not_depend_on_the_window(
    fields: dict[str, object], text: str, reason: str | None, kept: int, window: int
) -> None:
    request = make_request(**fields)  # type: ignore[arg-type]
    tokens = [ord(c) for c in "ab$cd"]
    got, shown = [], ""
    for start in range(0, len(tokens), window):
        new_tokens, new_text = request.append(tokens[start : start + window], num_drafts=7, now_s=0.0)
        got, shown = got + new_tokens, shown + new_text
        if request.finish_reason is not None:
            break
    assert (shown, request.finish_reason, len(got)) == (text, reason, kept)
    assert request.output_token_ids == got == tokens[:kept]


def test_abort_gives_back_the_text_that_was_held() -> None:
    request = make_request(stop=("xyz",))
    assert request.append([ord("a"), ord("x")], num_drafts=7, now_s=0.0)[1] == "a"
    assert request.finish("abort") == "x"
    assert request.finish_reason == "abort"
