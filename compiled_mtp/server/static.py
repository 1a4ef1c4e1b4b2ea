"""The page at `/` and its files, read once from the package; they load nothing from other hosts."""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
FILES = (
    "index.html",
    "help.html",
    "page.css",
    "icon.svg",
    "main.js",
    "answer.js",
    "api.js",
    "card.js",
    "images.js",
    "copy.js",
    "markdown.js",
    # Not ours: npm's marked 18.2.1, lib/marked.esm.js and LICENSE.
    "marked.js",
    "marked.license.txt",
    "panel.js",
    "rounds.js",
    "settings.js",
)
# Served without a key: the files hold nothing about the server, and the page itself asks for the key.
PATHS = ("/", *(f"/page/{name}" for name in FILES[1:]))
# A model's text can neither run scripts nor load anything, and no other page may embed this one.
_POLICY = ("default-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
HEADERS = {
    "content-security-policy": "; ".join(_POLICY),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Add a route for each file."""
    folder = resources.files("compiled_mtp.server") / "page"
    for path, name in zip(PATHS, FILES, strict=True):
        _add_file(app, path, (folder / name).read_bytes(), _TYPES[name.rpartition(".")[2]])


def _add_file(app: FastAPI, path: str, body: bytes, media_type: str) -> None:
    tag = f'"{hashlib.sha256(body).hexdigest()}"'
    headers = HEADERS | {"etag": tag}

    async def answer(request: Request) -> Response:
        # With no-cache the browser asks each time, but gets the body only if its copy is outdated.
        if tag in _tags_of(request):
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=media_type, headers=headers)

    app.add_api_route(path, answer, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)


def _tags_of(request: Request) -> set[str]:
    """Return the etags of the client's copies, without the `W/` that compressing proxies put before them."""
    sent = ",".join(request.headers.getlist("if-none-match"))
    return {tag.strip().removeprefix("W/") for tag in sent.split(",")}
