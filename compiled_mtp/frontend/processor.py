"""RequestProcessor: turns a caller's input into Requests, or raises an error that names the mistake."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compiled_mtp.errors import check, check_type, quote
from compiled_mtp.frontend.guidance import Guidance
from compiled_mtp.frontend.image_prompts import place_images, prepare_images, split_chat
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.request import PromptImage, Request, SamplingParams
from compiled_mtp.sampling.grammar import Matcher
from compiled_mtp.sampling.parameter_checks import MAX_STOP_IDS, bad_word_ids, only_one_grammar

# Above this many ids, building the trie of a vocabulary delays other requests noticeably.
_LARGE_VOCABULARY = 50_000


class RequestProcessor:
    """Tokenises, validates and makes requests. It has no state of requests: any thread may call it.

    path: the checkpoint's, for error texts. tokenizer: without one, prompts must be token ids.
    max_model_len: the config's bound on the tokens of a request; max_images: on its images.
    """

    def __init__(
        self,
        path: Path,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        max_images: int = 0,
    ) -> None:
        self.path = path
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.max_images = max_images
        own = frozenset(model_config.eos_token_ids)
        self.eos_token_ids = own if tokenizer is None else own | frozenset(tokenizer.eos_token_ids)
        self._guidance = (
            None
            if tokenizer is None
            else Guidance(tokenizer, model_config.family, model_config.vocab_size, self.eos_token_ids)
        )

    def make_request(
        self,
        request_id: str,
        params: SamplingParams | None,
        *,
        prompt: str | None,
        prompt_token_ids: Sequence[int] | None,
        messages: Sequence[Mapping[str, Any]] | None,
        images: Sequence[object] | None = None,
        priority: int = 0,
        continuation: str | Sequence[int] | None = None,
    ) -> list[Request]:
        """Return one Request per choice, with the checkpoint's defaults filled in.

        images: one for each pad in the prompt, in order, or for each content part that holds no image.
        continuation: the output, if it is given instead of drawn. Raises ValueError unless exactly one of
        prompt, prompt_token_ids and messages is given, and for an empty prompt, images that do not fit it or
        cannot be read, a prompt of max_model_len tokens or more, an id or a parameter out of range, and a
        grammar that does not compile.
        """
        given = {"prompt": prompt, "prompt_token_ids": prompt_token_ids, "messages": messages}
        form = _only_one(given)
        check_type("prompt", prompt, str, "pass ids as prompt_token_ids")
        check_type("params", params, SamplingParams, "make one with SamplingParams(...)")
        check_priority(priority)
        params = (params or SamplingParams()).with_defaults(self.model_config.generation_defaults)
        token_ids, placed = self._read_prompt(form, given[form], _as_list(images), params)
        params = self._with_special_stops(params)
        forced_ids = () if continuation is None else self._forced_ids(continuation)
        if forced_ids:
            params = _scored(params, len(forced_ids))
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._check_ids(name, getattr(params, name) or ())
        bad_words = self._encode_bad_words(params)
        guide = self._make_guide(params, token_ids)
        choices = [
            Request(
                request_id=request_id,
                prompt_token_ids=token_ids,
                params=params,
                eos_token_ids=self.eos_token_ids,
                index=index,
                bad_word_ids=bad_words,
                # Each choice compiles its own grammar.
                guide=guide.fork() if guide is not None and index else guide,
                images=placed,
                priority=priority,
                forced_ids=forced_ids,
                **self._decoding(),
            )
            for index in range(params.n)
        ]
        self._check_length(len(token_ids))
        check_num_stop_ids(choices[0])
        return choices

    def _read_prompt(
        self, form: str, prompt: Any, images: list[object], params: SamplingParams
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return a prompt's ids, with a pad for each token of an image, and its images.

        form: "prompt" for a text, "prompt_token_ids" or "messages".
        """
        if form == "messages":
            prompt, images = split_chat(_as_chat(prompt), images)
        prepared = prepare_images(images, self.model_config.vision, self.max_images)
        if form == "prompt_token_ids":
            token_ids = self._check_ids(form, prompt)
        else:
            tokenizer = self._require_tokenizer(form)
            text = prompt if form == "prompt" else self._render(tokenizer, prompt, params)
            # A tokenizer may have more ids than the checkpoint's vocabulary.
            token_ids = self._check_ids(form, tokenizer.encode(text))
        placed: tuple[PromptImage, ...] = ()
        if self.model_config.vision is not None:
            token_ids, placed = place_images(token_ids, prepared, self.model_config.vision)
        if form != "messages" and params.chat_template_kwargs is not None:
            raise ValueError(
                "chat_template_kwargs must come with messages, got "
                f"{quote(params.chat_template_kwargs)}; leave it out, since only messages use the template"
            )
        return token_ids, placed

    def _decoding(self) -> dict[str, Any]:
        """Return the fields of a request that turn its ids into text, none without a tokenizer."""
        if self.tokenizer is None:
            return {}
        return {"detokenizer": self.tokenizer.detokenizer(), "token_bytes": self.tokenizer.token_bytes}

    def warm_up_grammars(self) -> None:
        """Build the trie of a large vocabulary before the first guided request, if llguidance is installed.

        The build holds the interpreter lock for seconds, and no step runs meanwhile. Any thread may call it.
        """
        is_large = self.model_config.vocab_size > _LARGE_VOCABULARY
        if is_large and self._guidance is not None and find_spec("llguidance") is not None:
            self._guidance.warm_up()

    def _render(self, tokenizer: Tokenizer, messages: Any, params: SamplingParams) -> str:
        variables = dict(params.chat_template_kwargs or {})
        if taken := sorted({"messages", "tools"} & variables.keys()):
            raise ValueError(
                f"chat_template_kwargs must not hold {taken[0]}, got {quote(variables[taken[0]])}; "
                f"pass {taken[0]} as a field of its own"
            )
        # Templates test for None where there are no tools.
        return tokenizer.apply_chat_template(messages, **variables, tools=params.tools or None)

    def _forced_ids(self, continuation: str | Sequence[int]) -> tuple[int, ...]:
        """Return the ids of a given output. Raises ValueError for one without tokens."""
        if isinstance(continuation, str):
            continuation = self._require_tokenizer("continuation").encode(continuation)
        ids = tuple(self._check_ids("continuation", continuation))
        check(bool(ids), "continuation", "have at least one token", continuation, "give text or token ids")
        return ids

    def _check_length(self, length: int) -> None:
        most, own = self.model_config.max_position_embeddings, self.max_model_len
        rule = f"be shorter than {most} tokens, the checkpoint's limit"
        check(length < most, "prompt", rule, length, "shorten it")
        narrower = f"be shorter than max_model_len={own} tokens"
        check(length < own, "prompt", narrower, length, "shorten it or raise max_model_len")

    def _encode_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        return bad_word_ids(params.bad_words, self._require_tokenizer("bad_words").encode)

    def _make_guide(self, params: SamplingParams, prompt_token_ids: list[int]) -> Matcher | None:
        if self._guidance is not None:
            return self._guidance.make_matcher(params, prompt_token_ids)
        if (name := only_one_grammar(params.__dict__)) is not None:
            raise ValueError(
                f"{name} must be left out without a tokenizer, got a grammar; {self.path} has no "
                "tokenizer.json, add it"
            )
        return None

    def _with_special_stops(self, params: SamplingParams) -> SamplingParams:
        """Add to stop_token_ids the ids of special tokens that `stop` names, since they have no text."""
        if not params.stop or self.tokenizer is None:
            return params
        special = (self.tokenizer.special_id(stop) for stop in params.stop)
        ids = tuple(i for i in special if i is not None and i < self.model_config.vocab_size)
        return params.model_copy(update={"stop_token_ids": params.stop_token_ids + ids})

    def _require_tokenizer(self, name: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                f"{name} must be token ids, got text; {self.path} has no tokenizer.json, "
                f"pass {'allowed_token_ids' if name == 'bad_words' else 'prompt_token_ids'}"
            )
        return self.tokenizer

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> list[int]:
        if not isinstance(token_ids, Iterable):
            raise ValueError(
                f"{name} must be a list of ids, got {quote(token_ids)}; write [{quote(token_ids)}]"
            )
        try:
            ids = [_as_id(i) for i in token_ids]
        except TypeError as error:
            raise ValueError(
                f"{name} must hold whole numbers, got {quote(token_ids)} ({error}); correct them"
            ) from None
        wrong = [i for i in ids if not 0 <= i < self.model_config.vocab_size]
        if wrong:
            raise ValueError(
                f"{name} must lie in 0..{self.model_config.vocab_size - 1}, got {quote(wrong[0])}; "
                "use the ids of this checkpoint's tokenizer"
            )
        return ids


