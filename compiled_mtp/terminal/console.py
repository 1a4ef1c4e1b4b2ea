"""Shared by the commands: standard error, exit codes, bars, Ctrl-C and SIGTERM. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, TextIO

from safetensors import SafetensorError
from tqdm import tqdm

from compiled_mtp.config import Torchrun
from compiled_mtp.errors import escape
from compiled_mtp.terminal.flags import EXIT_USAGE as EXIT_USAGE
from compiled_mtp.terminal.signals import INTERRUPTED, NUMBERS, leaving, restore

# start_engine imports these modules later, since they import torch.
if TYPE_CHECKING:
    from compiled_mtp.config import EngineConfig
    from compiled_mtp.engine import Engine
    from compiled_mtp.frontend.processor import RequestProcessor

EXIT_OK, EXIT_FAILED = 0, 1
MOST_ERROR_CHARACTERS = 4000


def say(text: str) -> None:
    """Print to standard error; a reader that is gone or a full disk does not end the command."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Send buffered and later text of `stream` to /dev/null: Python flushes the stream again at exit."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def write_text(stream: TextIO, text: str) -> None:
    """Write to `stream` and flush; a character that its encoding lacks becomes a question mark."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def check_stdout() -> TextIO:
    """Return standard output. Raises ValueError if the caller has closed it."""
    if sys.stdout is None:
        raise ValueError("standard output must be open, got a closed one; redirect it to /dev/null")
    return sys.stdout


def run_command(command: Callable[[Interrupts], int]) -> int:
    """Run a command and return its exit code; errors that a caller can cause become one line.

    SIGTERM acts as Ctrl-C does, with exit code 143 instead of 130.
    """
    if sys.stderr is None:
        # The caller closed it, to see nothing. The next file to be opened must not become number 2.
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    with Interrupts() as interrupts:
        try:
            return command(interrupts)
        except KeyboardInterrupt:
            say(INTERRUPTED)
            return interrupts.exit_code
        except BrokenPipeError:
            # The reader of standard output has closed it.
            return EXIT_FAILED
        except (ValueError, OSError, SafetensorError) as error:
            # Writing weights to a full disk raises SafetensorError.
            say(f"error: {escape('; '.join(str(error).splitlines()), MOST_ERROR_CHARACTERS)}")
            return EXIT_USAGE


class Interrupts:
    """Handles Ctrl-C and SIGTERM while it is entered: they raise KeyboardInterrupt.

    Within `held` the first signal only sets `is_asked`, so that a loop can end between two steps. Entering
    changes nothing outside the main thread, which alone gets signals.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._is_held = False
        self._number = signal.SIGINT
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        restore(self._before)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let the first signal only set `is_asked`, which is False at the beginning."""
        self.is_asked, self._is_held = False, True
        try:
            yield
        finally:
            self._is_held = False

    @property
    def is_terminated(self) -> bool:
        """Return whether the last signal was SIGTERM."""
        return self._number == signal.SIGTERM

    @property
    def exit_code(self) -> int:
        """Return 128 plus the number of the last signal, as shells do."""
        return 128 + self._number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._number = signal.Signals(number)
        if not self._is_held or self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True


class Progress:
    """Shows progress, called with (what, done, total): a bar in a terminal, otherwise a line at the end."""

    def __init__(self) -> None:
        self._bars: dict[str, Any] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            bar = self._bars.get(what)
            if bar is None:
                # Large totals are bytes, shown with unit prefixes such as M.
                options = {"unit": "", "unit_scale": total > 10**6}
                bar = self._bars[what] = tqdm(desc=what, total=total, file=sys.stderr, leave=False, **options)
            bar.update(done - bar.n)
            if done >= total:
                self._bars.pop(what).close()
        elif done >= total:
            say(f"{what}: done")

    def close(self) -> None:
        """Remove the bars of unfinished work."""
        while self._bars:
            self._bars.popitem()[1].close()


def start_engine(
    config: EngineConfig, frontend: RequestProcessor | None = None, save_to: Path | None = None
) -> Engine:
    """Return the engine of `config`; show progress, CPU threads, the recipe of FP8 weights, and the adapter.

    `frontend` and `save_to` are arguments of `Engine`. Raises ValueError, also if the processes that torchrun
    started are not as many as the ranks.
    """
    Torchrun().check_ranks(config.tensor_parallel)
    with leaving():
        from compiled_mtp.engine import Engine
        from compiled_mtp.models.lora import read_adapter

    progress = Progress()
    try:
        engine = Engine(config, progress=progress, frontend=frontend, save_to=save_to)
    finally:
        progress.close()
    if engine.num_threads is not None:
        say(f"CPU threads: {engine.num_threads} of {os.cpu_count()} cores (num_threads)")
    if engine.weight_recipe is not None:
        say(f"FP8 weights: {engine.weight_recipe} (weight_recipe)")
    if config.lora is not None:
        say(f"LoRA adapter: {read_adapter(config.lora).describe()}")
    return engine
