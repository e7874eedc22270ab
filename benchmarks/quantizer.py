"""Time the quantizer on one transformer block from its activation sums, phase by phase, and compare GPTQ's two paths.

python benchmarks/quantizer.py [--device cuda] [--shapes smollm2,qwen3-0.6b,llama-8b] [--peer] [--json FILE]

Weights are random, inputs have common factors and channels of different size; the sums are those of 32,768 tokens
through the default transform. Every phase ends with a synchronization, so that the sum of the phases is a little above
`whole`, which has none. `gptq` is one call for every linear of the block, once; a block's quantization has three
(rounds). torch/kernel: the same GPTQ column by column in torch and through the kernel, its codes and its objective
tr((Q̂−T)·H·(Q̂−T)ᵀ) compared.

--peer: GPTQ alone beside llm-compressor's `quantize_weight` (0.14, group 64, symmetric, its own order of columns) on
the same weights and damped H, each with its own factorization, one call before the clock starts. It factorizes H for
every linear, as its modifier does, svdq once for a site.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import torch

import svdq
from svdq import gptq as gptq_module
from svdq import layer as layer_module
from svdq.calibration.statistics import ChannelStatistics, SumAccumulator
from svdq.config import LayerConfig
from svdq.grid import INT4_WEIGHT
from svdq.layer import prepare_site, quantize_linears
from svdq.rounding import ActivationTransform

TOKENS, CHUNK = 32768, 4096
SHAPES = {  # sites of one block: (channels, rows of each linear that reads them)
    "smollm2": [(576, (576, 192, 192)), (576, (576,)), (576, (1536, 1536)), (1536, (576,))],
    "qwen3-0.6b": [(1024, (2048, 1024, 1024)), (2048, (1024,)), (1024, (3072, 3072)), (3072, (1024,))],
    "llama-8b": [(4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,))],
}
PHASES = ("prepare_site", "low_rank", "top_left_vectors", "factors", "gptq")


def random_sums(channels, device, seed):
    """Sums of correlated inputs: 64 common factors, log-normal channels, through the default transform."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    loads, sizes = draw(64, channels) * 0.3, (draw(channels) * 0.7).exp()
    batches = [(draw(CHUNK, 64) @ loads + draw(CHUNK, channels)) * sizes for _ in range(2)]
    statistics = ChannelStatistics(channels, torch.device(device))
    for batch in batches:
        statistics.add(batch)
    transform = ActivationTransform(statistics.smoothing(0.75), True, 0.85)
    sums = SumAccumulator(statistics.absmax, transform)
    for _ in range(TOKENS // CHUNK):
        sums.add((draw(CHUNK, 64) @ loads + draw(CHUNK, channels)) * sizes)
    return sums.finish()


def synchronize(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def timed_phases(device):
    """seconds by phase: the functions of svdq.layer, each with a synchronization before and after."""
    seconds, originals = defaultdict(float), {}

    def wrap(name, function):
        def timed(*args, **kwargs):
            synchronize(device)
            started = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize(device)
            seconds[name] += time.perf_counter() - started
            return result

        return timed

    for name in PHASES:
        originals[name] = getattr(layer_module, name)
        setattr(layer_module, name, wrap(name, originals[name]))
    try:
        yield seconds
    finally:
        for name, function in originals.items():
            setattr(layer_module, name, function)


def quantize_block(sites, config, prepare):
    return [one for sums, weights in sites for one in quantize_linears(weights, prepare(sums, config), config)]


def measure(name, device, peer):
    sites = []
    for number, (channels, rows) in enumerate(SHAPES[name]):
        generator = torch.Generator(device).manual_seed(100 + number)
        weights = [torch.randn(n, channels, generator=generator, device=device) * 0.02 for n in rows]
        sites.append((random_sums(channels, device, number), weights))
    config = LayerConfig()
    quantize_block(sites[:1], config, prepare_site)  # compiles, loads and warms up
    synchronize(device)
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    results = quantize_block(sites, config, prepare_site)
    synchronize(device)
    found = {"whole": time.perf_counter() - started}
    if torch.device(device).type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    found["error"] = sum(result.report["error"] for result in results) / len(results)
    with timed_phases(device) as seconds:
        # by the module's name, so that the timed one is called
        quantize_block(sites, config, lambda *arguments: layer_module.prepare_site(*arguments))
    found["phases"] = dict(seconds)
    found["gptq"] = compare_gptq(sites, config, device)
    if peer:
        found["peer"] = compare_peer(sites, config, device)
    return found


def compare_gptq(sites, config, device):
    """One GPTQ of each linear: seconds of both paths, share of codes that differ, objective of both."""
    fused = gptq_module._fused
    seconds, codes, objective = defaultdict(float), {}, defaultdict(float)
    different = total = 0
    for sums, weights in sites:
        site = prepare_site(sums, config)
        for weight in weights:
            target = weight @ site.to_codes
            for path in ("kernel", "torch"):
                gptq_module._fused = fused if path == "kernel" else lambda *_: False
                synchronize(device)
                started = time.perf_counter()
                found = gptq_module.gptq(target, site.factor, INT4_WEIGHT, importance=site.hessian.diagonal())
                codes[path] = found[:2]
                synchronize(device)
                seconds[path] += time.perf_counter() - started
                missed = (INT4_WEIGHT.decode(*codes[path]) - target).double()
                objective[path] += ((missed @ site.hessian.double()) * missed).sum().item()
            different += int((codes["kernel"][0] != codes["torch"][0]).sum())
            total += weight.numel()
    gptq_module._fused = fused
    return {
        "seconds": dict(seconds),
        "different_codes": different / total,
        "objective_kernel_over_torch": objective["kernel"] / objective["torch"],
    }


def compare_peer(sites, config, device):
    """GPTQ alone, of every linear once: seconds of svdq and of llm-compressor, and the objective of both."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    group = config.group_size
    scheme = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group, actorder="static")

    def peer(hessian, target):
        groups = target.unflatten(-1, (-1, group))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme)
        stacked = target[None].clone(), hessian[None].clone(), scale[None], zero[None]  # two of them are worked in
        return quantize_weight(*stacked, None, scheme, percdamp=0.0)[0][0]

    def peers(hessian, targets):
        return [peer(hessian, target) for target in targets]

    def svdqs(hessian, targets):
        factor = gptq_module.inverse_factor(gptq_module.upper_cholesky(hessian.double())[0]).float()
        importance = hessian.diagonal()
        found = [gptq_module.gptq(target, factor, INT4_WEIGHT, importance=importance) for target in targets]
        return [INT4_WEIGHT.decode(codes, scales) for codes, scales, _ in found]

    seconds, objective = defaultdict(float), defaultdict(float)
    for sums, weights in sites:
        site = prepare_site(sums, config)
        targets = [weight @ site.to_codes for weight in weights]
        for name, run in {"svdq": svdqs, "llm-compressor": peers}.items():
            run(site.hessian, targets)
            synchronize(device)
            started = time.perf_counter()
            found = run(site.hessian, targets)
            synchronize(device)
            seconds[name] += time.perf_counter() - started
            for chosen, target in zip(found, targets, strict=True):
                missed = (chosen - target).double()
                objective[name] += ((missed @ site.hessian.double()) * missed).sum().item()
    return {"seconds": dict(seconds), "objective_over_peer": objective["svdq"] / objective["llm-compressor"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--peer", action="store_true", help="beside llm-compressor's GPTQ, which has to be installed")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    on_gpu = options.device.startswith("cuda")
    machine = torch.cuda.get_device_name(options.device) if on_gpu else "CPU"
    print(f"svdq {svdq.__version__}, torch {torch.__version__}, {machine}; {' '.join(sys.argv[1:])}")
    found = {}
    for name in options.shapes.split(","):
        found[name] = one = measure(name, options.device, options.peer)
        print(f"\n{name}: one block from its sums {one['whole']:.3f} s, mean layer error {100 * one['error']:.2f} %, "
              f"peak {one.get('peak_gb', 0):.2f} GB")  # fmt: skip
        for phase, seconds in sorted(one["phases"].items(), key=lambda item: -item[1]):
            print(f"  {phase:18} {seconds:8.3f} s")
        gptq = one["gptq"]
        times = ", ".join(f"{path} {seconds:.4f} s" for path, seconds in gptq["seconds"].items())
        print(f"  one GPTQ of each linear: {times}; {100 * gptq['different_codes']:.3f} % of codes differ, "
              f"objective × {gptq['objective_kernel_over_torch']:.6f}", flush=True)  # fmt: skip
        if options.peer:
            times = ", ".join(f"{who} {seconds:.4f} s" for who, seconds in one["peer"]["seconds"].items())
            print(f"  GPTQ with its factorization: {times}; objective × {one['peer']['objective_over_peer']:.4f}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
