"""Engine: requests in, tokens out. The order of a step and nothing else."""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compiled_mtp.build import Progress
from compiled_mtp.config import EngineConfig
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.weights import has_mtp
from compiled_mtp.request import Request, RequestOutput, SamplingParams
from compiled_mtp.runner import Runner
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.spec.stats import SpeculationStats
from compiled_mtp.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine holds now, and sums over the requests that have finished since it was created.

    running, waiting, and blocks (KV blocks of block_size tokens) are of now; the others of finished requests.
    """

    running: int
    waiting: int
    finished: int
    blocks_used: int
    blocks_total: int
    prompt_tokens: int
    output_tokens: int
    speculation: SpeculationStats


class Engine:
    """Decodes requests of one checkpoint, together, a step at a time. For use from one thread.

    `progress(what, done, total)` is called while weights are read, shapes compiled, long prompts prefilled.
    Raises ValueError for a config or checkpoint that does not fit, before any request exists.
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
        # A default out of range is found before the weights are loaded; one that this version lacks is
        # refused with the requests that do not set it themselves.
        SamplingParams(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0).with_defaults(
            self.model_config.generation_defaults
        )
        self.tokenizer = Tokenizer(path) if (path / "tokenizer.json").is_file() else None
        vocab_size = self.model_config.vocab_size
        num_valid_ids = vocab_size if self.tokenizer is None else min(vocab_size, self.tokenizer.num_ids)
        self.runner = Runner(self.config, self.model_config, num_valid_ids, progress)
        self.scheduler = Scheduler(
            max_batch=self.config.max_batch,
            num_blocks=self.runner.num_blocks,
            block_size=self.config.block_size,
            max_model_len=self.runner.max_model_len,
            prefill_chunk=self.config.prefill_chunk,
            mtp_step=self.config.mtp_step,
            max_in_flight=self.runner.max_in_flight,
        )
        self._progress = progress
        self._is_closed = False
        self._undelivered: list[RequestOutput] = []
        self._num_requests = 0
        self._finished = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._speculation = SpeculationStats.empty(self.config.mtp_step)

    def add_request(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id. Exactly one of prompt, prompt_token_ids and messages is given.

        Fields of `params` that were not set come from the checkpoint's generation_config.json. Raises
        ValueError, and queues nothing, for a prompt that is empty or too long, an id out of range, a
        parameter out of range and a request_id in use.
        """
        self._check_open()
        given = {"prompt": prompt, "prompt_token_ids": prompt_token_ids, "messages": messages}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(
                f"prompt, prompt_token_ids and messages must be given exactly once, got {names}; choose one"
            )
        _check_type("prompt", prompt, str, "pass ids as prompt_token_ids")
        _check_type("params", params, SamplingParams, "make one with SamplingParams(...)")
        _check_type("request_id", request_id, str, "leave it out for one of our own")
        params = (params or SamplingParams()).with_defaults(self.model_config.generation_defaults)
        if params.seed is None and self.config.seed is not None:
            params = params.model_copy(update={"seed": self.config.seed})
        if prompt_token_ids is not None:
            token_ids = self._check_ids("prompt_token_ids", prompt_token_ids)
        else:
            tokenizer = self._require_tokenizer(names[0])
            text = prompt if prompt is not None else tokenizer.apply_chat_template(_as_chat(messages))
            # The vocabulary of a tokenizer may have grown beyond the checkpoint's.
            token_ids = self._check_ids(names[0], tokenizer.encode(text))
        if params.stop and self.tokenizer is not None:
            # A special token has no text in which its name could be found.
            special = (self.tokenizer.special_id(stop) for stop in params.stop)
            ids = tuple(i for i in special if i is not None and i < self.model_config.vocab_size)
            params = params.model_copy(update={"stop_token_ids": params.stop_token_ids + ids})
        self._check_ids("stop_token_ids", params.stop_token_ids)
        if request_id is not None and self._has_id(request_id):
            raise ValueError(f"request_id must be unused, got {request_id!r}; choose another")
        request = Request(
            request_id=request_id if request_id is not None else self._free_id(),
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self._eos_token_ids(),
            detokenizer=self.tokenizer.detokenizer() if self.tokenizer is not None else None,
        )
        self.scheduler.add(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Plan, run, read: one prefill chunk or one decode round. Returns what became known, maybe nothing.

        With a launch in flight the outputs are those of the step before. A launch that fails ends its
        requests with finish_reason "error"; the others go on. An exception that leaves a step (Ctrl-C) ends
        those that had left the queue, since what their launch has done is not known, and the next step says
        so.
        """
        self._advance()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _advance(self) -> None:
        """`step`, whose outputs are added to those that nobody has taken yet."""
        self._check_open()
        try:
            plan = self.scheduler.schedule()
            result = self.runner.run(plan)
            outputs = self.scheduler.update(result)
            self._undelivered += outputs
        except BaseException as error:
            self.runner.drop_launches()
            self.scheduler.recover(f"the step was interrupted by {error!r}")
            raise
        for output in outputs:
            if output.finish_reason is not None:
                self._count(output)
        if self._progress is not None and plan is not None and plan.prompt_len > self.config.prefill_chunk:
            self._progress("prefill", plan.start + len(plan.token_ids), plan.prompt_len)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do."""
        return self.scheduler.has_unfinished() or bool(self._undelivered)

    def abort(self, request_id: str) -> None:
        """End a request; its last output, with finish_reason 'abort', comes from the next step.

        Raises ValueError for an id that is not running or waiting.
        """
        self.scheduler.abort(request_id)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Decode all prompts (texts or token ids) to their end; one output each, in order, with all its
        tokens.

        Outputs of other requests come from the next `step`. Raises ValueError before anything is decoded if
        one of the prompts is not valid; whatever is raised, none of them stays behind.
        """
        if isinstance(prompts, str):
            raise ValueError(
                f"prompts must be a list, got the text {reprlib.repr(prompts)}; put it into a list"
            )
        every = (
            [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        )
        if len(every) != len(prompts):
            raise ValueError(
                f"params must be one or as many as prompts, got {len(every)} for {len(prompts)}; match them"
            )
        tokens: dict[str, list[int]] = {}
        texts: dict[str, str] = {}
        last: dict[str, RequestOutput] = {}
        try:
            for index, (prompt, one) in enumerate(zip(prompts, every, strict=True)):
                given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
                # Known here before it is queued: an interrupt may come anywhere.
                request_id = self._free_id()
                tokens[request_id], texts[request_id] = [], ""
                try:
                    self.add_request(params=one, request_id=request_id, **given)
                except ValueError as error:
                    raise ValueError(f"prompts[{index}]: {error}") from None
            while len(last) < len(tokens):
                self._advance()
                for output in self._take(tokens):
                    tokens[output.request_id] += output.new_token_ids
                    texts[output.request_id] += output.new_text
                    if output.finish_reason is not None:
                        last[output.request_id] = output
        except BaseException:
            self.scheduler.forget(tokens)
            self._take(tokens)
            raise
        return [dataclasses.replace(last[i], new_token_ids=tokens[i], new_text=texts[i]) for i in tokens]

    @property
    def is_compiled(self) -> bool:
        """Whether steps run compiled; on a CPU, compile="auto" compiles only what a graph_cache holds."""
        return self.runner.programs.is_compiled

    def stats(self) -> EngineStats:
        """What the engine holds now, and sums over finished requests."""
        pool = self.scheduler.pool
        return EngineStats(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            finished=self._finished,
            blocks_used=pool.num_used,
            blocks_total=pool.num_blocks - 1,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            speculation=self._speculation,
        )

    def close(self) -> None:
        """Wait for the device and end. Requests that are not finished are lost; nothing can be added."""
        self._is_closed = True
        self._undelivered = []
        self.scheduler.forget_all()
        self.runner.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("engine must be open, got one that was closed; make another")

    def _has_id(self, request_id: str) -> bool:
        is_untold = any(output.request_id == request_id for output in self._undelivered)
        return is_untold or self.scheduler.has_id(request_id)

    def _free_id(self) -> str:
        """An id of our own that no caller has taken."""
        while True:
            self._num_requests += 1
            if not self._has_id(request_id := f"request-{self._num_requests}"):
                return request_id

    def _take(self, request_ids: Collection[str]) -> list[RequestOutput]:
        """The outputs of these requests that nobody has taken yet; those of others stay."""
        taken = [output for output in self._undelivered if output.request_id in request_ids]
        self._undelivered = [output for output in self._undelivered if output.request_id not in request_ids]
        return taken

    def _count(self, output: RequestOutput) -> None:
        metrics = output.metrics
        self._finished += 1
        self._prompt_tokens += metrics.prompt_tokens
        self._output_tokens += metrics.output_tokens
        self._speculation = self._speculation.plus(metrics)

    def _eos_token_ids(self) -> frozenset[int]:
        own = frozenset(self.model_config.eos_token_ids)
        return own if self.tokenizer is None else own | frozenset(self.tokenizer.eos_token_ids)

    def _require_tokenizer(self, name: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                f"{name} must be token ids, got text; {self.config.model} has no tokenizer.json, "
                "pass prompt_token_ids"
            )
        return self.tokenizer

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> list[int]:
        try:
            ids = [_as_id(i) for i in token_ids]
        except TypeError as error:
            raise ValueError(
                f"{name} must hold whole numbers, got {reprlib.repr(token_ids)} ({error}); correct them"
            ) from None
        wrong = [i for i in ids if not 0 <= i < self.model_config.vocab_size]
        if wrong:
            raise ValueError(
                f"{name} must lie in 0..{self.model_config.vocab_size - 1}, got {wrong[0]}; "
                "use the ids of this checkpoint's tokenizer"
            )
        return ids


def _as_id(value: Any) -> int:
    """`value` if it is a whole number of any library; raises TypeError for text, booleans and fractions."""
    if isinstance(value, bool):
        raise TypeError("a boolean is no id")
    return operator.index(value)


def _as_chat(messages: Any) -> list[Mapping[str, Any]]:
    is_chat = isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages)
    if not is_chat or isinstance(messages, str):
        raise ValueError(
            f"messages must be a list of mappings, got {reprlib.repr(messages)}; give each a role"
        )
    return list(messages)


def _check_type(name: str, value: object, kind: type, remedy: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {reprlib.repr(value)}; {remedy}")
