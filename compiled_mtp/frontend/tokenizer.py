"""Text to ids and back: a byte-level tokenizer.json, decoding token by token, chat templates. No torch."""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from compiled_mtp.errors import quote
from compiled_mtp.gguf.container import read_container
from compiled_mtp.gguf.tokenizer import is_byte_level, tokenizer_config, tokenizer_json

logger = logging.getLogger(__name__)

_FILE = "tokenizer.json"
_TOKENS = "tokenizer.ggml.tokens"


def has_tokenizer(path: Path) -> bool:
    """Return whether a checkpoint directory, or a GGUF file or its directory, has a tokenizer."""
    if path.suffix != ".gguf":
        return (path / _FILE).is_file()
    return _TOKENS in read_container(path).metadata or (path.parent / _FILE).is_file()


class Tokenizer:
    """The tokenizer and the chat template of a checkpoint directory or of a GGUF file.

    A directory has a tokenizer.json. A GGUF file has a tokenizer in its metadata; if its kind is not known,
    the tokenizer.json in the file's directory is used. json_text: the text of tokenizer.json. added_ids: the
    tokens that it adds to the vocabulary, text -> id. chat_template: a Jinja file that replaces the
    checkpoint's chat template. Raises ValueError if tokenizer.json is missing, unreadable or not byte-level
    (all supported families are byte-level), and for a chat_template that cannot be used.
    """

    def __init__(self, path: str | Path, chat_template: Path | None = None) -> None:
        root = file = Path(path)
        container = read_container(root) if root.suffix == ".gguf" else None
        if container is not None and not is_byte_level(container) and (root.parent / _FILE).is_file():
            root, container = root.parent, None
        if container is None:
            file = root / _FILE
            if not file.is_file():
                raise ValueError(
                    f"model must hold a tokenizer.json, got {root}; download the whole checkpoint"
                )
        text = None if container is None else tokenizer_json(container)
        try:
            self.json_text = file.read_text(encoding="utf-8") if text is None else text
            self._tokenizer = tokenizers.Tokenizer.from_str(self.json_text)
        except Exception as error:  # The Rust library raises plain Exception.
            raise ValueError(
                f"{file} must be a tokenizer, got an error: {error}; download the file again"
            ) from None
        decoder = self._tokenizer.decoder
        kind = None if decoder is None else type(decoder).__name__
        if kind != "ByteLevel":
            raise ValueError(
                f"{file} must decode byte-level tokens, got {kind!r}; use the file that was released "
                "with the checkpoint"
            )
        # A truncation or padding saved in the file would change prompts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.num_ids = max(self._tokenizer.get_vocab_size(), max(added, default=0) + 1)
        self._bytes: dict[int, bytes] = {}
        config = None if container is None else tokenizer_config(container)
        self.chat_template = chat_template
        self._template = ChatTemplate(root, config, chat_template)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens are recognised. Raises ValueError for lone surrogates."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt must be Unicode text, got half a surrogate pair at character {error.start}; fix the "
                "text's encoding"
            ) from None
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the text of a chat, up to where the assistant's answer begins.

        variables: of the template (tools, enable_thinking). Raises ValueError as `ChatTemplate.render`.
        """
        return self._template.render(messages, **variables)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` without special tokens."""
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.add, token_ids)) + detokenizer.flush()

    def detokenizer(self) -> Detokenizer:
        """Return a new decoder for one stream of ids."""
        return Detokenizer(self)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of the eos token that tokenizer_config.json names, () if it names none."""
        eos = self._template.special_tokens.get("eos_token")
        eos_id = None if eos is None else self._tokenizer.token_to_id(eos)
        return () if eos_id is None else (eos_id,)

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with the text `text`, None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def name_of(self, token_id: int) -> str:
        """Return the token of an id as tokenizer.json writes it; "" for an id that it lacks."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token's text; empty for special tokens and ids that the tokenizer lacks."""
        found = self._bytes.get(token_id)
        if found is None:
            token = None if token_id in self.special_ids else self._tokenizer.id_to_token(token_id)
            found = self._bytes[token_id] = b"" if token is None else _to_bytes(token)
        return found


