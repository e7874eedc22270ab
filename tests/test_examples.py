"""The examples run, small, and end with what they promise."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run():
    def run(name, *arguments):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.main([str(argument) for argument in arguments])

    return run


def test_the_speech_backbone_keeps_its_states_and_runs_packed(run):
    found = run("speech_backbone", "--hidden", 128, "--layers", 2, "--sequences", 8)
    assert found["failures"] == []
    assert found["cosine"] > 0.95 and found["packed"] < 1e-5  # float32, another order of sums


def test_the_encoder_keeps_its_embeddings(run):
    assert run("encoder", "--hidden", 128, "--layers", 2, "--sentences", 64)["cosine"] > 0.98


def test_one_linear_by_hand_gains_by_rank_on_tokens_that_it_has_not_seen(run):
    errors = run("one_linear", "--size", 256, "--tokens", 4096)
    assert errors[0][1] > errors[16][1] > errors[32][1]
    for promised, measured in errors.values():
        assert measured == pytest.approx(promised, rel=0.15)  # other tokens of the same kind


def test_the_patterns_choose_what_they_say(run):
    layers = run("which_linears", "--hidden", 128, "--layers", 3)
    ranks = {name: rank for name, (_, _, rank, _) in layers.items()}
    groups = {name: group for name, (_, _, _, group) in layers.items()}
    assert {name for name, rank in ranks.items() if rank == 32} == {
        f"model.layers.{i}.self_attn.v_proj" for i in (0, 2)
    }
    assert ranks["model.layers.1.self_attn.v_proj"] == 48
    assert {name for name, group in groups.items() if group == 128} == {
        f"model.layers.{i}.self_attn.o_proj" for i in range(3)
    }
    assert "model.layers.0.mlp.down_proj" not in ranks and "model.layers.1.mlp.down_proj" in ranks
