"""From a config to a server that listens, and its end: SIGTERM and Ctrl-C let open requests finish.

`compiled-mtp serve --help` lists the flags. What can be refused before the weights are loaded is:
flags, keys, a busy port, a checkpoint without a tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from compiled_mtp.async_engine import AsyncEngine, SteppedEngine
from compiled_mtp.config import EngineConfig, Torchrun
from compiled_mtp.frontend.hub import is_repository
from compiled_mtp.frontend.reasoning import find_reasoning
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.server.app import create_app
from compiled_mtp.server.config import ServerConfig
from compiled_mtp.server.generation import ServedEngine, Service
from compiled_mtp.server.metrics import Metrics
from compiled_mtp.server.prompts import PromptPool
from compiled_mtp.server.tool_calls import CallForm
from compiled_mtp.terminal.console import EXIT_OK, Interrupts, run_command
from compiled_mtp.terminal.flags import Parser, add_fields, given
from compiled_mtp.terminal.signals import leaving

logger = logging.getLogger("compiled_mtp.server")

# Flags are public.
_SECRET = ("api_key",)
# What Python lets one thread run while another waits, 5 ms by default, is a step of a fast model.
_SWITCH_INTERVAL_S = 0.0005
_PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def make_service(
    engine: SteppedEngine, tokenizer: Tokenizer, model: Path, max_model_len: int, config: ServerConfig
) -> Service:
    """Return the service over an engine, which is stepped from now on, and the tokenizer of `model`."""
    metrics = Metrics()
    metrics.set_stats(engine.stats())
    stepped = AsyncEngine(
        engine,
        max_open=config.max_open,
        stream_buffer=config.stream_buffer,
        step_timeout_s=config.step_timeout_s,
        observer=metrics,
    )
    return assemble_service(stepped, metrics, tokenizer, model, max_model_len, config)


def assemble_service(
    engine: ServedEngine,
    metrics: Metrics,
    tokenizer: Tokenizer,
    model: Path,
    max_model_len: int,
    config: ServerConfig,
) -> Service:
    """Return the service over an engine that runs already, and whose outputs `metrics` count."""
    return Service(
        engine=engine,
        prompts=PromptPool(
            model,
            num_workers=config.prompt_workers,
            timeout_s=config.prompt_timeout_s,
            max_chars=config.max_prompt_chars,
            max_waiting=config.max_open,
        ),
        tokenizer=tokenizer,
        config=config,
        names=config.served_model_name or (model.resolve().name,),
        max_model_len=max_model_len,
        call_form=find_call_form(tokenizer),
        reasoning=find_reasoning(tokenizer),
        metrics=metrics,
    )


def name_model(config: ServerConfig, engine_config: EngineConfig) -> ServerConfig:
    """Return the config with the repository as the model's name, if there is one and no other was given."""
    if not is_repository(engine_config.model) or config.served_model_name:
        return config
    # Its directory is named after a commit.
    return config.model_copy(update={"served_model_name": (engine_config.model.as_posix(),)})


