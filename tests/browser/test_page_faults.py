"""The page's faults: errors, stops, refusals, keys, and a proxy before the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.pages import ENTER, ESCAPE, Page, below, cut
from tests.server.serving import CHECKPOINT, Running, ScriptedEngine, running

pytestmark = pytest.mark.browser
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
    assert page.text(".left-out .foot") == "The engine stopped. · not included in the chat"
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
    # The page logs these errors itself.
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
        # The focused button is gone: the focus moved to the button that replaced it, then to the prompt.
        page.wait(lambda: page.focused() == "stop")
        page.press(ENTER)
        page.wait(lambda: page.one("#send").is_displayed())
    finally:
        talker.step_s = 0.0
    assert page.focused() == "prompt"
    assert "stopped by you · not included in the chat" in page.text(".left-out .foot")
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
        assert page.text("#scope") == "in answer 2"
        # If the keyboard reaches an earlier answer, its numbers are shown.
        page.run("document.querySelector('.round').focus()")
        assert page.text("#scope") == "in answer 1"
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
        page.wait(lambda: page.text("#error").startswith("The server is not responding"))
        page.choose("chat")
        page.ask("One?")
        page.wait(lambda: page.one("#send").is_displayed())
        assert page.text("#error").startswith("The server is not responding")
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
        # Complete; cut by a stop; with an unknown draft.
        ([[5, 6, 7], [5, 6, 9], 2], [[5, 6, 9], 2, ["kept", "kept", "replaced"]]),
        ([[5, 6], [5, 6, 9], 2], [[5, 6, 9], 2, ["kept", "kept"]]),
        ([[5, 6, 7], [5, 0], 2], [[5, 0], 2, ["kept", "kept", "bonus"]]),
        # One, two and all of its accepted drafts came in an earlier chunk.
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


def test_a_key_gives_access_and_is_stored_nowhere(page: Page, talker: ScriptedEngine, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("the-right-key")
    talker.say("Inside.")
    with running(ScriptedEngine(talker.tokenizer), CHECKPOINT, api_key_file=keys) as locked:
        page.open(locked)
        page.wait(lambda: page.one("#key-form").is_displayed())
        assert page.focused() == "key"
        # No form that is sent contains the field.
        assert page.run("return document.getElementById('key').form.id") == "key-form"
        page.press("the-kęy", ENTER)
        assert page.text("#error").startswith(
            "key must contain only characters that an HTTP header can carry"
        )
        assert page.one("#key").get_attribute("aria-invalid") == "true"
        page.set(key="")
        page.press("the-wrong-key", ENTER)
        page.wait(lambda: page.text("#error").startswith("the key must be"))
        assert page.count("#model option") == 0
        assert page.one("#key").get_attribute("value") == ""
        page.press("the-right-key", ENTER)
        page.wait(lambda: page.count("#model option") == 2)
        assert page.one("#key").get_attribute("value") == ""
        assert not page.one("#key-form").is_displayed()
        assert not page.one("#error").is_displayed()
        stored = "return [localStorage.length, sessionStorage.length, document.cookie, location.href]"
        assert page.run(stored) == [0, 0, "", f"{locked.url}/"]
        # The key becomes invalid in the middle: the chosen settings stay.
        page.choose("chat")
        page.set(model="alias")
        page.run("document.getElementById('key-form').hidden = false; document.getElementById('key').focus()")
        page.press("the-wrong-key", ENTER)
        page.wait(lambda: page.text("#error").startswith("the key must be"))
        page.press("the-right-key", ENTER)
        page.wait(lambda: not page.one("#key-form").is_displayed())
        assert page.one("#model").get_attribute("value") == "alias"
        assert page.run("return document.querySelector('input[name=mode]:checked').value") == "chat"
        page.open(locked)
        page.wait(lambda: page.one("#key-form").is_displayed())


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
        page.wait(lambda: page.text("h1").startswith("What the page shows"))
        page.one("body > p > a").click()
        page.wait(lambda: page.run("return location.href") == url and page.count("#model option") == 2)
