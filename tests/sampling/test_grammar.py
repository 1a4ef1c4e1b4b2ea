"""Masks of verify windows equal token-by-token decoding for all drafts; so do ends and errors."""

from __future__ import annotations

import json
import random
import threading

import jsonschema
import pytest

from compiled_mtp.sampling.grammar import (
    GrammarCompiler,
    MaskFiller,
    Matcher,
    Reasoning,
    Window,
)
from compiled_mtp.sampling.grammar_source import (
    GrammarSource,
    from_choice,
    from_lark,
    from_regex,
    from_response_format,
    from_schema,
)
from tests.sampling.grammars import (
    EOS,
    FORBIDS_NOTHING,
    IM_END,
    IM_START,
    NUM_IDS,
    TOKENIZER,
    OneByOne,
    compiler,
    decode,
    draw,
    masks,
    random_schema,
    text_of,
    unpack,
)

SHAPE = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "ab"]}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["kind"],
    "additionalProperties": False,
}
SOURCES = {
    "schema": from_schema("s", SHAPE),
    "regex": from_regex(r"(\d{1,3}/)?[a-zé ]{2,9}\.?"),
    "choice": from_choice(["yes", "yesno", "no, „thanks“\n"]),
    "lark": from_lark('start: "(" start? ")" | NAME\nNAME: /[a-z]{1,6}/\n'),
}
# The mask of a row in a reasoning part.
REASONING_MASK = [token_id not in EOS for token_id in range(NUM_IDS)]
# The text after y is ambiguous: the longer it is, the more parser items it costs.
COSTLY = from_lark('start: "n" "o"{0,9} | "y" amb\namb: amb amb | "x" | amb amb amb\n')


@pytest.fixture(scope="module")
def compiled() -> GrammarCompiler:
    return compiler()


@pytest.fixture(scope="module")
def filler() -> MaskFiller:
    return MaskFiller(num_threads=2)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def row_masks(filler: MaskFiller, matcher: Matcher, drafts: list[int]) -> list[list[bool]]:
    buffer = masks(len(drafts) + 3)
    filler.fill([Window(matcher, 1, drafts)], buffer)
    # The rows of other requests keep their values.
    assert set(buffer[0].tolist()) == set(buffer[-1].tolist()) == {0x5A5A5A5A}
    return [unpack(row) for row in buffer[1:-1]]


@pytest.mark.parametrize("seed", range(12))
def test_masks_equal_those_of_one_by_one_decoding(
    compiled: GrammarCompiler, filler: MaskFiller, seed: int
) -> None:
    """All sources in one call per round; windows of any length; allowed, forbidden and random drafts."""
    rng = random.Random(seed)
    matchers = {name: compiled.compile(source) for name, source in SOURCES.items()}
    plain = {name: OneByOne(source) for name, source in SOURCES.items()}
    prefix: dict[str, list[int]] = {name: [] for name in SOURCES}
    for _ in range(10):
        windows, first = [], 0
        for name, matcher in matchers.items():
            if matcher.is_ended:
                continue
            drafts: list[int] = []
            for _ in range(rng.randint(0, 4)):
                mask = plain[name].mask(prefix[name] + drafts)
                is_right = rng.random() < 0.8 and any(mask)
                drafts.append(draw(mask, rng.random()) if is_right else rng.randrange(NUM_IDS))
            windows.append((name, Window(matcher, first, drafts)))
            first += len(drafts) + 1
        buffer = masks(first)
        filler.fill([window for _, window in windows], buffer)
        for name, (matcher, row, drafts) in windows:
            for k in range(len(drafts) + 1):
                assert unpack(buffer[row + k]) == plain[name].mask(prefix[name] + drafts[:k]), (
                    name,
                    drafts,
                    k,
                )
            emitted = drafts[: rng.randint(0, len(drafts))]
            while plain[name].after(prefix[name] + emitted) is None:
                emitted.pop()
            emitted.append(draw(plain[name].mask(prefix[name] + emitted), rng.random()))
            prefix[name] += emitted[: matcher.accept(emitted)]
            assert matcher.error is None
            end = plain[name].after(prefix[name])
            assert end is not None
            assert matcher.is_ended == end.is_stopped()


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("step", [1, 3, 7])
def test_tokens_do_not_depend_on_drafts(
    compiled: GrammarCompiler, filler: MaskFiller, name: str, step: int
) -> None:
    for seed in range(5):
        plain = decode(compiled.compile(SOURCES[name]), filler, (name, seed))
        assert decode(compiled.compile(SOURCES[name]), filler, (name, seed), step) == plain


