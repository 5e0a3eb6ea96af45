"""The page in a real browser, over a server whose model answers with the question.

Every test ends with a look at the console, which must be empty (conftest.py).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.conftest import Browser
from tests.server_process import SOON_S, START_S, ServerProcess, serving

KEY = "sk-of-a-user"
TLS = Path(__file__).parents[1] / "runtime" / "tls"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving() as server:
        yield server.ready()
        server.end_clean()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With keys, and over HTTP/2, which browsers speak where there is TLS."""
    file = tmp_path_factory.mktemp("keys") / "api"
    file.write_text(KEY)
    file.chmod(0o600)
    tls = {"tls_cert": str(TLS / "cert.pem"), "tls_key": str(TLS / "key.pem")}
    with serving(api_key_file=str(file), **tls) as server:
        yield server.ready()
        server.end_clean()


def answer(browser: Browser) -> str:
    """The last answer, once it has ended."""
    last = ".said.assistant:last-of-type"
    browser.wait(lambda: browser.all(f"{last}[aria-busy=false]"))
    return browser.text(f"{last} .text")


def test_a_chat_streams(browser: Browser, server: ServerProcess) -> None:
    browser.open(server.url)
    browser.set("max_tokens", "4000")
    browser.ask("endless")
    browser.wait(lambda: len(browser.text(".said.assistant .text")) > 40)
    assert browser.by_id("stop").is_displayed() and not browser.by_id("send").is_displayed()
    shown = len(browser.text(".said.assistant .text"))
    browser.wait(lambda: len(browser.text(".said.assistant .text")) > shown)
    browser.by_id("stop").click()
    assert answer(browser).startswith("endless")
    browser.ask("What is 2+2?")
    assert answer(browser).startswith("What is 2+2?")
    assert "tokens" in browser.text(".said.assistant:last-of-type .facts")
    assert browser.text(".said.user") == "endless\nWhat is 2+2?"


@pytest.mark.parametrize("how", ["button", "escape", "another page"])
def test_stop_aborts(browser: Browser, server: ServerProcess, how: str) -> None:
    server.wait_at_rest(SOON_S)
    browser.open(server.url)
    browser.set("max_tokens", "4000")
    browser.ask("endless")
    browser.wait(lambda: server.occupancy()["running"] == 1)
    if how == "button":
        browser.by_id("stop").click()
    elif how == "escape":
        browser.by_id("question").send_keys("\ue00c")
    else:
        browser.driver.get("about:blank")
    server.wait_at_rest(SOON_S)
    if how != "another page":
        browser.wait(lambda: "stopped" in browser.text(".facts"))
        assert browser.by_id("send").is_displayed()


MARKDOWN = """\
# A title
Some **bold**, *slanted* and `code`.

1. one
2. two

```html
<script>alert(1)</script>
```
<img src=x onerror=alert(2)> [good](https://example.org/a) [bad](javascript:alert(3))
"""


def test_markdown_is_shown_and_html_is_text(browser: Browser, server: ServerProcess) -> None:
    browser.open(server.url)
    browser.set("max_tokens", str(len(MARKDOWN) - 1))  # the answer is the question, again and again
    browser.run("document.getElementById('question').value = arguments[0]", MARKDOWN)
    browser.by_id("send").click()
    shown = answer(browser)
    for tag, text in {"h3": "A title", "strong": "bold", "em": "slanted", "p > code": "code",
                      "pre code": "<script>alert(1)</script>"}.items():  # fmt: skip
        assert browser.text(f".said.assistant .text {tag}") == text
    assert len(browser.all(".said.assistant ol > li")) == 2
    assert "<img src=x onerror=alert(2)>" in shown and "[bad](javascript:alert(3))" in shown
    (link,) = browser.all(".said.assistant .text a")
    assert link.get_attribute("href") == "https://example.org/a"
    assert "noopener" in link.get_attribute("rel") and browser.all(".text img") == []


def test_what_a_server_refuses_is_said_and_can_be_asked_again(
    browser: Browser, server: ServerProcess
) -> None:
    browser.open(server.url)
    browser.ask("refuse")
    browser.wait(lambda: "this prompt is refused" in browser.text(".facts.error"))
    assert browser.by_id("question").get_attribute("value") == "refuse"
    assert any("400" in said for said in browser.complaints())  # Chromium tells of each refusal
    browser.by_id("question").clear()
    browser.by_id("reset").click()
    assert browser.all(".said") == [] and browser.by_id("welcome").is_displayed()


def path_of(browser: Browser, title: str) -> str:
    """The first line of the chart with this title."""
    script = """
      const chart = [...document.querySelectorAll('.chart')].find(
          (each) => each.querySelector('h2').textContent.startsWith(arguments[0]));
      return chart?.querySelector('path.line').getAttribute('d') ?? '';"""
    return str(browser.run(script, title))


