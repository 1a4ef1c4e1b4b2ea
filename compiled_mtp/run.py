"""The command line: decode the prompts of a file. `python -m compiled_mtp.run --help` lists the flags.

Standard output carries decoded text and nothing else; progress and the summary go to standard error. torch is
imported after every flag and every line of the prompts has been checked; what needs a tokenizer or the model
comes later.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO, get_args, get_origin

from tqdm import tqdm

from compiled_mtp.config import EngineConfig
from compiled_mtp.errors import escape, quote
from compiled_mtp.request import (
    FinishReason,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    derive_seed,
)
from compiled_mtp.sampling.logprobs import TokenLogprob
from compiled_mtp.spec.stats import SpeculationStats

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

_MOST_ERROR_CHARACTERS = 4000
_METRICS = (
    "prompt_tokens",
    "seed",
    "output_tokens",
    "rounds",
    "rounds_by_accepted",
    "accepted_by_index",
    "drafted_by_index",
    "time_to_first_token_s",
    "total_s",
)
_PROMPT_KINDS = ("prompt", "messages", "prompt_token_ids")


@dataclass(slots=True)
class Job:
    """One choice of a request of the prompt file: where it stands, what add_request takes (`prompt`, with its
    kind and maybe a priority), and what came of it. `request` counts the requests, `choice` those of one
    request.
    """

    where: str
    prompt: dict[str, Any]
    params: SamplingParams
    request: int = 0
    choice: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    logprobs: list[TokenLogprob] | None = None

    def take(self, output: RequestOutput) -> None:
        """Add what one step gave."""
        self.token_ids += output.new_token_ids
        self.text += output.new_text
        self.finish_reason, self.error, self.metrics = output.finish_reason, output.error, output.metrics
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + output.logprobs


@dataclass(frozen=True, slots=True)
class Outcome:
    """All jobs of one run with one mtp_step, and the seconds from the first step to the last."""

    mtp_step: int
    jobs: list[Job]
    seconds: float
    is_interrupted: bool
    is_compiled: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done. 1: a request failed, --compare found other tokens, or nobody read standard output to its end and
    there is no --output. 2: a flag, file or checkpoint is wrong, one line on standard error says what to do.
    130: interrupted, what was decoded is printed and written.
    """
    if sys.stderr is None:
        # Closed by the caller, who wants silence; the next file to be opened must not get its number.
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        return _main(argv)
    except KeyboardInterrupt:
        _say("interrupted: nothing more was decoded")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # Whoever reads standard output has seen enough.
        return EXIT_FAILED


def _main(argv: Sequence[str] | None) -> int:
    flags = vars(make_parser().parse_args(argv))
    try:
        sampling = {name: flags[name] for name in SamplingParams.model_fields if name in flags}
        engine_fields = set(EngineConfig.model_fields) - set(SamplingParams.model_fields)
        settings = {name: flags[name] for name in engine_fields if name in flags}
        config = EngineConfig(**settings)
        if flags["compare"] and not config.mtp_step:
            raise ValueError("mtp_step must be at least 1 with --compare, got 0; raise it or drop --compare")
        # A graph cache holds the shapes of one mtp_step.
        plain = EngineConfig(**settings | {"mtp_step": 0, "graph_cache": None}) if flags["compare"] else None
        if sys.stdout is None:
            raise ValueError("standard output must be open, got a closed one; redirect it to /dev/null")
        jobs = read_jobs(flags["prompt_file"], sampling)
        if flags["output"] is not None:
            _check_output(flags["output"], flags["prompt_file"])
        outcomes = [decode(config, jobs, _Printer(sys.stdout, flags["output"], len(jobs)))]
        if plain is not None and not outcomes[0].is_interrupted:
            is_cached = config.graph_cache is not None
            dropped = f", without graph_cache, which is of mtp_step {config.mtp_step}" if is_cached else ""
            _say(f"the same again with mtp_step 0{dropped}")
            outcomes.append(decode(plain, [_repeat(job) for job in jobs], None))
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        _say(f"error: {escape('; '.join(str(error).splitlines()), _MOST_ERROR_CHARACTERS)}")
        return EXIT_USAGE
    _say(summarize(outcomes))
    if any(one.is_interrupted for one in outcomes):
        return EXIT_INTERRUPTED
    is_same = len(outcomes) == 1 or find_difference(*outcomes) is None
    is_well = all(job.finish_reason != "error" for one in outcomes for job in one.jobs)
    return EXIT_OK if is_same and is_well else EXIT_FAILED


