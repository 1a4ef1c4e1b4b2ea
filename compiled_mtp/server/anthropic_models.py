"""What clients of Anthropic's API may send. A field that is not here is refused by name unless it is null."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from compiled_mtp.server.fields import Body, Ignored, Unread
from compiled_mtp.server.openai_models import CacheSalt, Priority


class TextBlock(Body):
    """Text, in a message or as a part of the system prompt."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class Base64Source(Body):
    """The bytes of an image's file, in base64."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(Body):
    """The address of an image, if the operator allows it."""

    type: Literal["url"]
    url: str


class ImageBlock(Body):
    """An image of the user, or of a tool's result."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: Ignored = None

    def to_template(self) -> dict[str, Any]:
        """Return the image as chat templates read it."""
        source = self.source
        url = source.url if isinstance(source, UrlSource) else f"data:image/*;base64,{source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


class ThinkingBlock(Body):
    """Reasoning of the assistant; signatures are not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class ToolUseBlock(Body):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None


class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = None
    is_error: Ignored = None
    cache_control: Ignored = None


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class InputMessage(Body):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Body):
    """A tool that the model may call; input_schema is a JSON schema."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: Ignored = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    defer_loading: Annotated[Any, Unread((False,))] = None
    input_examples: Annotated[Any, Unread(([],))] = None
    allowed_callers: Annotated[Any, Unread((["direct"],))] = None


class ToolChoice(Body):
    """Whether the model may, must or must not call a tool, and which one."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks before it answers; budget_tokens and display have no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputFormat(Body):
    """A JSON schema of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The answer's form; effort has no effect."""

    format: OutputFormat | None = None
    effort: Ignored = None


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[InputMessage] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Ignored = None
    context_management: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
    speed: Annotated[Any, Unread(("standard",))] = None
    mcp_servers: Annotated[Any, Unread(([],))] = None


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    cache_salt: CacheSalt = None
    priority: Priority = None
    metadata: Ignored = None
    service_tier: Ignored = None
    diagnostics: Ignored = None
