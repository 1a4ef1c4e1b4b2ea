"""The page's look: text has contrast in both themes, marks hide no glyph, the header fits a phone."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from tests.browser.pages import ESCAPE, SIZE, Page, cut
from tests.server.serving import Running, ScriptedEngine
from tools.page_screenshot import set_window

pytestmark = pytest.mark.browser
Colour = tuple[int, int, int]
# How a round gets a token: a draft of the head, one from the text, the model's for a wrong one, a bonus.
FATES = ("kept", "found", "replaced", "bonus")


def pixels(page: Page, box: dict[str, float]) -> list[list[Colour]]:
    """Return the columns of pixels inside `box` (left, top, right, bottom in CSS pixels), top to bottom."""
    script = """
        const [shot, { left, top, right, bottom }, done] = arguments;
        const bytes = Uint8Array.from(atob(shot), (one) => one.charCodeAt(0));
        createImageBitmap(new Blob([bytes])).then((image) => {
          const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
          canvas.drawImage(image, 0, 0);
          const [x, y] = [Math.ceil(left), Math.ceil(top)];
          const [width, height] = [Math.floor(right) - x, Math.floor(bottom) - y];
          const { data } = canvas.getImageData(x, y, width, height);
          const pixel = (i, j) => [...data.slice(4 * (j * width + i), 4 * (j * width + i) + 3)];
          const column = (i) => Array.from({ length: height }, (_, j) => pixel(i, j));
          done(Array.from({ length: width }, (_, i) => column(i)));
        });
    """
    columns = page.driver.execute_async_script(script, page.driver.get_screenshot_as_base64(), box)
    return [[(red, green, blue) for red, green, blue in column] for column in columns]


def box_of(page: Page, selector: str, start: int, end: int) -> dict[str, float]:
    """Return the box of characters `start` to `end` of an element: its own box, cut at their sides."""
    script = """
        const [selector, start, end] = arguments;
        const element = document.querySelector(selector);
        const range = document.createRange();
        const text = document.createTreeWalker(element, NodeFilter.SHOW_TEXT).nextNode();
        range.setStart(text, start);
        range.setEnd(text, end);
        const { left, right } = range.getBoundingClientRect();
        const { top, bottom } = element.getBoundingClientRect();
        return { left, top, right, bottom };
    """
    return dict(page.run(script, selector, start, end))


def token(text: str) -> dict[str, Any]:
    return {"id": 9, "token": text, "bytes": list(text.encode())}


def show(
    page: Page, server: Running, *rounds: tuple[list[str], list[str], int], looked_up: tuple[int, ...] = ()
) -> None:
    """Show an answer of these rounds, each (tokens, drafts, drafts accepted); its prompt takes a line.

    looked_up: the indices of those whose drafts are from the text.
    """
    page.open(server)
    page.choose("text")
    first = token("first\n")
    events = [{"choices": [{"text": "first\n", "finish_reason": None, "tokens": [first], "rounds": []}]}]
    for index, (tokens, drafts, accepted) in enumerate(rounds):
        source = "lookup" if index in looked_up else "mtp"
        told = {"drafts": [token(draft) for draft in drafts], "accepted": accepted, "source": source}
        choice = {"text": "".join(tokens), "finish_reason": None, "tokens": [*map(token, tokens)]}
        events.append({"choices": [choice | {"rounds": [told]}]})
    cut(page, *map(json.dumps, events), "[DONE]")
    page.ask("A prompt")
    page.wait_for_end()


@pytest.mark.parametrize("is_lit", [False, True])
@pytest.mark.parametrize("is_dark", [False, True])
def test_underscores_do_not_touch_the_marks_under_tokens(
    page: Page, scripted: Running, is_dark: bool, is_lit: bool
) -> None:
    set_window(page.driver, SIZE, is_dark=is_dark)
    name = "__init__"
    rounds = [([name, name], [name], 1), ([name], ["other"], 0)]
    show(page, scripted, *rounds)
    if is_lit:
        page.run("for (const one of document.querySelectorAll('.round')) one.classList.add('shown')")
    for selector in (".answer .kept", ".answer .bonus", ".answer .replaced"):
        edges = 0
        for column in pixels(page, box_of(page, f"{selector} .mark", 0, 2)):
            tint = column[len(column) // 2]
            drawn = [row for row, colour in enumerate(column) if contrast(colour, tint) > 1.15]
            glyph = [row for row in drawn if row - drawn.index(row) == drawn[0]]
            edge = drawn[len(glyph) :]
            # Anti-aliasing spreads a line this thin over two rows.
            assert max(contrast(column[row], tint) for row in glyph) > 2
            # Two empty rows between the glyph and the mark, or below the glyph where the mark is dashed.
            assert (edge or [len(column)])[0] - glyph[-1] > 2
            edges += bool(edge)
        assert edges > 0


def test_indentation_and_line_breaks_are_not_marked(page: Page, scripted: Running) -> None:
    show(
        page,
        scripted,
        (["    ", "    ", "if x"], ["    ", "    "], 2),
        ([":\n        return", " ", "y"], [":\n        return", " "], 2),
        (["\n\n    ", "z\n"], ["\n\n    "], 1),
    )
    assert page.text(".answer:not(.reasoning)").endswith("first\n        if x:\n        return y\n\n    z\n")
    assert page.texts(".answer .mark") == ["first", "if x", ":", "return", " ", "y", "z"]
    # No mark left of a line's first word until its round is highlighted.
    answer = page.one(".answer:not(.reasoning)").rect
    left, top = answer["x"], answer["y"] + 28
    box = {"left": left, "top": top, "right": left + 30, "bottom": answer["y"] + answer["height"]}
    ground = page.style("body", "backgroundColor")
    seen = {colour for line in pixels(page, box) for colour in line}
    assert {f"rgb({red}, {green}, {blue})" for red, green, blue in seen} == {ground}
    page.run("document.querySelector('.round[data-round=\"1\"]').classList.add('shown')")
    assert len({colour for line in pixels(page, box) for colour in line}) > 1


def test_a_wrong_draft_has_no_line_through_its_text(page: Page, scripted: Running) -> None:
    show(page, scripted, (["+"], ["-", "="], 0))
    assert page.text("#rounds .chip.wrong").startswith("-")
    assert page.style("#rounds .chip.wrong", "textDecorationLine") == "none"
    assert "×" in page.run(
        "return getComputedStyle(document.querySelector('#rounds .chip.wrong'), '::after').content"
    )


@pytest.mark.parametrize("is_dark", [False, True])
def test_a_draft_from_the_text_has_a_colour_of_its_own(page: Page, scripted: Running, is_dark: bool) -> None:
    set_window(page.driver, SIZE, is_dark=is_dark)
    rounds = [
        (["one", "two"], ["one"], 1),
        (["three", "four"], ["three", "no"], 1),
        (["five", "six"], ["five"], 1),
    ]
    show(page, scripted, *rounds, looked_up=(1,))
    assert page.texts(".answer .kept .mark") == ["one", "five"]
    assert page.texts(".answer .found .mark") == ["three"]
    # The token behind a wrong draft is the model's, wherever the draft came from.
    assert page.texts(".answer .replaced .mark") == ["four"]
    marks = {name: page.style(f".answer .{name} .mark", "borderBottomColor") for name in FATES}
    assert len(set(marks.values())) == len(FATES)
    assert marks == {name: page.style(f".legend .token.{name}", "borderBottomColor") for name in FATES}
    # Not by colour alone.
    assert len({page.style(f".answer .{name} .mark", "borderBottomStyle") for name in FATES}) == len(FATES)
    assert page.texts("#rounds .chip.found") == ["three (kept draft from the text) "]


@pytest.mark.parametrize("mode", ["chat", "text"])
@pytest.mark.parametrize("width", [320, 360, 414, 600, 768, 1024])
def test_the_header_is_one_row(page: Page, scripted: Running, width: int, mode: str) -> None:
    set_window(page.driver, (width, 740))
    page.open(scripted)
    page.choose(mode)
    page.run("document.getElementById('model').append(new Option('an-organisation/' + 'long'.repeat(20)))")
    page.run("document.getElementById('model').selectedIndex = document.getElementById('model').length - 1")
    boxes = page.run(
        """
        const shown = [...document.querySelectorAll(".bar :is(img, select, .modes span, button, a)")];
        return shown.map((one) => one.getBoundingClientRect()).filter((box) => box.width > 0)
            .map(({ left, right, top, bottom }) => [left, right, top, bottom]);
        """
    )
    assert len(boxes) == (6 if width > 350 else 5)
    for (_, right, _, _), (left, _, _, _) in pairwise(boxes):
        assert left >= right
    assert boxes[0][0] >= 0
    assert boxes[-1][1] <= width
    # All centres have one height, and no text is wrapped.
    middles = [(top + bottom) / 2 for _, _, top, bottom in boxes]
    assert max(middles) - min(middles) < 4
    assert max(bottom - top for _, _, top, bottom in boxes) < 45
    assert page.one(".bar").rect["height"] < 60
    # The model's name keeps room for a few letters and for a finger.
    assert page.one("#model").rect["width"] >= 56
    assert page.run("return document.documentElement.scrollWidth") <= width


def luminance(colour: str | Colour) -> float:
    numbers = re.findall(r"\d+", colour)[:3] if isinstance(colour, str) else colour
    parts = [int(number) / 255 for number in numbers]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str | Colour, other: str | Colour) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("is_dark", [False, True])
def test_text_has_contrast_in_light_and_dark(page: Page, scripted: Running, is_dark: bool) -> None:
    set_window(page.driver, SIZE, is_dark=is_dark)
    page.open(scripted)
    ground, panel = page.style("body", "backgroundColor"), page.style("aside", "backgroundColor")
    assert (luminance(ground) < 0.1) == (luminance(panel) < 0.1) == is_dark
    for selector, background in (
        ("body", ground),
        (".hint", ground),
        ("#welcome p", ground),
        ("summary", ground),
        (".tiles dt", panel),
        (".legend", panel),
        ("#send", page.style("#send", "backgroundColor")),
    ):
        assert contrast(page.style(selector, "color"), background) >= 4.5, selector


def test_a_narrow_window_and_reduced_motion(page: Page, scripted: Running, talker: ScriptedEngine) -> None:
    set_window(page.driver, (360, 640), is_still=True)
    page.open(scripted)
    talker.say("word " * 200)
    talker.step_s = 0.02
    try:
        page.ask("Talk, " + "x" * 80)
        page.wait(lambda: page.count(".answer .token") > 3)
        assert (
            page.run("return getComputedStyle(document.querySelector('.live'), '::after').animationName")
            == "none"
        )
        page.press(ESCAPE)
        page.wait_for_end()
    finally:
        talker.step_s = 0.0
    assert page.run("return document.documentElement.scrollWidth") <= 360
