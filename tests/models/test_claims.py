"""Quantization configs of released checkpoints, copied word for word."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compiled_mtp.models.formats.claims import Claims, claims_of

OFFICIAL_GPTQ = """{"bits":4,"group_size":128,"sym":true,"desc_act":false,"quant_method":"gptq",
  "dynamic":{"lm_head":{},"model.language_model.embed_tokens":{},"-:.*attn.*":{},"-:.*shared_expert.*":{},
  "-:.*mtp.*":{},"-:.*visual.*":{}}}"""
GPTQMODEL = """{"bits":4,"group_size":32,"sym":false,"desc_act":true,"quant_method":"gptq",
  "checkpoint_format":"gptq_v2","lm_head":false,"pack_dtype":"int32","true_sequential":true,
  "damp_percent":0.05,"meta":{"quantizer":["gptqmodel:7.7.0"]},
  "dynamic":{"+:.*lm_head$":{"bits":8,"group_size":64}}}"""
AUTO_ROUND = """{"quant_method":"auto-round",
  "packing_format":"auto_round:auto_gptq","bits":4,"group_size":128,
  "sym":true,"data_type":"int","autoround_version":"0.9.0","iters":200,
  "block_name_to_quantize":"model.language_model.layers",
  "extra_config":{"model.language_model.layers.0.linear_attn.norm":{"bits":16,"data_type":"float"},
  "mtp.fc":{"bits":16,"data_type":"float"}}}"""
AWQ = """{"quant_method":"awq","bits":4,"group_size":128,"zero_point":true,"version":"gemm",
  "modules_to_not_convert":["visual","mtp","in_proj_b","in_proj_a"]}"""
PACK_QUANTIZED = """{"quant_method":"compressed-tensors","format":"pack-quantized",
  "quantization_status":"compressed","config_groups":{"group_0":{"targets":["Linear"],
  "weights":{"num_bits":4,"type":"int","symmetric":true,"strategy":"group","group_size":32,"dynamic":false,
  "actorder":null,"observer":"mse","observer_kwargs":{},"block_structure":null},
  "input_activations":null,"output_activations":null}},
  "ignore":["lm_head","mtp.fc","re:.*in_proj_[ab]$"],"kv_cache_scheme":null,"sparsity_config":{},
  "transform_config":{}}"""
PACK_CHANNEL = """{"quant_method":"compressed-tensors","format":"pack-quantized","config_groups":{"group_0":
  {"targets":["Linear"],"weights":{"num_bits":8,"type":"int","symmetric":false,"strategy":"channel",
  "group_size":null,"dynamic":false,"actorder":"weight","observer":"minmax"}}},"ignore":[]}"""
FP8_DYNAMIC = """{"quant_method":"compressed-tensors","format":"float-quantized","config_groups":{"group_0":
  {"targets":["Linear"],"weights":{"num_bits":8,"type":"float","strategy":"channel","symmetric":true,
  "dynamic":false},"input_activations":{"num_bits":8,"type":"float","strategy":"token","dynamic":true,
  "symmetric":true}}},"ignore":["lm_head"]}"""
NVFP4 = """{"quant_method":"compressed-tensors","format":"nvfp4-pack-quantized","config_groups":{"group_0":
  {"targets":["Linear"],"weights":{"num_bits":4,"type":"float","strategy":"tensor_group","group_size":16,
  "symmetric":true,"dynamic":false,"scale_dtype":"torch.float8_e4m3fn"},
  "input_activations":{"num_bits":4,"type":"float","dynamic":"local"}}},"ignore":["re:.*linear_attn.*"]}"""
MODELOPT_27B = """{"config_groups":{"group_0":{
  "input_activations":{"dynamic":false,"num_bits":8,"type":"float"},
  "weights":{"dynamic":false,"num_bits":8,"type":"float"},
  "targets":["model.language_model.layers.0.linear_attn.out_proj"]},
 "group_1":{"weights":{"dynamic":false,"num_bits":4,"type":"float","group_size":16},"targets":["lm_head"]}},
 "quantized_layers":{"model.language_model.layers.0.linear_attn.out_proj":{"quant_algo":"FP8"},
 "model.language_model.layers.0.mlp.gate_proj":{"quant_algo":"W4A16_NVFP4","group_size":16},
 "lm_head":{"quant_algo":"W4A16_NVFP4","group_size":16}},
 "ignore":["mtp*","mtp.layers.0*"],"quant_algo":"MIXED_PRECISION",
 "kv_cache_scheme":{"dynamic":false,"num_bits":8,"type":"float"},
 "producer":{"name":"modelopt","version":"0.45.0"},"quant_method":"modelopt"}"""
MODELOPT_122B = """{"config_groups":{"group_0":{"weights":{"dynamic":false,"num_bits":4,"type":"float",
  "group_size":16},"input_activations":{"dynamic":false,"num_bits":4,"type":"float","group_size":16},
  "targets":["Linear"]}},"ignore":["lm_head","model.language_model.layers.0.linear_attn*","mtp*"],
  "quant_algo":"NVFP4","quant_method":"modelopt"}"""


@pytest.mark.parametrize(
    ("text", "claims"),
    [
        (OFFICIAL_GPTQ, Claims(group_sizes=(128,), is_symmetric=True)),
        (
            GPTQMODEL,
            Claims(group_sizes=(32, 64), zero_offset=0, is_symmetric=False, is_reordered=True),
        ),
        (AUTO_ROUND, Claims(group_sizes=(128,), zero_offset=1, is_symmetric=True)),
        (AWQ, Claims(group_sizes=(128,))),
        (PACK_QUANTIZED, Claims(group_sizes=(32,))),
        (PACK_CHANNEL, Claims(group_sizes=(-1,))),
        (FP8_DYNAMIC, Claims()),
        (NVFP4, Claims()),
        (MODELOPT_27B, Claims()),
        (MODELOPT_122B, Claims()),
        ('{"quant_method":"fp8","weight_block_size":[128,128]}', Claims(is_fp8=True)),
    ],
)
def test_released_configs(text: str, claims: Claims) -> None:
    section: dict[str, Any] = json.loads(text)
    assert claims_of(section) == claims
