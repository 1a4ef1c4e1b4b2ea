"""`compiled-mtp run`: decode prompts from flags or a file.

Standard output carries decoded text and nothing else; progress and the summary go to standard error. Flags
and prompt lines are checked before torch is imported; then come the checks that need the tokenizer or the
model's config, and the weights are loaded last.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from compiled_mtp.cli.jobs import Job, check_output, jobs_of_texts, read_jobs
from compiled_mtp.cli.printer import Printer
from compiled_mtp.cli.summary import Outcome, find_difference, summarize
from compiled_mtp.config import EngineConfig
from compiled_mtp.errors import check
from compiled_mtp.request import SamplingParams
from compiled_mtp.terminal.console import (
    EXIT_FAILED,
    EXIT_OK,
    Interrupts,
    check_stdout,
    run_command,
    say,
    start_engine,
)
from compiled_mtp.terminal.flags import COMMON_ENGINE, COMMON_SAMPLING, Parser, add_fields, given
from compiled_mtp.terminal.signals import leaving

# A command imports these modules later, since they import torch.
if TYPE_CHECKING:
    from compiled_mtp.engine import Engine
    from compiled_mtp.frontend.processor import RequestProcessor

# Requests with images that wait or run at a time: the engine keeps their pixels until they end.
_MOST_WITH_IMAGES = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: done. 1: a request failed, --compare found other tokens, or the reader of standard output closed it and
    there is no --output. 2: a flag, file or checkpoint is wrong; one line on standard error says what to do.
    130 and 143: interrupted by Ctrl-C and by SIGTERM; the tokens decoded until then are printed and written.
    """
    return run_command(lambda interrupts: _run(make_parser().read(argv), interrupts))


def _run(flags: dict[str, Any], interrupts: Interrupts) -> int:
    sampling = given(flags, SamplingParams)
    settings = given(flags, EngineConfig, skip=SamplingParams.model_fields)
    config = EngineConfig(**settings)
    if flags["compare"]:
        _check_drafts(config)
    stdout, file = check_stdout(), flags["prompt_file"]
    if file is not None:
        check(not flags["image"], "image", "come with --prompt", flags["image"], "name it in the prompt file")
        jobs = read_jobs(file, sampling)
    else:
        jobs = jobs_of_texts(flags["prompt"], sampling, flags["image"])
    most = max((job.num_images for job in jobs), default=0)
    if most and "max_images" not in config.model_fields_set:
        # The requests are known: load the vision tower for them.
        settings["max_images"] = most
        config = EngineConfig(**settings)
    # A graph cache holds the shapes of one mtp_step.
    plain = EngineConfig(**settings | {"mtp_step": 0, "graph_cache": None}) if flags["compare"] else None
    if flags["output"] is not None:
        check_output(flags["output"], file)
    printer = Printer(stdout, flags["output"], jobs, is_in_order=flags["in_order"])
    outcomes = [decode(config, jobs, printer, interrupts, is_compared=flags["compare"])]
    if plain is not None and not outcomes[0].is_interrupted:
        is_cached = config.graph_cache is not None
        dropped = f", without graph_cache, which is for mtp_step {config.mtp_step}" if is_cached else ""
        say(f"the same again with mtp_step 0{dropped}")
        outcomes.append(decode(plain, [job.again() for job in jobs], None, interrupts))
    say(summarize(outcomes))
    if any(one.is_interrupted for one in outcomes):
        return interrupts.exit_code
    is_same = len(outcomes) == 1 or find_difference(*outcomes) is None
    is_well = all(job.finish_reason != "error" for one in outcomes for job in one.jobs)
    return EXIT_OK if is_same and is_well else EXIT_FAILED


def make_parser() -> Parser:
    """Return the parser: its own flags, and one for each field of SamplingParams and EngineConfig.

    --seed sets the field of SamplingParams; EngineConfig's `seed` has the same meaning.
    """
    parser = Parser(
        prog="compiled-mtp run",
        usage="%(prog)s (--prompt TEXT | --prompt-file FILE) [flags]",
        description="Decode prompts with a checkpoint's own multi-token-prediction head.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt; repeat the flag for more"
    )
    source.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="text (one prompt, - is standard input), or .jsonl: one request per line, an object with "
        "prompt, messages (with images as content parts) or prompt_token_ids, any sampling field, and an "
        "id, which its result repeats",
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="an image before the prompt, which then goes through the chat template; repeat for more",
    )
    said = "write one line per result, when it ends: id, text, tokens, metrics"
    parser.add_argument("--output", metavar="FILE.jsonl", help=said)
    parser.add_argument(
        "--in-order", action="store_true", help="print and write results in the order of the requests"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="repeat with mtp_step 0 and say whether the tokens are identical",
    )
    add_fields(parser, "sampling", SamplingParams, common=COMMON_SAMPLING)
    skip = SamplingParams.model_fields
    add_fields(parser, "engine", EngineConfig, skip=skip, common=COMMON_ENGINE)
    return parser


