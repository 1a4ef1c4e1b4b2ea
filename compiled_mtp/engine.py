"""Engine: requests in, tokens out. The order of a step and nothing else."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from compiled_mtp.config import EngineConfig, as_config
from compiled_mtp.errors import check_type
from compiled_mtp.frontend.checkpoint import open_frontend
from compiled_mtp.frontend.processor import RequestProcessor
from compiled_mtp.frontend.prompts import Chat, Params, Prompt, as_prompts, join, kind_of, match_params
from compiled_mtp.graphs.later import LaterDepths
from compiled_mtp.plan import StepPlan, StepResult
from compiled_mtp.request import Request, RequestOutput, SamplingParams
from compiled_mtp.runner.assemble import Fill, Progress
from compiled_mtp.runner.masks import Masks
from compiled_mtp.runner.memory import limits_of
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import resolve
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.inbox import Inbox, id_in_use
from compiled_mtp.scheduler.turn import Turn
from compiled_mtp.spec.depth import Reason, first_depth
from compiled_mtp.spec.policy import DepthPolicy
from compiled_mtp.spec.stats import SpeculationStats


@dataclasses.dataclass(frozen=True, slots=True)
class _Totals:
    """Sums over the requests whose last output has been handed out."""

    finished: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    speculation: SpeculationStats

    def plus(self, output: RequestOutput) -> _Totals:
        metrics = output.metrics
        return _Totals(
            self.finished + 1,
            self.prompt_tokens + metrics.prompt_tokens,
            self.cached_tokens + metrics.cached_tokens,
            self.output_tokens + metrics.output_tokens,
            self.speculation.plus(metrics),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine holds now, and sums over the requests that have finished since it was created.

    running, waiting, blocks (KV blocks of block_size tokens that requests hold) and prefix_bytes are of now.
    prefix_hits of prefix_lookups requests, of at least one whole chunk, began behind a cached prefix;
    prefix_evictions counts ends of prefixes given up for others; prefix_host_hits of the hits came from
    prefix_host_bytes of host memory. offloads and recomputes count preemptions for
    lack of blocks: to host memory, or back to the queue with tokens to compute again. rounds_by_depth,
    empty but for mtp_step "auto", counts the batch's rounds since the engine was created, by depth and then
    by why they had it: "best", "probe", "retry" or "only" (no other depth was ready). The rest is of finished
    requests.
    """

    running: int
    waiting: int
    finished: int
    blocks_used: int
    blocks_total: int
    prompt_tokens: int
    output_tokens: int
    speculation: SpeculationStats
    rounds_by_depth: Mapping[int, Mapping[Reason, int]] = dataclasses.field(default_factory=dict)
    cached_tokens: int = 0
    prefix_hits: int = 0
    prefix_lookups: int = 0
    prefix_evictions: int = 0
    prefix_bytes: int = 0
    prefix_host_hits: int = 0
    prefix_host_bytes: int = 0
    offloads: int = 0
    recomputes: int = 0

    @property
    def withdrawals(self) -> int:
        """`recomputes` under its old name; the next version drops it."""
        return self.recomputes


