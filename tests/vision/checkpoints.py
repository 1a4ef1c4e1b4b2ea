"""Tiny random checkpoints with a vision tower, images for them, and transformers as oracle."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.checkpoints import write_checkpoint

DEPTH, HIDDEN, HEADS, INNER, SIDE = 2, 96, 4, 160, 12
# An area from which an image of one cell is possible.
LEAST_PIXELS, MOST_PIXELS = 1024, 1 << 20
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' or part.type == 'image_url' or 'image' in part %}"
    "{%- if message.role == 'system' %}{{ raise_exception('System message cannot contain images.') }}"
    "{%- endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


def write_vision_checkpoint(directory: Path, family: str = "qwen3_5", **options: Any) -> Path:
    """Write a checkpoint as `write_checkpoint` does, with a tower of two layers, a tokenizer and a template.

    An image of h by w cells of 32 pixels gives h * w tokens; sizes from one cell on are kept as they are.
    """
    write_checkpoint(directory, family, vision=False, tokenizer=True, **options)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    start, end, image, video = (tokenizer.token_to_id(token) for token in SPECIAL)
    config = json.loads((directory / "config.json").read_text())
    config |= {"image_token_id": image, "video_token_id": video}
    config |= {"vision_start_token_id": start, "vision_end_token_id": end}
    hidden_size = config["text_config"]["hidden_size"]
    config["vision_config"] = {
        "model_type": family,
        "depth": DEPTH,
        "hidden_size": HIDDEN,
        "num_heads": HEADS,
        "intermediate_size": INNER,
        "out_hidden_size": hidden_size,
        "num_position_embeddings": SIDE**2,
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_preprocessor(directory)
    file = directory / "model.safetensors"
    tower = {f"model.visual.{name}": weight for name, weight in _tower(hidden_size).items()}
    # transformers reads one file.
    save_file(load_file(file) | tower, file, metadata={"format": "pt"})
    return directory


def write_preprocessor(directory: Path, least: int = LEAST_PIXELS, most: int = MOST_PIXELS) -> None:
    """Write preprocessor_config.json with these areas."""
    values: dict[str, Any] = {
        "size": {"shortest_edge": least, "longest_edge": most},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(values))


def _tower(out: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def linear(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
        return {
            f"{name}.weight": torch.randn(rows, columns, generator=generator) * (1.5 / columns**0.5),
            f"{name}.bias": torch.randn(rows, generator=generator) * 0.1,
        }

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {
            f"{name}.weight": 1 + 0.2 * torch.randn(HIDDEN, generator=generator),
            f"{name}.bias": 0.1 * torch.randn(HIDDEN, generator=generator),
        }

    weights = linear("patch_embed.proj", HIDDEN, 1536)
    weights["patch_embed.proj.weight"] = weights["patch_embed.proj.weight"].view(HIDDEN, 3, 2, 16, 16)
    weights["pos_embed.weight"] = torch.randn(SIDE**2, HIDDEN, generator=generator)
    for i in range(DEPTH):
        block = f"blocks.{i}."
        weights |= norm(block + "norm1") | norm(block + "norm2")
        weights |= linear(block + "attn.qkv", 3 * HIDDEN, HIDDEN) | linear(
            block + "attn.proj", HIDDEN, HIDDEN
        )
        weights |= linear(block + "mlp.linear_fc1", INNER, HIDDEN)
        weights |= linear(block + "mlp.linear_fc2", HIDDEN, INNER)
    weights |= norm("merger.norm") | linear("merger.linear_fc1", 4 * HIDDEN, 4 * HIDDEN)
    weights |= linear("merger.linear_fc2", out, 4 * HIDDEN)
    return {name: weight.to(torch.bfloat16) for name, weight in weights.items()}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture of random coarse patterns."""
    rng = random.Random(seed)
    small = Image.frombytes("RGB", (7, 5), rng.randbytes(7 * 5 * 3))
    return small.resize((width, height), Image.Resampling.BICUBIC)


@dataclass(frozen=True)
class VisionOracle:
    """transformers' float32 eager model with its tower, and the slow image processor."""

    model: Any
    processor: Any
    image_token_id: int
    num_ids: int

    @torch.no_grad()
    def features(self, image: Image.Image) -> torch.Tensor:
        """The features [n, hidden_size] of an image."""
        values, grid = self.process([image])
        features: torch.Tensor = self.model.model.visual(values, grid_thw=grid).pooler_output
        return features

    def process(self, images: Sequence[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
        """The patches of all images, and their grids [images, 3]."""
        made = self.processor(images=list(images), return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]

    @torch.no_grad()
    def greedy(self, token_ids: Sequence[int], images: Sequence[Image.Image], count: int) -> list[int]:
        """The first `count` greedy tokens after a prompt in which every image has all of its pads."""
        ids = torch.tensor([list(token_ids)])
        values, grid = self.process(images)
        made = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=values,
            image_grid_thw=grid,
            mm_token_type_ids=(ids == self.image_token_id).long(),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            # The engine draws no ids that the tokenizer lacks.
            suppress_tokens=[*range(self.num_ids, self.model.config.text_config.vocab_size)],
        )
        return made[0, len(token_ids) :].tolist()


def vision_oracle(directory: Path) -> VisionOracle:
    """Load a checkpoint of `write_vision_checkpoint` with transformers, in float32."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = json.loads((directory / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    num_ids = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    return VisionOracle(model, processor, config["image_token_id"], num_ids)
