"""A headless Chromium, driven by Selenium, and what every test of the page asks of it."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

WAIT_S = 30.0  # far more than a page takes, on a busy machine too


class Browser:
    """One window. Owned by its test."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
            options.add_argument(flag)
        options.accept_insecure_certs = True
        options.binary_location = shutil.which("chromium")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = shutil.which("chromedriver")
        self.driver = webdriver.Chrome(options=options, service=Service(driver))
        self.resize(1280, 900)

    def resize(self, width: int, height: int, *, mobile: bool = False, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, url: str, view: str = "chat") -> None:
        self.driver.get("about:blank")  # a new hash alone would not load it again
        self.driver.get(f"{url}/#{view}")

    def by_id(self, name: str) -> Any:
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def text(self, selector: str) -> str:
        return "\n".join(element.text for element in self.all(selector))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def set(self, name: str, value: str) -> None:
        """A field of the settings."""
        field = self.driver.find_element(By.NAME, name)
        field.clear()
        field.send_keys(value)

    def ask(self, question: str) -> None:
        self.by_id("question").send_keys(question + "\n")

    def wait(self, what: Callable[[], Any], limit_s: float = WAIT_S) -> Any:
        """What `what` answers once it is true."""
        deadline_s = time.monotonic() + limit_s
        while not (found := what()):
            assert time.monotonic() < deadline_s, self.run("return document.body.innerText")
            time.sleep(0.1)
        return found

    def complaints(self) -> list[str]:
        """What the console has said since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("needs a browser: apt install chromium chromium-driver")
    browser = Browser()
    yield browser
    browser.driver.quit()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """With an empty session; at the end, the console must have had nothing to say."""
    chromium.driver.get("about:blank")
    chromium.resize(1280, 900)
    chromium.complaints()
    yield chromium
    said = chromium.complaints()
    chromium.run("return 1")
    assert said == [], json.dumps(said, indent=1)
