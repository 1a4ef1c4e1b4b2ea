"""The page in headless Chromium: turns that are copied, made again and edited, and answers as Markdown."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.pages import ESCAPE, Page
from tests.server.serving import Running, ScriptedEngine

pytestmark = pytest.mark.browser
MARKDOWN = """# Heading <b>

A *word*, **two** `code<x>` & a [link](https://example.org/a) and [no link](javascript:alert(1)).

1. one
   - inner
2. two

```python
if a < b:
    return "x"
```

| a | b |
|---|---|
| 1 | <img src=x onerror="document.title='hit'"> |

![picture](https://example.org/p.png)

<script>document.title = 'hit'</script>
"""


def click(page: Page, label: str, turn: int = -1) -> None:
    """Click a button of a turn by its words."""
    turns = page.all(".turn")
    (button,) = [one for one in turns[turn].find_elements("css selector", "button") if one.text == label]
    button.click()


def labels(page: Page) -> list[list[str]]:
    script = (
        "return [...document.querySelectorAll('.turn')]"
        ".map((turn) => [...turn.querySelectorAll('.actions button')].map((one) => one.textContent))"
    )
    return list(page.run(script))


def chat(page: Page, talker: ScriptedEngine, *pairs: tuple[str, str]) -> None:
    for asked, said in pairs:
        num_answers = page.count(".foot:not(:empty)")
        talker.say(said)
        page.ask(asked)
        page.wait_for_end(num_answers + 1)


def prompt_of(talker: ScriptedEngine, *messages: tuple[str, str]) -> list[int]:
    text = talker.tokenizer.apply_chat_template([{"role": role, "content": said} for role, said in messages])
    return talker.tokenizer.encode(text)


@pytest.fixture
def chatting(page: Page, scripted: Running, talker: ScriptedEngine) -> Page:
    page.open(scripted)
    page.choose("chat")
    chat(page, talker, ("One?", "First."), ("Two?", "Second."), ("Three?", "Third."))
    return page


def test_an_answer_is_copied_as_it_was_written(chatting: Page) -> None:
    page = chatting
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    click(page, "Copy", turn=1)
    page.wait(lambda: page.run("return window.copied") == "Second.")
    page.wait(lambda: labels(page)[1][0] == "Copied")
    page.wait(lambda: labels(page)[1][0] == "Copy")
    page.run("navigator.clipboard.writeText = async () => { throw new Error('no'); }")
    click(page, "Copy", turn=1)
    page.wait(lambda: labels(page)[1][0] == "Not copied")


def test_the_last_answer_is_made_again(chatting: Page, talker: ScriptedEngine) -> None:
    page = chatting
    assert labels(page) == [*[["Copy", "Edit prompt"]] * 2, ["Copy", "Regenerate", "Edit prompt"]]
    page.set(prompt="half a thought")
    talker.say("Another.")
    click(page, "Regenerate")
    page.wait(lambda: page.texts(".answer:not(.reasoning)") == ["First.", "Second.", "Another."])
    page.wait_for_end(3)
    history = [("user", "One?"), ("assistant", "First."), ("user", "Two?"), ("assistant", "Second.")]
    assert talker.seen[-1][0] == prompt_of(talker, *history, ("user", "Three?"))
    # The text in the box is another one, and stays.
    assert page.run("return document.getElementById('prompt').value") == "half a thought"


def test_an_earlier_turn_is_edited(chatting: Page, talker: ScriptedEngine) -> None:
    page = chatting
    click(page, "Edit prompt", turn=1)
    assert page.focused() == "prompt"
    assert page.one("#editing").is_displayed()
    assert page.run("return document.getElementById('prompt').value") == "Two?"
    page.press(ESCAPE)
    assert not page.one("#editing").is_displayed()
    assert page.count(".turn") == 3
    click(page, "Edit prompt", turn=1)
    talker.say("New.")
    page.set(prompt="Two, or three?")
    page.one("#send").click()
    page.wait(lambda: page.texts(".answer:not(.reasoning)") == ["First.", "New."])
    page.wait_for_end(2)
    sent = [("user", "One?"), ("assistant", "First."), ("user", "Two, or three?")]
    assert talker.seen[-1][0] == prompt_of(talker, *sent)
    assert not page.one("#editing").is_displayed()
    chat(page, talker, ("And?", "Last."))
    sent += [("assistant", "New."), ("user", "And?")]
    assert talker.seen[-1][0] == prompt_of(talker, *sent)


def test_a_completion_is_made_again_below(page: Page, scripted: Running, talker: ScriptedEngine) -> None:
    page.open(scripted)
    page.choose("text")
    talker.say("once")
    page.ask("x = ")
    page.wait_for_end()
    talker.say("twice")
    # The mode is that of the answer again.
    page.choose("chat")
    click(page, "Regenerate")
    page.wait_for_end(2)
    assert page.texts(".answer:not(.reasoning)") == ["x = once", "x = twice"]
    assert talker.seen[-1][0] == talker.seen[-2][0]


def test_markdown_becomes_elements_and_nothing_else(
    page: Page, scripted: Running, talker: ScriptedEngine
) -> None:
    page.open(scripted)
    page.choose("chat")
    page.one("#formatted").click()
    talker.say(MARKDOWN, chunk=3)
    page.set(max_tokens="")
    page.ask("Show.")
    page.wait_for_end()
    root = ".turn .markdown"
    assert page.one(root).is_displayed()
    assert not page.one(".answer:not(.reasoning)").is_displayed()
    assert page.text(f"{root} h4") == "Heading <b>"
    assert page.texts(f"{root} :is(em, strong)") == ["word", "two"]
    assert page.texts(f"{root} p code") == ["code<x>"]
    found = "[...document.querySelectorAll('.markdown a')]"
    links: Any = page.run(f"return {found}.map((one) => [one.href, one.textContent, one.rel])")
    assert links == [
        ["https://example.org/a", "link", "noopener noreferrer"],
        ["https://example.org/p.png", "picture", "noopener noreferrer"],
    ]
    assert "no link" in page.text(root)
    assert page.count(f"{root} ol > li") == 2
    assert page.text(f"{root} ol > li ul li") == "inner"
    assert page.text(f"{root} .code-head span") == "python"
    assert page.text(f"{root} pre") == 'if a < b:\n    return "x"'
    assert page.texts(f"{root} td")[0] == "1"
    assert "onerror" in page.texts(f"{root} td")[1]
    assert "<script>document.title = 'hit'</script>" in page.text(root)
    assert page.count(f"{root} :is(img, script)") == 0
    assert page.run("return document.title") == "compiled-mtp"
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    click(page, "Copy code")
    page.wait(lambda: page.run("return window.copied") == 'if a < b:\n    return "x"')
    # The tokens are there again, and they are the text.
    page.one("#formatted").click()
    assert page.one(".answer:not(.reasoning)").is_displayed()
    assert page.text(".answer:not(.reasoning)") == MARKDOWN


def test_deep_markdown_stays_text(page: Page, scripted: Running) -> None:
    page.open(scripted)
    text = "> " * 5000 + "x"
    script = """
        const [text, done] = arguments;
        import("/page/markdown.js").then(({ render }) => done(render(text).map((one) => one.outerHTML)));
    """
    (shown,) = page.driver.execute_async_script(script, text)
    assert shown == f"<p>{text.replace('>', '&gt;')}</p>"


def test_the_page_says_what_the_shipped_model_can_do(page: Page, real: Running, scripted: Running) -> None:
    page.open(real)
    assert page.one("#shipped").is_displayed()
    assert "continues Python source" in page.text("#shipped")
    page.open(scripted)
    assert not page.one("#shipped").is_displayed()


def test_there_is_no_bar_of_one_draft(page: Page, scripted: Running, talker: ScriptedEngine) -> None:
    page.open(scripted)
    page.choose("chat")
    talker.say("one two", chunk=1)
    page.ask("Short.")
    page.wait_for_end()
    assert page.count("#chart .bar-kept") == 0
    assert set(page.texts("#chart .value")) <= {"–"}