def settle_interpreter() -> None:
    """Let the thread that steps wait for others no longer than it must, once all that stays is loaded."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # To look through it for garbage would take a tenth of a second, in the middle of every stream.
    gc.collect()
    gc.freeze()


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
    """uvicorn's connection with a deadline for headers, and what streams need of one (sse.Connection)."""

    header_timeout_s = 10.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first headers."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        """Stop the clock when the headers are complete; of later requests it starts with the first byte."""
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
        """Send a part of an answer whose length nobody knows; False when the connection is full, or closing:
        what has no place in it any more must not look like the end."""
        if self.transport.is_closing():
            self.transport.abort()
            return False
        # An older client's answer ends with its connection.
        is_chunked = self.scope["http_version"] >= "1.1"
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if is_chunked else body)
        return not self.is_full

    @property
    def is_full(self) -> bool:
        """Whether what was written has yet to be read."""
        return self.flow.write_paused

    async def wait_for_room(self) -> None:
        """Until the connection is no longer full, or closed."""
        await self.flow.drain()

    def abort(self) -> None:
        """Close it at once; what is buffered is lost."""
        self.transport.abort()

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """uvicorn's server over one service. It stops listening at a signal, and ends when all streams have."""

    def __init__(self, service: Service) -> None:
        config = service.config
        http_protocol = type("ConfiguredDoor", (HttpProtocol,), {"header_timeout_s": config.header_timeout_s})
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
                timeout_keep_alive=config.keep_alive_timeout_s,
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
            # uvicorn leaves it out, and its task would end in a traceback.
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again: whoever called `serve` gets its exit code."""
        if threading.current_thread() is not threading.main_thread():
            # Signals are the main thread's; whoever runs a server in another sets should_exit.
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {one: signal.signal(one, self.handle_exit) for one in handled}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def serve(config: ServerConfig, engine_config: EngineConfig) -> int:
    """Load the checkpoint and serve it until a signal; return the exit code.

    The port is taken before the weights are loaded. Raises ValueError for a config, a checkpoint or a port
    that cannot be used.
    """
    config.read_keys()
    listener = _listen(config)
    try:
        with leaving():
            from compiled_mtp.engine import Engine
            from compiled_mtp.frontend.checkpoint import open_frontend

        frontend = open_frontend(engine_config)
        if frontend.tokenizer is None:
            raise ValueError(f"model must hold a tokenizer.json, got {frontend.path}; download it whole")
        config = name_model(config, engine_config)
        engine = Engine(engine_config, frontend=frontend)
        frontend.warm_up_grammars()
        if engine.num_threads is not None:
            logger.info("CPU threads: %d of %d cores", engine.num_threads, os.cpu_count())
        service = make_service(
            engine, frontend.tokenizer, frontend.path, engine.runner.memory.max_model_len, config
        )
        settle_interpreter()
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        logger.info("serving %s at %s (open it in a browser; Ctrl-C ends it)", list(service.names), address)
        try:
            asyncio.run(Server(service).serve([listener]))
        finally:
            service.engine.close()
            # Else Triton's bindings report all that was frozen as leaked.
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
    """Return the parser: a flag for each field of ServerConfig, but the key, and of EngineConfig."""
    parser = Parser(
        prog="compiled-mtp serve", description="Serve a checkpoint over OpenAI's and Anthropic's APIs."
    )
    add_fields(parser, "server", ServerConfig, skip=_SECRET)
    add_fields(parser, "engine", EngineConfig)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; return the exit code: 0, 2 for a wrong flag, checkpoint or port, or, for a signal
    before the port is served, 130 (Ctrl-C) and 143 (SIGTERM)."""
    flags = vars(make_parser().parse_args(argv))
    # Of other packages warnings alone: torch logs counters at its end.
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_JsonLog()])
    for name in ("compiled_mtp", "uvicorn"):
        logging.getLogger(name).setLevel(logging.INFO)

    def command(interrupts: Interrupts) -> int:
        server_flags = given(flags, ServerConfig, skip=_SECRET)
        config = EngineConfig(**given(flags, EngineConfig))
        Torchrun().check_ranks(config.tensor_parallel)
        return serve(ServerConfig(**server_flags), config)

    # Until uvicorn listens to signals itself, and behind that.
    return run_command(command)


class _JsonLog(logging.StreamHandler[Any]):
    """Every record as one line of JSON on standard error."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; what is JSON already (a request's line) becomes part of it."""
        message = record.getMessage()
        line: dict[str, Any] = {"level": record.levelname, "logger": record.name}
        try:
            found = json.loads(message)
            line |= found if isinstance(found, dict) else {"message": message}
        except ValueError:
            line["message"] = message
        if record.exc_info:
            line["traceback"] = logging.Formatter().formatException(record.exc_info)
        return json.dumps({"time": round(record.created, 3), **line})
