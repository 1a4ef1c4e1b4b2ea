"""What a launch's result changes: tokens that requests gain, errors that end them, copies that are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from compiled_mtp.plan import Copy, RowLogprobs, StepPlan, StepResult, new_tuple
from compiled_mtp.request import ErrorKind, RequestOutput, RoutedExperts
from compiled_mtp.scheduler.last_outputs import describe_logits, describe_masks, last_output
from compiled_mtp.scheduler.live_requests import LiveRequests
from compiled_mtp.scheduler.planner import Planner
from compiled_mtp.scheduler.replay import drop_rows
from compiled_mtp.scheduler.resources import Resources
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest

ReadExperts = Callable[[Sequence[int], int], RoutedExperts]
"""Returns, for block ids and a number of tokens, the recorded experts of a request that owns the blocks."""


class Results:
    """Gives the results of launches to their requests; `live` collects the outputs."""

    def __init__(
        self, planner: Planner, resources: Resources, live: LiveRequests, read_experts: ReadExperts | None
    ) -> None:
        self._planner, self._resources, self._live = planner, resources, live
        self.read_experts = read_experts

    def take(self, result: StepResult) -> None:
        """Take the result of a launch: `Scheduler.update` says what it may bring."""
        plan = result.plan
        if result.copies_failed:
            self._planner.cancel_copies(result.copies_failed)
        if result.copies_done:
            self._planner.finish_copies(result.copies_done)
        if result.error is not None:
            self._take_error(plan, result.error)
            return
        self._planner.read(plan)
        if result.prompt_logprobs is not None:
            self._take_prompt_logprobs(plan, result.prompt_logprobs)
        if plan.kind in ("first", "decode", "accept") or plan.ended:
            self._take_tokens(result)

    def _take_prompt_logprobs(self, plan: StepPlan, rows: RowLogprobs) -> None:
        scheduled = self._resources.owners.get(plan.slots[0])
        if scheduled is not None and scheduled.generation == plan.generations[0]:
            scheduled.request.add_prompt_logprobs(plan.prompt_chunks[0].start, plan.next_ids, rows)

    def _take_tokens(self, result: StepResult) -> None:
        # This loop is most of a step's time on the host: what all requests share is read before it.
        plan, owners, outputs = result.plan, self._resources.owners, self._live.outputs
        is_round, wants_drafts = plan.kind in ("decode", "accept"), plan.wants_drafts
        num_drafts = plan.num_drafts if is_round else None
        prompt_chunks, matches, most = plan.prompt_chunks, result.matches, plan.shape.verify + 1
        has_logprobs = plan.logprobs >= 0
        now_s = time.monotonic()
        for index in (*result.not_finite, *result.all_masked):
            self._take_last_tokens(result, index, num_drafts, now_s)
        rows = zip(plan.slots, plan.generations, result.token_ids, strict=True)
        for index, (slot, generation, new) in enumerate(rows):
            scheduled = owners.get(slot)
            is_due = not prompt_chunks or prompt_chunks[index].is_last
            if not is_due or scheduled is None or scheduled.generation != generation:
                continue
            request = scheduled.request
            assert 1 <= len(new) <= most, f"a {plan.kind} step emitted {len(new)} tokens"
            if not is_round:
                scheduled.is_first_token_due = False
                self._resources.prefix.enter(scheduled)
            drafts, own_drafts, num_known, is_looked_up = None, num_drafts, 0, False
            if matches:
                is_looked_up = is_round and matches[index][0] > 0
                own_drafts = most - 1 if is_looked_up else num_drafts
                scheduled.has_text_drafts = matches[index][1] > 0
            if wants_drafts:
                drafts = scheduled.drafts if is_round else None
                scheduled.drafts = result.drafts[index]
            logprobs = result.logprobs[index] if has_logprobs else None
            if scheduled.replay is not None:
                num_known = len(new)
                new, own_drafts, logprobs = self._drop_known(scheduled, new, own_drafts, logprobs)
                if not new:
                    continue
                num_known -= len(new)
            kept, text = request.append(new, own_drafts, now_s, is_looked_up=is_looked_up, logprobs=logprobs)
            reason = request.finish_reason
            fields = (
                request.request_id,
                kept,
                text,
                request.metrics,
                reason,
                request.error,
                # A plan without logprobs or wants_drafts has no request that asks for these.
                request.take_logprobs() if has_logprobs else None,
                request.index,
                # The prompt's log probabilities come with the first token.
                None if is_round else request.take_prompt_logprobs(),
                request.list_drafts(drafts, num_known) if wants_drafts else None,
                # `append` ends a request with an error only when its grammar cannot continue.
                "parameters" if reason == "error" else None,
                None if reason is None else self._experts_of(scheduled),
            )
            outputs.append(new_tuple(RequestOutput, fields))
            request.commit()
            if reason is not None:
                self._live.finish(scheduled)

    def _experts_of(self, scheduled: ScheduledRequest) -> RoutedExperts | None:
        """Read the recorded experts of a request that ends; None unless it is whole and asked for them."""
        request = scheduled.request
        is_whole = request.finish_reason in ("stop", "length")
        if self.read_experts is None or not (is_whole and request.params.return_routed_experts):
            return None
        # The last token was never an input.
        count = request.prompt_len + len(request.output_token_ids) - 1
        return self.read_experts(scheduled.block_ids[: self._resources.limits.blocks_up_to(count - 1)], count)

    def _take_last_tokens(self, result: StepResult, index: int, num_drafts: int | None, now_s: float) -> None:
        """Take the tokens before one that could not be drawn, and end the request.

        It ends with an error, unless these tokens end it themselves.
        """
        plan = result.plan
        scheduled = self._resources.owners.get(plan.slots[index])
        if scheduled is None or scheduled.generation != plan.generations[index]:
            return
        request = scheduled.request
        kept, text, drafts, num_known = result.token_ids[index], "", None, 0
        is_looked_up = num_drafts is not None and bool(result.matches) and result.matches[index][0] > 0
        if is_looked_up:
            num_drafts = plan.shape.verify
        logprobs = result.logprobs[index] if plan.logprobs >= 0 else None
        if scheduled.replay is not None:
            num_known = len(kept)
            kept, num_drafts, logprobs = self._drop_known(scheduled, kept, num_drafts, logprobs)
            if request.finish_reason is not None:
                return
            num_known -= len(kept)
        if num_drafts is not None:
            kept, text = request.append(
                kept, num_drafts, now_s, has_bonus=False, is_looked_up=is_looked_up, logprobs=logprobs
            )
            drafts = request.list_drafts(scheduled.drafts, num_known)
        if request.finish_reason is None:
            is_masked = index in result.all_masked
            error = describe_masks(request) if is_masked else describe_logits(request)
            kind: ErrorKind = "parameters" if is_masked else "engine"
            output = last_output(request, "error", error, kept, text, drafts, kind)
        else:
            reason = request.finish_reason
            output = last_output(request, reason, request.error, kept, text, drafts, "parameters")
            output = output._replace(routed_experts=self._experts_of(scheduled))
        self._live.outputs.append(output)
        self._live.finish(scheduled)

    def _drop_known(
        self,
        scheduled: ScheduledRequest,
        token_ids: list[int],
        num_drafts: int | None,
        logprobs: RowLogprobs | None,
    ) -> tuple[list[int], int | None, RowLogprobs | None]:
        """Compare the tokens of a result with known ones of the replay; return the rest of the result.

        Returns the new tokens, their number of drafts and their log probabilities. Ends the request with an
        error if a token differs from the known one.
        """
        replay, request = scheduled.replay, scheduled.request
        assert replay is not None
        try:
            known = replay.compare(token_ids)
        except ValueError as error:
            self._live.end(scheduled, "error", str(error))
            return [], num_drafts, None
        if request.guide is not None:
            request.guide.accept(token_ids[:known])
        if replay.is_over:
            scheduled.end_replay()
            self._planner.look_again()
        if logprobs is not None:
            logprobs = drop_rows(logprobs, known)
        # A round that also repeated known tokens counts as one with fewer drafts.
        num_left = None if num_drafts is None else max(num_drafts - known, 0)
        return token_ids[known:], num_left, logprobs

    def _take_error(self, plan: StepPlan, error: str) -> None:
        self._planner.lose(plan)
        owners = [self._resources.owners.get(slot) for slot in plan.slots]
        ended = [
            scheduled
            for scheduled, generation in zip(owners, plan.generations, strict=True)
            if scheduled is not None and scheduled.generation == generation
        ]
        copy_ids = {move.copy_id for move in plan.moves if isinstance(move, Copy)}
        self._resources.prefix.prefix_host.drop_copies(copy_ids)
        ended += self._resources.drop_copies(copy_ids)
        for scheduled in ended:
            self._live.end(scheduled, "error", error)
