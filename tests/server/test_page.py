"""The page's files, without a browser: headers, types, access, and what they must not hold."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from urllib.parse import urljoin

import httpx
import pytest

from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.server.app import create_app
from compiled_mtp.server.static import FILES, PATHS
from tests.server.serving import CHECKPOINT, Running, ScriptedEngine, running

FOLDER = resources.files("compiled_mtp.server") / "page"
KEY = "a-key-of-the-page"
ENTER = {"authorization": f"Bearer {KEY}"}
# Files of npm's marked 18.2.1 (lib/marked.esm.js, LICENSE), unchanged.
VENDORED = {
    "marked.js": "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    "marked.license.txt": "8e3a3f82f59a60958f56ca08f445647c32a4733dc7ca6c2c46f6eb898471ab9c",
}
TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}


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
def test_a_file_loads_without_a_key_and_allows_no_other_source(server: Running, path: str, name: str) -> None:
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


def test_the_pages_requests_still_need_the_key(server: Running) -> None:
    for path in ("/v1/models", "/metrics", "/page/none.js", "/page/", "/page/index.html"):
        assert httpx.get(server.url + path).status_code == 401, path
    assert httpx.get(server.url + "/page/none.js", headers=ENTER).status_code == 404
    paths = httpx.get(server.url + "/openapi.json", headers=ENTER).json()["paths"]
    assert "/" not in paths
    assert list(paths["/health"]) == ["get"]
    # A page of another host reaches the same socket by its name, and gets no answer.
    assert httpx.get(server.url + "/", headers={"host": "evil.example"}).status_code == 403


def status(server: Running, method: str, target: str, headers: dict[str, str]) -> int:
    """Send a raw request line, without a body whatever the headers announce, and return the status."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=5)
    try:
        connection.putrequest(method, target)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    "target",
    [
        "/page/../metrics",
        "/page/%2e%2e/metrics",
        "/page/..%2fmetrics",
        "/page/main.js/../../metrics",
        "/page/main.js/",
        "/page//main.js",
        "//metrics",
        "/page/../../config.py",
        "/page/%2e%2e/%2e%2e/config.py",
    ],
)
def test_no_path_leads_outside_the_files(server: Running, target: str) -> None:
    assert status(server, "GET", target, {}) == 401
    assert status(server, "GET", target, ENTER) in (307, 404)


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/health"])
def test_open_paths_take_no_body(server: Running, path: str) -> None:
    large = {"content-type": "application/json", "content-length": "7000000"}
    # Before a byte of the body has arrived.
    assert status(server, "POST", path, large) == 401
    assert status(server, "DELETE", path, {}) == 401
    refused = httpx.post(server.url + path, json={}, headers=ENTER)
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", [*PATHS, "/health", "/v1/models", "/v1/models/m", "/metrics"])
def test_head_is_get_without_its_body(server: Running, path: str) -> None:
    asked, got = (httpx.request(method, server.url + path, headers=ENTER) for method in ("HEAD", "GET"))
    assert (asked.status_code, asked.content) == (200, b"")
    # The metrics' samples have grown.
    assert path == "/metrics" or asked.headers["content-length"] == got.headers["content-length"]
    assert asked.headers.get("etag") == got.headers.get("etag")
    without_key = httpx.head(server.url + path).status_code
    assert without_key == (200 if path in (*PATHS, "/health") else 401)


def test_a_file_in_the_browsers_cache_is_not_sent_again(server: Running) -> None:
    tags = {}
    for path in PATHS:
        first = httpx.get(server.url + path)
        tags[path] = tag = first.headers["etag"]
        for has in (tag, f"W/{tag}", f'"other", {tag}'):
            again = httpx.get(server.url + path, headers={"if-none-match": has})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
        assert httpx.get(server.url + path, headers={"if-none-match": '"other"'}).status_code == 200
    assert len(set(tags.values())) == len(PATHS)


@pytest.mark.parametrize("prefix", ["", "/mtp"])
def test_a_prefix_changes_no_access_rule(server: Running, prefix: str) -> None:
    async def ask() -> None:
        app = httpx.ASGITransport(create_app(server.service), root_path=prefix)
        async with httpx.AsyncClient(transport=app, base_url=f"http://localhost{prefix}") as client:
            for path in (*PATHS, "/health"):
                assert (await client.get(path)).status_code == 200, path
            for path in ("/v1/models", "/metrics", "/mtp/health", "/page/none.js"):
                assert (await client.get(path)).status_code == 401, path
            assert (await client.get("/v1/models", headers=ENTER)).status_code == 200
            for path, form in (("/v1/messages", {"type"}), ("/v1/completions", set())):
                for headers, code in (({}, 401), (ENTER, 400)):
                    answer = await client.post(path, headers=headers, json={})
                    assert answer.status_code == code
                    assert set(answer.json()) == {"error"} | form
        async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
            bare = await client.get(prefix)
            assert bare.status_code == (307 if prefix else 200)
            assert bare.headers.get("location") == (f"http://localhost{prefix}/" if prefix else None)

    asyncio.run(ask())


class Tags(HTMLParser):
    """Collects the elements of a page, and the content of those that could hold code."""

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
            # Relative, so that a proxy may serve the page below its own path.
            assert not link.startswith("/")
            whole = urljoin(PATHS[FILES.index(name)], link)
            assert whole in (*PATHS, "/openapi.json") or link[1:] in ["", *ids], link
        for key in ("for", "aria-labelledby", "aria-describedby"):
            assert key not in fields or fields[key] in ids
    # Every field is inside a label, or a label names it.
    named = {fields.get("for") for tag, fields in page.tags if tag == "label"}
    loose = {"model", "colours", "formatted", None}
    for tag, fields in page.tags:
        if tag in ("input", "select", "textarea"):
            assert fields.get("id") in named | loose


@pytest.mark.parametrize("name", VENDORED)
def test_what_is_not_ours_is_unchanged_and_has_its_licence(name: str) -> None:
    assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == VENDORED[name]
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.", "eval(", "Function(", "fetch("):
        assert word not in text_of("marked.js")
    assert "Permission is hereby granted" in text_of("marked.license.txt")


@pytest.mark.parametrize("name", [name for name in FILES if name not in VENDORED])
def test_the_page_loads_nothing_from_elsewhere_and_stores_nothing(name: str) -> None:
    text = text_of(name)
    own = ("http://www.w3.org/", "http://127.0.0.1:8000/")
    assert [link for link in re.findall(r"\bhttps?://[^\s\"')]*", text) if not link.startswith(own)] == []
    assert "url(" not in text
    if name.endswith(".js"):
        # The page inserts a model's text as text only.
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert word not in text
        for word in ("localStorage", "sessionStorage", "indexedDB", "document.cookie", 'setAttribute("style'):
            assert word not in text
        imports = re.findall(r"from \"([^\"]*)\"", text)
        assert {urljoin("/page/", one) for one in imports if one.startswith("./")} < set(PATHS)
        assert all(one.startswith("./") for one in imports)
        ids = set(re.findall(r"\bid=\"([^\"]*)\"", text_of("index.html")))
        assert set(re.findall(r"byId\(\"([^\"]*)\"\)", text)) <= ids
