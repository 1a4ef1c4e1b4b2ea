"""The service over the checkpoint that ships, with a chat template that takes tools."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from tests.server.serving import CHECKPOINT, Running, running

NEEDS = {"test_agents.py": "agents", "test_clients.py": "litellm", "test_client_images.py": "litellm"}
collect_ignore = [file for file, package in NEEDS.items() if find_spec(package) is None]
TEMPLATE = Path(__file__).parent / "tools.jinja"


@pytest.fixture(scope="session")
def served() -> Iterator[Running]:
    engine = Engine(EngineConfig(device="cpu", mtp_step=3, seed=1, chat_template=TEMPLATE))
    length = engine.runner.memory.max_model_len
    with running(engine, CHECKPOINT, length, chat_template=TEMPLATE) as server:
        yield server
