"""The replica's side of a call: decodes on its own engine and sends the outputs to the ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from compiled_mtp.async_engine import AsyncEngine
from compiled_mtp.replicas.messages import Accepted, Call, HistoryTrimmer, Message, Refused
from compiled_mtp.request import RequestOutput
from compiled_mtp.streams.status import EngineStoppedError, QueueFullError
from compiled_mtp.streams.stream import Stream

# Seconds without an output after which a replica sends a heartbeat: several per the least silence_timeout_s.
_HEARTBEAT_S = 1.0


async def decode(
    engine: AsyncEngine, call: Call, replica_id: str, identity: str
) -> AsyncGenerator[Message, None]:
    """Yield Accepted and then the outputs of all choices, or Refused alone. Closing early aborts the request.

    While there are no outputs it yields an empty list as a heartbeat, if the engine's step does not hang.
    Raises EngineStoppedError if the engine ends before the request, EngineHungError if a step hangs.
    """
    try:
        stream = await engine.add(
            prompt_token_ids=call.prompt_token_ids,
            params=call.params,
            priority=call.priority,
            # Only engines that take images know the argument.
            **({"images": call.images} if call.images else {}),
        )
    except ValueError as error:
        yield Refused("invalid", str(error), replica_id)
        return
    except QueueFullError as error:
        yield Refused("full", str(error), replica_id, error.retry_after_s)
        return
    except EngineStoppedError as error:
        yield Refused("stopped", str(error), replica_id)
        return
    trimmer = HistoryTrimmer()
    try:
        yield Accepted(replica_id, identity)
        while (outputs := await _wait(stream)) is not None:
            if not outputs:
                engine.check_step()
            yield [trimmer.trim(one) for one in outputs]
    finally:
        stream.abort()


async def _wait(stream: Stream) -> list[RequestOutput] | None:
    """Return the next outputs, [] if none come within _HEARTBEAT_S seconds, None at the end."""
    try:
        async with asyncio.timeout(_HEARTBEAT_S):
            output = await anext(stream)
    except TimeoutError:
        return []
    except StopAsyncIteration:
        return None
    return [output, *stream.take_ready()]
