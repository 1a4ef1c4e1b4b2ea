"""Who runs, how many tokens, which blocks. Pure host arithmetic: no torch.

A step is one prefill chunk of one request or one decode round of all running ones; while both are waiting
they take turns, so a long prompt delays the others by one chunk at a time. Results may arrive `max_in_flight`
steps late: a plan depends on what is certain and reserves for what is possible.

Rounds are planned many times a second: a look at every request tells for how many rounds nothing can end and
every block is reserved, and until then, or until a request comes or goes, a round is planned without another.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Collection

from compiled_mtp.cache.block_pool import BlockPool
from compiled_mtp.plan import Admit, BlockUpdate, Release, StepPlan, StepResult
from compiled_mtp.request import FinishReason, Request, RequestOutput

# Blocks reserved beyond what the next launch may write.
_BLOCKS_AHEAD = 8
# What the device's int32 rows hold; as a top_k it means every token, as any above the vocabulary does.
_MOST_TOP_K = 2**31 - 1


class Scheduler:
    """Continuous batching over slots 1 to max_batch and blocks 1 to num_blocks - 1, first come, first served.

    A request is admitted when its worst case (prompt, output, speculative rows) fits beside the worst cases
    of those running; then its growth cannot fail and nothing is ever preempted. Raises ValueError for a
    number that is too small.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        prefill_chunk: int,
        mtp_step: int,
        max_in_flight: int,
    ) -> None:
        numbers = (
            ("max_batch", max_batch, 1),
            ("block_size", block_size, 1),
            ("max_model_len", max_model_len, 2),
            ("prefill_chunk", prefill_chunk, 1),
            ("mtp_step", mtp_step, 0),
            ("max_in_flight", max_in_flight, 0),
        )
        for name, value, low in numbers:
            if value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}; raise it")
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.prefill_chunk = prefill_chunk
        self.mtp_step = mtp_step
        self.max_in_flight = max_in_flight
        self.pool = BlockPool(num_blocks)
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._prefilling: Request | None = None
        self._running: dict[int, Request] = {}
        # The slots of the last round, and the rounds that may follow without a look at each request.
        self._decoding_slots: tuple[int, ...] = ()
        self._decoding_generations: tuple[int, ...] = ()
        self._rounds_ahead = 0
        # Launched, and their results not yet taken; results come in the order of the launches.
        self._unread_rounds: deque[StepPlan] = deque()
        self._generations = [0] * (max_batch + 1)
        self._free_slots = self._all_slots()
        self._committed_blocks = 0
        self._released: list[int] = []
        # A plan was lost, and with it what it would have installed.
        self._is_install_lost = False
        self._outputs: list[RequestOutput] = []
        self._is_prefill_next = True
        self._next_step_id = 0

    def add(self, request: Request) -> None:
        """Queue a request; mutates its output limit. Raises ValueError if it could never run.

        That is: its id is in use, its prompt leaves no room for a token, or its worst case needs more blocks
        than there are.
        """
        if self.has_id(request.request_id):
            raise ValueError(f"request_id must be unused, got {request.request_id!r}; choose another")
        room = self.max_model_len - request.prompt_len
        if room < 1:
            raise ValueError(
                f"prompt must be shorter than max_model_len={self.max_model_len} tokens, got "
                f"{request.prompt_len}; shorten it or raise max_model_len"
            )
        request.max_output = min(request.params.max_tokens, room)
        blocks, most = self._worst_case_blocks(request), self.pool.num_blocks - 1
        if blocks > most:
            raise ValueError(
                f"prompt and max_tokens must fit into {most} blocks of {self.block_size} tokens, got "
                f"{request.prompt_len} and {request.params.max_tokens} tokens, which need {blocks}; lower "
                "max_tokens, shorten the prompt or raise num_blocks"
            )
        request.metrics.rounds_by_accepted = [0] * (self.mtp_step + 1)
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """End a request now. Raises ValueError for an id that is not running or waiting.

        Its last output, with finish_reason "abort", comes from the next `update`; launches in flight are
        dropped.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise ValueError(
                f"request_id must name a request that has not finished, got {request_id!r}; give a live one"
            )
        self._end(request, "abort")

    def forget(self, request_ids: Collection[str]) -> None:
        """End those of the requests that have not finished, now and without an output."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.finish("abort")
                self._release(request)
        self._outputs = [output for output in self._outputs if output.request_id not in request_ids]

    def recover(self, error: str) -> None:
        """Start over after a step that stopped anywhere (Ctrl-C): of its bookkeeping nothing is believed.

        Requests that were no longer waiting end with `error`; the others go on.
        """
        settled = {request.request_id for request in self._waiting}
        settled |= {output.request_id for output in self._outputs if output.finish_reason is not None}
        ended = [request for name, request in self._requests.items() if name not in settled]
        self.pool = BlockPool(self.pool.num_blocks)
        self._requests = {request.request_id: request for request in self._waiting}
        self._prefilling, self._running = None, {}
        self._decoding_slots, self._decoding_generations, self._rounds_ahead = (), (), 0
        self._unread_rounds.clear()
        self._free_slots, self._released = self._all_slots(), self._all_slots()
        self._committed_blocks = 0
        for request in ended:
            self._outputs.append(_last_output(request, "error", error))

    def has_unfinished(self) -> bool:
        """Return whether a request, or its last output, is still to come."""
        return bool(self._requests or self._outputs)

    def has_id(self, request_id: str) -> bool:
        """Whether an id is in use: its request has not finished, or its last output is still to come."""
        return request_id in self._requests or _has_output(self._outputs, request_id)

    def forget_all(self) -> None:
        """End every request, now and without an output."""
        self.forget(tuple(self._requests))
        self._outputs = []

    @property
    def num_running(self) -> int:
        """Requests that own a slot."""
        return len(self._running) + (self._prefilling is not None)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot or for blocks."""
        return len(self._waiting)

    def schedule(self) -> StepPlan | None:
        """Plan the next launch and reserve every block it may write; None if there is nothing to launch."""
        if self._prefilling is None:
            self._admit()
        updates = [] if self._rounds_ahead else self._look_ahead()
        if self._is_install_lost and (self._prefilling is not None or self._decoding_slots):
            updates = self._all_blocks()
            self._is_install_lost = False
        if self._prefilling is not None and (self._is_prefill_next or not self._decoding_slots):
            self._is_prefill_next = False
            return self._plan_prefill(self._prefilling, updates)
        self._is_prefill_next = True
        return self._plan_decode(updates) if self._decoding_slots else None

    def update(self, result: StepResult | None) -> list[RequestOutput]:
        """Take the result of a launch, if there is one, and return what the requests gained since.

        Tokens of requests that ended meanwhile are dropped. An error ends the requests of its launch alone;
        it may come before its turn, since whoever launches knows at once.
        """
        if result is not None:
            plan = result.plan
            if result.error is not None:
                self._take_error(plan, result.error)
            else:
                if plan.kind == "decode":
                    oldest = self._unread_rounds.popleft()
                    assert oldest is plan, f"the result of step {oldest.step_id} is due, got {plan.step_id}"
                if plan.kind == "decode" or plan.is_last:
                    self._take_tokens(plan, result)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _admit(self) -> None:
        if not (self._waiting and self._free_slots):
            return
        blocks = self._worst_case_blocks(self._waiting[0])
        if self._committed_blocks + blocks > self.pool.num_blocks - 1:
            return
        request = self._waiting.popleft()
        self._committed_blocks += blocks
        request.slot = self._free_slots.pop()
        self._generations[request.slot] += 1
        request.generation = self._generations[request.slot]
        self._prefilling = request

    def _look_ahead(self) -> list[BlockUpdate]:
        """Choose who decodes, reserve the blocks of their next rounds, and count these.

        Return the block-table entries that the next plan must carry.
        """
        width = self.mtp_step + 1
        unread = Counter(
            owner for plan in self._unread_rounds for owner in zip(plan.slots, plan.generations, strict=True)
        )
        decoding: list[Request] = []
        updates: list[BlockUpdate] = []
        rounds = sys.maxsize
        for request in self._running.values():
            in_flight = unread[request.slot, request.generation]
            # Every unread round emits a token at least, and a whole window at most.
            least_output = len(request.output_token_ids) + request.is_first_token_due + in_flight
            if least_output >= request.max_output:
                continue
            decoding.append(request)
            last_write = self._last_write(request, in_flight)
            updates += self._reserve(request, last_write)
            # Each result may be read before the next launch.
            most_output = least_output + in_flight * self.mtp_step
            rounds = min(rounds, -((most_output - request.max_output) // width))
            owned = len(request.block_ids)
            if owned < self._worst_case_blocks(request):
                rounds = min(rounds, (owned * self.block_size - 1 - last_write) // width + 1)
        self._decoding_slots = tuple(request.slot for request in decoding)
        self._decoding_generations = tuple(request.generation for request in decoding)
        # The one that is planned next was looked at itself.
        self._rounds_ahead = max(rounds, 1) if decoding else 0
        return updates

    def _plan_prefill(self, request: Request, updates: list[BlockUpdate]) -> StepPlan:
        start = request.num_prefilled
        end = min(start + self.prefill_chunk, request.prompt_len)
        is_last = end == request.prompt_len
        admitted = () if start else (self._slot_init(request),)
        # After the last chunk the draft writes the pairs of its mtp_step drafts, from slot `end` on.
        updates += self._reserve(request, end - 1 + (self.mtp_step if is_last else 0))
        request.num_prefilled = end
        if is_last:
            request.is_first_token_due = True
            self._prefilling = None
            self._running[request.slot] = request
            self._rounds_ahead = 0
        return StepPlan(
            step_id=self._step_id(),
            kind="prefill",
            slots=(request.slot,),
            generations=(request.generation,),
            draft_step=self.mtp_step,
            token_ids=tuple(request.prompt_token_ids[start:end]),
            start=start,
            is_last=is_last,
            prompt_len=request.prompt_len,
            block_updates=tuple(updates),
            moves=(*self._take_released(), *admitted),
        )

    def _plan_decode(self, updates: list[BlockUpdate]) -> StepPlan:
        assert len(self._unread_rounds) <= self.max_in_flight, f"{len(self._unread_rounds)} results are late"
        self._rounds_ahead -= 1
        plan = StepPlan(
            step_id=self._step_id(),
            kind="decode",
            slots=self._decoding_slots,
            generations=self._decoding_generations,
            verify_step=self.mtp_step,
            draft_step=self.mtp_step,
            block_updates=tuple(updates),
            moves=self._take_released(),
        )
        self._unread_rounds.append(plan)
        return plan

    def _last_write(self, request: Request, in_flight: int) -> int:
        """Last position a round may write after `in_flight` unread ones: verify rows, then the chain."""
        # The first token, known or not, stands right after the prompt; others are known when they are read.
        pos = request.prompt_len + max(len(request.output_token_ids) - 1, 0)
        return pos + in_flight * (self.mtp_step + 1) + 2 * self.mtp_step

    def _worst_case_blocks(self, request: Request) -> int:
        """Blocks for every position that any launch of this request may write.

        A round is launched while one token may be missing, unread rounds counted with one token each; each of
        those may have given mtp_step more.
        """
        last = request.prompt_len + max(request.max_output - 2, 0) + (self.max_in_flight + 2) * self.mtp_step
        return self._blocks_up_to(last)

    def _blocks_up_to(self, position: int) -> int:
        return min(position, self.max_model_len - 1) // self.block_size + 1

    def _reserve(self, request: Request, position: int) -> list[BlockUpdate]:
        """Block-table entries that make every position up to `position` writable, and several blocks more.

        Within what the request was admitted with. Most steps then hand out none, and copy nothing to the
        device.
        """
        owned, most = len(request.block_ids), self._worst_case_blocks(request)
        needed = self._blocks_up_to(position)
        assert needed <= most, f"{needed} blocks are needed of {most}"
        new = self.pool.allocate(max(min(needed + _BLOCKS_AHEAD, most) - owned, 0))
        request.block_ids += new
        return [BlockUpdate(request.slot, owned + index, block_id) for index, block_id in enumerate(new)]

    def _all_slots(self) -> list[int]:
        return list(range(len(self._generations) - 1, 0, -1))

    def _all_blocks(self) -> list[BlockUpdate]:
        """The block-table entries of everybody who owns a slot."""
        owners = [*self._running.values(), *([] if self._prefilling is None else [self._prefilling])]
        return [BlockUpdate(r.slot, index, block) for r in owners for index, block in enumerate(r.block_ids)]

    def _take_tokens(self, plan: StepPlan, result: StepResult) -> None:
        running, outputs, is_round = self._running, self._outputs, plan.kind == "decode"
        most = self.mtp_step + 1 if is_round else 1
        now_s = time.monotonic()
        owners = zip(plan.slots, plan.generations, result.token_ids, strict=True)
        for index, (slot, generation, given) in enumerate(owners):
            request = running.get(slot)
            if request is None or request.generation != generation:
                continue
            new = list(given)
            is_finite = index not in result.not_finite
            assert is_finite <= len(new) <= most, f"a {plan.kind} step emitted {len(new)} tokens"
            if not is_round:
                request.is_first_token_due = False
            if not is_finite:
                position = request.prompt_len + len(request.output_token_ids) + len(new)
                if new:
                    kept, text = request.append(new, is_round, now_s)
                    outputs.append(RequestOutput(request.request_id, kept, text, request.metrics))
                self._end(request, "error", f"the logits of position {position} are not finite")
                continue
            kept, text = request.append(new, is_round, now_s)
            reason = request.finish_reason
            outputs.append(RequestOutput(request.request_id, kept, text, request.metrics, reason))
            if reason is not None:
                self._release(request)

    def _take_error(self, plan: StepPlan, error: str) -> None:
        if plan.kind == "decode":
            self._unread_rounds.remove(plan)
            self._rounds_ahead = 0
        for slot, generation in zip(plan.slots, plan.generations, strict=True):
            request = self._running.get(slot, self._prefilling)
            if request is not None and (request.slot, request.generation) == (slot, generation):
                self._end(request, "error", error)
        # Nobody knows how much of the plan was installed: the next one says everything again.
        self._is_install_lost = True
        owned = set(self._running)
        if self._prefilling is not None and self._prefilling.num_prefilled:
            owned.add(self._prefilling.slot)
        self._released = [slot for slot in self._all_slots() if slot not in owned]

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        self._outputs.append(_last_output(request, reason, error))
        self._release(request)

    def _release(self, request: Request) -> None:
        """Give back slot and blocks, once. A launch in flight may still write them: it runs before the next
        owner's, and its tokens are dropped by generation.
        """
        del self._requests[request.request_id]
        if not request.slot:
            self._waiting.remove(request)
            return
        if request is self._prefilling:
            self._prefilling = None
        else:
            del self._running[request.slot]
            self._rounds_ahead = 0
        self.pool.free(request.block_ids)
        self._committed_blocks -= self._worst_case_blocks(request)
        self._free_slots.append(request.slot)
        self._released.append(request.slot)
        request.block_ids = []
        request.slot = 0

    def _slot_init(self, request: Request) -> Admit:
        params = request.params
        return Admit(
            slot=request.slot,
            seed=request.seed,
            temperature=params.temperature,
            top_k=min(max(params.top_k, 0), _MOST_TOP_K),
            top_p=params.top_p,
            min_p=params.min_p,
        )

    def _take_released(self) -> tuple[Release, ...]:
        released, self._released = tuple(Release(slot) for slot in self._released), []
        return released

    def _step_id(self) -> int:
        self._next_step_id += 1
        return self._next_step_id - 1


def _last_output(request: Request, reason: FinishReason, error: str | None) -> RequestOutput:
    """End the request; what its caller gets when no launch is the cause."""
    text = request.finish(reason)
    return RequestOutput(
        request_id=request.request_id,
        new_token_ids=[],
        new_text=text,
        metrics=request.metrics,
        finish_reason=reason,
        error=error,
    )


def _has_output(outputs: list[RequestOutput], request_id: str) -> bool:
    return any(output.request_id == request_id for output in outputs)
