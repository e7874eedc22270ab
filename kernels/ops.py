"""The kernels as torch operators, torch.ops.svdq.*: traced by torch.compile, captured by CUDA graphs.

Packed operands (svdq.kernels.layout.MMA names the orders; K' and N' are K and N padded to 128, G = K'/64, and
M' is M padded to 16):

    codes    (M', K'/2) int8      order `codes`       scales   (M', G) float32        order `scales`
    t        (shares, M', r) float32, row-major; x · proj_down is the sum over shares
    qweight  (N', K'/2) int8      order `qweight`     wscales  (G, N') float16        order `wscales`
    down     (K', r) float16      order `down`        up       (N', r) float16        order `lora_up`
    bias     (N') float32         order `channel`     r a multiple of 16, 0 for none

On CUDA, float16 and bfloat16 run the kernels; float32, and every type on a CPU, runs svdq.kernels.reference. Outputs
may also be float32: the kernels' sums before their last rounding, which is what a kernel error is measured on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from svdq.kernels import compile as kernels
from svdq.kernels import layout, reference, tiles
from svdq.kernels.launch import launch

SCALAR = {torch.float16: "f16", torch.bfloat16: "bf16"}
OUT = {**SCALAR, torch.float32: "f32"}
FEW_TOKENS = 64  # up to here the weights stream once,
SMALL_M = 16  # through w4a4_small_m up to here, and else through w4a4_medium_m

_library = torch.library.Library("svdq", "DEF")


def register(schema: str, cuda: Callable, cpu: Callable, fake: Callable) -> None:
    """Define torch.ops.svdq.<name> with its implementations."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, cuda, "CUDA")
    _library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"svdq::{name}", fake, lib=_library)


