"""Engine: requests in, tokens out. The order of a step and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compiled_mtp.config import EngineConfig, ModelConfig
from compiled_mtp.models.weights import has_mtp
from compiled_mtp.request import Request, RequestOutput, SamplingParams
from compiled_mtp.runner import Progress, Runner
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.spec.stats import SpeculationStats
from compiled_mtp.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine was created, and what it holds now. Blocks are KV blocks of block_size
    tokens."""

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
        self.model_config = ModelConfig.from_hf(path)
        if self.config.mtp_step and not has_mtp(path):
            raise ValueError(
                f"mtp_step must be 0 for a checkpoint without mtp.* tensors, got {self.config.mtp_step}; "
                f"{path} has none, pass mtp_step=0 for plain decoding"
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
        given = {"prompt": prompt, "prompt_token_ids": prompt_token_ids, "messages": messages}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(
                f"prompt, prompt_token_ids and messages must be given exactly once, got {names}; choose one"
            )
        params = (params or SamplingParams()).with_defaults(self.model_config.generation_defaults)
        if params.seed is None and self.config.seed is not None:
            params = params.model_copy(update={"seed": self.config.seed})
        if prompt_token_ids is not None:
            token_ids = self._check_ids("prompt_token_ids", prompt_token_ids)
        else:
            tokenizer = self._require_tokenizer(names[0])
            text = prompt if prompt is not None else tokenizer.apply_chat_template(list(messages or ()))
            token_ids = tokenizer.encode(text)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._num_requests += 1
        request = Request(
            request_id=request_id if request_id is not None else f"request-{self._num_requests}",
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self._eos_token_ids(),
            detokenizer=self.tokenizer.detokenizer() if self.tokenizer is not None else None,
        )
        self.scheduler.add(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Plan, run, read: one prefill chunk or one decode round. Returns what became known, maybe nothing.

        With a launch in flight the outputs are those of the step before.
        """
        plan = self.scheduler.schedule()
        result = self.runner.run(plan)
        if self._progress is not None and plan is not None and plan.prompt_len > self.config.prefill_chunk:
            self._progress("prefill", plan.start + len(plan.token_ids), plan.prompt_len)
        outputs = self.scheduler.update(result)
        for output in outputs:
            if output.finish_reason is not None:
                self._count(output)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do."""
        return self.scheduler.has_unfinished()

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

        Raises ValueError before anything is decoded if one of them is not valid.
        """
        every = (
            [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        )
        if len(every) != len(prompts):
            raise ValueError(
                f"params must be one or as many as prompts, got {len(every)} for {len(prompts)}; match them"
            )
        ids: list[str] = []
        try:
            for prompt, one in zip(prompts, every, strict=True):
                given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
                ids.append(self.add_request(params=one, **given))
        except ValueError:
            for request_id in ids:
                self.abort(request_id)
            raise
        tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
        texts: dict[str, str] = dict.fromkeys(ids, "")
        last: dict[str, RequestOutput] = {}
        while len(last) < len(ids):
            for output in self.step():
                if output.request_id not in tokens:
                    continue
                tokens[output.request_id] += output.new_token_ids
                texts[output.request_id] += output.new_text
                if output.finish_reason is not None:
                    last[output.request_id] = output
        return [dataclasses.replace(last[i], new_token_ids=tokens[i], new_text=texts[i]) for i in ids]

    @property
    def is_compiled(self) -> bool:
        """Whether steps run compiled; on a CPU, compile="auto" compiles only what a graph_cache holds."""
        return self.runner.programs.mode is not None

    def stats(self) -> EngineStats:
        """Counts since the engine was created, and what it holds now."""
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
        """Wait for the device. Requests that are not finished are lost."""
        self.runner.close()

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

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> list[int]:
        ids = [int(i) for i in token_ids]
        wrong = [i for i in ids if not 0 <= i < self.model_config.vocab_size]
        if wrong:
            raise ValueError(
                f"{name} must lie in 0..{self.model_config.vocab_size - 1}, got {wrong[0]}; "
                "use the ids of this checkpoint's tokenizer"
            )
        return ids
