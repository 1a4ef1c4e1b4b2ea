"""llguidance's limits end a request by its own tokens alone, whatever drafts and earlier requests did."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from compiled_mtp.sampling.grammar import GrammarCompiler, MaskFiller
from compiled_mtp.sampling.grammar_source import (
    GrammarSource,
    from_lark,
    from_regex,
    json_rule,
    regex_terminal,
)
from tests.sampling.grammars import compiler, decode

# Ambiguous repeats, long counts, overlapping classes, alternatives with common beginnings.
AWKWARD = (
    r"[a-z]{1,30}([-_ ][a-z0-9 ]{1,30}){0,12}",
    r"([a-z]{0,50}e[a-z ]{0,50}){30}",
    r"(a|b|[a-z ])*a[a-z ]{40}",
    r"(?s:.*)x(?s:.){300}",
    r"([a-z]{1,8} ?){1,200}",
    r"(.*[aeiou].{3,20}){3}",
    r"[\w ]{1,500}[.!?]",
    r"(\w+\s?){1,50}",
    r"(?s:.){1,400}",
    r"(([a-z]+)[0-9]*){20,60}(x|yz){5}",
    r"(?s:.*)(a|b)(?s:.){200}",
    r"(.{0,30}x.{0,30}){20}",
    r"((?s:.{0,99})a(?s:.{0,99})b){9}",
    r"(\w{1,100}-){0,100}(\d|\w{0,77}x)",
    r"((a|e|i|o|u)?[a-z ]{0,40}(st|ing|ed)){25}",
    r"([^x]{0,200}(x|y)[^y]{0,300}){50}",
    r"(a?){60}a{60}",
    r"(a*)*b|(a|aa)+c",
    r"((ab|a)(c|bcd)*){1,40}d?",
    r"[0-9]{1,3}(,[0-9]{3}){0,40}(\.[0-9]{1,60})?",
    r"(-?[0-9]{1,9}(e[+-]?[0-9]{1,3})?[ ,;]){1,80}",
    r"([A-Z][a-z]{0,20} ){3,60}[A-Z]\.",
    r"(\"([^\"\\]|\\.){0,90}\" ?){1,30}",
    r"(([a-z0-9]{1,20}\.){1,10}[a-z]{2,9}/?){1,9}",
    r"([01]{1,7}|[0-7]{1,5}|[0-9a-f]{1,4})( ([01]{1,7}|[0-7]{1,5}|[0-9a-f]{1,4})){0,70}",
    r"(.{5}|.{7}|.{11}){1,40}",
    r"([a-m]{1,9}[h-z]{1,9}){1,40}",
    r"(the|then|there|these|this|thing|things)( (the|then|there|these|this|thing|things)){0,99}",
    r"(\s*[a-z]+\s*=\s*[a-z0-9]+\s*;){1,60}",
    r"[äöüßéñ€あ漢a-z ]{1,300}",
    r"([ -~]{0,40}[,.] ?){1,40}",
    r"([a-z ]*[aeiou][a-z ]*){12}",
    r"(([^,\n]{0,60},){7}[^,\n]{0,60}\n){1,9}",
    r"<([a-z]{1,9})( [a-z]{1,9}=\"[^\"]{0,50}\"){0,9}>[^<]{0,200}</[a-z]{1,9}>",
    r"(\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2})?,?){1,60}",
    r"(\(([a-z]|\([a-z]{1,4}\)){0,20}\)){1,30}",
    r"([a-z]{3}|[a-z]{5}|[a-z]{8}){10,90}",
    r"(a|ab|abc|abcd|bcd|cd|d| ){1,400}",
    r"[^aeiou]{0,80}([aeiou][^aeiou]{0,30}){0,60}",
    r"(?s:.{0,60}\n){1,40}",
)
# Enough for one mask of the costlier patterns, so that they fail early and the others replace lexers early.
FEW_STATES = 1200


def source_of(pattern: str, is_json: bool) -> GrammarSource:
    """Make a source as from_schema and from_regex do, without the bound on repeats."""
    rule = json_rule({"type": "string", "pattern": f"^{pattern}$"}) if is_json else regex_terminal(pattern)
    return GrammarSource("s", f"body: {rule}\n")


@pytest.fixture(scope="module")
def filler() -> MaskFiller:
    return MaskFiller(num_threads=1)


def check_depths(
    compiled: GrammarCompiler, filler: MaskFiller, source: GrammarSource, limit: int, seed: int = 0
) -> str:
    """Decode at depths 0 to 7, each with the same compiler; return how the request ended."""
    first = None
    for step in range(8):
        try:
            matcher = compiled.compile(source)
        except ValueError as error:
            found: object = str(error)
            how = "refused"
        else:
            tokens = decode(matcher, filler, seed, step, limit)
            # After `limit` tokens only some depths have decoded further, so do not compare how they ended.
            is_cut = len(tokens) == limit
            found = (tokens, is_cut or (matcher.is_ended, matcher.error))
            how = "cut" if is_cut else "ended" if matcher.is_ended else "error"
        first = first or (found, how)
        assert (found, how) == first, (source, step)
    assert first is not None
    return first[1]


@pytest.mark.parametrize("is_json", [False, True])
def test_depths_agree_where_limits_are_met(filler: MaskFiller, is_json: bool) -> None:
    """With few lexer states some masks fail and most lexers are replaced."""
    few = compiler(max_lexer_states=FEW_STATES)
    patterns = AWKWARD[is_json::5]
    hows = [check_depths(few, filler, source_of(pattern, is_json), limit=24) for pattern in patterns]
    assert len(hows) - hows.count("refused") >= 3
    assert "cut" in hows


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_json", [False, True])
def test_depths_agree_for_all_patterns(filler: MaskFiller, is_json: bool) -> None:
    shared = compiler(max_lexer_states=5 * FEW_STATES)
    hows = [check_depths(shared, filler, source_of(pattern, is_json), limit=30) for pattern in AWKWARD]
    print(is_json, {how: hows.count(how) for how in sorted(set(hows))})
    assert len(AWKWARD) == 40
    assert hows.count("cut") + hows.count("ended") >= 20


def test_an_error_after_drafts_counts_them(filler: MaskFiller) -> None:
    """A mask with too many parser items ends the request with the same error, with and without drafts."""
    source = from_lark("start: w{2,30}\nw: A | B\nA: /[a-z]{1,20} /\nB: /[a-z0-9]{1,25} ?/\n")
    few = compiler(step_max_items=400)
    hows = [check_depths(few, filler, source, limit=80, seed=seed) for seed in (0, 2)]
    assert hows == ["error", "error"]


def test_a_grammar_serves_again_what_it_served(filler: MaskFiller) -> None:
    """A costly regex that is sent to one compiler again gives the same tokens and the same end."""
    shared = compiler()
    source = source_of(AWKWARD[1], is_json=False)
    runs = []
    for _ in range(3):
        matcher = shared.compile(source)
        runs.append((decode(matcher, filler, 3, limit=60), matcher.error))
    assert runs == runs[:1] * 3
    # Another request decodes as with its own compiler.
    alone = compiler().compile(source)
    other = shared.compile(source)
    assert decode(other, filler, 4, 3, limit=30) == decode(alone, filler, 4, limit=30)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def test_nothing_of_a_request_is_kept(filler: MaskFiller) -> None:
    """Many requests of different grammars, one after the other, leave no lexer in memory."""
    shared = compiler()

    def serve(number: int) -> None:
        pattern = f"(a|b|[a-z ])*{number}[a-z ]{{40}}"
        decode(shared.compile(from_regex(pattern)), filler, number, limit=25)

    for number in range(4):
        serve(number)
    gc.collect()
    before = resident_mb()
    for number in range(4, 14):
        serve(number)
    gc.collect()
    assert resident_mb() - before < 10
