"""The operators in torch: compiled, captured, under autocast, on views, streams and devices; and whole models."""

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from oracle import (
    DEVICE,
    HALVES,
    ON_GPU,
    READY,
    check,
    check_linears,
    check_tokens,
    compute,
    inputs,
    layer,
    linear,
    module,
    normal,
    pack_activation,
    pack_weight,
)

from svdq.kernels import layout
from svdq.linear import W4A4Linear, W4A4LinearGroup, load_quantized

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason="no CUDA device")]
gpu_only = pytest.mark.skipif(not ON_GPU, reason="a fact about GPUs")
halves = pytest.mark.parametrize("dtype", HALVES, ids=["f16", "bf16"])
DEVICES = sorted({"cpu", DEVICE.type})
HALF = torch.float16


def group(ranks=(16, 32, 0), kernels="auto", parts="smooth rotation"):
    """Three linears of 576 channels that share their input: (their layers, the fused module)."""
    sizes = (192, 100, 130)
    made = [
        layer(n, 576, rank, bias=i != 1, parts=parts, seed=50 + 10 * i)
        for i, (n, rank) in enumerate(zip(sizes, ranks, strict=True))
    ]
    return made, W4A4LinearGroup([part.to(DEVICE) for part in made], kernels)


def random(*shape, dtype=HALF, seed=1):
    return normal(*shape, seed=seed).to(DEVICE, dtype)


# ---- the operators' declarations


def samples(name, device, m, dtype):
    x = normal(m, 192).to(device, dtype)
    made = W4A4Linear(layer(100, 192, 16, parts="smooth rotation").to(torch.device(device)))
    activation = (made.down, made.inv_smooth, made.rotation, made.clip)
    if name == "inv_rms":
        return (x, 1e-6)
    if name == "quantize_lora_down":
        return (x, *activation, torch.rand(m, device=device) + 0.5, x[0].abs() + 0.5)
    if name == "w4a4_gemm_lora":
        packed = torch.ops.svdq.quantize_lora_down(x, *activation, None, None)
        return (*packed, made.qweight, made.wscales, made.up, made.packed_bias, m, 100, dtype)
    heads = x.view(m, 3, 64)
    return (heads, heads[:, :1], x[0, :64], x[0, 64:128], heads[:, 0], heads[:, 1], 1e-6)


@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=["f16", "bf16", "f32"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["quantize_lora_down", "w4a4_gemm_lora", "inv_rms", "qknorm_rope"])
def test_an_operator_is_declared_as_it_behaves(name, device, dtype, m):
    torch.library.opcheck(getattr(torch.ops.svdq, name).default, samples(name, device, m, dtype))


# ---- torch.compile

BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture
def compiled():
    """compiled(module, backend, **options) → compiled without graph breaks and without what is cached on disk.

    A cached graph holds the output shapes that an operator declared when it was compiled, not those of today.
    """
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        torch._dynamo.reset()
        yield lambda run, backend, **options: torch.compile(run, fullgraph=True, backend=backend, **options)
        torch._dynamo.reset()


