"""Which format runs how on which GPU: one table, which `svdq kernels` prints and README shows.

    native    the tensor cores multiply the format's own numbers, or 16-bit ones where the format's activations are that
    emulated  they have no such numbers: wider ones are multiplied, to the same products
    no        there is no kernel

†: compiled and its instructions checked, but never run on such a GPU.
"""

from __future__ import annotations

NEVER = " †"

# by what svdq.kernels.compile.ARCHITECTURES names
TABLE: dict[str, dict[str, str]] = {
    "sm_80, sm_86, sm_89": {
        "W4A4": "native" + NEVER,
        "W4A8": "no",
        "W4A16": "native" + NEVER,
        "W8A16": "native" + NEVER,
        "NF4": "native" + NEVER,
        "NVFP4": "emulated" + NEVER,
    },
    "sm_90a": {
        "W4A4": "emulated",
        "W4A8": "native",
        "W4A16": "native",
        "W8A16": "native",
        "NF4": "native",
        "NVFP4": "emulated",
    },
    "sm_100a": {
        "W4A4": "emulated" + NEVER,
        "W4A8": "no",
        "W4A16": "native" + NEVER,
        "W8A16": "native" + NEVER,
        "NF4": "native" + NEVER,
        "NVFP4": "emulated" + NEVER,
    },
    "sm_120a": {
        "W4A4": "emulated" + NEVER,
        "W4A8": "no",
        "W4A16": "native" + NEVER,
        "W8A16": "native" + NEVER,
        "NF4": "native" + NEVER,
        "NVFP4": "native" + NEVER,
    },
}
FORMATS = tuple(TABLE["sm_90a"])


def markdown_table() -> str:
    """The table as README shows it (a test compares the two)."""
    lines = [f"| | {' | '.join(FORMATS)} |", "|---" * (len(FORMATS) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(row[kind] for kind in FORMATS)} |" for name, row in TABLE.items()]
    return "\n".join(lines)
