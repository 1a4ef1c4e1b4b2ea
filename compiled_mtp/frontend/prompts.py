"""Arguments and results of `Engine.generate`: many prompts of any kind, one output per choice. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from compiled_mtp.errors import check, check_type, quote
from compiled_mtp.request import RequestOutput, SamplingParams

Chat = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Chat
Continuation = str | Sequence[int]
Params = SamplingParams | Iterable[SamplingParams] | None


def kind_of(prompt: Prompt) -> str:
    """Return the name of the add_request argument that takes `prompt`. Raises ValueError."""
    if isinstance(prompt, str):
        return "prompt"
    if isinstance(prompt, Mapping):
        raise ValueError(f"prompt must be text, ids or a chat, got {quote(prompt)}; give a chat as messages")
    if not isinstance(prompt, Iterable):
        raise ValueError(
            f"prompt must be text, ids or a chat, got {quote(prompt)}; give a list for each prompt"
        )
    return "messages" if _is_chat(prompt) else "prompt_token_ids"


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def as_prompts(prompts: Iterable[Prompt] | None, messages: Any) -> list[Prompt]:
    """Return the prompts of a call of `generate` as a list. Raises ValueError."""
    if (prompts is None) == (messages is None):
        given = "neither" if prompts is None else "both"
        raise ValueError(f"prompts and messages must be given exactly once, got {given}; choose one")
    if isinstance(prompts, str):
        return [prompts]
    if prompts is None:
        return _as_chats(messages)
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping):
        raise ValueError(
            f"prompts must be a list or a generator, got {quote(prompts)}; put the prompts into a list"
        )
    prompts = list(prompts)
    if prompts and all(isinstance(one, Integral) for one in prompts):
        ids = quote(prompts)
        raise ValueError(
            f"prompts must be a list of prompts, got ids: {ids}; write [{ids}] for one prompt of ids"
        )
    return prompts


def _as_chats(messages: Any) -> list[Prompt]:
    is_listed = isinstance(messages, Iterable) and not isinstance(messages, str | Mapping)
    chats: list[Any] = list(messages) if is_listed and not _is_chat(messages) else [messages]
    for chat in chats:
        if not _is_chat(chat):
            raise ValueError(
                f"messages must be a chat or a list of chats, got {quote(chat)}; give each message a role"
            )
    return chats


def as_continuations(prompts: Sequence[Prompt], continuations: Any) -> list[Continuation]:
    """Return the continuations of a call of `score` as a list. Raises ValueError."""
    every = [continuations] if isinstance(continuations, str) else continuations
    if not isinstance(every, Iterable) or isinstance(every, Mapping):
        raise ValueError(f"continuations must be a list, got {quote(every)}; give one for each prompt")
    every = list(every)
    if len(every) != len(prompts):
        raise ValueError(
            f"continuations must be as many as prompts, got {len(every)} for {len(prompts)}; match them"
        )
    for index, one in enumerate(every):
        # Without this a request of None would draw its tokens.
        rule, remedy = "be a text or token ids", "give one for each prompt"
        check(one is not None, f"continuations[{index}]", rule, one, remedy)
    return every


def match_params(prompts: Sequence[Prompt], params: Params) -> Sequence[SamplingParams | None]:
    """Return the parameters of each prompt. Raises ValueError."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if not isinstance(params, Iterable) or isinstance(params, Mapping | str):
        raise ValueError(
            f"params must be SamplingParams or a list, got {quote(params)}; pass SamplingParams(...)"
        )
    params = list(params)
    for one in params:
        check_type("params", one, SamplingParams, "make each with SamplingParams(...)")
    if len(params) != len(prompts):
        raise ValueError(
            f"params must be one or as many as prompts, got {len(params)} for {len(prompts)}; match them"
        )
    return params


def join(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Return a choice's last output with the tokens, texts, logprobs and drafts of all its outputs."""
    tokens = [token_id for output in outputs for token_id in output.new_token_ids]
    text = "".join(output.new_text for output in outputs)
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    has_entries = any(output.logprobs is not None for output in outputs)
    rounds = [one for output in outputs for one in output.drafts or ()]
    has_rounds = any(output.drafts is not None for output in outputs)
    of_prompt = next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None)
    return outputs[-1]._replace(
        new_token_ids=tokens,
        new_text=text,
        logprobs=entries if has_entries else None,
        prompt_logprobs=of_prompt,
        drafts=rounds if has_rounds else None,
    )
