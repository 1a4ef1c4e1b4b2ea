"""One browser, and servers over a real engine and a scripted one, for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from compiled_mtp import Engine, EngineConfig
from compiled_mtp.frontend.tokenizer import Tokenizer
from tests.browser.pages import SIZE, Page
from tests.server.serving import CHECKPOINT, Running, ScriptedEngine, running
from tools.page_screenshot import open_browser, set_window


@pytest.fixture(scope="session")
def real() -> Iterator[Running]:
    # A fixed depth: with auto a busy machine also has rounds without drafts.
    engine = Engine(EngineConfig(device="cpu", mtp_step=3))
    with running(engine, CHECKPOINT, engine.runner.memory.max_model_len, served_model_name=()) as server:
        yield server


@pytest.fixture(scope="session")
def talker() -> ScriptedEngine:
    return ScriptedEngine(Tokenizer(CHECKPOINT))


@pytest.fixture(scope="session")
def scripted(talker: ScriptedEngine) -> Iterator[Running]:
    with running(talker, CHECKPOINT) as server:
        yield server


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    with open_browser(size=SIZE) as found:
        yield found


@pytest.fixture
def page(driver: Any) -> Iterator[Page]:
    found = Page(driver)
    yield found
    # The browser logs refusals of the policy, our errors, and HTTP errors here.
    logged = [one for one in driver.get_log("browser") if "Failed to load resource" not in one["message"]]
    assert logged == []
    set_window(driver, SIZE)
