"""The page at /: public, without a secret, and locked up by its policy."""

import base64
import re
import shutil
import subprocess
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from httpd.app import create_app
from httpd.auth import Access, Keyring
from httpd.page.document import SCRIPTS, build_page
from tests.fakes_control import FakeControl
from tests.fakes_service import FakeService
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio

FOLDER = Path(build_page.__code__.co_filename).parent
LOCKED = replace(SETTINGS, access=Access(Keyring.of(["k"]), Keyring.of(["a"])))


def client(settings: object = SETTINGS) -> httpx.AsyncClient:
    app = create_app(FakeService(), settings, FakeControl())  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://plait")


async def test_the_page_is_the_same_for_everybody() -> None:
    answers = []
    for settings in (SETTINGS, LOCKED):
        async with client(settings) as asks:
            answers.append(await asks.get("/"))
            assert (await asks.head("/")).status_code == 200
            assert (await asks.post("/")).status_code == 405
    first, second = answers
    assert first.status_code == 200 and first.content == second.content
    assert first.headers["content-type"] == "text/html; charset=utf-8"
    for name, value in {
        "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }.items():  # fmt: skip
        assert first.headers[name] == value


async def test_all_that_the_page_asks_for_is_behind_the_key() -> None:
    async with client(LOCKED) as asks:
        for path in ("/live", "/cache", "/capacity", "/v1/models"):
            assert (await asks.get(path)).status_code == 401
        assert (await asks.post("/v1/chat/completions", json={})).status_code == 401


async def test_a_server_may_have_no_page() -> None:
    async with client(replace(SETTINGS, has_page=False)) as asks:
        assert (await asks.get("/")).status_code == 404


def parts(html: str) -> tuple[str, str]:
    """The script and the style sheet, as a browser reads them."""
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    return script, style


def test_the_policy_allows_this_script_and_this_style_alone() -> None:
    page = build_page()
    rules = dict(rule.split(" ", 1) for rule in page.policy.split("; "))
    for name, text in zip(("script-src", "style-src"), parts(page.html), strict=True):
        digest = base64.b64encode(sha256(text.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert "unsafe" not in page.policy and "http" not in page.policy


def test_nothing_comes_from_elsewhere() -> None:
    html = build_page().html
    for address in re.findall(r"""(?:https?:)?//[\w.]+\.\w+""", html):
        assert address == "http://www.w3.org", address  # names of SVG, not addresses
    assert not re.search(r"""\s(src|srcset|action|style|on\w+)=""", parts_removed(html))
    assert "@import" not in html and "url(" not in html


def parts_removed(html: str) -> str:
    return re.sub(r"<(script|style)>.*?</\1>", "", html, flags=re.DOTALL)


def test_text_never_becomes_html() -> None:
    script, _ = parts(build_page().html)
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "new Function", "DOMParser", "setHTML", "createContextualFragment"):  # fmt: skip
        assert sink not in script
    assert "localStorage" not in script and "document.cookie" not in script


def test_every_file_is_part_of_the_page() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.js")) == sorted(SCRIPTS)
    for path in FOLDER.iterdir():
        assert path.is_dir() or len(path.read_text().splitlines()) <= 300, path


def test_every_input_has_a_label() -> None:
    html = parts_removed(build_page().html)
    labelled = re.findall(r"<label[^>]*>.*?<(?:input|textarea)", html, re.DOTALL)
    assert len(re.findall(r"<(?:input|textarea)", html)) == len(labelled)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_is_a_script(tmp_path: Path) -> None:
    file = tmp_path / "page.js"
    file.write_text(parts(build_page().html)[0])
    subprocess.run(["node", "--check", file], check=True, timeout=60)
