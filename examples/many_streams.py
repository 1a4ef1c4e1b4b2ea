"""Several streams in one asyncio program, one of which is left in the middle.

python examples/many_streams.py
"""

from __future__ import annotations

import argparse
import asyncio

from compiled_mtp import AsyncEngine, Engine, EngineConfig, SamplingParams


async def read(engine: AsyncEngine, prompt: str, most: int) -> str:
    """The text of a request, which is left after `most` characters: leaving ends it in the engine too."""
    text = ""
    async for output in engine.generate(prompt, SamplingParams(max_tokens=32, seed=1)):
        text += output.new_text
        if len(text) >= most:
            break
    return text


async def serve(model: str) -> None:
    # The engine loads before the loop has anything else to do; its steps then run in a thread of their own.
    engine = AsyncEngine(Engine(EngineConfig(model=model)))
    limits = {"def add(": 1000, "class Queue:": 1000, "import os": 10}
    texts = await asyncio.gather(*(read(engine, prompt, most) for prompt, most in limits.items()))
    for prompt, text in zip(limits, texts, strict=True):
        print(f"{prompt!r}: {len(text)} characters")
    await engine.drain(timeout_s=5)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(EngineConfig().model), help="default: that which ships")
    asyncio.run(serve(parser.parse_args(argv).model))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # A mistake of the caller's, in one line.
        raise SystemExit(f"error: {error}") from None
