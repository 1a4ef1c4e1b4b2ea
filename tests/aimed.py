"""Errors aimed at lines: at the n-th time that a line of our code is about to run, it raises instead.

A real Ctrl-C comes between two bytecodes. The tests aim between two lines, where the program's state is least
certain and an error is easiest to aim.
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
    """A line of a function, and at which of its runs the error comes."""

    file: str
    function: str
    line: int
    time: int


class Aim:
    """Watches the lines of `files`, paths below the package (files or directories), in all or the named
    functions.

    With a `target`, `error` is raised there once, and then `is_hit` is true. `lines` counts the runs of each
    line. is_armed: while it returns False, no line is counted or hit.
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
        """Watch this thread in the block."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield self
        finally:
            sys.settrace(before)

    def targets(self) -> list[Line]:
        """Return the first and the last run of every line that has run."""
        return [Line(*key, time) for key, count in self.lines.items() for time in sorted({1, count})]
