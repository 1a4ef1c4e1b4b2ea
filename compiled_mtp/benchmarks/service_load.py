"""Load on any OpenAI endpoint: latencies, goodput, acceptance; ends in one line of JSON.

    compiled-mtp bench serving --url http://127.0.0.1:8000 --concurrency 8 --num-requests 64
    compiled-mtp bench serving --rate 4 --ttft-slo-ms 200 --tpot-slo-ms 30
    compiled-mtp bench serving --sweep 1,2,4,8,16
    compiled-mtp bench serving --concurrency 64 --num-requests 256 --lengths 200:200 --beside other.jsonl
    compiled-mtp bench serving --exact-match qa.jsonl --against http://127.0.0.1:8001

Prompts come from a file: .jsonl with a prompt or messages per line, else one prompt. --lengths PROMPT:OUTPUT
sends random token ids instead, with lognormal lengths of these means, and counts the end token as any other.
The result is a row of JSON, to which --row adds the engine, the device, the shape and the weights. --beside
FILE prints saved rows of the same load next to it.
--exact-match FILE sends the prompts of {"prompt": ..., "answer": ...} to two servers at temperature 0, for
example one with mtp_step 3 and one with 0. It counts the outputs that begin with their answer, and fails
unless all outputs are equal. Needs httpx.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from compiled_mtp.benchmarks.saved_rows import Row, read_rows
from compiled_mtp.benchmarks.serving_rows import (
    DRAWN_IDS,
    SAVED_FIELDS,
    mean_lengths,
    percentiles,
    with_beside,
)
from compiled_mtp.errors import check, fail
from compiled_mtp.terminal.console import run_command
from compiled_mtp.terminal.flags import Parser, count, counts

# Where no file of prompts is given: beginnings of Python source, which every model continues.
PROMPTS = (
    'def count_lines(path):\n    """Return the number of lines in the file at *path*."""\n',
    'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self):\n',
    'def read_config(filename, defaults=None):\n    """Parse a configuration file."""\n',
    "import socket\nimport threading\n\n\nclass EchoServer(threading.Thread):\n",
    "import unittest\n\n\nclass OrderedDictTest(unittest.TestCase):\n    def setUp(self):\n",
    'def merge(one, other):\n    """Merge two sorted lists."""\n',
)
_CORRECT = "correct the file"
# Fields of a row of --lengths that the run itself fills.
OWN_FIELDS = {"streams", "requests", "mean_prompt", "mean_output", "tokens_per_s"}


@dataclasses.dataclass
class Sample:
    """The result of one request; times in seconds since it was sent."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    error: str | None = None
    first_s: float = 0.0
    total_s: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def inter_token_s(self) -> float:
        """Return the mean seconds per token after the first."""
        return (self.total_s - self.first_s) / max(1, self.output_tokens - 1)


def read_prompts(path: Path | None) -> list[dict[str, Any]]:
    """Return the prompt file's objects, each with `prompt` or `messages` and any other fields.

    None: those of PROMPTS. Raises ValueError for a line without either, and for a file without lines.
    """
    if path is None:
        return [{"prompt": text} for text in PROMPTS]
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [{"prompt": text}]
    found: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
        except ValueError as error:
            raise fail(
                "prompts", "be JSON, one object per line", f"{path}:{number}: {error}", _CORRECT
            ) from None
        if not isinstance(one, dict) or not {"prompt", "messages"} & one.keys():
            raise fail("prompts", "have a prompt or messages per line", f"{path}:{number}", _CORRECT)
        found.append(one)
    if not found:
        raise fail("prompts", "have a prompt or messages per line", f"{path}, which is empty", _CORRECT)
    return found


def make_body(prompt: dict[str, Any], index: int, flags: argparse.Namespace) -> dict[str, Any]:
    """Return the request body number `index`."""
    body: dict[str, Any] = {key: prompt[key] for key in ("prompt", "messages") if key in prompt}
    body |= {"model": flags.model, "max_tokens": flags.max_tokens, "temperature": flags.temperature}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | ({} if flags.seed is None else {"seed": flags.seed + index})


