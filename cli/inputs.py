"""What the commands do before their one library call: open the model, check and read the data."""

from __future__ import annotations

from svdq.calibration.data import TokenData, check_source, has_tokenizer_files, load_tokenizer, load_tokens
from svdq.cli.options import Console
from svdq.models import Model, open_model


def quiet_libraries() -> None:
    """transformers and the hub client log what svdq says better, in one line, or not at all."""
    import logging
    import os

    # through the environment, so that a broken directory is found before transformers is imported (seconds)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    logging.getLogger("datasets").setLevel(logging.ERROR)


def open_inputs(model_dir: str, sources: list[str], trust_remote_code: bool) -> Model:
    """Preflight of the model directory and of every data source, before anything is read in full."""
    quiet_libraries()
    model = open_model(model_dir, trust_remote_code=trust_remote_code)
    has_tokenizer = has_tokenizer_files(model_dir)
    for source in sources:
        check_source(source, has_tokenizer)
    return model


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
