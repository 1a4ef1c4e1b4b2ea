"""The replica's side of a call: its own engine, and what it tells the ingress."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from compiled_mtp.async_engine import AsyncEngine, EngineStoppedError, QueueFullError
from compiled_mtp.replicas.messages import Accepted, Call, Message, Refused, Teller


async def decode(
    engine: AsyncEngine, call: Call, replica_id: str, identity: str
) -> AsyncGenerator[Message, None]:
    """Yield Accepted and then the outputs of all choices, or Refused alone. Leaving early aborts the request.

    Raises EngineStoppedError when the engine ends before the request.
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
        async for output in stream:
            yield [teller.tell(one) for one in (output, *stream.take_ready())]
    finally:
        stream.abort()
