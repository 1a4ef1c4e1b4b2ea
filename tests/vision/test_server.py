"""Images over the two APIs, with their own clients, and the addresses that are fetched or refused."""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import anthropic
import httpx
import openai
import pytest

from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from compiled_mtp.server import media
from tests.engines import make_engine
from tests.server.serving import Running, running
from tests.vision.checkpoints import picture
from tests.vision.test_images import damaged_files

QUESTION = "What is it?"


def png(seed: int = 0, width: int = 96, height: int = 64) -> bytes:
    stream = io.BytesIO()
    picture(width, height, seed).save(stream, "PNG")
    return stream.getvalue()


def data_uri(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pytest.fixture(scope="module")
def engine(dense: Path) -> Engine:
    return make_engine(dense, max_images=3)


@pytest.fixture(scope="module")
def server(engine: Engine, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("media")
    (root / "image.png").write_bytes(png())
    (root / "large.png").write_bytes(bytes(70000))
    hosts = {"allow_media_urls": ("localhost", "images.test"), "max_media_bytes": 65536, "media_timeout_s": 3}
    with running(engine, dense, media_root=root, **hosts) as found:
        yield found


def content_of(*urls: str, text: str = QUESTION) -> list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*images, {"type": "text", "text": text}]


def ask(server: Running, content: Any, **fields: Any) -> httpx.Response:
    body = {
        "model": "m",
        "max_tokens": 8,
        "temperature": 0,
        "messages": [{"role": "user", "content": content}],
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body | fields, timeout=60)


@pytest.fixture(scope="module")
def wanted(dense: Path) -> tuple[str, int]:
    """What an engine alone answers, and the tokens of the prompt."""
    engine = make_engine(dense, max_images=1, mtp_step=0)
    content = [{"type": "image", "image": png()}, {"type": "text", "text": QUESTION}]
    params = SamplingParams(max_tokens=8, temperature=0)
    (output,) = engine.generate(messages=[{"role": "user", "content": content}], params=params)
    return output.new_text, output.metrics.prompt_tokens


def test_openai(server: Running, wanted: tuple[str, int]) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages: Any = [{"role": "user", "content": content_of(data_uri(png()))}]
    how: Any = {"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**how)
    assert (whole.choices[0].message.content, whole.usage.prompt_tokens) == wanted
    parts = [
        chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**how, stream=True)
    ]
    assert "".join(parts) == wanted[0]
    counted = httpx.post(f"{server.url}/tokenize", json={"messages": messages}).json()
    # 3 x 2 cells.
    assert counted["count"] == wanted[1]
    assert max(map(counted["tokens"].count, set(counted["tokens"]))) == 6


def test_anthropic(server: Running, wanted: tuple[str, int]) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    messages: Any = [{"role": "user", "content": content}]
    how: Any = {"model": "m", "messages": messages, "max_tokens": 8, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**how)
    assert (whole.content[0].text, whole.usage.input_tokens) == wanted  # type: ignore[union-attr]
    with client.messages.stream(**how) as stream:
        assert "".join(stream.text_stream) == wanted[0]
    assert client.messages.count_tokens(model="m", messages=messages).input_tokens == wanted[1]
    # A tool's result with an image, between texts.
    blocks = [{"type": "text", "text": "before"}, content[0], {"type": "text", "text": "after"}]
    turns: Any = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "see", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": blocks}]},
    ]
    plain = [
        *turns[:2],
        {"role": "user", "content": [{**turns[2]["content"][0], "content": "before\nafter"}]},
    ]
    counts = [client.messages.count_tokens(model="m", messages=one).input_tokens for one in (turns, plain)]
    assert counts[0] - counts[1] >= 6


def test_every_damaged_file_is_a_400_of_one_line(server: Running, engine: Engine) -> None:
    num_images, count = engine.stats().images, 0
    for name, content, says in damaged_files():
        answer = ask(server, content_of(data_uri(content)))
        message = answer.json()["error"]["message"]
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages"), name
        assert re.search(says, message), name
        assert message.startswith("image must ")
        assert "\n" not in message
        count += 1
    assert count > 50
    # Nothing of them reached the engine, and the processes that read them go on.
    assert engine.stats().images == num_images
    assert ask(server, content_of(data_uri(png()))).status_code == 200


