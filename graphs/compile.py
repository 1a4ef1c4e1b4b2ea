"""One compiled callable per shape, or for several batch sizes; compiled ahead, replayed without a decision.

Two forms of the same code. "reduce-overhead" is `torch.compile(mode="reduce-overhead")`: CUDA-graph trees
keep the books, which takes the host 200 us a step at 24 layers and 650 at 64. "replay" compiles without
them and captures the call by hand, once; a replay costs the host about 10 us. Code of which a compiler makes
nothing better is captured as it is in either. On a CPU there are no graphs, and no mode.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch

from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.ops.registry import overloads

GraphMode = Literal["reduce-overhead", "replay"]
Program = Callable[..., Any]
"""Takes the static inputs of its shape; returns a tensor, or None for one that only mutates."""
Inputs = tuple[torch.Tensor | int | RoundShape, ...]


@contextmanager
def compiler_settings() -> Iterator[None]:
    """What compiled code must obey so that a row's bits depend on that row alone.

    No reduction inside a row is the compiler's (they are operators of ours); casts round where eager code
    rounds; nothing is chosen by timing. A CUDA graph that cannot be captured is an error, not a slow path.
    Operators are launched in the order in which they are called.
    """
    inductor = torch._inductor.config
    changes: dict[str, Any] = {
        "emulate_precision_casts": True,
        "split_reductions": False,
        "max_autotune": False,
        "max_autotune_gemm": False,
        # What a kernel reads before it waits is older than the last fence, as operators are called (Launch).
        # In a half round in FP8 an order of less memory had `linear_side` before its product.
        "reorder_for_peak_memory": False,
        "triton.cudagraph_or_error": True,
        # A program has a graph for every batch size that it is for, however many.
        "triton.cudagraph_skip_dynamic_graphs": False,
        "triton.cudagraph_dynamic_shape_warn_limit": None,
        # A precompiled header saves seconds once and would have to travel with every cache.
        "cpp_cache_precompile_headers": False,
    }
    if hasattr(inductor, "batch_invariant"):
        changes["batch_invariant"] = True
    with inductor.patch(changes):
        yield


@contextmanager
def without_collector() -> Iterator[None]:
    """Let nothing look for garbage.

    What is loaded stays, and looking at it takes a tenth of the start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def compile_program(function: Program, name: str, graph_mode: GraphMode | None) -> Program:
    """Return `function` compiled for the one shape it will be called with, or all sizes of `mark_sizes`.

    `name` becomes part of the code's name: programs then never share a cache entry of Dynamo, so a call
    checks the guards of its own program alone. graph_mode says how it becomes a CUDA graph: "replay" leaves
    that to `capture`.
    """
    declare_operators()
    is_tree = graph_mode == "reduce-overhead"
    compiled = torch.compile(
        _with_own_code(function, name),
        fullgraph=True,
        dynamic=False,
        mode=graph_mode if is_tree else None,
    )
    if not is_tree:
        return compiled

    def begin_and_run(*arguments: torch.Tensor | int | RoundShape) -> Any:
        # What the call before returned has been copied out.
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*arguments)

    return begin_and_run


def declare_operators() -> None:
    """Tell Inductor that our operators are called as they are, on arguments that it keeps.

    It finds the first out itself, but before that writes a message that spells out the operator's inputs, and
    theirs: in torch 2.11 that is done whether or not anybody reads it, and doubles with every residual add.
    """
    from torch._inductor import lowering

    for overload in overloads():
        if overload not in lowering.lowerings:
            lowering.make_fallback(overload, _keep_arguments, warn=False)


def _keep_arguments(node: torch.fx.Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The layout constraint of our operators: eager strides, and what is computed for one call stays.

    Inductor's own constraint copies an argument that is not yet a buffer, and so computes it once a call:
    positions and cursors would be gathered again in every layer.
    """
    from torch._inductor import ir, lowering

    for arg in (*args, *kwargs.values()):
        if isinstance(arg, ir.TensorBox):
            arg.realize()
    if "eager_input_vals" not in node.meta:
        return args, kwargs
    return lowering.constrain_to_fake_tensors(args, kwargs, *node.meta["eager_input_vals"])


def mark_static(tensors: Iterable[torch.Tensor]) -> None:
    """Declare that these tensors keep their addresses: a CUDA graph may read and mutate them in place."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)


def mark_sizes(tensors: Collection[torch.Tensor]) -> None:
    """Declare that these inputs differ in the size of dimension 0 alone: a program for one is for all.

    Code that would ask which of the sizes it is, or be wrong for one, is an error where it is compiled. Their
    addresses are those of different graphs and never change, but no program checks them.
    """
    sizes = [len(tensor) for tensor in tensors]
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)
        torch._dynamo.mark_dynamic(tensor, 0, min=min(sizes), max=max(sizes))


def capture(program: Program, inputs: Inputs, pool: Any) -> Program:
    """Capture one call on static `inputs` as a CUDA graph and return its replay, which takes the same inputs.

    `program`, compiled or not, has run before, so nothing compiles inside. The replay returns the same output
    tensor each time, overwritten by every replay of the pool: it is to be copied out on the same stream.
    Other threads may use the device meanwhile. No garbage is collected: an engine that was dropped without
    `close` would wait for its stream in the middle, which ends the capture.
    """
    graph = torch.cuda.CUDAGraph()
    with without_collector(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = program(*inputs)

    def replay(*arguments: torch.Tensor | int | RoundShape) -> Any:
        assert all(given is static for given, static in zip(arguments, inputs, strict=True))
        graph.replay()
        return output

    return replay


def save_program(function: Program, owner: Any, inputs: Inputs, file: Path) -> None:
    """Compile `function(owner, *inputs)` for the shapes of `inputs`, or all that `mark_sizes` declares, and
    write the result to `file`.

    Nothing of `owner` is written: its tensors are read from the owner that `load_program` is given.
    """
    declare_operators()
    # The caller promises that shapes, dtypes and constants are the same: guards would have to be built anew
    # in every process, and are not wanted in any call.
    options: Any = {"guard_filter_fn": lambda entries: [False] * len(entries)}
    with torch._dynamo.config.patch(enable_aot_compile=True):
        compiled: Any = torch.compile(function, fullgraph=True, dynamic=False, options=options)
        compiled.aot_compile(((owner, *inputs), {})).save_compiled_function(str(file))


def load_program(file: Path, owner: Any) -> Program:
    """Return what `save_program` wrote, for an owner of the same class whose tensors have the same layout.

    Dynamo does not run: at 64 layers it takes ten seconds for each program, whatever is cached. Raises
    ValueError for what torch cannot load.
    """
    try:
        with file.open("rb") as stream:
            compiled: Any = torch.compiler.load_compiled_function(stream)
    except Exception as error:  # whatever torch and pickle make of a broken file
        raise ValueError(
            f"graph_cache must hold programs that torch {torch.__version__} can load, got "
            f"{type(error).__name__}: {error} from {file.name}; export it again with `compiled-mtp export`"
        ) from error
    compiled.disable_guard_check()
    return partial(compiled, owner)


def _with_own_code(function: Program, name: str) -> Program:
    def program(*arguments: torch.Tensor | int | RoundShape) -> Any:
        return function(*arguments)

    code = program.__code__.replace(co_name=name)
    assert program.__closure__ is not None
    return FunctionType(code, program.__globals__, name, None, program.__closure__)
