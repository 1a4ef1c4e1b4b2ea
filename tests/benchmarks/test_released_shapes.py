"""Released shapes without a checkpoint: what their weights take, and that their numbers are finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiled_mtp.benchmarks import released_shapes as tool
from compiled_mtp.models import weight_format
from compiled_mtp.models.family import FAMILIES
from compiled_mtp.models.scaled_codes import made_up_coded_formats
from compiled_mtp.models.weight_format import coded_part
from compiled_mtp.models.weights import count_parameters, read_formats
from compiled_mtp.ops.blocks import KINDS, values
from compiled_mtp.ops.int4 import dequantize
from tests.checkpoints import allocate

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_format, "reads_codes", lambda device: True)


def test_a_27b_in_q4_k_m_fits_into_24_gb() -> None:
    config = tool.model_config("27b", scaled_codes="Q4_K_M")
    formats = read_formats(config, None, CPU, None)
    names = {part.name for form in formats.values() for part in form.parts}
    assert names == {"Q4_K", "Q5_K", "Q6_K"}
    layout = FAMILIES[config.family].layout(config, {}, formats)
    # With the MTP head, the embedding and the head.
    assert 17.5e9 < count_parameters(layout, formats, torch.bfloat16) < 17.8e9


@pytest.mark.parametrize("kind", [*KINDS, "Q4_K_M"])
def test_random_codes_have_finite_values(kind: str) -> None:
    whole = tool.model_config("0.8b", scaled_codes=kind)
    config = replace(
        whole, num_layers=2, is_full_attention=(False, True), vocab_size=256, intermediate_size=512
    )
    layout = FAMILIES[config.family].layout(config, {}, dict.fromkeys(["layers.0.mixer.in_proj.weight"]))
    formats = made_up_coded_formats(layout, kind, config.num_layers, CPU)
    parameters = allocate(config, True, torch.bfloat16, formats)
    tool.fill_random(parameters)
    for name, form in formats.items():
        first, per_unit = 0, sum(one.rows * one.kind.words for one in form.parts)
        columns = parameters[name].numel() // per_unit * 128
        for part in form.parts:
            own = coded_part(form, parameters[name], parameters[f"{name}_scale"], first, columns)
            found = values(*own, part.kind)
            assert found.isfinite().all(), name
            assert found.abs().max() > 0, name
            first += part.rows


@pytest.mark.parametrize("experts", [0, 3])
def test_random_four_bit_values_have_the_mean_zero(experts: int) -> None:
    # With another mean outputs are alike, and so are the tokens of a random model.
    rows, columns, group = 64, 1024, 128
    lead = (experts,) if experts else ()
    weight = torch.empty(*lead, rows, columns // 4, dtype=torch.int16)
    scale = torch.empty(*lead, columns // group, rows, 2, dtype=torch.float16)
    torch.manual_seed(0)
    tool.fill_random({"weight": weight, "weight_scale": scale})
    pairs = zip(weight, scale, strict=True) if experts else [(weight, scale)]
    for words, groups in pairs:
        found = dequantize(words, groups)
        # Four standard errors of the mean of all values.
        assert found.mean().abs() < 4 * found.std() * found.numel() ** -0.5
        assert found.std() == pytest.approx(0.7 * columns**-0.5, rel=0.25)
