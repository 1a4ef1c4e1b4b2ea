"""Sampling parameters, stops, and the tokens of a window that a request keeps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_mtp.errors import escape, quote
from compiled_mtp.plan import RowLogprobs
from compiled_mtp.request import Request, RequestOutput, SamplingParams, derive_seed
from compiled_mtp.sampling.stop_strings import StopStrings
from compiled_mtp.scheduler.last_outputs import cut_short


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
        ({"stop_token_ids": (-1,)}, r"^stop_token_ids must hold token ids from 0, got -1; "),
        (
            {"stop_token_ids": range(65)},
            r"^stop_token_ids must hold at most 64 ids, got 65; use stop strings",
        ),
        ({"stop_token_ids": ["a"]}, r"^stop_token_ids.0 must be a valid integer"),
        ({"seed": 2**63}, r"^seed must fit into 64 signed bits"),
        ({"presence_penalty": 2.5}, r"^presence_penalty must be a number from -2 to 2, got 2.5; "),
        ({"presence_penalty": None}, r"^presence_penalty must be a valid number, got None; "),
        ({"frequency_penalty": -3}, r"^frequency_penalty must be a number from -2 to 2, got -3.0; "),
        ({"frequency_penalty": True}, r"^frequency_penalty must not be a boolean, got True; "),
        ({"repetition_penalty": 0}, r"^repetition_penalty must be above 0, got 0.0; 1 turns it off"),
        ({"repetition_penalty": 2.1}, r"^repetition_penalty must be a number from 0 to 2, got 2.1; "),
        ({"logit_bias": [5]}, r"^logit_bias must be an object of id: bias, got \[5\]; "),
        ({"logit_bias": {"a": 1}}, r"^logit_bias must hold token ids from 0, got 'a'; "),
        ({"logit_bias": {"5": 101}}, r"^logit_bias\[5\] must be a number from -100 to 100, got 101; "),
        ({"logit_bias": {"5": 1, 5: 2}}, r"^logit_bias must name an id once, got 5; "),
        ({"min_tokens": -1}, r"^min_tokens must be an integer from 0 to 128, got -1; "),
        ({"min_tokens": 9, "max_tokens": 8}, r"^min_tokens must be an integer from 0 to 8, got 9; raise max"),
        ({"allowed_token_ids": ()}, r"^allowed_token_ids must hold an id, got \(\); "),
        ({"allowed_token_ids": (-1,)}, r"^allowed_token_ids must hold token ids from 0, got -1; "),
        ({"bad_words": ("a", " ")}, r"^bad_words must hold strings with more than spaces, got ' '; "),
        ({"bad_words": ("\ud800",)}, r"^bad_words must hold Unicode text, got "),
        ({"logprobs": 21}, r"^logprobs must be an integer from 0 to 20, got 21; "),
        ({"logprobs": True}, r"^logprobs must not be a boolean, got True; "),
        ({"logprobs_mode": "cooked"}, r"^logprobs_mode must be 'raw', 'processed' or 'both', got 'cooked'; "),
        ({"n": 0}, r"^n must be an integer from 1 to 16, got 0; "),
        ({"n": 17}, r"^n must be an integer from 1 to 16, got 17; send more requests"),
        ({"n": 2, "temperature": 0}, r"^n must be 1 at temperature 0, got 2; "),
        ({"response_format": "json"}, r"^response_format must be a valid dictionary, got 'json'; "),
        ({"guided_choice": "yes"}, r"^guided_choice must be a valid tuple, got 'yes'; "),
        ({"guided_regex": 5}, r"^guided_regex must be a valid string, got 5; "),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            r"^guided_regex must be left out with response_format, got both; ",
        ),
        ({"tools": {"a": 1}}, r"^tools must be a valid list, got "),
        ({"tool_choice": 5}, r"^tool_choice.str must be a valid string, got 5; "),
        ({"chat_template_kwargs": "thinking"}, r"^chat_template_kwargs must be a valid dictionary, got "),
        ({"echo": True}, r"^echo must be left out, got True; put the prompt before"),
        ({"suffix": ""}, r"^suffix must be left out, got ''; "),
        ({"best_of": 1}, r"^best_of must be left out, got 1; use n and logprobs"),
        (
            {"no_repeat_ngram_size": 0},
            r"^no_repeat_ngram_size must be left out, got 0; use repetition_penalty",
        ),
        ({"typical_p": 1}, r"^typical_p must be left out, got 1; use top_p or min_p"),
        ({"thinking_budget": 10}, r"^thinking_budget must be left out, got 10; set max_tokens"),
        ({"truncate_prompt_tokens": 5}, r"^truncate_prompt_tokens must be left out, got 5; cut the prompt"),
        ({"prompt_logprobs": -1}, r"^prompt_logprobs must be an integer from 0 to 20, got -1; "),
        ({"topp": True}, r"^topp must be a sampling parameter, got an unknown name"),
        ({"topp": [True]}, r"^topp must be a sampling parameter, got an unknown name"),
        ({"topp": 0.5}, r"^topp must be a sampling parameter, got an unknown name; known are max_tokens, "),
    ],
)
def test_bad_parameter_is_refused_by_name_in_one_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["temperature", "stop_token_ids", "seed", "logit_bias", "unknown" * 10**6])
@pytest.mark.parametrize("value", ["x" * 5_000_000, ["x" * 5_000_000] * 3, "\x1b[2J\n" * 99, 10**4000])
def test_a_callers_value_is_quoted_short_and_on_one_printable_line(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="must") as error:
        SamplingParams(**{name: value})
    assert len(str(error.value)) < 1000
    assert str(error.value).isprintable()


@given(st.one_of(st.text(), st.binary(), st.integers(), st.lists(st.text())))
def test_a_quoted_value_is_short_and_printable(value: object) -> None:
    assert len(quote(value)) <= 400
    assert quote(value).isprintable()
    assert escape("\x07" * 50 + "a" * 50, 60).isprintable()


def test_the_seeds_of_requests_differ_and_the_first_is_the_engines() -> None:
    seeds = [derive_seed(7, index) for index in range(1000)]
    assert seeds[0] == 7
    assert seeds == [derive_seed(7, index) for index in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert set(seeds[1:]).isdisjoint(derive_seed(8, index) for index in range(1000))


def test_many_long_stops_cost_little_per_token() -> None:
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


def test_every_default_of_a_checkpoint_applies_and_can_be_overridden() -> None:
    defaults = {"repetition_penalty": 1.05, "presence_penalty": 1.5, "frequency_penalty": 0.25}
    params = SamplingParams().with_defaults(defaults)
    assert {name: getattr(params, name) for name in defaults} == defaults
    assert SamplingParams(repetition_penalty=1.0).with_defaults(defaults).repetition_penalty == 1.0
    with pytest.raises(ValueError, match=r"^generation_config.json of the checkpoint: repetition_penalty"):
        SamplingParams().with_defaults({"repetition_penalty": 3})


def test_min_tokens_delays_stop_ids_eos_and_stop_strings() -> None:
    request = make_request(eos="e", stop_token_ids=(ord("s"),), stop=("ab", "xyz"), min_tokens=6)
    assert take(request, "ab", "es", "xy", "zs") == ("abes", 7, "stop")
    # The first token after those that min_tokens protects may end the request.
    request = make_request(eos="e", min_tokens=2)
    assert take(request, "ee", "e") == ("ee", 3, "stop")
    request = make_request(stop=("ab",), min_tokens=2)
    assert take(request, "ab", "ab") == ("ab", 4, "stop")


def take(request: Request, *rounds: str) -> tuple[str, int, str | None]:
    """Return the text and the number of tokens that a request keeps of the rounds, and how it ended."""
    text = ""
    for tokens in rounds:
        assert request.finish_reason is None
        text += request.append(list(map(ord, tokens)), len(tokens) - 1, 0.0)[1]
    return text, len(request.output_token_ids), request.finish_reason


@given(
    text=st.text("abes", min_size=12, max_size=12),
    sizes=st.lists(st.integers(1, 8), min_size=12, max_size=12),
    min_tokens=st.integers(0, 8),
    stop=st.sampled_from([(), ("ab",), ("sa", "bb", "aba")]),
    max_tokens=st.sampled_from([8, 11, 100]),
)
def test_a_request_ends_at_the_same_token_in_any_rounds(
    text: str, sizes: list[int], min_tokens: int, stop: tuple[str, ...], max_tokens: int
) -> None:
    """min_tokens may be reached inside a round, and a stop may follow in it."""
    found = []
    for rounds in ([1] * 12, sizes):
        request = make_request(max_tokens, eos="e", stop=stop, min_tokens=min_tokens, logprobs=0)
        parts, left = [""], text
        while left and request.finish_reason is None:
            tokens, left = left[: rounds[0]], left[rounds[0] :]
            rounds = rounds[1:]
            ids = list(map(ord, tokens))
            parts.append(request.append(ids, len(ids) - 1, 0.0, logprobs=rows_of(tokens))[1])
        entries = request.take_logprobs()
        found.append(("".join(parts), request.output_token_ids, request.finish_reason, entries))
    assert found[0] == found[1]


class HoldingDetokenizer(CharDetokenizer):
    """Token i is chr(i) and half a character, which the next token makes whole or `flush` gives up."""

    def __init__(self) -> None:
        self.held = ""

    def add(self, token_id: int) -> str:
        text, self.held = self.held + chr(token_id), "\ufffd"
        return text

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


def test_no_half_character_follows_a_stop_string() -> None:
    params = SamplingParams(max_tokens=9, stop=("b",), include_stop=True)
    request = Request("r", [1, 2, 3], params, detokenizer=HoldingDetokenizer())
    assert take(request, "ab") == ("a\ufffdb", 2, "stop")
    params = SamplingParams(max_tokens=2)
    request = Request("r", [1, 2, 3], params, detokenizer=HoldingDetokenizer())
    assert take(request, "ab") == ("a\ufffdb\ufffd", 2, "length")


class ScriptGuide:
    """A grammar of one text; after it, it ends, or with `is_broken` can take no token."""

    def __init__(self, text: str, is_broken: bool = False) -> None:
        self.left, self.is_broken = text, is_broken
        self.is_ended, self.error = False, None

    def accept(self, token_ids: Sequence[int]) -> int:
        for index, token_id in enumerate(token_ids):
            if self.is_ended or self.error is not None:
                return index
            if not self.left.startswith(chr(token_id)):
                self.error = "the grammar cannot go on"
                return index
            self.left = self.left[1:]
            self.is_ended = not self.left and not self.is_broken
        return len(token_ids)


@pytest.mark.parametrize(
    ("guide", "fields", "rounds", "expected"),
    [
        (ScriptGuide("abcd"), {}, ("abc", "dzz"), ("abcd", 4, "stop")),
        # Regardless of min_tokens and ignore_eos.
        (ScriptGuide("abe"), {"min_tokens": 50, "ignore_eos": True}, ("ab", "ez"), ("abe", 3, "stop")),
        (ScriptGuide("abc", is_broken=True), {}, ("ab", "cde"), ("abc", 3, "error")),
        # The first stop counts.
        (ScriptGuide("abc", is_broken=True), {"stop": ("b",)}, ("abcde",), ("a", 2, "stop")),
        (ScriptGuide("abc", is_broken=True), {"max_tokens": 3}, ("abcde",), ("abc", 3, "length")),
        (ScriptGuide("abc"), {"max_tokens": 3}, ("abcde",), ("abc", 3, "stop")),
        (ScriptGuide("ab"), {"stop_token_ids": (ord("d"),)}, ("abcd",), ("ab", 2, "stop")),
    ],
)
def test_a_grammar_ends_its_request_token_by_token(
    guide: ScriptGuide, fields: dict[str, object], rounds: tuple[str, ...], expected: tuple[object, ...]
) -> None:
    request = make_request(eos="e", **fields)
    request.guide = guide
    assert take(request, *rounds) == expected
    assert request.error == ("the grammar cannot go on" if expected[2] == "error" else None)


def rows_of(tokens: str) -> RowLogprobs:
    """Return log probability -i for token i, and the two most likely ids."""
    ids = list(map(ord, tokens))
    tops = [[i, i + 1, i + 2] for i in ids]
    return RowLogprobs(
        [-float(i) for i in ids],
        [1] * len(ids),
        tops,
        [[-float(t) for t in top] for top in tops],
        [1.0] * len(ids),
    )


@pytest.mark.parametrize(
    ("fields", "rounds", "held"),
    [
        ({}, ("ab", "cd"), [2, 2]),
        # Text that may begin a stop holds its entries back.
        ({"stop": ("bcd",)}, ("ab", "ca"), [1, 3]),
        ({"stop": ("bcd",)}, ("ab", "cd", "e"), [1, 3]),
        ({"stop": ("xbc",)}, ("axb",), [1]),
        ({"stop_token_ids": (ord("c"),)}, ("ab", "cd"), [2, 1]),
        ({"max_tokens": 3}, ("ab", "cd"), [2, 1]),
    ],
)
def test_an_entry_for_each_token_comes_with_its_text(
    fields: dict[str, object], rounds: tuple[str, ...], held: list[int]
) -> None:
    request = make_request(logprobs=2, **fields)
    request.token_bytes = lambda token_id: bytes([token_id])
    entries, counts = [], []
    for tokens in rounds:
        if request.finish_reason is None:
            request.append(list(map(ord, tokens)), 0, 0.0, logprobs=rows_of(tokens))
            new = request.take_logprobs()
            assert new is not None
            counts.append(len(new))
            entries += new
    assert counts == held
    if request.finish_reason is None:
        request.finish("abort")
        entries += request.take_logprobs() or []
    assert [entry.token_id for entry in entries] == request.output_token_ids
    for entry in entries:
        assert (entry.logprob, entry.bytes, len(entry.top)) == (-entry.token_id, bytes([entry.token_id]), 2)


def test_log_probabilities_come_only_on_request() -> None:
    request = make_request()
    request.append([65], None, 0.0)
    assert request.take_logprobs() is None


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
    """Find the first stop the simple way: grow the text by a character until it ends with a stop."""
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
        # Only text that may begin a stop is held back.
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


def append_one(request: Request, token_id: int, num_drafts: int | None) -> RequestOutput:
    """Append one token and return its output; nothing is committed."""
    kept, text = request.append([token_id], num_drafts, 0.0)
    return RequestOutput(request.request_id, kept, text, request.metrics)


def test_a_request_that_is_cut_short_repeats_no_output_that_waits() -> None:
    """The newest decides: an interrupt came after its output was made, and before it was committed."""
    request = make_request()
    outputs = [append_one(request, ord("a"), None)]
    request.commit()
    outputs.append(append_one(request, ord("b"), 0))
    last = cut_short(request, "error", "interrupted", outputs)
    assert (last.new_text, last.metrics.output_tokens) == ("", 2)


def test_a_request_that_is_cut_short_repeats_no_prompt_logprobs() -> None:
    """An interrupt came inside `commit`, after it had marked the tokens as delivered."""
    request = make_request(prompt_logprobs=0)
    rows = RowLogprobs([-1.0, -2.0], [1, 2], [[], []], [[], []], [0.0, 0.0])
    request.add_prompt_logprobs(0, [2, 3], rows)
    first = append_one(request, ord("a"), None)._replace(prompt_logprobs=request.take_prompt_logprobs())
    assert first.prompt_logprobs is not None
    request._delivered = request.metrics
    assert cut_short(request, "error", "interrupted", [first]).prompt_logprobs is None
    # The output itself was lost.
    assert cut_short(request, "error", "interrupted", []).prompt_logprobs == first.prompt_logprobs
