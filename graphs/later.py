"""Programs of further depths, made ready beside the engine's steps: no start is longer, no step compiles."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_mtp.graphs.compile import Program, load_program

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaterProgram:
    """A program that `save_program` wrote as `file`, perhaps for others too, for rounds of `depth`, and what
    takes it once loaded."""

    depth: int
    file: Path
    adopt: Callable[[Program], None]


class LaterDepths:
    """Loads programs for `owner`, in their order, on a thread of its own.

    `take` is for the thread that steps; is_free says whether a program may be adopted now. One that cannot be
    loaded or made ready ends the loading with a warning: the depths that are ready go on.
    """

    def __init__(self, programs: Sequence[LaterProgram], owner: Any, is_free: Callable[[], bool]) -> None:
        self._programs = programs
        self._owner = owner
        self._is_free = is_free
        self._num_left = Counter(program.depth for program in programs)
        self._loaded: deque[tuple[LaterProgram, Program]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._load, name="further depths", daemon=True)
        self._thread.start()

    def take(self) -> int | None:
        """Adopt one loaded program between two steps; return the depth whose last one it was, if any."""
        if self._is_closed:
            # The thread may have looked whether it is before, and have come with one more after.
            self._loaded.clear()
        if not self._loaded or not self._is_free():
            return None
        program, loaded = self._loaded.popleft()
        try:
            program.adopt(loaded)
        except Exception as error:  # Of a CUDA graph that has no memory, say: who decodes is not to end.
            logger.warning("depth %d and those after it are not used: %s", program.depth, error)
            self._is_closed = True
            self._loaded.clear()
            return None
        self._num_left[program.depth] -= 1
        return None if self._num_left[program.depth] else program.depth

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return not self._thread.is_alive() and not self._loaded

    def close(self) -> None:
        """Load nothing more; waits for what is being loaded."""
        self._is_closed = True
        self._thread.join()
        self._loaded.clear()

    def _load(self) -> None:
        loaded: dict[Path, Program] = {}
        for program in self._programs:
            file = program.file
            try:
                if file not in loaded and not self._is_closed:
                    loaded[file] = load_program(file, self._owner)
            except ValueError as error:
                if not self._is_closed:
                    logger.warning("depth %d and those after it are not used: %s", program.depth, error)
                return
            if self._is_closed:
                return
            self._loaded.append((program, loaded[file]))
