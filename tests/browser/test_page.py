"""The page in headless Chromium: input, output, and agreement with the engine."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx
import pytest

from compiled_mtp import SamplingParams
from compiled_mtp.frontend.tokenizer import Tokenizer
from tests.browser.pages import END, ENTER, ESCAPE, LEFT, RIGHT, SHIFT, SPACE, TAB, Page
from tests.server.serving import Running, ScriptedEngine, make_family, running

pytestmark = pytest.mark.browser


def accepted_counts(server: Running) -> tuple[list[int], int]:
    """The accepted drafts of the MTP head by their index, and those from the text."""
    text = httpx.get(f"{server.url}/metrics").text
    found = re.findall(r'compiled_mtp_accepted_tokens_total\{index="(\d+)"\} (\d+)', text)
    looked_up = re.search(r"^compiled_mtp_lookup_accepted_tokens_total (\d+)", text, re.M)
    assert looked_up is not None
    by_index = sorted((int(index), count) for index, count in found)
    return [int(count) for _, count in by_index], int(looked_up[1])


def test_colours_agree_with_the_counts_of_the_engine(page: Page, real: Running) -> None:
    page.open(real)
    # The default checkpoint was not trained on conversations.
    assert page.run("return document.querySelector('input[name=mode]:checked').value") == "text"
    page.set(temperature="0.4", seed="3", max_tokens="60")
    before, found_before = accepted_counts(real)
    page.ask("def quicksort(items):\n    ")
    page.wait_for_end()
    after, found = accepted_counts(real)
    accepted = [now - was for now, was in zip_longest(after, before, fillvalue=0)]
    found -= found_before
    assert sum(accepted) > 0
    # In the text, in the list of rounds, and in the chart, which has both kinds of drafts.
    for kind, count in (("kept", sum(accepted)), ("found", found)):
        assert page.count(f".answer .token.{kind}") == count
        assert page.count(f"#rounds .chip.{kind}") == count
    label = str(page.one("#chart").get_attribute("aria-label"))
    bars = [(int(kept), int(of)) for kept, of in re.findall(r"(\d+) of (\d+) kept", label)]
    assert sum(kept for kept, _ in bars) == sum(accepted) + found
    assert all(kept >= own for (kept, _), own in zip(bars, accepted, strict=False))
    # A share of fewer than four drafts says nothing.
    percents = [f"{100 * kept / of:.0f}%" if of >= 4 else "–" for kept, of in bars]
    assert page.texts("#chart .value") == percents
    assert page.count("#chart .bar-kept") == sum(of >= 4 for _, of in bars)
    num_rounds = page.count("#rounds li") - 1
    assert page.text("#per-round") == f"{59 / num_rounds:.2f}"
    # A round ends with one wrong draft, replaced by a token, or a bonus token; the last round may be cut.
    own = page.count("#rounds .chip.replaced") + page.count("#rounds .chip.bonus")
    assert num_rounds - own in (0, 1)
    assert page.count("#rounds .chip.wrong") == page.count("#rounds .chip.replaced")
    assert page.count(".answer .token") == 60
    body = {"model": "default_model", "prompt": "def quicksort(items):\n    ", "max_tokens": 60}
    whole = httpx.post(f"{real.url}/v1/completions", json=body | {"temperature": 0.4, "seed": 3}, timeout=60)
    assert page.text(".answer:not(.reasoning)") == body["prompt"] + whole.json()["choices"][0]["text"]


def test_an_answer_is_walked_through_with_the_keyboard_alone(page: Page, real: Running) -> None:
    page.open(real)
    page.wait(lambda: page.focused() == "prompt")
    page.set(max_tokens="24", seed="3")
    page.press("def f(x):", ENTER)
    page.wait_for_end()
    assert page.focused() == "prompt"
    for name in ("Regenerate", "Copy"):
        page.press(SHIFT, TAB)
        assert page.run("return document.activeElement.textContent") == name
    page.press(SHIFT, TAB)
    assert page.focused().startswith("round")
    assert page.style(":focus", "outlineStyle") == "solid"
    seen = []
    for _ in range(3):
        assert page.one("#card").is_displayed()
        assert page.run("return document.activeElement.getAttribute('aria-describedby')") == "card"
        assert page.text("#rounds .shown") != ""
        assert page.text(".round.shown") == page.run("return document.activeElement.textContent")
        seen.append(page.text("#card p"))
        page.press(RIGHT)
    assert seen[0].startswith("The prompt")
    assert [line.split(":")[0] for line in seen[1:]] == ["Round 1", "Round 2"]
    page.press(END)
    last = page.count("#rounds li") - 1
    assert page.text("#card p").startswith(f"Round {last}:")
    page.press(LEFT)
    assert page.text("#card p").startswith(f"Round {last - 1}:")
    page.press(ESCAPE)
    assert not page.one("#card").is_displayed()
    # Elements that can have the focus say what they are.
    names = page.run(
        "return [...document.querySelectorAll('.round')].map((one) => [one.role, one.ariaLabel])"
    )
    assert names == [["group", "Prompt round"], *(["group", f"Round {i}"] for i in range(1, last + 1))]
    # All other controls are in the order of the Tab key.
    seen_ids = set()
    for _ in range(30):
        page.press(TAB)
        seen_ids.add(page.focused())
    assert {"prompt", "send", "model", "colours", "new", "rounds"} <= seen_ids
    page.run("document.getElementById('colours').focus()")
    page.press(SPACE)
    assert page.style(".answer .token.kept .mark", "backgroundColor") == "rgba(0, 0, 0, 0)"


def test_a_round_under_the_pointer_is_shown(page: Page, real: Running) -> None:
    from selenium.webdriver import ActionChains

    page.open(real)
    page.set(max_tokens="40", seed="3", temperature="0.4")
    example = page.one("#examples button")
    assert example.text == "def quicksort(items):"
    example.click()
    assert page.focused() == "prompt"
    page.wait_for_end()
    assert page.text(".answer .given").startswith(example.get_attribute("textContent") or "-")
    span = page.one(".answer .token.replaced .mark")
    ActionChains(page.driver).move_to_element(span).perform()
    page.wait(lambda: page.one("#card").is_displayed())
    assert span.text.strip() in page.texts("#card .chip.replaced")[0].replace("␣", " ")
    assert page.count("#card .chip.wrong") == 1
    # Nothing moves: the round is marked where it is, in the text and in the list.
    places = """return [".answer .round[data-round='2']", "#rounds li:nth-child(3) .number"].map((one) => {
        const box = document.querySelector(one).getBoundingClientRect();
        return [box.left, box.top, box.width];
    })"""
    page.one("#prompt").click()
    before = page.run(places)
    row = page.one("#rounds li:nth-child(3)")
    ActionChains(page.driver).move_to_element(row).perform()
    page.wait(lambda: page.count(".answer .round[data-round='2'].shown"))
    assert not page.one("#card").is_displayed()
    assert page.run(places) == before


def test_markup_stays_text(page: Page, scripted: Running, talker: ScriptedEngine) -> None:
    evil = (
        "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>\n<b>é 😀</b> &amp;"
    )
    talker.say(evil, by_character=True, chunk=3)
    page.open(scripted)
    page.choose("chat")
    # The driver cannot type characters beyond the first Unicode plane.
    typed = evil.replace("😀", "ö")
    page.ask(typed)
    page.wait_for_end()
    assert page.text(".said") == typed
    assert page.text(".answer:not(.reasoning)") == evil
    assert page.count("#transcript :is(img, script, b)") == 0
    assert page.run("return document.title") == "compiled-mtp"


def test_a_text_is_the_servers_own_where_a_stop_cuts_tokens(page: Page, real: Running) -> None:
    page.open(real)
    page.set(temperature="0", stop_strings="tur", max_tokens="60")
    page.ask("def quicksort(items):")
    page.wait_for_end()
    body: Any = {
        "model": "default_model",
        "prompt": "def quicksort(items):",
        "max_tokens": 60,
        "temperature": 0,
        "stop": ["tur"],
    }
    choice = httpx.post(f"{real.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert page.text(".answer:not(.reasoning)") == body["prompt"] + choice["text"]
    assert "finished" in page.text(".foot")


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_reasoning_part_is_shown_before_its_answer(page: Page, tmp_path: Path, chunk: int) -> None:
    model = make_family(tmp_path / "family", "xml")
    thinker = ScriptedEngine(Tokenizer(model))
    thinker.say("Where? I think.\n\nHere.\n</think>\n\nLooking é.\n", by_character=True, chunk=chunk)
    with running(thinker, model) as server:
        page.open(server)
        page.set(enable_thinking="true")
        page.ask("Look.")
        page.wait_for_end()
    assert page.text(".reasoning") == "Where? I think.\n\nHere."
    assert page.text(".answer:not(.reasoning)") == "Looking é.\n"
    # The colours are those of the visible tokens, in both parts.
    assert page.count(".reasoning .token") > 10
    assert page.count(".answer:not(.reasoning) .round .token") > 5


@pytest.mark.parametrize("how", ["button", "escape"])
def test_an_answer_streams_and_can_be_stopped(
    page: Page, scripted: Running, talker: ScriptedEngine, how: str
) -> None:
    talker.say("word " * 400)
    talker.step_s, num_aborted = 0.03, len(talker.aborted)
    try:
        page.open(scripted)
        page.choose("chat")
        page.ask("Talk.")
        page.wait(lambda: page.count(".answer .token") > 3)
        assert not page.one("#send").is_displayed()
        assert page.text("#status") == "Answering…"
        assert page.text("#speed") != "–"
        page.one("#stop").click() if how == "button" else page.press(ESCAPE)
        page.wait(lambda: page.one("#send").is_displayed())
        assert "stopped by you" in page.text(".foot")
        page.wait(lambda: len(talker.aborted) == num_aborted + 1)
        assert page.focused() == "prompt"
        assert page.text("#status").startswith("Stopped:")
    finally:
        talker.step_s = 0.0
    talker.say("Again.")
    page.ask("And now?")
    page.wait_for_end(2)
    assert page.texts(".answer:not(.reasoning)")[1] == "Again."


def test_turns_follow_each_other_until_a_new_chat(
    page: Page, scripted: Running, talker: ScriptedEngine
) -> None:
    page.open(scripted)
    page.choose("chat")
    page.set(system="Be brief.")
    talker.say("First answer.")
    page.ask("One?\nTwo?")
    page.wait_for_end(1)
    talker.say("Second answer.")
    page.ask("Three?")
    page.wait_for_end(2)
    ids, params = talker.seen[-1]
    template = talker.tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One?\nTwo?"},
            {"role": "assistant", "content": "First answer."},
            {"role": "user", "content": "Three?"},
        ],
    )
    assert ids == talker.tokenizer.encode(template)
    assert (params.max_tokens, params.include_drafts) == (256, True)
    assert page.text("#scope") == "in answer 2"
    page.one(".turn .answer:not(.reasoning)").click()
    assert page.text("#scope") == "in answer 1"
    page.one("#new").click()
    assert page.count(".turn") == 0
    assert page.one("#welcome").is_displayed()
    page.ask("Four?")
    page.wait_for_end(1)
    assert "First answer." not in talker.tokenizer.decode(talker.seen[-1][0])


def test_nothing_is_loaded_from_another_host(page: Page, scripted: Running) -> None:
    for path in ("/", "/page/help.html"):
        page.open(scripted, path)
        names = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
        assert names
        assert all(name.startswith(scripted.url + "/") for name in names)
        assert page.run("return document.querySelectorAll('[style]').length") == 0
    page.open(scripted)
    page.one("nav a").click()
    page.wait(lambda: page.text("h1").startswith("What the page shows"))


def test_the_engine_gets_the_typed_settings(page: Page, scripted: Running, talker: ScriptedEngine) -> None:
    talker.say("Yes.")
    page.open(scripted)
    page.choose("text")
    fields = {
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "7",
        "min_p": "0.1",
        "seed": "-4",
        "max_tokens": "33",
    }
    page.set(**fields, presence_penalty="0.5", frequency_penalty="-0.5", repetition_penalty="1.1")
    page.set(stop_strings="END\n  x\n", system="Not for a text.")
    page.ask("def f():\n    ")
    page.wait_for_end()
    ids, params = talker.seen[-1]
    assert talker.tokenizer.decode(ids) == "def f():\n    "
    expected = SamplingParams(
        **{name: float(value) if "." in value else int(value) for name, value in fields.items()},
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        stop=("END", "  x"),
        include_drafts=True,
    )
    assert params == expected
