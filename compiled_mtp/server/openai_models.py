"""What clients of OpenAI's API may send. A field that is not here is refused by name, unless it is null."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from compiled_mtp.server.fields import Body, Ignored, Unread, unread

CacheSalt = Annotated[
    str | None,
    Field(default=None, description="prompts share cached prefixes only with prompts of the same salt"),
]
Priority = Annotated[int | None, Field(default=None, description="lower numbers start first; default: 0")]
# The fields of SamplingParams that completions, chats and responses have under the same names.
COMMON_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "cache_salt",
)
# Those of completions and chats.
SAME_NAMES = (
    *COMMON_NAMES,
    "min_tokens",
    "ignore_eos",
    "include_stop",
    "n",
    "prompt_logprobs",
    "include_drafts",
    "return_routed_experts",
    "bad_words",
    "allowed_token_ids",
    "logprobs_mode",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


class StreamOptions(Body):
    """What a stream carries in addition to its text."""

    include_usage: bool | None = None
    include_obfuscation: Ignored = None
    continuous_usage_stats: Annotated[Any, Unread((False,))] = None


class CommonBody(Body):
    """The fields that completions, chats and responses share; null means not set."""

    model: str = Field(description="one of the names that GET /v1/models lists")
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    cache_salt: CacheSalt = None
    priority: Priority = None
    user: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None


class SamplingBody(CommonBody):
    """The fields that completions and chats share; null means not set."""

    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop: bool | None = None
    n: int | None = Field(default=None, ge=1, description="choices; choice 0 is the same as with n=1")
    stream_options: StreamOptions | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    response_format: dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    include_round: bool | None = Field(
        default=None, description="each chunk of a stream has the numbers of drafted and accepted tokens"
    )
    include_drafts: bool | None = Field(
        default=None, description="choices have their tokens, and the drafts of each of their rounds"
    )
    prompt_logprobs: int | None = Field(
        default=None, description="likeliest tokens reported per position of the prompt; not in streams"
    )
    return_routed_experts: bool | None = Field(
        default=None,
        description="choices have the experts of their tokens, as base64 of int16; not in streams",
    )
    return_token_ids: bool | None = Field(
        default=None, description="choices have their token ids; answers that are no streams the prompt's too"
    )
    store: Ignored = None
    metadata: Ignored = None
    cache_control: Ignored = None
    # Fields of other servers, each with the value that changes nothing.
    best_of: Annotated[Any, Unread((1,))] = None
    use_beam_search: Annotated[Any, Unread((False,))] = None
    length_penalty: Annotated[Any, Unread((1,))] = None
    early_stopping: Annotated[Any, Unread((False,))] = None
    no_repeat_ngram_size: Annotated[Any, Unread((0,))] = None
    typical_p: Annotated[Any, Unread((1,))] = None
    skip_special_tokens: Annotated[Any, Unread((True,))] = None
    spaces_between_special_tokens: Annotated[Any, Unread((True,))] = None
    include_stop_str_in_output: Annotated[Any, Unread((False,))] = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="a text, token ids, or a list of either"
    )
    logprobs: int | None = None
    echo: bool | None = Field(
        default=None,
        description="the text begins with the prompt, and `logprobs` with its tokens'; not in streams",
    )
    suffix: Annotated[Any, Unread(("",))] = None

    @property
    def has_echoed_logprobs(self) -> bool:
        """Whether the answer has log probabilities of the prompt among those of its text."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def wants_no_output(self) -> bool:
        """Whether the request is about its prompt alone, which max_tokens 0 says."""
        return self.max_tokens == 0 and (bool(self.echo) or self.prompt_logprobs is not None)


class FunctionCall(Body):
    """A call that the assistant made."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Body):
    """One entry of an assistant message's tool_calls."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Ignored = None


# input_text and output_text are the Responses API's types of text.
_TEXT_KINDS = ("text", "input_text", "output_text")
# input_image is the Responses API's.
_IMAGE_KINDS = ("image_url", "input_image")


def _as_image_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


def _check_kind(kind: str) -> str:
    if kind not in (*_TEXT_KINDS, *_IMAGE_KINDS):
        raise unread("be text or image_url", "other media are not in this version")
    return kind


class ImageUrl(Body):
    """An image: a data URI in base64, or an address that the operator allows."""

    url: str
    detail: Ignored = None


class ContentPart(Body):
    """A part of a message: a text or an image."""

    type: Annotated[str, AfterValidator(_check_kind)]
    text: str | None = None
    image_url: Annotated[ImageUrl | None, BeforeValidator(_as_image_url)] = None
    detail: Ignored = None
    annotations: Ignored = None
    cache_control: Ignored = None
    logprobs: Ignored = None
    prompt_cache_breakpoint: Ignored = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        is_text = self.type in _TEXT_KINDS
        name, other = ("text", "image_url") if is_text else ("image_url", "text")
        if getattr(self, name) is None:
            raise unread(f"have a field {name}", "add it")
        if getattr(self, other):
            raise unread(f"have no field {other} beside {name}", "make two parts of it")
        return self

    @property
    def is_image(self) -> bool:
        """Whether the part is an image."""
        return self.type in _IMAGE_KINDS

    def to_template(self) -> dict[str, Any]:
        """Return the part as chat templates read it."""
        if not self.is_image or self.image_url is None:
            return {"type": "text", "text": self.text}
        return {"type": "image_url", "image_url": {"url": self.image_url.url}}


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="another name of reasoning_content")
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Ignored = None
    cache_control: Ignored = None
    id: Ignored = None


class Function(Body):
    """A tool's function; `parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function
    cache_control: Ignored = None


class NamedFunction(Body):
    """The name in a tool_choice."""

    name: str


class NamedTool(Body):
    """A tool_choice that names its function."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    echo: Annotated[Any, Unread((False,))] = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Ignored = None
    verbosity: Ignored = None
    prediction: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    modalities: Annotated[Any, Unread((["text"],))] = None
    functions: Annotated[Any, Unread(([],))] = None
    function_call: Annotated[Any, Unread(("none", "auto"))] = None
    add_generation_prompt: Annotated[Any, Unread((True,))] = None
    continue_final_message: Annotated[Any, Unread((False,))] = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class TokenizeBody(Body):
    """POST /tokenize: a text, or a chat to render."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