def decode(
    config: EngineConfig,
    jobs: list[Job],
    printer: Printer | None,
    interrupts: Interrupts,
    *,
    is_compared: bool = False,
) -> Outcome:
    """Decode all jobs together and return the outcome; stores results in the jobs and prints them.

    After an interrupt the outcome holds the tokens decoded until then. Raises ValueError if the config, the
    checkpoint or a job is wrong, where possible before the weights are loaded.
    """
    with leaving():
        from compiled_mtp.frontend.checkpoint import open_frontend

    frontend = open_frontend(config)
    config = config.settle(frontend.model_config, frontend.path)
    if is_compared:
        _check_drafts(config)
    requests = [job for job in jobs if job.choice == 0]
    if printer is not None:
        for job in requests:
            _check(job, frontend)
    engine = start_engine(config, frontend)
    feed = _Feed(engine, requests)
    feed.add()
    # The printer empties an earlier run's output only here, after every check of what a caller can get wrong.
    with printer or contextlib.nullcontext():
        start, is_interrupted = time.perf_counter(), False
        try:
            is_interrupted = _step_to_end(engine, feed, jobs, printer, interrupts)
        except KeyboardInterrupt:
            is_interrupted = True
        except Exception:
            if printer is not None:
                # Those that waited for the ones that the error ended.
                printer.finish_rest([job for job in jobs if job.finish_reason is not None])
            raise
        seconds = time.perf_counter() - start
        if is_interrupted:
            for job in jobs:
                job.finish_reason = job.finish_reason or "abort"
        if printer is not None:
            printer.finish_rest(jobs)
    if not is_interrupted:
        engine.close()
    rounds = engine.stats().rounds_by_depth
    step, most = config.mtp_step, config.depths[-1]
    return Outcome(step, most, jobs, seconds, is_interrupted, engine.is_compiled, rounds)


def _check_drafts(config: EngineConfig) -> None:
    """Raise ValueError for a config that never drafts."""
    remedy = "raise it or drop --compare"
    check(config.depths[-1] > 0, "mtp_step", "be at least 1 with --compare", 0, remedy)


def _check(job: Job, frontend: RequestProcessor) -> None:
    """Raise ValueError for a job that the engine would refuse."""
    prompt = {"prompt": None, "prompt_token_ids": None, "messages": None} | job.prompt
    try:
        frontend.make_request("", job.params, **prompt)
    except ValueError as error:
        raise ValueError(f"{job.where}: {error}") from None


class _Feed:
    """Adds jobs to an engine in their order, those with images only while few others with images are open."""

    def __init__(self, engine: Engine, jobs: Sequence[Job]) -> None:
        self._engine = engine
        self._left = deque(jobs)
        self._open: list[Job] = []

    def add(self) -> None:
        """Add the jobs for which there is room. Raises ValueError for one that the engine refuses."""
        while self._left and self._has_room(self._left[0]):
            job = self._left.popleft()
            try:
                self._engine.add_request(params=job.params, request_id=str(job.request), **job.prompt)
            except ValueError as error:
                raise ValueError(f"{job.where}: {error}") from None
            if job.num_images:
                self._open.append(job)

    def _has_room(self, job: Job) -> bool:
        if not job.num_images:
            return True
        self._open = [one for one in self._open if one.finish_reason is None]
        return len(self._open) < _MOST_WITH_IMAGES


def _step_to_end(
    engine: Engine, feed: _Feed, jobs: Sequence[Job], printer: Printer | None, interrupts: Interrupts
) -> bool:
    """Step until all jobs have ended or a signal asks to end; return whether a signal did."""
    by_choice = {(str(job.request), job.choice): job for job in jobs}

    def take_step() -> None:
        for output in engine.step():
            job = by_choice[output.request_id, output.index]
            before = job.metrics
            job.take(output)
            if printer is not None:
                printer.show(job, output, before)

    with interrupts.held():
        while engine.has_unfinished_requests() and not interrupts.is_asked:
            take_step()
            feed.add()
        if not interrupts.is_asked:
            return False
        say("interrupted: ending the running requests; interrupt again to end at once")
        for request_id in {str(job.request) for job in jobs if job.finish_reason is None}:
            # The engine refuses a request that has ended; its last outputs may still come from `step`.
            with contextlib.suppress(ValueError):
                engine.abort(request_id)
        while engine.has_unfinished_requests():
            take_step()
        return True
