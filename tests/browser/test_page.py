"""The page in headless Chromium: what is typed, what is shown, and that it agrees with the engine."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from compiled_mtp import Engine, EngineConfig, SamplingParams
from compiled_mtp.tokenizer import Tokenizer
from tests.server.serving import CHECKPOINT, Running, ScriptedEngine, make_family, running
from tools.page_screenshot import open_browser, set_window

pytestmark = pytest.mark.browser
SIZE = (1280, 800)
# selenium is no package of `make test`, which collects this file too.
SHIFT, ENTER, ESCAPE, TAB, LEFT, RIGHT, END, SPACE = (
    *("\ue008", "\ue007", "\ue00c", "\ue004"),
    *("\ue012", "\ue014", "\ue010", "\ue00d"),
)


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    engine = Engine(EngineConfig(device="cpu"))
    with running(engine, CHECKPOINT, engine.runner.max_model_len, served_model_name=()) as server:
        yield server


@pytest.fixture(scope="module")
def talker() -> ScriptedEngine:
    return ScriptedEngine(Tokenizer(CHECKPOINT))


@pytest.fixture(scope="module")
def scripted(talker: ScriptedEngine) -> Iterator[Running]:
    with running(talker, CHECKPOINT) as server:
        yield server


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with open_browser(size=SIZE) as found:
        yield found


@pytest.fixture
def page(driver: Any) -> Iterator[Page]:
    found = Page(driver)
    yield found
    # What the policy refuses, and every error of ours, is written there. Answers that are errors are too.
    logged = [one for one in driver.get_log("browser") if "Failed to load resource" not in one["message"]]
    assert logged == []
    set_window(driver, SIZE)


class Page:
    """What a user does, and sees."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, server: Running, path: str = "/") -> Page:
        self.driver.get(server.url + path)
        self.wait(lambda: self.run("return document.readyState") == "complete")
        if path == "/":
            self.wait(lambda: self.all("#model option") or self.text("#error"))
        return self

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        return list(self.run(script, selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def style(self, selector: str, name: str) -> str:
        return str(
            self.run(
                "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", selector, name
            )
        )

    def press(self, *keys: str) -> None:
        """Keys go to whatever has the focus."""
        self.driver.switch_to.active_element.send_keys("".join(keys))

    def focused(self) -> str:
        return str(self.run("return document.activeElement.id || document.activeElement.className"))

    def set(self, **fields: str) -> None:
        for name, value in fields.items():
            self.run("document.getElementById(arguments[0]).value = arguments[1]", name, value)

    def choose(self, mode: str) -> None:
        self.run("document.querySelector(`input[value=${arguments[0]}]`).click()", mode)

    def ask(self, text: str) -> None:
        self.one("#prompt").send_keys(text.replace("\n", SHIFT + ENTER + "\ue000"), ENTER)

    def wait(self, is_so: Callable[[], Any], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline, self.text("body")
            time.sleep(0.03)

    def wait_for_end(self, num_answers: int = 1) -> None:
        self.wait(
            lambda: self.count(".foot:not(:empty)") >= num_answers and not self.one("#stop").is_displayed()
        )


def accepted_by_index(server: Running) -> list[int]:
    text = httpx.get(f"{server.url}/metrics").text
    found = re.findall(r'compiled_mtp_accepted_tokens_total\{index="(\d+)"\} (\d+)', text)
    return [int(count) for _, count in sorted((int(index), count) for index, count in found)]


def test_colours_agree_with_the_counts_of_the_engine(page: Page, real: Running) -> None:
    page.open(real)
    # The checkpoint that ships was taught no conversation.
    assert page.run("return document.querySelector('input[name=mode]:checked').value") == "text"
    page.set(temperature="0.4", seed="3", max_tokens="60")
    before = accepted_by_index(real) or [0, 0, 0]
    page.ask("def quicksort(items):\n    ")
    page.wait_for_end()
    accepted = [now - was for now, was in zip(accepted_by_index(real), before, strict=True)]
    assert sum(accepted) > 0
    # In the text, in the list of rounds, and in the chart.
    assert page.count(".answer .token.kept") == sum(accepted)
    assert page.count("#rounds .chip.kept") == sum(accepted)
    label = str(page.one("#chart").get_attribute("aria-label"))
    bars = [(int(kept), int(of)) for kept, of in re.findall(r"(\d+) of (\d+) kept", label)]
    assert [kept for kept, _ in bars] == accepted
    percents = [f"{100 * kept / of:.0f}%" for kept, of in bars]
    assert page.texts("#chart .value") == percents
    num_rounds = page.count("#rounds li") - 1
    assert page.text("#per-round") == f"{59 / num_rounds:.2f}"
    # A round has one wrong draft, in whose place a token stands, or a bonus; the last may be cut.
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
    # What can have the focus says what it is.
    names = page.run(
        "return [...document.querySelectorAll('.round')].map((one) => [one.role, one.ariaLabel])"
    )
    assert names == [["group", "The prompt’s round"], *(["group", f"Round {i}"] for i in range(1, last + 1))]
    # Everything else that can be operated has its place in the order of the Tab key.
    seen_ids = set()
    for _ in range(30):
        page.press(TAB)
        seen_ids.add(page.focused())
    assert {"prompt", "send", "model", "colours", "new", "rounds"} <= seen_ids
    page.run("document.getElementById('colours').focus()")
    page.press(SPACE)
    assert page.style(".answer .token.kept", "backgroundColor") == "rgba(0, 0, 0, 0)"


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
    span = page.one(".answer .token.replaced:not(.blank)")
    ActionChains(page.driver).move_to_element(span).perform()
    page.wait(lambda: page.one("#card").is_displayed())
    assert span.text.strip() in page.texts("#card .chip.replaced")[0].replace("␣", " ")
    assert page.count("#card .chip.wrong") == 1
    row = page.one("#rounds li:nth-child(3)")
    ActionChains(page.driver).move_to_element(row).perform()
    page.wait(lambda: page.count(".answer .round[data-round='2'].shown"))
    assert not page.one("#card").is_displayed()


def test_markup_stays_text(page: Page, scripted: Running, talker: ScriptedEngine) -> None:
    evil = (
        "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>\n<b>é 😀</b> &amp;"
    )
    talker.say(evil, by_character=True, chunk=3)
    page.open(scripted)
    page.choose("chat")
    # The driver cannot type what lies beyond the first plane.
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
    assert "the model ended it" in page.text(".foot")


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_reasoning_part_stands_before_its_answer(page: Page, tmp_path: Path, chunk: int) -> None:
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
    # Colours are of the tokens that are shown, in both parts.
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
        assert page.text("#status") == "Answering"
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
    assert page.text("#scope") == "of answer 2"
    page.one(".turn .answer:not(.reasoning)").click()
    assert page.text("#scope") == "of answer 1"
    page.one("#new").click()
    assert page.count(".turn") == 0
    assert page.one("#welcome").is_displayed()
    page.ask("Four?")
    page.wait_for_end(1)
    assert "First answer." not in talker.tokenizer.decode(talker.seen[-1][0])


def cut(page: Page, *events: str) -> None:
    """Have the next requests answered by these events, and by nothing after them."""
    page.run(
        """
        window.theirs ??= window.fetch;
        window.isCancelled = false;
        const text = arguments[0].map((event) => `data: ${event}\\n\\n`).join("");
        const start = (to) => to.enqueue(new TextEncoder().encode(text));
        const cancel = () => { window.isCancelled = true; };
        window.fetch = async () => new Response(new ReadableStream({ start, cancel }));
        """,
        list(events),
    )


CHAT_CHUNK = (
    '{"choices": [{"delta": {"content": "Half"}, "finish_reason": null, '
    '"tokens": [{"id": 9, "token": "Half", "bytes": [72, 97, 108, 102]}], "rounds": []}]}'
)


def test_a_turn_that_failed_is_not_part_of_the_chat(
    page: Page, scripted: Running, talker: ScriptedEngine
) -> None:
    page.open(scripted)
    page.choose("chat")
    cut(page, CHAT_CHUNK, '{"error": {"message": "The engine stopped.", "param": null}}')
    page.ask("One?")
    page.wait_for_end()
    assert page.text(".answer:not(.reasoning)") == "Half"
    assert page.text(".left-out .foot") == "The engine stopped. · not part of the chat"
    assert page.one("#prompt").get_attribute("value") == "One?"
    assert page.run("return window.isCancelled")
    page.run("window.fetch = window.theirs")
    talker.say("Whole.")
    page.press(ENTER)
    page.wait_for_end(2)
    assert page.count(".left-out") == 1
    template = talker.tokenizer.apply_chat_template([{"role": "user", "content": "One?"}])
    assert talker.seen[-1][0] == talker.tokenizer.encode(template)


def test_an_answer_that_cannot_be_read_ends_its_request(page: Page, scripted: Running) -> None:
    page.open(scripted)
    page.choose("chat")
    for broken in ("{", '{"usage": null, "choices": [{"delta": {}, "tokens": [1], "rounds": 7}]}'):
        cut(page, broken)
        page.ask("One?")
        page.wait(lambda: page.one("#error").is_displayed() and page.one("#send").is_displayed())
        assert page.text("#error").startswith("The page could not read the answer")
        assert page.run("return window.isCancelled")
        assert page.one("#prompt").get_attribute("value") == "One?"
        page.one("#new").click()
        page.set(prompt="")
    # These errors are the page's own word for the console.
    assert len(page.driver.get_log("browser")) == 2


def test_an_answer_that_was_stopped_before_it_began_leaves_no_turn(
    page: Page, scripted: Running, talker: ScriptedEngine
) -> None:
    page.open(scripted)
    page.choose("chat")
    talker.say("Never.")
    talker.step_s = 0.6
    try:
        page.one("#prompt").send_keys("One?")
        page.one("#send").click()
        # The button that had the focus is gone; it went on to the one in its place, then to the prompt.
        page.wait(lambda: page.focused() == "stop")
        page.press(ENTER)
        page.wait(lambda: page.one("#send").is_displayed())
    finally:
        talker.step_s = 0.0
    assert page.focused() == "prompt"
    assert "stopped by you · not part of the chat" in page.text(".left-out .foot")
    assert page.one("#prompt").get_attribute("value") == "One?"
    talker.say("Now.")
    page.press(ENTER)
    page.wait_for_end(2)
    template = talker.tokenizer.apply_chat_template([{"role": "user", "content": "One?"}])
    assert talker.seen[-1][0] == talker.tokenizer.encode(template)


def test_escape_closes_the_card_before_it_stops_and_is_the_input_methods_own(
    page: Page, scripted: Running, talker: ScriptedEngine
) -> None:
    page.open(scripted)
    page.choose("chat")
    talker.say("First.")
    page.ask("One?")
    page.wait_for_end()
    talker.say("word " * 400)
    talker.step_s = 0.03
    composed = """
        const of = { key: arguments[0], bubbles: true, cancelable: true, ...arguments[1] };
        return document.getElementById("prompt").dispatchEvent(new KeyboardEvent("keydown", of));
    """
    try:
        page.one("#prompt").send_keys("Two?")
        # Enter that only ends a composition.
        assert page.run(composed, "Enter", {"isComposing": True})
        assert page.run(composed, "Enter", {"keyCode": 229})
        assert page.one("#send").is_displayed()
        page.press(ENTER)
        page.wait(lambda: page.count(".turn:nth-of-type(2) .token") > 3)
        assert page.text("#scope") == "of answer 2"
        # An earlier answer that is reached with the keyboard is the one whose numbers stand beside.
        page.run("document.querySelector('.round').focus()")
        assert page.text("#scope") == "of answer 1"
        assert page.one("#card").is_displayed()
        page.run(composed, "Escape", {"isComposing": True})
        assert page.one("#card").is_displayed()
        page.press(ESCAPE)
        assert not page.one("#card").is_displayed()
        assert page.one("#stop").is_displayed()
        page.press(ESCAPE)
        page.wait(lambda: page.one("#send").is_displayed())
    finally:
        talker.step_s = 0.0


def test_a_server_that_was_starting_is_asked_again(
    page: Page, scripted: Running, talker: ScriptedEngine
) -> None:
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/v1/models"]})
    talker.say("Here.")
    try:
        page.open(scripted)
        page.wait(lambda: page.text("#error").startswith("The server does not answer"))
        page.choose("chat")
        page.ask("One?")
        page.wait(lambda: page.one("#send").is_displayed())
        assert page.text("#error").startswith("The server does not answer")
        assert page.one("#prompt").get_attribute("value") == "One?"
        assert page.count(".turn") == 0
    finally:
        page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    page.press(ENTER)
    page.wait_for_end()
    assert page.text(".answer:not(.reasoning)") == "Here."
    assert not page.one("#error").is_displayed()


def test_a_round_that_began_in_an_earlier_chunk_has_what_is_left_of_it(page: Page, scripted: Running) -> None:
    page.open(scripted)
    script = """
        const [told, done] = arguments;
        import("/page/rounds.js").then(({ Rounds }) => {
          const token = (id) => ({ id, token: String(id), bytes: [] });
          const rounds = new Rounds();
          rounds.add({ tokens: [token(1)], rounds: [] });
          const made = told.map(([ids, drafts, accepted]) =>
            rounds.add({ tokens: ids.map(token), rounds: [{ drafts: drafts.map(token), accepted }] })[0]);
          done(made.map((one) => [one.drafts.map((draft) => draft.id), one.accepted, one.fates]));
        });
    """
    cases = [
        # Whole; cut by a stop; a draft that nobody knows.
        ([[5, 6, 7], [5, 6, 9], 2], [[5, 6, 9], 2, ["kept", "kept", "replaced"]]),
        ([[5, 6], [5, 6, 9], 2], [[5, 6, 9], 2, ["kept", "kept"]]),
        ([[5, 6, 7], [5, 0], 2], [[5, 0], 2, ["kept", "kept", "bonus"]]),
        # One, two and all of its kept drafts came before.
        ([[6, 7, 8], [5, 6, 7], 3], [[6, 7], 2, ["kept", "kept", "bonus"]]),
        ([[7, 8], [5, 6, 7], 3], [[7], 1, ["kept", "bonus"]]),
        ([[8], [5, 6, 7], 3], [[], 0, ["plain"]]),
        ([[8], [5, 6, 7], 2], [[7], 0, ["replaced"]]),
    ]
    found = page.driver.execute_async_script(script, [told for told, _ in cases])
    assert found == [expected for _, expected in cases]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"seed": "9007199254740993"},
            "seed must be from -9007199254740991 to 9007199254740991 on this page",
        ),
        ({"max_tokens": "1e30"}, "max_tokens must be from"),
        ({"seed": "0x10"}, "seed "),
        ({"temperature": "0b1"}, "temperature "),
    ],
)
def test_numbers_are_sent_as_they_are_written_or_not_at_all(
    page: Page, scripted: Running, talker: ScriptedEngine, fields: dict[str, str], said: str
) -> None:
    num_seen = len(talker.seen)
    page.open(scripted)
    page.set(**fields)
    page.ask("A prompt")
    page.wait(lambda: page.one("#error").is_displayed() and page.one("#send").is_displayed())
    assert page.text("#error").startswith(said)
    assert page.one("#" + next(iter(fields))).get_attribute("aria-invalid") == "true"
    assert page.one("#prompt").get_attribute("value") == "A prompt"
    assert len(talker.seen) == num_seen


