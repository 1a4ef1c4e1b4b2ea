"""Jobs of `run`, from flags and prompt files: the requests and their results. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from compiled_mtp.errors import escape, quote
from compiled_mtp.request import (
    FinishReason,
    RequestMetrics,
    RequestOutput,
    RoundDrafts,
    SamplingParams,
    derive_seed,
)
from compiled_mtp.sampling.logprobs import TokenLogprob
from compiled_mtp.sampling.sampling_params import is_unicode

# A device (/dev/zero) or a pipe may have no end, and its length is not known before it is read.
_MOST_BYTES = 2**28
_READ_BYTES = 2**16
_PROMPT_KINDS = ("prompt", "messages", "prompt_token_ids")


@dataclass(slots=True)
class Job:
    """One choice of a request: its source, its arguments for `add_request`, and its results.

    `where` names the source in error texts. `prompt` has one of `_PROMPT_KINDS` and maybe `priority` as keys.
    `request` counts the requests, `choice` the choices of one request, `index` all choices; `id` is the
    caller's name.
    """

    where: str
    prompt: dict[str, Any]
    params: SamplingParams
    request: int = 0
    choice: int = 0
    index: int = 0
    id: str | int | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    drafts: list[RoundDrafts] | None = None
    is_written: bool = False

    @property
    def num_images(self) -> int:
        """Return the number of images in its messages."""
        messages = [one for one in self.prompt.get("messages", ()) if isinstance(one, dict)]
        contents = [one["content"] for one in messages if isinstance(one.get("content"), list)]
        parts = [part for content in contents for part in content if isinstance(part, dict)]
        kinds = ("image", "image_url")
        return sum(part.get("type") in kinds or any(kind in part for kind in kinds) for part in parts)

    @property
    def has_begun(self) -> bool:
        """Return whether the job has results: tokens, or an end that is not an abort."""
        return bool(self.token_ids) or self.finish_reason not in (None, "abort")

    def take(self, output: RequestOutput) -> None:
        """Add the output of one step."""
        self.token_ids += output.new_token_ids
        self.text += output.new_text
        self.finish_reason, self.error, self.metrics = output.finish_reason, output.error, output.metrics
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.drafts is not None:
            self.drafts = (self.drafts or []) + output.drafts

    def again(self) -> Job:
        """Return a job that decodes the same choice again, with the seed that was drawn for it."""
        seed = None if self.metrics is None else self.metrics.seed
        # The engine derives the seeds of further choices from the first one's.
        params = SamplingParams(**self.params.model_dump(exclude_unset=True) | {"seed": seed})
        return Job(self.where, self.prompt, params, self.request, self.choice, self.index, self.id)


def jobs_of_texts(texts: Sequence[str], sampling: dict[str, Any], images: Sequence[str] = ()) -> list[Job]:
    """Return the jobs of one request per text; `sampling` is as in `read_jobs`.

    images: paths of images that come before each text; such a prompt goes through the chat template.
    """
    jobs = [
        Job(f"prompt {index}", _prompt_of(text, images), SamplingParams(**_own_fields(sampling, index)))
        for index, text in enumerate(texts)
    ]
    return _with_choices(jobs)


def _prompt_of(text: str, images: Sequence[str]) -> dict[str, Any]:
    if not images:
        return {"prompt": text}
    parts = [{"type": "image", "image": path} for path in images]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


def read_jobs(path: str, sampling: dict[str, Any]) -> list[Job]:
    """Return the jobs of a prompt file; `sampling` holds the defaults of every request's fields.

    A seed in it is the first request's; the others' are derived from it and their position in the file.
    The last line break of a text file is not part of its prompt. Raises ValueError, naming file and line.
    """
    # Checked here, so that a wrong flag is not reported as an error of the file.
    SamplingParams(**sampling)
    text = _read(path)
    if path.endswith(".jsonl"):
        lines = enumerate(text.split("\n"), start=1)
        numbered = [(number, line) for number, line in lines if line.strip()]
        requests = [
            _read_line(f"{path} line {number}", line, _own_fields(sampling, index))
            for index, (number, line) in enumerate(numbered)
        ]
    else:
        text = text.removesuffix("\n").removesuffix("\r")
        requests = [Job(path, {"prompt": text}, SamplingParams(**sampling))] if text else []
    if not requests:
        raise ValueError(f"prompt-file must hold a prompt, got {path}, which is empty; write one into it")
    return _with_choices(requests)


def check_output(path: str, prompt_file: str | None) -> None:
    """Raise ValueError if the file at `path` is the prompt file or cannot be written; does not touch it."""
    file, does_exist = Path(path), os.path.exists(path)
    if does_exist and prompt_file not in (None, "-") and os.path.samefile(path, str(prompt_file)):
        raise ValueError(f"output must not be the prompt file, got {path}; choose another")
    if file.is_dir() or not os.access(file if does_exist else file.parent, os.W_OK):
        raise ValueError(f"output must be a file that can be written, got {path}; choose another path")


def _read(path: str) -> str:
    try:
        if path != "-":
            with Path(path).open("rb") as stream:
                content = _read_bounded(stream, path)
        elif sys.stdin is None:
            raise ValueError("prompt-file must not be - with standard input closed, got -; name a file")
        else:
            content = _read_bounded(sys.stdin.buffer, path)
        # Not opened as text: the model must see the file's own line breaks.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt-file must be UTF-8 text, got {path}: {error}; convert it") from None
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"prompt-file must be readable, got {path}: {reason}; check the path") from None


def _read_bounded(stream: BinaryIO, path: str) -> bytes:
    """Return all bytes of `stream`; small reads, since one of _MOST_BYTES allocates as much for any file."""
    content = bytearray()
    while len(content) <= _MOST_BYTES and (part := stream.read(_READ_BYTES)):
        content += part
    if len(content) > _MOST_BYTES:
        raise ValueError(f"prompt-file must hold at most {_MOST_BYTES} bytes, got more in {path}; split it")
    return bytes(content)


def _with_choices(requests: Sequence[Job]) -> list[Job]:
    """Return a numbered job for each choice of each request."""
    jobs: list[Job] = []
    for index, job in enumerate(requests):
        for choice in range(job.params.n):
            where = job.where if job.params.n == 1 else f"{job.where} choice {choice}"
            jobs.append(Job(where, job.prompt, job.params, index, choice, len(jobs), job.id))
    return jobs


def _own_fields(sampling: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the fields of request `index`, with its own seed: one seed would give all the same noise."""
    seed = SamplingParams(**sampling).seed
    return sampling if seed is None else sampling | {"seed": derive_seed(seed, index)}


