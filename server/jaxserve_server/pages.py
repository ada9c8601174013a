"""GET / and GET /docs: pages that need nothing from anywhere else, and may not ask for it."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from importlib.resources import files

from aiohttp import web

from jaxserve_server.middleware import opened_in_browsers


@lru_cache(maxsize=2)
def _page(name: str) -> tuple[str, dict[str, str]]:
    """A page with its style and script inside, and its headers.

    The policy names both by their hashes: nothing else runs, and nothing goes to another host.
    """
    folder = files("jaxserve_server") / "assets"
    style = (folder / "style.css").read_text("utf-8")
    script = (folder / f"{name}.js").read_text("utf-8")
    page = (folder / f"{name}.html").read_text("utf-8")
    page = page.replace("{{style}}", style).replace("{{script}}", script)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return page, headers


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _answer(name: str) -> web.Response:
    page, headers = _page(name)
    return web.Response(text=page, content_type="text/html", headers=headers)


@opened_in_browsers
async def playground(request: web.Request) -> web.Response:
    """GET /."""
    return _answer("playground")


@opened_in_browsers
async def docs(request: web.Request) -> web.Response:
    """GET /docs."""
    return _answer("docs")