def test_rows_behind_a_forbidden_draft_allow_all(compiled: GrammarCompiler, filler: MaskFiller) -> None:
    matcher = compiled.compile(SOURCES["choice"])
    wrong, right = ids("(")[0], ids("yes")
    rows = row_masks(filler, matcher, [wrong, *right])
    assert sum(rows[0]) < NUM_IDS
    assert rows[1:] == [FORBIDS_NOTHING] * (len(right) + 1)
    assert matcher.error is None
    assert matcher.accept(right) == len(right)


def test_a_draft_that_is_no_id_breaks_nothing(compiled: GrammarCompiler, filler: MaskFiller) -> None:
    """llguidance's own matcher does not recover from such an id."""
    matcher, first = compiled.compile(SOURCES["choice"]), ids("y")[0]
    expected = row_masks(filler, matcher, [first])
    assert row_masks(filler, matcher, [first, NUM_IDS + 5, first]) == [*expected, *[FORBIDS_NOTHING] * 2]
    assert matcher.error is None
    assert matcher.accept(ids("yesno")) == len(ids("yesno"))
    assert matcher.is_ended


def test_a_window_without_drafts_and_one_with_them_share_a_call(
    compiled: GrammarCompiler, filler: MaskFiller
) -> None:
    one, other = compiled.compile(SOURCES["regex"]), compiled.compile(SOURCES["regex"])
    buffer = masks(3)
    filler.fill([Window(one, 0, []), Window(other, 1, ids("7"))], buffer)
    assert unpack(buffer[0]) == unpack(buffer[1]) != unpack(buffer[2])


def test_ids_without_a_token_are_never_allowed(compiled: GrammarCompiler, filler: MaskFiller) -> None:
    rows = row_masks(filler, compiled.compile(from_regex("(?s:.*)")), [])
    assert not any(rows[0][IM_END + 1 :])
    assert [rows[0][one] for one in EOS] == [True, True]
    assert not rows[0][IM_START]


@pytest.mark.parametrize(
    ("source", "text", "tail", "kept"),
    [
        (from_schema("s", {"type": "boolean"}), "true", [7, 8], 1),
        (from_choice(["no"]), "no", [IM_END], 1),
        # The text alone does not end the grammar: the eos token ends it, and the request keeps that token.
        (from_choice(["a", "aab"]), "a", [IM_END, 9], 2),
        (from_choice(["a", "aab"]), "a", [EOS[0], 9], 2),
    ],
)
def test_a_grammar_ends_at_the_token_that_stops_it(
    compiled: GrammarCompiler, source: GrammarSource, text: str, tail: list[int], kept: int
) -> None:
    matcher = compiled.compile(source)
    tokens = ids(text)
    assert matcher.accept([*tokens, *tail]) == len(tokens) + kept - 1
    assert matcher.is_ended
    assert matcher.error is None
    assert matcher.accept([5]) == 0


def test_a_token_the_grammar_forbids_is_an_error_and_never_an_end(compiled: GrammarCompiler) -> None:
    matcher = compiled.compile(from_choice(["yes"]))
    assert matcher.accept([*ids("y"), *ids("?"), *ids("s")]) == 1
    assert matcher.error is not None
    assert "after 1 tokens" in matcher.error
    assert not matcher.is_ended


def test_a_limit_on_a_rejected_path_changes_nothing(filler: MaskFiller) -> None:
    """Drafts reach the parser's limit; tokens and masks equal those without drafts."""
    small = compiler(step_max_items=200)
    plain = OneByOne(COSTLY, step_max_items=200)
    matcher = small.compile(COSTLY)
    n, o, x, y = (ids(letter)[0] for letter in "noxy")
    drafts = [y, *[x] * 9]
    rows = row_masks(filler, matcher, drafts)
    for k in range(8):
        assert rows[k] == plain.mask(drafts[:k])
    assert rows[-1] == FORBIDS_NOTHING
    assert matcher.error is None
    assert matcher.accept([n]) == 1
    assert row_masks(filler, matcher, [o]) == [plain.mask([n]), plain.mask([n, o])]
    assert matcher.accept([o, IM_END]) == 2
    assert matcher.is_ended


def test_a_matcher_in_error_by_its_past_is_made_anew(compiled: GrammarCompiler) -> None:
    """The next token and the next masks compile a new one; all rows of the masks are written again."""
    plain = OneByOne(SOURCES["choice"])
    matcher, first = compiled.compile(SOURCES["choice"]), ids("yesno")[0]
    matcher._live.consume_token(NUM_IDS + 9)
    assert matcher.accept([first]) == 1
    assert matcher.error is None
    drafts = [*ids("yesno")[1:2], ids("(")[0], first]
    buffer = masks(4)
    matcher._fill_alone(buffer, drafts)
    expected = [plain.mask([first, *drafts[:k]]) for k in range(4)]
    assert [unpack(row) for row in buffer] == expected
    assert expected[2:] == [FORBIDS_NOTHING] * 2


