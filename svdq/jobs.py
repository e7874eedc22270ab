"""What a running, killed or finished job has left on disk: a quantize run's work directory, or a calibration store."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from svdq.checkpoint import open_file, read_json
from svdq.errors import CheckpointError

_SILENT = 5  # after so many times what a block takes, and a minute, the job is taken for dead


def state(directory: str | Path, now: float | None = None) -> dict[str, Any]:
    """As plain JSON values: kind, blocks done and in all, seconds a block, the rest's seconds, layers as reported.

    seconds_a_block is the median time between two finished blocks; of one block alone, since the job began.
    Raises CheckpointError if the directory is neither, or a file in it is broken.
    """
    directory, now = Path(directory), time.time() if now is None else now
    kinds = {"run.json": "quantize", "manifest.json": "calibrate"}
    name = next((name for name in kinds if (directory / name).is_file()), None)
    described = read_json(directory / name) if name else None
    if name is None or not isinstance(described, dict) or not isinstance(described.get("blocks"), int):
        raise CheckpointError(f"{directory}: neither a work directory of svdq quantize nor a calibration store")
    blocks = sorted(directory.glob("block-*.safetensors"), key=lambda path: path.stat().st_mtime)
    times = [path.stat().st_mtime for path in blocks]
    gaps = [b - a for a, b in pairwise(times)] or [t - (directory / name).stat().st_mtime for t in times]
    each = median(gaps) if gaps else None
    silent = now - max([*times, (directory / name).stat().st_mtime])
    layers, never_ran = {}, []
    if kinds[name] == "quantize":
        for path in sorted(blocks):
            try:
                report = json.loads(open_file(path).metadata["report"])
                layers.update(report["layers"])
                never_ran += report["never_ran"]
            except (KeyError, ValueError, TypeError):
                raise CheckpointError(f"{path}: no report in its header; it is not a block of svdq quantize") from None
    finished = bool(described.get("finished"))
    return {
        "directory": str(directory),
        "kind": kinds[name],
        "finished": finished,
        "blocks": described["blocks"],
        "done": len(blocks),
        "seconds_a_block": each,
        "seconds_left": None if each is None else each * (described["blocks"] - len(blocks)),
        "silent_seconds": silent,
        "seems_dead": not finished and silent > max(60.0, _SILENT * (each or 0.0)),
        "layers": layers,
        "never_ran": never_ran,
    }
