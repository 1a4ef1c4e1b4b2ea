"""A runner in pure Python that checks what every launch writes and reads, and when its result is read."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from compiled_mtp.graphs.buckets import lay_out
from compiled_mtp.plan import (
    Admit,
    BlockUpdate,
    Copy,
    Draft,
    Location,
    PromptChunk,
    Release,
    RowLogprobs,
    StepPlan,
    StepResult,
)
from compiled_mtp.scheduler import Scheduler

EOS = 7
FIRST_DRAFT = 1000


def token_at(seed: int, index: int) -> int:
    """The index-th output token of the request with this seed; one in 15 is an eos."""
    return random.Random(f"{seed} {index}").randrange(EOS, EOS + 15)


@dataclass
class Row:
    """The device's view of a slot, of a host record or of a state snapshot, which has no seed.

    generation: that of its first launch. drafts: those that its next round would verify; they encode
    positions and are no tokens. num_deferred: the deferred draft inputs.
    """

    seed: int | None
    generation: int | None = None
    prompt: list[int] = field(default_factory=list)
    pos: int = 0
    num_deferred: int = 0
    blocks: dict[int, int] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)

    def snapshot_offset(self, position: int) -> int:
        """What a launch of this row writes at a position; for a prompt it depends on all tokens before."""
        for token_id in self.prompt[len(self.marks) :]:
            self.marks.append(hash((self.marks[-1] if self.marks else None, token_id)))
        return self.marks[position] if position < len(self.marks) else hash((self.seed, position))


class FakeRunner:
    """Executes plans at once and returns their results `delay` launches late, as a device would.

    Copies are reported `copy_delay` results after their own; until then nothing may touch what they copy.
    broken holds (seed, index) of output tokens whose logits are not finite; masked likewise, none is allowed.
    host_blocks: the blocks for which host memory suffices; a copy beyond them fails, and evictions of the
    prefix cache fail while fails_evictions.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        delay: int,
        seed: int = 0,
        accept: int | None = None,
        copy_delay: int = 0,
        host_blocks: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.delay = delay
        self.copy_delay = copy_delay
        self.host_blocks = host_blocks
        self.num_uploaded = 0
        # By step_id and seed: the tokens done before that round, and its drafts.
        self.verified: dict[tuple[int, int], tuple[int, list[int]]] = {}
        self.checks_uploads = True
        self.failed_copies: list[int] = []
        self.random = random.Random(seed)
        self.accept = accept
        self.broken: set[tuple[int, int]] = set()
        self.masked: set[tuple[int, int]] = set()
        self.rows: dict[Location, Row] = {}
        # What each position of a tier's block holds.
        self.kv: dict[tuple[str, int], dict[int, int]] = {}
        self.copies: dict[int, tuple[Copy, int]] = {}
        # What goes to the host tier of the prefix cache.
        self.evictions: dict[int, tuple[Copy, int]] = {}
        self.fails_evictions = False
        self.open_round: StepPlan | None = None
        # The launch with the last prompt chunk, by slot.
        self.last_chunks: dict[int, StepPlan] = {}
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.fail_next = False
        self.lose_next = False
        self.has_failed = False

    def run(self, plan: StepPlan | None) -> StepResult | None:
        if plan is not None and self.lose_next:
            # As a launch that raises: nothing of it happens, and its error may come before older results.
            self.lose_next, self.has_failed = False, True
            self.plans.append(plan)
            self._forget_round(plan)
            return StepResult(plan, error="out of memory")
        if plan is not None:
            self.plans.append(plan)
            self.results.append(self._execute(plan))
            if len(self.results) <= self.delay:
                return None
        return self._with_copies(self.results.popleft()) if self.results else None

    def row(self, slot: int) -> Row:
        """The device's view of a slot."""
        return self.rows[Location("slot", slot)]

    def drop(self) -> None:
        """Drop all launches and copies, as `Runner.drop_launches` does."""
        self.results.clear()
        self.copies.clear()
        self.evictions.clear()
        self.failed_copies = []
        self.open_round = None
        self.has_failed = True

    def _execute(self, plan: StepPlan) -> StepResult:
        self._install(plan)
        launch: dict[str, Callable[[StepPlan], StepResult]] = {
            "prefill": self._prefill,
            "first": self._first,
            "decode": self._decode,
            "verify": self._verify,
            "accept": self._accept,
            "move": StepResult,
        }
        result = launch[plan.kind](plan)
        for copy in plan.saves:
            self._save(copy)
        if self.fail_next:
            self.fail_next, self.has_failed = False, True
            self._forget_round(plan)
            for copy in _copies(plan):
                self.copies.pop(copy.copy_id, None)
                self.evictions.pop(copy.copy_id, None)
            self.failed_copies = []
            return StepResult(plan, error="the device is on fire")
        return result

    def _forget_round(self, plan: StepPlan) -> None:
        if plan.kind in ("verify", "accept"):
            self.open_round = None

    def _with_copies(self, result: StepResult) -> StepResult:
        """Return the result with the copies that are complete by then."""
        done = []
        for waiting in (self.copies, self.evictions):
            for copy_id, (copy, wait) in list(waiting.items()):
                if wait == 0 or result.plan.kind == "move":
                    del waiting[copy_id]
                    done.append(copy_id)
                else:
                    waiting[copy_id] = (copy, wait - 1)
        failed, self.failed_copies = tuple(self.failed_copies), []
        return replace(result, copies_done=tuple(done), copies_failed=failed)

    def _save(self, copy: Copy) -> None:
        row = self.rows[copy.source]
        assert row.pos == len(row.prompt), "a checkpoint is of another position than its slot"
        assert copy.target.tier == "snapshot"
        self.rows[copy.target] = Row(None, None, list(row.prompt), row.pos)

    def _resume(self, copy: Copy) -> None:
        row, saved = self.rows[copy.target], self.rows[copy.source]
        assert row.seed is not None, "a slot is filled before its request is admitted"
        assert not row.prompt
        row.prompt, row.pos = list(saved.prompt), saved.pos
        coming = [eviction for eviction, _ in self.evictions.values()]
        assert copy.source not in [eviction.target for eviction in coming if eviction.has_rows]
        for block, target in copy.blocks:
            assert block not in [pair[1] for eviction in coming for pair in eviction.blocks]
            self.kv["slot", target] = dict(self.kv["prefix_host", block])

    def _evict(self, copy: Copy) -> None:
        assert copy.source.tier == "snapshot"
        if self.fails_evictions:
            self.failed_copies.append(copy.copy_id)
            return
        if copy.has_rows:
            source = self.rows[copy.source]
            self.rows[copy.target] = Row(None, None, list(source.prompt), source.pos)
        for block, target in copy.blocks:
            self.kv["prefix_host", target] = dict(self.kv["slot", block])
        self.evictions[copy.copy_id] = (copy, self.copy_delay)

    def _install(self, plan: StepPlan) -> None:
        for move in plan.moves:
            if isinstance(move, Copy) and move.target.tier == "prefix_host":
                self._evict(move)
                continue
            if isinstance(move, Copy) and move.target.tier == "snapshot":
                self._save(move)
                continue
            if isinstance(move, Copy) and move.source.tier in ("snapshot", "prefix_host"):
                self._resume(move)
                continue
            if isinstance(move, Copy):
                self._copy(move)
                continue
            location = Location("slot", move.slot)
            assert location not in self._busy_locations(), f"{location} belongs to a copy"
            assert location not in self._open_locations(), (
                f"{location} belongs to a round whose accept is to come"
            )
            if isinstance(move, Release):
                self.rows.pop(location, None)
            elif isinstance(move, Draft):
                assert move.slot in plan.slots, "drafts are uploaded for a round that is not this one"
                self._upload(self.rows[location], move, plan.shape.verify)
            elif isinstance(move, Admit):
                assert location not in self.rows, "a slot is given out before it was released"
                drafts = [-1] * self.scheduler.limits.mtp_step
                self.rows[location] = Row(move.sampling.seed, drafts=drafts)
        for update in plan.block_updates:
            self._update(update)
        assert 0 not in plan.slots
        assert len(set(plan.slots)) == len(plan.slots)
        for slot, generation in zip(plan.slots, plan.generations, strict=True):
            row = self.rows[Location("slot", slot)]
            assert row.generation in (None, generation)
            row.generation = generation

    def _upload(self, row: Row, move: Draft, verify: int) -> None:
        """Upload a replayed request's known tokens as drafts."""
        done, count = row.pos - len(row.prompt) + 1, len(move.token_ids)
        assert 0 < count <= verify
        expected = tuple(token_at(row.seed, done + k) for k in range(count))
        assert move.token_ids == expected or not self.checks_uploads
        self.num_uploaded += count
        row.drafts[:count] = move.token_ids

    def _update(self, update: BlockUpdate) -> None:
        slot, column, block_id = update
        row = self.rows[Location("slot", slot)]
        pool = self.scheduler.pool
        is_shared = pool._holders[block_id] > 1 or block_id in pool._kept
        others = [
            (location.number, at)
            for location, other in self.rows.items()
            if location.tier == "slot"
            for at, owned_id in other.blocks.items()
            if owned_id == block_id
        ]
        is_said_again = self.has_failed and (slot, column) in others
        sources = {
            copy.source.number for copy, _ in self.copies.values() if copy.target == ("slot", slot)
        } | {slot}
        is_alone = all(other in sources for other, _ in others)
        assert is_said_again or is_shared or is_alone, "a block has two owners"
        assert column == len(row.blocks) or is_said_again
        row.blocks[column] = block_id

    def _copy(self, copy: Copy) -> None:
        busy = self._busy_locations()
        assert copy.source not in busy
        assert copy.target not in busy
        # No plan says that a host record is free.
        free = self.scheduler._resources._free_records
        for location in [
            location for location in self.rows if location.tier == "host" and location.number in free
        ]:
            del self.rows[location]
        holders = [one for one in self.scheduler._resources.moving if one.transfer is not None]
        is_own = [one.transfer.target for one in holders if one.transfer].count(copy.target) == 1
        if copy.target.tier == "host" and is_own:
            self.rows.pop(copy.target, None)
        assert copy.target not in self.rows, "a copy must go to a free location"
        source = self.rows[copy.source]
        if copy.target.tier == "host" and self.host_blocks is not None:
            kept = [row for location, row in self.rows.items() if location.tier == "host"]
            if sum(len(row.blocks) for row in kept) + len(copy.blocks) > self.host_blocks:
                self.failed_copies.append(copy.copy_id)
                return
        self.rows[copy.target] = Row(
            source.seed, None, list(source.prompt), source.pos, drafts=list(source.drafts)
        )
        columns = [block for _, block in sorted(source.blocks.items())]
        if copy.blocks:
            assert [block for block, _ in copy.blocks] == columns, "other blocks are copied than it has"
        for index, (block, target) in enumerate(copy.blocks):
            self.kv[copy.target.tier, target] = dict(self.kv.get((copy.source.tier, block), {}))
            if copy.target.tier == "host":
                self.rows[copy.target].blocks[index] = target
        if copy.source.tier == "host":
            del self.rows[copy.source]
        self.copies[copy.copy_id] = (copy, self.copy_delay)

    def _open_locations(self) -> set[Location]:
        """The slots of the round whose accept is still to come; none if all its requests have ended."""
        if self.open_round is None:
            return set()
        owners = self.scheduler._resources.owners
        pairs = zip(self.open_round.slots, self.open_round.generations, strict=True)
        is_live = any(slot in owners and owners[slot].generation == generation for slot, generation in pairs)
        return {Location("slot", slot) for slot in self.open_round.slots} if is_live else set()

    def _check_no_round_is_open(self) -> None:
        assert not self._open_locations(), "two rounds are open"
        self.open_round = None

    def _busy_locations(self) -> set[Location]:
        return {location for copy, _ in self.copies.values() for location in (copy.source, copy.target)}

    def _busy_blocks(self) -> Iterator[int]:
        for copy, _ in self.copies.values():
            for pair in copy.blocks:
                yield pair[0 if copy.source.tier == "slot" else 1]

    def _write(self, row: Row, first: int, last: int) -> None:
        busy, block_size = set(self._busy_blocks()), self.scheduler.limits.block_size
        # Checked at launch; requests that share them came later.
        pool = self.scheduler.pool
        shared = {block for block in row.blocks.values() if pool._holders[block] > 1 or block in pool._kept}
        for position in range(first, min(last, self.scheduler.limits.longest - 1) + 1):
            block = row.blocks.get(position // block_size, 0)
            assert block > 0, f"{position} is not reserved"
            assert block not in busy, f"block {block} belongs to a copy"
            assert block not in shared, f"block {block} is written, and others read it"
            self.kv.setdefault(("slot", block), {})[position % block_size] = row.snapshot_offset(position)

    def _read(self, row: Row, end: int) -> None:
        block_size = self.scheduler.limits.block_size
        # A launch in flight may pass the end of a request; nothing is written there.
        for position in range(min(end, self.scheduler.limits.longest)):
            block = self.kv[("slot", row.blocks[position // block_size])]
            assert block[position % block_size] == row.snapshot_offset(position), f"{position} was lost"

    def _prefill(self, plan: StepPlan) -> StepResult:
        limits = self.scheduler.limits
        assert 1 <= len(plan.prompt_chunks) == len(plan.slots) <= limits.max_prompt_chunks
        assert (
            lay_out([len(prompt_chunk.token_ids) for prompt_chunk in plan.prompt_chunks])[1]
            <= limits.prefill_chunk
        )
        assert len(plan.prompt_chunks) == 1 or not any(
            prompt_chunk.next_ids for prompt_chunk in plan.prompt_chunks
        )
        assert sum(prompt_chunk.snapshot_offset > 0 for prompt_chunk in plan.prompt_chunks) <= 1
        self.rows.pop(Location("slot", limits.max_batch + 1), None)
        for slot, prompt_chunk in zip(plan.slots, plan.prompt_chunks, strict=True):
            self._process(slot, prompt_chunk, plan.shape.chain if prompt_chunk.is_last else 0)
        scored = _logprobs(list(plan.next_ids)) if plan.next_ids else None
        self.last_chunks |= dict.fromkeys(plan.slots, plan)
        return replace(self._emit(plan, [0] * len(plan.slots)), prompt_logprobs=scored)

    def _process(self, slot: int, prompt_chunk: PromptChunk, chain: int) -> None:
        row, end = self.rows[Location("slot", slot)], prompt_chunk.start + len(prompt_chunk.token_ids)
        request = self.scheduler._resources.owners[slot].request
        assert row.prompt == request.prompt_token_ids[: prompt_chunk.start], "another prompt's state"
        assert prompt_chunk.start == len(row.prompt)
        assert prompt_chunk.start % self.scheduler.limits.resume_step == 0
        assert prompt_chunk.token_ids
        assert (end == prompt_chunk.prompt_len == request.prompt_len) or not prompt_chunk.is_last
        row.prompt += prompt_chunk.token_ids
        if prompt_chunk.snapshot_offset:
            assert prompt_chunk.snapshot_offset % self.scheduler.limits.resume_step == 0
            assert 0 < prompt_chunk.snapshot_offset < len(prompt_chunk.token_ids)
            inner = row.prompt[: prompt_chunk.start + prompt_chunk.snapshot_offset]
            location = Location("slot", self.scheduler.limits.max_batch + 1)
            self.rows[location] = Row(None, None, inner, len(inner))
        self._read(row, prompt_chunk.start)
        self._write(row, prompt_chunk.start, end - 1 + chain)
        row.pos = end

    def _first(self, plan: StepPlan) -> StepResult:
        (slot,) = plan.slots
        chunk = self.last_chunks[slot]
        at = chunk.slots.index(slot)
        since = self.plans[self.plans.index(chunk) + 1 : -1]
        assert {one.kind for one in since} <= {"first"}, "a launch came between a prompt and its first token"
        assert plan.generations == chunk.generations[at : at + 1]
        row = self.rows[Location("slot", slot)]
        assert row.pos == chunk.prompt_chunks[at].prompt_len == len(row.prompt)
        self._write(row, row.pos, row.pos - 1 + plan.shape.chain)
        return self._emit(plan, [0])

    def _decode(self, plan: StepPlan) -> StepResult:
        self._check_no_round_is_open()
        self._verify_rows(plan)
        return self._emit_round(plan)

    def _verify(self, plan: StepPlan) -> StepResult:
        self._check_no_round_is_open()
        self._verify_rows(plan)
        self.open_round = plan
        return StepResult(plan, [[] for _ in plan.slots])

    def _accept(self, plan: StepPlan) -> StepResult:
        opened = self.open_round
        if opened is None:
            # Planned before the error of its verify was read; the real runner refuses it too.
            assert self.has_failed
            return StepResult(plan, error="nothing was verified")
        self.open_round = None
        assert (plan.slots, plan.generations) == (opened.slots, opened.generations)
        assert plan.shape == opened.shape
        return self._emit_round(plan)

    def _verify_rows(self, plan: StepPlan) -> None:
        for slot in plan.slots:
            row = self.rows[Location("slot", slot)]
            row.num_deferred = 0 if plan.catches_up else row.num_deferred
            assert row.num_deferred <= (0 if plan.shape.verify else self.scheduler.limits.mtp_step)
            self._read(row, row.pos)
            self._write(row, row.pos, row.pos + plan.shape.verify)

    def _emit_round(self, plan: StepPlan) -> StepResult:
        counts = []
        for slot in plan.slots:
            row, most = self.rows[Location("slot", slot)], plan.shape.verify
            accepted = self.random.randint(0, most) if self.accept is None else min(self.accept, most)
            done = row.pos - len(row.prompt) + 1
            right = [row.drafts[k] == token_at(row.seed, done + k) for k in range(most)]
            accepted = max(accepted, (*right, False).index(False))
            self.verified[plan.step_id, row.seed] = (done, row.drafts[:most])
            self._read(row, row.pos)
            self._write(row, row.pos, row.pos + accepted + plan.shape.chain)
            row.num_deferred += not plan.shape.verify and self.scheduler.limits.mtp_step > 0
            counts.append(accepted)
        return self._emit(plan, counts)

    def _emit(self, plan: StepPlan, accepted: list[int]) -> StepResult:
        """Each row's next tokens, up to the first whose logits are not finite."""
        token_ids: list[list[int]] = []
        ends: dict[bool, list[int]] = {False: [], True: []}
        for index, (slot, count) in enumerate(zip(plan.slots, accepted, strict=True)):
            row = self.rows[Location("slot", slot)]
            if plan.prompt_chunks and not plan.prompt_chunks[index].is_last:
                token_ids.append([])
                continue
            is_first = plan.kind in ("prefill", "first")
            done = 0 if is_first else row.pos - len(row.prompt) + 1
            indices = range(done, done + count + 1)
            wrong = next((i for i in indices if (row.seed, i) in self.broken | self.masked), None)
            if wrong is not None:
                ends[(row.seed, wrong) in self.masked].append(index)
                indices = range(done, wrong)
            token_ids.append([token_at(row.seed, i) for i in indices])
            if not is_first:
                row.pos += count + 1
            missing = self.scheduler.limits.mtp_step - plan.shape.chain
            row.drafts = [FIRST_DRAFT + row.pos + k for k in range(plan.shape.chain)] + [0] * missing
        logprobs = [_logprobs(new) for new in token_ids] if plan.logprobs >= 0 else []
        drafts = self._draft(plan) if plan.wants_drafts else []
        not_finite, all_masked = map(tuple, ends.values())
        return StepResult(plan, token_ids, not_finite, drafts, all_masked=all_masked, logprobs=logprobs)

    def _draft(self, plan: StepPlan) -> list[list[int]]:
        return [self.rows[Location("slot", slot)].drafts[: plan.shape.chain] for slot in plan.slots]


def _logprobs(token_ids: list[int]) -> RowLogprobs:
    """Return log probability -i for token i, and itself as the only listed id."""
    values = [-float(token_id) for token_id in token_ids]
    ranks, tops = [1] * len(values), [[token_id] for token_id in token_ids]
    rows = RowLogprobs(values, ranks, tops, [[value] for value in values], [0.5] * len(values))
    return rows._replace(processed=rows)


def _copies(plan: StepPlan) -> list[Copy]:
    return [move for move in plan.moves if isinstance(move, Copy)]