def test_a_limit_on_the_accepted_path_is_an_error(filler: MaskFiller) -> None:
    """The error comes after the same tokens at every depth, even if one window has all of them as drafts."""
    small = compiler(step_max_items=200)
    tokens = [ids("y")[0], *[ids("x")[0]] * 11]
    ended = {}
    for step in (0, 1, 3, 11):
        matcher, output = small.compile(COSTLY), []
        while matcher.error is None:
            drafts = tokens[len(output) : len(output) + step]
            row_masks(filler, matcher, drafts)
            if matcher.error is None:
                # The last token comes from a row for which llguidance could make no mask.
                emitted = [*drafts, tokens[len(output) + len(drafts)]]
                output += emitted[: matcher.accept(emitted)]
        assert not matcher.is_ended
        assert "Too many items" in matcher.error
        ended[step] = output
    assert len(ended[0]) > 4
    assert ended == dict.fromkeys(ended, ended[0])


@pytest.mark.parametrize("end", [(IM_START,), (5, 6, 5)])
@pytest.mark.parametrize("at", range(5))
def test_the_grammar_begins_after_the_reasoning_wherever_that_ends(
    compiled: GrammarCompiler, filler: MaskFiller, end: tuple[int, ...], at: int
) -> None:
    """The end of reasoning is before a window, in it, at its last draft, or across its border."""
    source, body = SOURCES["schema"], ids('{"kind": "a"}')
    plain = OneByOne(source)
    free = [7, 5, 5, 8][: at or 1]
    stream = [*free, *end, *body]
    began = len(free) + len(end)
    for cut in range(len(stream) - 4):
        matcher = compiled.compile(source, Reasoning(end, lead=""))
        assert matcher.accept(stream[:cut]) == cut
        rows = row_masks(filler, matcher, stream[cut : cut + 4])
        for k, row in enumerate(rows):
            reached = cut + k
            expected = plain.mask(stream[began:reached]) if reached >= began else REASONING_MASK
            assert row == expected, (cut, k)
        assert matcher.accept(stream[cut:]) == len(stream) - cut
        assert matcher.is_ended


def test_an_empty_line_may_follow_the_reasoning(compiled: GrammarCompiler) -> None:
    for lead in ("", "\n\n"):
        matcher = compiled.compile(SOURCES["schema"], Reasoning((IM_START,)))
        matcher.accept([8, IM_START, *ids(f'{lead}{{"kind": "ab", "n": 7}}')])
        assert matcher.is_ended
    matcher = compiled.compile(SOURCES["schema"])
    matcher.accept(ids("\n\n"))
    assert matcher.error is not None


def test_reasoning_that_reaches_no_end_is_free_but_for_an_end_of_the_request(
    compiled: GrammarCompiler, filler: MaskFiller
) -> None:
    """Else a request would end without an error though its output does not match the grammar."""
    matcher = compiled.compile(SOURCES["choice"], Reasoning((IM_START,)))
    for _ in range(3):
        assert row_masks(filler, matcher, [3, IM_END]) == [REASONING_MASK] * 3
        assert matcher.accept([3, 4, 5]) == 3
    assert not matcher.is_ended


def test_a_fork_goes_its_own_way(compiled: GrammarCompiler, filler: MaskFiller) -> None:
    matcher = compiled.compile(SOURCES["choice"], Reasoning((IM_START,)))
    matcher.accept([4, IM_START, *ids("y")])
    fork = matcher.fork()
    before = row_masks(filler, matcher, [])
    assert row_masks(filler, fork, []) == before
    fork.accept([*ids("es"), IM_END])
    assert fork.is_ended
    assert not matcher.is_ended
    assert row_masks(filler, matcher, []) == before


