"""Everything that can be known before a weight is read: what a run will do, whether it can, what it will need."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from svdq.calibration.capture import REPLAY_BYTES
from svdq.calibration.states import DEVICE_BYTES
from svdq.calibration.statistics import CHUNK_TOKENS
from svdq.config import ACTIVATION_GROUP, LayerConfig, QuantConfig, matches
from svdq.errors import CheckpointError, ConfigError
from svdq.formats import FORMATS
from svdq.kernels import quantizer
from svdq.models import Linear, Model, compute_dtype

WIDE = 2048  # channels from which a site's factorizations gain from more threads than its GPTQ loses
_GROUP = Path("/sys/fs/cgroup")  # of a container: its own limit, in Linux' second version of control groups
_PROCESS_BYTES = 450_000_000  # Python with torch and transformers loaded
_WEIGHT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Plan:
    """What a run will do, known before any weight is read."""

    linears: list[Linear]
    left_16bit: list[str]  # linears inside blocks that the patterns leave out, and adaptive norms
    output_bytes: int
    work_bytes: int


def plan(model: Model, config: QuantConfig) -> Plan:
    """Check everything that can be known without weights.

    Raises ConfigError for patterns that match nothing, sizes that cannot be quantized, an empty selection.
    """
    names = [linear.name for linear in model.linears]
    for option, pattern in config.patterns():
        if not any(matches(pattern, name) for name in names):
            raise ConfigError(f"{option} {pattern!r}: matches none of the {len(names)} linears, e.g. {names[0]}")
    chosen = [linear for linear in model.linears if config.selects(linear.name)]
    if not chosen:
        raise ConfigError(f"{model.directory}: --only and --ignore leave no linear to quantize")
    problems = []
    for linear in chosen:
        layer = config.for_layer(linear.name)
        stored = model.files.info(f"{linear.name}.weight").dtype
        if stored not in _WEIGHT_TYPES:
            problems.append(f"{linear.name}: its weight is stored as {stored}; wanted a 16- or 32-bit model")
        unit = _unit(layer)
        if linear.k % unit:
            problems.append(_indivisible(linear, unit, _fitting_group(layer, linear.k)))
        elif layer.rank > min(linear.n, linear.k):
            problems.append(
                f"{linear.name}: rank {layer.rank} exceeds its size {linear.n} x {linear.k}; "
                f"lower it with --override '{linear.name}:rank={min(linear.n, linear.k)}'"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    work = sum(_quantized_bytes(linear, config) for linear in chosen)
    replaced = {f"{linear.name}.weight" for linear in chosen}
    kept = [] if config.linears_only else [k for k in model.files.tensors if k not in replaced and k not in model.ties]
    other = sum(model.files.info(key).nbytes for key in kept)
    chosen_names = {linear.name for linear in chosen}
    return Plan(
        linears=chosen,
        left_16bit=[name for name in names if name not in chosen_names] + model.adaptive,
        output_bytes=work + other,
        work_bytes=work,
    )


class HiddenBytes(NamedTuple):
    """Where the hidden states before and after a block lie; on a CPU none are on a device."""

    device: int
    host: int
    disk: int


def hidden_bytes(
    model: Model, linears: list[Linear], tokens: int, device: torch.device, host_limit: int | None = None
) -> HiddenBytes:
    """About how calibration will spread them: batches are not divided. host_limit in bytes, None = none."""
    width = max(one.k for block in _blocks(linears) for one in _whole(model, block)[:1])
    both = 2 * tokens * width * compute_dtype(model, device).itemsize
    on_device = 0 if device.type == "cpu" else min(both, DEVICE_BYTES)
    host = both - on_device if host_limit is None else min(both - on_device, host_limit)
    return HiddenBytes(on_device, host, both - on_device - host)


def spill_bytes(
    model: Model, linears: list[Linear], tokens: int, device: torch.device, host_limit: int | None, ranks: int = 1
) -> int:
    """What the hidden states of all ranks take on disk, about."""
    return ranks * hidden_bytes(model, linears, -(-tokens // ranks), device, host_limit).disk


def calibration_bytes(
    model: Model, linears: list[Linear], tokens: int, device: torch.device, host_limit: int | None = None
) -> int:
    """About what `calibrate` will have in memory at most, on the device: on a GPU the tensors there, else the process.

    Of the block that needs most: weights, hidden states before and after it, the inputs kept for the second pass, the
    sums, and of the widest site the chunk that is transformed and three products. Inputs are kept, and float64 sums
    taken of one site at a time, if REPLAY_BYTES and what host_limit leaves on a CPU are enough.
    """
    size = compute_dtype(model, device).itemsize
    hidden = hidden_bytes(model, linears, tokens, device, host_limit)
    states, replay, most = hidden.device, REPLAY_BYTES, 0
    if device.type == "cpu":
        states = hidden.host
        if host_limit is not None:
            replay = min(replay, host_limit - hidden.host - hidden.disk)
    for block in _blocks(linears):
        widths = [k for k, _ in _sites(block)]
        widest, kept = max(widths), tokens * sum(widths) * size
        squares = sum(k * k for k in widths)
        most = max(
            most,
            sum(size * one.n * one.k for one in _whole(model, block))
            + states
            + (kept + 12 * squares + 12 * widest * widest if kept <= replay else 24 * squares)
            + 6 * 4 * CHUNK_TOKENS * widest
            + 12 * widest * widest,
        )
    return most + (_PROCESS_BYTES if device.type == "cpu" else 0)


def quantization_bytes(linears: list[Linear], device: torch.device) -> int:
    """About what `quantize` from a store will have in memory at most, likewise.

    Of one site: either eight float64 matrices while it is factorized, or seven float32 ones and twelve matrices of its
    stacked weights' size. On a CPU narrow sites go to a pool: 3.6 of them is what SmolLM2 took.
    """
    sites = [site for block in _blocks(linears) for site in _sites(block)]
    most = max(max(64 * k * k, 28 * k * k + 48 * rows * k) for k, rows in sites)
    if device.type != "cpu":
        return most
    return int(most * (1 if any(k >= WIDE for k, _ in sites) else 3.6)) + _PROCESS_BYTES


def _whole(model: Model, block: list[Linear]) -> list[Linear]:
    """All linears of the block that these belong to."""
    return [one for one in model.linears if one.block == block[0].block]


def _blocks(linears: list[Linear]) -> list[list[Linear]]:
    blocks: dict[int, list[Linear]] = {}
    for linear in linears:
        blocks.setdefault(linear.block, []).append(linear)
    return list(blocks.values())


def _sites(block: list[Linear]) -> list[tuple[int, int]]:
    """(channels, rows that read them) of each site, as far as names tell: siblings of one width share their input."""
    sites: dict[tuple[str, int], int] = {}
    for linear in block:
        key = (linear.name.rpartition(".")[0], linear.k)
        sites[key] = sites.get(key, 0) + linear.n
    return [(k, rows) for (_, k), rows in sites.items()]


def _quantized_bytes(linear: Linear, config: QuantConfig) -> int:
    layer = config.for_layer(linear.name)
    return FORMATS[layer.format].stored_bytes(linear.n, linear.k, layer)


def check_output(path: str | Path, needed_bytes: int, sources: Sequence[Path] = (), *, directory: bool = False) -> Path:
    """The output can be written: its parent exists and is writable, it is no directory, the disk has room.

    sources    files that the run reads; the output must not be one of them
    directory  it will be a directory; an empty one may be there
    """
    path = Path(path)
    parent = path.parent if str(path.parent) else Path()
    if directory:
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path}: a file; wanted a new directory, or a name without a slash at its end")
        if path.is_dir() and (any(path.iterdir()) or path.name in ("", "..")):
            raise CheckpointError(f"{path}: a directory that is not empty; wanted a new one or the path of a file")
    elif path.is_dir():
        raise CheckpointError(f"{path}: a directory; wanted the path of a file to write")
    if path.exists() and any(path.samefile(source) for source in sources):
        raise CheckpointError(f"{path}: is what this run reads; wanted another path for its output")
    if not parent.is_dir():
        raise CheckpointError(f"{parent}: no such directory; create it first")
    if not os.access(parent, os.W_OK):
        raise CheckpointError(f"{parent}: not writable")
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{parent}: {free / 2**20:,.0f} MiB free, wanted {needed_bytes / 2**20:,.0f} MiB "
            "for the output and its work files; free some space or write elsewhere"
        )
    return path


def check_run_output(
    out: str | Path, the_plan: Plan, model: Model, spilled: int = 0, *, directory: bool = False
) -> tuple[Path, Path]:
    """(output path, work directory) of a quantize run, after checking that both fit; see `check_output`.

    spilled  bytes of hidden states that will lie in the work directory meanwhile
    """
    work = Path(f"{Path(out)}.work")
    there = sum(file.stat().st_size for file in work.iterdir()) if work.is_dir() else 0
    # by the time that the output is written, the hidden states are gone
    needed = max(the_plan.output_bytes, spilled) + max(the_plan.work_bytes - there, 0)
    read = [file.path for file in model.files.files.values()]
    return check_output(out, needed, read, directory=directory), work


def check_store(directory: str | Path, linears: list[Linear]) -> None:
    """A calibration store can be written there, with room for every site counted as if no linears shared one."""
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory}: a file; wanted a directory for the calibration store")
    if directory.is_dir() and not (directory / "manifest.json").exists():
        if strangers := [entry.name for entry in directory.iterdir() if not entry.name.endswith(".tmp")]:
            raise CheckpointError(
                f"{directory}: holds {strangers[0]} and is no calibration store; wanted a new directory"
            )
        return
    parent = next((folder for folder in directory.absolute().parents if folder.is_dir()), Path("/"))
    if not os.access(parent, os.W_OK):
        raise CheckpointError(f"{parent}: not writable")
    widths = {(linear.block, linear.k) for linear in linears}  # at least one site for each width in a block
    needed = sum(12 * k * k for _, k in widths)
    free = shutil.disk_usage(parent).free
    if not directory.exists() and free < needed:
        raise CheckpointError(
            f"{parent}: {free / 2**20:,.0f} MiB free, wanted {needed / 2**20:,.0f} MiB for the calibration store; "
            "free some space or write elsewhere"
        )


def check_spill(directory: str | Path, spilled: int) -> None:
    """The disk of a directory, which need not be there yet, has room for hidden states beyond --max-host-memory."""
    there = next(
        folder for folder in (Path(directory).absolute(), *Path(directory).absolute().parents) if folder.is_dir()
    )
    if (free := shutil.disk_usage(there).free) < spilled:
        raise CheckpointError(
            f"{there}: {free / 2**20:,.0f} MiB free, wanted {spilled / 2**20:,.0f} MiB for the hidden states; "
            "free some space, raise --max-host-memory or take fewer --samples"
        )


def check_whole_model(model: Model, linears: list[Linear], device: torch.device, what: str, do: str) -> None:
    """The device has room for the model in float32 and these linears quantized beside it. Raises ConfigError.

    what, do  of the message: what needs it, what to do without
    """
    stored = (file.tensors[name] for name, file in model.files.tensors.items())
    weights = sum(info.nbytes // info.dtype.itemsize for info in stored)
    needed, free = 4 * weights + sum(linear.n * linear.k for linear in linears) // 2, free_bytes(device)
    if free is not None and free < needed:
        raise ConfigError(
            f"{what}: needs the whole model in memory, {needed / 1e9:,.1f} GB and what a sequence keeps for its "
            f"gradient; {free / 1e9:,.1f} GB are free on {device}; {do}"
        )


def free_bytes(device: torch.device) -> int | None:
    """What a process can still have there; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    memory = Path("/proc/meminfo")  # Linux
    found = re.search(r"MemAvailable:\s+(\d+) kB", memory.read_text()) if memory.is_file() else None
    if not found:
        return None
    free = 1024 * int(found[1])
    limit, used, kinds = (_GROUP / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.is_file() and (most := limit.read_text().strip()).isdigit():
        files = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", kinds.read_text(), re.MULTILINE)))
        free = min(free, int(most) - int(used.read_text()) + files)  # what is cached of files gives way
    return free


def check_groups(linears: list[Linear]) -> None:
    """The activation quantizer's groups divide every input. Raises ConfigError listing the linears where not."""
    if bad := [linear for linear in linears if linear.k % ACTIVATION_GROUP]:
        raise ConfigError("\n".join(_indivisible(linear, ACTIVATION_GROUP) for linear in bad))


def _unit(layer: LayerConfig) -> int:
    """What in_features must be a multiple of: the group, the kernels' loads of 32 codes, and where sums are taken the
    groups that those see."""
    if layer.format == "nf4":
        return 1  # its blocks run through the flattened weight
    unit = layer.group_size or 32
    return unit if layer.objective == "nearest" else max(unit, ACTIVATION_GROUP)


def _fitting_group(layer: LayerConfig, k: int) -> int:
    """A smaller group of w4a16 that in_features are a multiple of; 0 if there is none."""
    smallest = 32 if layer.objective == "nearest" else ACTIVATION_GROUP
    sizes = (size for size in (64, 32) if size < layer.group_size and k % max(size, smallest) == 0)
    return next(sizes, 0) if layer.format == "w4a16" else 0


def _indivisible(linear: Linear, unit: int, fitting: int = 0) -> str:
    other = f"take --group-size {fitting}, or " if fitting else ""
    return (
        f"{linear.name}: in_features {linear.k} is not a multiple of {unit}; "
        f"{other}leave it in 16 bits with --ignore '{linear.name}'"
    )


def device_warnings(device: torch.device) -> list[str]:
    """A GPU without the kernel of GPTQ's inner loop does the same in torch, column by column."""
    if device.type != "cuda" or not (reason := quantizer.why_not(device)):
        return []
    return [f"GPTQ ran column by column in torch, some thirty times slower than its kernel: {reason}"]


def token_warnings(linears: list[Linear], tokens: int) -> list[str]:
    """Too few calibration tokens for the widest input: at T ≈ K … 4K the method overfits in spite of its damping."""
    widest = max(linears, key=lambda linear: linear.k)
    if tokens < widest.k:
        return [
            f"{tokens:,} calibration tokens for {widest.k} input channels ({widest.name}): fewer tokens than channels"
        ]
    if tokens < 4 * widest.k:
        return [
            f"{tokens:,} calibration tokens for {widest.k} input channels ({widest.name}): "
            f"quality suffers below {4 * widest.k:,}"
        ]
    return []
