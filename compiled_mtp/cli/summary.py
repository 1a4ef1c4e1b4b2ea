"""The summary of `run`: a column for each run, and whether their tokens are identical. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from compiled_mtp.cli.jobs import Job
from compiled_mtp.request import RequestMetrics
from compiled_mtp.spec.depth import Reason
from compiled_mtp.spec.stats import SpeculationStats


@dataclass(frozen=True, slots=True)
class Outcome:
    """All jobs of one run with one mtp_step, and the seconds from the first step to the last.

    most_drafts: the most drafts that a round may have. rounds_by_depth: as in `EngineStats`.
    """

    mtp_step: int | Literal["auto"]
    most_drafts: int
    jobs: list[Job]
    seconds: float
    is_interrupted: bool
    is_compiled: bool
    rounds_by_depth: Mapping[int, Mapping[Reason, int]]


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
        ("new tokens per round (mean)", lambda run: f"{_speculation(run).mean_new_tokens:.2f}"),
        (
            "acceptance by position",
            lambda run: " ".join(f"{rate:.2f}" for rate in _speculation(run).acceptance_by_index) or "-",
        ),
    ]
    if any(_speculation(run).lookup_rounds for run in outcomes):
        rows.append(("looked-up drafts kept", _looked_up))
    if any(run.rounds_by_depth for run in outcomes):
        rows.append(("rounds by depth", _rounds_by_depth))
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
        unbegun = sum(not job.has_begun for run in outcomes for job in run.jobs)
        left = f"; {unbegun} requests had not begun" if unbegun else ""
        lines.append(f"interrupted: this is what was decoded until then{left}")
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


def _looked_up(run: Outcome) -> str:
    """Return how many looked-up drafts were kept, of how many, and in how many rounds."""
    stats = _speculation(run)
    return f"{stats.lookup_accepted} of {stats.lookup_drafted} in {stats.lookup_rounds} rounds"


def _rounds_by_depth(run: Outcome) -> str:
    """Return depth:rounds for each depth of the batch, and how many rounds were probes or retries."""
    counts = run.rounds_by_depth.items()
    each = " ".join(f"{depth}:{sum(why.values())}" for depth, why in counts if any(why.values()))
    learning = [(name, sum(why[name] for _, why in counts)) for name in ("probe", "retry")]
    noted = ", ".join(f"{number} to {name}" for name, number in learning if number)
    return (each or "-") + (f" ({noted})" if noted else "")


def _speculation(run: Outcome) -> SpeculationStats:
    stats = SpeculationStats.empty(run.most_drafts)
    for metrics in _every_metrics(run):
        stats = stats.plus(metrics)
    return stats
