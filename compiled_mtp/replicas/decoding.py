"""The replica's side of a call: its own engine, and what it tells the ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from compiled_mtp.async_engine import AsyncEngine, EngineStoppedError, QueueFullError, Stream
from compiled_mtp.replicas.messages import Accepted, Call, Message, Refused, Teller
from compiled_mtp.request import RequestOutput

# Seconds without an output after which a replica says that it is alive: several times within the shortest
# silence for which a ReplicaConfig lets its streams be taken away.
_BEAT_S = 1.0


async def decode(
    engine: AsyncEngine, call: Call, replica_id: str, identity: str
) -> AsyncGenerator[Message, None]:
    """Yield Accepted and then the outputs of all choices, or Refused alone. Leaving early aborts the request.

    While there are no outputs an empty list says again and again that the engine's steps end. Raises
    EngineStoppedError when the engine ends before the request, EngineHungError when its step hangs.
    """
    try:
        stream = await engine.add(
            prompt_token_ids=call.prompt_token_ids, params=call.params, priority=call.priority
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
    teller = Teller()
    try:
        yield Accepted(replica_id, identity)
        while (outputs := await _wait(stream)) is not None:
            if not outputs:
                engine.check_step()
            yield [teller.tell(one) for one in outputs]
    finally:
        stream.abort()


async def _wait(stream: Stream) -> list[RequestOutput] | None:
    """The outputs that come next, none if there are none in time, None at the end."""
    try:
        async with asyncio.timeout(_BEAT_S):
            output = await anext(stream)
    except TimeoutError:
        return []
    except StopAsyncIteration:
        return None
    return [output, *stream.take_ready()]
