"""The pages: self-contained, locked down by their headers, part of the package."""

import base64
import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import running

from jaxserve_server.config import ServerConfig

PAGES = ["/", "/docs"]
ASSETS = "server/jaxserve_server/assets"


async def page_of(api, path, **headers):
    async with api.http.get(path, headers=headers) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        return await response.text(), response.headers


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_needs_nothing_from_outside(api, path):
    text, headers = await page_of(api, path)
    assert not re.search(r"https?://|//[a-z]|@import|\burl\(", re.sub(r"^\s*//.*$", "", text, flags=re.M))
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=(?!\"data:)", text)
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", PAGES)
async def test_nothing_is_ever_read_as_html(api, path):
    text, _ = await page_of(api, path)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert not re.search(r"\son[a-z]+=|localStorage|sessionStorage|document\.cookie", text)


async def test_the_pages_fetch_what_the_server_has(api):
    known = {"v1/models", "v1/chat/completions", "openapi.json"}
    fetched = set()
    for path in PAGES:
        text, _ = await page_of(api, path)
        fetched |= set(re.findall(r"fetch\(\"([^\"]+)\"", text))
    assert fetched == known
    for path in known - {"v1/chat/completions"}:
        assert (await api.http.get(f"/{path}")).status == 200


@pytest.mark.parametrize("path", PAGES)
async def test_with_keys_a_page_needs_one_like_every_route(engine, path):
    async with running(engine, ServerConfig(api_key=("k",))) as api:
        assert (await api.http.get(path)).status == 401
        await page_of(api, path, Authorization="Bearer k")


async def test_the_pages_are_under_the_root_path_too(engine):
    async with running(engine, ServerConfig(root_path="/llm")) as api:
        for path in PAGES:
            await page_of(api, f"/llm{path}")


def test_the_wheel_has_the_pages(tmp_path):
    root = Path(__file__).parents[2]
    build = f"import hatchling.build; hatchling.build.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assets = [f"jaxserve_server/assets/{path.name}" for path in (root / ASSETS).iterdir()]
    assert len(assets) == 5
    assert set(assets) <= set(names)
