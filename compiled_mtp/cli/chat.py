"""`compiled-mtp chat`: a conversation in the terminal; the model sees all of it at every turn.

Answers go to standard output as they are decoded, with the reasoning dimmed in a terminal; everything else
goes to standard error.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from compiled_mtp.config import EngineConfig
from compiled_mtp.frontend.image_prompts import prepare_images
from compiled_mtp.frontend.reasoning import find_reasoning
from compiled_mtp.request import RequestOutput, SamplingParams, derive_seed
from compiled_mtp.server.tool_calls import Content, OutputParser, Reasoning
from compiled_mtp.terminal.console import (
    EXIT_OK,
    Interrupts,
    check_stdout,
    run_command,
    say,
    start_engine,
    write_text,
)
from compiled_mtp.terminal.flags import COMMON_ENGINE, COMMON_SAMPLING, Parser, add_fields, given
from compiled_mtp.terminal.signals import leaving
from compiled_mtp.vision.images import PreparedImage

# A command imports these modules later, since they import torch.
if TYPE_CHECKING:
    from compiled_mtp.engine import Engine

_HELP = (
    "/exit ends the chat, /clear starts a new one, /image FILE adds an image to the next message, Ctrl-C "
    "ends an answer"
)
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# Characters that begin an escape sequence: ESC, and C1 controls, each of which some terminals read as ESC and
# a second character.
_ESCAPES = dict.fromkeys((0x1B, *range(0x80, 0xA0)), "\N{SYMBOL FOR ESCAPE}")
# Fields of SamplingParams that a chat does not use.
_SKIPPED = ("n", "logprobs", "logprobs_mode", "prompt_logprobs", "include_drafts", "tools", "tool_choice")


def main(argv: Sequence[str] | None = None) -> int:
    """Talk until /exit or the end of standard input; return the exit code.

    0: done. 2: a flag or the checkpoint is wrong; one line on standard error says what to do. 143: SIGTERM.
    """
    return run_command(lambda interrupts: _chat(make_parser().read(argv), interrupts))


def make_parser() -> Parser:
    """Return the parser: a flag for each field of EngineConfig, and of SamplingParams that a chat uses."""
    parser = Parser(
        prog="compiled-mtp chat",
        usage="%(prog)s [flags]",
        description=f"Talk with a checkpoint that has a chat template: {_HELP}.",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="system message at the beginning of the conversation"
    )
    add_fields(parser, "sampling", SamplingParams, skip=_SKIPPED, common=COMMON_SAMPLING)
    parser.describe("--max-tokens", "most tokens of an answer; default: the room left in the context")
    skip = SamplingParams.model_fields
    add_fields(parser, "engine", EngineConfig, skip=skip, common=COMMON_ENGINE)
    return parser


def _chat(flags: dict[str, Any], interrupts: Interrupts) -> int:
    sampling = given(flags, SamplingParams)
    config = EngineConfig(**given(flags, EngineConfig, skip=SamplingParams.model_fields))
    stdout = check_stdout()
    if sys.stdin is None:
        raise ValueError("standard input must be open for a chat, got a closed one; use compiled-mtp run")
    if isinstance(sys.stdin, io.TextIOWrapper):
        # In every locale: a message that is not UTF-8 is then refused, and the chat goes on.
        sys.stdin.reconfigure(errors="surrogateescape")
    with leaving():
        from compiled_mtp.frontend.checkpoint import open_frontend

    frontend = open_frontend(config)
    params = SamplingParams(**({"max_tokens": frontend.max_model_len} | sampling))
    system = [] if flags["system"] is None else [{"role": "system", "content": flags["system"]}]
    probe = [*system, {"role": "user", "content": "x"}]
    frontend.make_request("", params, prompt=None, prompt_token_ids=None, messages=probe)
    with start_engine(config, frontend) as engine:
        conversation = Conversation(engine, params, system, stdout, interrupts)
        if sys.stdin.isatty():
            say(_HELP)
            with contextlib.suppress(ImportError):
                # Importing readline lets the user edit a line.
                import_module("readline")
        while (line := _read_line(interrupts)) is not None:
            line = line.removesuffix("\n")
            words = line.split()
            if words == ["/exit"]:
                break
            if words == ["/clear"]:
                conversation.clear()
            elif words == ["/help"]:
                say(_HELP)
            elif words[:1] == ["/image"]:
                # A path may have blanks.
                conversation.show(line.strip().removeprefix("/image").strip())
            elif words:
                # For the whole answer: a Ctrl-C at its last word must not end the session.
                with interrupts.held():
                    conversation.answer(line)
            if interrupts.is_terminated:
                return interrupts.exit_code
    return EXIT_OK


def _read_line(interrupts: Interrupts) -> str | None:
    """Return the next line of standard input, None at its end."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            if is_terminal and sys.stdout.isatty():
                return input("> ")
            if is_terminal:
                # `input` would write the prompt to standard output, which is no terminal.
                print("> ", end="", file=sys.stderr, flush=True)
            return sys.stdin.readline() or None
        except EOFError:
            say("")
            return None
        except KeyboardInterrupt:
            if interrupts.is_terminated or not is_terminal:
                raise
            say("\n/exit or Ctrl-D ends the chat")


