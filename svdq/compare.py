"""Several checkpoints of one model side by side: error of every linear, perplexity, size, speed where it was measured.

Headers alone say what each file holds and what error the quantizer reported on its own calibration tokens. Errors on
other text come from the verifier, by runs made here or by what `svdq verify --json` wrote; a speed from what
`svdq profile --quantized FILE --json` wrote. One measure stands in all columns, or the comparison would be between
measures; what was not measured for a file is left out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from svdq import schema
from svdq.details import bytes_by_kind, layer_format, quantizer_report
from svdq.errors import CheckpointError, ConfigError
from svdq.quantized import QuantizedFile
from svdq.report import listed, percent, printable, size, table

QUANTIZERS = "calibration"  # the measure of headers alone
MEASURES = {  # measure: what it is
    "token_error": "error per token on the data",
    "quantization_error": "error of the weights",
    QUANTIZERS: "the quantizer's own error, each on its calibration tokens",
}


@dataclass
class Compared:
    """One checkpoint. layers: linear → {'format', 'n', 'k', 'rank', 'group_size', 'error'}; error None: not known.

    outputs   as the verifier has them, a dict a text; failures: the checks that it says failed
    speed     ms_per_step, with the tokens and the device that it was measured on
    """

    label: str
    file: str
    kind: str
    formats: list[str]
    bytes: int
    bytes_by_kind: dict[str, int]
    bits_per_weight: float | None
    layers: dict[str, dict[str, Any]]
    outputs: list[dict[str, Any]] = field(default_factory=list)
    speed: dict[str, Any] | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def errors(self) -> dict[str, float]:
        return {name: layer["error"] for name, layer in self.layers.items() if layer["error"] is not None}


@dataclass
class Comparison:
    """measure: a key of MEASURES. shared: the linears whose error all have; means are over these."""

    measure: str
    checkpoints: list[Compared]
    shared: list[str]
    notes: list[str]

    def means(self) -> list[float | None]:
        return [
            sum(one.errors[name] for name in self.shared) / len(self.shared) if self.shared else None
            for one in self.checkpoints
        ]

    def spread(self, name: str) -> float:
        """How far a shared linear's errors lie apart."""
        errors = [one.errors[name] for one in self.checkpoints]
        return math.inf if any(math.isnan(error) for error in errors) else max(errors) - min(errors)

    def to_dict(self) -> dict[str, Any]:
        facts = asdict(self)
        for one, mean in zip(facts["checkpoints"], self.means(), strict=True):
            one["mean_error"] = mean
        return facts


def compare(
    files: Sequence[QuantizedFile],
    *,
    verified: Sequence[dict[str, Any]] = (),
    profiled: Sequence[dict[str, Any]] = (),
) -> Comparison:
    """verified, profiled: JSON objects of svdq verify and svdq profile, each naming one of the files.

    Raises CheckpointError if the files are not of one model; ConfigError for fewer than two, for one given twice, for
    numbers of another file or of another state of it, and if only some of the files have been verified.
    """
    if len(files) < 2:
        raise ConfigError("svdq compare: found one checkpoint; wanted two or more of one model")
    _check_one_model(files)
    labels = _labels([file.file.path for file in files])
    reports, speeds = (_by_file(files, facts, what) for facts, what in ((verified, "verify"), (profiled, "profile")))
    lacking = [label for label, report in zip(labels, reports, strict=True) if report is None]
    if verified and lacking:
        raise ConfigError(f"{lacking[0]}: not verified, others are; give the JSON of svdq verify for each, or for none")
    measure = QUANTIZERS
    if verified:
        per_token = all(row.get("token_error") is not None for report in reports if report for row in report["layers"])
        measure = "token_error" if per_token else "quantization_error"
    checkpoints = [_compared(*entry, measure) for entry in zip(labels, files, reports, speeds, strict=True)]
    shared = [name for name in checkpoints[0].errors if all(name in one.errors for one in checkpoints)]
    return Comparison(measure, checkpoints, shared, _notes(files, checkpoints, measure, len(shared)))


