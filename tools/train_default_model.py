"""Train, export and evaluate the checkpoint that ships with the package.

One command, from the standard library's source to the model card:

    python tools/train_default_model.py --out compiled_mtp/default_model
    python tools/train_default_model.py --out compiled_mtp/default_model --evaluate
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from default_model_training.data import Corpus, default_stdlib, prepare
from default_model_training.evaluation import evaluate
from default_model_training.export import load_checkpoint
from default_model_training.model import ModelShape
from default_model_training.training import Recipe, Trainer


def parse_arguments() -> argparse.Namespace:
    """Flags: places, and one flag per field of Recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument(
        "--work", type=Path, default=Path("build/default_model"), help="caches and resume file"
    )
    parser.add_argument("--stdlib", type=Path, default=default_stdlib(), help="standard library to train on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --work")
    parser.add_argument("--evaluate", action="store_true", help="evaluate --out instead of training")
    parser.add_argument("--prefixes", type=int, default=64, help="held-out prefixes to decode from")
    parser.add_argument("--dropout", type=float, default=0.1)
    for field in dataclasses.fields(Recipe):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default)
    return parser.parse_args()


def train(arguments: argparse.Namespace, corpus: Corpus) -> None:
    """Train, export, and record recipe, data and time in train.json beside the resume file."""
    recipe = Recipe(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Recipe)})
    device = torch.device(arguments.device)
    shape = ModelShape(dropout=arguments.dropout)
    started = time.perf_counter()
    Trainer(shape, recipe, corpus, arguments.work, arguments.out, device).run(arguments.resume)
    record = {
        "data": dataclasses.asdict(corpus.summary),
        "train_tokens": len(corpus.train),
        "recipe": dataclasses.asdict(recipe) | {"dropout": arguments.dropout},
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
    }
    (arguments.work / "train.json").write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    """Run what the flags ask for."""
    arguments = parse_arguments()
    corpus = prepare(arguments.stdlib, arguments.work)
    print(f"data: {corpus.summary}, {len(corpus.train):,} training tokens", flush=True)
    if not arguments.evaluate:
        train(arguments, corpus)
    model, tokenizer = load_checkpoint(arguments.out)
    device = torch.device(arguments.device)
    result = evaluate(model.to(device), tokenizer, corpus.heldout, arguments.prefixes)
    (arguments.work / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
