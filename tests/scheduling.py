"""Schedulers and requests for tests, and loops that step a scheduler with a `FakeRunner`."""

from __future__ import annotations

from collections.abc import Callable

from compiled_mtp.plan import StepPlan
from compiled_mtp.request import Request, RequestOutput, SamplingParams
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.limits import Limits
from compiled_mtp.scheduler.phases import RequestPhase
from compiled_mtp.scheduler.round_shapes import Depth
from tests.fake_runner import EOS, FakeRunner, token_at


class FittingScheduler(Scheduler):
    """Fits requests as the engine does before it queues them."""

    def add(self, *choices: Request) -> None:
        for request in choices:
            self.limits.fit(request)
        super().add(*choices)


def make_scheduler(
    *, depth: Depth | None = None, is_two_phase: Callable[[], bool] | None = None, **numbers: int
) -> Scheduler:
    defaults = {
        "max_batch": 3,
        "num_blocks": 31,
        "block_size": 4,
        "max_model_len": 40,
        "prefill_chunk": 8,
        "mtp_step": 3,
        "max_in_flight": 1,
    }
    given = defaults | numbers
    scheduler = FittingScheduler(Limits(**({"max_drafts": given["mtp_step"]} | given)), depth=depth)
    if is_two_phase is not None:
        split_rounds(scheduler, is_two_phase)
    return scheduler


def split_rounds(scheduler: Scheduler, is_two_phase: Callable[[], bool]) -> None:
    """Give rounds two phases whenever `is_two_phase()`, called once per round, as if a request needed it."""
    planner = scheduler._planner
    plan_round = planner._plan_round

    def plan() -> StepPlan:
        wants = planner._wants
        planner._wants = two_phase = wants._replace(is_two_phase=wants.is_two_phase or is_two_phase())
        made = plan_round()
        if planner._wants is two_phase:
            planner._wants = wants
        return made

    planner._plan_round = plan  # type: ignore[method-assign]


def make_request(name: str, prompt_len: int, max_tokens: int, seed: int = 0, **fields: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, **fields)  # type: ignore[arg-type]
    return Request(name, list(range(100, 100 + prompt_len)), params, eos_token_ids=frozenset({EOS}))


def expected_tokens(request: Request, max_model_len: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < min(request.params.max_tokens, max_model_len - request.prompt_len):
        tokens.append(token_at(request.history.seed, len(tokens)))
        if tokens[-1] == EOS and not request.params.ignore_eos:
            break
    return tokens


def step(scheduler: Scheduler, runner: FakeRunner) -> list[RequestOutput]:
    """One step, with every invariant checked after each of its operations."""
    plan = scheduler.schedule()
    scheduler.check_integrity()
    scheduler.update(runner.run(plan))
    scheduler.check_integrity()
    return scheduler.take_outputs()


def preempt_one(scheduler: Scheduler, name: str) -> bool:
    """Preempt a request as when blocks run short; return False if none can be preempted."""
    planner, choices = scheduler._planner, scheduler._live.choices.get(name, [])
    leaving = [one for one in choices if one in scheduler._resources.staying() and one.transfer is None]
    if planner._open_round is not None or not leaving:
        return False
    planner._preempt(leaving[0])
    planner.look_again()
    scheduler.check_integrity()
    return True


def finish_all(scheduler: Scheduler, runner: FakeRunner) -> dict[str, list[RequestOutput]]:
    """Step to the end; the outputs by request."""
    outputs: dict[str, list[RequestOutput]] = {}
    for output in stream(scheduler, runner):
        outputs.setdefault(output.request_id, []).append(output)
    return outputs


def stream(scheduler: Scheduler, runner: FakeRunner) -> list[RequestOutput]:
    """Step to the end; the outputs as they come."""
    outputs: list[RequestOutput] = []
    for _ in range(5000):
        if not scheduler.has_unfinished():
            return outputs
        outputs += step(scheduler, runner)
    raise AssertionError("the requests do not end")


def phase_of(scheduler: Scheduler, name: str) -> RequestPhase:
    """Return the phase of a request's first live choice."""
    return scheduler._live.choices[name][0].phase
