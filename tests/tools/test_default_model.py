"""The default checkpoint fits its model card, and the tool that made it works as described."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from default_model_training import data
from default_model_training.card import write_card
from default_model_training.evaluation import engine_acceptance, is_looping
from default_model_training.export import load_checkpoint
from default_model_training.model import ModelShape, TrainingModel, gated_delta_rule, rope_tables
from default_model_training.training import Recipe, Trainer

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "compiled_mtp" / "default_model"
TEXT = '''class Queue:
    """A first-in, first-out container; naïve, but it works.

    >>> Queue([1, 22]).get()
    1
    """

    def __init__(self, items=()):
\tself._items = list(items)  # tab and two blanks

    def get(self):
        if not self._items:
            raise IndexError("get from an empty queue")
        return self._items.pop(0)
'''


@pytest.fixture(scope="module")
def shipped() -> tuple[TrainingModel, data.Tokenizer]:
    return load_checkpoint(CHECKPOINT)


@pytest.fixture(scope="module")
def token_ids(shipped: tuple[TrainingModel, data.Tokenizer]) -> torch.Tensor:
    return torch.tensor([shipped[1].encode(TEXT).ids])


def test_size_and_layout() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir() if path.is_file()) <= 24_000_000
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text"
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["layer_types"].count("linear_attention") >= 6
    assert config["layer_types"].count("full_attention") >= 2
    assert config["vocab_size"] % 64 == 0


def test_transformers_gives_the_same_logits(
    shipped: tuple[TrainingModel, data.Tokenizer], token_ids: torch.Tensor
) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    with torch.no_grad():
        theirs = model(token_ids).logits
        ours = shipped[0].logits(shipped[0].hidden(token_ids))
    assert theirs.abs().max() > 5
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_transformers_reads_the_tokenizer(shipped: tuple[TrainingModel, data.Tokenizer]) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    assert tokenizer(TEXT).input_ids == shipped[1].encode(TEXT).ids
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hello\n"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(Exception, match="role must be system, user or assistant, got tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("text", [TEXT, "", "\r\n\t x\u00a0é漢\U0001f600 123", "a\n\n\n        b"])
def test_tokenizer_round_trip(shipped: tuple[TrainingModel, data.Tokenizer], text: str) -> None:
    assert shipped[1].decode(shipped[1].encode(text).ids) == text


def test_special_tokens_end_a_request(shipped: tuple[TrainingModel, data.Tokenizer]) -> None:
    tokenizer = shipped[1]
    ids = [tokenizer.token_to_id(token) for token in data.SPECIAL_TOKENS]
    assert ids == [4096, 4097, 4098]
    assert tokenizer.encode("x<|endoftext|>").ids[-1] == ids[0]
    config = json.loads((CHECKPOINT / "config.json").read_text())
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert config["eos_token_id"] == ids[0]
    assert set(generation["eos_token_id"]) == {ids[0], ids[2]}


def test_card_holds_the_measured_figures() -> None:
    card = (CHECKPOINT / "README.md").read_text()
    record = json.loads((CHECKPOINT / "training.json").read_text())
    evaluation = record["evaluation"]
    assert f"**{evaluation['plain']['bits_per_byte']}**" in card
    assert record["data"]["file_list_sha256"] in card
    assert record["data"]["train_bytes"] >= data.MINIMUM_TRAINING_BYTES
    assert (CHECKPOINT / "curves.png").read_bytes().startswith(b"\x89PNG")
    for name in ("greedy", "shared_noise"):
        counts = evaluation["engine"][name]["all"]
        assert f"{counts['rounds']:,} | {counts['mean_new_tokens']:.2f}" in card


def test_the_card_is_what_the_tool_writes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "model.safetensors").symlink_to(CHECKPOINT / "model.safetensors")
    write_card(json.loads((CHECKPOINT / "training.json").read_text()), tmp_path)
    assert (tmp_path / "README.md").read_text() == (CHECKPOINT / "README.md").read_text()


def test_examples_are_requests(shipped: tuple[TrainingModel, data.Tokenizer]) -> None:
    from compiled_mtp.request import SamplingParams

    for name, kind in (("prompts.jsonl", "prompt"), ("chat.jsonl", "messages")):
        for line in (ROOT / "examples" / name).read_text().splitlines():
            request = json.loads(line)
            assert request.pop(kind)
            SamplingParams(**request)
    prompt = (ROOT / "examples" / "quicksort.txt").read_text()
    assert len(shipped[1].encode(prompt).ids) < 100


@torch.no_grad()
def test_drafts_are_those_of_decoding(
    shipped: tuple[TrainingModel, data.Tokenizer], token_ids: torch.Tensor
) -> None:
    """Compare teacher-forced acceptance with the head run as in decoding: a prefill, then a chain."""
    model = shipped[0]
    layer = model.mtp.layers[0]
    hidden = model.hidden(token_ids)
    parallel = model.drafts(token_ids, hidden, 3)

    def run(
        slots: torch.Tensor, previous: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        embedded = model.mtp.pre_fc_norm_embedding(model.model.embed_tokens(token_ids[:, slots]))
        pair = model.mtp.fc(torch.cat([embedded, model.mtp.pre_fc_norm_hidden(previous)], dim=-1))
        cos, sin = rope_tables(slots, model.shape)
        q, k, v, gate = layer.self_attn.project(layer.input_layernorm(pair), cos, sin)
        keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        causal = torch.ones(len(slots), keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - len(slots))
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=causal, enable_gqa=True)
        return model.mtp.norm(layer.add(pair, layer.self_attn.finish(mixed, gate))), keys, values

    empty = torch.zeros(1, model.shape.num_kv_heads, 0, model.shape.head_dim)
    for last in (1, 30, 90):
        slots = torch.arange(1, last + 1)
        out, keys, values = run(slots, hidden[:, :last], empty, empty)
        torch.testing.assert_close(out[:, -1], parallel[0][:, last], rtol=0, atol=1e-4)
        for depth in (2, 3):
            slot = torch.tensor([last + depth - 1])
            out, keys, values = run(slot, out[:, -1:], keys, values)
            torch.testing.assert_close(out[:, 0], parallel[depth - 1][:, slot[0]], rtol=0, atol=1e-4)


@torch.no_grad()
def test_engine_accepts_what_the_plain_head_predicts(
    shipped: tuple[TrainingModel, data.Tokenizer], token_ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain model decodes greedily; a draft counts if all drafts before it in its round were right."""
    from default_model_training import evaluation

    monkeypatch.setattr(evaluation, "PREFIX", 64)
    monkeypatch.setattr(evaluation, "NEW_TOKENS", 24)
    rows = [np.asarray(token_ids[0, i : i + 64], dtype=np.uint16) for i in (0, 40)]
    engine = engine_acceptance(CHECKPOINT, rows, 2)["greedy"]["all"]
    model, valid = shipped[0], shipped[1].get_vocab_size()
    tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
    for _ in range(27):
        best = model.logits(model.hidden(tokens)[:, -1])[:, :valid].argmax(-1)
        tokens = torch.cat([tokens, best[:, None]], 1)
    drafts = model.drafts(tokens, model.hidden(tokens), 3)
    right = [model.logits(draft)[..., :valid].argmax(-1)[:, :-1] == tokens[:, 1:] for draft in drafts]
    kept = []
    for row in range(2):
        last = 64
        while last < 64 + 23:
            hits = [bool(right[depth][row, last + depth]) for depth in range(3)]
            kept.append([*hits, False].index(False))
            last += kept[-1] + 1
    assert (engine["rounds"], engine["mean_new_tokens"]) == (len(kept), round(1 + sum(kept) / len(kept), 4))
    assert engine["mean_new_tokens"] > 1.5


