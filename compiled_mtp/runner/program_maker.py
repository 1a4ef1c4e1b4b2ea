"""Prepares programs: compiles or loads each shape's code, captures CUDA graphs, writes a graph cache."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.communicators.communicator import Communicator
from compiled_mtp.graphs.compile import (
    GraphMode,
    Inputs,
    Program,
    capture,
    compile_program,
    compiler_settings,
    load_program,
    mark_sizes,
    mark_static,
    save_program,
)
from compiled_mtp.rounds.first_token import first_token
from compiled_mtp.rounds.prefill import prefill
from compiled_mtp.step import Step

# The first call compiles, the second records a CUDA graph, the third replays it.
_WARM_UP_CALLS = 3
_LAYOUT_NAME = "layout.json"
# With CUDA graphs these and wide rounds are captured uncompiled: our own operators take nearly all of their
# time, and compiling the default chunk's six lengths takes more than a minute.
_UNCOMPILED = (prefill, first_token)


@dataclass(frozen=True)
class Shape:
    """A function of a step, the static inputs that it is compiled for, and the table and key of its program.

    name: the program's; shapes that differ only in the batch size may share one. depth: the depth whose
    rounds need the program, None if rounds of every depth do. is_wide: of wide rounds.
    """

    depth: int | None
    name: str
    function: Callable[..., torch.Tensor | None]
    inputs: Inputs
    programs: dict[Any, Program]
    key: Hashable
    is_wide: bool = False


class ProgramMaker:
    """Makes the programs of a step's shapes, which it runs on padding rows alone.

    graph_mode: how code becomes CUDA graphs, None for no graphs. With graphs, prompts, first tokens, wide
    rounds and rounds of plain_depths are captured uncompiled. A loaded program exchanges through
    `communicator`, if there is one. `capture_s` sums the seconds of captures.
    """

    def __init__(
        self,
        step: Step,
        *,
        is_compiled: bool,
        graph_mode: GraphMode | None,
        plain_depths: Collection[int],
        communicator: Communicator | None,
    ) -> None:
        self.step = step
        self.is_compiled = is_compiled
        self.graph_mode = graph_mode
        self.plain_depths = plain_depths
        self.capture_s = 0.0
        self._communicator = communicator
        self._save_to: Path | None = None
        self._shared_sizes: tuple[int, ...] = ()
        # The memory pool of the CUDA graphs.
        self._pool: Any = None

    def make_all(
        self,
        shapes: Sequence[Shape],
        progress: Callable[[int, int], None] | None,
        saved: Path | None,
        save_to: Path | None,
    ) -> None:
        """Prepare every shape's program and call progress(done, count) after each; see `Programs.warm_up`."""
        if save_to is not None and self.graph_mode != "reduce-overhead":
            save_to.mkdir(parents=True)
            self._save_to = save_to
        if saved is not None:
            self.check_layout(saved)
        if self.step.slots.pos.is_cuda:
            self._pool = torch.cuda.graph_pool_handle()
        # Programs by name, for the other shapes that share them.
        made: dict[str, Program] = {}
        with compiler_settings(self._shared_sizes):
            for done, shape in enumerate(shapes):
                if self.is_plain(shape):
                    shape.programs[shape.key] = self.capture(shape.programs[shape.key], shape.inputs)
                else:
                    if shape.name not in made:
                        made[shape.name] = self._make_program(shape, saved)
                    self.make_ready(shape, made[shape.name])
                if progress is not None:
                    progress(done + 1, len(shapes))

    def mark_static(self, inputs: Collection[torch.Tensor], shared: Collection[torch.Tensor]) -> None:
        """Declare that the step's tensors and `inputs` keep their addresses; one program takes all `shared`
        inputs, which differ in size."""
        mark_static([*self.step.parameters(), *self.step.buffers(), *inputs])
        mark_sizes(shared)
        self._shared_sizes = tuple(len(tensor) for tensor in shared)

    def make_ready(self, shape: Shape, program: Program) -> None:
        """Run a compiled program until it is ready, capture it with graph_mode "replay", and put it into the
        shape's table."""
        for _ in range(_WARM_UP_CALLS if self.graph_mode == "reduce-overhead" else 1):
            program(*shape.inputs)
        is_captured = self.graph_mode == "replay"
        shape.programs[shape.key] = (
            self.capture(program, shape.inputs) if is_captured else torch.no_grad()(program)
        )

    def capture(self, program: Program, inputs: Inputs) -> Program:
        """Capture one call, whose kernels are compiled, as a CUDA graph; return its replay."""
        begin_s = time.perf_counter()
        captured = capture(program, inputs, self._pool)
        self.capture_s += time.perf_counter() - begin_s
        return captured

    def layout(self) -> dict[str, Any]:
        """Shape, strides and dtype of every tensor of the step: saved programs assume them."""
        tensors = [*self.step.named_parameters(), *self.step.named_buffers()]
        return {name: [list(t.shape), list(t.stride()), str(t.dtype)] for name, t in tensors}

    def check_layout(self, saved: Path) -> None:
        """Raise ValueError if the programs in `saved` were made for tensors of another layout."""
        try:
            stored: dict[str, Any] = dict(json.loads((saved / _LAYOUT_NAME).read_bytes()))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(
                f"graph_cache must hold a {_LAYOUT_NAME} of tensors, got {error}; export it again with "
                "`compiled-mtp export`"
            ) from None
        wanted = self.layout()
        for name in sorted(stored.keys() | wanted.keys()):
            if stored.get(name) != wanted.get(name):
                raise ValueError(
                    f"graph_cache must be made for {name}={wanted.get(name)}, got {stored.get(name)}; export "
                    "it again with `compiled-mtp export`"
                )

    def is_plain(self, shape: Shape) -> bool:
        """Whether the shape's CUDA graph is captured from uncompiled code."""
        is_compiled = self.is_compiled and shape.function not in _UNCOMPILED and not shape.is_wide
        return self.graph_mode is not None and not (is_compiled and shape.depth not in self.plain_depths)

    def _make_program(self, shape: Shape, saved: Path | None) -> Program:
        if self._save_to is not None:
            # Run the program as it was written: it is traced once, and both processes run the same code.
            self._save_shape(shape, self._save_to)
            saved = self._save_to
        if saved is not None:
            program = load_program(saved / shape.name, self.step)
            return program if self._communicator is None else self._communicator.bind(program)
        return compile_program(partial(shape.function, self.step), shape.name, self.graph_mode)

    def _save_shape(self, shape: Shape, directory: Path) -> None:
        """Write one program to `directory`, and before the first the layout that all are compiled for."""
        layout = directory / _LAYOUT_NAME
        if not layout.exists():
            layout.write_text(json.dumps(self.layout()))
        with nullcontext() if self._communicator is None else self._communicator.unbound():
            save_program(shape.function, self.step, shape.inputs, directory / shape.name)
