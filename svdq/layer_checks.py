"""One linear, checked: what its format costs and, apart from it, what the path adds that computes it.

quantization error  the dequantized math in float64 against the original layer, on the original's inputs
kernel error        a path that computes the layer from packed operands against the same dequantized math in float64

Two paths. The reference computes in float32, from operands packed and unpacked again. The CUDA kernels run on 16-bit
inputs: they are measured against the dequantized math on the very inputs they read, by the sums they hold before the
last rounding, so that neither the input's rounding nor the output's counts. Their activation codes and scales must be
the CPU's bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from svdq.errors import ConfigError
from svdq.export import DTYPES, pack_layers, packed_sizes, unpack_layers
from svdq.format_linears import StoredLinear
from svdq.formats import FORMATS, Decoded
from svdq.grid import INT4_ACTIVATION
from svdq.kernels import layout
from svdq.kernels.launch import require
from svdq.kernels.ops import FEW_TOKENS, SMALL_M
from svdq.kernels.reference import w4a4_linear
from svdq.linear import W4A4Linear, linear_of
from svdq.models import Model, compute_dtype
from svdq.quantized import Layer, QuantizedFile

_CPU = torch.device("cpu")


def layer_errors(
    weight: Tensor, bias: Tensor | None, layer: Layer, x: Tensor, kernels: KernelLinear | None = None
) -> dict[str, Any]:
    """Both errors of one layer on inputs x (tokens, k): see the module. weight (n, k), bias (n,) are the original's.

    kernels  the same layer as the kernels run it, with a bias or not; None for the reference
    """
    wide = x.double()
    wanted = wide @ weight.double().t()
    if bias is not None:
        wanted += bias.double()
    exact = w4a4_linear(
        wide, layer.weight_hat(torch.float64), layer.proj_down, layer.proj_up, layer.bias, layer.transform
    )
    difference = exact - wanted
    per_token = difference.square().sum(1) / wanted.square().sum(1).clamp_min(1e-300)
    again, roundtrip = repacked(layer)
    if kernels is not None:
        path = kernel_errors(kernels, x)
    else:
        y = w4a4_linear(x.float(), again.weight_hat(), again.proj_down, again.proj_up, again.bias, again.transform)
        path = {"kernel_error": ratio(y.double() - exact, exact), "kernel_dtype": "float32"}
    return {
        "quantization_error": ratio(difference, wanted),
        "token_error": per_token.mean().sqrt().item(),
        "roundtrip": roundtrip,
        **path,
    }


def ratio(difference: Tensor, reference: Tensor) -> float:
    denominator = reference.norm().item()
    return difference.norm().item() / denominator if denominator > 0 else difference.norm().item()


def repacked(layer: Layer) -> tuple[Layer, bool]:
    """The layer after pack and unpack, and whether it is the same bit for bit."""
    if layer.format != "w4a4":
        return _stored_again(layer)
    dtype = layer.scales.dtype
    part = unpack_layers(pack_layers([layer], dtype), packed_sizes([layer]))[0]
    smooth = part.pop("smooth")
    transform = replace(layer.transform, smooth=None if layer.transform.smooth is None else smooth.float())
    again = Layer(name=layer.name, transform=transform, **part)
    pairs = [(getattr(layer, f), getattr(again, f)) for f in ("codes", "scales", "proj_down", "proj_up")]
    if layer.transform.smooth is not None:
        pairs.append((layer.transform.smooth, again.transform.smooth))
    if layer.bias is not None and layer.bias.dtype == dtype:
        pairs.append((layer.bias, again.bias))
    else:
        again.bias = layer.bias  # a float32 bias is cast when it is packed; that is no error of the path
    return again, all(torch.equal(a, b) for a, b in pairs)


def _stored_again(layer: Layer) -> tuple[Layer, bool]:
    """As `repacked`, of a format that is packed in its canonical order: codes and scales from their stored tensors."""
    form = FORMATS[layer.format]
    symmetric = layer.format == "w4a16" and "w_zeros" not in layer.stored
    tensors = form.store(Decoded(layer.codes, layer.scales, layer.unit), symmetric)
    decoded = form.load({**layer.stored, **tensors})
    again = replace(layer, codes=decoded.codes, scales=decoded.scales, unit=decoded.unit)
    same = all(_same_bytes(tensor, layer.stored[suffix]) for suffix, tensor in tensors.items())
    return again, same and torch.equal(again.weight_hat(), layer.weight_hat())


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Of 8-bit floats too, which torch.equal does not know."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---------------------------------------------------------------------------------------------- the kernels


def require_kernels(device: torch.device) -> None:
    """Raises ConfigError or KernelError, saying what is missing, if the CUDA kernels cannot run on this device."""
    if device.type == "cuda":
        require(device)
    elif torch.cuda.is_available():
        raise ConfigError(f"--kernels cuda: the device is {device}; use --device cuda, or --kernels reference")
    else:
        raise ConfigError(f"--kernels cuda: found no CUDA device (torch {torch.__version__}); use --kernels reference")


def kernel_dtype(model: Model, quantized: QuantizedFile) -> torch.dtype:
    """What the kernels' inputs are cast to: bfloat16 if config.json or a packed file says so, else float16.

    Where config.json names no type, that of the stored weights decides.
    """
    named = model.config.get("dtype") or model.config.get("torch_dtype")
    if named is None:
        named = str(compute_dtype(model, torch.device("cuda"))).removeprefix("torch.")
    return DTYPES["bfloat16" if "bfloat16" in (named, quantized.config["packing"].get("dtype")) else "float16"]


class KernelLinear:
    """A layer as the kernels run it, on inputs cast to a 16-bit type. On a CPU the same operators run the reference.

    dtype  becomes bfloat16 for good where float16 overflows: on an input, or on an output that is finite in bfloat16
    """

    def __init__(self, layer: Layer, dtype: torch.dtype):
        self.layer, self.dtype = layer, dtype
        self.packed = linear_of(layer)

    def cast(self, x: Tensor) -> Tensor:
        half = x.to(self.dtype)
        if self.dtype == torch.float16 and x.isfinite().all() and not half.isfinite().all():
            self.dtype = torch.bfloat16
            half = x.to(self.dtype)
        return half

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., k) → (..., n) of x's type."""
        y = self.packed(self.cast(x))
        if self.dtype == torch.float16 and x.isfinite().all() and not y.isfinite().all():
            wide = self.packed(x.to(torch.bfloat16))
            if wide.isfinite().all():
                self.dtype, y = torch.bfloat16, wide
        return y.to(x.dtype)


