"""The web page as one document: put together once, and the same for everybody.

Rules
- It holds no secret and no figure of the server: whoever looks at it has seen the project's source.
  So it is served without a key, and what it shows is asked for with one (see auth.py).
- Nothing in it comes from elsewhere, and its policy lets a browser load, run and call nothing else:
  the one script and the one style sheet are allowed by their digests, and connections to its own
  origin.
- The policy wants trusted types, and there are none: text cannot become HTML, whoever wrote it.
"""

import base64
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATH: Final = "/"
# In this order: each uses what stands before it, and the last starts everything.
SCRIPTS: Final = (
    "server.js", "numbers.js", "markdown.js", "chat.js", "charts.js", "tree.js", "live.js",
    "capacity.js", "main.js",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Page:
    """The document, and the policy it must be served with."""

    html: str
    policy: str  # Content-Security-Policy


def build_page() -> Page:
    """Puts the page together from the files beside this one."""
    style = _read("style.css")
    script = '"use strict";\n' + "\n".join(_read(name) for name in SCRIPTS)
    shell = _read("shell.html")
    html = shell.replace("/*style*/", style, 1).replace("/*script*/", script, 1)
    policy = {
        "default-src": "'none'",
        "script-src": _digest(script),
        "style-src": _digest(style),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return Page(html, "; ".join(f"{name} {value}" for name, value in policy.items()))


def page_route() -> Route:
    """GET / answers with the page."""
    page = build_page()
    headers = {
        "content-security-policy": page.policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }

    async def page_of(_request: Request) -> Response:
        return Response(page.html, headers=headers, media_type="text/html")

    return Route(PATH, page_of, methods=["GET"])


def _read(name: str) -> str:
    return resources.files("httpd.page").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """How a policy names an inline script or style sheet."""
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"