def test_charts_move_under_load(browser: Browser, server: ServerProcess) -> None:
    browser.open(server.url, "live")
    browser.wait(lambda: path_of(browser, "Requests"))
    before = {title: path_of(browser, title) for title in ("Throughput", "Requests")}
    browser.run("location.hash = 'chat'")
    browser.set("max_tokens", "4000")
    browser.ask("endless")
    browser.wait(lambda: server.occupancy()["running"] == 1)
    browser.run("location.hash = 'live'")
    browser.wait(lambda: browser.text("#requests .phase") in ("decode", "prefill"))
    browser.wait(lambda: browser.text("#glance-running") == "1")
    for title, path in before.items():
        browser.wait(lambda title=title, path=path: path_of(browser, title) != path)
    highs = [y for y in path_of(browser, "Throughput").replace("M", "L").split("L")[1:]]
    assert min(float(point.split()[1]) for point in highs) < 60  # of 120: the line has risen
    browser.run("location.hash = 'chat'")
    browser.by_id("stop").click()
    server.wait_at_rest(SOON_S)


def test_the_prefix_cache_is_drawn(browser: Browser, server: ServerProcess) -> None:
    browser.open(server.url, "live")
    browser.wait(lambda: "tokens in" in browser.text("#tree-note"))


def test_capacity_is_shown(browser: Browser, server: ServerProcess) -> None:
    browser.open(server.url, "capacity")
    browser.wait(lambda: browser.all("#capacity-body .panel"))
    assert not browser.by_id("capacity-absent").is_displayed()


def test_a_key_is_asked_for_refused_and_taken(browser: Browser, guarded: ServerProcess) -> None:
    browser.open(guarded.url)
    browser.run("sessionStorage.clear()")
    browser.wait(lambda: browser.by_id("key-dialog").is_displayed())
    assert browser.run("return performance.getEntriesByType('navigation')[0].nextHopProtocol") == (
        "h2"
    )
    browser.by_id("key-input").send_keys("wrong\n")
    browser.wait(lambda: "does not know this key" in browser.text("#key-error"))
    browser.by_id("key-cancel").click()
    browser.wait(lambda: browser.text("#state") == "key needed")
    browser.set("max_tokens", "5")
    browser.ask("hello")  # asks again: it is the user who wants something
    browser.wait(lambda: browser.by_id("key-dialog").is_displayed())
    browser.by_id("key-input").send_keys(KEY + "\n")
    assert answer(browser) == "hello"
    browser.wait(lambda: browser.text("#state") == "ready")
    told = browser.complaints()
    assert told and all("401" in said for said in told) and KEY not in str(told)
    assert KEY not in browser.run("return document.documentElement.outerHTML + location.href")
    browser.run("sessionStorage.clear()")


@pytest.mark.parametrize("view", ["chat", "live", "capacity"])
def test_a_phone_is_wide_enough(browser: Browser, server: ServerProcess, view: str) -> None:
    browser.resize(360, 740, mobile=True)
    browser.open(server.url, view)
    browser.wait(lambda: browser.text("#state") == "ready")
    if view == "chat":
        browser.ask("a long word " + "x" * 300)
        answer(browser)
        assert browser.by_id("question").is_displayed()
    else:
        browser.wait(lambda: browser.all(".panel, .chart"))
    width = browser.run("return document.documentElement.scrollWidth")
    assert width <= 360


# (a foreground, its background) in each scheme; WCAG 2.2, 1.4.3 asks for 4.5
PAIRS = [
    ("--ink", "--paper"), ("--ink", "--card"), ("--soft", "--paper"), ("--soft", "--card"),
    ("--soft", "--sunk"), ("--on-accent", "--accent"), ("--bad", "--card"), ("--good", "--card"),
    ("--accent", "--card"), ("--two", "--card"),
]  # fmt: skip


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_contrast(browser: Browser, server: ServerProcess, dark: bool) -> None:
    browser.resize(1280, 900, dark=dark)
    browser.open(server.url)
    weak = {pair: found for pair in PAIRS if (found := contrast(browser, *pair)) < 4.5}
    assert weak == {}


def contrast(browser: Browser, fore: str, back: str) -> float:
    """As WCAG defines it, from 1 to 21."""
    lights = []
    for name in (fore, back):
        script = "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0])"
        colour = str(browser.run(script, name)).strip().lstrip("#")
        parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    low, high = sorted(lights)
    return (high + 0.05) / (low + 0.05)


def test_a_keyboard_is_enough(browser: Browser, server: ServerProcess) -> None:
    """Tab reaches every control in order, and each has a name."""
    browser.open(server.url)
    browser.wait(lambda: browser.text("#state") == "ready")
    names = browser.run("""
      const reached = [...document.querySelectorAll('a, button, input, textarea, summary')]
          .filter((each) => each.checkVisibility());
      return reached.map((each) => each.labels?.[0]?.textContent.trim()
          || each.getAttribute('aria-label') || each.textContent.trim());""")
    assert len(names) >= 12 and all(names)
    assert browser.run("return document.activeElement.id") == "question"


def test_a_server_that_has_gone_is_missed(browser: Browser) -> None:
    with serving() as server:
        server.ready()
        browser.open(server.url)
        browser.wait(lambda: browser.text("#state") == "ready", START_S)
        server.end_clean()
        browser.wait(lambda: browser.text("#state") == "not reached")
    browser.driver.get("about:blank")
    assert all("ERR_" in said for said in browser.complaints())