@torch.no_grad()
def kernel_errors(kernels: KernelLinear, x: Tensor) -> dict[str, Any]:
    """The kernel error on x (tokens, k) and how many activation codes and scales are not the CPU's: see the module.

    All tokens are run at once, then the first FEW_TOKENS and the first SMALL_M of them, which are other kernels; the
    largest error counts. Fewer tokens than it takes to reach all are repeated.
    """
    layer, packed = kernels.layer, kernels.packed
    if isinstance(packed, StoredLinear):
        return _stored_errors(layer, packed, kernels.cast(x.to(layer.codes.device)))
    half = kernels.cast(x.to(packed.qweight.device))
    if len(half) <= FEW_TOKENS:
        half = half.repeat(FEW_TOKENS // len(half) + 1, 1)
    codes, scales = layer.transform.to(_CPU).quantize(half.to(_CPU))
    exact = _dequantized(layer, half, codes, scales)
    errors, differ = [], 0
    for m in (len(half), FEW_TOKENS, SMALL_M):
        y, found_codes, found_scales = _run(packed, half[:m])
        errors.append(ratio(y.double() - exact[:m], exact[:m]))
        differ += _differing(found_codes, codes[:m]) + _differing(found_scales, scales[:m])
    return {
        "kernel_error": torch.tensor(errors, dtype=torch.float64).max().item(),  # NaN if one of them is
        "codes_differ": differ,
        "kernel_dtype": str(half.dtype).removeprefix("torch."),
    }


def _stored_errors(layer: Layer, packed: StoredLinear, half: Tensor) -> dict[str, Any]:
    """`kernel_errors` of the other formats, on up to FEW_TOKENS tokens.

    For more, formats of 16-bit activations round the dequantized weights to that type: what this one rounding explains
    is no error of the kernel, and the larger error counts only beyond it.
    """
    few = packed.FEW_TOKENS
    if len(half) <= few:
        half = half.repeat(few // len(half) + 1, 1)
    wide = layer.transform.to(_CPU).approximate(half.to(_CPU), torch.float64).to(half.device)
    exact = wide @ layer.weight_hat(torch.float64).t()
    if layer.proj_up.shape[1]:
        exact += (half.double() @ layer.proj_down.double()) @ layer.proj_up.double().t()
    if layer.bias is not None:  # with 16-bit activations the operators take it as rounded to their type
        exact += (layer.bias.to(half.dtype) if layer.transform.dtype is None else layer.bias).double()
    of_few, of_many = (_beyond_rounding(packed.product(half[:m], torch.float32), exact[:m]) for m in (few, len(half)))
    explained = torch.finfo(half.dtype).eps if layer.transform.dtype is None else 0.0
    return {
        "kernel_error": of_few if of_many <= max(of_few, explained) else of_many,
        "codes_differ": 0,
        "kernel_dtype": str(half.dtype).removeprefix("torch."),
    }


def _beyond_rounding(y: Tensor, exact: Tensor) -> float:
    """Relative error of y (m, n), less what the nearest number of its type would be off."""
    missed = y.double() - exact
    if y.dtype == torch.float32:
        return ratio(missed, exact)
    return ratio((missed.abs() - (exact.to(y.dtype).double() - exact).abs()).clamp_min(0), exact)


def _dequantized(layer: Layer, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The layer in float64, (m, n), on x's device; codes and scales are x's, from the CPU."""
    wide = torch.float64
    y = INT4_ACTIVATION.decode(codes.to(x.device), scales.to(x.device), wide) @ layer.weight_hat(wide).t()
    if layer.proj_up.shape[1]:
        y += (x.to(wide) @ layer.proj_down.to(wide)) @ layer.proj_up.to(wide).t()
    return y if layer.bias is None else y + layer.bias.to(wide)


def _run(packed: W4A4Linear, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The forward with its float32 sums (m, n) as output; the codes (m, k) and scales (m, k/64) on the CPU."""
    m, k = x.shape
    operands = packed.quantize(x)
    y = packed.product(operands, m, packed.out_features, torch.float32)
    codes, scales = (part.to(_CPU) for part in operands[:2])
    if codes.dtype == torch.uint8:  # of Hopper's kernels
        numbers = layout.unpack_matrix("fp8", codes, tuple(codes.shape))[:m]
        codes, order = numbers.view(torch.float8_e4m3fn).float().to(torch.int8), "token_scales"
    else:
        codes, order = layout.unpack_codes(codes, "codes"), "scales"
    scales = layout.unpack_matrix(order, scales, tuple(scales.shape))
    return y, codes[:m, :k], scales[:m, : k // layout.TILE_K]


def _differing(found: Tensor, wanted: Tensor) -> int:
    """How many elements are not equal, NaN being equal to NaN."""
    return int(((found != wanted) & ~(found.isnan() & wanted.isnan())).sum())
