"""Imports only point down: an AST walk over every module, and what must never wait for torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Longest prefix wins. A module may import modules of lower floors, and modules of its own package.
FLOORS = {
    "compiled_mtp.errors": 0,
    "compiled_mtp.stop_strings": 0,
    "compiled_mtp.request": 0,
    "compiled_mtp.plan": 0,
    "compiled_mtp.model_config": 0,
    "compiled_mtp.config": 0,
    "compiled_mtp.memory": 0,
    "compiled_mtp.tokenizer": 0,
    "compiled_mtp.reasoning": 0,
    "compiled_mtp.graphs": 0,
    "compiled_mtp.graphs.buckets": 0,
    "compiled_mtp.cache": 0,
    "compiled_mtp.cache.block_pool": 0,
    "compiled_mtp.cache.prefix_index": 0,
    "compiled_mtp.cache.prefix_shelf": 0,
    "compiled_mtp.default_model": 0,
    "compiled_mtp.ops": 1,
    "compiled_mtp.graphs.compile": 2,
    "compiled_mtp.graphs.artifacts": 2,
    "compiled_mtp.graphs.later": 2,
    "compiled_mtp.cache.slot_tensors": 3,
    "compiled_mtp.cache.slot_sampling": 3,
    "compiled_mtp.cache.slot_state": 3,
    "compiled_mtp.cache.kv_cache": 3,
    "compiled_mtp.cache.state_cache": 3,
    "compiled_mtp.cache.stacked": 3,
    "compiled_mtp.cache.row_layout": 3,
    "compiled_mtp.cache.host_tier": 3,
    "compiled_mtp.cache.lane": 3,
    "compiled_mtp.cache.moves": 3,
    "compiled_mtp.cache_sizes": 4,
    "compiled_mtp.step_output": 3,
    "compiled_mtp.sampling": 0,
    "compiled_mtp.sampling.params": 0,
    "compiled_mtp.sampling.sampling_params": 0,
    "compiled_mtp.sampling.logprobs": 0,
    "compiled_mtp.sampling.grammar_source": 0,
    "compiled_mtp.sampling.schema_types": 0,
    "compiled_mtp.sampling.string_schemas": 0,
    "compiled_mtp.sampling.tool_calls": 0,
    "compiled_mtp.sampling.grammar": 3,
    "compiled_mtp.parallel": 0,
    "compiled_mtp.parallel.plans": 0,
    "compiled_mtp.parallel.exchange": 3,
    "compiled_mtp.parallel.gloo": 4,
    "compiled_mtp.parallel.nccl": 5,
    "compiled_mtp.parallel.symmetric_kernel": 1,
    "compiled_mtp.parallel.symmetric": 5,
    "compiled_mtp.parallel.choose": 6,
    "compiled_mtp.parallel.torchrun": 1,
    "compiled_mtp.parallel.ranks": 9,
    "compiled_mtp.parallel.follower": 10,
    "compiled_mtp.parallel.limits": 9,
    "compiled_mtp.parallel.leader": 10,
    "compiled_mtp.models": 4,
    "compiled_mtp.spec": 5,
    "compiled_mtp.prompt_logprobs": 6,
    "compiled_mtp.step": 6,
    "compiled_mtp.programs": 7,
    "compiled_mtp.draft_vocabulary": 0,
    "compiled_mtp.draft_choice": 5,
    "compiled_mtp.depth_choice": 6,
    "compiled_mtp.graph_choice": 3,
    "compiled_mtp.build_settings": 7,
    "compiled_mtp.host_memory": 7,
    "compiled_mtp.build": 8,
    "compiled_mtp.runner": 9,
    "compiled_mtp.scheduler": 7,
    "compiled_mtp.guidance": 7,
    "compiled_mtp.masks": 8,
    "compiled_mtp.numeric_settings": 1,
    "compiled_mtp.front": 8,
    "compiled_mtp.checkpoint": 9,
    "compiled_mtp.prompts": 1,
    "compiled_mtp.hub": 0,
    "compiled_mtp.inbox": 8,
    "compiled_mtp.turn": 0,
    "compiled_mtp.engine": 11,
    "compiled_mtp.async_engine": 12,
    "compiled_mtp.cli": 14,
    "compiled_mtp.cli.flags": 1,
    "compiled_mtp.cli.signals": 0,
    "compiled_mtp.cli.console": 12,
    "compiled_mtp.run": 15,
    "compiled_mtp.__main__": 15,
    "compiled_mtp.server": 13,
    "compiled_mtp.server.__main__": 15,
    "compiled_mtp.replicas": 14,
    "compiled_mtp.ray_serve": 15,
    "tools": 15,
}
SEVERAL_FLOORS = [f"compiled_mtp.{name}" for name in ("cache", "graphs", "parallel", "sampling")]
# The public names, resolved lazily.
FACADE = "compiled_mtp"
NO_TORCH = [m for m, floor in FLOORS.items() if floor == 0] + ["compiled_mtp.scheduler"]


def modules() -> dict[str, Path]:
    """Every module of the product by its import name; ops and graphs by the only name they have."""
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


def floor_of(module: str) -> int | None:
    name = module
    while name:
        if name in FLOORS:
            return FLOORS[name]
        # A new module of a package whose modules lie on several floors must be placed by name.
        name = name.rpartition(".")[0]
        if name in SEVERAL_FLOORS:
            return None
    return None


def imports(module: str, source: str) -> Iterator[str]:
    """Full names of what a module imports, anywhere in it."""
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


def package_of(module: str) -> str:
    """compiled_mtp.models.layers -> compiled_mtp.models; a module beside others has no package to share."""
    parts = module.split(".")
    depth = 1 if parts[0] == "tools" else 2
    return ".".join(parts[:depth]) if len(parts) > depth else module


def violations(module: str, source: str) -> list[str]:
    """The rules that the imports of one module break."""
    floor, broken = floor_of(module), []
    in_scheduler = package_of(module) == "compiled_mtp.scheduler"
    for name in imports(module, source):
        if name.split(".")[0] in ("ops", "graphs"):
            broken.append(f"{module} imports {name}, which exists only inside compiled_mtp")
        if name.split(".")[0] == "torch" and (module in NO_TORCH or in_scheduler):
            broken.append(f"{module} imports torch")
        if module.startswith("compiled_mtp.ops."):
            broken += operator_violations(module, name)
        below = floor_of(name)
        if name not in MODULES or floor is None or below is None:
            continue
        if in_scheduler and below > 0 and package_of(name) != package_of(module):
            broken.append(f"{module} imports {name}, and may import floor 0 only")
        elif below > floor or (below == floor > 0 and package_of(name) != package_of(module)):
            broken.append(f"{module} (floor {floor}) imports {name} (floor {below})")
    return broken


def operator_violations(module: str, name: str) -> list[str]:
    """Operators know torch, triton and the helpers beside them, never one another."""
    root = name.split(".")[0]
    if root not in ("compiled_mtp", "torch", "triton", *sys.stdlib_module_names):
        return [f"{module} imports {name}; operators know torch and triton only"]
    if root != "compiled_mtp" or package_of(name) != "compiled_mtp.ops":
        return []
    operators = {m.split(".")[2] for m in MODULES if m.startswith("compiled_mtp.ops.") and m.count(".") > 2}
    own, other = (part.split(".")[2] if part.count(".") > 1 else "" for part in (module, name))
    return [f"{module} imports the operator {name}"] if other in operators and other != own else []


def test_every_module_has_a_floor() -> None:
    assert [m for m in MODULES if m != FACADE and floor_of(m) is None and m not in FLOORS] == []
    assert [m for m in FLOORS if m not in MODULES and m != "tools"] == []


@pytest.mark.parametrize("module", [m for m in MODULES if m != FACADE])
def test_imports_point_down(module: str) -> None:
    assert violations(module, MODULES[module].read_text(encoding="utf-8")) == []


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
def test_the_walk_sees_what_it_should(module: str, source: str) -> None:
    assert violations(module, source) != []


def reads_environment(source: str) -> bool:
    """Whether a source names os.environ or os.getenv in any form, but to set a variable."""
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
    assert [m for m, source in sources.items() if reads_environment(source)] == ["compiled_mtp.config"]
    assert reads_environment("from os import getenv")
    assert reads_environment("import os; x = os.environ['A']")
    assert not reads_environment("import os; os.environ['A'] = 'b'")
    assert not reads_environment("template.environ")


def test_the_scheduler_does_not_wait_for_torch() -> None:
    """Nor does anything on floor 0, directly or through what it imports."""
    code = f"import sys, {', '.join(NO_TORCH)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_an_engine_alone_loads_nothing_that_starts_ranks() -> None:
    code = "import sys, compiled_mtp.engine; print(*[m for m in sys.modules if '.parallel' in m])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    ours = [name for name in loaded.stdout.split() if name.startswith("compiled_mtp.")]
    assert ours == ["compiled_mtp.parallel", "compiled_mtp.parallel.exchange"]