class Conversation:
    """The messages so far, and an engine that answers them."""

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        system: list[dict[str, str]],
        stdout: TextIO,
        interrupts: Interrupts,
    ) -> None:
        # A chat template, which `_chat` has checked, comes with a tokenizer.
        assert engine.tokenizer is not None
        self._engine, self._tokenizer = engine, engine.tokenizer
        self._params, self._system = params, system
        self._stdout, self._interrupts = stdout, interrupts
        self._messages: list[dict[str, Any]] = [*system]
        # Images that come with the next message.
        self._images: list[PreparedImage] = []
        self._num_turns = 0
        self._reasoning = find_reasoning(self._tokenizer)

    def clear(self) -> None:
        """Forget all but the system message."""
        self._messages, self._images = [*self._system], []

    def show(self, path: str) -> None:
        """Send the image in the file `path` with the next message; report one that cannot be sent."""
        frontend, most = self._engine.frontend, self._engine.frontend.max_images
        if not path:
            say("error: /image must come with a file; write /image FILE")
            return
        if most and self._num_images >= most:
            # A chat repeats its images with every message.
            say(f"error: images of a chat must be at most {most} (max_images), got one more; write /clear")
            return
        try:
            # A dropped file's path comes in quotes; no shell has read it.
            file = Path(path.strip("'\"")).expanduser()
            (image,) = prepare_images([file], frontend.model_config.vision, most)
        except ValueError as error:
            say(f"error: {error}")
            return
        self._images.append(image)
        say(f"[image of {image.rows * image.columns} tokens; write a message to it]")

    def answer(self, text: str) -> None:
        """Write the answer to `text` as it is decoded; add both to the conversation.

        Interrupts must be held; the text before a Ctrl-C is an answer too. A message that cannot be answered,
        for example because the context has no room for it, is reported and dropped.
        """
        messages = [*self._messages, {"role": "user", "content": self._content_of(text)}]
        reply = Reply(self._stdout)
        try:
            parser = self._make_parser(messages)
            last = self._decode(messages, parser, reply)
        except ValueError as error:
            say(f"error: {error}; /clear makes room")
            return
        reply.end()
        self._images = []
        if reply.content:
            thought = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
            self._messages = [*messages, {"role": "assistant", "content": reply.content, **thought}]
        say(_describe(last))

    @property
    def _num_images(self) -> int:
        contents = [message["content"] for message in self._messages]
        sent = sum(len(content) - 1 for content in contents if isinstance(content, list))
        return sent + len(self._images)

    def _content_of(self, text: str) -> Any:
        parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in self._images]
        return [*parts, {"type": "text", "text": text}] if parts else text

    def _make_parser(self, messages: list[dict[str, Any]]) -> OutputParser:
        if self._reasoning is None:
            return OutputParser()
        variables = self._params.chat_template_kwargs or {}
        prompt = self._tokenizer.encode(self._tokenizer.apply_chat_template(messages, **variables))
        return OutputParser(has_reasoning=True, is_thinking=self._reasoning.is_open(prompt))

    def _decode(
        self, messages: list[dict[str, Any]], parser: OutputParser, reply: Reply
    ) -> RequestOutput | None:
        """Decode until the end or an interrupt; return the last output if there was one."""
        params, last = self._params, None
        if params.seed is not None:
            # With the same seed every turn would draw with the same noise.
            params = params.model_copy(update={"seed": derive_seed(params.seed, self._num_turns)})
        self._num_turns += 1
        stream = self._engine.stream(messages=messages, params=params)
        # A second Ctrl-C, for example in a long step, raises.
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(stream):
            for last in stream:
                reply.add(parser.add(last.new_text, last.finish_reason is not None))
                if self._interrupts.is_asked:
                    break
        if last is None or last.finish_reason is None:
            reply.add(parser.add("", True))
        return last


class Reply:
    """Writes one answer: the model's reasoning, then its content."""

    def __init__(self, stdout: TextIO) -> None:
        self.reasoning = self.content = ""
        self._stdout, self._is_terminal = stdout, stdout.isatty()

    def add(self, deltas: Sequence[object]) -> None:
        """Write more deltas of the answer."""
        for delta in deltas:
            if isinstance(delta, Reasoning):
                self._write(delta.text, _DIM if not self.reasoning else "")
                self.reasoning += delta.text
            elif isinstance(delta, Content):
                self._write(delta.text, f"{_PLAIN}\n\n" if self.reasoning and not self.content else "")
                self.content += delta.text

    def end(self) -> None:
        """Write the line break after the answer."""
        self._write("\n", _PLAIN if self.reasoning and not self.content else "")

    def _write(self, text: str, before: str) -> None:
        if self._is_terminal:
            # The terminal must show a model's escape sequences, not obey them.
            text = text.translate(_ESCAPES)
        else:
            before = before.replace(_DIM, "").replace(_PLAIN, "")
        write_text(self._stdout, before + text)


def _describe(output: RequestOutput | None) -> str:
    """Return the line below an answer: its tokens, speed, tokens per round, and why it ended early."""
    if output is None:
        return "[interrupted]"
    metrics = output.metrics
    texts = [f"{metrics.output_tokens} tokens", f"{metrics.output_tokens / metrics.total_s:.1f} tokens/s"]
    if metrics.rounds:
        texts.append(f"{(metrics.output_tokens - 1) / metrics.rounds:.2f} new tokens per round")
    if output.finish_reason != "stop":
        reasons = {None: "interrupted", "length": "cut at max_tokens or the end of the context"}
        texts.append(output.error or reasons.get(output.finish_reason) or str(output.finish_reason))
    return f"[{', '.join(texts)}]"
