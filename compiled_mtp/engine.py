"""Engine: requests in, tokens out. The order of a step and nothing else."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compiled_mtp.build import Progress
from compiled_mtp.config import EngineConfig
from compiled_mtp.errors import quote
from compiled_mtp.front import Front, check_type
from compiled_mtp.inbox import Inbox
from compiled_mtp.masks import Masks
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.weights import has_mtp
from compiled_mtp.request import RequestOutput, SamplingParams
from compiled_mtp.runner import Runner
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.spec.stats import SpeculationStats
from compiled_mtp.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Totals:
    """Sums over the requests whose last output has been handed out."""

    finished: int
    prompt_tokens: int
    output_tokens: int
    speculation: SpeculationStats

    def plus(self, output: RequestOutput) -> _Totals:
        metrics = output.metrics
        return _Totals(
            self.finished + 1,
            self.prompt_tokens + metrics.prompt_tokens,
            self.output_tokens + metrics.output_tokens,
            self.speculation.plus(metrics),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine holds now, and sums over the requests that have finished since it was created.

    running, waiting, and blocks (KV blocks of block_size tokens) are of now. offloads and withdrawals count
    how often a request left since blocks ran short: to host memory, or to wait and be computed again. The
    others are of finished requests.
    """

    running: int
    waiting: int
    finished: int
    blocks_used: int
    blocks_total: int
    prompt_tokens: int
    output_tokens: int
    speculation: SpeculationStats
    offloads: int = 0
    withdrawals: int = 0


