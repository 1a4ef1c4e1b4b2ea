"""A streaming client of `compiled-mtp serve`, with OpenAI's package: the text, and how it was drafted.

pip install openai
python examples/client.py --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import argparse

from openai import OpenAI, OpenAIError


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none", help="where the server asks for one")
    parser.add_argument("--prompt", default="def quicksort(")
    flags = parser.parse_args(argv)
    client = OpenAI(base_url=flags.url, api_key=flags.key)
    stream = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=flags.prompt,
        max_tokens=48,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.text, end="", flush=True)
        if chunk.usage is not None:
            # A field of ours, which the package passes on.
            print(f"\n{chunk.usage.model_extra['speculation']}")


if __name__ == "__main__":
    try:
        main()
    except OpenAIError as error:  # No server there, or what it refused, in one line.
        raise SystemExit(f"error: {error} (--url says where the service is)") from None
