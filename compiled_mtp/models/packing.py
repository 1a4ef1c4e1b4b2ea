"""Packs the weights of a CPU's products in half precision, where `ops.packed_weight` allows it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from compiled_mtp.communicators.communicator import Communicator
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.linear import Linear
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.row_unit import weights_of
from compiled_mtp.models.weight_format import Formats
from compiled_mtp.ops.k_splits import count_cpu_k_splits
from compiled_mtp.ops.packed_weight import largest_exponent, may_pack, pack, unpack

logger = logging.getLogger(__name__)


def pack_weights(
    target: TargetModel,
    draft: DraftModel | None,
    config: ModelConfig,
    formats: Formats,
    communicator: Communicator | None,
) -> None:
    """Pack the products' weights of both models that `ops.packed_weight.pack` accepts; keep the weights too.

    Only the whole weights' sizes and values decide what is packed, so tokens do not depend on the number of
    ranks: a rank packs its shard of a weight if all ranks can pack theirs. A weight that is summed in K
    splits is packed per K split. config: of the whole model. Attaches the packed copies to the weights.
    """
    models = [target] if draft is None else [target, draft]
    whole: list[nn.Module] = [*models]
    if communicator is not None:
        meta = (torch.float32, torch.device("meta"), formats)
        whole = [type(model)(config, *meta) for model in models]
    found = zip(_products(models), _products(whole), strict=True)
    products = [
        (weight, 1 if count == 1 else count * weight.shape[1] // of.shape[1])
        for (weight, _), (of, count) in found
        if may_pack(weight, of.numel())
    ]
    exponents = _most([largest_exponent(weight) for weight, _ in products], communicator)
    failed = [
        int(not pack(weight, k_splits, exponent))
        for (weight, k_splits), exponent in zip(products, exponents, strict=True)
    ]
    packed = 0
    for (weight, _), has_failed in zip(products, _most(failed, communicator), strict=True):
        if has_failed:
            unpack(weight)
        else:
            packed += weight.numel()
    if packed:
        logger.info("%d MiB of weights are packed in half precision too", packed * 2 >> 20)


def _products(models: Sequence[nn.Module]) -> Iterator[tuple[torch.Tensor, int]]:
    """The weights of products, each with the number of K splits in which the whole weight is summed."""
    for model in models:
        for module in model.modules():
            for weight in weights_of([module]):
                is_summed = isinstance(module, Linear) and module.is_before_norm
                yield weight, count_cpu_k_splits(weight.shape[1]) if is_summed else 1
        if isinstance(model, TargetModel) and model.is_tied and not model.is_head_packed:
            yield model.head_weight, 1


def _most(values: list[int], communicator: Communicator | None) -> list[int]:
    """For each value the largest of all ranks' values."""
    if communicator is None or not values:
        return values
    most: list[int] = communicator.gather(torch.tensor(values)).amax(0).tolist()
    return most
