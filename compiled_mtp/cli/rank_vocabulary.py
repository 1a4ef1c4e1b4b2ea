"""`compiled-mtp rank-vocabulary`: a checkpoint's ids by how often they occur in text, for `draft_vocab`.

    compiled-mtp rank-vocabulary --model Qwen/Qwen3.5-4B --top 32768 --output ids.txt corpus/*.txt
    compiled-mtp run --model Qwen/Qwen3.5-4B --draft-vocab ids.txt --prompt-file prompts.jsonl

Drafts are then chosen only from those ids and the eos ids. A draft reads fewer rows of the head and is
cheaper; where the target draws another id, the draft is rejected, and no token changes. Use text of the kind
that the model will generate: its answers are better than its prompts. In directories, files that end in
--suffix are read. Ids that do not occur are left out. Prints one JSON line: how many ids occurred, and the
share of all tokens that the written ids cover.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from compiled_mtp.config import EngineConfig
from compiled_mtp.errors import check
from compiled_mtp.frontend.hub import find_checkpoint
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.terminal.console import EXIT_OK, check_stdout, run_command, write_text
from compiled_mtp.terminal.flags import Parser


def find_texts(paths: Iterable[Path], suffix: str) -> Iterator[Path]:
    """Yield the files among `paths`, and in sorted order the files with `suffix` below its directories."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        # Directories may have such names too, and links may dangle.
        yield from (found for found in sorted(path.rglob(f"*{suffix}")) if found.is_file())


def count_ids(tokenizer: Tokenizer, paths: Iterable[Path], suffix: str) -> Counter[int]:
    """Return how often each id occurs in the texts; bytes that are not UTF-8 are replaced when read."""
    counts: Counter[int] = Counter()
    for path in find_texts(paths, suffix):
        counts.update(tokenizer.encode(path.read_text(encoding="utf-8", errors="replace")))
    return counts


def rank(counts: Counter[int], top: int | None) -> list[int]:
    """Return at most `top` ids, the most frequent first; of equally frequent ids the lowest first."""
    return sorted(counts, key=lambda i: (-counts[i], i))[:top]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 2 for an error, 130 for Ctrl-C or 143 for SIGTERM."""
    return run_command(lambda _: _rank(make_parser().parse_args(argv)))


def make_parser() -> Parser:
    """Return the flags."""
    parser = Parser(
        prog="compiled-mtp rank-vocabulary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, help="texts, and directories of them")
    parser.add_argument(
        "--model", default=str(EngineConfig().model), help="checkpoint whose tokenizer is used"
    )
    parser.add_argument("--suffix", default=".txt", help="suffix of the files to read in directories")
    parser.add_argument("--top", type=int, help="how many ids to write; default: all that occur")
    described = "file for the ids, one per line, the most frequent first"
    parser.add_argument("--output", type=Path, required=True, help=described)
    return parser


def _rank(flags: argparse.Namespace) -> int:
    stdout = check_stdout()
    check(flags.top is None or flags.top > 0, "top", "be at least 1", flags.top, "leave it out for all ids")
    missing = [str(path) for path in flags.paths if not path.exists()]
    check(not missing, "paths", "exist", ", ".join(missing), "name files of text, or directories of them")
    can_write = flags.output.parent.is_dir() and not flags.output.is_dir()
    # Checked first, since counting may take hours.
    check(can_write, "output", "be a file in a directory that exists", flags.output, "make the directory")
    config = EngineConfig(model=flags.model)
    model = find_checkpoint(config.model, is_offline=config.offline)
    remedy = "pass a Hugging Face checkpoint directory, or a repository of the Hub such as Qwen/Qwen3.5-4B"
    is_one = model.is_dir() or model.suffix == ".gguf"
    check(is_one, "model", "be a GGUF file or a directory", model, remedy)
    tokenizer = Tokenizer(model)
    counts = count_ids(tokenizer, flags.paths, flags.suffix)
    got = f"none in {len(flags.paths)} paths"
    check(bool(counts), "paths", "hold text", got, f"directories are searched for *{flags.suffix}")
    ids = rank(counts, flags.top)
    flags.output.write_text("".join(f"{i}\n" for i in ids), encoding="utf-8")
    tokens, covered = counts.total(), sum(counts[i] for i in ids)
    told = {"tokens": tokens, "occurred": len(counts), "ids": len(ids), "coverage": covered / tokens}
    write_text(stdout, json.dumps(told) + "\n")
    return EXIT_OK