class Engine:
    """Decodes requests of one checkpoint, together, a step at a time.

    One thread at a time steps, generates or closes; `add_request`, `abort`, `has_unfinished_requests` and
    `stats` may be called from any, while another steps. `progress(what, done, total)` is called while weights
    are read, shapes compiled, long prompts prefilled. Raises ValueError for a config or checkpoint that does
    not fit, before any request exists.
    """

    def __init__(self, config: EngineConfig | None = None, *, progress: Progress | None = None) -> None:
        self.config = config if config is not None else EngineConfig()
        path = Path(self.config.model)
        self.model_config = read_model_config(path)
        if self.config.mtp_step and not has_mtp(path):
            raise ValueError(
                f"mtp_step must be 0 for a checkpoint without mtp.* tensors, got {self.config.mtp_step}; "
                f"{path} has none, pass mtp_step=0 for plain decoding"
            )
        # A default out of range is found before the weights are loaded.
        SamplingParams().with_defaults(self.model_config.generation_defaults)
        self.tokenizer = Tokenizer(path) if (path / "tokenizer.json").is_file() else None
        vocab_size = self.model_config.vocab_size
        num_valid_ids = vocab_size if self.tokenizer is None else min(vocab_size, self.tokenizer.num_ids)
        self.runner = Runner(self.config, self.model_config, num_valid_ids, progress)
        self.scheduler = Scheduler(
            max_batch=self.config.max_batch,
            num_blocks=self.runner.num_blocks,
            block_size=self.config.block_size,
            # More than all blocks hold is for the scheduler to tell.
            max_model_len=self.config.resolve_max_model_len(self.model_config),
            prefill_chunk=self.config.prefill_chunk,
            mtp_step=self.config.mtp_step,
            max_in_flight=self.runner.max_in_flight,
            host_records=self.runner.host.num_records,
            host_blocks=self.runner.host.num_blocks,
        )
        self.front = Front(path, self.model_config, self.tokenizer, self.scheduler.limits)
        self._masks = Masks(
            vocab_size,
            self.config.max_batch * (self.config.mtp_step + 1),
            self.runner.max_in_flight + 1,
            self.config.mask_threads,
            is_pinned=self.runner.device.type == "cuda",
        )
        self._inbox = Inbox(self.scheduler, self.config.seed)
        self._progress = progress
        self._is_closed = False
        self._stepping = threading.Lock()
        self._totals = _Totals(0, 0, 0, SpeculationStats.empty(self.config.mtp_step))

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
        generation_config.json. May be called from any thread. Raises ValueError, and queues nothing, for a
        prompt that is empty or too long, an id out of range, a parameter out of range, a grammar that cannot
        be compiled and a request_id that is empty or in use.
        """
        self._check_open()
        check_type("request_id", request_id, str, "leave it out for one of our own")
        if request_id == "":
            raise ValueError("request_id must not be empty, got ''; leave it out for one of our own")
        choices = self.front.make_request(
            request_id or "",
            params,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            messages=messages,
            priority=priority,
        )
        return self._inbox.put(choices)

    def step(self) -> list[RequestOutput]:
        """Plan, run, read: one prefill chunk or one decode round. Returns what became known, maybe nothing.

        With a launch in flight the outputs are those of the step before. A launch that fails ends its
        requests with finish_reason "error"; the others go on. An exception that leaves a step (Ctrl-C) ends
        those that had left the queue, since what their launch has done is not known, and the next step says
        so. Raises ValueError while another thread steps.
        """
        with self._as_only_stepper():
            self._advance()
            return self._take_outputs()

    def _advance(self) -> None:
        """`step`, whose outputs wait in the scheduler until they are taken."""
        self._check_open()
        self._inbox.hand_over()
        try:
            self._inbox.pass_aborts()
            plan = self.scheduler.schedule()
            if plan is not None and plan.wants_drafts:
                # The device is busy with the first half of the round meanwhile.
                masks = self._masks.fill(plan, self.scheduler.windows(plan))
                self.runner.set_masks(plan, masks)
            self.scheduler.update(self.runner.run(plan))
        except BaseException as error:
            self.runner.drop_launches()
            self.scheduler.recover(f"the step was interrupted by {error!r}")
            raise
        if self._progress is None or plan is None or plan.kind != "prefill":
            return
        if plan.prompt_len > self.config.prefill_chunk:
            self._progress("prefill", plan.start + len(plan.token_ids), plan.prompt_len)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do."""
        # In this order: a request is handed over before it leaves the inbox.
        return not self._inbox.is_empty or self.scheduler.has_unfinished()

    def abort(self, request_id: str) -> None:
        """End a request; its last output, with finish_reason 'abort', comes from the next step.

        May be called from any thread; a request that ends by itself before that step stays as it ended.
        Raises ValueError for an id that is not running or waiting.
        """
        self._inbox.abort(request_id)

    def generate(self, prompts: Sequence[Prompt], params: Params = None) -> list[RequestOutput]:
        """Decode all prompts (texts, token ids or chats) to their end; one output for each choice, in order,
        with all its tokens.

        Outputs of other requests come from the next `step`. Raises ValueError before anything is decoded if
        one of the prompts is not valid; whatever is raised, none of them stays behind.
        """
        # By request, the outputs of each choice.
        outputs: dict[str, list[list[RequestOutput]]] = {}
        with self._as_only_stepper():
            try:
                self._queue_all(prompts, _match_params(prompts, params), outputs)
                unfinished = sum(map(len, outputs.values()))
                while unfinished:
                    self._advance()
                    for output in self._take_outputs(outputs):
                        outputs[output.request_id][output.index].append(output)
                        unfinished -= output.finish_reason is not None
            except BaseException:
                self._inbox.forget(outputs)
                self.scheduler.forget(outputs)
                raise
        return [_join(parts) for choices in outputs.values() for parts in choices]

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
            given: dict[str, Any] = {_kind_of(prompt): prompt}
            try:
                self.add_request(params=prompt_params, request_id=request_id, **given)
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from None

    @property
    def is_compiled(self) -> bool:
        """Whether steps run compiled; on a CPU, compile="auto" compiles only what a graph_cache holds."""
        return self.runner.programs.is_compiled

    def stats(self) -> EngineStats:
        """What the engine holds now, and sums over finished requests. May be called from any thread."""
        pool, totals = self.scheduler.pool, self._totals
        return EngineStats(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting + len(self._inbox),
            finished=totals.finished,
            blocks_used=pool.num_used,
            blocks_total=pool.num_blocks - 1,
            prompt_tokens=totals.prompt_tokens,
            output_tokens=totals.output_tokens,
            speculation=totals.speculation,
            offloads=self.scheduler.num_offloaded,
            withdrawals=self.scheduler.num_withdrawn,
        )

    def close(self) -> None:
        """Wait for the device and end. Requests that are not finished are lost; nothing can be added.

        Raises ValueError while another thread steps.
        """
        with self._as_only_stepper():
            self._is_closed = True
            self._inbox.forget()
            self.scheduler.forget_all()
            self.runner.close()

    @contextmanager
    def _as_only_stepper(self) -> Iterator[None]:
        if not self._stepping.acquire(blocking=False):
            raise ValueError(
                "engine must be stepped, asked to generate and closed by one thread at a time, got a second "
                "one; let one thread step, any other may call add_request and abort"
            )
        try:
            yield
        finally:
            self._stepping.release()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("engine must be open, got one that was closed; make another")

    def _take_outputs(self, request_ids: Collection[str] | None = None) -> list[RequestOutput]:
        """The outputs of these requests, or of all, that nobody has taken yet; those of others stay."""
        outputs = self.scheduler.take_outputs(request_ids)
        totals = self._totals
        try:
            for output in outputs:
                if output.finish_reason is not None:
                    totals = totals.plus(output)
        except BaseException:  # Ctrl-C.
            self.scheduler.put_back(outputs)
            raise
        self._totals = totals
        return outputs


def _kind_of(prompt: Prompt) -> str:
    """What add_request takes it as."""
    if isinstance(prompt, str):
        return "prompt"
    is_chat = isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
    return "messages" if is_chat else "prompt_token_ids"


def _match_params(prompts: Sequence[Prompt], params: Params) -> Sequence[SamplingParams | None]:
    """Parameters for each prompt."""
    if isinstance(prompts, str):
        raise ValueError(f"prompts must be a list, got the text {quote(prompts)}; put it into a list")
    if params is None or isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(
            f"params must be one or as many as prompts, got {len(params)} for {len(prompts)}; match them"
        )
    return params


def _join(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """The last output of a choice, with the tokens, texts and log probabilities of all."""
    tokens = [token_id for output in outputs for token_id in output.new_token_ids]
    text = "".join(output.new_text for output in outputs)
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    has_entries = any(output.logprobs is not None for output in outputs)
    last = outputs[-1]
    return last._replace(new_token_ids=tokens, new_text=text, logprobs=entries if has_entries else None)
