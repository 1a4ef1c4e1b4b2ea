"""A page in headless Chromium: a user's actions, what the page shows, and a proxy before its server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from tests.server.serving import Running

SIZE = (1280, 800)
# selenium is not installed for `make test`, which collects this file too.
SHIFT, ENTER, ESCAPE, TAB, LEFT, RIGHT, END, SPACE = (
    *("\ue008", "\ue007", "\ue00c", "\ue004"),
    *("\ue012", "\ue014", "\ue010", "\ue00d"),
)


class Page:
    """A user's actions, and what the page shows."""

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
        """Keys go to the focused element."""
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


def cut(page: Page, *events: str) -> None:
    """Answer the next requests with these events, and send nothing after them."""
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


@contextmanager
def below(prefix: str, server: Running) -> Iterator[str]:
    """A proxy that serves the server below `prefix`, which it strips."""

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