def _read_line(where: str, line: str, sampling: dict[str, Any]) -> Job:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be a JSON object, got an error: {error}; fix the line") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where} must be a JSON object, got {escape(line.strip()[:40])}; write {{...}}")
    prompt = {kind: fields.pop(kind) for kind in _PROMPT_KINDS if kind in fields}
    if len(prompt) != 1:
        raise ValueError(f"{where} must have one of {', '.join(_PROMPT_KINDS)}, got {len(prompt)}; give one")
    ((kind, value),) = prompt.items()
    wanted = str if kind == "prompt" else list
    is_ids = kind == "prompt_token_ids"
    if not isinstance(value, wanted) or (is_ids and not all(type(one) is int for one in value)):
        rule = {"prompt": "a string", "messages": "a list of messages"}.get(kind, "a list of integers")
        raise ValueError(f"{where}: {kind} must be {rule}, got {quote(str(value)[:40])}; change it")
    if "priority" in fields:
        prompt["priority"] = fields.pop("priority")
    name = fields.pop("id", None)
    if name is not None and type(name) not in (str, int):
        raise ValueError(f"{where}: id must be a string or an integer, got {quote(name)}; change it")
    if isinstance(name, str) and not is_unicode(name):
        # The id is written with the result, as UTF-8.
        raise ValueError(f"{where}: id must be Unicode text, got {quote(name)}; leave lone surrogates out")
    try:
        return Job(where, prompt, SamplingParams(**(sampling | fields)), id=name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
