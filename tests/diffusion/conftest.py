"""Tiny random transformers of diffusers' classes, and recorded calls of each.

diffusers is imported where it is used: collecting these tests must not add to the memory of those that run before them.
"""

import pytest
import torch
import transformers

from svdq.calibration.recorded import write_call

_JOINT = {"attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": 64}
_CROSS = {"attention_head_dim": 32, "num_attention_heads": 4, "cross_attention_dim": 128, "caption_channels": 64}
_PICTURE_ALONE = {"sample_size": 8, "patch_size": 2, "in_channels": 4}
_PICTURE = {**_PICTURE_ALONE, "out_channels": 4}
KINDS = {  # kind: (class, configuration)
    "flux": (
        "FluxTransformer2DModel",
        {
            **_JOINT,
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (8, 12, 12),
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **_JOINT,
            **_PICTURE,
            "num_layers": 2,
            "caption_projection_dim": 128,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
            "dual_attention_layers": (0,),
        },
    ),
    "pixart": ("PixArtTransformer2DModel", {**_CROSS, **_PICTURE, "out_channels": 8, "num_layers": 2}),
    "sana": (
        "SanaTransformer2DModel",
        {
            **_CROSS,
            **_PICTURE,
            "patch_size": 1,
            "num_layers": 2,
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 32,
            "mlp_ratio": 2.0,
        },
    ),
    "hunyuan": (  # its second half reads, beside the block before, what the blocks of the first half returned
        "HunyuanDiT2DModel",
        {
            **_PICTURE_ALONE,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "hidden_size": 128,
            "num_layers": 4,
            "mlp_ratio": 2.0,
            "cross_attention_dim": 64,
            "cross_attention_dim_t5": 64,
            "pooled_projection_dim": 64,
            "text_len": 7,
            "text_len_t5": 7,
            "use_style_cond_and_image_meta_size": False,
        },
    ),
    "qwen": (
        "QwenImageTransformer2DModel",
        {**_JOINT, "in_channels": 16, "out_channels": 4, "num_layers": 2, "axes_dims_rope": (8, 12, 12)},
    ),
}


def build_transformer(kind, **config):
    """Equal for equal arguments; nothing in it is zero, as diffusers would initialise some of it."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    name, values = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        model = getattr(diffusers, name)(**{**values, **config})
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(0.1 * noise if name.endswith("bias") else 1 + 0.2 * noise)
    return model.eval()


def draw_call(kind, seed, side=4, words=7):
    """Arguments of the forward: a picture of side x side tokens, a text of some words."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    time = torch.rand(1, generator=generator)
    if kind in ("flux", "qwen"):
        call = {
            "hidden_states": noise(1, side * side, 16),
            "encoder_hidden_states": noise(1, words, 64),
            "timestep": time,
        }
        if kind == "qwen":
            mask = torch.ones(1, words, dtype=torch.bool)
            mask[0, -2:] = False
            return {**call, "img_shapes": [[(1, side, side)]], "encoder_hidden_states_mask": mask}
        rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        places = torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3).float()
        return {**call, "pooled_projections": noise(1, 32), "img_ids": places, "txt_ids": torch.zeros(words, 3)}
    patch = KINDS[kind][1]["patch_size"]
    call = {"hidden_states": noise(1, 4, side * patch, side * patch), "encoder_hidden_states": noise(1, words, 64)}
    call["timestep"] = time * 1000
    if kind == "sd3":
        return {**call, "pooled_projections": noise(1, 32)}
    if kind == "hunyuan":
        other = {"encoder_hidden_states_t5": noise(1, words, 64), "text_embedding_mask_t5": torch.ones(1, words)}
        return {**call, **other, "text_embedding_mask": torch.ones(1, words)}
    mask = torch.ones(1, words)
    mask[0, -2:] = 0
    call["encoder_attention_mask"] = mask
    return {**call, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}} if kind == "pixart" else call


@pytest.fixture(scope="session")
def transformer(tmp_path_factory):
    """transformer(kind, shard=None) → its directory. Shared: only read it."""
    built = {}

    def build(kind, shard=None):
        if (kind, shard) not in built:
            built[kind, shard] = directory = tmp_path_factory.mktemp(kind)
            build_transformer(kind).save_pretrained(directory, **({"max_shard_size": shard} if shard else {}))
        return built[kind, shard]

    return build


@pytest.fixture(scope="session")
def calls():
    """calls(kind, count, seed) → arguments of that many calls."""
    return lambda kind, count, seed=0, **sizes: [draw_call(kind, 1000 * seed + i, **sizes) for i in range(count)]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory, calls):
    """inputs(kind, count, seed) → a directory of those calls."""
    made = {}

    def make(kind, count=12, seed=0, **sizes):
        key = (kind, count, seed, *sizes.items())
        if key not in made:
            made[key] = directory = tmp_path_factory.mktemp(f"{kind}-calls")
            for number, call in enumerate(calls(kind, count, seed, **sizes)):
                write_call(directory / f"call-{number:05d}.safetensors", call)
        return made[key]

    return make


@pytest.fixture(scope="session")
def original():
    """original(directory) → the transformer, loaded by diffusers itself."""
    import diffusers

    return lambda directory: diffusers.AutoModel.from_pretrained(str(directory)).eval()


@pytest.fixture(scope="session")
def quantized_transformer(transformer, inputs, tmp_path_factory):
    """quantized_transformer(kind, preset='nunchaku', only=()) → (its directory, the file); shared. One round."""
    from svdq import config as configs
    from svdq import pipeline
    from svdq.calibration.recorded import load_inputs
    from svdq.models import open_model

    built = {}

    def build(kind, preset="nunchaku", only=()):
        if (kind, preset, only) not in built:
            model = open_model(transformer(kind))
            out = tmp_path_factory.mktemp(f"{kind}-{preset}") / "out.safetensors"
            activation, weight = configs.preset(preset)
            pipeline.quantize(
                model,
                out,
                configs.QuantConfig(configs.LayerConfig(**weight, rounds=1), only=only),
                data=load_inputs(str(inputs(kind)), model.config, samples=99, seed=0),
                calibration=configs.CalibrationConfig(**activation),
            )
            built[kind, preset, only] = (transformer(kind), out)
        return built[kind, preset, only]

    return build


@pytest.fixture(scope="session")
def flux_pipeline(tmp_path_factory, add_tokenizer):
    """A tiny FluxPipeline, saved: random text encoders, a tokenizer of whole words."""
    import diffusers

    directory = tmp_path_factory.mktemp("pipeline")
    add_tokenizer(directory / "words")
    words = transformers.PreTrainedTokenizerFast.from_pretrained(directory / "words", pad_token="w1")
    words.model_max_length = 8
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    levels = {"block_out_channels": (8,) * 4, "norm_num_groups": 8, **kinds}  # a latent for 8 x 8 pixels
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    clip = transformers.CLIPTextConfig(**text, vocab_size=200, projection_dim=32, eos_token_id=2)
    t5 = transformers.T5Config(d_model=64, d_kv=16, d_ff=32, num_layers=1, num_heads=2, vocab_size=200)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = diffusers.FluxPipeline(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            vae=diffusers.AutoencoderKL(latent_channels=4, **levels),
            text_encoder=transformers.CLIPTextModel(clip),
            tokenizer=words,
            text_encoder_2=transformers.T5EncoderModel(t5),
            tokenizer_2=words,
            transformer=build_transformer("flux", num_layers=1, num_single_layers=1),
        )
    whole.save_pretrained(directory / "flux")
    return directory / "flux"
