"""Reads kernels' sources: what each touches before its wait, and whether it is a fence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPS = Path(__file__).parents[2] / "ops"
# Arguments of kernels that are neither tensors nor named *_stride.
NUMBERS = {
    "all_units", "block_size", "end", "eps", "first_key", "k", "max_blocks", "more", "n", "num_keys",
    "num_requests", "num_programs", "num_splits", "num_tiles", "part_bits", "part_length", "parts",
    "prefetch_bytes", "query_len", "row", "rows", "scale_log2", "scale_words", "share", "split_length",
    "steps", "tasks", "unit", "units",
}  # fmt: skip


@dataclass
class Kernel:
    """Whether a kernel is a fence, and the arguments that it reads and stores to before its wait."""

    is_fence: bool
    reads: set[str]
    stores: set[str]


def calls(node: ast.AST, name: str) -> list[int]:
    return [
        call.lineno
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == name
    ]


def touches(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Return all that may touch memory: stores with their address, and every other call, helpers included."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "store":
            yield "store", call.args[0]
        elif isinstance(call, ast.Call):
            yield "read", call


def early_uses(
    statements: list[ast.stmt], made_of: dict[str, set[str]], wait: str = "gdc_wait"
) -> dict[str, set[str]]:
    """Return the names that statements read and store to on a path that has not waited yet.

    made_of: the arguments from which each address was made; arithmetic alone touches no memory.
    """
    found: dict[str, set[str]] = {"read": set(), "store": set()}
    for statement in statements:
        is_waiting = bool(calls(statement, wait)) and not leaves(statement)
        part: ast.AST = statement
        if isinstance(statement, ast.If):
            for branch in (statement.body, statement.orelse):
                for use, names in early_uses(branch, made_of, wait).items():
                    found[use] |= names
            part = statement.test
        elif isinstance(statement, ast.While) and is_waiting:
            # What follows the wait in a first pass, and all of the passes after it, are behind the wait.
            for use, names in early_uses(statement.body, made_of, wait).items():
                found[use] |= names
            part = statement.test
        for use, node in touches(part):
            found[use] |= names_of(node, made_of)
        if isinstance(statement, (ast.Assign, ast.AugAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if isinstance(targets[0], ast.Tuple) and isinstance(statement.value, ast.Name):
                # An argument that holds several: the kernel packed them under the same names.
                continue
            for target in (name for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)):
                added = names_of(statement.value, made_of, with_loads=False)
                made_of[target.id] = added | (
                    names_of(target, made_of) if isinstance(statement, ast.AugAssign) else set()
                )
        if is_waiting:
            break
    return found


def leaves(statement: ast.stmt) -> bool:
    """Whether a program for which the statement's condition is true ends there."""
    return isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return)


def names_of(node: ast.AST, made_of: dict[str, set[str]], with_loads: bool = True) -> set[str]:
    """Return the names of an expression and their sources, without names that it only loads from."""
    names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    if not with_loads:
        loads = [c for c in ast.walk(node) if isinstance(c, ast.Call) and ast.unparse(c.func) == "tl.load"]
        loaded = [id(name) for load in loads for name in ast.walk(load)]
        names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and id(name) not in loaded}
    return set().union(*(made_of.get(name, {name}) for name in names))


class Settle(ast.NodeTransformer):
    """Replaces `if RESIDENT`, `if not RESIDENT` and `if X and RESIDENT` by the branch of one value; EARLY is
    true. A program begins its first task at chunk 0: tests/ops/test_left_product.py."""

    def __init__(self, resident: bool) -> None:
        self.resident = resident

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        terms = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        values = {
            "RESIDENT": self.resident,
            "not RESIDENT": not self.resident,
            "not EARLY": False,
            "from_chunk > 0": False,
        }
        known = [values[text] for text in map(ast.unparse, terms) if text in values]
        if not known:
            return node
        assert not (isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or))
        return node.body if all(known) else node.orelse


class Inline(ast.NodeTransformer):
    """Replaces `result = helper(...)` by the body of a helper of the same file that waits."""

    def __init__(self, functions: dict[str, ast.FunctionDef]) -> None:
        self.waiting = {name: of for name, of in functions.items() if calls(of, "gdc_wait")}

    def visit_Assign(self, node: ast.Assign) -> Any:
        call = node.value
        if not (
            isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in self.waiting
        ):
            return node
        helper = self.waiting[call.func.id]
        assert not call.keywords
        assert isinstance(helper.body[-1], ast.Return)
        given = [
            ast.parse(f"{parameter.arg} = {ast.unparse(value)}").body[0]
            for parameter, value in zip(helper.args.args, call.args, strict=True)
            if parameter.arg != ast.unparse(value)
        ]
        returned = ast.parse(f"{ast.unparse(node.targets[0])} = {ast.unparse(helper.body[-1].value)}").body
        return [*given, *helper.body[:-1], *returned]


def partitions(kernel: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> list[ast.FunctionDef]:
    """Return what the kernel's warp groups run, each once: `gl.warp_specialize` takes (function, arguments)
    of each. The kernel itself if it has none."""
    names = {
        part.elts[0].id: None
        for call in ast.walk(kernel)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "gl.warp_specialize"
        for part in getattr(call.args[0], "elts", ())
    }
    return [functions[name] for name in names] or [kernel]


def read_kernels(resident: bool) -> dict[str, Kernel]:
    """Read every kernel that waits for the kernel before it, from its source, with that value of RESIDENT."""
    found = {}
    files = [
        {
            item.name: item
            for item in Settle(resident).visit(ast.parse(path.read_text())).body
            if isinstance(item, ast.FunctionDef)
        }
        for path in sorted(OPS.glob("**/*.py"))
    ]
    for functions in files:
        inline = Inline(functions)
        called = {
            call.func.id
            for of in functions.values()
            for call in ast.walk(of)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        }
        for name in functions.keys() - inline.waiting.keys():
            inline.visit(functions[name])
        for name in inline.waiting.keys() & called:
            del functions[name]
    # What a warp group runs may stand in another file.
    every = {name: function for functions in files for name, function in functions.items()}
    own = [{name: partitions(of, every | functions) for name, of in functions.items()} for functions in files]
    inner = {part.name for parts in own for name, of in parts.items() for part in of if part.name != name}
    for functions, parts in zip(files, own, strict=True):
        for name, function in functions.items():
            waiting = [part for part in parts[name] if calls(part, "gdc_wait")]
            if name in inner or not waiting:
                continue
            given = {argument.arg for argument in function.args.args if argument.annotation is None}
            tensors = {argument for argument in given if not argument.endswith("_stride")} - NUMBERS
            reads, stores = set[str](), set[str]()
            for part in parts[name]:
                # Warp groups that never wait wait for the tiles that one loads which does.
                uses = early_uses(part.body, {}, "gdc_wait" if part in waiting else "mbarrier.wait")
                reads |= uses["read"] & tensors
                stores |= uses["store"] & tensors
            triggers = [part for part in waiting if calls(part, "gdc_launch_dependents")]
            is_fence = bool(triggers) and all(
                min(calls(part, "gdc_launch_dependents")) > max(calls(part, "gdc_wait")) for part in triggers
            )
            # Descriptors of an argument's tiles, and of the further rows of a tile.
            found[name] = Kernel(
                is_fence, {read.removesuffix("_tiles").removesuffix("_rest") for read in reads}, stores
            )
    return found
