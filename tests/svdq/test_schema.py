"""The list of stored tensors against the tables of the format, and the checks on sizes that come from a header."""

import json

import pytest
import torch

from svdq import schema
from svdq.config import LayerConfig
from svdq.errors import CheckpointError
from svdq.formats import FORMATS


def test_the_canonical_tensors_of_the_write_ups_example_have_its_shapes():
    shapes = schema.canonical_shapes(2048, 1024, 16, 64)
    assert shapes == {
        "qweight": (2048, 512),
        "w_scales": (2048, 16),
        "proj_down": (1024, 16),
        "proj_up": (2048, 16),
        "smooth": (1024,),
        "act_clip": (),
        "bias": (2048,),
    }


def test_wide_groups_and_rank_0_change_scales_and_factors_only():
    shapes = schema.canonical_shapes(96, 384, 0, 192)
    assert (shapes["qweight"], shapes["w_scales"]) == ((96, 192), (96, 2))
    assert (shapes["proj_down"], shapes["proj_up"]) == ((384, 0), (96, 0))


def test_the_canonical_types_are_those_of_the_format():
    assert {rule.suffix: rule.dtype for rule in schema.CANONICAL} == {
        "qweight": torch.uint8,
        "w_scales": torch.float16,
        "proj_down": torch.float16,
        "proj_up": torch.float16,
        "smooth": torch.float32,
        "act_clip": torch.float32,
        "bias": None,
    }


def test_only_smooth_clip_and_bias_may_be_missing():
    assert [rule.suffix for rule in schema.CANONICAL if rule.optional] == ["smooth", "act_clip", "bias"]
    assert not any(rule.optional for rule in schema.PACKED)


def test_the_packed_tensors_have_the_names_and_shapes_of_the_format():
    shapes = {rule.suffix: rule.resolve(n=256, k=640, r=32) for rule in schema.PACKED}
    assert shapes == {
        "qweight": (256, 320),
        "wscales": (10, 256),
        "lora_down": (640, 32),
        "lora_up": (256, 32),
        "smooth": (640,),
        "smooth_orig": (640,),
        "bias": (256,),
    }


def test_the_quantization_config_is_the_one_of_the_format():
    packing = {"layout": "canonical", "version": 1}
    config = schema.quantization_config(
        format="w4a4",
        numbers=FORMATS["w4a4"].config(LayerConfig()),
        rank=16,
        smooth=True,
        rotation="hadamard64",
        ignore=["lm_head"],
        packing=packing,
    )
    version = config["producer"].pop("version")
    assert isinstance(version, str) and version
    assert config == {
        "quant_method": "svdquant",
        "method": "svdquant",
        "format": "w4a4",
        "rank": 16,
        "weight": {"dtype": "int4", "group_size": 64, "scale_dtype": "float16", "symmetric": True},
        "activation": {"dtype": "int4", "group_size": 64, "dynamic": True, "symmetric": True},
        "smooth": True,
        "rotation": "hadamard64",
        "ignore": ["lm_head"],
        "packing": packing,
        "producer": {"name": "svdq"},
    }


@pytest.mark.parametrize("rank", [0, 16, 32])
def test_the_rank_is_always_written(rank):
    config = schema.quantization_config(
        format="w4a4", numbers={}, rank=rank, smooth=False, rotation="none", ignore=[], packing=schema.CANONICAL_PACKING
    )
    assert json.loads(json.dumps(config))["rank"] == rank


ENTRY = {"n": 96, "k": 192, "rank": 0, "group_size": 64}


def test_good_sizes_are_read():
    assert schema.layer_sizes(ENTRY, "a.b") == (96, 192, 0, 64)


WRONG = [
    None,
    [],
    "n",
    3,
    {},
    {key: ENTRY[key] for key in ("n", "k", "rank")},
    {**ENTRY, "n": 0},
    {**ENTRY, "n": -96},
    {**ENTRY, "n": 96.0},
    {**ENTRY, "n": "96"},
    {**ENTRY, "n": True},
    {**ENTRY, "n": None},
    {**ENTRY, "k": 0},
    {**ENTRY, "k": [192]},
    {**ENTRY, "k": 200},
    {**ENTRY, "rank": -1},
    {**ENTRY, "rank": False},
    {**ENTRY, "rank": float("nan")},
    {**ENTRY, "group_size": 0},
    {**ENTRY, "group_size": -64},
    {**ENTRY, "group_size": 32},
    {**ENTRY, "group_size": 128},
    {**ENTRY, "group_size": 64.0},
]


@pytest.mark.parametrize("entry", WRONG, ids=str)
def test_nonsense_sizes_are_a_checkpoint_error_that_names_the_layer(entry):
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.q_proj"):
        schema.layer_sizes(entry, "model.layers.3.q_proj")
