"""Engine: requests in, tokens out. This file has the calls of users, `StepLoop` the order of a step."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from compiled_mtp.config import EngineConfig, as_config
from compiled_mtp.errors import check, check_type
from compiled_mtp.frontend.checkpoint import open_frontend
from compiled_mtp.frontend.processor import RequestProcessor
from compiled_mtp.frontend.prompts import (
    Chat,
    Continuation,
    Params,
    Prompt,
    as_continuations,
    as_prompts,
    join,
    kind_of,
    match_params,
)
from compiled_mtp.request import Request, RequestOutput, SamplingParams
from compiled_mtp.runner.assemble import Fill, Progress
from compiled_mtp.runner.masks import Masks
from compiled_mtp.runner.memory import limits_of
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import resolve
from compiled_mtp.runner.step_loop import StepLoop
from compiled_mtp.runner.weight_control import WeightControl
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.inbox import Inbox, StreamRef
from compiled_mtp.scheduler.turn import Turn
from compiled_mtp.spec.depth import first_depth
from compiled_mtp.spec.engine_stats import EngineStats, Totals
from compiled_mtp.spec.policy import DepthPolicy
from compiled_mtp.spec.stats import SpeculationStats
from compiled_mtp.vision.images import ImageInput


class Engine(WeightControl):
    """Decodes the requests of one checkpoint together, step by step.

    config: an EngineConfig; or the model, a directory or a repository of the Hugging Face Hub, with other
    fields of EngineConfig by name, as in Engine("Qwen/Qwen3.5-4B", mtp_step=3). progress: called as
    `progress(what, done, total)` while the engine reads weights, compiles shapes, prefills long prompts and
    finishes the requests of `generate`. frontend: the result of `open_frontend` for the same config; the
    engine owns it. fill: writes the weights instead of the checkpoint's loader, for benchmarks. save_to: see
    `Runner`.

    Only one thread at a time may step, generate or close; any thread may call `add_request`, `abort`,
    `has_unfinished_requests` and `stats` meanwhile. A `with` statement closes the engine at its end. Raises
    ValueError for a wrong config or checkpoint.
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
            # If torchrun has started this process as another rank, this call does not return.
            from compiled_mtp.parallel.follower import follow_rank_0

            follow_rank_0()
        self.frontend = frontend if frontend is not None else open_frontend(config)
        if config.tensor_parallel > 1:
            # Other ranks wait for rank 0: preparing for the first grammar must not stall them during rounds.
            self.frontend.warm_up_grammars()
        self.model_config = self.frontend.model_config
        self.config = config.settle(self.model_config, self.frontend.path)
        self.tokenizer = self.frontend.tokenizer
        vocab_size = self.model_config.vocab_size
        num_valid_ids = vocab_size if self.tokenizer is None else min(vocab_size, self.tokenizer.num_ids)
        make_runner: type[Runner] = Runner
        if self.config.tensor_parallel > 1:
            # Imported here: an engine of one rank needs no module that starts ranks.
            from compiled_mtp.parallel.leader import LeadRunner

            make_runner = LeadRunner
        spec = resolve(self.config, self.model_config, num_valid_ids, is_checkpoint=fill is None)
        self.runner = make_runner(spec, progress, fill, save_to=save_to)
        # Memory has decided on wide rounds.
        spec = replace(spec, wide_shapes=self.runner.spec.wide_shapes)
        depths = self._make_depths()
        depth, widen = (None, None) if depths is None else (depths.choose, depths.widen)
        limits, read = limits_of(spec, self.runner.memory), self.runner.read_experts
        self.scheduler = Scheduler(limits, depth=depth, widen=widen, read_experts=read)
        masks = Masks(
            vocab_size,
            spec.most_rows(self.runner.memory.max_batch),
            spec.max_in_flight + 1,
            self.config.mask_threads,
            is_pinned=spec.device.type == "cuda",
        )
        self._inbox = Inbox(self.scheduler, self.config.seed)
        self._steps = StepLoop(self.runner, self.scheduler, self._inbox, masks, depths)
        self._progress = progress
        self._is_closed = False
        # Taken by the call that steps, generates or closes.
        self._turn = Turn()
        # The requests of the running, or interrupted, call of `generate`.
        self._batch: Collection[str] = ()
        nothing = SpeculationStats.empty(spec.mtp_step)
        self._totals = Totals(0, 0, 0, 0, nothing, 0, nothing)

    def add_request(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[ImageInput] | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id. Give exactly one of prompt, prompt_token_ids and messages.

        params: fields that are not set come from the checkpoint's generation_config.json. The outputs of each
        of `params.n` choices have its index. images: for the `<|image_pad|>` tokens of the prompt, in order,
        or for the content parts {"type": "image"} of the messages; a part may also have an image of its own,
        as {"type": "image", "image": ...}. priority: a lower number starts sooner, and is preempted later
        when blocks run short.

        Any thread, and a signal handler, may call it; it decodes images and compiles grammars in that thread.
        Raises ValueError, and queues nothing, for a prompt that is empty or too long, an id or a parameter
        out of range, a grammar that cannot be compiled, and a request_id that is empty or in use.
        """
        self._check_open()
        check_type("request_id", request_id, str, "leave it out for a new id")
        if request_id == "":
            raise ValueError("request_id must not be empty, got ''; leave it out for a new id")
        given = {
            "prompt": prompt,
            "prompt_token_ids": prompt_token_ids,
            "messages": messages,
            "images": images,
        }
        return self._inbox.put(self._make_choices(request_id or "", params, given, priority))

    def _make_choices(
        self,
        request_id: str,
        params: SamplingParams | None,
        given: Mapping[str, Any],
        priority: int = 0,
        continuation: Continuation | None = None,
    ) -> list[Request]:
        """Return the choices of a request. `given`: its prompt in one of three forms, and its images.

        Raises ValueError for a request that does not fit the limits.
        """
        self._check_serves(params)
        choices = self.frontend.make_request(
            request_id, params, priority=priority, continuation=continuation, **given
        )
        for request in choices:
            self.scheduler.limits.fit(request)
        return choices

    def step(self) -> list[RequestOutput]:
        """Plan, run and read one launch: prompt chunks or a decode round. Return the new outputs.

        With a launch in flight these are the outputs of the previous step. If a launch fails, its requests
        end with finish_reason "error", and the others continue. An exception in a step (Ctrl-C) ends all
        requests that have left the queue, because the state of their launch is unknown; the next step returns
        their last outputs. Raises ValueError while another thread steps.
        """
        self._turn.take()
        before = None
        try:
            self._tidy()
            self._advance()
            before = self.scheduler.outputs, self._totals
            outputs = self._take_outputs(excluding=self._inbox.streams.keys())
            self._turn.leave()
            return outputs
        except BaseException:
            if before is not None:  # The caller did not get the outputs.
                self.scheduler.put_back(before[0])
                self._totals = before[1]
            self._turn.leave()
            raise

    def _advance(self) -> None:
        """Do what `step` does; the outputs stay in the scheduler until they are taken."""
        self._check_open()
        self._inbox.hand_over()
        if self._unavailable is not None:
            self.scheduler.end_begun((), self._unavailable)
        plan = self._steps.run_once()
        if self._progress is None or plan is None or plan.kind != "prefill":
            return
        for prompt_chunk in plan.prompt_chunks:
            if prompt_chunk.prompt_len > self.runner.spec.prefill_chunk:
                self._progress(
                    "prefill", prompt_chunk.start + len(prompt_chunk.token_ids), prompt_chunk.prompt_len
                )

    def _tidy(self) -> None:
        """Clean up after an interrupted call: its step, and the requests of `generate`."""
        self._steps.recover()
        if self._batch:
            self._steps.interruption = "the end of generate was interrupted"
            self._inbox.forget(self._batch)
            self.scheduler.forget(self._batch)
            self._steps.interruption, self._batch = None, ()

    def has_unfinished_requests(self) -> bool:
        """Return whether any request still needs a `step`; requests of `stream` do not count."""
        # The order matters: a request reaches the scheduler before it leaves the inbox.
        return not self._inbox.is_empty or self.scheduler.has_unfinished(excluding=self._inbox.streams.keys())

    def abort(self, request_id: str) -> None:
        """End a request; the next step returns its last output, with finish_reason "abort".

        Any thread, and a signal handler, may call it. A request that ends by itself before that step keeps
        its own finish_reason. Raises ValueError for an id that is neither running nor waiting.
        """
        self._inbox.abort(request_id)

    def stream(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Chat | None = None,
        images: Sequence[ImageInput] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Queue a request as `add_request` does, step until it has ended, and yield the outputs of all its
        choices as they come.

        The first `next` queues the request, or raises ValueError. Between two outputs, other streams and
        `step` may be used; `step` returns none of this stream's outputs. If the caller leaves the stream
        early, the next step ends the request.
        """
        given = {
            "prompt": prompt,
            "prompt_token_ids": prompt_token_ids,
            "messages": messages,
            "images": images,
        }
        own: list[StreamRef] = []
        stream = self._stream(own, params, given)
        own.append(weakref.ref(stream))
        return stream

    def _stream(
        self,
        own: Sequence[StreamRef],
        params: SamplingParams | None,
        given: Mapping[str, Any],
    ) -> Generator[RequestOutput, None, None]:
        """Do what `stream` does; own[0] is a reference to this generator.

        It has no `finally`: an interrupt may end that too, and garbage collection may end a generator at any
        point.
        """
        check_type("params", params, SamplingParams, "make one with SamplingParams(...)")
        self._check_open()
        choices = self._make_choices("", params, given)
        unfinished = len(choices)
        request_id = self._inbox.put(choices, own[0])
        while unfinished:
            for output in self._next_outputs(request_id):
                unfinished -= output.finish_reason is not None
                yield output
        # All outputs are delivered: another request may use the id now.
        self._inbox.streams.pop(request_id, None)

    def _next_outputs(self, request_id: str) -> list[RequestOutput]:
        """Return the new outputs of a request with a stream, after a step if there are none yet."""
        self._turn.take()
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
        """Decode all prompts (texts, token ids or chats); return one output per choice, in order, with all
        its tokens. A single text counts as a list of one.

        params: one for all prompts, or one for each. messages: one chat or a list of chats, instead of
        prompts. Requests of `add_request` are decoded too; the next `step` returns their outputs. Raises
        ValueError before anything is decoded if a prompt or a parameter is wrong. After any exception, none
        of these requests stays in the engine.
        """
        prompts = as_prompts(prompts, messages)
        return self._decode_all(prompts, match_params(prompts, params))

    def score(
        self,
        prompts: Iterable[Prompt] | None,
        continuations: Iterable[Continuation],
        params: Params = None,
        *,
        messages: Any = None,
    ) -> list[RequestOutput]:
        """Return, for each prompt, the output of `generate` as if it had drawn the given continuation.

        continuations: one for each prompt, token ids or a text, which is tokenised alone. params: the
        processing of logits, and the number of likeliest ids, 0 by default. The outputs' `logprobs` have raw
        and processed entries, with the bits of a request that draws these tokens, at any depth, batch and
        state of the cache. Only a token that the request's grammar forbids, or logits that are not finite,
        end a continuation early. Raises ValueError as `generate` does, and for an engine without `scoring`.
        """
        is_scoring, remedy = self.config.scoring, "make Engine(..., scoring=True)"
        check(is_scoring, "scoring", "be set to score tokens", is_scoring, remedy)
        prompts = as_prompts(prompts, messages)
        every = as_continuations(prompts, continuations)
        return self._decode_all(prompts, match_params(prompts, params), every)

    def _decode_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        continuations: Sequence[Continuation] | None = None,
    ) -> list[RequestOutput]:
        """Do what `generate` does, or with continuations what `score` does."""
        # The outputs of each choice, by request id.
        outputs: dict[str, list[list[RequestOutput]]] = {}
        self._turn.take()
        try:
            self._tidy()
            # If an interrupt stops the cleanup below, the next call forgets these requests.
            self._batch = outputs
            self._queue_all(prompts, params, continuations or [None] * len(prompts), outputs)
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
        continuations: Sequence[Continuation | None],
        outputs: dict[str, list[list[RequestOutput]]],
    ) -> None:
        """Queue every prompt. Adds its id to `outputs` first, because an interrupt may come at any point."""
        for index, (prompt, prompt_params, continuation) in enumerate(
            zip(prompts, params, continuations, strict=True)
        ):
            request_id = self._inbox.new_id()
            outputs[request_id] = [[] for _ in range(1 if prompt_params is None else prompt_params.n)]
            try:
                given = dict.fromkeys(("prompt", "prompt_token_ids", "messages")) | {kind_of(prompt): prompt}
                choices = self._make_choices(request_id, prompt_params, given, continuation=continuation)
                self._inbox.put(choices)
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from None

    @property
    def num_threads(self) -> int | None:
        """The number of CPU threads of a step, which is that of the whole process; None on a GPU."""
        return torch.get_num_threads() if self.runner.spec.device.type == "cpu" else None

    @property
    def weight_recipe(self) -> str | None:
        """The recipe of products with FP8 weights, "w8a8" or "w8a16"; None for a checkpoint without them."""
        return self.runner.spec.weight_recipe

    @property
    def is_compiled(self) -> bool:
        """Whether steps run compiled; on a CPU with compile="auto", only with a graph_cache."""
        return self.runner.spec.is_compiled

    def stats(self) -> EngineStats:
        """Return the engine's current state, and sums over its lifetime. Any thread may call it."""
        pool, prefix, totals = self.scheduler.pool, self.scheduler.prefix, self._totals
        memory, is_auto, depths = self.runner.memory, self.config.mtp_step == "auto", self._steps.depths
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
            rounds_by_depth={} if depths is None or not is_auto else depths.rounds(),
            cached_tokens=totals.cached_tokens,
            prefix_hits=prefix.num_hits,
            prefix_lookups=prefix.num_lookups,
            prefix_evictions=prefix.index.num_evictions,
            prefix_bytes=snapshots_bytes + pool.num_kept * memory.block_bytes,
            prefix_host_hits=prefix.num_host_hits,
            prefix_host_bytes=prefix_tier_bytes + prefix.prefix_host.num_blocks_used * memory.block_bytes,
            offloads=self.scheduler.num_offloaded,
            recomputes=self.scheduler.num_recomputed,
            images=self.runner.num_encoded,
            image_tokens=totals.image_tokens,
            image_speculation=totals.image_speculation,
        )

    def check(self) -> None:
        """Raise the error, if any, that ended the engine between two steps: RankError for a lost rank.

        Any thread may call it.
        """
        self.runner.check()

    def close(self) -> None:
        """Wait for the device and free the engine. Drops unfinished requests; afterwards none can be added.

        Raises ValueError while another thread steps.
        """
        self._turn.take()
        try:
            self._is_closed = True
            self._inbox.forget()
            if self._steps.interruption is not None:
                self.scheduler.recover(self._steps.interruption)
            self._steps.interruption = "the engine was being closed"
            self.scheduler.forget_all()
            self._steps.interruption = None
            self.runner.close()
        finally:
            self._turn.leave()

    def _make_depths(self) -> DepthPolicy | None:
        """Return the policy that chooses the shape of each round; None if all rounds have the same."""
        depths, spec = self.config.depths, self.runner.spec
        if self.config.mtp_step != "auto" and not spec.wide_shapes:
            return None
        begin = first_depth(depths)
        sizes = [b.groups for b in self.runner.programs.buckets if b.shape == (begin, begin)]
        ready = depths if self.runner.later is None else (begin,)
        return DepthPolicy(ready, sizes, wide_drafts=spec.wide_drafts)

    def _take_outputs(
        self, request_ids: Collection[str] | None = None, excluding: Collection[str] = ()
    ) -> list[RequestOutput]:
        """Remove and return the outputs of these requests, or for None of all requests except `excluding`."""
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