def test_a_body_may_be_larger_where_images_are_taken(server: Running) -> None:
    padded = png() + bytes(9 << 20)
    assert ask(server, content_of(data_uri(padded))).status_code == 200
    answer = ask(server, content_of(data_uri(png() + bytes(25 << 20))))
    assert answer.status_code == 413
    assert "at most 33554432 bytes (max_body_bytes)" in answer.json()["error"]["message"]


def test_several_images_and_turns(server: Running, engine: Engine) -> None:
    turns = [
        {"role": "user", "content": content_of(data_uri(png(1)), data_uri(png(2, 40, 90)))},
        {"role": "assistant", "content": "A pattern."},
        {"role": "user", "content": content_of(data_uri(png(3, 33, 33)), text="And this?")},
    ]
    answer = ask(server, "", messages=turns)
    assert answer.status_code == 200, answer.text
    images = [png(1), png(2, 40, 90), png(3, 33, 33)]
    bare = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
    last = [{"type": "image"}, {"type": "text", "text": "And this?"}]
    chat = [{"role": "user", "content": bare}, turns[1], {"role": "user", "content": last}]
    params = SamplingParams(max_tokens=8, temperature=0)
    outputs = list(make_stream(engine, chat, images, params))
    assert answer.json()["choices"][0]["message"]["content"] == "".join(outputs)


def make_stream(engine: Engine, chat: Any, images: Any, params: SamplingParams) -> Iterator[str]:
    """Decode in an engine of its own: the server's thread steps the other."""
    own = make_engine(engine.config.model, max_images=3)
    for output in own.stream(messages=chat, images=images, params=params):
        yield output.new_text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (content_of("http://example.com/a.png"), "image_url must have a host of"),
        (content_of("ftp://localhost/a.png"), "image_url must have a host of"),
        (content_of("http://127.0.0.1/a.png"), "image_url must have a host of"),
        (content_of("http://localhost:1/a.png"), "have a host with only public addresses, got localhost"),
        (content_of("http://[::1"), "image_url must be an address"),
        (content_of("http://localhost:99999/"), "image_url must be an address"),
        (content_of("file:///etc/passwd"), "name a file in media_root, got /etc/passwd"),
        (content_of("/etc/passwd"), "image_url must have a host of"),
        (content_of(""), "image_url must have a host of"),
        (content_of("data:image/png,plain"), "image_url must hold base64 after a comma"),
        (content_of("data:image/png;base64"), "image_url must hold base64 after a comma"),
        (content_of("data:image/png;base64,%%%"), "image must be valid base64"),
        (content_of("data:image/png;base64,"), "image must be a PNG, JPEG, WEBP, GIF, BMP file"),
        (content_of(data_uri(b"GIF89a")), "image must be "),
        (content_of(*[data_uri(png())] * 4), "images must be at most 3, got 4; raise max_images"),
        (content_of(data_uri(png()), data_uri(b"x")), "image 2 of 2: image must be a PNG"),
        (content_of(data_uri(png()), text="a <|image_pad|> b"), "one image pad for each of 1 images, got 2"),
        (content_of(text="a <|image_pad|> b"), "one image pad for each of 0 images, got 1 pads"),
        ("a <|image_pad|> b", "prompt must have one image pad for each of 0 images"),
        ("a <|video_pad|> b", "prompt must have no videos, got 1 video pads"),
        ([{"type": "video_url", "video_url": {"url": "x"}}], "type must be text or image_url"),
        ([{"type": "image", "image": "/etc/passwd"}], "type must be text or image_url"),
        ([{"type": "image_url", "image_url": "data:x"}], "image_url must hold base64 after a comma"),
        ([{"type": "image_url"}], "must have a field image_url"),
        ([{"type": "text"}], "must have a field text"),
        (
            [{"type": "text", "text": "a", "image_url": {"url": "data:x"}}],
            "must have no field image_url beside text",
        ),
        (
            [{"type": "image_url", "text": "a", "image_url": {"url": "data:x"}}],
            "must have no field text beside image_url",
        ),
    ],
)
def test_one_line_and_400(server: Running, content: Any, says: str) -> None:
    answer = ask(server, content)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert says in message
    assert "\n" not in message
    assert len(message) < 1001


