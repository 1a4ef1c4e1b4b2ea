"""The page's files, without a browser: headers, types, who may load them, and what they must not hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources

import httpx
import pytest

from compiled_mtp.server.static import FILES, PATHS
from compiled_mtp.tokenizer import Tokenizer
from tests.server.serving import CHECKPOINT, Running, ScriptedEngine, running

FOLDER = resources.files("compiled_mtp.server") / "page"
KEY = "a-key-of-the-page"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    with running(ScriptedEngine(Tokenizer(CHECKPOINT)), CHECKPOINT, api_key_file=keys) as found:
        yield found


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def test_the_folder_holds_these_files_and_no_others() -> None:
    assert sorted(FILES) == sorted(path.name for path in FOLDER.iterdir())


@pytest.mark.parametrize(("path", "name"), list(zip(PATHS, FILES, strict=True)))
def test_a_file_loads_without_a_key_and_lets_nothing_else_in(server: Running, path: str, name: str) -> None:
    answer = httpx.get(server.url + path)
    assert answer.status_code == 200
    assert answer.text == text_of(name)
    assert answer.headers["content-type"].startswith(TYPES[name.rpartition(".")[2]])
    policy = answer.headers["content-security-policy"].split("; ")
    assert "default-src 'self'" in policy
    assert {"base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"} < set(policy)
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert KEY not in answer.text


def test_what_the_page_asks_for_still_needs_the_key(server: Running) -> None:
    for path in ("/v1/models", "/metrics", "/page/none.js", "/page/", "/page/../metrics", "/page/index.html"):
        assert httpx.get(server.url + path).status_code == 401, path
    headers = {"authorization": f"Bearer {KEY}"}
    assert httpx.get(server.url + "/page/none.js", headers=headers).status_code == 404
    assert "/" not in httpx.get(server.url + "/openapi.json", headers=headers).json()["paths"]
    # Another host's name leads to the same socket: a page of theirs gets nothing.
    assert httpx.get(server.url + "/", headers={"host": "evil.example"}).status_code == 403


class Tags(HTMLParser):
    """The elements of a page, and what stands inside of those that could hold code."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.code: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.code.append(data)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".html")])
def test_html_is_labelled_and_holds_no_code(name: str) -> None:
    page = Tags()
    page.feed(text_of(name))
    assert page.code == []
    ids = [fields["id"] for _, fields in page.tags if "id" in fields]
    assert len(ids) == len(set(ids))
    assert ("html", {"lang": "en"}) in page.tags
    for tag, fields in page.tags:
        assert tag != "style"
        assert not [key for key in fields if key == "style" or key.startswith("on")]
        for key in ("src", "href"):
            link = fields.get(key) or "#"
            assert link in PATHS or link == "/openapi.json" or link[1:] in ["", *ids], link
        for key in ("for", "aria-labelledby", "aria-describedby"):
            assert key not in fields or fields[key] in ids
    # Every field is inside of a label, or has one that names it.
    named = {fields.get("for") for tag, fields in page.tags if tag == "label"}
    loose = {"model", "colours", None}
    for tag, fields in page.tags:
        if tag in ("input", "select", "textarea"):
            assert fields.get("id") in named | loose


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_elsewhere_or_stays_behind(name: str) -> None:
    text = text_of(name)
    own = ("http://www.w3.org/", "http://127.0.0.1:8000/")
    assert [link for link in re.findall(r"\bhttps?://[^\s\"')]*", text) if not link.startswith(own)] == []
    assert "url(" not in text
    if name.endswith(".js"):
        # Text of a model reaches the page as text alone.
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert word not in text
        for word in ("localStorage", "sessionStorage", "indexedDB", "document.cookie", 'setAttribute("style'):
            assert word not in text
        imports = re.findall(r"from \"([^\"]*)\"", text)
        assert set(imports) < set(PATHS)
        ids = set(re.findall(r"\bid=\"([^\"]*)\"", text_of("index.html")))
        assert set(re.findall(r"byId\(\"([^\"]*)\"\)", text)) <= ids
