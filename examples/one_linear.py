"""One linear by hand, through the Python API: sums of its input, quantize, what the kernels would compute.

python examples/one_linear.py [--size 1024] [--tokens 8192]

Every step that `svdq calibrate` and `svdq quantize` do to a linear is one call here.
"""

import argparse

import torch

from svdq.calibration.statistics import ChannelStatistics, SumAccumulator
from svdq.config import CalibrationConfig, LayerConfig
from svdq.grid import INT4_WEIGHT
from svdq.layer import prepare_site, quantize_linears
from svdq.objective import Objective, relative
from svdq.rounding import ActivationTransform, fake_quantize_activation

CPU = torch.device("cpu")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args(arguments)
    n, k = options.size, options.size
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(k, k, generator=generator) / k**0.5  # so that channels are correlated
    weight = torch.randn(n, k, generator=generator) / k**0.5
    x, unseen = (torch.randn(options.tokens, k, generator=generator) @ mixing for _ in range(2))
    for inputs in (x, unseen):
        inputs[:, :8] *= 20  # and some are outliers, as in trained models

    # calibration: the channels' sizes give the smoothing, then the three sums through the run-time quantizer
    settings = CalibrationConfig()
    channels = ChannelStatistics(k, CPU)
    channels.add(x)
    transform = ActivationTransform(channels.smoothing(settings.smoothing), True, settings.act_clip)
    sums = SumAccumulator(channels.absmax, transform)
    sums.add(x)
    sums = sums.finish(torch.float64)

    errors = {}
    for rank in (0, 16, 32):
        config = LayerConfig(rank=rank)
        (layer,) = quantize_linears([weight], prepare_site(sums, config), config)

        # what the objective says of the stored tensors, from the sums alone
        weight_hat = INT4_WEIGHT.decode(layer.codes, layer.scales)
        objective = Objective(transform.weight(weight), sums.xx, sums.xq, sums.qq)
        down = transform.down_from_raw(layer.proj_down.double())
        promised = relative(objective(weight_hat, layer.proj_up, down), objective.output_energy)

        # what the layer puts out for inputs that it has not seen
        codes_part = fake_quantize_activation(transform.apply(unseen), transform.clip) @ weight_hat.t()
        y = codes_part + (unseen @ layer.proj_down.float()) @ layer.proj_up.float().t()
        wanted = unseen @ weight.t()
        errors[rank] = promised, ((y - wanted).norm() / wanted.norm()).item()
        promised, measured = (f"{100 * error:.2f} %" for error in errors[rank])
        print(f"rank {rank:2}: error {promised} on the calibration's tokens, {measured} on others")
    return errors


if __name__ == "__main__":
    main()
