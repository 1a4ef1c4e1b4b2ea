"""Take pictures of the server's page, light and dark: start a server, open headless Chromium, get an answer.

`make screenshot` writes docs/page.png and docs/page-dark.png. Run it on a quiet machine: the pictures show
speeds. Needs the extra `browser`, Chromium and its driver, which `make browser` installs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compiled_mtp.terminal.flags import Parser

_FIELDS = {"temperature": "0.4", "seed": "3", "max_tokens": "90"}
_TIMEOUT_S = 120.0


@contextmanager
def open_browser(*, is_dark: bool = False, size: tuple[int, int] = (1280, 800)) -> Iterator[Any]:
    """Yield a selenium driver of headless Chromium whose window is `size` CSS pixels.

    Raises ValueError if Chromium or its driver is missing; selenium must be installed.
    """
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    for name, path in found.items():
        if path is None:
            raise ValueError(f"{name} must be on the path, got none; `make browser` installs it on Debian")
    options = webdriver.ChromeOptions()
    options.binary_location = str(found["chromium"])
    # Chromium's sandbox does not work for root; the page is our own.
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(found["chromedriver"]))
    try:
        set_window(driver, size, is_dark=is_dark)
        yield driver
    finally:
        driver.quit()


def set_window(driver: Any, size: tuple[int, int], *, is_dark: bool = False, is_still: bool = False) -> None:
    """Set the window's size in CSS pixels, its colour scheme and whether it prefers reduced motion."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wanted = {
        "prefers-color-scheme": "dark" if is_dark else "light",
        "prefers-reduced-motion": "reduce" if is_still else "no-preference",
    }
    features = [{"name": name, "value": value} for name, value in wanted.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@contextmanager
def _serve() -> Iterator[str]:
    """Serve the default model on a free port; yield the address."""
    command = [sys.executable, "-m", "compiled_mtp", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                message = json.loads(line).get("message", "") if line.startswith("{") else line
                if message.startswith("serving "):
                    yield message.partition(" at ")[2].split()[0]
                    return
            raise ValueError(
                "the server must start, got an end of its log; run compiled-mtp serve to see why"
            )
        finally:
            process.terminate()


def _take(url: str, path: Path, *, is_dark: bool) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    with open_browser(is_dark=is_dark) as driver:
        driver.get(url)
        driver.implicitly_wait(_TIMEOUT_S)
        driver.find_element(By.CSS_SELECTOR, "#model option")
        for name, value in _FIELDS.items():
            driver.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, value)
        # A server's first answer is slower than the ones after it: the picture shows the second.
        for example in ("#examples button:last-child", "#examples button:first-child"):
            driver.find_element(By.ID, "new").click()
            driver.find_element(By.CSS_SELECTOR, example).click()
            driver.find_element(By.CSS_SELECTOR, ".foot:not(:empty)")
            WebDriverWait(driver, _TIMEOUT_S).until(
                lambda found: found.find_element(By.ID, "new").is_enabled()
            )
        replaced = driver.find_elements(By.CSS_SELECTOR, ".round:has(.kept) .replaced .mark")
        ActionChains(driver).move_to_element(replaced[0]).perform()
        time.sleep(0.3)  # Let the page draw what follows the pointer.
        path.write_bytes(driver.get_screenshot_as_png())


def main() -> int:
    """Write both pictures."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--output",
        dest="out",
        type=Path,
        default=Path("docs/page.png"),
        help="file of the light picture; the dark one gets -dark in its name",
    )
    out = parser.parse_args().out
    with _serve() as url:
        _take(url, out, is_dark=False)
        _take(url, out.with_stem(f"{out.stem}-dark"), is_dark=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