def _say(text: str) -> None:
    """Print to standard error; that nobody reads it any more ends nothing."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Send what was and will be written to a stream nowhere: Python flushes it once more on its way out."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"error: {message}; --help lists the flags\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser: its own flags, and one for each field of SamplingParams and EngineConfig.

    A flag that is not given is absent from the result, so that defaults stay with the models. --seed is the
    requests' field; both models have it and mean the same.
    """
    parser = _Parser(
        prog="python -m compiled_mtp.run",
        description="Decode the prompts of a file with a checkpoint's own multi-token-prediction head.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--prompt-file",
        required=True,
        metavar="FILE",
        help="text (one prompt, - is standard input), or .jsonl: one request a line, an object with prompt, "
        "messages or prompt_token_ids, and any sampling field",
    )
    parser.add_argument(
        "--output", metavar="FILE.jsonl", help="write one line a request: tokens, text, metrics"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="repeat with mtp_step 0 and say whether the tokens are identical",
    )
    _add_fields(parser.add_argument_group("sampling"), SamplingParams, skip=frozenset())
    _add_fields(
        parser.add_argument_group("engine"), EngineConfig, skip=frozenset(SamplingParams.model_fields)
    )
    return parser


def _add_fields(group: Any, model: Any, skip: frozenset[str]) -> None:
    for name, info in model.model_fields.items():
        if name in skip:
            continue
        described = (info.description or "").replace("%", "%%")
        if info.default not in (None, (), "auto") and "default:" not in described:
            described += f" (default: {info.default})"
        # The models check the values: strings are all they need, but for containers.
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": described}
        kinds = {get_origin(kind) or kind for kind in (info.annotation, *get_args(info.annotation))}
        if bool in kinds:
            options["action"] = argparse.BooleanOptionalAction
        elif tuple in kinds:
            options |= {"action": "append", "metavar": "X", "help": f"{described}; repeat the flag for more"}
        elif dict in kinds and str in kinds:
            options |= {"type": _json_or_text, "metavar": "NAME|JSON"}
        elif dict in kinds or list in kinds:
            options |= {"type": _json_value, "metavar": "JSON"}
        else:
            choices = [str(choice) for choice in get_args(info.annotation) if isinstance(choice, str)]
            options["metavar"] = "|".join(choices) or "X"
        group.add_argument("--" + name.replace("_", "-"), **options)


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None


def _json_or_text(text: str) -> Any:
    return _json_value(text) if text.startswith("{") else text


_json_value.__name__ = _json_or_text.__name__ = "JSON"  # As argparse names it in its errors.


