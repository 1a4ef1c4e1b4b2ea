"""Starts the server from its config, and ends it: SIGTERM and Ctrl-C let open requests finish.

`compiled-mtp serve --help` lists the flags. Wrong flags and keys, a busy port and a checkpoint without a
tokenizer are refused before the weights are loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from compiled_mtp.async_engine import AsyncEngine, SteppedEngine
from compiled_mtp.config import EngineConfig, Torchrun
from compiled_mtp.frontend.hub import is_repository
from compiled_mtp.frontend.reasoning import find_reasoning
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.model_config import VisionConfig
from compiled_mtp.server.app import create_app
from compiled_mtp.server.config import ServerConfig
from compiled_mtp.server.generation import ServedEngine, Service
from compiled_mtp.server.interpreter import settle_interpreter
from compiled_mtp.server.log import start_log
from compiled_mtp.server.media import MediaLoader
from compiled_mtp.server.metrics import Metrics
from compiled_mtp.server.prompt_worker import Limits
from compiled_mtp.server.prompts import PromptPool
from compiled_mtp.server.tool_calls import CallForm
from compiled_mtp.terminal.console import EXIT_OK, Interrupts, run_command
from compiled_mtp.terminal.flags import COMMON_ENGINE, Parser, add_fields, given
from compiled_mtp.terminal.signals import handling, leaving

if TYPE_CHECKING:  # Its module imports torch.
    from compiled_mtp.frontend.processor import RequestProcessor

logger = logging.getLogger("compiled_mtp.server")

# Not flags: other users of the machine can read them.
_SECRET = ("api_key",)
# The flags of ServerConfig that --help shows.
_COMMON = (
    "host",
    "port",
    "served_model_name",
    "api_key_file",
    "allow_anyone",
    "allowed_hosts",
    "allowed_origins",
    "max_open",
    "keep_alive_s",
    "drain_timeout_s",
    "log_level",
    "log_format",
    "log_prompts",
)
_PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def make_service(
    engine: SteppedEngine,
    tokenizer: Tokenizer,
    model: Path,
    max_model_len: int,
    config: ServerConfig,
    frontend: RequestProcessor | None = None,
) -> Service:
    """Return the service over `engine` and the tokenizer of `model`; starts the engine's stepping thread.

    frontend: the engine's, for the images that it takes.
    """
    metrics = Metrics()
    metrics.set_stats(engine.stats())
    stepped = AsyncEngine(
        engine,
        max_open=config.max_open,
        max_image_bytes=config.max_image_bytes,
        stream_buffer=config.stream_buffer,
        step_timeout_s=config.step_timeout_s,
        observer=metrics,
    )
    images = (frontend.model_config.vision, frontend.max_images) if frontend is not None else (None, 0)
    return assemble_service(stepped, metrics, tokenizer, model, max_model_len, config, images)


def assemble_service(
    engine: ServedEngine,
    metrics: Metrics,
    tokenizer: Tokenizer,
    model: Path,
    max_model_len: int,
    config: ServerConfig,
    images: tuple[VisionConfig | None, int] = (None, 0),
) -> Service:
    """Return the service over an engine that runs already; `metrics` counts its outputs.

    images: the tower for which they are prepared, and the most of a request.
    """
    return Service(
        engine=engine,
        prompts=PromptPool(
            model,
            num_workers=config.prompt_workers,
            timeout_s=config.prompt_timeout_s,
            limits=Limits(config.max_prompt_chars, *images),
            max_waiting=config.max_open,
            chat_template=tokenizer.chat_template,
        ),
        media=MediaLoader(config, images[1]),
        tokenizer=tokenizer,
        config=config,
        names=config.served_model_name or (model.resolve().name,),
        max_model_len=max_model_len,
        max_images=images[1],
        call_form=find_call_form(tokenizer),
        reasoning=find_reasoning(tokenizer),
        metrics=metrics,
    )


def name_model(config: ServerConfig, engine_config: EngineConfig) -> ServerConfig:
    """Return `config` with the Hub repository as the model's name, if the model is one and no name is set."""
    if not is_repository(engine_config.model) or config.served_model_name:
        return config
    # A repository's local directory is named after a commit.
    return config.model_copy(update={"served_model_name": (engine_config.model.as_posix(),)})


