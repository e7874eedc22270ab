"""The closed form of the layer objective against the norm itself, computed from the tokens in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.objective import Objective, relative

D = torch.float64


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def problem(seed, tokens=40, n=7, k=12, r=3, spread=0.0):
    """Inputs, inputs as quantized, weight, weight_hat, up, down; `spread` scales channels by 10^(−spread … spread)."""
    x = normal(tokens, k, seed=seed) * 10.0 ** torch.linspace(-spread, spread, k, dtype=D)
    x_hat = x + 0.1 * x.abs().mean(0) * normal(tokens, k, seed=seed + 1)
    weight = normal(n, k, seed=seed + 2)
    weight_hat = weight + 0.1 * normal(n, k, seed=seed + 3)
    return x, x_hat, weight, weight_hat, normal(n, r, seed=seed + 4), normal(k, r, seed=seed + 5)


def objective_of(x, x_hat, weight):
    return Objective(weight, x.t() @ x, x.t() @ x_hat, x_hat.t() @ x_hat)


def norm_squared(x, x_hat, weight, weight_hat, low):
    return (x @ weight.t() - x_hat @ weight_hat.t() - x @ low.t()).square().sum().item()


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(0, 4))
def test_the_closed_form_is_the_norm_on_random_inputs(seed, tokens, rank):
    x, x_hat, weight, weight_hat, up, down = problem(seed, tokens, r=rank)
    wanted = norm_squared(x, x_hat, weight, weight_hat, up @ down.t())
    # cancellation: the traces are as large as the output's energy, so the bound counts from there
    assert abs(objective_of(x, x_hat, weight)(weight_hat, up, down) - wanted) <= 1e-9 * max(wanted, 1.0)


@pytest.mark.parametrize("spread", [1.0, 2.0, 3.0])
def test_the_closed_form_is_the_norm_on_ill_conditioned_inputs(spread):
    x, x_hat, weight, weight_hat, up, down = problem(0, spread=spread)  # condition of Hxx up to 1e12
    wanted = norm_squared(x, x_hat, weight, weight_hat, up @ down.t())
    assert abs(objective_of(x, x_hat, weight)(weight_hat, up, down) - wanted) <= 1e-9 * wanted


def test_the_terms_without_a_low_rank_part_are_the_norm_without_it():
    x, x_hat, weight, weight_hat, _, _ = problem(1)
    wanted = norm_squared(x, x_hat, weight, weight_hat, torch.zeros_like(weight))
    nothing = torch.zeros(len(weight), 0), torch.zeros(weight.shape[1], 0)
    assert abs(objective_of(x, x_hat, weight)(weight_hat, *nothing) - wanted) <= 1e-9 * wanted


def test_the_output_energy_is_that_of_the_unquantized_layer():
    x, x_hat, weight, *_ = problem(3)
    wanted = (x @ weight.t()).square().sum().item()
    assert abs(objective_of(x, x_hat, weight).output_energy - wanted) <= 1e-12 * wanted


def test_float32_weights_and_factors_are_taken_as_they_are():
    x, x_hat, *rest = problem(4)
    weight, weight_hat, up, down = (t.float() for t in rest)
    wanted = norm_squared(x, x_hat, weight.double(), weight_hat.double(), up.double() @ down.double().t())
    assert abs(objective_of(x, x_hat, weight)(weight_hat, up, down) - wanted) <= 1e-9 * wanted


@pytest.mark.parametrize(("value", "energy", "wanted"), [(0.04, 4.0, 0.1), (-1e-9, 4.0, 0.0), (1.0, 0.0, 0.0)])
def test_the_relative_error_is_a_root_and_never_negative(value, energy, wanted):
    assert relative(value, energy) == pytest.approx(wanted, rel=1e-15)
