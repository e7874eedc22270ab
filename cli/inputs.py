"""What the commands do before their one library call: open the model, check and read the data."""

from __future__ import annotations

from pathlib import Path

from svdq.calibration.data import TokenData, check_source, has_tokenizer_files, load_tokenizer, load_tokens
from svdq.calibration.recorded import CalibrationData, load_inputs
from svdq.cli.options import Console
from svdq.errors import ConfigError
from svdq.models import Model, open_model


def quiet_libraries() -> None:
    """transformers and the hub client log what svdq says better, in one line, or not at all."""
    import logging
    import os

    # through the environment, so that a broken directory is found before transformers is imported (seconds)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    logging.getLogger("datasets").setLevel(logging.ERROR)


def open_inputs(
    model_dir: str,
    sources: list[str],
    trust_remote_code: bool,
    subfolder: str | None = None,
    *,
    diffusion: bool = False,
) -> Model:
    """Preflight of the model directory and of every data source, before anything is read in full.

    diffusion  whether the command knows diffusion transformers; without, they are refused
    """
    quiet_libraries()
    directory = Path(model_dir, subfolder) if subfolder else Path(model_dir)
    model = open_model(directory, trust_remote_code=trust_remote_code)
    if model.is_diffusion and not diffusion:
        raise ConfigError(f"{directory}: a diffusion transformer; this command wants a language model or an encoder")
    has_tokenizer = not model.is_diffusion and has_tokenizer_files(directory)
    for source in sources:
        if model.is_diffusion:
            load_inputs(source, model.config, samples=1, seed=0)
        else:
            check_source(source, has_tokenizer)
    return model


def read_data(
    model: Model, source: str, trust_remote_code: bool, *, samples: int, seq_len: int, min_tokens: int, seed: int
) -> CalibrationData:
    """Text as tokens, or the recorded calls of a diffusion transformer."""
    if model.is_diffusion:
        return load_inputs(source, model.config, samples=samples, seed=seed)
    return read_tokens(
        model, source, trust_remote_code, samples=samples, seq_len=seq_len, min_tokens=min_tokens, seed=seed
    )


def read_tokens(
    model: Model, source: str, trust_remote_code: bool, *, samples: int, seq_len: int, min_tokens: int, seed: int
) -> TokenData:
    tokenizer = load_tokenizer(model.directory, trust_remote_code)
    return load_tokens(
        source,
        tokenizer,
        samples=samples,
        seq_len=min(seq_len, longest_sequence(model)),
        min_tokens=min_tokens,
        seed=seed,
        vocab_size=model.vocab_size,
    )


def note_if_shortened(console: Console, model: Model, seq_len: int) -> None:
    if seq_len > (limit := longest_sequence(model)):
        console.say(f"note: --seq-len {seq_len}: config.json allows {limit} positions, sequences are cut to that")


def longest_sequence(model: Model) -> int:
    """The configuration's limit of positions, which the model was not made to go beyond."""
    positions = model.config.get("max_position_embeddings") or model.config.get("n_positions")
    return positions if isinstance(positions, int) and positions > 0 else 1 << 30