@pytest.mark.parametrize("m", [4, 40])
@pytest.mark.parametrize("backend", BACKENDS)
@halves
def test_a_compiled_linear_equals_the_eager_one(compiled, backend, dtype, m):
    run, x = module(layer(130, 576, 32, parts="smooth rotation clip")), random(2, m // 2, 576, dtype=dtype)
    with torch.no_grad():
        check(compiled(run, backend)(x), run(x), what="y")


@pytest.mark.parametrize("backend", BACKENDS)
@halves
def test_a_compiled_group_equals_the_eager_one(compiled, backend, dtype):
    _, run = group()
    weight = (1 + 0.2 * normal(576, seed=8)).to(DEVICE, dtype)

    def normalized(x):
        return run(x, torch.ops.svdq.inv_rms(x, 1e-6), weight)

    x = random(40, 576, dtype=dtype)
    for function in (run, normalized):
        for number, (found, wanted) in enumerate(zip(compiled(function, backend)(x), function(x), strict=True)):
            check(found, wanted, what=f"part {number}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_every_number_of_tokens_above_64_and_one_below(compiled, backend):
    run = module(layer(130, 576, 32, parts="rotation"))
    for sizes in ((80, 129, 65, 300), (5, 16, 2, 40, 64)):
        torch._dynamo.reset()
        fast = compiled(run, backend, dynamic=True)
        fast(random(sizes[0], 576))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for m in sizes:
                x = random(m, 576, seed=m)
                check(fast(x), run(x), what=f"{m} tokens")


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_compiled_linear_takes_few_and_many_tokens(compiled, backend):
    run = module(layer(130, 576, 32, parts="rotation"))
    fast = compiled(run, backend, dynamic=True)
    for m in (5, 129, 1, 16, 17, 64, 65, 700):
        x = random(m, 576, seed=m)
        check(fast(x), run(x), what=f"{m} tokens")


# ---- CUDA graphs, streams, devices


@gpu_only
@pytest.mark.parametrize("m", [1, 16, 129])
@halves
def test_a_captured_linear_replays_on_new_inputs(m, dtype):
    (_, parts), run = group(), module(layer(130, 576, 32, parts="smooth rotation clip"))
    x = random(m, 576, dtype=dtype)
    weight = (1 + 0.2 * normal(576, seed=8)).to(DEVICE, dtype)

    def step():
        return [run(x), *parts(x, torch.ops.svdq.inv_rms(x, 1e-6), weight)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # kernels are compiled and loaded before a capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (2, 3, 4):
        x.copy_(random(m, 576, dtype=dtype, seed=seed))
        graph.replay()
        for number, (found, wanted) in enumerate(zip(captured, step(), strict=True)):
            check(found, wanted, what=f"input {seed}, output {number}")


@gpu_only
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("m", [5, 129])
def test_a_second_gpu_computes_the_bits_of_the_first_while_the_first_is_current(m):
    made, x = layer(130, 576, 32, parts="smooth rotation clip"), inputs("random", m, 576, HALF)
    found, wanted = (W4A4Linear(made.to(device))(x.to(device)) for device in map(torch.device, ("cuda:1", "cuda:0")))
    assert found.device.index == 1
    check(found.cpu(), wanted.cpu(), what="y")


# ---- shapes and types of the input


@pytest.mark.parametrize("shape", [(576,), (1, 576), (1, 1, 576), (2, 3, 576), (2, 1, 30, 576)])
def test_leading_dimensions_are_kept(shape):
    (_, parts), run = group(), module(layer(130, 576, 32))
    x = random(*shape)
    rows = x.reshape(-1, 576)
    assert run(x).shape == (*shape[:-1], 130)
    check(run(x).reshape(-1, 130), run(rows), what="y")
    for number, (found, wanted) in enumerate(zip(parts(x), parts(rows), strict=True)):
        assert found.shape == (*shape[:-1], wanted.shape[1])
        check(found.reshape(wanted.shape), wanted, what=f"part {number}")


@pytest.mark.parametrize("shape", [(0, 576), (2, 0, 576), (0, 3, 576)])
@halves
def test_no_tokens_give_empty_outputs(shape, dtype):
    (_, parts), run = group(), module(layer(130, 576, 32))
    x = torch.empty(shape, dtype=dtype, device=DEVICE)
    assert run(x).shape == (*shape[:-1], 130)
    assert [y.shape[-1] for y in parts(x)] == [192, 100, 130]


def test_an_input_in_any_order_of_axes_is_read_right():
    run, x = module(layer(130, 576, 32, parts="rotation")), random(3, 20, 576)
    check(run(x.transpose(0, 1)), run(x.transpose(0, 1).contiguous()), what="y")


@pytest.mark.parametrize(
    "kernels",
    [
        "auto",
        "reference",
    ],
)
@pytest.mark.parametrize("m", [5, 40])
@halves
def test_autocast_takes_a_float32_input_as_a_half_one(dtype, m, kernels):
    (_, parts), run = group(kernels=kernels), module(layer(130, 576, 32, parts="rotation"), kernels)
    x = random(m, 576, dtype=torch.float32)
    with torch.autocast(DEVICE.type, dtype=dtype):
        y, fused = run(x), parts(x)
    assert {y.dtype, *(part.dtype for part in fused)} == {dtype}
    check(y, run(x.to(dtype)), what="y")
    check(fused[0], parts(x.to(dtype))[0], what="part 0")


@pytest.mark.parametrize("m", [5, 40])
def test_a_float32_input_is_computed_to_float32(m):
    made = layer(130, 576, 32, parts="smooth rotation clip")
    x = inputs("random", m, 576, torch.float32)
    for kernels in ("auto", "reference"):
        y, wanted = module(made, kernels)(x.to(DEVICE)), linear(x, made, exact_groups=False)
        assert y.dtype == torch.float32
        check(y, wanted.y, wanted.noise, f"y of kernels={kernels!r}")


@pytest.mark.parametrize("m", [5, 40, 700])
@halves
def test_the_reference_on_the_same_device_agrees_to_16_bit_rounding(dtype, m):
    made, x = layer(130, 1024, 64, parts="smooth rotation clip"), inputs("outlier", m, 1024, dtype)
    wanted = linear(x, made, exact_groups=False)
    for kernels in ("auto", "reference"):
        check(module(made, kernels)(x.to(DEVICE)), wanted.y, wanted.allowed(dtype), f"y of kernels={kernels!r}")


# ---- groups


@pytest.mark.parametrize("m", [5, 40])
@halves
def test_parts_of_a_group_without_low_rank_are_the_linears_bit_for_bit(dtype, m):
    made, parts = group(ranks=(0, 0, 0))
    x = random(m, 576, dtype=dtype)
    for number, (part, found) in enumerate(zip(made, parts(x), strict=True)):
        check(found, module(part)(x), what=f"part {number}")


@pytest.mark.parametrize("ranks", [(16, 32, 0), (128, 128, 128), (16, 16, 16), (10, 0, 20)])
@pytest.mark.parametrize("m", [5, 16, 40])
@halves
def test_parts_of_a_group_are_within_2_ulp_of_float64(dtype, m, ranks):
    made, parts = group(ranks)
    x = inputs("random", m, 576, dtype)
    for number, (part, found) in enumerate(zip(made, parts(x.to(DEVICE)), strict=True)):
        wanted = linear(x, part)
        check(found, wanted.y, wanted.allowed(dtype) + wanted.noise, f"part {number}")  # more products: ranks add up


@pytest.mark.parametrize("m", [5, 40])
def test_a_normalized_group_equals_a_norm_before_it(m):
    _, parts = group()
    x, weight = random(2, m, 576), (1 + 0.2 * normal(576, seed=8)).to(DEVICE, HALF)
    rows = x.view(-1, 576)
    factor = torch.ops.svdq.inv_rms(rows, 1e-6)
    normed = weight * (rows.float() * factor[:, None]).to(HALF)
    for number, (found, wanted) in enumerate(zip(parts(x, factor, weight), parts(normed), strict=True)):
        check(found.flatten(0, 1), wanted, what=f"part {number}")


def test_casting_a_module_leaves_its_outputs_alone():
    run, x = module(layer(130, 576, 32, parts="smooth rotation")), random(20, 576)
    wanted = run(x)
    check(run.half().bfloat16().float()(x), wanted, what="y")


@pytest.mark.parametrize("m", [5, 40])
def test_an_output_of_a_type_without_kernels_is_the_references(m):
    made = layer(130, 192, 16)
    x = inputs("random", m, 192, HALF)
    wanted = linear(x, made, exact_groups=False)
    y = compute(module(made), x.to(DEVICE), torch.float64)
    assert y.dtype == torch.float64
    check(y, wanted.y, wanted.noise, "y")


def test_the_columns_asked_for_are_the_first_ones():
    codes = torch.randint(-8, 8, (40, 128), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    packed = pack_activation(codes, torch.ones(40, 2))
    weight = pack_weight(codes.clamp_min(-7), torch.ones(40, 2).half())
    t, up = torch.zeros(1, 48, 0, device=DEVICE), torch.zeros(128, 0, dtype=HALF, device=DEVICE)
    wanted = codes.long() @ codes.clamp_min(-7).long().t()
    for m, n in ((33, 7), (40, 40)):
        packed_rows = [part[: layout.round_up(m, 16)].contiguous() for part in packed]
        y = torch.ops.svdq.w4a4_gemm_lora(*packed_rows, t, *weight, up, None, m, n, torch.float32)
        check(y.cpu(), wanted[:m, :n], what="y")


# ---- models

IDS = torch.tensor([[5, 17, 101, 3, 44, 199, 0, 62, 62, 130, 8, 71]])


@pytest.mark.parametrize("rows", [1, 3])  # 12 tokens: the kernel of few; 36: the other
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@halves
def test_a_models_logits_are_those_of_the_reference(quantized, kind, dtype, rows):
    ids, logits = torch.cat([IDS.roll(i, 1) for i in range(rows)]).to(DEVICE), []
    for kernels in ("auto", "reference"):
        model = load_quantized(*quantized(kind), device=DEVICE, dtype=dtype, kernels=kernels)
        with torch.no_grad():
            logits.append(check_linears(model)(input_ids=ids)[0])
    assert logits[0].dtype == dtype and logits[0].isfinite().all()
    check_tokens(*logits)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_model_generates(quantized, kind):
    model = load_quantized(*quantized(kind), device=DEVICE, dtype=HALF)
    found = model.generate(IDS.to(DEVICE), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert found.shape == (1, 16)
    check(found[:, :12], IDS.to(DEVICE), what="prompt")
