"""What clients may send to /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from compiled_mtp.server.fields import Body, Ignored, Refused, Unread, unread
from compiled_mtp.server.openai_models import CommonBody, ContentPart

_TOOLS = ("function", "namespace", "web_search", "web_search_preview")
_KINDS = ("message", "function_call", "function_call_output", "reasoning")


class RefusalPart(Body):
    """A refusal, which another model gave as its answer."""

    type: Literal["refusal"]
    refusal: str


def _kind_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


# Tags in brackets do not count as names of fields in the paths of errors.
_Part = Annotated[
    Annotated[ContentPart, Tag("[text]")] | Annotated[RefusalPart, Tag("[refusal]")],
    Discriminator(lambda part: "[refusal]" if _kind_of(part) == "refusal" else "[text]"),
]


class MessageItem(Body):
    """A message; `type` may be left out."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class CallItem(Body):
    """A call that the assistant made; `arguments` is the text of a JSON object."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None
    namespace: str | None = None


class CallOutputItem(Body):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ContentPart]
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None
    name: Ignored = None
    namespace: Ignored = None


class ReasoningText(Body):
    """A part of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    """Reasoning of the assistant; a summary stands for it if it has no content."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    id: Ignored = None
    status: Ignored = None
    encrypted_content: Ignored = None


def _check_kind(value: Any, kinds: tuple[str | None, ...], rule: str, remedy: str) -> Any:
    """Return `value`. Raises the error of `unread` for an object of a type that is not in `kinds`."""
    if isinstance(value, dict) and value.get("type") not in kinds:
        raise unread(rule, remedy)
    return value


Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CallOutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")],
    Discriminator(lambda item: f"[{_kind_of(item) or 'message'}]"),
    BeforeValidator(
        lambda item: _check_kind(
            item,
            (*_KINDS, None),
            f"be an item of type {', '.join(_KINDS)}",
            "send items themselves, not references; the service runs no tools of its own",
        )
    ),
]


class FunctionTool(Body):
    """A tool that the model may call; `parameters` is a JSON schema."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Ignored = None
    output_schema: Ignored = None
    cache_control: Ignored = None
    defer_loading: Annotated[Any, Unread((False,))] = None
    allowed_callers: Annotated[Any, Unread((["direct"],))] = None


class NamespaceTool(Body):
    """Tools whose names are unique together with the name of their namespace."""

    type: Literal["namespace"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    tools: list[FunctionTool]


def full_name(namespace: str | None, name: str) -> str:
    """Return the name of a function as the model sees it."""
    return name if namespace is None else f"{namespace}.{name}"


class SearchTool(Body):
    """A web search, which agents add to every request; the model is not offered it."""

    type: Literal["web_search", "web_search_preview"]
    external_web_access: Ignored = None
    filters: Ignored = None
    search_context_size: Ignored = None
    search_content_types: Ignored = None
    user_location: Ignored = None


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("[function]")]
    | Annotated[NamespaceTool, Tag("[namespace]")]
    | Annotated[SearchTool, Tag("[web_search]")],
    Discriminator(lambda tool: f"[{str(_kind_of(tool)).removesuffix('_preview')}]"),
    BeforeValidator(
        lambda tool: _check_kind(
            tool,
            _TOOLS,
            f"be a tool of type {', '.join(_TOOLS)}",
            "leave it out; the service runs no tools of its own",
        )
    ),
]


class NamedFunction(Body):
    """A tool_choice that names its function."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The form of the answer's text; `schema` belongs to json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    description: Ignored = None
    strict: Ignored = None


class TextConfig(Body):
    """What the answer's text looks like; verbosity has no effect."""

    format: TextFormat | None = None
    verbosity: Ignored = None


class ReasoningConfig(Body):
    """Whether the model thinks: effort none turns it off, any other effort turns it on.

    summary: the reasoning comes as the summary of its item, in full, instead of as its content.
    """

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Ignored = None
    context: Ignored = None
    mode: Ignored = None


def _check_include(names: list[str]) -> list[str]:
    if "message.output_text.logprobs" in names:
        remedy = "ask /v1/chat/completions for log probabilities"
        raise unread("not hold message.output_text.logprobs", remedy)
    return names


class ResponsesBody(CommonBody):
    """POST /v1/responses; null means not set."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = Field(default=None, description="a system message before all others")
    previous_response_id: str | None = Field(
        default=None, description="a stored answer whose conversation this one continues"
    )
    store: bool | None = Field(
        default=None, description="false: the answer cannot be continued or read again"
    )
    tools: list[AnyTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    # Other names ask for parts of items that this service never makes.
    include: Annotated[list[str], AfterValidator(_check_include)] | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: Annotated[Any, Unread((False,))] = None
    truncation: Annotated[Any, Unread(("disabled",))] = None
    top_logprobs: Annotated[Any, Unread((0,))] = None
    context_management: Annotated[Any, Unread(([],))] = None
    conversation: Annotated[Any, Refused("continue an answer with previous_response_id")] = None
    prompt: Annotated[Any, Refused("send the prompt's text as input")] = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    stream_options: Ignored = None
    max_tool_calls: Ignored = None
    client_metadata: Ignored = None
