"""Imports only point down: an AST walk over every module; and which modules must not wait for torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Rooms from the ground up: a folder, or a module at the root. A module imports its own room and the rooms
# before it in this list.
ROOMS = (
    "errors",
    "default_model",
    "ops",
    "graphs",
    "plan",
    "model_config",
    "config",
    "sampling",
    "request",
    "cache",
    "communicators",
    "files",
    "gguf",
    "models",
    "vision",
    "step_output",
    "step",
    "rounds",
    "spec",
    "scheduler",
    "frontend",
    "runner",
    "parallel",
    "engine",
    "streams",
    "async_engine",
    "terminal",
    "benchmarks",
    "server",
    "replicas",
    "cli",
    "run",
    "ray_serve",
    "__main__",
    "tools",
)
# Rooms, and modules of other rooms, that must not import torch.
NO_TORCH_ROOMS = ("errors", "default_model", "plan", "model_config", "config", "request", "scheduler")
NO_TORCH = (
    *(f"compiled_mtp.{room}" for room in NO_TORCH_ROOMS),
    "compiled_mtp.ops.prompt_chunks",
    "compiled_mtp.graphs.buckets",
    "compiled_mtp.cache.block_pool",
    "compiled_mtp.cache.prefix_index",
    "compiled_mtp.cache.prefix_host_tier",
    *(
        f"compiled_mtp.sampling.{name}"
        for name in ("parameter_checks", "sampling_params", "logprobs", "stop_strings")
    ),
    *(
        f"compiled_mtp.sampling.{name}"
        for name in (
            "grammar_source",
            "regex_size",
            "call_arguments",
            "schema_types",
            "schema_values",
            "tool_calls",
        )
    ),
    *(f"compiled_mtp.frontend.{name}" for name in ("tokenizer", "hub", "prompts", "image_prompts")),
    *(f"compiled_mtp.gguf.{name}" for name in ("block_types", "container", "config", "names", "tokenizer")),
    "compiled_mtp.models.draft_vocabulary",
    "compiled_mtp.runner.host_memory",
    "compiled_mtp.parallel.plans",
    "compiled_mtp.vision.images",
    "compiled_mtp.vision.sizes",
    "compiled_mtp.terminal.signals",
)
# The public names, resolved lazily.
FACADE = "compiled_mtp"
# The scheduler decides by numbers alone: it imports no model, device or text module.
SCHEDULER_ROOMS = ("errors", "graphs", "plan", "sampling", "request", "cache")


def modules() -> dict[str, Path]:
    """Return every module of the product by its import name; ops and graphs by their only names."""
    found: dict[str, Path] = {}
    for folder, package in (
        ("compiled_mtp", "compiled_mtp"),
        ("ops", "compiled_mtp.ops"),
        ("graphs", "compiled_mtp.graphs"),
        ("tools", "tools"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if package == "compiled_mtp" and parts[0] in ("ops", "graphs"):
                continue
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def room_of(module: str) -> str:
    """Return the room of a module: compiled_mtp.models.layers -> models; an entry point is its own room, at
    the top."""
    parts = module.split(".")
    if parts[-1] == "__main__":
        return "__main__"
    return "tools" if parts[0] == "tools" else parts[1]


def imports(module: str, source: str) -> Iterator[str]:
    """Return the full names of a module's imports, anywhere in it."""
    is_package = MODULES.get(module, Path()).name == "__init__.py"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*up, base] if base else up)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if name in MODULES else base


def violations(module: str, source: str) -> list[str]:
    """Return the rules that one module's imports break."""
    room, broken = room_of(module), []
    may_not_import_torch = room in NO_TORCH_ROOMS or module in NO_TORCH
    for name in imports(module, source):
        if name.split(".")[0] in ("ops", "graphs"):
            broken.append(f"{module} imports {name}, which exists only inside compiled_mtp")
        if name.split(".")[0] == "torch" and may_not_import_torch:
            broken.append(f"{module} imports torch")
        if module.startswith("compiled_mtp.ops."):
            broken += operator_violations(module, name)
        if name not in MODULES or name == FACADE:
            continue
        other = room_of(name)
        if other != room and ROOMS.index(other) > ROOMS.index(room):
            broken.append(f"{module} (room {room}) imports {name} (room {other}), which is higher up")
        if room == "scheduler" and other not in (room, *SCHEDULER_ROOMS):
            broken.append(f"{module} imports {name}, and may import {', '.join(SCHEDULER_ROOMS)} only")
    return broken


