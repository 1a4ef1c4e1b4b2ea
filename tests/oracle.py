"""transformers' model of a checkpoint, with which tests compare ours."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.checkpoints import read_stored, unstack


@dataclass(frozen=True)
class Oracle:
    """transformers' float32 eager model and MTP head of one checkpoint."""

    model: Any
    mtp: Any | None

    @torch.no_grad()
    def target(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """token_ids [T] -> hidden states after the final norm [T,H], logits [T,V]."""
        hidden = self.model.model(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]
        return hidden, self.model.lm_head(hidden)

    @torch.no_grad()
    def draft(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, cache: Any = None, first_position: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Pairs (token_ids [T], hidden [T,H] of the position before) -> h' [T,H], logits [T,V], cache.

        `first_position` is the position of the first token; pass the returned cache to continue a chain.
        """
        from transformers.cache_utils import MtpCache

        assert self.mtp is not None
        cache = cache if cache is not None else MtpCache(config=self.mtp.config)
        positions = torch.arange(first_position, first_position + len(token_ids))[None]
        out = self.mtp.forward_layer(0, hidden[None], positions, cache, input_ids=token_ids[None])
        return out[0], self.model.lm_head(out[0]), cache


def oracle(directory: Path) -> Oracle:
    """Load a checkpoint with transformers, in float32.

    transformers reads a copy in which FP8 is dequantised and every expert has its own tensors: its MTP model
    cannot read a head whose experts are stored differently from the trunk's (5.23).
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    stored = {n: w for n, w in read_stored(directory).items() if not n.startswith("model.visual.")}
    copy = directory / "oracle"
    copy.mkdir(exist_ok=True)
    plain = {re.sub(r"^model\.language_model\.", "model.", n): w for n, w in unstack(stored, "").items()}
    save_file(
        {n: w.contiguous() for n, w in plain.items()}, copy / "model.safetensors", metadata={"format": "pt"}
    )
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config", None)
    text = config.pop("text_config", {})
    config.pop("vision_config", None)
    (copy / "config.json").write_text(json.dumps(config | text))
    loaded = AutoConfig.from_pretrained(copy)
    loaded.num_mtp_layers, loaded.mtp_layer_types = 1, ["full_attention"]
    model = AutoModelForCausalLM.from_pretrained(
        copy, config=loaded, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    has_head = any(name.startswith("mtp.") for name in stored)
    return Oracle(model, MtpModel.from_pretrained(model).eval() if has_head else None)
