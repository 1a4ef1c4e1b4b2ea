"""Every metric that docs/grafana.json and docs/replicas.md name exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.replicas.config import ReplicaConfig, split_args
from compiled_mtp.replicas.metrics import ReplicaMetrics
from tests.server.serving import CHECKPOINT, ScriptedEngine

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
TEXT = (DOCS / "replicas.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Return the names on the replicated service's /metrics, and their names on Ray's port."""
    metrics = ReplicaMetrics()
    engine = ScriptedEngine(Tokenizer(CHECKPOINT))
    engine.say("a text")
    engine.add_request(prompt_token_ids=[1])
    while engine.has_unfinished_requests():
        metrics.on_step(engine.step(), 0.1, engine.stats())
    metrics.on_response("/v1/completions", 200)
    found, ray = set(), set()
    for family in metrics.collect():
        for sample in family.samples:
            found.add(sample.name)
            if family.type == "gauge":
                ray.add(f"ray_{sample.name}")
            elif not sample.name.endswith("_bucket"):
                # Ray appends this to the name of every counter.
                ray.add(f"ray_{sample.name.removesuffix('_total')}_total")
    return found | ray


def named(text: str) -> set[str]:
    return set(re.findall(r"(?:ray_)?compiled_mtp_[a-z_]+[a-z]", text))


def test_the_dashboard(names: set[str]) -> None:
    charts = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert all(panel["targets"] for panel in charts)
    for panel in charts:
        for target in panel["targets"]:
            found = named(target["expr"])
            assert found, panel["title"]
            assert found <= names, panel["title"]
    for variable in DASHBOARD["templating"]["list"]:
        assert named(json.dumps(variable.get("query", ""))) <= names
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_it_shows_what_there_is(names: set[str]) -> None:
    shown = named(json.dumps(DASHBOARD))
    own = {n for n in names if re.fullmatch(r"compiled_mtp_(?!engine_).*_total", n)}
    # Rounds by depth exist only with mtp_step auto.
    assert own - shown <= {"compiled_mtp_rounds_total"}


def test_the_page(names: set[str]) -> None:
    modules = {"compiled_mtp_server"}
    found = {name for name in named(TEXT) if name not in modules}
    assert len(found) > 5
    assert found <= names


def test_the_arguments_are_those_that_there_are() -> None:
    rows = re.findall(
        r"^\| (`.*?`) \| (.*?) \|", TEXT.split("## Arguments")[1].split("## ")[0], flags=re.MULTILINE
    )
    told = {name: value for names, value in rows for name in re.findall(r"`(\w+)`", names)}
    fields = ReplicaConfig.model_fields
    assert told.keys() == fields.keys()
    names = ("replicas", "cpus", "max_failovers", "start_timeout_s", "silence_timeout_s")
    for name in (*names, "prefix_chunks", "max_imbalance"):
        assert float(told[name]) == fields[name].default, name


def test_the_commands_are_taken() -> None:
    commands = re.findall(r"serve run compiled_mtp.ray_serve:app ([^`\n]+)", TEXT)
    assert len(commands) == 2
    for command in commands:
        split_args(dict(argument.split("=", 1) for argument in command.split()))