def test_gated_delta_rule_is_the_recurrence() -> None:
    generator = torch.Generator().manual_seed(0)
    length, key_heads, value_heads, width = 70, 1, 2, 8
    q, k = (F.normalize(torch.randn(1, length, key_heads, width, generator=generator), dim=-1) for _ in "qk")
    v = torch.randn(1, length, value_heads, width, generator=generator)
    g = -torch.rand(1, length, value_heads, generator=generator)
    beta = torch.rand(1, length, value_heads, generator=generator)
    out = gated_delta_rule(q, k, v, g, beta)
    state = torch.zeros(value_heads, width, width)
    for t in range(length):
        state = state * g[0, t].exp()[:, None, None]
        delta = beta[0, t][:, None] * (v[0, t] - (k[0, t] @ state).squeeze(-2))
        state = state + k[0, t][..., None] * delta[:, None]
        torch.testing.assert_close(out[0, t], (q[0, t] @ state).squeeze(-2), rtol=0, atol=1e-5)


def test_looping_is_a_repeated_16_gram() -> None:
    assert not is_looping(list(range(40)))
    assert is_looping([*range(20), 7, *([1, 2, 3] * 7)])
    assert not is_looping([5] * 16)
    assert is_looping([5] * 17)


@pytest.fixture
def stdlib(tmp_path: Path) -> Path:
    """A small fake standard library, with files that must be left out."""
    root = tmp_path / "lib"
    for index in range(60):
        path = root / f"package{index % 3}" / f"module{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        body = "".join(f"def function_{n}(value):\n    return value + {n * index}\n\n\n" for n in range(12))
        path.write_text(f'"""Module {index}."""\n\nimport os\n\n\n{body}')
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.py").write_text("import nothing\n")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    (root / "notes.txt").write_text("not source\n")
    return root


