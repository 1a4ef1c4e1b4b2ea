"""Errors aimed at lines: the n-th time that a line of our code is about to run, it raises instead.

A real Ctrl-C comes between two bytecodes; between two lines is where the state of the program is worst known
and best aimed at.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import compiled_mtp

ROOT = Path(compiled_mtp.__file__).parent
EVERYWHERE = frozenset[str]()


class Line(NamedTuple):
    """A line of a function, and which of the times it runs."""

    file: str
    function: str
    line: int
    time: int


class Aim:
    """Watches the lines of `files`, paths below the package that may be directories, and of these the
    functions named, if any are.

    Where `target` is set, `error` is raised there, once: `is_hit` then. `lines` counts what has run.
    is_armed: until it says so, nothing is watched.
    """

    def __init__(
        self,
        files: Collection[str],
        functions: Collection[str] = EVERYWHERE,
        *,
        target: Line | None = None,
        error: Callable[[], BaseException] = KeyboardInterrupt,
        is_armed: Callable[[], bool] = lambda: True,
    ) -> None:
        missing = [file for file in files if not (ROOT / file).exists()]
        assert not missing, f"nothing lies at {missing}"
        self._prefixes = tuple(str(ROOT / file) for file in files)
        self._functions = functions
        self._target = target
        self._error = error
        self._is_armed = is_armed
        self._is_watched: dict[CodeType, bool] = {}
        self.is_hit = False
        self.lines: Counter[tuple[str, str, int]] = Counter()

    def _watches(self, code: CodeType) -> bool:
        if code not in self._is_watched:
            is_named = not self._functions or code.co_name in self._functions
            self._is_watched[code] = is_named and code.co_filename.startswith(self._prefixes)
        return self._is_watched[code]

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._look if self._watches(frame.f_code) and self._is_armed() else None

    def _look(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            key = (frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno)
            self.lines[key] += 1
            if self._target == Line(*key, self.lines[key]):
                self.is_hit = True
                raise self._error()
        return self._look

    @contextmanager
    def watching(self) -> Iterator[Aim]:
        """Watch this thread."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield self
        finally:
            sys.settrace(before)

    def targets(self) -> list[Line]:
        """The first and the last time of every line that has run."""
        return [Line(*key, time) for key, count in self.lines.items() for time in sorted({1, count})]