def test_what_the_server_refuses_is_shown_where_it_was_typed(page: Page, scripted: Running) -> None:
    page.open(scripted)
    page.set(temperature="9")
    page.ask("A prompt")
    page.wait(lambda: page.one("#error").is_displayed())
    expected = "temperature must be from 0 to 2, got 9"
    assert page.text("#error").startswith(expected)
    assert page.one("#error").get_attribute("role") == "alert"
    assert page.one("#temperature").get_attribute("aria-invalid") == "true"
    assert page.one("#temperature").is_displayed()
    assert page.one("#prompt").get_attribute("value") == "A prompt"
    assert page.count(".turn") == 0
    page.set(temperature="1")
    page.press(ENTER)
    page.wait_for_end()
    assert not page.one("#error").is_displayed()
    assert page.count("[aria-invalid]") == 0


def test_a_key_opens_the_door_and_is_kept_nowhere(page: Page, talker: ScriptedEngine, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("the-right-key")
    talker.say("Inside.")
    with running(ScriptedEngine(talker.tokenizer), CHECKPOINT, api_key_file=keys) as locked:
        page.open(locked)
        page.wait(lambda: page.one("#door").is_displayed())
        assert page.focused() == "key"
        # It is in no form that is sent with it inside.
        assert page.run("return document.getElementById('key').form.id") == "door"
        page.press("the-kęy", ENTER)
        assert page.text("#error").startswith("key must be of characters that a header can carry")
        assert page.one("#key").get_attribute("aria-invalid") == "true"
        page.set(key="")
        page.press("the-wrong-key", ENTER)
        page.wait(lambda: page.text("#error").startswith("the key must be"))
        assert page.count("#model option") == 0
        assert page.one("#key").get_attribute("value") == ""
        page.press("the-right-key", ENTER)
        page.wait(lambda: page.count("#model option") == 2)
        assert page.one("#key").get_attribute("value") == ""
        assert not page.one("#door").is_displayed()
        assert not page.one("#error").is_displayed()
        stored = "return [localStorage.length, sessionStorage.length, document.cookie, location.href]"
        assert page.run(stored) == [0, 0, "", f"{locked.url}/"]
        # A key that ceases to be right in the middle: what was chosen stays so.
        page.choose("chat")
        page.set(model="alias")
        page.run("document.getElementById('door').hidden = false; document.getElementById('key').focus()")
        page.press("the-wrong-key", ENTER)
        page.wait(lambda: page.text("#error").startswith("the key must be"))
        page.press("the-right-key", ENTER)
        page.wait(lambda: not page.one("#door").is_displayed())
        assert page.one("#model").get_attribute("value") == "alias"
        assert page.run("return document.querySelector('input[name=mode]:checked').value") == "chat"
        page.open(locked)
        page.wait(lambda: page.one("#door").is_displayed())


def test_nothing_is_loaded_from_another_host(page: Page, scripted: Running) -> None:
    for path in ("/", "/page/help.html"):
        page.open(scripted, path)
        names = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
        assert names
        assert all(name.startswith(scripted.url + "/") for name in names)
        assert page.run("return document.querySelectorAll('[style]').length") == 0
    page.open(scripted)
    page.one("nav a").click()
    page.wait(lambda: page.text("h1").startswith("What you see"))


@contextmanager
def below(prefix: str, server: Running) -> Iterator[str]:
    """A proxy that has the server below `prefix`, which it takes off, and nothing else."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.removeprefix(prefix)
            if path == self.path:
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            kind = {"content-type": self.headers.get("content-type", "")}
            answer = httpx.request(self.command, server.url + path, content=body, headers=kind, timeout=60)
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers["content-type"])
            self.end_headers()
            self.wfile.write(answer.content)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}{prefix}/"
        finally:
            proxy.shutdown()
            thread.join()


def test_the_page_works_below_a_prefix(page: Page, scripted: Running, talker: ScriptedEngine) -> None:
    talker.say("Below.")
    with below("/mtp", scripted) as url:
        page.driver.get(url)
        page.wait(lambda: page.count("#model option") == 2)
        page.choose("chat")
        page.ask("One?")
        page.wait_for_end()
        assert page.text(".answer:not(.reasoning)") == "Below."
        page.one("nav a").click()
        page.wait(lambda: page.text("h1").startswith("What you see"))
        page.one("body > p > a").click()
        page.wait(lambda: page.run("return location.href") == url and page.count("#model option") == 2)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("is_dark", [False, True])
def test_text_stands_out_in_light_and_dark(page: Page, scripted: Running, is_dark: bool) -> None:
    set_window(page.driver, SIZE, is_dark=is_dark)
    page.open(scripted)
    ground, panel = page.style("body", "backgroundColor"), page.style("aside", "backgroundColor")
    assert (luminance(ground) < 0.1) == (luminance(panel) < 0.1) == is_dark
    for selector, behind in (
        ("body", ground),
        (".hint", ground),
        ("#welcome p", ground),
        ("summary", ground),
        (".tiles dt", panel),
        (".legend", panel),
        ("#send", page.style("#send", "backgroundColor")),
    ):
        assert contrast(page.style(selector, "color"), behind) >= 4.5, selector


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


def test_the_engine_was_asked_as_it_was_typed(page: Page, scripted: Running, talker: ScriptedEngine) -> None:
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