def check_num_stop_ids(request: Request) -> None:
    """Raise ValueError if min_tokens delays more ids than a slot has room for."""
    if request.params.min_tokens and len(request.stop_ids) > MAX_STOP_IDS:
        raise ValueError(
            f"stop_token_ids must hold at most {MAX_STOP_IDS} ids with the eos ids and special stops where "
            f"min_tokens delays them, got {len(request.stop_ids)}; use stop strings"
        )


def check_priority(priority: object) -> None:
    """Raise ValueError unless `priority` is an integer of at most 31 bits."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**31:
        raise ValueError(
            f"priority must be an integer of at most 31 bits, got {quote(priority)}; lower ones run first"
        )


def _as_id(value: Any) -> int:
    """Return any library's integer as an int. Raises TypeError for text, booleans and fractions."""
    if isinstance(value, bool):
        raise TypeError("a boolean is not an id")
    return operator.index(value)


def _as_list(images: Any) -> list[object]:
    is_list = images is None or (isinstance(images, Sequence) and not isinstance(images, (str, bytes)))
    if not is_list:
        raise ValueError(f"images must be a list, got {quote(images)}; write [image] for one")
    return list(images or ())


def _as_chat(messages: Any) -> list[Mapping[str, Any]]:
    is_chat = isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages)
    if not is_chat or isinstance(messages, str):
        raise ValueError(f"messages must be a list of mappings, got {quote(messages)}; give each a role")
    return list(messages)


def _only_one(given: Mapping[str, object]) -> str:
    """Return the name of the one form of the prompt that is given. Raises ValueError for none or several."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ValueError(
            f"prompt, prompt_token_ids and messages must be given exactly once, got {names}; choose one"
        )
    return names[0]


def _scored(params: SamplingParams, num_tokens: int) -> SamplingParams:
    """Return the parameters of a request whose output of num_tokens tokens is given."""
    check(params.n == 1, "n", "be 1 with a continuation", params.n, "leave it out")
    scored = {"max_tokens": num_tokens, "logprobs": params.logprobs or 0, "logprobs_mode": "both"}
    return params.model_copy(update=scored)