class Detokenizer:
    """Decodes one stream of ids into text that never ends in part of a character.

    The joined texts equal the text of all ids decoded at once. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes, maybe ""."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class ChatTemplate:
    """A checkpoint's chat template: chat_template.jinja, or the one in tokenizer_config.json.

    config: the content of tokenizer_config.json, if it is not read from the file. given: a file that replaces
    the checkpoint's template. Templates render in a sandbox, with the filters and functions that Hugging Face
    gives them. Raises ValueError for unreadable JSON and for an unusable `given`. A template of the
    checkpoint that is missing or broken raises only when a chat is rendered.
    """

    def __init__(self, root: Path, config: dict[str, Any] | None = None, given: Path | None = None) -> None:
        self._root = root
        config = _read_config(root / "tokenizer_config.json") if config is None else config
        # Templates use bos_token, eos_token and so on; a token is a string or an object with `content`.
        self.special_tokens = {
            name: _token_text(name, value)
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        self._template: Template | None = None
        # The template's error, which `render` raises: plain prompts need no template.
        self._fault = ""
        if given is not None:
            self._template = _read_template(given)
            return
        try:
            self._template = self._compile(config)
        except ValueError as error:
            self._fault = str(error)
            logger.warning("chats are refused: %s", self._fault)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the text of `messages` (role and content each) up to where the assistant's answer begins.

        Raises ValueError, with the message's name, for a value that is not a chat and for images, and for
        messages that the template refuses.
        """
        if self._fault:
            raise ValueError(self._fault)
        if self._template is None:
            raise ValueError(
                f"messages must have a chat template, got none in {self._root}; give a Jinja file as "
                "chat_template, or a plain prompt"
            )
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        if not plain:
            raise ValueError("messages must hold a message, got none; add one with role and content")
        scope: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render(scope | self.special_tokens | variables, messages=plain)
        except Exception as error:  # The expressions in a template can raise any error.
            got = str(error) or type(error).__name__
            raise ValueError(
                f"messages must satisfy the checkpoint's chat template, got: {got}; change the messages"
            ) from None

    def _compile(self, config: dict[str, Any]) -> Template | None:
        file = self._root / "chat_template.jinja"
        try:
            source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
            if isinstance(source, list):
                named = {e.get("name"): e.get("template") for e in source if isinstance(e, dict)}
                source = named.get("default")
            return None if source is None else _environment().from_string(source)
        except (TemplateError, TypeError, ValueError, OSError) as error:
            raise ValueError(
                f"chat template of {self._root} must be Jinja, got: {error}; download the file again"
            ) from None


def _read_template(file: Path) -> Template:
    try:
        return _environment().from_string(file.read_text(encoding="utf-8"))
    except (TemplateError, ValueError, OSError) as error:
        raise ValueError(
            f"chat_template must be a Jinja file, got {file}: {type(error).__name__}: {error}; correct it "
            "or leave it out"
        ) from None


class _Generation(Extension):
    """`{% generation %}` marks an assistant's words for training and changes no text."""

    tags = {"generation"}  # noqa: RUF012  jinja2's name and type.

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; an added token is its own text."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


def byte_characters() -> dict[str, int]:
    """Return character -> byte of a byte-level vocabulary.

    Printable bytes of Latin-1 are their own characters; the others follow from U+0100 on. Source: GPT-2's
    encoder (Radford et al., 2019).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = byte_characters()


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    name = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name} must be an object with a role, got {message!r}; add role and content")
    content = message.get("content")
    if isinstance(content, list):
        parts = [_plain_part(f"{name}.content[{i}]", part) for i, part in enumerate(content)]
        # Templates print a list of texts and a text alike; images need the list.
        has_images = any(part["type"] == "image" for part in parts)
        content = parts if has_images else "".join(part["text"] for part in parts)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{name}.content must be text, got {content!r}; give a string")
    # An assistant's message without content may have tool calls.
    plain = {**message, "content": "" if content is None else content}
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        plain["tool_calls"] = [_plain_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return plain


def json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is, None for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _plain_call(name: str, call: Any) -> Any:
    """Return a tool call with its arguments as an object: OpenAI's are text; templates iterate over them."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return call
    # A call of a function without parameters may have empty text.
    parsed = json_object(arguments) if arguments.strip() else {}
    if parsed is None:
        raise ValueError(
            f"{name}.function.arguments must be a JSON object, got {quote(arguments)}; send the arguments "
            "that the model wrote, or an object"
        )
    return {**call, "function": {**(function or {}), "arguments": parsed}}


def _plain_part(name: str, part: Any) -> dict[str, str]:
    """Return a content part as templates read it: a text, or the place of an image."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind == "image":
        return {"type": "image"}
    if kind != "text" or not isinstance(text, str):
        raise ValueError(
            f"{name} must be of type text or image, got {kind!r}; send those, since this version takes no "
            "other media"
        )
    return {"type": "text", "text": text}


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, got an error: {error}; download the file again") from None
    if not isinstance(config, dict):
        raise ValueError(
            f"{file} must hold a JSON object, got {type(config).__name__}; download the file again"
        )
    return config


def _token_text(name: str, value: Any) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(
            f"{name} must be a string or an object with content, got {value!r}; download "
            "tokenizer_config.json again"
        )
    return text


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Replaces Jinja's own filter, which escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
