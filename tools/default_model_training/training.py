"""The two training phases: trunk and MTP head together, then the head alone on the frozen trunk."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiled_mtp import Engine, EngineConfig, SamplingParams
from default_model_training.data import Corpus, Tokens
from default_model_training.export import export_checkpoint, stored_dtype
from default_model_training.model import ModelShape, TrainingModel

DEPTH_WEIGHTS = (0.4, 0.35, 0.25)
# The most held-out sequences of a report.
_HELDOUT_ROWS = 64


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights besides the data and the shape."""

    seed: int = 0
    sequence: int = 1024
    batch: int = 64
    steps: int = 2300
    learning_rate: float = 3e-3
    warmup: int = 150
    weight_decay: float = 0.5
    mtp_weight: float = 0.4
    head_steps: int = 1000
    head_sequence: int = 512
    head_batch: int = 128
    head_learning_rate: float = 2e-3
    head_temperature: float = 0.8
    own_sequences: int = 4096
    written_sequences: int = 12288
    own_prefix: int = 192
    report_every: int = 50
    eval_every: int = 300
    checkpoint_every: int = 600


def mixed_precision(device: torch.device) -> torch.autocast:
    """Return bfloat16 autocast on a GPU; it is disabled on a CPU, where it is slower."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


class Progress:
    """Prints one line of loss and tokens/s per interval and keeps the points of the curves."""

    def __init__(self, path: Path, points: list[dict[str, float]]) -> None:
        self.path, self.points = path, points
        self.since, self.tokens = time.perf_counter(), 0

    def report(self, phase: int, step: int, total: int, values: dict[str, float]) -> None:
        """Print and keep `values`; tokens counted since the last report give tokens/s."""
        now = time.perf_counter()
        rate = self.tokens / (now - self.since)
        self.since, self.tokens = now, 0
        self.points.append({"phase": phase, "step": step, **values})
        shown = " ".join(f"{name} {value:.4g}" for name, value in values.items())
        print(f"phase {phase} step {step}/{total} {shown} {rate:,.0f} tokens/s", flush=True)
        self.path.write_text(json.dumps(self.points))


def windows(stream: Tensor, length: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield endless batches [batch, length + 1] of `stream` [n]: shuffled windows, new offset every epoch."""
    reach = torch.arange(length + 1, device=stream.device)
    while True:
        offset = int(torch.randint(length, (1,), generator=generator))
        starts = torch.arange(offset, len(stream) - length - 1, length)
        starts = starts[torch.randperm(len(starts), generator=generator)].to(stream.device)
        if len(starts) < batch:
            starts = starts.repeat(batch // max(len(starts), 1) + 1)
        for at in range(0, len(starts) - batch + 1, batch):
            yield stream[starts[at : at + batch, None] + reach].long()


def cosine(step: int, total: int, warmup: int) -> float:
    """Return the learning rate's factor: linear warm-up, then a cosine to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


def head_losses(
    hidden: Tensor, drafts: list[Tensor], weight: Tensor, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean losses: the trunk's cross-entropy, and per depth the drafts' hard and distilled loss.

    hidden and each of drafts [B, T, H], weight [V, H], labels [B, T]. The distilled loss is the cross-entropy
    against the trunk's own (detached) distribution at the same position, both at `temperature`.
    """
    trunk = F.linear(hidden, weight.to(hidden.dtype)).float()
    trunk_loss = F.cross_entropy(trunk.flatten(0, 1), labels.flatten())
    target = (trunk.detach() / temperature).softmax(-1)
    hard, soft = [], []
    for depth, draft in enumerate(drafts, start=1):
        logits = F.linear(draft, weight.to(draft.dtype)).float()
        log_probs = logits[:, depth:].log_softmax(-1)
        hard.append(-log_probs.gather(-1, labels[:, depth:, None]).mean())
        tempered = (logits[:, depth:] / temperature).log_softmax(-1)
        soft.append(-(target[:, depth:] * tempered).sum(-1).mean())
    return trunk_loss, torch.stack(hard), torch.stack(soft)


def optimizer_for(parameters: list[tuple[str, nn.Parameter]], rate: float, decay: float) -> torch.optim.AdamW:
    """Return AdamW with decay on matrices only."""
    matrices = [p for name, p in parameters if p.dim() >= 2 and "conv1d" not in name]
    others = [p for name, p in parameters if p.dim() < 2 or "conv1d" in name]
    fused = matrices[0].is_cuda
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


@torch.no_grad()
def heldout_metrics(model: TrainingModel, stream: Tensor, length: int) -> dict[str, float]:
    """Return the held-out bits per token and, per depth, how often draft and trunk have the same argmax."""
    was_training = model.training
    model.eval()
    torch.compiler.set_stance("force_eager")
    starts = torch.arange(0, len(stream) - length - 1, length, device=stream.device)
    starts = starts[:: max(len(starts) // _HELDOUT_ROWS, 1)][:_HELDOUT_ROWS]
    rows = stream[starts[:, None] + torch.arange(length + 1, device=stream.device)].long()
    with mixed_precision(stream.device):
        hidden = model.hidden(rows[:, :-1])
        drafts = model.drafts(rows[:, :-1], hidden, 3)
        logits = model.logits(hidden).float()
        bits = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item() / math.log(2)
        best = logits.argmax(-1)
        agree = [(model.logits(d).argmax(-1) == best)[:, i + 1 :] for i, d in enumerate(drafts)]
    model.train(was_training)
    torch.compiler.set_stance("default")
    metrics = {"heldout_bits": bits}
    return metrics | {f"agree_{i + 1}": a.float().mean().item() for i, a in enumerate(agree)}


class Trainer:
    """Runs both phases on one device, with the resume file in `work` and exports in `out`."""

    def __init__(
        self, shape: ModelShape, recipe: Recipe, corpus: Corpus, work: Path, out: Path, device: torch.device
    ) -> None:
        self.recipe, self.corpus, self.work, self.out, self.device = recipe, corpus, work, out, device
        torch.manual_seed(recipe.seed)
        self.model = TrainingModel(shape)
        self.model.initialise(recipe.seed)
        self.model.to(device)
        self.train_stream = self._stream([corpus.train])
        self.heldout_stream = self._stream(corpus.heldout)
        work.mkdir(parents=True, exist_ok=True)
        self.progress = Progress(work / "curve.json", [])
        self.losses: Callable[..., tuple[Tensor, Tensor, Tensor]] = head_losses
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
            self.model.mtp.compile(dynamic=False)
            self.losses = torch.compile(head_losses, dynamic=False)

    def _stream(self, parts: list[Tokens]) -> Tensor:
        return torch.cat([torch.from_numpy(part.astype("int32")) for part in parts]).to(self.device)

    def _save(self, phase: int, step: int, optimizer: torch.optim.Optimizer | None) -> None:
        content: dict[str, Any] = {
            "phase": phase,
            "step": step,
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimizer": optimizer.state_dict() if optimizer else None,
            "points": self.progress.points,
        }
        torch.save(content, self.work / "resume.tmp")
        (self.work / "resume.tmp").replace(self.work / "resume.pt")
        export_checkpoint(self.model, self.corpus.tokenizer, self.out)

    def run(self, resume: bool) -> None:
        """Train both phases (from the last checkpoint with `resume`) and export."""
        phase, step, state = 1, 0, None
        path = self.work / "resume.pt"
        if resume and path.exists():
            saved = torch.load(path, map_location=self.device, weights_only=True)
            if saved["recipe"] != asdict(self.recipe):
                raise ValueError(f"--resume must continue the same recipe, got {path} of another; remove it")
            self.model.load_state_dict(saved["model"])
            self.progress.points = saved["points"]
            phase, step, state = saved["phase"], saved["step"], saved["optimizer"]
        if phase == 1:
            self._train_together(step, state)
            self._round_trunk()
            self._save(2, 0, None)
            step, state = 0, None
        if phase < 3:
            self._train_head(step, state)
            self._save(3, 0, None)

    def _train_together(self, first: int, state: dict[str, Any] | None) -> None:
        recipe, model = self.recipe, self.model
        optimizer = optimizer_for(list(model.named_parameters()), recipe.learning_rate, recipe.weight_decay)
        if state:
            optimizer.load_state_dict(state)
        generator = torch.Generator().manual_seed(recipe.seed + first)
        batches = windows(self.train_stream, recipe.sequence, recipe.batch, generator)
        weights = torch.tensor(DEPTH_WEIGHTS, device=self.device)
        model.train()
        for step in range(first, recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * cosine(step, recipe.steps, recipe.warmup)
            rows = next(batches)
            with mixed_precision(self.device):
                hidden = model.hidden(rows[:, :-1])
                drafts = model.drafts(rows[:, :-1], hidden, len(DEPTH_WEIGHTS))
                embedding = model.model.embed_tokens.weight
                trunk, hard, soft = self.losses(hidden, drafts, embedding, rows[:, 1:], 1.0)
                loss = trunk + recipe.mtp_weight * (0.5 * (hard + soft) * weights).sum()
            self._update(loss, optimizer)
            self.progress.tokens += rows.shape[0] * recipe.sequence
            self._after(1, step, recipe.steps, {"loss": trunk, "mtp": (hard * weights).sum()}, optimizer)

    def _train_head(self, first: int, state: dict[str, Any] | None) -> None:
        recipe, model = self.recipe, self.model
        model.eval()
        generator = torch.Generator().manual_seed(recipe.seed + 1)
        written = windows(self.train_stream, recipe.head_sequence, recipe.written_sequences, generator)
        texts = [next(written).int(), self._own_text()]
        hiddens = [self._hiddens(rows) for rows in texts]
        optimizer = optimizer_for(list(model.mtp.named_parameters()), recipe.head_learning_rate, 0.01)
        if state:
            optimizer.load_state_dict(state)
        generator = torch.Generator().manual_seed(recipe.seed + 1 + first)
        weights = torch.tensor(DEPTH_WEIGHTS, device=self.device)
        embedding = model.model.embed_tokens.weight.detach()
        for step in range(first, recipe.head_steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.head_learning_rate * cosine(step, recipe.head_steps, 50)
            half = recipe.head_batch // 2
            picked = [
                torch.randint(len(rows), (half,), generator=generator).to(self.device) for rows in texts
            ]
            rows = torch.cat([rows[at] for rows, at in zip(texts, picked, strict=True)]).long()
            hidden = torch.cat([rows[at] for rows, at in zip(hiddens, picked, strict=True)]).float()
            with mixed_precision(self.device):
                drafts = model.drafts(rows[:, :-1], hidden, len(DEPTH_WEIGHTS))
                _, hard, soft = self.losses(hidden, drafts, embedding, rows[:, 1:], recipe.head_temperature)
                loss = (soft * weights).sum()
            self._update(loss, optimizer)
            self.progress.tokens += rows.shape[0] * recipe.head_sequence
            self._after(
                2, step, recipe.head_steps, {"distil": loss, "mtp": (hard * weights).sum()}, optimizer
            )

    @torch.no_grad()
    def _hiddens(self, rows: Tensor) -> Tensor:
        """Return the frozen trunk's hiddens [n, T, H] bfloat16 for rows [n, T + 1]."""
        torch.compiler.set_stance("force_eager")
        with mixed_precision(self.device):
            parts = [self.model.hidden(part[:, :-1].long()).bfloat16() for part in rows.split(128)]
        torch.compiler.set_stance("default")
        return torch.cat(parts)

    def _update(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()

    def _after(
        self, phase: int, step: int, total: int, losses: dict[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        done = step + 1
        is_checked = done % self.recipe.eval_every == 0 or done == total
        if is_checked or done % self.recipe.report_every == 0:
            values = {name: value.item() for name, value in losses.items()}
            if is_checked:
                values |= heldout_metrics(self.model, self.heldout_stream, self.recipe.head_sequence)
            self.progress.report(phase, done, total, values)
        if done % self.recipe.checkpoint_every == 0 and done < total:
            self._save(phase, done, optimizer)

    @torch.no_grad()
    def _round_trunk(self) -> None:
        """Round the trunk to the stored dtype, so that the head is trained on what ships."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(parameter.to(stored_dtype(name)).float())

    def _own_text(self) -> Tensor:
        """Return the trunk's own continuations of training text at temperatures 0 to 1, int32 on the device.

        The engine writes them, from the checkpoint that the first phase has exported.
        """
        recipe, started = self.recipe, time.perf_counter()
        generator = torch.Generator().manual_seed(recipe.seed + 2)
        prefixes = windows(self.train_stream, recipe.own_prefix - 1, recipe.own_sequences, generator)
        rows, length = next(prefixes), recipe.head_sequence + 1
        batch = min(len(rows), 256)
        config = EngineConfig(
            model=self.out,
            device=self.device.type,
            mtp_step=0,
            compile="off",
            prefix_cache=False,
            max_batch=batch,
            max_model_len=length,
            num_blocks=batch * (length // EngineConfig().block_size + 1) + 1,
        )
        params = [
            SamplingParams(
                max_tokens=length - recipe.own_prefix,
                temperature=(0.0, 0.8, 0.8, 1.0)[index % 4],
                seed=recipe.seed + index,
                ignore_eos=True,
            )
            for index in range(len(rows))
        ]
        engine = Engine(config)
        written = torch.tensor([one.new_token_ids for one in engine.generate(rows.tolist(), params)])
        engine.close()
        print(f"{len(rows):,} rows of {length} tokens in {time.perf_counter() - started:.0f} s", flush=True)
        return torch.cat([rows, written.to(rows)], 1).int()
