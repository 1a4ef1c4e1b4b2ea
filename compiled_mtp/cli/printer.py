"""Prints the results of `run`: texts to standard output, one line per job to a file, progress to a bar."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from tqdm import tqdm

from compiled_mtp.cli.jobs import Job
from compiled_mtp.errors import escape
from compiled_mtp.request import RequestMetrics, RequestOutput
from compiled_mtp.sampling.logprobs import TokenLogprob
from compiled_mtp.terminal.console import MOST_ERROR_CHARACTERS, discard, say, write_text

_METRICS = (
    "prompt_tokens",
    "cached_tokens",
    "seed",
    "output_tokens",
    "rounds",
    "rounds_by_accepted",
    "accepted_by_index",
    "drafted_by_index",
    "lookup_rounds",
    "lookup_drafted",
    "lookup_accepted",
    "time_to_first_token_s",
    "total_s",
)
_REFRESH_S = 0.2


class Bar:
    """Shows jobs done, tokens/s and mean new tokens per round, for several jobs in a terminal."""

    def __init__(self, num_jobs: int) -> None:
        self._bar: Any = None
        if num_jobs > 1 and sys.stderr.isatty():
            form = "{desc} {bar} {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
            self._bar = tqdm(total=num_jobs, desc="requests", file=sys.stderr, leave=False, bar_format=form)
        self._begin_s = self._shown_s = time.perf_counter()
        self._num_tokens = self._num_rounds = self._num_first = 0

    def count(self, output: RequestOutput, before: RequestMetrics | None) -> None:
        """Add an output of a job whose last metrics were `before`."""
        if self._bar is None:
            return
        had_rounds, had_tokens = (0, 0) if before is None else (before.rounds, before.output_tokens)
        self._num_tokens += len(output.new_token_ids)
        self._num_rounds += output.metrics.rounds - had_rounds
        # The first token comes from the prefill, not from a round.
        self._num_first += had_tokens == 0 and output.metrics.output_tokens > 0
        self._bar.n += output.finish_reason is not None
        now_s = time.perf_counter()
        if output.finish_reason is not None or now_s - self._shown_s > _REFRESH_S:
            self._shown_s = now_s
            mean = (self._num_tokens - self._num_first) / max(self._num_rounds, 1)
            rate = self._num_tokens / (now_s - self._begin_s)
            self._bar.set_postfix_str(f"{rate:.1f} tokens/s, {mean:.2f} new tokens per round")

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the bar while the caller writes other text to the terminal."""
        if self._bar is None:
            yield
            return
        self._bar.clear()
        yield
        self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()


class Printer:
    """Writes texts and output lines: of a single job as it is decoded, of several as each ends or in order.

    Entering the printer empties the file `output`; leaving closes it.
    """

    def __init__(self, stdout: TextIO, output: str | None, jobs: Sequence[Job], *, is_in_order: bool) -> None:
        self._stdout, self._path, self._jobs = stdout, output, jobs
        self._output: TextIO | None = None
        self._is_single = len(jobs) == 1
        self._is_in_order = is_in_order
        # With is_in_order: the jobs before this index are written.
        self._next = 0
        self._bar = Bar(0)

    def __enter__(self) -> None:
        if self._path is not None:
            self._output = open(self._path, "w", encoding="utf-8")
        self._bar = Bar(len(self._jobs))

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._output is not None:
            try:
                self._output.close()
            except OSError as error:
                # Closing repeats the write that failed before.
                error.filename = self._path
                raise

    def show(self, job: Job, output: RequestOutput, before: RequestMetrics | None) -> None:
        """Write what can be written after this output of a job, whose last metrics were `before`."""
        if self._is_single:
            self._write(output.new_text)
        self._bar.count(output, before)
        if output.finish_reason is None:
            return
        if not self._is_in_order:
            self._finish(job)
            return
        while self._next < len(self._jobs) and self._jobs[self._next].finish_reason is not None:
            self._finish(self._jobs[self._next])
            self._next += 1

    def finish_rest(self, jobs: Sequence[Job]) -> None:
        """Write the jobs that waited for earlier ones, which will not end."""
        for job in jobs:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        """Write a job, unless it is written already or has no results."""
        if job.is_written or not job.has_begun:
            return
        job.is_written = True
        with self._bar.aside():
            # The file first: the reader of standard output may be gone.
            if self._output is not None:
                try:
                    self._output.write(json.dumps(_to_line(job), ensure_ascii=False) + "\n")
                    self._output.flush()
                except OSError as error:
                    error.filename = self._path
                    raise
            if self._is_single:
                # Its text may end in mid-line, in a terminal or in a file that takes both streams.
                say("")
            else:
                name = "" if job.id is None else f" {escape(str(job.id), 200)}"
                self._write(f"--- {job.index}{name} ({job.where}): {job.finish_reason}\n{job.text}\n")
            if job.error is not None:
                what = "note" if job.finish_reason == "length" else "error"
                say(f"{what}: {escape(f'{job.where}: {job.error}', MOST_ERROR_CHARACTERS)}")

    def _write(self, text: str) -> None:
        try:
            write_text(self._stdout, text)
        except OSError as error:
            discard(self._stdout)
            if self._output is None:
                error.filename = "standard output"
                raise
            say(f"standard output ended ({error.strerror}): from here on only {self._path} is written")


def _to_line(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "index": job.index,
        "request": job.request,
        "choice": job.choice,
        "text": job.text,
        "token_ids": job.token_ids,
        "finish_reason": job.finish_reason,
        "error": job.error,
        "metrics": None if job.metrics is None else {name: getattr(job.metrics, name) for name in _METRICS},
        "logprobs": _entries(job.logprobs),
        "prompt_logprobs": _entries(job.prompt_logprobs),
        "drafts": None if job.drafts is None else [one._asdict() for one in job.drafts],
    }


def _entries(entries: list[TokenLogprob] | None) -> list[dict[str, Any]] | None:
    return None if entries is None else list(map(_entry_fields, entries))


def _entry_fields(entry: TokenLogprob) -> dict[str, Any]:
    top = [{"id": one.token_id, "bytes": list(one.bytes), "logprob": one.logprob} for one in entry.top]
    # JSON has no infinity: a log probability that is not finite becomes null.
    logprob = entry.logprob if math.isfinite(entry.logprob) else None
    fields = {"id": entry.token_id, "bytes": list(entry.bytes), "logprob": logprob, "rank": entry.rank}
    fields |= {"top": top, "entropy": entry.entropy}
    return fields if entry.processed is None else fields | {"processed": _entry_fields(entry.processed)}
