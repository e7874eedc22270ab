"""From a model directory to a checkpoint: preflight, calibrate, quantize block by block, resume, assemble.

Layers are independent: their inputs and targets come from the original model (measured no worse than inputs from the
quantized prefix), so the sums may come from a store or be taken on the way, with the same bytes as a result. Finished
blocks lie in a work directory beside the output; a killed run starts again at the first block that is not there. The
output gets its name only when it is whole.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from svdq import __version__, preflight
from svdq.assemble import assemble, write_block
from svdq.calibration.capture import BlockSums, record_block
from svdq.calibration.data import TokenData
from svdq.calibration.diffusion import open_stream, pieces
from svdq.calibration.recorded import CalibrationData, data_identity
from svdq.calibration.states import Room
from svdq.calibration.store import Store
from svdq.checkpoint import open_file, read_json, write_json
from svdq.config import SEARCH, WEIGHT_ONLY, CalibrationConfig, QuantConfig, first_difference, to_dict
from svdq.directory import content_bytes, publish
from svdq.errors import CheckpointError, ConfigError
from svdq.formats import FORMATS
from svdq.models import Linear, Model, compute_dtype
from svdq.preflight import WIDE, Plan, check_groups, check_run_output, device_warnings, plan, token_warnings
from svdq.profiling import peak_bytes
from svdq.ranks import ALONE, Ranks
from svdq.sites import quantize_site, site_jobs, without_sums

TOKENS_PER_BATCH = 4096
Progress = Callable[[str, int, int], None]  # stage, blocks done, blocks in all


def _silent(stage: str, done: int, total: int) -> None:
    pass


# ---------------------------------------------------------------------------------------------- calibrate


def _record_blocks(
    model: Model,
    linears: list[Linear],
    data: CalibrationData,
    config: CalibrationConfig,
    device: torch.device,
    have: Callable[[int], bool],
    room: Room,
    ranks: Ranks = ALONE,
) -> Iterator[tuple[int, BlockSums | None]]:
    """Stream the model; per block its sums, or None where `have` says they are not needed again."""
    needed = [b for b in range(len(model.blocks)) if not have(b)]
    if not needed:
        return
    dtype = compute_dtype(model, device)
    stream = open_stream(model, pieces(model, ranks.share(data.sequences), TOKENS_PER_BATCH), device, dtype, room)
    for visit in stream:
        if have(visit.block):
            if visit.last:
                yield visit.block, None
        else:
            members = [linear for linear in linears if linear.block == visit.block]
            result = record_block(stream, visit, members, config, ranks)
            if result is not None:
                yield visit.block, result
            del result  # before the next block's sums are taken
        if visit.last and visit.block == needed[-1]:
            return


def _check_ranks(data: CalibrationData, config: CalibrationConfig, ranks: Ranks) -> None:
    if len(data.sequences) < ranks.count:
        raise ConfigError(f"{data.source}: {len(data.sequences)} sequences for {ranks.count} ranks; wanted one each")
    if ranks.count > 1 and config.smoothing == SEARCH:
        raise ConfigError("--smoothing search: looks at all tokens in one process; calibrate without torchrun")


@dataclass
class CalibrationSummary:
    blocks: int
    sites: int
    tokens: int
    seconds: float
    peak_bytes: int
    warnings: list[str] = field(default_factory=list)


def calibrate(
    model: Model,
    out: str | Path,
    data: CalibrationData,
    config: CalibrationConfig,
    *,
    linears: list[Linear] | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = _silent,
    ranks: Ranks = ALONE,
    max_host_memory: int | None = None,
) -> CalibrationSummary:
    """Take the sums of every site and write the store; resumes an unfinished one.

    With several ranks each runs its share of the sequences, and all must see the directory.
    max_host_memory  bytes; hidden states beyond it lie on disk, in files without a name in the store's directory
    """
    started, device = time.perf_counter(), torch.device(device)
    linears = model.linears if linears is None else linears
    check_groups(linears)
    identity = {
        "config": to_dict(config),
        "data": data_identity(data),
        "model": model.files.source_fingerprint(),
        "linears": [linear.name for linear in linears],
        "device": device.type,
        "svdq": __version__,
    }
    _check_ranks(data, config, ranks)
    spilled = preflight.spill_bytes(model, linears, data.tokens, device, max_host_memory, ranks.count)
    ranks.agree(lambda: preflight.check_spill(out, spilled))
    store = ranks.agree(lambda: Store.create_or_resume(out, identity, len(model.blocks)))
    total, done = len(model.blocks), 0
    if isinstance(data, TokenData):
        ranks.agree(lambda: store.keep_tokens(data.sequences))
    there = ranks.agree(lambda: {block for block in range(total) if store.has(block)})
    progress("calibrate", 0, total)
    if not store.manifest.get("finished"):
        have, room = there.__contains__, Room(device, max_host_memory, store.directory)
        recorded = _record_blocks(model, linears, data, config, device, have, room, ranks)
        for _ in store.write_all(recorded, ranks.owns):
            done += 1
            progress("calibrate", done, total)
        ranks.wait()
        ranks.agree(store.finish)
    progress("calibrate", total, total)
    sites = sum(len(json.loads(open_file(store.path(b)).metadata["sites"])) for b in range(total))
    seconds, warnings = time.perf_counter() - started, token_warnings(linears, data.tokens)
    return CalibrationSummary(total, sites, data.tokens, seconds, peak_bytes(device), warnings)


# ---------------------------------------------------------------------------------------------- quantize


@dataclass
class QuantizationSummary:
    """What a run did. `layers` maps each name to its report (errors per round, damping, repairs, seconds)."""

    path: Path
    layers: dict[str, dict]
    left_16bit: list[str]
    repairs: list[str]
    warnings: list[str]
    source_bytes: int
    output_bytes: int
    resumed_blocks: int
    seconds: float
    peak_bytes: int

    @property
    def mean_error(self) -> float:
        return sum(layer["error"] for layer in self.layers.values()) / max(len(self.layers), 1)


def quantize(
    model: Model,
    out: str | Path,
    config: QuantConfig,
    *,
    store: Store | None = None,
    data: CalibrationData | None = None,
    calibration: CalibrationConfig | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = _silent,
    ranks: Ranks = ALONE,
    max_host_memory: int | None = None,
    shard_bytes: int | None = None,
) -> QuantizationSummary | None:
    """Quantize a model from a calibration store, or from data directly (same bytes either way); with the objective
    'nearest' from neither.

    With shard_bytes, `out` is a Hugging Face directory with shards of that size at most; without, one file.

    With several ranks, each quantizes blocks of its own: from a store, and the bytes are those of one; or from its
    share of the data, and sums differ as floats added up in another order do. Rank 0 alone writes the file and returns
    the summary; the others return None when they have done their part. max_host_memory is that of `calibrate`, with the
    work directory in place of the store's.
    Raises ConfigError if a work directory of another configuration is there, or the store is of another model;
    NumericsError and DataError name the layer.
    """
    started = time.perf_counter()
    device = torch.device(device)
    the_plan = plan(model, config)
    activation, calibrated = calibration_identity(model, the_plan, config, store, data, calibration)
    tokens = 0 if data is None else data.tokens
    spilled = preflight.spill_bytes(model, the_plan.linears, tokens, device, max_host_memory, ranks.count)
    out, work = check_run_output(out, the_plan, model, spilled, directory=shard_bytes is not None)
    identity = {
        "config": to_dict(config),
        "activation": activation,
        "calibration": calibrated,
        "source": model.files.source_fingerprint(),
        "device": device.type,
        "blocks": len(model.blocks),
        "svdq": __version__,
    }
    alone = config.layer.objective == "nearest"
    streamed = store is None and not alone
    if streamed:
        assert data is not None and calibration is not None
        _check_ranks(data, calibration, ranks)
    ranks.agree(lambda: _open_work(work, identity))

    def block_file(block: int) -> Path:
        return work / f"block-{block:05d}.safetensors"

    total = len(model.blocks)
    progress("quantize", 0, total)
    there = ranks.agree(lambda: {block for block in range(total) if block_file(block).exists()})
    if data is not None and calibration is not None and streamed:
        room = Room(device, max_host_memory, work)
        have = there.__contains__
        sums: Iterator = _record_blocks(model, the_plan.linears, data, calibration, device, have, room, ranks)
        if ranks.count > 1:
            sums = _own_in_turn(sums, ranks)
    else:

        def read(block: int) -> BlockSums:
            return without_sums(the_plan, block) if store is None else store.read(block)

        missing = ranks.share([b for b in range(total) if b not in there])
        done = [] if ranks.count > 1 else sorted(there)
        sums = ((b, read(b) if b in missing else None) for b in sorted([*missing, *done]))
    _quantize_blocks(model, the_plan, config, device, sums, block_file, total, progress, overlap=not streamed)
    if ranks.rank:
        return None

    def blocks_there() -> int:
        return sum(block_file(b).exists() for b in range(total))

    if ranks.count > 1 or not streamed:
        ranks.wait_until(blocks_there, total, "blocks are quantized")
    finished = [open_file(block_file(b)) for b in range(total) if block_file(b).exists()]
    layers: dict[str, dict] = {}
    never_ran: list[str] = []
    for file in finished:
        stored = json.loads(file.metadata["report"])
        layers.update(stored["layers"])
        never_ran += stored["never_ran"]
    if not layers:
        raise ConfigError(f"{model.directory}: none of the selected linears ran during calibration")
    repairs = [f"{name}: {repair}" for name, layer in layers.items() for repair in layer["repairs"]]
    repairs += [f"{name}: left in 16 bits, it never ran during calibration" for name in never_ran]
    left = the_plan.left_16bit + never_ran
    warnings = [] if alone else token_warnings(the_plan.linears, calibrated["tokens"]) + device_warnings(device)
    # written in the work directory, so that a killed run leaves nothing beside the output
    written = work / ("output.safetensors" if shard_bytes is None else "output")
    assemble(model, written, config, activation, calibrated, finished, layers, left, repairs, shard_bytes)
    publish(written, out)
    for file in finished:  # run.json goes last: what is left of a killed clean-up is still a work directory
        file.path.unlink()
    shutil.rmtree(work)
    source_bytes = sum(model.files.info(key).nbytes for key in model.files.tensors)
    return QuantizationSummary(
        path=out,
        layers=layers,
        left_16bit=left,
        repairs=repairs,
        warnings=warnings,
        source_bytes=source_bytes,
        output_bytes=content_bytes(out),
        resumed_blocks=len(there),
        seconds=time.perf_counter() - started,
        peak_bytes=peak_bytes(device),
    )


def _own_in_turn(
    recorded: Iterator[tuple[int, BlockSums | None]], ranks: Ranks
) -> Iterator[tuple[int, BlockSums | None]]:
    """This rank's blocks, each once a block of every rank is recorded: then all ranks quantize at the same time."""
    own: list[tuple[int, BlockSums | None]] = []
    for block, sums in recorded:
        if sums is not None and ranks.owns(block):
            own.append((block, sums))
        del sums
        if block % ranks.count == ranks.count - 1:
            while own:
                yield own.pop(0)
    yield from own