def test_sources_and_split(stdlib: Path) -> None:
    names = data.find_sources(stdlib)
    assert len(names) == 61
    assert names == sorted(names)
    train, heldout, summary = data.read_split(stdlib, minimum_bytes=1)
    assert (len(train), len(heldout)) == (summary.train_files, summary.heldout_files)
    assert summary.heldout_files == sum(map(data.is_held_out, names)) > 0
    assert summary.skipped_files == 1
    assert data.read_split(stdlib, minimum_bytes=1)[2] == summary
    (stdlib / "package0" / "module0.py").write_text("changed = True\n")
    assert data.read_split(stdlib, minimum_bytes=1)[2].file_list_sha256 != summary.file_list_sha256


def test_share_of_held_out_paths() -> None:
    held = sum(data.is_held_out(f"package/module{index}.py") for index in range(5000))
    assert 150 < held < 250


def test_too_little_text_is_refused(stdlib: Path) -> None:
    with pytest.raises(ValueError, match=r"stdlib must hold at least 8000000 bytes .*--stdlib"):
        data.read_split(stdlib)


def small_corpus(stdlib: Path) -> data.Corpus:
    train, heldout, summary = data.read_split(stdlib, minimum_bytes=1)
    tokenizer = data.train_tokenizer(train, entries=300)
    assert tokenizer.get_vocab() == data.train_tokenizer(train, entries=300).get_vocab()
    arrays = [
        [np.asarray(tokenizer.encode(t).ids, dtype=np.uint16) for t in texts] for texts in (train, heldout)
    ]
    return data.Corpus(tokenizer, np.concatenate(arrays[0]), arrays[1], summary)


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_training_reduces_the_loss_and_resumes(
    stdlib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ModelShape(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        full_attention_interval=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        linear_key_heads=1,
        linear_value_heads=2,
        linear_head_dim=32,
    )
    recipe = Recipe(
        sequence=64,
        batch=4,
        steps=60,
        warmup=5,
        learning_rate=1e-2,
        head_steps=20,
        head_sequence=64,
        head_batch=4,
        own_sequences=4,
        written_sequences=8,
        own_prefix=32,
        eval_every=20,
        checkpoint_every=40,
    )
    corpus, device = small_corpus(stdlib), torch.device("cpu")
    work, out = tmp_path / "work", tmp_path / "out"
    trainer = Trainer(shape, recipe, corpus, work, out, device)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_train_head", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(resume=False)
    points = trainer.progress.points
    bits = [point["heldout_bits"] for point in points if "heldout_bits" in point and point["phase"] == 1]
    assert bits[-1] < 0.7 * bits[0]
    resumed = Trainer(shape, recipe, corpus, work, out, device)
    resumed.run(resume=True)
    assert resumed.progress.points[: len(points)] == points
    trunk = trainer.model.model.state_dict()
    exported, _ = load_checkpoint(out)
    assert all(torch.equal(value, trunk[name]) for name, value in exported.model.state_dict().items())
    assert not torch.equal(resumed.model.mtp.fc.weight, trainer.model.mtp.fc.weight)
    finished = Trainer(shape, recipe, corpus, work, out, device)
    finished.run(resume=True)
    assert torch.equal(finished.model.mtp.fc.weight, resumed.model.mtp.fc.weight)
    with pytest.raises(ValueError, match="--resume must continue the same recipe"):
        Trainer(shape, Recipe(steps=1), corpus, work, out, device).run(resume=True)