def find_call_form(tokenizer: Tokenizer) -> CallForm | None:
    """Return the form in which the chat template asks for calls, None if it takes no tools."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=[_PROBE])
    except ValueError:
        return None
    if "probe" not in text or "<tool_call>" not in text:
        return None
    return "xml" if "<function=" in text else "json"


class HttpProtocol(H11Protocol):
    """uvicorn's connection with a deadline for headers and the methods that streams need (sse.Connection)."""

    header_timeout_s = 10.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first headers."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        """Stop the clock when the headers are complete; a later request's first byte starts it again."""
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._start_clock()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def write(self, body: bytes) -> bool:
        """Send a part of an answer of unknown length; return False if the connection is full or closing.

        Aborts a closing connection, so that the client does not take the cut answer for a complete one.
        """
        if self.transport.is_closing():
            self.transport.abort()
            return False
        # HTTP/1.0 has no chunks: there the end of the connection ends the answer.
        is_chunked = self.scope["http_version"] >= "1.1"
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if is_chunked else body)
        return not self.is_full

    @property
    def is_full(self) -> bool:
        """Return whether the send buffer is full."""
        return self.flow.write_paused

    async def wait_for_room(self) -> None:
        """Wait until the send buffer has room or the connection is closed."""
        await self.flow.drain()

    def abort(self) -> None:
        """Close the connection at once; buffered bytes are lost."""
        self.transport.abort()

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """uvicorn's server over one service. It stops listening at a signal, and ends after all streams."""

    def __init__(self, service: Service) -> None:
        config = service.config
        http_protocol = type("ConfiguredHttp", (HttpProtocol,), {"header_timeout_s": config.header_timeout_s})
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=http_protocol,
                ws="none",
                lifespan="on",
                loop="asyncio",
                access_log=False,
                log_config=None,
                server_header=False,
                limit_concurrency=config.max_connections,
                timeout_keep_alive=config.keep_alive_s,
                timeout_graceful_shutdown=5,
            )
        )
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then let uvicorn end the connections."""
        for server in self.servers:
            server.close()
        timeout_s = self._service.config.drain_timeout_s
        logger.info("draining: %d requests are open, at most %g s", self._service.engine.num_open, timeout_s)
        drain = asyncio.ensure_future(self._service.engine.drain(timeout_s))
        while not drain.done():
            if self.force_exit:
                # The second Ctrl-C.
                await asyncio.get_running_loop().run_in_executor(None, self._service.engine.close)
                break
            await asyncio.wait((drain,), timeout=0.05)
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn skips this at a forced exit, and the lifespan's task would end in a traceback.
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, but do not raise them again: `serve` returns its exit code."""
        # Outside the main thread, which alone gets signals, a caller sets should_exit.
        with handling(self.handle_exit):
            yield


def serve(config: ServerConfig, engine_config: EngineConfig) -> int:
    """Load the checkpoint and serve it until a signal; return the exit code.

    The port is taken before the weights are loaded. Raises ValueError for a config, a checkpoint or a port
    that cannot be used.
    """
    config.read_keys()
    listener = _listen(config)
    try:
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        logger.info("%s will serve %s once it is loaded", address, engine_config.model)
        with leaving():
            from compiled_mtp.engine import Engine
            from compiled_mtp.frontend.checkpoint import open_frontend

        frontend = open_frontend(engine_config)
        if frontend.tokenizer is None:
            raise ValueError(f"model must hold a tokenizer.json, got {frontend.path}; download all its files")
        config = name_model(config, engine_config)
        engine = Engine(engine_config, frontend=frontend)
        frontend.warm_up_grammars()
        if engine.num_threads is not None:
            logger.info("CPU threads: %d of %d cores", engine.num_threads, os.cpu_count())
        service = make_service(
            engine, frontend.tokenizer, frontend.path, engine.runner.memory.max_model_len, config, frontend
        )
        settle_interpreter()
        logger.info("serving %s at %s (open it in a browser; Ctrl-C ends it)", list(service.names), address)
        try:
            asyncio.run(Server(service).serve([listener]))
        finally:
            service.engine.close()
            # Otherwise Triton's bindings report every frozen object as leaked.
            gc.unfreeze()
        return EXIT_OK
    finally:
        listener.close()


def _listen(config: ServerConfig) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(512)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ValueError(
            f"port must be free at {config.host}, got {config.port}: {error.strerror or error}; take another"
        ) from None
    return listener


def make_parser() -> Parser:
    """Return the parser: a flag for each field of ServerConfig, except the key, and of EngineConfig."""
    parser = Parser(
        prog="compiled-mtp serve",
        usage="%(prog)s [flags]",
        description="Serve a checkpoint over OpenAI's and Anthropic's APIs.",
    )
    add_fields(parser, "engine", EngineConfig, common=COMMON_ENGINE)
    add_fields(parser, "server", ServerConfig, skip=_SECRET, common=_COMMON)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; return the exit code.

    0: the server served and ended. 2: a flag, the checkpoint or the port is wrong. 130 (Ctrl-C) and 143
    (SIGTERM): a signal came before the server listened.
    """

    def command(interrupts: Interrupts) -> int:
        flags = make_parser().read(argv)
        server_config = ServerConfig(**given(flags, ServerConfig, skip=_SECRET))
        start_log(server_config)
        config = EngineConfig(**given(flags, EngineConfig))
        Torchrun().check_ranks(config.tensor_parallel)
        return serve(server_config, config)

    # run_command handles signals before and after uvicorn does.
    return run_command(command)