def drawn_bodies(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the request bodies of a load of drawn lengths."""
    rng = random.Random(flags.seed or 0)
    bodies = []
    for index, (prompt, output) in enumerate(flags.lengths.draw(flags.num_requests, flags.seed or 0)):
        ids = [rng.randrange(DRAWN_IDS) for _ in range(prompt)]
        own = {"max_tokens": output, "ignore_eos": True}
        bodies.append(make_body({"prompt": ids}, index, flags) | own)
    return bodies


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Sample:
    """Send one request and read its stream."""
    sample, start = Sample(), time.perf_counter()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    try:
        async with client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                sample.error = (
                    f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:300]}"
                )
                return sample
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    take(sample, json.loads(line.removeprefix("data: ")), time.perf_counter() - start)
        if sample.error is None and not sample.prompt_tokens:
            # Without an error it would count as done, with no tokens.
            sample.error = "the stream ended without usage: it was cut off, or the server sends none"
    except httpx.HTTPError as error:
        sample.error = repr(error)
    return sample


def take(sample: Sample, chunk: dict[str, Any], now_s: float) -> None:
    """Add one chunk of a stream, read after now_s seconds."""
    if "error" in chunk:
        sample.error = str(chunk["error"].get("message"))
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        sample.text += text
        sample.token_ids += choice.get("token_ids") or ()
        if text or choice.get("finish_reason"):
            sample.first_s = sample.first_s or now_s
            sample.total_s = now_s
    if (usage := chunk.get("usage")) is not None:
        speculation = usage.get("speculation") or {}
        sample.output_tokens = usage["completion_tokens"]
        sample.prompt_tokens = usage["prompt_tokens"]
        sample.drafted = speculation.get("drafted_tokens", 0)
        sample.accepted = speculation.get("accepted_tokens", 0)
        sample.rounds = speculation.get("rounds", 0)


async def run_load(
    client: httpx.AsyncClient,
    bodies: Sequence[dict[str, Any]],
    *,
    concurrency: int,
    rate: float | None,
    seed: int,
) -> tuple[list[Sample], float]:
    """Send all bodies, `concurrency` at a time or, with a rate, as a Poisson process of that many per second.

    Returns the samples in the order of the bodies, and the total seconds.
    """
    start = time.perf_counter()
    if rate is not None:
        rng = random.Random(seed)
        tasks: list[asyncio.Task[Sample]] = []
        for body in bodies:
            # Wait only between requests: a wait after the last one is not part of the load.
            await asyncio.sleep(rng.expovariate(rate) if tasks else 0)
            tasks.append(asyncio.create_task(ask(client, body)))
        samples = list(await asyncio.gather(*tasks))
    else:
        room = asyncio.Semaphore(concurrency)

        async def one(body: dict[str, Any]) -> Sample:
            async with room:
                return await ask(client, body)

        samples = list(await asyncio.gather(*map(one, bodies)))
    return samples, time.perf_counter() - start


def summarize(samples: Sequence[Sample], seconds: float, flags: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of one run; goodput counts requests that met both limits, per second."""
    done = [sample for sample in samples if sample.error is None]
    tokens = sum(sample.output_tokens for sample in done)
    drafted, rounds = sum(one.drafted for one in done), sum(one.rounds for one in done)
    accepted = sum(one.accepted for one in done)
    good = [
        one
        for one in done
        if one.first_s * 1000 <= flags.ttft_slo_ms and one.inter_token_s * 1000 <= flags.tpot_slo_ms
    ]
    times = {
        "ttft_ms": [one.first_s * 1000 for one in done],
        "tpot_ms": [one.inter_token_s * 1000 for one in done if one.output_tokens > 1],
        "total_ms": [one.total_s * 1000 for one in done],
    }
    return {
        "requests": len(samples),
        "failed": len(samples) - len(done),
        "first_error": next((one.error for one in samples if one.error is not None), None),
        "seconds": round(seconds, 3),
        "output_tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 2),
        "requests_per_s": round(len(done) / seconds, 3),
        "goodput_per_s": round(len(good) / seconds, 3),
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "mean_new_tokens": round((rounds + accepted) / rounds, 3) if rounds else None,
    } | {name: percentiles(values) for name, values in times.items()}


async def bench(client: httpx.AsyncClient, flags: argparse.Namespace) -> dict[str, Any]:
    """Run what the flags ask for; return the object to print."""
    if flags.lengths is None:
        prompts = read_prompts(flags.prompts)
        bodies = [make_body(prompts[i % len(prompts)], i, flags) for i in range(flags.num_requests)]
    else:
        bodies = drawn_bodies(flags)
    if flags.sweep is None:
        samples, seconds = await run_load(
            client, bodies, concurrency=flags.concurrency, rate=flags.rate, seed=flags.seed or 0
        )
        row = summarize(samples, seconds, flags)
        if flags.lengths is None:
            return row
        load = {"streams": flags.concurrency, "mean_prompt": flags.lengths.prompt}
        row |= load | {"mean_output": flags.lengths.output, **flags.row}
        row, line = with_beside(row, flags.saved)
        if line:
            print(f"beside: {line}", file=sys.stderr)
        return row
    points = []
    for level in flags.sweep:
        samples, seconds = await run_load(client, bodies, concurrency=level, rate=None, seed=0)
        points.append({"concurrency": level, **summarize(samples, seconds, flags)})
        print(f"concurrency {level}: {points[-1]['tokens_per_s']} tokens/s", file=sys.stderr)
    return {"sweep": points}


async def match(clients: Sequence[httpx.AsyncClient], flags: argparse.Namespace) -> dict[str, Any]:
    """Send every question to every server; return how many answers match, and which outputs differ."""
    questions = read_prompts(flags.exact_match)
    if not all(str(question.get("answer", "")).strip() for question in questions):
        # Every output would match an empty answer.
        raise ValueError(
            f"every question must have an answer, got one without in {flags.exact_match}; add it"
        )
    flags.temperature = 0.0
    bodies = [make_body(question, index, flags) for index, question in enumerate(questions)]
    outputs = []
    for client in clients:
        samples, _ = await run_load(client, bodies, concurrency=flags.concurrency, rate=None, seed=0)
        if (error := next((s.error for s in samples if s.error is not None), None)) is not None:
            raise ValueError(f"every question must be answered, got {error}; see the server's log")
        outputs.append([sample.text for sample in samples])
    answers = [str(question["answer"]).strip() for question in questions]
    return {
        "questions": len(questions),
        "exact_match": [
            sum(text.strip().startswith(answer) for text, answer in zip(texts, answers, strict=True))
            for texts in outputs
        ],
        "different": [i for i, texts in enumerate(zip(*outputs, strict=True)) if len(set(texts)) > 1],
    }


def amount(text: str) -> float:
    """Parse a flag's number, at least 0 and finite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, got {text!r}")
    return number


def row_fields(text: str) -> Row:
    """Parse a flag's fields of a row, NAME=VALUE separated by commas."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and equals for name, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, separated by commas, got {text!r}")
    return {name: value for name, _, value in pairs}


def make_parser() -> Parser:
    """Return the flags."""
    parser = Parser(
        prog="compiled-mtp bench serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address, without /v1")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key-file", type=Path, help="file whose first line is the key")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompts", type=Path, help="prompt file; default: beginnings of Python source")
    prompts.add_argument(
        "--lengths",
        type=mean_lengths,
        metavar="PROMPT:OUTPUT",
        help="random prompts; mean tokens of prompts and outputs, whose lengths are lognormal",
    )
    parser.add_argument(
        "--row",
        type=row_fields,
        default={},
        metavar="NAME=VALUE,...",
        help="fields to add to the row of --lengths: engine, device, shape, weights",
    )
    parser.add_argument("--beside", type=Path, metavar="FILE", help="saved rows to print next to that row")
    parser.add_argument("--num-requests", type=count, default=32)
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=count, default=8, help="requests at a time")
    load.add_argument("--rate", type=amount, help="arrivals per second, at random times")
    load.add_argument("--sweep", type=counts, help="concurrencies, separated by commas")
    parser.add_argument("--max-tokens", type=count, default=128)
    parser.add_argument("--temperature", type=amount, default=0.0)
    parser.add_argument("--seed", type=int, help="seed of request 0; request i has seed + i")
    parser.add_argument("--ttft-slo-ms", type=amount, default=math.inf)
    parser.add_argument("--tpot-slo-ms", type=amount, default=math.inf)
    parser.add_argument("--exact-match", type=Path, help="questions and answers, .jsonl")
    parser.add_argument("--against", help="a second server's url")
    return parser