def test_compiling_from_many_threads_gives_each_its_own_matcher(filler: MaskFiller) -> None:
    shared = compiler()
    found: list[Matcher] = []
    work = [
        threading.Thread(target=lambda: found.append(shared.compile(SOURCES["choice"]))) for _ in range(8)
    ]
    for one in work:
        one.start()
    for one in work:
        one.join()
    for index, matcher in enumerate(found):
        matcher.accept(ids("y") if index % 2 else ids("n"))
    rows = [row_masks(filler, matcher, [])[0] for matcher in found]
    assert rows[0::2] == [rows[0]] * 4
    assert rows[1::2] == [rows[1]] * 4
    assert rows[0] != rows[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_response_format([1]), "response_format must be an object"),
        (lambda: from_response_format({"type": "xml"}), "response_format.type must be text, json_object or"),
        (
            lambda: from_response_format({"type": "json_schema"}),
            "response_format.json_schema must be an object",
        ),
        (
            lambda: from_response_format({"type": "json_schema", "json_schema": {"schema": 3}}),
            "response_format.json_schema.schema must be an object",
        ),
        (lambda: from_schema("s", {"x-guidance": {"lenient": True}}), "s must not hold x-guidance"),
        (lambda: from_schema("s", {"enum": ["a" * 300_000]}), "s must be at most 131072 bytes"),
        (lambda: from_schema("s", {"const": {1, 2}}), "s must be JSON, got an error"),
        (lambda: from_schema("s", {"const": float("nan")}), "s must be JSON, got an error"),
        (lambda: from_regex(""), "guided_regex must be text that is not empty"),
        (lambda: from_regex("\ud800"), "guided_regex must be Unicode text"),
        (lambda: from_choice("ab"), "guided_choice must be a list of 1 to 4096 strings"),
        (lambda: from_choice([]), "guided_choice must be a list of 1 to 4096 strings"),
        (lambda: from_choice(["a", 3]), r"guided_choice\[1\] must be text"),
        (lambda: from_lark(7), "guided_grammar must be text"),
    ],
)
def test_what_is_no_source_is_refused_by_its_place(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def deep_schema() -> dict[str, object]:
    schema: dict[str, object] = {"type": "null"}
    for _ in range(5000):
        schema = {"items": schema}
    return schema


def test_a_schema_too_deep_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^s must nest at most 64 deep"):
        from_schema("s", deep_schema())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            from_schema("s", {"not": {"type": "null"}}),
            's must be a grammar that can be compiled, got: .*"not"',
        ),
        (
            from_schema("s", {"properties": {"a": {"anyOf": [{}, {"items": {"format": "zip"}}]}}}),
            r"s.properties.a.anyOf\[1\].items must .* Unknown format: zip",
        ),
        (
            from_schema(
                "s", {"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "array", "uniqueItems": True}}}
            ),
            r"s.(items|\$defs.x) must .*uniqueItems",
        ),
        (from_schema("s", {"properties": {"a\nb": {"format": "zip"}}}), r"s.properties.a\\nb must .*: zip"),
        (from_regex("("), "guided_regex must be a grammar that can be compiled, got: .*unclosed group"),
        (from_regex("\x1b[2J("), r"guided_regex must be .*unclosed"),
        (from_lark("start: nothing"), "guided_grammar must be .*unknown name"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_its_place(
    compiled: GrammarCompiler, source: GrammarSource, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        compiled.compile(source)
    assert str(caught.value).isprintable()


def test_a_grammar_too_costly_to_match_is_refused_when_compiled() -> None:
    with pytest.raises(ValueError, match=r"^guided_grammar must be a grammar that can .*Too many items"):
        compiler(step_max_items=20).compile(from_lark('start: amb\namb: amb amb | "x" | amb amb amb\n'))


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"guided_regex must be left out without llguidance.*\[guided\]"):
        compiler().compile(from_regex("a"))


def test_type_text_asks_for_nothing() -> None:
    assert from_response_format({"type": "text"}) is None


def test_json_object_gives_an_object(compiled: GrammarCompiler, filler: MaskFiller) -> None:
    source = from_response_format({"type": "json_object"})
    assert source is not None
    matcher = compiled.compile(source)
    matcher.accept(ids('{"a": [1, {"b": null}]}'))
    assert matcher.is_ended
    # The grammar refuses values of other types and repeated spaces.
    for text in ("[", "{  "):
        matcher = compiled.compile(source)
        matcher.accept(ids(text))
        assert matcher.error is not None


def test_bounded_schemas_end_by_their_grammar_and_validate(
    compiled: GrammarCompiler, filler: MaskFiller
) -> None:
    """300 random schemas, decoded at random from the masks, at depths 0 and 3."""
    rng, num_ended = random.Random(5), 0
    for number in range(300):
        schema = random_schema(rng)
        source = from_response_format({"type": "json_schema", "json_schema": {"schema": schema}})
        assert source is not None
        matcher = compiled.compile(source)
        tokens = decode(matcher, filler, number, step=3 * (number % 2))
        assert matcher.error is None, (schema, matcher.error)
        if matcher.is_ended:
            num_ended += 1
            jsonschema.validate(json.loads(text_of(tokens)), schema)
    assert num_ended >= 285


def test_a_warm_compiler_builds_nothing_at_its_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    compiled = compiler()
    compiled.warm_up()

    def build(*_: object, **__: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(llguidance, "LLTokenizer", build)
    compiled.warm_up()
    assert compiled.compile(from_regex("[ab]+")).error is None