def shares(m: int, groups: int) -> int:
    """Over how many blocks the quantizer spreads one panel's groups: the GEMM adds as many sums of t.

    Of few tokens a block for every 4 groups, two warps for each. Many tokens fill the GPU by themselves, and the GEMM
    would read t once more for every share.
    """
    return -(-groups // 4) if m <= FEW_TOKENS else min(2, -(-groups // 8))


def aligned_vector(weight: Tensor, x: Tensor) -> Tensor:
    """A norm's weight as the kernels read it: of x's type, whole, 16-byte aligned."""
    return aligned_rows(weight.to(x.dtype)[None])[0]


def rank_parts(rank: int) -> int:
    """Into how many equal parts, multiples of 16 and at most 128, the quantizer cuts the columns of t."""
    return next((parts for parts in range(1, rank) if rank % (16 * parts) == 0 and rank // parts <= 128), 1)


def check_tensors(
    operator: str, x: Tensor, *operands: tuple[str, Tensor | None, tuple[int, ...], torch.dtype | None]
) -> None:
    """Raises ValueError for the first of (name, tensor, shape, dtype) that is not that, contiguous and where x is.

    A kernel reads what these sizes say, whatever the tensor holds. No dtype: the operator converts and copies it.
    """
    for name, tensor, shape, dtype in operands:
        if tensor is None:
            continue
        right = tensor.shape == shape and tensor.device == x.device
        if dtype is not None:
            right = right and tensor.dtype == dtype and tensor.is_contiguous()
        if not right:
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}, strides {list(tensor.stride())}"
            wanted = f"{dtype or tensor.dtype} {list(shape)} on {x.device}, contiguous"
            raise ValueError(f"{operator}: {name}: found {found}; wanted {wanted}")
        if tensor.is_cuda and dtype is not None and name != "row_factor" and tensor.data_ptr() % 16:
            raise ValueError(f"{operator}: {name}: found at {tensor.data_ptr():#x}; wanted it 16-byte aligned")


def aligned_rows(x: Tensor) -> Tensor:
    """The same matrix with rows that a kernel can read: elements adjacent, every row 16-byte aligned."""
    aligned = x.stride(-1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


# ------------------------------------------------------------------------------------------- quantize_lora_down


def quantize_lora_down(
    x: Tensor,
    down: Tensor,
    inv_smooth: Tensor | None,
    rotation: bool,
    clip: float,
    row_factor: Tensor | None,
    norm_weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (m, k) → codes, scales, t: Qa(R(x · inv_smooth)) and x · proj_down, x read once.

    inv_smooth   (k,) float32 or None; rotation: R is the 64-point Hadamard transform; clip: the scale is clip·absmax/7
    row_factor   (m,) float32 and norm_weight (k,) of x's type, or both None: x is first RMS-normalized
    """
    if x.dtype not in SCALAR:
        return _quantize_reference(x, down, inv_smooth, rotation, clip, row_factor, norm_weight)
    check_quantize("quantize_lora_down", x, down, inv_smooth, row_factor, norm_weight)
    x = aligned_rows(x)
    norm_weight = None if norm_weight is None else aligned_vector(norm_weight, x)
    m, k = x.shape
    padded_k, rank = down.shape
    groups, panels = padded_k // layout.TILE_K, -(-m // layout.PANEL)
    codes, scales, t = _quantize_empty(x, down)
    if panels:
        parts = rank_parts(rank)
        launch(
            kernels.quantize_kernel(SCALAR[x.dtype], rank // parts, 1 if m <= FEW_TOKENS else 2),
            x.device,
            (panels, t.shape[0], parts),
            256,
            [
                x, np.int64(x.stride(0)), m, k, groups, down, inv_smooth, int(rotation), float(clip), row_factor,
                norm_weight, codes, scales, t, rank, codes.shape[0],
            ],
            early=True,
        )  # fmt: skip
    return codes, scales, t


def _quantize_empty(x: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    padded_k, rank = down.shape
    groups = padded_k // layout.TILE_K
    rows = (x.shape[0] + layout.PANEL - 1) // layout.PANEL * layout.PANEL
    return (
        x.new_empty((rows, padded_k // 2), dtype=torch.int8),
        x.new_empty((rows, groups), dtype=torch.float32),
        x.new_empty((shares(x.shape[0], groups), rows, rank), dtype=torch.float32),
    )


def check_quantize(
    operator: str,
    x: Tensor,
    down: Tensor,
    inv_smooth: Tensor | None,
    row_factor: Tensor | None,
    norm_weight: Tensor | None,
) -> None:
    """Raises ValueError unless the packed down-projection and the rest fit x."""
    if x.dim() != 2 or down.dim() != 2:
        raise ValueError(f"{operator}: found x {list(x.shape)}, down {list(down.shape)}; wanted two matrices")
    (m, k), (padded_k, rank) = x.shape, down.shape
    if not k or k % layout.TILE_K or padded_k != layout.round_up(k, layout.PAD_K):
        raise ValueError(f"{operator}: x has {k} channels, the packed weight is made for {padded_k} padded ones")
    if rank % layout.RANK_TILE:
        raise ValueError(f"{operator}: down: found rank {rank}; wanted a multiple of {layout.RANK_TILE}")
    if (row_factor is None) != (norm_weight is None):
        raise ValueError(f"{operator}: row_factor and norm_weight go together")
    check_tensors(
        operator,
        x,
        ("down", down, (padded_k, rank), torch.float16),
        ("inv_smooth", inv_smooth, (k,), torch.float32),
        ("row_factor", row_factor, (m,), torch.float32),
        ("norm_weight", norm_weight, (k,), None),
    )


def _quantize_reference(x, down, inv_smooth, rotation, clip, row_factor, norm_weight):
    check_quantize("quantize_lora_down", x, down, inv_smooth, row_factor, norm_weight)
    parts = shares(x.shape[0], down.shape[0] // layout.TILE_K)
    return reference.quantize_lora_down(x, down, inv_smooth, rotation, clip, row_factor, norm_weight, parts)


def _quantize_fake(x, down, inv_smooth, rotation, clip, row_factor, norm_weight):
    return _quantize_empty(x, down)


# ------------------------------------------------------------------------------------------- w4a4_gemm_lora


def w4a4_gemm_lora(
    codes: Tensor,
    scales: Tensor,
    t: Tensor,
    qweight: Tensor,
    wscales: Tensor,
    up: Tensor,
    bias: Tensor | None,
    m: int,
    n: int,
    dtype: torch.dtype,
    first_rank: Tensor | None = None,
) -> Tensor:
    """→ y (m, n) of dtype: group sums, t · proj_upᵀ, bias, one rounding. n counts from the first packed column.

    first_rank  (padded n / 128,) int32: of every tile of 128 columns, the first column of t that its rows of `up` meet;
                None: all of t. Linears with one input have each their own columns. Its values are trusted.
    """
    if dtype not in OUT:
        return _gemm_reference(codes, scales, t, qweight, wscales, up, bias, m, n, dtype, first_rank)
    _check_gemm(codes, scales, t, qweight, wscales, up, bias, m, n, first_rank)
    y = codes.new_empty((m, n), dtype=dtype)
    groups, rank = wscales.shape[0], up.shape[1]
    if not m or not n:
        return y
    arguments = [
        codes, scales, t, t.shape[0], qweight, wscales, up, bias, y, m, n, groups, rank, t.shape[2], first_rank,
    ]  # fmt: skip
    if m > FEW_TOKENS:
        blocks = -(-m // layout.TILE_N) * -(-n // layout.TILE_N)
        launch(kernels.gemm_kernel(OUT[dtype]), codes.device, (blocks,), 256, arguments)
    elif m > SMALL_M:
        tile = tiles.medium_tile(m, cluster_blocks(codes.device))
        launch(
            kernels.medium_m_kernel(OUT[dtype], tile),
            codes.device,
            (-(-n // (32 * tile.cluster)) * tile.cluster,),
            tile.threads,
            arguments,
            early=True,
            shared_bytes=tile.shared_bytes,
            cluster=(tile.cluster,) if tile.cluster > 1 else (),
        )
    else:
        kernel = kernels.small_m_kernel(OUT[dtype], 1 if m <= 8 else 2)
        launch(kernel, codes.device, (-(-n // 32),), 512, arguments, early=True)
    return y


@cache
def cluster_blocks(device: torch.device) -> int:
    """Over how many blocks, that see each other's sums, w4a4_medium_m spreads the groups: Hopper's have the room."""
    return 2 if torch.cuda.get_device_capability(device) == (9, 0) else 1


def check_weights(
    operator: str,
    codes: Tensor,
    t: Tensor,
    qweight: Tensor,
    wscales: Tensor,
    up: Tensor,
    bias: Tensor | None,
    m: int,
    n: int,
    first_rank: Tensor | None,
) -> None:
    """Raises ValueError unless the packed weights fit each other, and m and n them."""
    if (wscales.dim(), up.dim(), t.dim()) != (2, 2, 3):
        found = f"wscales {list(wscales.shape)}, up {list(up.shape)}, t {list(t.shape)}"
        raise ValueError(f"{operator}: found {found}; wanted two matrices, and three dimensions of t")
    (groups, padded_n), rank = wscales.shape, up.shape[1]
    if not groups or padded_n % layout.TILE_N or rank % layout.RANK_TILE:
        found = f"{groups} groups, {padded_n} columns, rank {rank}"
        wanted = f"groups, columns in multiples of {layout.TILE_N}, the rank in multiples of {layout.RANK_TILE}"
        raise ValueError(f"{operator}: found {found}; wanted {wanted}")
    if m < 0 or not 0 <= n <= padded_n:
        raise ValueError(f"{operator}: found m {m}, n {n}; wanted m at least 0, n from 0 to {padded_n}")
    check_tensors(
        operator,
        codes,
        ("qweight", qweight, (padded_n, groups * layout.TILE_K // 2), torch.int8),
        ("wscales", wscales, (groups, padded_n), torch.float16),
        ("up", up, (padded_n, rank), torch.float16),
        ("bias", bias, (padded_n,), torch.float32),
        ("first_rank", first_rank, (padded_n // layout.TILE_N,), torch.int32),
    )


def rank_of_t(found: int, up: Tensor, first_rank: Tensor | None) -> int:
    """How many columns t must have: those of `up`, or with first_rank at least as many, in tiles of 16."""
    return found if first_rank is not None and found >= up.shape[1] and found % layout.RANK_TILE == 0 else up.shape[1]


def _check_gemm(
    codes: Tensor,
    scales: Tensor,
    t: Tensor,
    qweight: Tensor,
    wscales: Tensor,
    up: Tensor,
    bias: Tensor | None,
    m: int,
    n: int,
    first_rank: Tensor | None,
) -> None:
    operator = "w4a4_gemm_lora"
    check_weights(operator, codes, t, qweight, wscales, up, bias, m, n, first_rank)
    groups, rows = wscales.shape[0], layout.round_up(m, layout.PANEL)
    rank = rank_of_t(t.shape[2], up, first_rank)
    check_tensors(
        operator,
        codes,
        ("codes", codes, (rows, groups * layout.TILE_K // 2), torch.int8),
        ("scales", scales, (rows, groups), torch.float32),
        ("t", t, (t.shape[0], rows, rank), torch.float32),
    )
    if max(t.numel(), codes.numel() // 16) >= 2**31:  # the kernels count both, codes by vectors, in 32 bits
        raise ValueError(f"{operator}: {m} rows are too many at once for rank {rank} and {groups} groups")


def _gemm_reference(codes, scales, t, qweight, wscales, up, bias, m, n, dtype, first_rank=None):
    _check_gemm(codes, scales, t, qweight, wscales, up, bias, m, n, first_rank)
    return reference.w4a4_gemm_lora(codes, scales, t, qweight, wscales, up, bias, m, n, dtype, first_rank)


def _gemm_fake(codes, scales, t, qweight, wscales, up, bias, m, n, dtype, first_rank=None):
    return codes.new_empty((m, n), dtype=dtype)


# ------------------------------------------------------------------------------------------- inv_rms, qknorm_rope


def inv_rms(x: Tensor, epsilon: float) -> Tensor:
    """x (m, k) → (m,) float32: 1 / sqrt(mean(x²) + epsilon) of every row."""
    if x.dtype not in SCALAR or x.dim() != 2 or x.shape[1] % 8:
        return _inv_rms_reference(x, epsilon)
    x = aligned_rows(x)
    factor = x.new_empty(x.shape[0], dtype=torch.float32)
    if x.shape[0]:
        arguments = [x, np.int64(x.stride(0)), x.shape[1], float(epsilon), factor]
        launch(kernels.inv_rms_kernel(SCALAR[x.dtype]), x.device, (x.shape[0],), 128, arguments, early=True)
    return factor


def _inv_rms_reference(x, epsilon):
    if x.dim() != 2:
        raise ValueError(f"inv_rms: x: found {list(x.shape)}; wanted a matrix")
    return reference.inv_rms(x, epsilon)


def _inv_rms_fake(x, epsilon):
    return x.new_empty(x.shape[0], dtype=torch.float32)


def qknorm_rope(
    q: Tensor,
    k: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """q (tokens, heads, d), k (tokens, k_heads, d) → both RMS-normalized per head and rotated, contiguous.

    q_norm, k_norm  (d,) or both None for no norm
    cosine, sine    (positions, d), positions a divisor of tokens: token i takes row i modulo positions
    """
    d = q.shape[-1]
    if q.dtype not in SCALAR or d not in kernels.HEAD_DIMS:
        return _rope_reference(q, k, q_norm, k_norm, cosine, sine, epsilon)
    _check_rope(q, k, q_norm, k_norm, cosine, sine)
    q, k = (x if _pairs_aligned(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    cosine, sine = (table.to(q.dtype).contiguous() for table in (cosine, sine))
    q_norm, k_norm = (None if weight is None else aligned_vector(weight, q) for weight in (q_norm, k_norm))
    q_out, k_out = _rope_fake(q, k, q_norm, k_norm, cosine, sine, epsilon)
    tokens, heads = q.shape[0], q.shape[1] + k.shape[1]
    if tokens:
        launch(
            kernels.rope_kernel(SCALAR[q.dtype], d),
            q.device,
            (-(-tokens * heads // 4),),
            128,
            [
                q, np.int64(q.stride(0)), k, np.int64(k.stride(0)), q_norm, k_norm, cosine, sine, q_out, k_out, tokens,
                q.shape[1], k.shape[1], len(cosine), float(epsilon),
            ],
        )  # fmt: skip
    return q_out, k_out


def _check_rope(
    q: Tensor, k: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cosine: Tensor, sine: Tensor
) -> None:
    operator = "qknorm_rope"
    if (q.dim(), k.dim(), k.dtype) != (3, 3, q.dtype) or q.shape[2] % 2:
        found = f"q {q.dtype} {list(q.shape)}, k {k.dtype} {list(k.shape)}"
        raise ValueError(f"{operator}: found {found}; wanted (tokens, heads, d) of one type, d even")
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{operator}: q_norm and k_norm go together")
    (tokens, _, d), positions = q.shape, len(cosine)
    if tokens and (not positions or tokens % positions):
        raise ValueError(f"{operator}: cosine: found {positions} rows; wanted a divisor of {tokens} tokens")
    check_tensors(
        operator,
        q,
        ("k", k, (tokens, k.shape[1], d), None),
        ("q_norm", q_norm, (d,), None),
        ("k_norm", k_norm, (d,), None),
        ("cosine", cosine, (positions, d), None),
        ("sine", sine, (positions, d), None),
    )


def _rope_reference(q, k, q_norm, k_norm, cosine, sine, epsilon):
    _check_rope(q, k, q_norm, k_norm, cosine, sine)
    return reference.qknorm_rope(q, k, q_norm, k_norm, cosine, sine, epsilon)


def _pairs_aligned(x: Tensor) -> bool:
    """Whether heads lie together and every two neighbours of a row can be read as one 4-byte word."""
    words = x.stride(0) * x.element_size() % 4 == 0 and x.data_ptr() % 4 == 0
    return words and x.stride()[1:] == (x.shape[-1], 1)


def _rope_fake(q, k, q_norm, k_norm, cosine, sine, epsilon):
    return q.new_empty(q.shape), k.new_empty(k.shape)


register(
    "quantize_lora_down(Tensor x, Tensor down, Tensor? inv_smooth, bool rotation, float clip, Tensor? row_factor, "
    "Tensor? norm_weight) -> (Tensor, Tensor, Tensor)",
    quantize_lora_down,
    _quantize_reference,
    _quantize_fake,
)
register(
    "w4a4_gemm_lora(Tensor codes, Tensor scales, Tensor t, Tensor qweight, Tensor wscales, Tensor up, Tensor? bias, "
    "SymInt m, SymInt n, ScalarType dtype, Tensor? first_rank=None) -> Tensor",
    w4a4_gemm_lora,
    _gemm_reference,
    _gemm_fake,
)
register("inv_rms(Tensor x, float epsilon) -> Tensor", inv_rms, _inv_rms_reference, _inv_rms_fake)
register(
    "qknorm_rope(Tensor q, Tensor k, Tensor? q_norm, Tensor? k_norm, Tensor cosine, Tensor sine, float epsilon) "
    "-> (Tensor, Tensor)",
    qknorm_rope,
    _rope_reference,
    _rope_fake,
)
