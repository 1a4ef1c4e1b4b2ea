"""Compiled programs: one per shape, or one for several batch sizes; compiled ahead and replayed as they are.

Compiled code becomes CUDA graphs in one of two modes. "reduce-overhead" is
`torch.compile(mode="reduce-overhead")`: the bookkeeping of CUDA-graph trees takes the host 200 us per step at
24 layers and 650 us at 64. "replay" compiles without trees and captures the call by hand, once; a replay
takes the host about 10 us. Code that a compiler does not speed up is captured uncompiled in both modes. A CPU
has no graphs and no mode.
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
def compiler_settings(shared_sizes: Collection[int] = ()) -> Iterator[None]:
    """Compiler settings under which a row's bits depend on that row alone.

    shared_sizes: the sizes that `mark_sizes` declares for the programs compiled inside, if any.

    The compiler makes no reduction inside a row (these are our operators), rounds casts where eager code
    rounds, and chooses nothing by timing. A CUDA graph that cannot be captured is an error instead of a slow
    path. Operators are launched in the order in which they are called.
    """
    inductor = torch._inductor.config
    changes: dict[str, Any] = {
        "emulate_precision_casts": True,
        "split_reductions": False,
        "max_autotune": False,
        "max_autotune_gemm": False,
        # Kernels read some inputs before they wait for the previous launch: in the order of the calls these
        # inputs are older than the last fence (see Launch). The order of least memory put `linear_side`
        # before its product, in a phase of a two-phase round in FP8.
        "reorder_for_peak_memory": False,
        "triton.cudagraph_or_error": True,
        # A program has one graph for each of its batch sizes, however many these are.
        "triton.cudagraph_skip_dynamic_graphs": False,
        "triton.cudagraph_dynamic_shape_warn_limit": None,
        # A precompiled header saves seconds once, but every graph cache would have to contain it.
        "cpp_cache_precompile_headers": False,
    }
    if hasattr(inductor, "batch_invariant"):
        changes["batch_invariant"] = True
    # The compiler's caches do not know the range of sizes; code for one range is wrong in a wider one.
    caches: Any = torch.compiler.config
    tags = (caches.cache_key_tag, *(str(size) for size in sorted(shared_sizes)))
    with inductor.patch(changes), caches.patch(cache_key_tag=" ".join(filter(None, tags))):
        yield


@contextmanager
def without_collector() -> Iterator[None]:
    """Turn the garbage collector off: loaded objects stay, and scanning them takes a tenth of the start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def compile_program(function: Program, name: str, graph_mode: GraphMode | None) -> Program:
    """Return `function` compiled for the shape of its inputs, or for all sizes that `mark_sizes` declared.

    `name` becomes part of the code's name: programs then never share a cache entry of Dynamo, so a call
    checks only its own program's guards. graph_mode: how the code becomes a CUDA graph; "replay" leaves that
    to `capture`.
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
        # The output of the last call has been copied out.
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*arguments)

    return begin_and_run


def declare_operators() -> None:
    """Tell Inductor to call our operators as they are, on arguments that it keeps in buffers.

    Without this Inductor calls them as they are too, but first formats a message with the operator's inputs
    and the inputs of these: torch 2.11 does so even with logging off, and the text doubles with every
    residual add.
    """
    from torch._inductor import lowering

    for overload in overloads():
        if overload not in lowering.lowerings:
            lowering.make_fallback(overload, _keep_arguments, warn=False)


def _keep_arguments(node: torch.fx.Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The layout constraint of our operators: eager strides, and arguments become buffers at their first use.

    Inductor's own constraint copies an argument that is not yet a buffer, and so computes it once per call:
    every layer would gather positions and cursors again.
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
    """Declare that these inputs differ only in the size of dimension 0, so that one program takes them all.

    Code that depends on which of the sizes it has, or is wrong for one, raises an error when it is compiled.
    The inputs keep their addresses, one per graph; no program checks them.
    """
    sizes = [len(tensor) for tensor in tensors]
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)
        torch._dynamo.mark_dynamic(tensor, 0, min=min(sizes), max=max(sizes))


def capture(program: Program, inputs: Inputs, pool: Any) -> Program:
    """Capture one call on static `inputs` as a CUDA graph and return its replay, which takes the same inputs.

    `program` must have run before, or its kernels be compiled, so that nothing compiles meanwhile. The replay
    returns the same output tensor each time, which every replay of the pool overwrites: copy it out on the
    same stream. Other threads may use the device during the capture. The garbage collector is off: an engine
    dropped without `close` would wait for its stream when collected, which ends the capture.
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

    Nothing of `owner` is written: a loaded program reads the tensors of the owner given to `load_program`.
    """
    declare_operators()
    # No guards: every process would have to build them again, every call would check them, and the caller
    # promises equal shapes, dtypes and constants.
    options: Any = {"guard_filter_fn": lambda entries: [False] * len(entries)}
    with torch._dynamo.config.patch(enable_aot_compile=True):
        compiled: Any = torch.compile(function, fullgraph=True, dynamic=False, options=options)
        compiled.aot_compile(((owner, *inputs), {})).save_compiled_function(str(file))


def load_program(file: Path, owner: Any) -> Program:
    """Return the program that `save_program` wrote, for an owner of the same class and tensor layout.

    Dynamo does not run: at 64 layers it takes ten seconds per program, even with warm caches. Raises
    ValueError for a file that torch cannot load.
    """
    try:
        with file.open("rb") as stream:
            compiled: Any = torch.compiler.load_compiled_function(stream)
    except Exception as error:  # torch and pickle raise many types for a broken file
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