def _check_one_model(files: Sequence[QuantizedFile]) -> None:
    paths = [file.file.path.resolve() for file in files]
    twice = next((path for path, count in Counter(paths).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice}: given twice; wanted different checkpoints")
    first = files[0].meta(schema.SOURCE, dict)
    for file in files[1:]:
        source = file.meta(schema.SOURCE, dict)
        if source != first:
            raise CheckpointError(
                f"{file.file.path}: quantized from another model ({_source(source)}) than {files[0].file.path} "
                f"({_source(first)}); wanted checkpoints of one model"
            )


def _source(source: dict[str, Any]) -> str:
    """What tells one model from another: its files, their size, and a few digits of what is in them."""
    shards = source.get("files")
    if not isinstance(shards, dict):
        return "not named"
    facts = [shard if isinstance(shard, dict) else {} for shard in shards.values()]
    sizes = [shard["size"] for shard in facts if isinstance(shard.get("size"), int)]
    sample = str(facts[0].get("sample_sha256"))[:8] if facts else "-"
    return f"{len(facts)} file{'s' * (len(facts) != 1)}, {sum(sizes):,} bytes, sample {sample}"


def _labels(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ, without a common suffix."""
    depth = 1
    names = [path.resolve().with_suffix("").parts for path in paths]
    while depth < max(map(len, names)) and len({parts[-depth:] for parts in names}) < len(names):
        depth += 1
    ends = ["/".join(parts[-depth:]) for parts in names]
    return ends if len(set(ends)) == len(ends) else [str(path) for path in paths]


def _by_file(files: Sequence[QuantizedFile], facts: Sequence[dict[str, Any]], what: str) -> list[dict[str, Any] | None]:
    """The object that names each file. Layers, where there are any, must be those of the file as it is now."""
    found: dict[Path, dict[str, Any]] = {}
    known = {file.file.path.resolve(): file for file in files}
    for entry in facts:
        named = entry.get("file")
        path = Path(named).resolve() if isinstance(named, str) and "\0" not in named else None
        if path is None:
            raise ConfigError(
                f"numbers of svdq {what}: name no file; wanted its --json output of one of the checkpoints"
            )
        if path not in known:
            raise ConfigError(f"numbers of svdq {what}: are of {named}, which is not compared here")
        if path in found:
            raise ConfigError(f"numbers of svdq {what}: two are of {named}; give one of them")
        if what == "verify":
            _check_layers(known[path], entry)
        elif not isinstance(entry.get("us"), (int, float)):
            raise ConfigError(f"numbers of svdq {what}: those of {named} hold no time of a step")
        found[path] = entry
    return [found.get(path) for path in known]


def _check_layers(file: QuantizedFile, entry: dict[str, Any]) -> None:
    try:
        sizes = {row["name"]: (row["n"], row["k"], row["rank"], row["group_size"]) for row in entry["layers"]}
        for row in entry["layers"]:
            for key in ("quantization_error", "token_error"):  # null: not finite, or not measured
                row[key] = None if row[key] is None else float(row[key])
        outputs = [(output["source"], output["tokens"]) for output in entry["outputs"]]
        sound = all(isinstance(source, str) and isinstance(tokens, int) for source, tokens in outputs)
        sound = sound and all(isinstance(failure, str) for failure in entry["failures"])
    except (KeyError, TypeError, ValueError):
        sound, sizes = False, {}
    if not sound:
        raise ConfigError(f"numbers of svdq verify: those of {entry['file']} are not what verify --json writes")
    if sizes != file.layers:
        raise ConfigError(
            f"numbers of svdq verify: those of {entry['file']} are of other linears than it has now; verify it again"
        )


def _compared(
    label: str, file: QuantizedFile, report: dict[str, Any] | None, speed: dict[str, Any] | None, measure: str
) -> Compared:
    layers = {}
    rows = {row["name"]: row for row in report["layers"]} if report else {}
    for name, (n, k, rank, group) in file.layers.items():
        if report:
            error = rows[name][measure]
        else:
            own = quantizer_report(file, name)
            kept = own["kept_round"] if own else 0
            error = own["rounds"][kept - 1]["error"] if own and 0 < kept <= len(own["rounds"]) else None
        sizes = {"n": n, "k": k, "rank": rank, "group_size": group}
        form = "W4A8" if report and report.get("activations") == "fp8" else layer_format(file, name)
        layers[name] = {"format": form, **sizes, "error": error}
    others, weights = set(file.other_tensors), sum(n * k for n, k, _, _ in file.layers.values())
    stored = sum(info.nbytes for name, info in file.file.tensors.items() if name not in others)
    return Compared(
        label,
        str(file.file.path),
        str(file.kind),
        sorted({layer["format"] for layer in layers.values()}),
        file.file.size,
        bytes_by_kind(file),
        8 * stored / weights if weights else None,
        layers,
        list(report["outputs"]) if report else [],
        speed and {"ms_per_step": speed["us"] / 1e3, "tokens": speed.get("tokens"), "device": speed.get("device")},
        list(report["failures"]) if report else [],
    )


def _notes(files: Sequence[QuantizedFile], checkpoints: list[Compared], measure: str, shared: int) -> list[str]:
    """What keeps columns from being compared without a thought."""
    notes = []
    if measure == QUANTIZERS:
        hashes = {str(file.meta(schema.CALIBRATION, dict).get("sha256")) for file in files}
        if len(hashes) > 1:
            notes.append(
                "they were calibrated on different tokens, so the quantizer's errors do not compare; verify them"
            )
    texts = [[(output["source"], output["tokens"]) for output in one.outputs] for one in checkpoints]
    if any(text != texts[0] for text in texts):
        notes.append("they were verified on different texts, so errors and perplexities do not compare")
    places = {(one.speed["device"], one.speed["tokens"]) for one in checkpoints if one.speed}
    if len(places) > 1:
        notes.append("their speeds are of different devices or numbers of tokens")
    most = max(len(one.layers) for one in checkpoints)
    if shared < most:
        notes.append(f"means are over the {shared} linears whose error all have, of up to {most}")
    return notes


def depths(names: Sequence[str]) -> dict[str, int]:
    """Linear → its block's place, by the first number in its name; names without one have no place."""
    found = {name: re.match(r"(.*?)(?:^|\.)(\d+)(?:\.|$)", name) for name in names}
    blocks = sorted({(match[1], int(match[2])) for match in found.values() if match})
    place = {block: number for number, block in enumerate(blocks)}
    return {name: place[match[1], int(match[2])] for name, match in found.items() if match}


# ---------------------------------------------------------------------------------------------- as text


def facts_of(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """(what, its value for each checkpoint) of the whole files; rows that no file has are left out."""
    ones, means = comparison.checkpoints, comparison.means()
    ranks = [sorted({layer["rank"] for layer in one.layers.values()}) for one in ones]
    rows = [
        ("format", [f"{', '.join(one.formats)} {one.kind}" for one in ones]),
        (
            "rank",
            ["-" if not rank else f"{rank[0]}" if len(rank) == 1 else f"{rank[0]} to {rank[-1]}" for rank in ranks],
        ),
        ("linears", [str(len(one.layers)) for one in ones]),
        ("size", [size(one.bytes) for one in ones]),
        ("bits per weight", ["-" if one.bits_per_weight is None else f"{one.bits_per_weight:.2f}" for one in ones]),
        ("mean error", [percent(mean) for mean in means]),
        ("largest error", [percent(max(one.errors.values(), key=_largest, default=None)) for one in ones]),
    ]
    for source in dict.fromkeys(output["source"] for one in ones for output in one.outputs):
        found = [next((output for output in one.outputs if output["source"] == source), None) for one in ones]
        name = Path(source).name
        if any(output and output.get("original") for output in found):
            rows.append((f"perplexity, {name}", [_perplexity(output) for output in found]))
        elif any(output and output.get("output_error") is not None for output in found):
            errors = [None if output is None else output.get("output_error") for output in found]
            rows.append((f"output error, {name}", [percent(error) for error in errors]))
        else:
            cosines = [output and output.get("state_cosine") for output in found]
            rows.append((f"cosine, {name}", ["-" if cosine is None else f"{cosine:.4f}" for cosine in cosines]))
    if any(one.speed for one in ones):
        rows.append(("ms a step", ["-" if one.speed is None else f"{one.speed['ms_per_step']:.2f}" for one in ones]))
    return [(what, values) for what, values in rows if any(value != "-" for value in values)]


def _largest(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _perplexity(output: dict[str, Any] | None) -> str:
    """null in the JSON is what is not finite."""
    original, ours = (output or {}).get("original"), (output or {}).get("quantized")
    return "-" if not original or ours is None else f"{ours:.2f} ({ours / original:.3f} x)"


def differing_layers(comparison: Comparison) -> list[str]:
    """The shared linears, those first whose errors lie farthest apart."""
    return sorted(comparison.shared, key=lambda name: -comparison.spread(name))


def comparison_text(comparison: Comparison, most: int = 15) -> str:
    ones = comparison.checkpoints
    labels = [one.label for one in ones]
    names = [name for name in differing_layers(comparison) if comparison.spread(name) > 0]
    several = len({kind for one in ones for kind in one.formats}) > 1
    body = [
        [
            name,
            *(f"{one.layers[name]['format']} " * several + percent(one.errors[name]) for one in ones),
            f"{100 * comparison.spread(name):.2f}",
        ]
        for name in names[:most]
    ]
    lines = [table(["", *labels], [[what, *values] for what, values in facts_of(comparison)])]
    lines.append(f"error: {MEASURES[comparison.measure]}")
    if names:
        lines.append(table(["layers that differ most", *labels, "points"], body))
    if len(names) > most:
        lines.append(f"… and {len(names) - most} that differ less")
    if len(names) < len(comparison.shared):
        lines.append(f"{len(comparison.shared) - len(names)} linears have the same error in all")
    for one in ones:
        lines += listed([f"{one.label}: {failure}" for failure in one.failures], "FAILED")
    return "\n".join([*lines, *(printable(f"note: {note}") for note in comparison.notes)])