def read_jobs(path: str, sampling: dict[str, Any]) -> list[Job]:
    """Return the requests of a prompt file; `sampling` holds the fields that every request starts from.

    A seed in it is the first request's; the others' are derived from it and their place in the file.
    The last line break of a text file is not part of its prompt. Raises ValueError, naming file and line.
    """
    SamplingParams(**sampling)  # So that a bad flag is not blamed on the file.
    try:
        if path != "-":
            content = Path(path).read_bytes()
        elif sys.stdin is None:
            raise ValueError("prompt-file must not be - with standard input closed, got -; name a file")
        else:
            content = sys.stdin.buffer.read()
        # Not as a text file: the model is to see the line breaks that are there.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt-file must be UTF-8 text, got {path}: {error}; convert it") from None
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"prompt-file must be readable, got {path}: {reason}; check the path") from None
    if path.endswith(".jsonl"):
        lines = enumerate(text.split("\n"), start=1)
        numbered = [(number, line) for number, line in lines if line.strip()]
        requests = [
            _read_line(f"{path} line {number}", line, _own_fields(sampling, index))
            for index, (number, line) in enumerate(numbered)
        ]
    else:
        text = text.removesuffix("\n").removesuffix("\r")
        requests = [Job(path, {"prompt": text}, SamplingParams(**sampling))] if text else []
    jobs = [choice for index, job in enumerate(requests) for choice in _choices(index, job)]
    if not jobs:
        raise ValueError(f"prompt-file must hold a prompt, got {path}, which is empty; write one into it")
    return jobs


def _choices(index: int, job: Job) -> list[Job]:
    """A job for each choice of the request after `index` others."""
    n = job.params.n
    names = [job.where] if n == 1 else [f"{job.where} choice {choice}" for choice in range(n)]
    return [Job(where, job.prompt, job.params, index, choice) for choice, where in enumerate(names)]


def _own_fields(sampling: dict[str, Any], index: int) -> dict[str, Any]:
    """The fields of the request after `index` others: one seed for all would be one noise for all."""
    seed = SamplingParams(**sampling).seed
    return sampling if seed is None else sampling | {"seed": derive_seed(seed, index)}


def _read_line(where: str, line: str, sampling: dict[str, Any]) -> Job:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be a JSON object, got an error: {error}; fix the line") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where} must be a JSON object, got {escape(line.strip()[:40])}; write {{...}}")
    prompt = {kind: fields.pop(kind) for kind in _PROMPT_KINDS if kind in fields}
    if len(prompt) != 1:
        raise ValueError(f"{where} must have one of {', '.join(_PROMPT_KINDS)}, got {len(prompt)}; give one")
    ((kind, value),) = prompt.items()
    wanted = str if kind == "prompt" else list
    is_ids = kind == "prompt_token_ids"
    if not isinstance(value, wanted) or (is_ids and not all(type(one) is int for one in value)):
        rule = {"prompt": "a string", "messages": "a list of messages"}.get(kind, "a list of integers")
        raise ValueError(f"{where}: {kind} must be {rule}, got {quote(str(value)[:40])}; change it")
    if "priority" in fields:
        prompt["priority"] = fields.pop("priority")
    try:
        return Job(where, prompt, SamplingParams(**(sampling | fields)))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def decode(config: EngineConfig, jobs: list[Job], printer: _Printer | None) -> Outcome:
    """Decode all jobs together and return what came of them; mutates the jobs, prints as they go.

    An interrupt ends it with what was decoded. Raises ValueError, before anything is decoded, if the config,
    the checkpoint or a job is wrong.
    """
    from compiled_mtp.engine import Engine

    engine = Engine(config, progress=_Progress())
    by_choice = {(str(job.request), job.choice): job for job in jobs}
    for (request_id, choice), job in by_choice.items():
        if choice:
            continue
        try:
            engine.add_request(params=job.params, request_id=request_id, **job.prompt)
        except ValueError as error:
            raise ValueError(f"{job.where}: {error}") from None
    # Only now is the output of an earlier run emptied: nothing that a caller can get wrong is left.
    with printer or contextlib.nullcontext():
        start, is_interrupted = time.perf_counter(), False
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    by_choice[output.request_id, output.index].take(output)
                    if printer is not None:
                        printer.show(jobs, output)
        except KeyboardInterrupt:
            is_interrupted = True
        seconds = time.perf_counter() - start
        if is_interrupted:
            for job in jobs:
                job.finish_reason = job.finish_reason or "abort"
        else:
            engine.close()
        if printer is not None:
            printer.finish(jobs)
    return Outcome(config.mtp_step, jobs, seconds, is_interrupted, engine.is_compiled)


