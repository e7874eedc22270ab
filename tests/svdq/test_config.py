"""Configurations: which names a pattern means, what is refused, and that JSON brings everything back."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.cli import options
from svdq.config import (
    CalibrationConfig,
    LayerConfig,
    QuantConfig,
    TuneConfig,
    first_difference,
    matches,
    parse_override,
    preset,
)
from svdq.errors import ConfigError

# ------------------------------------------------------------------------------------------------ patterns


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("layers.1", "model.layers.1"),
        ("layers.1", "model.layers.1.self_attn.q_proj"),
        ("layers.1", "layers.1.mlp.down_proj"),
        ("model.layers.1", "model.layers.1.self_attn.q_proj"),
        ("q_proj", "model.layers.7.self_attn.q_proj"),
        ("*_proj", "model.layers.7.self_attn.q_proj"),
        ("layers.*.mlp", "model.layers.11.mlp.up_proj"),
        ("layers.[02]", "model.layers.2.mlp.up_proj"),
        ("layers.1?", "model.layers.10.mlp.up_proj"),
        ("lm_head", "lm_head"),
        ("re:layers\\.1\\.", "model.layers.1.mlp.up_proj"),
        ("re:^model.*(q|k)_proj$", "model.layers.3.self_attn.k_proj"),
        ("re:mlp", "model.layers.3.mlp.up_proj"),
    ],
)
def test_a_pattern_matches(pattern, name):
    assert matches(pattern, name)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("layers.1", "model.layers.10.self_attn.q_proj"),
        ("layers.1", "model.layers.11"),
        ("layers.1", "model.layers.2.blocks.1"),
        ("layers.1", "model.sublayers.1.q_proj"),
        ("layers.*.mlp", "model.layers.1.self_attn.mlp"),  # '*' stays within one part
        ("model*proj", "model.layers.1.self_attn.q_proj"),
        ("a*b", "a.b"),
        ("proj", "model.layers.1.self_attn.q_proj"),
        ("Q_PROJ", "model.layers.1.self_attn.q_proj"),
        ("a.b.c.d", "b.c.d"),
        ("re:^layers", "model.layers.1"),
        ("re:layers\\.1\\.", "model.layers.10.mlp.up_proj"),
    ],
)
def test_a_pattern_does_not_match(pattern, name):
    assert not matches(pattern, name)


def test_layers_1_selects_one_of_twelve_layers():
    names = [f"model.layers.{i}.mlp.{leaf}" for i in range(12) for leaf in ("up_proj", "down_proj")]
    config = QuantConfig(ignore=("layers.1",))
    left_out = [name for name in names if not config.selects(name)]
    assert left_out == ["model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"]


def test_a_broken_regular_expression_is_a_config_error_that_shows_it():
    with pytest.raises(ConfigError, match="re:\\(unclosed"):
        matches("re:(unclosed", "a.b")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.from_regex(r"[a-z_]{1,5}|[0-9]{1,2}", fullmatch=True), min_size=1, max_size=5), st.data())
def test_every_run_of_parts_matches_and_a_changed_part_does_not(parts, data):
    start = data.draw(st.integers(0, len(parts) - 1))
    stop = data.draw(st.integers(start + 1, len(parts)))
    assert matches(".".join(parts[start:stop]), ".".join(parts))
    assert not matches(".".join([*parts[start : stop - 1], parts[stop - 1] + "X"]), ".".join(parts))


def test_only_keeps_what_it_names_and_ignore_takes_from_it():
    config = QuantConfig(only=("mlp", "q_proj"), ignore=("layers.0",))
    assert config.selects("layers.3.mlp.up_proj")
    assert config.selects("layers.3.attn.q_proj")
    assert not config.selects("layers.3.attn.o_proj")
    assert not config.selects("layers.0.mlp.up_proj")


def test_patterns_are_listed_with_the_option_they_came_from():
    config = QuantConfig(ignore=("a",), only=("b", "c"), overrides=(("d", {"rank": 8}),))
    assert config.patterns() == [("--ignore", "a"), ("--only", "b"), ("--only", "c"), ("--override", "d")]


# ------------------------------------------------------------------------------------------------ overrides


def test_overrides_change_matching_layers_only_and_later_ones_win():
    overrides = (("mlp", {"rank": 32, "rounds": 5}), ("layers.1", {"rank": 64}))
    config = QuantConfig(layer=LayerConfig(rank=8), overrides=overrides)
    found = {name: config.for_layer(name) for name in ("layers.1.mlp.up", "layers.10.mlp.up", "layers.1.q", "lm_head")}
    assert {name: (c.rank, c.rounds) for name, c in found.items()} == {
        "layers.1.mlp.up": (64, 5),
        "layers.10.mlp.up": (32, 5),
        "layers.1.q": (64, 3),
        "lm_head": (8, 3),
    }


def test_an_override_leaves_the_other_knobs_as_they_were():
    layer = LayerConfig(rank=4, damping=0.3, sweeps=2, objective="weight")
    assert QuantConfig(layer, overrides=(("q", {"rank": 9}),)).for_layer("q") == dataclasses.replace(layer, rank=9)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("down_proj:rank=32", ("down_proj", {"rank": 32})),
        ("layers.*.mlp:rank=0,group_size=128", ("layers.*.mlp", {"rank": 0, "group_size": 128})),
        ("q:damping=0.25, rounds=1", ("q", {"damping": 0.25, "rounds": 1})),
        ("re:^a:b$:rank=8", ("re:^a:b$", {"rank": 8})),
    ],
)
def test_an_override_is_read(text, wanted):
    assert parse_override(text) == wanted


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("down_proj", "down_proj"),
        (":rank=8", ":rank=8"),
        ("q:", "q:"),
        ("q:rank", "q:rank"),
        ("q:rank=eight", "rank='eight'"),
        ("q:rank=8.5", "rank='8.5'"),
        ("q:rank=-1", "rank"),
        ("q:group_size=96", "group_size"),
        ("q:damping=nan", "damping"),
        ("q:damping=-0.1", "damping"),
        ("q:svd=exact", "'svd'"),
        ("q:colour=3", "'colour'"),
        ("q:rank=8,", "q:rank=8,"),
    ],
)
def test_a_wrong_override_is_a_config_error_that_names_it(text, named):
    with pytest.raises(ConfigError) as caught:
        parse_override(text)
    assert named in str(caught.value)


# ------------------------------------------------------------------------------------------------ wrong values

NOT_COUNTS = [-1, 1.5, "4", None, True, float("nan")]
WRONG_LAYER = [
    *[("rank", v) for v in NOT_COUNTS],
    *[("rounds", v) for v in [0, *NOT_COUNTS]],
    *[("sweeps", v) for v in NOT_COUNTS],
    *[("group_size", v) for v in [0, 32, 96, 100, *NOT_COUNTS]],
    *[("damping", v) for v in [-0.1, 11.0, float("nan"), float("inf"), "0.1", True]],
    *[("scale_search", v) for v in [1, None, "yes"]],
    *[("objective", v) for v in ["weights", "", None, 3]],
    *[("svd", v) for v in ["full", None]],
]
WRONG_CALIBRATION = [
    *[("samples", v) for v in [0, *NOT_COUNTS]],
    *[("seq_len", v) for v in [1, *NOT_COUNTS]],
    *[("min_tokens", v) for v in [0, *NOT_COUNTS]],
    *[("seed", v) for v in NOT_COUNTS],
    *[("smoothing", v) for v in [-0.1, 1.1, float("nan"), "0.5", None, True]],
    *[("rotation", v) for v in ["hadamard", None, True]],
    *[("act_clip", v) for v in [0.0, 0.05, 1.01, float("nan"), None]],
]


@pytest.mark.parametrize(("field", "value"), WRONG_LAYER)
def test_a_wrong_layer_value_is_a_config_error_that_names_the_field(field, value):
    with pytest.raises(ConfigError, match=field):
        LayerConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), WRONG_CALIBRATION)
def test_a_wrong_calibration_value_is_a_config_error_that_names_the_field(field, value):
    with pytest.raises(ConfigError, match=field):
        CalibrationConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 0),
        ("damping", None),
        ("damping", 0),
        ("damping", 10.0),
        ("group_size", 192),
        ("sweeps", 3),
        ("objective", "weight"),
    ],
)
def test_the_edges_of_a_layer_value_are_accepted(field, value):
    assert getattr(LayerConfig(**{field: value}), field) == value


@pytest.mark.parametrize("config", [LayerConfig(), CalibrationConfig(), QuantConfig()])
def test_a_configuration_cannot_be_changed(config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, 1)


def made(name):
    calibration, layer = preset(name)
    return CalibrationConfig(**calibration), LayerConfig(**layer)


def test_the_default_preset_is_quality():
    assert made("quality") == (CalibrationConfig(), LayerConfig())


def test_quality_is_smoothing_075_rotation_clip_085_and_the_output_objective_with_a_scale_grid():
    calibration, layer = made("quality")
    assert (calibration.smoothing, calibration.rotation, calibration.act_clip) == (0.75, "hadamard64", 0.85)
    assert (layer.rank, layer.group_size, layer.rounds, layer.damping) == (16, 64, 3, None)
    assert (layer.objective, layer.scale_search, layer.sweeps) == ("output", True, 0)


def test_best_is_quality_and_then_tuned():
    assert made("best") == made("quality")
    assert [options.tune_config(name, None, 0) for name in ("best", "quality")] == [TuneConfig(), None]
    assert options.tune_config("quality", 7, 3) == TuneConfig(steps=7, seed=3)
    assert options.tune_config("best", 0, 0) is None


def test_nunchaku_is_smoothing_075_without_rotation_or_clip():
    calibration, layer = made("nunchaku")
    assert (calibration.smoothing, calibration.rotation, calibration.act_clip) == (0.75, "none", 1.0)
    assert (layer.group_size, layer.objective) == (64, "output")


def test_plain_is_the_write_ups_method_without_any_transform():
    calibration, layer = made("plain")
    assert (calibration.smoothing, calibration.rotation, calibration.act_clip) == (0.0, "none", 1.0)
    assert (layer.objective, layer.scale_search, layer.rounds) == ("weight", False, 3)


def test_svdquant_is_the_published_method():
    calibration, layer = made("svdquant")
    assert (calibration.smoothing, calibration.rotation, calibration.act_clip) == ("search", "none", 1.0)
    assert (layer.objective, layer.scale_search, layer.rank) == ("svd", False, 16)


def test_an_unknown_preset_is_a_config_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'fastest'.*quality, best, nunchaku, svdquant, plain"):
        preset("fastest")


# ------------------------------------------------------------------------------------------------ first difference


@pytest.mark.parametrize(
    ("wanted", "found", "message"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({}, {}, None),
        ({"a": 1}, {"a": 2}, "a: wanted 1, found 2"),
        ({"b": 1, "a": 1}, {"b": 2, "a": 2}, "a: wanted 1, found 2"),
        ({"a": 1}, {}, "a: wanted 1, found None"),
        ({}, {"z": "x"}, "z: wanted None, found 'x'"),
        ({"l": {"r": 16, "g": 64}}, {"l": {"r": 32, "g": 64}}, "l.r: wanted 16, found 32"),
        ({"l": {"r": 16}, "z": 1}, {"l": {"r": 16}, "z": 2}, "z: wanted 1, found 2"),
        ({"l": {"r": 16}}, {"l": 3}, "l: wanted {'r': 16}, found 3"),
        ({"l": {"m": {"n": [1]}}}, {"l": {"m": {"n": [2]}}}, "l.m.n: wanted [1], found [2]"),
    ],
)
def test_the_first_difference_names_the_field_and_both_values(wanted, found, message):
    assert first_difference(wanted, found) == message
