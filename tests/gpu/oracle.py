"""Operands of the kernel tests and what must come out of them, by integers and float64.

SVDQ_TEST_DEVICE=cpu runs the tests without a GPU, on the operators' CPU implementation; facts about kernels alone are
skipped there, and so are the largest shapes.

Which error is allowed: a sum in float32 of terms of any sign wanders, so its error grows with the square root of the
number of terms; each term and each partial sum is rounded to 2^-24 of the sum of absolute values S at most. Tensor
cores cut off instead of rounding, which is twice that and has one sign, so it grows with the number of products.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from svdq import nvfp4
from svdq.grid import E2M1, pack_nibbles
from svdq.kernels import layout
from svdq.linear import W4A4Linear, W4A4LinearGroup
from svdq.quantized import Layer
from svdq.rounding import ActivationTransform, round_to_nearest

DEVICE = torch.device(os.environ.get("SVDQ_TEST_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"
READY = not ON_GPU or torch.cuda.is_available()
D = torch.float64
HALVES = (torch.float16, torch.bfloat16)
FLOOR = 2.0**-112  # sums of values below the smallest normal float32: only their size is known


# ---- operands, made on the CPU


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=rng(seed))


KINDS = ("random", "outlier", "zero", "zero rows", "tiny", "huge")
_TINY = {  # sizes of rows: their scales are denormal float32 or 0 in bfloat16, their values denormal in float16
    torch.float16: (1e-7, 3e-5, 1e-6, 4e-8),
    torch.bfloat16: (1e-39, 1e-37, 1e-38, 1e-40, 3e-41),
}


def inputs(kind: str, m: int, k: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    x = normal(m, k, seed=seed)
    if kind == "outlier":
        x[:, 5] *= 1000
    elif kind == "zero":
        x.zero_()
    elif kind == "zero rows":
        x[::3] = 0
        x[1 % m, :64] = 0
    elif kind == "tiny":
        sizes = torch.tensor(_TINY[dtype])
        x *= sizes[torch.arange(m) % len(sizes)][:, None]
    elif kind == "huge":  # sums of the rotation overflow in bfloat16
        x = x.sign() * torch.finfo(dtype).max
    return x.to(dtype)


def with_specials(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """NaN and infinities in the rows 0 to 4 and m - 2."""
    x = normal(m, k, seed=4).to(dtype)
    x[0, 3] = float("nan")
    x[1, 64 % k] = float("inf")
    x[2, 65 % k] = -float("inf")
    x[3, :2] = torch.tensor([float("inf"), -float("inf")])
    x[4] = float("nan")
    x[m - 2, k - 1] = float("inf")
    return x


def transform(k: int, parts: str) -> ActivationTransform:
    """parts: any of the words smooth, rotation, clip."""
    smooth = torch.rand(k, generator=rng(2)) + 0.3 if "smooth" in parts else None
    return ActivationTransform(smooth, "rotation" in parts, 0.85 if "clip" in parts else 1.0)


def layer(n: int, k: int, rank: int, *, bias: bool = True, parts: str = "", group: int = 64, seed: int = 10) -> Layer:
    """Random, with outputs of about 1 for inputs of about 1; every number fits float16."""
    return Layer(
        f"layer{seed}",
        torch.randint(-7, 8, (n, k), dtype=torch.int8, generator=rng(seed)),
        ((torch.rand(n, k // group, generator=rng(seed + 1)) + 0.5) / (4 * k**0.5)).half(),
        (normal(k, rank, seed=seed + 2) / k**0.5).half(),
        (normal(n, rank, seed=seed + 3) / max(rank, 1) ** 0.5).half(),
        normal(n, seed=seed + 4).half() if bias else None,
        transform(k, parts),
    )


def nvfp4_tensors(n: int, k: int, rank: int, parts: str) -> tuple:
    """What svdq.kernels.nvfp4.pack takes of a random linear with outputs of about 1 for inputs of about 1."""
    weight = normal(n, k, seed=1) / k**0.5
    weight[:, k // 2] *= 30
    wcscale = nvfp4.tensor_factor(weight)
    codes, scales = round_to_nearest(weight, E2M1, unit=wcscale)
    down, up = (normal(k, rank, seed=2) / k**0.5).half(), (normal(n, rank, seed=3) / max(rank, 1) ** 0.5).half()
    return pack_nibbles(nvfp4.to_nibbles(codes)), scales, wcscale, down, up, transform(k, parts), normal(n, seed=4)


def module(made: Layer, kernels: str = "auto") -> W4A4Linear:
    return W4A4Linear(made.to(DEVICE), kernels)


def compute(linear: W4A4Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The forward of a linear with an output type of its own."""
    quantized = quantize(linear, x)
    weight = (linear.qweight, linear.wscales, linear.up, linear.packed_bias)
    return torch.ops.svdq.w4a4_gemm_lora(*quantized, *weight, len(x), linear.out_features, dtype)