class Engine:
    """Decodes requests of one checkpoint, together, a step at a time.

    One thread at a time steps, generates or closes; `add_request`, `abort`, `has_unfinished_requests` and
    `stats` may be called from any, while another steps. `progress(what, done, total)` is called while weights
    are read, shapes compiled, long prompts prefilled and `generate`'s requests finished. In the place of an
    EngineConfig its fields may be given: the model, a directory or a repository of the Hugging Face Hub, as
    `config`, the others by name, as in Engine("Qwen/Qwen3.5-4B", mtp_step=3). `frontend` is what
    `open_frontend` gave for the same config; it is the engine's from then on. `fill` writes the weights in
    the place of the checkpoint's loader (benchmarks), `save_to` is its `Runner`'s. `with` closes the engine
    at its end. Raises ValueError for a config or checkpoint that does not fit, before any request exists.
    """

    def __init__(
        self,
        config: EngineConfig | str | Path | None = None,
        *,
        progress: Progress | None = None,
        frontend: RequestProcessor | None = None,
        fill: Fill | None = None,
        save_to: Path | None = None,
        **settings: Any,
    ) -> None:
        config = as_config(config, settings)
        if config.tensor_parallel > 1:
            # Where torchrun has started this process as another rank, it ends here.
            from compiled_mtp.parallel.follower import follow_rank_0

            follow_rank_0()
        self.frontend = frontend if frontend is not None else open_frontend(config)
        if config.tensor_parallel > 1:
            # Ranks wait for rank 0: the first grammar must not hold them up in the middle of rounds.
            self.frontend.warm_up_grammars()
        self.model_config = self.frontend.model_config
        self.config = config.settle(self.model_config, self.frontend.path)
        self.tokenizer = self.frontend.tokenizer
        vocab_size = self.model_config.vocab_size
        num_valid_ids = vocab_size if self.tokenizer is None else min(vocab_size, self.tokenizer.num_ids)
        make_runner: type[Runner] = Runner
        if self.config.tensor_parallel > 1:
            # What starts ranks is nothing for an engine alone to load.
            from compiled_mtp.parallel.leader import LeadRunner

            make_runner = LeadRunner
        spec = resolve(self.config, self.model_config, num_valid_ids, is_checkpoint=fill is None)
        self.runner = make_runner(spec, progress, fill, save_to=save_to)
        self._depths = self._make_depths()
        depth = None if self._depths is None else self._depths.choose
        self.scheduler = Scheduler(limits_of(spec, self.runner.memory), depth=depth)
        self._masks = Masks(
            vocab_size,
            self.config.max_batch * (spec.mtp_step + 1),
            spec.max_in_flight + 1,
            self.config.mask_threads,
            is_pinned=spec.device.type == "cuda",
        )
        self._inbox = Inbox(self.scheduler, self.config.seed)
        self._progress = progress
        self._is_closed = False
        # Of the call that steps, generates or closes.
        self._turn = Turn()
        # Why a step has stopped somewhere, until the scheduler has recovered.
        self._interruption: str | None = None
        # The requests of the call of `generate` that is running, or was interrupted.
        self._batch: Collection[str] = ()
        # Requests whose outputs are for a stream of their own, with that stream.
        self._streams: dict[str, weakref.ref[Generator[RequestOutput, None, None]]] = {}
        self._totals = _Totals(0, 0, 0, 0, SpeculationStats.empty(spec.mtp_step))

    def add_request(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id. Exactly one of prompt, prompt_token_ids and messages is given.

        Whoever has the lower priority gets its place sooner, and keeps it longer where blocks run short.
        With `params.n` choices the outputs of each carry its index. Grammars are compiled here, in the
        caller's thread. Fields of `params` that were not set come from the checkpoint's
        generation_config.json. May be called from any thread, and by a signal's handler. Raises ValueError,
        and queues nothing, for a prompt that is empty or too long, an id out of range, a parameter out of
        range, a grammar that cannot be compiled and a request_id that is empty or in use.
        """
        self._check_open()
        check_type("request_id", request_id, str, "leave it out for one of our own")
        if request_id == "":
            raise ValueError("request_id must not be empty, got ''; leave it out for one of our own")
        if request_id in self._streams:
            # Its outputs would be taken for the stream's, or the request ended in its place.
            raise id_in_use(request_id)
        given = {"prompt": prompt, "prompt_token_ids": prompt_token_ids, "messages": messages}
        return self._inbox.put(self._make_choices(request_id or "", params, given, priority))

    def _make_choices(
        self, request_id: str, params: SamplingParams | None, given: Mapping[str, Any], priority: int = 0
    ) -> list[Request]:
        """The choices of a request that can run; `given` is its prompt, in one of three forms."""
        choices = self.frontend.make_request(request_id, params, priority=priority, **given)
        for request in choices:
            self.scheduler.limits.fit(request)
        return choices

    def step(self) -> list[RequestOutput]:
        """Plan, run, read: pieces of prompts or one decode round. Returns what became known, maybe nothing.

        With a launch in flight the outputs are those of the step before. A launch that fails ends its
        requests with finish_reason "error"; the others go on. An exception that leaves a step (Ctrl-C) ends
        those that had left the queue, since what their launch has done is not known, and the next step says
        so. Raises ValueError while another thread steps.
        """
        if not self._turn.take():
            raise _not_alone()
        before = None
        try:
            self._tidy()
            self._advance()
            before = self.scheduler.outputs, self._totals
            outputs = self._take_outputs(excluding=self._streams.keys())
            self._turn.leave()
            return outputs
        except BaseException:
            if before is not None:  # Nobody has got them.
                self.scheduler.put_back(before[0])
                self._totals = before[1]
            self._turn.leave()
            raise

    def _advance(self) -> None:
        """`step`, whose outputs wait in the scheduler until they are taken."""
        self._check_open()
        self._inbox.hand_over()
        self._interruption = "the step was interrupted"
        try:
            plan = self._run_next()
            self._interruption = None
        except BaseException as error:
            self._interruption = f"the step was interrupted by {error!r}"
            self._recover()
            raise
        if self._progress is None or plan is None or plan.kind != "prefill":
            return
        for prompt_chunk in plan.prompt_chunks:
            if prompt_chunk.prompt_len > self.runner.spec.prefill_chunk:
                self._progress(
                    "prefill", prompt_chunk.start + len(prompt_chunk.token_ids), prompt_chunk.prompt_len
                )

    def _run_next(self) -> StepPlan | None:
        """Take what has come, plan, launch and read; return the plan."""
        self._inbox.pass_aborts()
        self._end_left_streams()
        if self._depths is not None and self.runner.later is not None:
            self._take_depth(self._depths, self.runner.later)
        plan = self.scheduler.schedule()
        result = self._launch(plan)
        if self._depths is not None and result is not None:
            self._depths.read(result)
        self.scheduler.update(result)
        return plan

    def _launch(self, plan: StepPlan | None) -> StepResult | None:
        """Make the plan's masks and run it. Masks that cannot be had (memory) fail their launch alone."""
        if plan is not None and plan.is_guided:
            try:
                # The device is busy with the first half of the round meanwhile.
                masks = self._masks.fill(plan, self.scheduler.windows(plan))
            except AssertionError:  # A bug of ours.
                raise
            except Exception as error:
                return self.runner.fail(plan, error)
            self.runner.set_masks(plan, masks)
        if self._depths is not None and plan is not None:
            self._depths.launch(plan)
        return self.runner.run(plan)

    def _recover(self) -> None:
        """After a step that stopped somewhere; interrupted itself it is done again before the next one."""
        if self._interruption is None:
            return
        try:
            self.runner.drop_launches()
        finally:
            # Also where a second interrupt ends the waiting for copies.
            if self._depths is not None:
                self._depths.forget_launches()
            self.scheduler.recover(self._interruption)
        self._interruption = None

    def _tidy(self) -> None:
        """Finish what an interrupted call has left: a step, and the requests of `generate`."""
        self._recover()
        if self._batch:
            self._interruption = "the end of generate was interrupted"
            self._inbox.forget(self._batch)
            self.scheduler.forget(self._batch)
            self._interruption, self._batch = None, ()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do."""
        # In this order: a request is handed over before it leaves the inbox.
        return not self._inbox.is_empty or self.scheduler.has_unfinished(excluding=self._streams.keys())

    def abort(self, request_id: str) -> None:
        """End a request; its last output, with finish_reason 'abort', comes from the next step.

        May be called from any thread, and by a signal's handler; a request that ends by itself before that
        step stays as it ended. Raises ValueError for an id that is not running or waiting.
        """
        self._inbox.abort(request_id)

    def stream(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Chat | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Queue a request as `add_request` does and step until it has ended; yields its outputs, of all
        choices, as they come.

        Begins when it is first asked for an output, which is when it raises ValueError. Between two outputs
        other streams and `step` may be used; `step` returns none of its outputs. A stream that is left
        before its end ends its request with the next step.
        """
        given = {"prompt": prompt, "prompt_token_ids": prompt_token_ids, "messages": messages}
        own: list[weakref.ref[Generator[RequestOutput, None, None]]] = []
        stream = self._stream(own, params, given)
        own.append(weakref.ref(stream))
        return stream

    def _stream(
        self,
        own: Sequence[weakref.ref[Generator[RequestOutput, None, None]]],
        params: SamplingParams | None,
        given: Mapping[str, Any],
    ) -> Generator[RequestOutput, None, None]:
        """`stream`; `own` is the generator itself. It has no `finally`: an interrupt may end that too, and a
        generator may be ended wherever memory is collected."""
        check_type("params", params, SamplingParams, "make one with SamplingParams(...)")
        self._check_open()
        choices = self._make_choices("", params, given)
        choices[0].request_id = request_id = self._inbox.new_id()
        unfinished = len(choices)
        self._streams[request_id] = own[0]
        self._inbox.put(choices)
        while unfinished:
            for output in self._next_outputs(request_id):
                unfinished -= output.finish_reason is not None
                yield output
        # All is told: from here on the id may be another request's.
        self._streams.pop(request_id, None)

    def _next_outputs(self, request_id: str) -> list[RequestOutput]:
        """What a request with a stream has gained; a step first if that is nothing."""
        if not self._turn.take():
            raise _not_alone()
        try:
            self._tidy()
            outputs = self._take_outputs((request_id,))
            if not outputs:
                self._advance()
                outputs = self._take_outputs((request_id,))
            return outputs
        finally:
            self._turn.leave()

    def generate(
        self, prompts: Iterable[Prompt] | None = None, params: Params = None, *, messages: Any = None
    ) -> list[RequestOutput]:
        """Decode all prompts (texts, token ids or chats) to their end; one output for each choice, in order,
        with all its tokens. A text alone is a list of one.

        `messages`, given in the place of prompts, is one chat or a list of chats. Outputs of other requests
        come from the next `step`. Raises ValueError before anything is decoded if one of the prompts is not
        valid; whatever is raised, none of them stays behind.
        """
        prompts = as_prompts(prompts, messages)
        # By request, the outputs of each choice.
        outputs: dict[str, list[list[RequestOutput]]] = {}
        if not self._turn.take():
            raise _not_alone()
        try:
            self._tidy()
            # Whatever ends this call, the next one forgets them if this one cannot.
            self._batch = outputs
            self._queue_all(prompts, match_params(prompts, params), outputs)
            total = unfinished = sum(map(len, outputs.values()))
            while unfinished:
                self._advance()
                before = unfinished
                for output in self._take_outputs(outputs):
                    outputs[output.request_id][output.index].append(output)
                    unfinished -= output.finish_reason is not None
                if self._progress is not None and unfinished < before:
                    self._progress("requests", total - unfinished, total)
            self._batch = ()
        finally:
            self._tidy()
            self._turn.leave()
        return [join(parts) for choices in outputs.values() for parts in choices]

    def _queue_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        outputs: dict[str, list[list[RequestOutput]]],
    ) -> None:
        """Queue every prompt; its id is a key of `outputs` before, for an interrupt may come anywhere."""
        for index, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
            request_id = self._inbox.new_id()
            outputs[request_id] = [[] for _ in range(1 if prompt_params is None else prompt_params.n)]
            try:
                given: dict[str, Any] = {kind_of(prompt): prompt}
                self.add_request(params=prompt_params, request_id=request_id, **given)
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from None

    @property
    def num_threads(self) -> int | None:
        """CPU threads that a step is computed with, of the whole process; None on a GPU."""
        return torch.get_num_threads() if self.runner.spec.device.type == "cpu" else None

    @property
    def weight_recipe(self) -> str | None:
        """How FP8 weights are multiplied, w8a8 or w8a16; None for a checkpoint without them."""
        return self.runner.spec.weight_recipe

    @property
    def is_compiled(self) -> bool:
        """Whether steps run compiled; on a CPU, compile="auto" compiles only what a graph_cache holds."""
        return self.runner.spec.is_compiled

    def stats(self) -> EngineStats:
        """What the engine holds now, and sums over finished requests. May be called from any thread."""
        pool, prefix, totals = self.scheduler.pool, self.scheduler.prefix, self._totals
        memory = self.runner.memory
        snapshots_bytes = prefix.index.num_snapshots_used * memory.snapshot_bytes
        prefix_tier_bytes = prefix.prefix_host.num_records_used * memory.snapshot_bytes
        return EngineStats(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting + len(self._inbox),
            finished=totals.finished,
            blocks_used=pool.num_used,
            blocks_total=pool.num_blocks - 1,
            prompt_tokens=totals.prompt_tokens,
            output_tokens=totals.output_tokens,
            speculation=totals.speculation,
            rounds_by_depth={} if self._depths is None else self._depths.rounds(),
            cached_tokens=totals.cached_tokens,
            prefix_hits=prefix.num_hits,
            prefix_lookups=prefix.num_lookups,
            prefix_evictions=prefix.index.num_evictions,
            prefix_bytes=snapshots_bytes + pool.num_kept * memory.block_bytes,
            prefix_host_hits=prefix.num_host_hits,
            prefix_host_bytes=prefix_tier_bytes + prefix.prefix_host.num_blocks_used * memory.block_bytes,
            offloads=self.scheduler.num_offloaded,
            recomputes=self.scheduler.num_recomputed,
        )

    def check(self) -> None:
        """Raise what has ended the engine between two steps, if anything has: RankError for a lost rank.

        May be called from any thread.
        """
        self.runner.check()

    def close(self) -> None:
        """Wait for the device and end. Requests that are not finished are lost; nothing can be added.

        Raises ValueError while another thread steps.
        """
        if not self._turn.take():
            raise _not_alone()
        try:
            self._is_closed = True
            self._inbox.forget()
            if self._interruption is not None:
                self.scheduler.recover(self._interruption)
            self._interruption = "the engine was being closed"
            self.scheduler.forget_all()
            self._interruption = None
            self.runner.close()
        finally:
            self._turn.leave()

    def _make_depths(self) -> DepthPolicy | None:
        """What chooses the depth of each round, if anything does."""
        if self.config.mtp_step != "auto":
            return None
        depths, programs = self.config.depths, self.runner.programs
        begin = first_depth(depths)
        sizes = [b.groups for b in programs.buckets if b.shape == (begin, begin)]
        return DepthPolicy(depths if self.runner.later is None else (begin,), sizes)

    def _take_depth(self, depths: DepthPolicy, later: LaterDepths) -> None:
        """Let rounds have a depth that has become ready."""
        depth = later.take()
        if depth is not None:
            depths.add_depth(depth)
        elif later.is_done:
            self.runner.later = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("engine must be open, got one that was closed; make another")

    def _end_left_streams(self) -> None:
        """End the requests whose streams were left, without an output."""
        for request_id, reference in list(self._streams.items()):
            stream = reference()
            if stream is None or inspect.getgeneratorstate(stream) == inspect.GEN_CLOSED:
                self._inbox.forget((request_id,))
                self.scheduler.forget((request_id,))
                self._streams.pop(request_id, None)

    def _take_outputs(
        self, request_ids: Collection[str] | None = None, excluding: Collection[str] = ()
    ) -> list[RequestOutput]:
        """The outputs of these requests, or of all but some, that nobody has taken yet; the others stay."""
        outputs, totals = self.scheduler.take_outputs(request_ids, excluding), self._totals
        for output in outputs:
            if output.finish_reason is not None:
                totals = totals.plus(output)
        self._totals = totals
        return outputs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _not_alone() -> ValueError:
    return ValueError(
        "engine must be stepped, asked to generate and closed by one thread at a time, got a second one; let "
        "one thread step, any other may call add_request and abort"
    )