def operator_violations(module: str, name: str) -> list[str]:
    """Return violations of the operators' rule: they import torch, triton and helpers, never each other."""
    root = name.split(".")[0]
    if root not in ("compiled_mtp", "torch", "triton", *sys.stdlib_module_names):
        return [f"{module} imports {name}; operators know torch and triton only"]
    if root != "compiled_mtp" or room_of(name) != "ops":
        return []
    operators = {m.split(".")[2] for m in MODULES if m.startswith("compiled_mtp.ops.") and m.count(".") > 2}
    own, other = (part.split(".")[2] if part.count(".") > 1 else "" for part in (module, name))
    return [f"{module} imports the operator {name}"] if other in operators and other != own else []


def test_every_room_is_listed_and_exists() -> None:
    assert {room_of(module) for module in MODULES if module != FACADE} == set(ROOMS)


def test_the_root_of_the_package_is_small() -> None:
    at_root = [
        m for m in MODULES if m.count(".") == 1 and MODULES[m].name not in ("__init__.py", "__main__.py")
    ]
    assert len([m for m in at_root if not m.startswith("tools.")]) <= 11


@pytest.mark.parametrize("module", [m for m in MODULES if m != FACADE])
def test_imports_point_down(module: str) -> None:
    assert violations(module, MODULES[module].read_text(encoding="utf-8")) == []


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, [] if there are none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module not in done:
            for name in sorted(graph.get(module, ())):
                if found := visit(name, [*path, module]):
                    return found
            done.add(module)
        return []

    return next((found for module in graph if (found := visit(module, []))), [])


def test_no_modules_import_each_other() -> None:
    """Not even for annotations alone."""
    graph = {
        module: {name for name in imports(module, path.read_text(encoding="utf-8")) if name in MODULES}
        for module, path in MODULES.items()
        if module != FACADE
    }
    assert circle(graph) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("compiled_mtp.scheduler.planner", "import torch"),
        ("compiled_mtp.scheduler.planner", "from compiled_mtp.models.weights import load_weights"),
        ("compiled_mtp.request", "def f():\n    import torch.nn"),
        ("compiled_mtp.models.weights", "from compiled_mtp import step"),
        ("compiled_mtp.step", "from compiled_mtp.engine import Engine"),
        ("compiled_mtp.ops.linear.reference", "from compiled_mtp.ops.rms_norm import rms_norm"),
        ("compiled_mtp.ops.linear.reference", "import numpy"),
        (
            "compiled_mtp.ops.linear.reference",
            "from compiled_mtp.model_config import ModelConfig\nimport ops",
        ),
        ("compiled_mtp.models.layers", "from ..step import Step"),
    ],
)
def test_the_walk_finds_violations(module: str, source: str) -> None:
    assert violations(module, source) != []


def reads_environment(source: str) -> bool:
    """Return whether a source reads os.environ or os.getenv in any form; setting a variable is allowed."""
    names = {"environ", "getenv", "environb"}
    tree = ast.parse(source)
    stores = [n for n in ast.walk(tree) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
    is_set = {id(node.value) for node in stores}
    for node in ast.walk(tree):
        if id(node) in is_set:
            continue
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}:
            return True
    return False


def test_only_config_reads_the_environment() -> None:
    sources = {m: p.read_text(encoding="utf-8") for m, p in MODULES.items() if not m.startswith("tools.")}
    assert {room_of(m) for m, source in sources.items() if reads_environment(source)} == {"config"}
    assert reads_environment("from os import getenv")
    assert reads_environment("import os; x = os.environ['A']")
    assert not reads_environment("import os; os.environ['A'] = 'b'")
    assert not reads_environment("template.environ")


def test_the_scheduler_does_not_wait_for_torch() -> None:
    """Neither does any module of NO_TORCH, directly or through its imports."""
    code = f"import sys, {', '.join(NO_TORCH)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_an_engine_alone_loads_nothing_that_starts_ranks() -> None:
    code = "import sys, compiled_mtp.engine; print(*[m for m in sys.modules if '.parallel' in m])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    ours = [name for name in loaded.stdout.split() if name.startswith("compiled_mtp.")]
    assert ours == []
