"""Images on the page in headless Chromium: chosen, pasted, dropped, removed and sent."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.pages import Page
from tests.engines import make_engine
from tests.server.serving import Running, running
from tests.vision.checkpoints import picture, write_vision_checkpoint

pytestmark = pytest.mark.browser

# Gives a file to an element, as a paste or a drop does.
GIVE = """
const [kind, content, type] = arguments;
const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], "given.png", { type }));
const how = { bubbles: true, cancelable: true };
const event = kind === "paste"
  ? new ClipboardEvent("paste", { ...how, clipboardData: data })
  : new DragEvent("drop", { ...how, dataTransfer: data });
document.getElementById("prompt").dispatchEvent(event);
return event.defaultPrevented;
"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = write_vision_checkpoint(tmp_path_factory.mktemp("vision"))
    with running(make_engine(directory, max_images=3), directory) as server:
        yield server


def png(seed: int = 0) -> bytes:
    stream = io.BytesIO()
    picture(96, 64, seed).save(stream, "PNG")
    return stream.getvalue()


def give(page: Page, kind: str, content: bytes, media_type: str = "image/png") -> bool:
    return bool(page.run(GIVE, kind, base64.b64encode(content).decode(), media_type))


def test_images_are_sent_with_the_prompt(page: Page, seeing: Running, tmp_path: Path) -> None:
    page.open(seeing)
    page.set(max_tokens="4", temperature="0")
    (tmp_path / "chosen.png").write_bytes(png(1))
    page.one("#images input").send_keys(str(tmp_path / "chosen.png"))
    page.wait(lambda: page.count("#images canvas") == 1)
    assert give(page, "paste", png(2))
    page.wait(lambda: page.count("#images canvas") == 2)
    assert give(page, "drop", png(3))
    page.wait(lambda: page.count("#images canvas") == 3)
    assert give(page, "drop", png(4))
    page.wait(lambda: "at most 3 images in a chat" in page.text("#error"))
    labels = [one.get_attribute("aria-label") for one in page.all("#images li button")]
    assert labels == ["Remove chosen.png", "Remove given.png", "Remove given.png"]
    page.all("#images li button")[1].click()
    page.wait(lambda: page.count("#images canvas") == 2)
    page.run(
        "window.sent = []; const theirs = fetch;"
        "window.fetch = (...one) => { sent.push(one[1]?.body); return theirs(...one); };"
    )
    page.ask("What is it?")
    page.wait_for_end()
    assert page.text("#error") == ""
    assert (page.count("#images canvas"), page.count(".turn canvas")) == (0, 2)
    size = page.run("const one = document.querySelector('.turn canvas'); return [one.width, one.height]")
    assert size == [96, 64]
    urls = "JSON.parse(sent[0]).messages[0].content.slice(0, -1).map((one) => one.image_url.url)"
    prefix = "data:image/png;base64,"
    assert page.run(f"return {urls}") == [prefix + base64.b64encode(png(n)).decode() for n in (1, 3)]
    # The next turn brings the images of the first again, so one more has room.
    for number in (5, 6):
        assert give(page, "drop", png(number))
    page.wait(lambda: "at most 3 images in a chat" in page.text("#error"))
    page.wait(lambda: page.count("#images canvas") == 1)
    page.one("#images li button").click()
    page.ask("And now?")
    page.wait_for_end(2)
    assert page.text("#error") == ""
    assert page.run("return JSON.parse(sent[1]).messages.length") == 3
    assert page.run("return JSON.parse(sent[1]).messages[0].content.length") == 3


def test_what_is_not_an_image(page: Page, seeing: Running) -> None:
    page.open(seeing)
    assert not give(page, "paste", b"text", "text/plain")
    assert give(page, "paste", b"not an image")
    page.wait(lambda: "is not an image that this browser reads" in page.text("#error"))
    assert page.count("#images canvas") == 0
    page.choose("text")
    assert not give(page, "drop", png())
    assert not page.one("#images").is_displayed()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_tray_fits(page: Page, seeing: Running, driver: Any, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page.open(seeing)
    for seed in range(3):
        give(page, "drop", png(seed))
    page.wait(lambda: page.count("#images canvas") == 3)
    boxes = page.run(
        "return [...document.querySelectorAll('#images, #images canvas')].map((one) => {"
        "const box = one.getBoundingClientRect(); return [box.left, box.right, box.bottom]; })"
    )
    for left, right, bottom in boxes[1:]:
        assert boxes[0][0] <= left < right <= boxes[0][1] + 1
        assert bottom <= boxes[0][2] + 1
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_service_without_images_shows_no_button(page: Page, scripted: Running) -> None:
    page.open(scripted)
    page.choose("chat")
    assert not page.one("#images").is_displayed()
    assert not give(page, "paste", png())