async def first_model(client: httpx.AsyncClient, url: str) -> str:
    """Return the first model that the server lists. Raises ValueError if it lists none."""
    answer = await client.get("/v1/models")
    try:
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPStatusError, ValueError, KeyError, IndexError, TypeError):
        got = f"{answer.status_code}: {answer.text[:300]}"
        raise ValueError(f"{url} must list a model, got {got}; set --api-key-file or --model") from None


async def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Open the connections, find the model, run."""
    text = flags.api_key_file.read_text(encoding="utf-8") if flags.api_key_file else "none"
    # As the service reads it: one key per line.
    keys = [key for line in text.splitlines() if (key := line.strip())]
    if not keys:
        raise ValueError(f"api-key-file must hold a key, got {flags.api_key_file}, which is empty")
    urls = [flags.url, *([flags.against] if flags.against else [])]
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {keys[0]}"}
    clients: list[httpx.AsyncClient] = []
    try:
        for url in urls:
            clients.append(httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None))
        if flags.model is None:
            flags.model = await first_model(clients[0], flags.url)
        work: Callable[[], Awaitable[dict[str, Any]]] = (
            (lambda: bench(clients[0], flags))
            if flags.exact_match is None
            else (lambda: match(clients, flags))
        )
        return await work()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise fail("url", "name a server that answers", f"{', '.join(urls)}: {error!r}", "start it") from None
    finally:
        for client in clients:
            await client.aclose()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the object as one line; 1 if a request failed or outputs differ, 2 for a wrong flag or server."""
    return run_command(lambda interrupts: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    flags = make_parser().parse_args(argv)
    check(flags.rate != 0, "rate", "be a number above 0", flags.rate, "give requests per second")
    is_one = flags.against is None or flags.exact_match is not None
    check(is_one, "against", "come with exact_match", "it alone", "a load goes to one server")
    has_row = flags.lengths is not None and SAVED_FIELDS - {*flags.row} <= OWN_FIELDS
    rule = f"come with lengths and a row of {sorted(SAVED_FIELDS - OWN_FIELDS)}"
    check(flags.beside is None or has_row, "beside", rule, sorted(flags.row), "add them")
    flags.saved = [] if flags.beside is None else read_rows(flags.beside, SAVED_FIELDS, {})
    found = asyncio.run(run(flags))
    print(json.dumps(found))
    failed = any(point["failed"] for point in found.get("sweep", [found]) if "failed" in point)
    return int(failed or bool(found.get("different")))
