"""Train, export and evaluate the checkpoint that ships with the package.

One command, from the standard library's source to the model card:

    python tools/default_model_training/train_default_model.py --output compiled_mtp/default_model
    python tools/default_model_training/train_default_model.py --output compiled_mtp/default_model --evaluate
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

# Find this folder's package and the engine, even if the engine is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from default_model_training.card import write_card
from default_model_training.data import default_stdlib, heldout_tokens, prepare
from default_model_training.evaluation import bits_per_byte, engine_acceptance, example_continuations
from default_model_training.export import load_checkpoint
from default_model_training.model import ModelShape
from default_model_training.training import Recipe, Trainer

RECORD = "training.json"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"


def parse_arguments() -> argparse.Namespace:
    """Parse the flags: paths, and one flag per field of Recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", dest="out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--work", type=Path, default=Path("build/default_model"), help="the resume file")
    parser.add_argument("--stdlib", type=Path, default=default_stdlib(), help="standard library to train on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --work")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate --output")
    parser.add_argument("--prefixes", type=int, default=64, help="held-out prefixes to decode from")
    parser.add_argument("--dropout", type=float, default=0.1)
    for field in dataclasses.fields(Recipe):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default)
    return parser.parse_args()


def train(arguments: argparse.Namespace) -> None:
    """Train and export to --output; training.json there gets data, recipe, time and curve."""
    corpus = prepare(arguments.stdlib)
    print(f"data: {corpus.summary}, {len(corpus.train):,} training tokens", flush=True)
    recipe = Recipe(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Recipe)})
    device = torch.device(arguments.device)
    shape = ModelShape(dropout=arguments.dropout)
    started = time.perf_counter()
    trainer = Trainer(shape, recipe, corpus, arguments.work, arguments.out, device)
    trainer.run(arguments.resume)
    record = {
        "data": dataclasses.asdict(corpus.summary),
        "train_tokens": len(corpus.train),
        "recipe": dataclasses.asdict(recipe),
        "shape": dataclasses.asdict(shape),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "curve": trainer.progress.points,
    }
    (arguments.out / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def evaluate(arguments: argparse.Namespace) -> None:
    """Evaluate --output, put the figures into its training.json, and write its model card."""
    model, tokenizer = load_checkpoint(arguments.out)
    heldout = heldout_tokens(arguments.stdlib, tokenizer)
    bits = bits_per_byte(model.to(torch.device(arguments.device)), tokenizer, heldout)
    figures: dict[str, Any] = {"prefixes": arguments.prefixes, "plain": {"bits_per_byte": round(bits, 4)}}
    figures["engine"] = engine_acceptance(arguments.out, heldout, arguments.prefixes)
    figures["examples"] = example_continuations(arguments.out, EXAMPLES)
    record = json.loads((arguments.out / RECORD).read_text()) | {"evaluation": figures}
    (arguments.out / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    write_card(record, arguments.out)
    print(json.dumps({name: figures[name] for name in figures if name != "examples"}, indent=2))


def main() -> None:
    """Train unless --evaluate is given, then evaluate."""
    arguments = parse_arguments()
    if not arguments.evaluate:
        train(arguments)
    evaluate(arguments)


if __name__ == "__main__":
    main()