class _Printer:
    """Writes texts and output lines: a single job as it is decoded, several in order as each is finished.

    Entering it empties the file `output`, leaving it closes that file.
    """

    def __init__(self, stdout: TextIO, output: str | None, num_jobs: int) -> None:
        self._stdout, self._path = stdout, output
        self._output: TextIO | None = None
        self._is_single = num_jobs == 1
        self._num_printed = 0

    def __enter__(self) -> None:
        if self._path is not None:
            self._output = open(self._path, "w", encoding="utf-8")

    def __exit__(self, *_: object) -> None:
        if self._output is not None:
            try:
                self._output.close()
            except OSError as error:  # The write that failed before, once more.
                error.filename = self._path
                raise

    def show(self, jobs: list[Job], output: RequestOutput) -> None:
        """Print what can be printed after this output."""
        if self._is_single:
            self._write(output.new_text)
        if output.finish_reason is not None:
            self.finish(jobs)

    def finish(self, jobs: list[Job]) -> None:
        """Print, in order, every job up to the first that has not finished."""
        while self._num_printed < len(jobs) and jobs[self._num_printed].finish_reason is not None:
            index, job = self._num_printed, jobs[self._num_printed]
            self._num_printed += 1
            # The file first: whoever reads standard output may be gone.
            if self._output is not None:
                self._output.write(json.dumps(_to_line(index, job), ensure_ascii=False) + "\n")
                self._output.flush()
            if self._is_single:
                if self._stdout.isatty():
                    _say("")
            else:
                _say(f"--- {index} ({job.where}): {job.finish_reason}")
                self._write(job.text + "\n")
            if job.error is not None:
                what = "note" if job.finish_reason == "length" else "error"
                _say(f"{what}: {escape(f'{job.where}: {job.error}', _MOST_ERROR_CHARACTERS)}")

    def _write(self, text: str) -> None:
        encoding = self._stdout.encoding or "utf-8"
        try:
            self._stdout.write(text.encode(encoding, "replace").decode(encoding))
            self._stdout.flush()
        except OSError as error:
            _discard(self._stdout)
            if self._output is None:
                error.filename = "standard output"
                raise
            _say(f"standard output ended ({error.strerror}): from here on only {self._path} is written")


def _to_line(index: int, job: Job) -> dict[str, Any]:
    return {
        "index": index,
        "request": job.request,
        "choice": job.choice,
        "text": job.text,
        "token_ids": job.token_ids,
        "finish_reason": job.finish_reason,
        "error": job.error,
        "metrics": None if job.metrics is None else _metrics_fields(job.metrics),
        "logprobs": None if job.logprobs is None else list(map(_entry_fields, job.logprobs)),
    }


def _entry_fields(entry: TokenLogprob) -> dict[str, Any]:
    top = [{"id": one.token_id, "bytes": list(one.bytes), "logprob": one.logprob} for one in entry.top]
    fields = {"id": entry.token_id, "bytes": list(entry.bytes), "logprob": entry.logprob}
    return fields | {"rank": entry.rank, "top": top}


def _metrics_fields(metrics: RequestMetrics) -> dict[str, Any]:
    return {name: getattr(metrics, name) for name in _METRICS}


class _Progress:
    """Says how far something is as (what, done, total): a bar in a terminal, else a line when it is done."""

    def __init__(self) -> None:
        self._bars: dict[str, Any] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            bar = self._bars.get(what)
            if bar is None:
                bar = self._bars[what] = tqdm(desc=what, total=total, file=sys.stderr, leave=False)
            bar.update(done - bar.n)
            if done >= total:
                self._bars.pop(what).close()
        elif done >= total:
            _say(f"{what}: done")


