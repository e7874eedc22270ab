"""The two configurations: frozen, checked where they are made, every field a knob.

The activation side (smoothing, rotation, clip) is decided when the sums are taken and lives in `CalibrationConfig`;
the weight side lives in `QuantConfig`. A preset sets both.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from svdq.errors import ConfigError

ACTIVATION_GROUP = 64  # channels that share an activation scale; W4A4's weight groups are multiples of it
ROW = 0  # as a group size: the whole row
SVD_METHODS = ("auto", "krylov", "exact")
OBJECTIVES = ("output", "weight", "svd", "nearest")
ACTIVATIONS = ("int4", "nvfp4")  # what activations are calibrated for
FORMATS: dict[str, dict[str, Any]] = {
    # name: its weight side, as differences from the defaults
    "w4a4": {},
    "w4a16": {"group_size": 128, "rank": 0},
    "w8a16": {"group_size": ROW, "rank": 0, "objective": "nearest"},
    "nf4": {"rank": 0, "objective": "nearest"},
    "nvfp4": {"group_size": 16},
}
WEIGHT_ONLY = ("w4a16", "w8a16", "nf4")
_GROUPS = {"w4a16": (ROW, 32, 64, 128), "w8a16": (ROW,), "nf4": (64,), "nvfp4": (16,)}
SEARCH = "search"
ROTATIONS = ("hadamard64", "none")
_OVERRIDABLE = ("rank", "group_size", "rounds", "damping")


@dataclass(frozen=True)
class CalibrationConfig:
    """How many tokens are read, and what the activations go through before they are quantized.

    smoothing  exponent of s_k = rms(x_k)^smoothing; 0 = no smoothing; 'search': as SVDQuant does (calibration.search)
    act_clip   activation scale = act_clip · absmax / 7
    activation the numbers that activations become: 'int4' of w4a4 or 'nvfp4'; formats of 16-bit activations take either
    """

    samples: int = 128
    seq_len: int = 512
    min_tokens: int = 1024
    seed: int = 0
    smoothing: float | str = 0.75
    rotation: str = "hadamard64"
    act_clip: float = 0.85
    activation: str = "int4"

    def __post_init__(self):
        _require_int(self, "samples", 1)
        _require_int(self, "seq_len", 2)
        _require_int(self, "min_tokens", 1)
        _require_int(self, "seed", 0)
        if self.smoothing != SEARCH:
            _require_range(self, "smoothing", 0.0, 1.0, or_else=f" or {SEARCH!r}")
        _require_choice(self, "rotation", ROTATIONS)
        _require_range(self, "act_clip", 0.1, 1.0)
        _require_choice(self, "activation", ACTIVATIONS)
        if self.activation == "nvfp4" and self.act_clip != 1.0:
            raise ConfigError(f"act_clip: {self.act_clip} — nvfp4 knows none, wanted 1")
        if self.activation == "nvfp4" and self.smoothing == SEARCH:
            raise ConfigError(f"smoothing: {SEARCH} — looks at int4 activations, wanted an exponent")


@dataclass(frozen=True)
class LayerConfig:
    """The knobs of one linear. damping None = the rule clamp(K / tokens, 0.01, 0.5).

    objective  what the steps minimise: 'output' (J), 'weight' (rounds of GPTQ(W − L) and SVD(W − Q̂)), 'svd' (L is the
               SVD of W, GPTQ rounds the rest, once) or 'nearest' (each weight to its nearest code, by no data)
    format     one of FORMATS
    symmetric  of w4a16: no zero points
    """

    rank: int = 16
    group_size: int = 64
    rounds: int = 3
    damping: float | None = None
    objective: str = "output"
    scale_search: bool = True
    sweeps: int = 0
    svd: str = "auto"
    format: str = "w4a4"
    symmetric: bool = False

    def __post_init__(self):
        _require_choice(self, "format", tuple(FORMATS))
        _require_int(self, "rank", 0)
        _require_int(self, "group_size", 0)
        _require_int(self, "rounds", 1)
        _require_int(self, "sweeps", 0)
        if self.damping is not None:
            _require_range(self, "damping", 0.0, 10.0)
        if not isinstance(self.scale_search, bool):
            raise ConfigError(f"scale_search: {self.scale_search!r} — wanted true or false")
        _require_choice(self, "objective", OBJECTIVES)
        _require_choice(self, "svd", SVD_METHODS)
        self._check_format()

    def _check_format(self) -> None:
        if self.format == "w4a4":
            _require_int(self, "group_size", ACTIVATION_GROUP)
            if self.group_size % ACTIVATION_GROUP:
                raise ConfigError(
                    f"group_size: {self.group_size} is not a multiple of {ACTIVATION_GROUP}, "
                    "the activations' group size"
                )
        elif self.group_size not in _GROUPS[self.format]:
            groups = " or ".join("0 (the whole row)" if g == ROW else str(g) for g in _GROUPS[self.format])
            raise ConfigError(f"group_size: {self.group_size} — {self.format} knows {groups}")
        if not isinstance(self.symmetric, bool) or (self.symmetric and self.format != "w4a16"):
            raise ConfigError(f"symmetric: {self.symmetric!r} — a choice of w4a16 alone; the others always are")
        if self.objective == "nearest" and (self.format not in WEIGHT_ONLY or self.rank or self.sweeps):
            if self.format not in WEIGHT_ONLY:
                raise ConfigError(f"objective: nearest — for {', '.join(WEIGHT_ONLY)}, not {self.format}")
            other = "" if self.format == "nf4" else ", or --objective output with --calib"
            raise ConfigError(
                f"rank {self.rank}, sweeps {self.sweeps}: {self.format} rounds to nearest; wanted 0{other}"
            )
        if self.format == "nf4" and self.objective != "nearest":
            raise ConfigError(f"objective: {self.objective} — nf4 is rounded to nearest, as its readers expect")
        if self.format == "w4a16" and self.sweeps and not self.symmetric:
            raise ConfigError("sweeps: for symmetric codes; wanted --symmetric or --sweeps 0")


@dataclass(frozen=True)
class QuantConfig:
    """One run's weight side: the layer defaults, which linears, and overrides in the order given.

    ignore, only  patterns (see `matches`); `overrides` are (pattern, {knob: value}) pairs, later ones win
    """

    layer: LayerConfig = field(default_factory=LayerConfig)
    ignore: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    overrides: tuple[tuple[str, dict[str, Any]], ...] = ()
    linears_only: bool = False

    def for_layer(self, name: str) -> LayerConfig:
        config = self.layer
        for pattern, values in self.overrides:
            if matches(pattern, name):
                config = dataclasses.replace(config, **values)
        return config

    def selects(self, name: str) -> bool:
        if self.only and not any(matches(p, name) for p in self.only):
            return False
        return not any(matches(p, name) for p in self.ignore)

    def patterns(self) -> list[tuple[str, str]]:
        """(option, pattern) pairs, for the check that each pattern matches something."""
        named = [("--ignore", p) for p in self.ignore] + [("--only", p) for p in self.only]
        return named + [("--override", p) for p, _ in self.overrides]


@dataclass(frozen=True)
class TuneConfig:
    """How a finished checkpoint is tuned (svdq.tune). rate: of Adam, relative to each value's own size."""

    steps: int = 120
    rate: float = 3e-3
    tokens_per_step: int = 4096
    seed: int = 0

    def __post_init__(self):
        _require_int(self, "steps", 1)
        _require_range(self, "rate", 0.0, 1.0)
        _require_int(self, "tokens_per_step", 1)
        _require_int(self, "seed", 0)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names this module or one of its ancestors.

    A glob matches on dot boundaries anywhere in the path: 'layers.1' covers layers.1 and its children, never
    layers.10; '*' stays within one part. 're:…' is a regular expression searched in the full name.
    """
    if pattern.startswith("re:"):
        try:
            return re.search(pattern[3:], name) is not None
        except re.error as error:
            raise ConfigError(f"pattern {pattern!r}: not a regular expression: {error}") from error
    wanted, parts = pattern.split("."), name.split(".")
    return any(
        all(fnmatch.fnmatchcase(part, glob) for part, glob in zip(parts[i:], wanted, strict=False))
        for i in range(len(parts) - len(wanted) + 1)
    )


def parse_override(text: str, layer: LayerConfig | None = None) -> tuple[str, dict[str, Any]]:
    """'PATTERN:rank=32,group_size=128' → (pattern, {knob: value}); layer: what the values are to go with."""
    pattern, colon, assignments = text.rpartition(":")
    if not colon or not pattern or "=" not in assignments:
        raise ConfigError(f"--override {text!r}: wanted 'PATTERN:knob=value,…', e.g. 'down_proj:rank=32'")
    values: dict[str, Any] = {}
    for assignment in assignments.split(","):
        knob, equals, value = assignment.partition("=")
        knob = knob.strip()
        if knob not in _OVERRIDABLE or not equals:
            raise ConfigError(f"--override {text!r}: unknown knob {knob!r}; wanted one of {', '.join(_OVERRIDABLE)}")
        try:
            values[knob] = float(value) if knob == "damping" else int(value)
        except ValueError:
            raise ConfigError(f"--override {text!r}: {knob}={value!r} is not a number") from None
    dataclasses.replace(layer or LayerConfig(), **values)  # range checks
    return pattern, values


def read_overrides(
    path: str | Path, layer: LayerConfig | None = None
) -> tuple[tuple[tuple[str, dict[str, Any]], ...], tuple[str, ...]]:
    """(overrides, ignore) of a file of `svdq plan`; its other entries are for the reader. layer as in `parse_override`.

    Raises ConfigError for anything else.
    """
    where = f"--overrides {path}"
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; wanted a file of svdq plan") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: not JSON; wanted a file of svdq plan") from None
    try:
        overrides = tuple((pattern, dict(values)) for pattern, values in found["overrides"])
        ignore = tuple(found["ignore"])
        patterns = [*ignore, *(pattern for pattern, _ in overrides)]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            f'{where}: wanted {{"overrides": [[PATTERN, {{KNOB: value}}], …], "ignore": [PATTERN, …]}}'
        ) from None
    if isinstance(found["ignore"], str):
        raise ConfigError(f"{where}: ignore is {found['ignore']!r}; wanted a list of patterns")
    if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise ConfigError(f"{where}: pattern {wrong[0]!r} is not a text")
    for pattern, values in overrides:
        if unknown := [knob for knob in values if knob not in _OVERRIDABLE]:
            raise ConfigError(
                f"{where}: {pattern}: unknown knob {unknown[0]!r}; wanted one of {', '.join(_OVERRIDABLE)}"
            )
        try:
            dataclasses.replace(layer or LayerConfig(), **values)  # range checks
        except ConfigError as error:
            raise ConfigError(f"{where}: {pattern}: {error}") from None
    return overrides, ignore


PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (calibration side, weight side), as differences from the defaults
    "quality": ({}, {}),
    "best": ({}, {}),  # quality, then tuned: see TUNED_PRESETS
    "nunchaku": ({"rotation": "none", "act_clip": 1.0}, {}),
    # SVDQuant as published, to compare with
    "svdquant": (
        {"smoothing": SEARCH, "rotation": "none", "act_clip": 1.0},
        {"objective": "svd", "scale_search": False},
    ),
    "plain": (
        {"smoothing": 0.0, "rotation": "none", "act_clip": 1.0},
        {"objective": "weight", "scale_search": False},
    ),
}


TUNED_PRESETS = ("best",)  # after quantize, svdq.tune


def preset(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if name not in PRESETS:
        raise ConfigError(f"--preset {name!r}: wanted one of {', '.join(PRESETS)}")
    return PRESETS[name]


def to_dict(config) -> dict[str, Any]:
    """A configuration as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def first_difference(wanted: dict, found: dict, prefix: str = "") -> str | None:
    """'field: wanted 16, found 32' for the first field in which two nested dictionaries differ, or None."""
    for key in sorted(wanted.keys() | found.keys()):
        a, b = wanted.get(key), found.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            if inner := first_difference(a, b, f"{prefix}{key}."):
                return inner
        elif a != b:
            return f"{prefix}{key}: wanted {reprlib.repr(a)}, found {reprlib.repr(b)}"
    return None


def _require_int(config, name: str, low: int) -> None:
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name}: {value!r} — wanted an integer of at least {low}")


def _require_range(config, name: str, low: float, high: float, or_else: str = "") -> None:
    value = getattr(config, name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name}: {value!r} — wanted a number from {low} to {high}{or_else}")


def _require_choice(config, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} — wanted one of {', '.join(choices)}")
