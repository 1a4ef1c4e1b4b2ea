"""Loads programs of further depths while the engine works, so that the start takes no longer."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.graphs.compile import Program, load_program

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaterProgram:
    """A program to load: the file that `save_program` wrote, the depth of its rounds, and its receiver.

    Several programs may have the same file. `adopt` is called with the loaded program.
    """

    depth: int
    file: Path
    adopt: Callable[[Program], None]


class LaterDepths:
    """Loads programs for `owner`, in the given order, on a thread of its own.

    device: the GPU of the programs, None for a CPU.
    Only the thread that steps calls `take`; is_free() says whether a program may be adopted now. A program
    that fails to load or to be adopted ends the loading with a warning; complete depths stay in use.
    """

    def __init__(
        self,
        programs: Sequence[LaterProgram],
        owner: Any,
        is_free: Callable[[], bool],
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self._programs = programs
        self._owner = owner
        self._is_free = is_free
        self._num_left = Counter(program.depth for program in programs)
        self._loaded: deque[tuple[LaterProgram, Program]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._load, name="further depths", daemon=True)
        self._thread.start()

    def take(self) -> int | None:
        """Adopt one loaded program between two steps; return its depth if that is now complete, else None."""
        if self._is_closed:
            # The thread may have appended one more program after `close` cleared the queue.
            self._loaded.clear()
        if not self._loaded or not self._is_free():
            return None
        program, loaded = self._loaded.popleft()
        try:
            program.adopt(loaded)
        except Exception as error:  # For example no memory for a CUDA graph: running requests must go on.
            logger.warning("depth %d and those after it are not used: %s", program.depth, error)
            self._is_closed = True
            self._loaded.clear()
            return None
        self._num_left[program.depth] -= 1
        return None if self._num_left[program.depth] else program.depth

    @property
    def is_done(self) -> bool:
        """Whether `take` will adopt nothing more."""
        return not self._thread.is_alive() and not self._loaded

    def close(self) -> None:
        """Stop loading; wait for the program that is being loaded."""
        self._is_closed = True
        self._thread.join()
        self._loaded.clear()

    def _load(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
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
