"""The model card: README.md and the curves, from training.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

CARD = """\
---
license: other
library_name: transformers
language: [code]
---
# The checkpoint that ships with compiled-mtp

A base model of {parameters:.1f} million parameters (bfloat16, {megabytes:.1f} MB) of exactly the
Qwen3.5 dense architecture, with a trained MTP head, so that `python -m compiled_mtp.run` has
something real to decode. It continues Python source. It was trained on one GPU in {minutes:.1f}
minutes on the standard library alone.

| | |
|---|---|
| layers | {layers}: {gdn} Gated DeltaNet, {attention} full attention; MTP head of one full-attention layer |
| hidden / FFN | {hidden_size} / {intermediate_size} |
| attention | {num_heads} query, {num_kv_heads} key/value heads of {head_dim} ({rotary_dim} rotary) |
| GDN heads | {linear_key_heads} key, {linear_value_heads} value, of {linear_head_dim} |
| vocabulary | 4,096 byte-level BPE entries and 3 special tokens, padded to {vocab_size}; tied embedding |
| trained on windows of | {sequence} tokens; longer contexts work but were never seen |

## Data and licence
The `*.py` files of CPython {python_version}'s standard library, `test/` included and site-packages
excluded (PSF License 2.0; nothing was downloaded): {train_files} files, {train_bytes:,} bytes and
{train_tokens:,} tokens for training; {heldout_files} files, {heldout_bytes:,} bytes held out by a
hash of their relative path; {skipped_files} files that are not UTF-8 left out. SHA-256 of the file
list (path and content hash of every file): `{file_list_sha256}`. Text that the model writes can
repeat that source word for word.

## How it was trained
```
python tools/default_model_training/train_default_model.py --output compiled_mtp/default_model
```
{hardware}, torch {torch}, {seconds:.0f} s for training without data preparation and evaluation;
seed {seed}. The defaults of the command are the recipe. GPU kernels are not deterministic, so
another run gives other weights of the same quality.

1. Trunk and head together: {steps} steps of {batch} x {sequence} tokens ({epochs:.0f} epochs),
   AdamW at {learning_rate}, cosine, weight decay {weight_decay}, dropout {dropout}. Loss: next
   token plus {mtp_weight} times the MTP loss of depths 1 to 3, half cross-entropy on the text, half
   on the trunk's own distribution.
2. The head alone on the frozen trunk (already rounded to bfloat16): {head_steps} steps of
   {head_batch} x {head_sequence} tokens, half of them text, half written by the trunk itself at
   temperatures 0, 0.8 and 1; loss: the trunk's distribution at temperature {head_temperature}.

In both, the head runs as a chain on its own post-norm hidden states, with the true tokens as inputs.
Every draft sees the keys and values that it sees in decoding: those of the committed tokens, and those
of its own chain.

![curves](curves.png)

## Held-out figures
Bits per byte: **{bits_per_byte}** (windows of 1,024 tokens).

Draft acceptance with `mtp_step` 3, from {prefixes} prefixes of 256 tokens out of held-out files,
128 tokens decoded from each. `P(i)` is the share of verify rounds that accepted draft index i (and
all before it). A small model repeats itself, and repetitions are easy to draft, so rounds with the
same 16-gram twice in the last 32 new tokens are also counted separately, as looping. Draft and
target draw with the same Gumbel noise; the engine decodes in float32 on a CPU.

| temperature | rounds counted | rounds | tokens per round | P(0) | P(1) | P(2) |
|---|---|---|---|---|---|---|
{acceptance}

## What it writes
Greedy, 128 tokens, by the engine. The first two prompts of `examples/prompts.jsonl`, unselected:

{examples}

## What it cannot do
- It writes Python that is mostly well formed and mostly meaningless: names, indentation and idioms
  of the standard library, no idea of what a function should compute.
- Greedy decoding falls into repeating lines or blocks after some tens of tokens, on most prompts; a
  temperature of 0.8 avoids that.
- It is a base model. A chat template is there so that `messages` work, but no turn was ever
  trained, and `<|im_start|>` and `<|im_end|>` have untrained embeddings; it answers with something
  like source code.
- It knows no natural language beyond comments and docstrings, and nothing outside the standard
  library.
- Acceptance on it says how the engine works, not how a released model's head would do.
"""


def _acceptance_rows(figures: dict[str, Any]) -> str:
    rows = []
    for key, temperature in (("greedy", "0"), ("shared_noise", "0.8")):
        for part, name in (("all", "all"), ("normal", "not looping"), ("looping", "looping")):
            counts = figures[key][part]
            shares = " | ".join(f"{share:.3f}" for share in counts["accepted_by_index"])
            rounds, mean = f"{counts['rounds']:,}", f"{counts['mean_new_tokens']:.2f}"
            rows.append(f"| {temperature} | {name} | {rounds} | {mean} | {shares} |")
    return "\n".join(rows)


def write_card(record: dict[str, Any], out: Path) -> None:
    """Write README.md and the curves to `out` from the contents of training.json."""
    shape, recipe, evaluation = record["shape"], record["recipe"], record["evaluation"]
    attention = shape["num_layers"] // shape["full_attention_interval"]
    examples = "\n\n".join(
        f"```python\n{example['prompt']}# ---- written by the model from here ----\n{example['text']}\n```"
        for example in evaluation.get("examples", [])[:2]
    )
    card = CARD.format(
        **record["data"],
        **(recipe | shape),
        parameters=record["parameters"] / 1e6,
        megabytes=(out / "model.safetensors").stat().st_size / 1e6,
        minutes=record["seconds"] / 60,
        layers=shape["num_layers"],
        attention=attention,
        gdn=shape["num_layers"] - attention,
        rotary_dim=int(shape["head_dim"] * shape["partial_rotary_factor"]),
        train_tokens=record["train_tokens"],
        epochs=recipe["steps"] * recipe["batch"] * recipe["sequence"] / record["train_tokens"],
        hardware=record["hardware"],
        torch=record["torch"],
        seconds=record["seconds"],
        bits_per_byte=evaluation["plain"]["bits_per_byte"],
        prefixes=evaluation["prefixes"],
        acceptance=_acceptance_rows(evaluation["engine"]),
        examples=examples,
    )
    (out / "README.md").write_text(card)
    _draw_curves(record, out / "curves.png")


def _draw_curves(record: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    loss, agreement = figure.subplots(1, 2)
    first = [point for point in record["curve"] if point["phase"] == 1]
    checked = [point for point in record["curve"] if "heldout_bits" in point]
    loss.plot([p["step"] for p in first], [p["loss"] / math.log(2) for p in first], label="training batch")
    held = [p for p in checked if p["phase"] == 1]
    loss.plot([p["step"] for p in held], [p["heldout_bits"] for p in held], "o-", label="held-out")
    loss.set(xlabel="step (phase 1)", ylabel="bits per token", ylim=(0, 8), title="Trunk")
    offset = max(p["step"] for p in first)
    steps = [p["step"] + (offset if p["phase"] == 2 else 0) for p in checked]
    for depth in (1, 2, 3):
        agreement.plot(steps, [p[f"agree_{depth}"] for p in checked], "o-", label=f"depth {depth}")
    agreement.axvline(offset, color="gray", linestyle=":", label="head alone from here")
    agreement.set(xlabel="step", title="Same argmax as the trunk, held-out text")
    for axis in (loss, agreement):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110, metadata={"Software": None})