def calibration_identity(
    model: Model,
    the_plan: Plan,
    quantization: QuantConfig,
    store: Store | None,
    data: CalibrationData | None,
    calibration: CalibrationConfig | None,
) -> tuple[dict, dict]:
    """(activation side, data fingerprint), after checking that the store fits the model, the selection, the format."""
    form = quantization.layer.format
    bare = {"smoothing": 0.0, "rotation": "none", "act_clip": 1.0, "activation": None}
    if quantization.layer.objective == "nearest":
        return bare, {}
    if store is None:
        if data is None or calibration is None:
            raise ConfigError("quantize needs a calibration store or data to calibrate on: --calib DIR or --data SRC")
        config, calibrated = to_dict(calibration), data_identity(data)
    else:
        store.check_model(model.files.source_fingerprint())
        known = set(store.manifest["linears"])
        if lacking := [linear.name for linear in the_plan.linears if linear.name not in known]:
            raise ConfigError(
                f"{store.directory}: was calibrated without {lacking[0]}; calibrate with that linear selected"
            )
        config, calibrated = store.manifest["config"], store.manifest["data"]
    if form in WEIGHT_ONLY:  # a store's sums of x xᵀ serve them, whatever activations it was taken for
        return bare, calibrated
    activation = {key: config.get(key, "int4") for key in bare}
    if activation["activation"] != FORMATS[form].activation:
        raise ConfigError(
            f"calibrated for {activation['activation']} activations, {form} has {FORMATS[form].activation}; "
            f"calibrate with --format {form}"
        )
    return activation, calibrated