def quantize(linear: W4A4Linear, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    activation = (linear.down, linear.inv_smooth, linear.rotation, linear.clip, None, None)
    return torch.ops.svdq.quantize_lora_down(x, *activation)


def forward(
    linear: W4A4Linear,
    x: Tensor,
    row_factor: Tensor | None = None,
    norm_weight: Tensor | None = None,
    n: int | None = None,
) -> Tensor:
    """The forward of a linear of which an output may be normalized on the way in and have fewer columns."""
    return linear.run(x, row_factor, norm_weight, linear.out_features if n is None else n)


def normalized(x: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
    """What a row factor and a norm's weight make of x before it is quantized, both products rounded to x's type."""
    return weight * (x.float() * factor[:, None]).to(x.dtype)


def pack_activation(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """codes int8 (m, k), scales float32 (m, k/64) → both as the GEMM reads them, on the device."""
    m, k = layout.round_up(codes.shape[0], layout.PANEL), layout.round_up(codes.shape[1], layout.PAD_K)
    packed = layout.pack_codes(layout.pad(codes, m, k), "codes")
    return packed.to(DEVICE), layout.pack_matrix("scales", layout.pad(scales, m, k // 64)).to(DEVICE)


def pack_weight(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """codes int8 (n, k), scales float16 (n, k/64) → both as the GEMM reads them, on the device."""
    n, k = layout.round_up(codes.shape[0], layout.TILE_N), layout.round_up(codes.shape[1], layout.PAD_K)
    packed = layout.pad(scales, n, k // 64, value=1)
    return (
        layout.pack_codes(layout.pad(codes, n, k)).to(DEVICE),
        layout.pack_matrix("wscales", packed, (k // 64, n)).to(DEVICE),
    )


# ---- expected values


@dataclass
class Expected:
    """y (m, n) float64, and by how much float32 arithmetic may miss it."""

    y: Tensor
    noise: Tensor

    def allowed(self, dtype: torch.dtype) -> Tensor:
        """Two units in the last place of a 16-bit output, besides the noise of the sums."""
        return self.noise if dtype == torch.float32 else self.noise + 2 * ulp(self.y, dtype)


def linear(x: Tensor, made: Layer, *, exact_groups: bool = ON_GPU) -> Expected:
    """Integer group sums times scales, x · proj_down · proj_upᵀ and the bias, added up in float64.

    Noise (see the module): of the sum of G groups, r/4 products of the tensor cores and 22 bits of t, relative to the
    sum of absolute values; of t, relative to the root of the sum of the squares of its terms, which partial sums of
    random signs exceed by a small factor only. The kernels' group sums are exact; the reference rounds every product.
    """
    codes, scales = (part.to(DEVICE, D) for part in made.transform.quantize(x.cpu()))
    made, x = made.to(DEVICE), x.to(DEVICE, D)
    weight_codes, weight_scales = made.codes.to(D), made.scales.to(D)
    y = torch.zeros(len(x), len(weight_codes), dtype=D, device=DEVICE)
    total = torch.zeros_like(y)
    groups = scales.shape[1]
    for g in range(groups):
        part = slice(64 * g, 64 * (g + 1))
        integers = codes[:, part] @ weight_codes[:, part].t()
        scale = scales[:, g, None] * weight_scales[None, :, 64 * g // made.group_size]
        y += integers * scale
        terms = integers.abs_() if exact_groups else codes[:, part].abs() @ weight_codes[:, part].abs().t()
        total += terms.mul_(scale)
    down, up = made.proj_down.to(D), made.proj_up.to(D)
    t = x @ down
    y += t @ up.t()
    total += t.abs() @ up.abs().t()
    if made.bias is not None:
        y += made.bias.to(D)
        total += made.bias.to(D).abs()
    rank = up.shape[1]
    turns = -(-groups // 32) if len(x) <= 16 else 1  # few tokens: a warp multiplies its shares of t one by one
    units = 4 + 3 * groups**0.5 + (rank / 2 * turns + 8 if rank else 0)
    return Expected(y, units * 2.0**-24 * total + noise_of_t(x, down, chain(groups)) @ up.abs().t() + FLOOR)


def chain(groups: int, shares: int = 2, warps: int = 4) -> int:
    """The longest chain of additions in t: eight products of the tensor cores a group, up to 16 warps, the shares."""
    in_share = -(-(groups + groups % 2) // shares)  # padded to 128 channels
    return 8 * -(-in_share // warps) + 16 + shares


def noise_of_t(x: Tensor, down: Tensor, steps: int) -> Tensor:
    """What `steps` additions in the tensor cores may miss of x · down, both float64."""
    return 4 * steps * 2.0**-24 * (x.square() @ down.square()).sqrt()


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of this type at a float64 value."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value.abs().clamp_min(info.smallest_normal))[1] - 1
    return torch.exp2(exponent.to(D)) * info.eps


# ---- comparison


def check_linears(model: nn.Module) -> nn.Module:
    """The same model, whose quantized linears from now on check what they return against the reference.

    Both get one input and so the same codes. Rounding alone moves no row by 2 eps; a code that differs does in float16.
    """

    def checked(part: W4A4Linear | W4A4LinearGroup, name: str):
        run = part.run

        def both(*arguments):
            y = run(*arguments)
            part.kernels, kernels = "reference", part.kernels
            wanted = run(*arguments).flatten(0, -2).to(D)
            part.kernels = kernels
            error, size = (y.flatten(0, -2).to(D) - wanted).norm(dim=-1), wanted.norm(dim=-1)
            check(error, torch.zeros_like(error), 2 * torch.finfo(y.dtype).eps * size, f"error (row) of {name}")
            return y

        return both

    for name, part in model.named_modules():
        if isinstance(part, (W4A4Linear, W4A4LinearGroup)):
            part.run = checked(part, name)
    return model


def check_tokens(found: Tensor, wanted: Tensor) -> None:
    """found and wanted (..., features) of two implementations of one model: near each other as a whole.

    Sums in another order round apart by one unit here and there. Where such a value lies near a tie of the next
    quantizer its code flips, and in a model this small one code moves its whole token, and more or less all that attend
    to it, by some percent. That the arithmetic is right, linear by linear, is for `check_linears`; a wrong shape, order
    or missing sum moves every token by its own size.
    """
    found, wanted = (part.to("cpu", D).flatten(0, -2) for part in (found, wanted))
    whole = ((found - wanted).norm() / wanted.norm()).item()
    assert whole < 0.2, f"distance: {whole:.3g} of {len(found)} tokens"


def check(found: Tensor, wanted: Tensor, allowed: Tensor | float | None = None, what: str = "") -> None:
    """Fails with the first wrong coordinate, both values, how many are wrong, where, and the largest error.

    Without `allowed` all elements must be equal, NaN to NaN; with it |found − wanted| may reach it.
    """
    __tracebackhide__ = True
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    found, wanted = found.to(wanted.device, D), wanted.to(D)
    error = (found - wanted).abs()
    right = (found == wanted) | (found.isnan() & wanted.isnan())
    if allowed is not None:
        allowed = torch.as_tensor(allowed, dtype=D, device=wanted.device).expand_as(wanted)
        right |= error <= allowed
    if right.all():
        return
    wrong = (~right).nonzero()
    first = tuple(wrong[0].tolist())
    spread = ", ".join(f"{a}..{b}" for a, b in zip(wrong.amin(0).tolist(), wrong.amax(0).tolist(), strict=True))
    lines = [
        f"{what}: {len(wrong)} of {wanted.numel()} wrong, at [{spread}] of {list(wanted.shape)}",
        f"first at {first}: found {found[first].item()!r}, wanted {wanted[first].item()!r}"
        + (f", allowed {allowed[first].item():.3g}" if allowed is not None else ""),
        f"next at {[tuple(at.tolist()) for at in wrong[1:6]]}",
    ]
    finite = error.nan_to_num(nan=-1.0)
    most = tuple(torch.stack(torch.unravel_index(finite.argmax(), finite.shape)).tolist())
    values = f"found {found[most].item()!r}, wanted {wanted[most].item()!r}"
    lines.append(f"largest error {error[most].item():.6g} at {most}: {values}")
    if allowed is not None:
        lines.append(f"largest error over allowed {(error / allowed).nan_to_num(nan=-1.0).max().item():.4g}")
    lines.append(f"NaN: {int(found.isnan().sum())} found, {int(wanted.isnan().sum())} wanted")
    raise AssertionError("\n".join(lines))
