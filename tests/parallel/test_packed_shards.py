"""Ranks pack a weight all or not at all, as one rank does that has the whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from compiled_mtp.models.packing import pack_weights
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.weight_format import NO_FORMATS
from compiled_mtp.ops import packed_weight
from compiled_mtp.ops.packed_weight import find_packed
from tests import tiny
from tests.communicators.threads import ThreadCommunicator, thread_communicators

CPU = torch.device("cpu")


def packed_model(communicator: ThreadCommunicator) -> TargetModel:
    """Rank 0's down of layer 1 is not exact in half precision, rank 1's out_proj of layer 0 is larger."""
    config = tiny.tiny_config(tie_word_embeddings=True, vocab_size=96)
    target = TargetModel(config.shard(communicator.rank, 2), torch.float32, CPU, NO_FORMATS, communicator)
    generator = torch.Generator().manual_seed(communicator.rank)
    for parameter in target.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator).bfloat16())
    layers = dict(target.named_parameters())
    if communicator.rank == 0:
        layers["layers.1.ffn.down.weight"][0, :2] = torch.tensor([1e-9, 1e9])
    else:
        layers["layers.0.mixer.out_proj.weight"].mul_(1024)
    pack_weights(target, None, config, NO_FORMATS, communicator)
    return target


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="no fbgemm")
def test_ranks_pack_the_same_weights_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict(TargetModel(tiny.tiny_config(vocab_size=96), torch.float32, CPU).named_parameters())
    # The whole one's size counts: a rank's piece alone is too small.
    least = whole["layers.0.ffn.down.weight"].numel()
    monkeypatch.setattr(packed_weight, "LEAST_ELEMENTS", least)
    with ThreadPoolExecutor(2) as threads:
        models = list(threads.map(packed_model, thread_communicators(2)))
    found = []
    for model in models:
        weights = dict(model.named_parameters()) | {"head": model.head_weight}
        assert weights["layers.0.ffn.down.weight"].numel() == least // 2
        packed = {name: find_packed(weight) for name, weight in weights.items()}
        found.append({n: (len(p.matrices), p.factor) for n, p in packed.items() if p is not None})
    assert found[0] == found[1]
    assert "layers.1.ffn.down.weight" not in found[0]
    counts = {name: count for name, (count, _) in found[0].items()}
    assert counts["layers.0.mixer.out_proj.weight"] == counts["layers.0.ffn.down.weight"] == 2
    assert counts["layers.0.mixer.in_proj.weight"] == counts["head"] == 1
