"""What is different about a diffusion transformer: who builds it, and which of its linears stay in 16 bits.

Its config.json names a class of diffusers. Blocks may come in several lists, run one after the other. An adaptive norm
turns one vector a picture (time, pooled text) into shifts, scales and gates: its linear reads one row where the others
read thousands, so 4 bits save bytes there and no time, and an error in it reaches every token. Such linears are found
by name, as diffusers names them in every class, and are never quantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from svdq.checkpoint import open_model_dir
from svdq.errors import CheckpointError, ConfigError, DataError

_ADAPTIVE = re.compile(r"norm|modulation|adaln|_mod$")  # norm1.linear, norm1_context.linear, img_mod.1, adaln_single …


def is_diffusion(config: dict[str, Any]) -> bool:
    """Whether a config.json is one of diffusers."""
    return "_class_name" in config


def is_adaptive(path: str) -> bool:
    """Whether a linear inside a block, by its module path, is an adaptive norm's."""
    return any(_ADAPTIVE.search(part) for part in path.split("."))


def build(directory: Path, config: dict[str, Any]) -> nn.Module:
    """The module tree that config.json describes, as diffusers initialises it.

    Raises ConfigError without diffusers, CheckpointError for a class that it does not know or cannot build.
    """
    diffusers = require_diffusers()
    name, where = config["_class_name"], directory / "config.json"
    known = getattr(diffusers, name, None) if isinstance(name, str) and name.isidentifier() else None
    is_model = isinstance(known, type) and issubclass(known, diffusers.ModelMixin)
    if known is None or not is_model:
        raise CheckpointError(
            f"{where}: {name!r} is no model of diffusers {diffusers.__version__}; a newer diffusers may know it"
        )
    try:
        return known.from_config(config)
    except Exception as error:  # diffusers raises whatever a wrong value happens to break
        raise CheckpointError(f"{where}: diffusers cannot build the model: {_first_line(error)}") from error


def require_diffusers() -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise ConfigError(f"a diffusion model needs diffusers ({error}): pip install 'svdq[diffusers]'") from None
    return diffusers


def read_prompts(path: str | Path) -> list[str]:
    """The lines of a text file that are not blank. Raises DataError if there are none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise DataError(f"--prompts {path}: cannot be read: {reason}") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise DataError(f"--prompts {path}: holds no prompt; wanted a text file with one a line")
    return prompts


def record_prompts(
    directory: str | Path,
    out: str | Path,
    prompts: list[str],
    *,
    steps: int,
    subfolder: str = "transformer",
    size: tuple[int, int] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> int:
    """Run a pipeline on every prompt and keep the arguments of every call of its transformer, one file a call.

    The whole pipeline is in memory while it runs, on a GPU in the transformer's 16-bit type, else in float32. Latents
    are not decoded.
    size     (height, width) of the pictures in pixels; None: the pipeline's own
    seed     of the first prompt's noise, one more for each that follows; torch's global state is left alone
    Returns  the number of calls
    Raises   CheckpointError if diffusers cannot load the pipeline or it has no such component, DataError if it does not
             run on the prompts
    """
    from svdq.calibration.recorded import recording

    diffusers, where = require_diffusers(), Path(directory)
    if not (where / "model_index.json").is_file():
        raise CheckpointError(f"{where}: no model_index.json; wanted the directory of a pipeline of diffusers")
    if not (where / subfolder).is_dir():
        raise CheckpointError(f"{where}: no folder {subfolder!r} (--subfolder); wanted that of the transformer")
    bars, logs = diffusers.utils.logging.is_progress_bar_enabled(), diffusers.utils.logging
    logs.disable_progress_bar()
    try:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(
            str(where), local_files_only=True, dtype=_pipeline_dtype(where / subfolder, torch.device(device))
        ).to(device)
    except Exception as error:  # diffusers raises whatever a broken file happens to break
        raise CheckpointError(f"{where}: diffusers cannot load the pipeline: {_first_line(error)}") from error
    finally:
        if bars:
            logs.enable_progress_bar()
    transformer = getattr(pipeline, subfolder, None)
    if not isinstance(transformer, nn.Module):
        raise CheckpointError(f"{where}: {type(pipeline).__name__} has no model {subfolder!r} (--subfolder)")
    pipeline.set_progress_bar_config(disable=True)
    sizes = {} if size is None else {"height": size[0], "width": size[1]}
    with recording(transformer, out), torch.no_grad():
        for number, prompt in enumerate(prompts):
            progress("record", number, len(prompts))
            noise = torch.Generator("cpu").manual_seed(seed + number)
            try:
                pipeline(prompt, num_inference_steps=steps, output_type="latent", generator=noise, **sizes)
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
                raise DataError(
                    f"{where}: {type(pipeline).__name__} fails on {prompt!r}: {_first_line(error)}"
                ) from error
    progress("record", len(prompts), len(prompts))
    return len(list(Path(out).glob("*.safetensors")))


def _pipeline_dtype(transformer: Path, device: torch.device) -> torch.dtype:
    """float32 on CPUs, where 16-bit GEMMs are slow; elsewhere the transformer's own type."""
    files = open_model_dir(transformer)
    kinds = {files.info(name).dtype for name in files.tensors}
    if device.type == "cpu":
        return torch.float32
    return next((kind for kind in (torch.bfloat16, torch.float16) if kind in kinds), torch.float32)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