def test_an_image_of_the_system_is_refused_by_the_template(server: Running) -> None:
    answer = ask(server, "", messages=[{"role": "system", "content": content_of(data_uri(png()))}])
    assert answer.status_code == 400
    assert "System message cannot contain images." in answer.json()["error"]["message"]


def test_an_engine_without_images_says_so(dense: Path) -> None:
    with running(make_engine(dense), dense) as plain:
        answer = ask(plain, content_of(data_uri(png())))
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(
            "images must be left out, got 1; start the engine"
        )


def test_a_service_without_hosts_and_root_fetches_nothing(dense: Path) -> None:
    with running(make_engine(dense, max_images=1), dense) as plain:
        refused = ask(plain, content_of("http://localhost/a.png"))
        assert "image_url must be a data URI, got http://localhost" in refused.json()["error"]["message"]
        refused = ask(plain, content_of("file:///a.png"))
        assert "image_url must be a data URI, got a file's address" in refused.json()["error"]["message"]


class _Site(http.server.BaseHTTPRequestHandler):
    """Serves an image, redirects, what is not an image, and a byte at a time what never ends."""

    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        if self.path in ("/slow-head", "/slow-body"):
            self.wfile.write(b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if self.path == "/slow-body" else b""))
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.05)
        if self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to?"))
            self.end_headers()
            return
        body = {"/image.png": png(), "/large": bytes(70000), "/text": b"hello"}.get(self.path)
        self.send_response(200 if body else 404)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A web server on this machine, whose addresses count as public here."""
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    monkeypatch.setattr(media, "is_public", lambda address: address in ("127.0.0.1", "::1"))
    resolve = media.socket.getaddrinfo

    def local(host: str, *how: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if host in ("localhost", "images.test") else host, *how, **options)

    monkeypatch.setattr(media.socket, "getaddrinfo", local)
    yield f"http://localhost:{made.server_port}"
    made.shutdown()
    made.server_close()


def test_allowed_addresses(server: Running, site: str, wanted: tuple[str, int]) -> None:
    root = server.service.config.media_root
    other = site.replace("localhost", "images.test")
    addresses = (f"{site}/image.png", f"{site}/to?{other}/image.png", f"{site}/to?/image.png")
    for url in (*addresses, f"file://{root}/image.png"):
        answer = ask(server, content_of(url))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == wanted[0]
    for url, says in (
        (f"{site}/large", "image_url must have at most 65536 bytes"),
        (f"{site}/text", "image must be a PNG"),
        (f"{site}/nothing", "image_url must be answered with status 200, got 404"),
        (f"{site}/to?http://example.com/a.png", "image_url must have a host of"),
        (f"{site}/to?file://{root}/image.png", "image_url must have a host of"),
        (f"{site}/to?{site}/to?{site}/to?{site}/to?{site}/image.png", "redirect at most 3 times"),
        (f"file://{root}/large.png", "image_url must have at most 65536 bytes"),
        (f"file://{root}/../../etc/passwd", "name a file in media_root"),
        (f"file://{root}/%2e%2e/x", "name a file in media_root"),
        (f"file://{root}/image.png%00", "name a file in media_root"),
        (f"file://host{root}/image.png", "name a file in media_root"),
    ):
        answer = ask(server, content_of(url))
        assert answer.status_code == 400, url
        assert says in answer.json()["error"]["message"], url


@pytest.mark.parametrize("path", ["slow-head", "slow-body"])
def test_a_host_that_sends_a_byte_at_a_time_is_left_at_the_deadline(
    server: Running, site: str, path: str
) -> None:
    begin = time.monotonic()
    answer = ask(server, content_of(f"{site}/{path}"))
    assert answer.status_code == 400
    assert "image_url must arrive within 3 seconds" in answer.json()["error"]["message"]
    assert time.monotonic() - begin < 20


def test_too_many_images_are_refused_before_one_is_fetched(server: Running, site: str) -> None:
    _Site.paths.clear()
    turns = [{"role": "user", "content": content_of(f"{site}/image.png", f"{site}/image.png")}] * 2
    answer = ask(server, "", messages=turns)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert answer.json()["error"]["message"] == "images must be at most 3, got 4; raise max_images"
    assert not _Site.paths


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("192.168.0.1", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_public_addresses(address: str, is_public: bool) -> None:
    assert media.is_public(address) is is_public