def _check_output(path: str, prompt_file: str) -> None:
    """Raise ValueError for a file that is the prompts' or cannot be written, without touching it."""
    file, does_exist = Path(path), os.path.exists(path)
    if does_exist and prompt_file != "-" and os.path.samefile(path, prompt_file):
        raise ValueError(f"output must not be the prompt file, got {path}; choose another")
    if file.is_dir() or not os.access(file if does_exist else file.parent, os.W_OK):
        raise ValueError(f"output must be a file that can be written, got {path}; choose another path")


def _repeat(job: Job) -> Job:
    """The same request again, with the seed that was drawn for it."""
    seed = None if job.metrics is None else job.metrics.seed
    # The seeds of further choices follow from the first one's.
    params = SamplingParams(**job.params.model_dump(exclude_unset=True) | {"seed": seed})
    return Job(job.where, job.prompt, params, job.request, job.choice)


def find_difference(one: Outcome, other: Outcome) -> str | None:
    """Return where the tokens of two runs differ first, in words, or None if they are identical."""
    for mine, theirs in zip(one.jobs, other.jobs, strict=True):
        if mine.token_ids != theirs.token_ids:
            pairs = zip(mine.token_ids, theirs.token_ids, strict=False)
            same = [a == b for a, b in pairs]
            at = same.index(False) if False in same else len(same)
            return f"{mine.where} differs from token {at} on"
    return None


def summarize(outcomes: Sequence[Outcome]) -> str:
    """Return the summary: a column for each run, and how the second compares with the first."""
    rows: list[tuple[str, Callable[[Outcome], str]]] = [
        ("compiled", lambda run: "yes" if run.is_compiled else "no"),
        ("requests", lambda run: str(len(run.jobs))),
        ("output tokens", lambda run: str(_count_tokens(run))),
        ("seconds", lambda run: f"{run.seconds:.2f}"),
        ("tokens/s", lambda run: f"{_count_tokens(run) / run.seconds:.1f}" if run.seconds else "-"),
        ("time to first token, s (median)", _first_token),
        ("new tokens a round (mean)", lambda run: f"{_speculation(run).mean_new_tokens:.2f}"),
        (
            "acceptance by position",
            lambda run: " ".join(f"{rate:.2f}" for rate in _speculation(run).acceptance_by_index) or "-",
        ),
    ]
    cells = [("", *(f"mtp_step {run.mtp_step}" for run in outcomes))]
    cells += [(name, *(value(run) for run in outcomes)) for name, value in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        row[0].ljust(widths[0])
        + "".join("  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in cells
    ]
    seeds = {
        job.metrics.seed for job in outcomes[0].jobs if job.metrics is not None and job.params.temperature
    }
    if len(outcomes[0].jobs) == 1 and seeds:
        lines.append(f"seed {seeds.pop()}")
    if any(run.is_interrupted for run in outcomes):
        lines.append("interrupted: this is what was decoded until then")
    elif len(outcomes) == 2:
        difference = find_difference(*outcomes)
        lines.append("identical tokens: " + ("yes" if difference is None else f"NO, {difference}"))
        if outcomes[0].seconds:
            ratio = outcomes[1].seconds / outcomes[0].seconds
            lines.append(
                f"mtp_step {outcomes[0].mtp_step} decodes at {ratio:.2f} times the speed of mtp_step 0"
            )
    return "\n".join(lines)


def _every_metrics(run: Outcome) -> list[RequestMetrics]:
    return [job.metrics for job in run.jobs if job.metrics is not None]


def _count_tokens(run: Outcome) -> int:
    return sum(len(job.token_ids) for job in run.jobs)


def _first_token(run: Outcome) -> str:
    times = [
        one.time_to_first_token_s for one in _every_metrics(run) if one.time_to_first_token_s is not None
    ]
    return f"{statistics.median(times):.3f}" if times else "-"


def _speculation(run: Outcome) -> SpeculationStats:
    stats = SpeculationStats.empty(run.mtp_step)
    for metrics in _every_metrics(run):
        stats = stats.plus(metrics)
    return stats


if __name__ == "__main__":
    sys.exit(main())