def _open_work(work: Path, identity: dict) -> None:
    if work.exists() and not work.is_dir():
        raise CheckpointError(f"{work}: a file stands where the work directory would be; move it away")
    run = work / "run.json"
    try:
        work.mkdir(exist_ok=True)
        for leftover in work.glob(".*.tmp"):  # of a run that was killed while it wrote
            leftover.unlink()
        strangers = [entry.name for entry in work.iterdir() if entry.name != run.name]
    except OSError as error:
        raise CheckpointError(f"{work}: cannot be created or read: {error.strerror}") from None
    if run.exists():
        found = read_json(run)
        difference: str | None = "configuration (run.json is broken)"
        if isinstance(found, dict):
            config = {"config": identity["config"]}, {"config": found.get("config")}
            difference = first_difference(*config) or first_difference(identity, found)
        if difference:
            raise ConfigError(
                f"{work}: holds an unfinished run with another {difference}; finish it or delete the directory"
            )
    elif strangers:
        raise CheckpointError(f"{work}: holds {strangers[0]} and is no work directory of svdq; move it away")
    else:
        write_json(run, identity)


def _quantize_blocks(
    model: Model,
    the_plan: Plan,
    config: QuantConfig,
    device: torch.device,
    recorded: Iterator[tuple[int, BlockSums | None]],
    block_file: Callable[[int], Path],
    total: int,
    progress: Progress,
    *,
    overlap: bool,
) -> None:
    """Quantize the blocks as their sums arrive and write each when it is done.

    On a CPU, sites go to a pool with one thread each: below WIDE channels most of a layer's time is in operations too
    small for two threads. A model with wider sites takes them one at a time with all threads: there the factorizations
    own the time, and the memory. With `overlap` two blocks are in flight, so that the pool does not run dry at a
    block's end; without, the pool rests while the next sums are taken, as those use all threads.
    """
    threads = torch.get_num_threads()
    wide = device.type != "cpu" or any(linear.k >= WIDE for linear in the_plan.linears)
    workers = 1 if wide else min(threads, 8)
    waiting: deque[tuple[int, list[Future], BlockSums]] = deque()
    done = 0

    def write_oldest() -> None:
        nonlocal done
        block, futures, sums = waiting.popleft()
        results = [result for future in futures for result in future.result()]
        write_block(the_plan, block, sums, results, config, block_file(block))
        done += 1
        progress("quantize", done, total)

    with ThreadPoolExecutor(workers) as pool:
        try:
            for block, sums in recorded:
                if sums is None:
                    done += 1
                    progress("quantize", done, total)
                    continue
                jobs = site_jobs(the_plan, block, sums)
                each = threads if wide else 1
                futures = [pool.submit(quantize_site, model, sums.sums, *job, config, device, each) for job in jobs]
                waiting.append((block, futures, sums))
                if len(waiting) > overlap:
                    write_oldest()
                if not overlap:
                    torch.set_num_threads(threads)
                del sums, futures, jobs  # before the next block's sums are taken
            while waiting:
                write_oldest()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        finally:
            torch.set_num_threads(threads)
