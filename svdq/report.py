"""Numbers as text: summaries and tables for a terminal. JSON is the reports' own `to_dict`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from svdq.kernels import support

if TYPE_CHECKING:
    from svdq.environment import Check
    from svdq.pipeline import QuantizationSummary
    from svdq.preflight import HiddenBytes, Plan
    from svdq.quantized import QuantizedFile
    from svdq.roofline import Gpu, Row
    from svdq.store_checks import WhatIf
    from svdq.verify import Report


def printable(text: str) -> str:
    """Text from files as it is safe on a terminal: control characters escaped, line ends kept."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as their content; everything but the first column is right-aligned."""
    cells = [[str(c).replace("\n", "\\n") for c in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return printable("\n".join(lines))


def size(count: float) -> str:
    """1234567 → '1.2 MB' (decimal units)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def listed(items: Sequence[str], title: str, most: int = 10) -> list[str]:
    """'title (n):' and at most `most` of the items, indented; nothing for an empty list."""
    if not items:
        return []
    lines = [f"{title} ({len(items)}):", *(f"  {printable(item)}" for item in items[:most])]
    if len(items) > most:
        lines.append(f"  … and {len(items) - most} more")
    return lines


def plan_text(plan: Plan, memory: dict[str, int], device: str, hidden: HiddenBytes | None) -> str:
    """memory: command → bytes that it needs at most on this kind of device; hidden: None with a store."""
    needed = ", ".join(f"{size(needed)} to {command}" for command, needed in memory.items())
    lines = [
        f"{len(plan.linears)} linears to quantize, {len(plan.left_16bit)} left in 16 bits",
        f"output {size(plan.output_bytes)}, work directory {size(plan.work_bytes)}",
        f"memory on the {device.upper() if device == 'cpu' else 'GPU'}, about: {needed}",
    ]
    if hidden is not None:
        places = [f"{size(hidden.device)} on the GPU"] if device != "cpu" else []
        places += [f"{size(hidden.host)} in host memory", f"{size(hidden.disk)} on disk"]
        lines.append(f"activations between blocks, about: {', '.join(places)}")
    return "\n".join([*lines, *listed(plan.left_16bit, "left in 16 bits")])


def _seen(summary: QuantizationSummary) -> str:
    """What the errors of the layers are of."""
    rounded = not any(layer["rounds"] for layer in summary.layers.values())
    return "of the weights, rounded to nearest" if rounded else "calibration data"


def quantization_text(summary: QuantizationSummary) -> str:
    worst = sorted(summary.layers.items(), key=lambda item: -item[1]["error"])[:5]
    lines = [
        f"{summary.path}: {len(summary.layers)} linears quantized, {len(summary.left_16bit)} left in 16 bits",
        f"{size(summary.source_bytes)} -> {size(summary.output_bytes)}, "
        f"mean layer error {percent(summary.mean_error)} ({_seen(summary)}), {summary.seconds:.1f} s",
    ]
    if summary.resumed_blocks:
        lines.append(f"resumed: {summary.resumed_blocks} blocks were already done")
    lines += ["worst layers:", *(f"  {percent(layer['error']):>8}  {name}" for name, layer in worst)]
    return "\n".join([*lines, *listed(summary.repairs, "repairs"), *listed(summary.warnings, "warnings")])


def verification_text(report: Report, most: int = 15) -> str:
    """Layers worst first, totals, outputs, failures."""
    rows = sorted(report.layers, key=lambda row: -row.quantization_error)
    header = ["layer", "N", "K", "rank", "quant. error", "per token", "on store", "kernel error", "repack"]
    body = [
        [
            row.name,
            row.n,
            row.k,
            row.rank,
            percent(row.quantization_error),
            percent(row.token_error),
            percent(row.store_error),
            f"{row.kernel_error:.1e}",
            "same" if row.roundtrip else "DIFFERS",
        ]
        for row in rows[:most]
    ]
    lines = [table(header, body)]
    if len(rows) > most:
        lines.append(f"… and {len(rows) - most} better ones")
    if rows:
        mean = sum(row.quantization_error for row in rows) / len(rows)
        worst_kernel = max(row.kernel_error for row in rows)
        path = "CUDA kernels" if report.kernels == "cuda" else "reference"
        types = " and ".join(sorted({row.kernel_dtype for row in rows}, reverse=True))
        lines.append(
            f"{len(rows)} linears: mean quantization error {percent(mean)}, largest kernel error {worst_kernel:.1e} "
            f"({path}, {types})"
        )
    lines += _hurting_most(report)
    name = "W4A8" if report.activations == "fp8" else report.format.upper()
    for output in report.outputs:
        if output.original is not None and output.quantized is not None:
            lines.append(
                f"perplexity on {output.source} ({output.tokens:,} tokens): original {output.original:.2f}, "
                f"{name} {output.quantized:.2f} ({output.quantized / output.original:.3f} x)"
            )
        elif output.output_error is not None:
            lines.append(
                f"the transformer's output on {output.source} ({output.tokens:,} tokens): relative error "
                f"{percent(output.output_error)}"
            )
        else:
            lines.append(
                f"final states on {output.source} ({output.tokens:,} tokens): relative error "
                f"{percent(output.state_error)}, mean cosine {output.state_cosine:.4f}"
            )
    lines += listed(report.repairs, "repairs") + listed(report.notes, "notes")
    lines += listed(report.failures, "FAILED", most=30) or ["all checks passed"]
    return "\n".join(lines)


def _hurting_most(report: Report, most: int = 5) -> list[str]:
    """The linears with the largest error per token on the data; without data of their output on the store's sums, and
    without either of the weights. Beside each, its error from round to round while it was quantized."""
    measures = dict(token_error="per token on the data", store_error="on the store", quantization_error="of weights")
    measure = next((key for key in measures if any(getattr(row, key) is not None for row in report.layers)), None)
    if measure is None:
        return []
    rows = [row for row in report.layers if getattr(row, measure) is not None]
    rows.sort(key=lambda row: _falling(getattr(row, measure)))
    shown = [(row, (row.quantizer or {}).get("rounds", [])) for row in rows[:most]]
    brackets = " (in brackets the quantizer's own, round by round)" if any(rounds for _, rounds in shown) else ""
    lines = [f"the layers that hurt most, by error {measures[measure]}{brackets}:"]
    for row, rounds in shown:
        own = ", ".join(f"{100 * entry['error']:.2f}" for entry in rounds)
        own = f"  ({own} %)" if rounds else ""
        lines.append(printable(f"  {percent(getattr(row, measure)):>8}  {row.name}{own}"))
    return lines


def _falling(value: float) -> float:
    """Sort key: largest first, NaN before all."""
    return -math.inf if math.isnan(value) else -value


def what_if_text(answer: WhatIf, most: int = 10) -> str:
    """Layers by gain, largest first, and what the change gives and costs in all."""
    change = ", ".join(f"{knob} {value}" for knob, value in answer.change.items())
    rows = sorted(answer.layers, key=lambda row: _falling(row.gain))
    body = [
        [row.name, percent(row.error_now), percent(row.error_then), f"{100 * row.gain:.2f}", _more(row.bytes_more)]
        for row in rows[:most]
    ]
    lines = [
        f"what if {change}: errors on the calibration tokens, from the store's sums",
        table(["layer", "now", "then", "gain, points", "bytes"], body),
    ]
    if len(rows) > most:
        lines.append(f"… and {len(rows) - most} that gain less")
    lines.append(
        f"{len(rows)} linears with {change}: mean error {percent(answer.mean_now)} -> {percent(answer.mean_then)}, "
        f"{_more(answer.bytes_more)} in the file"
    )
    if "damping" in answer.change:
        lines.append("less damping always looks better on the calibration tokens: compare on held-out text as well")
    repairs = [f"{row.name}: {repair}" for row in rows for repair in row.quantizer["repairs"]]
    left_out = [f"{name}: {why}" for name, why in answer.left_out.items()]
    return "\n".join([*lines, *listed(repairs, f"repairs with {change}"), *listed(left_out, "left out")])


def _more(count: int) -> str:
    return f"{'+' if count > 0 else ''}{size(count)}"


def budget_text(facts: dict[str, Any], most: int = 10) -> str:
    """The numbers of svdq.budget.facts: the plan beside equal ranks, which ranks it chose, where it differs most."""
    unit, chosen = facts["unit"], facts["chosen"]
    rows = [(f"rank {rank}", one) for rank, one in facts["uniform"].items()] + [("this plan", facts["predicted"])]
    body = [
        [name, f"{one['bits_per_weight']:.3f}", size(one["linear_bytes"]), size(one["tensor_bytes"]),
         f"{one['cost']:.4f}", percent(one["mean_error"])]
        for name, one in rows
    ]  # fmt: skip
    lines = [table(["", "bits a weight", "linears", "all tensors", unit, "mean layer error"], body)]
    counts = {rank: sum(one == rank for one in chosen.values()) for rank in sorted(set(chosen.values()) - {None})}
    named = [f"{count} with rank {rank}" for rank, count in counts.items()]
    if left := [name for name, rank in chosen.items() if rank is None]:
        named.append(f"{len(left)} left in 16 bits")
    lines.append(f"{facts['linears']} linears: {', '.join(named)}")
    worst = []
    for name, rank in chosen.items():
        choice = next(one for one in facts["choices"][name] if one["rank"] == rank)
        worst.append([name, "16 bits" if rank is None else rank, f"{choice['cost']:.5f}", percent(choice["error"])])
    worst.sort(key=lambda row: -float(row[2]))
    lines.append(table(["linears by what they still cost", "rank", unit, "layer error"], worst[:most]))
    why_not = [f"{name}: {why}" for name, reasons in facts["why_not"].items() for why in reasons]
    return "\n".join([*lines, *listed(left, "left in 16 bits"), *listed(why_not, "no choice")])


def inspection(quantized: QuantizedFile) -> dict[str, Any]:
    """What a header says, as plain JSON values."""
    tensors = quantized.file.tensors
    owned = set(tensors) - set(quantized.other_tensors)
    weights = sum(n * k for n, k, _, _ in quantized.layers.values())
    stored = sum(tensors[name].nbytes for name in owned)
    return {
        "file": str(quantized.file.path),
        "kind": quantized.kind,
        "bytes": quantized.file.size,
        "linears": len(quantized.layers),
        "linear_bytes": stored,
        "bits_per_weight": 8 * stored / weights if weights else None,
        "other_tensors": len(quantized.other_tensors),
        "other_bytes": sum(tensors[name].nbytes for name in quantized.other_tensors),
        "quantization_config": quantized.config,
        "ties": quantized.ties,
        "repairs": quantized.report.get("repairs", []),
        "layers": {name: dict(zip("nkrg", sizes, strict=True)) for name, sizes in quantized.layers.items()},
        "tensors": {
            name: {"dtype": str(info.dtype).removeprefix("torch."), "shape": list(info.shape), "bytes": info.nbytes}
            for name, info in sorted(tensors.items())
        },
    }


def inspection_text(facts: dict[str, Any], all_tensors: bool = False) -> str:
    config = facts["quantization_config"]
    shapes: dict[tuple, int] = {}
    for entry in facts["layers"].values():
        key = tuple(entry.values())
        shapes[key] = shapes.get(key, 0) + 1
    lines = [
        f"{facts['file']}: {facts['kind']} {config.get('format', 'w4a4').upper()} checkpoint, {size(facts['bytes'])}",
        f"{facts['linears']} quantized linears, {size(facts['linear_bytes'])}, "
        f"{facts['bits_per_weight'] or 0:.2f} bits per weight; "
        f"{facts['other_tensors']} other tensors, {size(facts['other_bytes'])}",
        f"rank {config.get('rank')}, rotation {config.get('rotation')}, smoothing {config.get('smooth')}, "
        f"packing {config.get('packing', {}).get('layout')}, by {config.get('producer', {}).get('name')} "
        f"{config.get('producer', {}).get('version')}",
    ]
    if all_tensors:
        body = [[name, *(str(value) for value in tensor.values())] for name, tensor in facts["tensors"].items()]
        lines.append(table(["tensor", "type", "shape", "bytes"], body))
    else:
        body = [[*key, count] for key, count in sorted(shapes.items())]
        lines.append(table(["N", "K", "rank", "group", "linears"], body))
    lines += [f"tied: {alias} = {target}" for alias, target in facts["ties"].items()]
    lines += listed(config.get("ignore", []), "left in 16 bits")
    return "\n".join(lines + (listed(facts["repairs"], "repairs") or ["no repairs"]))


def job_text(facts: dict[str, Any], every_layer: bool = False) -> str:
    """The state of a job, from svdq.jobs.state."""
    done, total, each = facts["done"], facts["blocks"], facts["seconds_a_block"]
    lines = [f"{facts['directory']}: svdq {facts['kind']}, {done} of {total} blocks done"]
    if facts["finished"]:
        lines[0] += ", finished"
    elif facts["seems_dead"]:
        silent = f"{facts['silent_seconds']:.0f} s"
        lines.append(f"nothing new for {silent}: it seems to have ended; the same command goes on from there")
    elif each is not None:
        last = f"last block {facts['silent_seconds']:.0f} s ago"
        lines.append(f"{each:.1f} s a block, {facts['seconds_left']:.0f} s left; {last}")
    layers = facts["layers"]
    if layers:
        mean = sum(layer["error"] for layer in layers.values()) / len(layers)
        lines.append(f"{len(layers)} linears, mean error {percent(mean)}")
    if every_layer and layers:
        rows = [
            [name, percent(layer["rounds"][0]["error"] if layer["rounds"] else layer["error"]),
             percent(layer["error"]), f"{layer['seconds']:.2f}",
             f"{layer['damping']:.3g}", len(layer["repairs"])]
            for name, layer in layers.items()
        ]  # fmt: skip
        lines.append(table(["layer", "first round", "kept", "s", "damping", "repairs"], rows))
    repairs = [f"{name}: {repair}" for name, layer in layers.items() for repair in layer["repairs"]]
    return "\n".join(lines + listed(repairs, "repairs") + listed(facts["never_ran"], "never ran"))


def doctor_text(checks: Sequence[Check]) -> str:
    """A row for each of svdq.environment.checks, and below a row what to do."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(printable(f"{check.status:<6}  {check.name:<{width}}  {check.found}"))
        if check.do:
            lines.append(printable(f"{'':<6}  {'':<{width}}  -> {check.do}"))
    failed = sum(check.status == "FAILED" for check in checks)
    return "\n".join([*lines, f"{failed} of {len(checks)} checks failed" if failed else "nothing failed"])


def kernels_text(facts: dict[str, Any], every_kernel: bool = False) -> str:
    """What the cache holds: kernels x architectures; or, with every_kernel, a row for each that is compiled."""
    architectures = facts["architectures"]
    compiled = [
        (name, arch, found) for arch, kernels in architectures.items() for name, found in kernels.items() if found
    ]
    lines = []
    if every_kernel:
        rows = [[name, arch, *found.values()] for name, arch, found in compiled]
        lines.append(table(["kernel", "architecture", "registers", "shared bytes", "spill bytes", "cubin bytes"], rows))
    else:
        header = [arch + "*" * (arch in facts["devices"]) for arch in architectures]
        rows = [
            [re.sub(r"\w+=", "", name), *(_kernel_cell(name, kernels) for kernels in architectures.values())]
            for name in dict.fromkeys(name for kernels in architectures.values() for name in kernels)
        ]
        lines.append(table(["kernel", *header], rows))
        lines.append(
            "registers/shared bytes, and /spill bytes where there are any; - is not compiled, a blank not for that one"
        )
        if facts["devices"]:
            lines.append(f"* of a GPU here: {', '.join(facts['devices'])}")
        rows = [[name, *(row[kind] for kind in support.FORMATS)] for name, row in support.TABLE.items()]
        lines.append(table(["architectures", *support.FORMATS], rows))
        lines.append(
            "emulated: by wider numbers, to the same products; † compiled and checked, but never run on such a GPU"
        )
    stored = size(sum(found["cubin_bytes"] for _, _, found in compiled))
    total = sum(map(len, architectures.values()))
    lines.append(f"{facts['cache']}: {len(compiled)} of {total} compiled by NVRTC {facts['nvrtc']}, {stored}")
    return "\n".join(lines)


def _kernel_cell(name: str, kernels: dict[str, dict[str, int] | None]) -> str:
    if name not in kernels:
        return ""
    found = kernels[name]
    if found is None:
        return "-"
    spill = f"/{found['spill_bytes']}" if found["spill_bytes"] else ""
    return f"{found['registers']}/{found['shared_bytes']}{spill}"


def roofline_facts(rows: Sequence[Row], gpu: Gpu, tokens: int) -> dict[str, Any]:
    """The numbers of svdq.roofline.rows, in plain values: seconds, bytes, operations."""
    formats = list(rows[0].floors)
    operations = [
        {
            "name": row.name,
            "count": row.count,
            "shape": row.shape,
            "operations": row.work.total,
            "bytes": row.work.bytes,
            "intensity": row.work.intensity,
            "floors": {kind: {"seconds": floor, "bound": bound} for kind, (floor, bound) in row.floors.items()},
            "reached": row.reached,
        }
        for row in rows
    ]
    return {
        "gpu": {"name": gpu.name, "bandwidth": gpu.bandwidth, "rates": gpu.rates, "source": gpu.source},
        "tokens": tokens,
        "break_even": {kind: gpu.break_even(kind) for kind in formats},
        "runs_in": {kind: gpu.rate(kind)[0] for kind in formats},
        "operations": operations,
        "seconds": {kind: sum(row.count * row.floors[kind][0] for row in rows) for kind in formats},
    }


def roofline_text(facts: dict[str, Any]) -> str:
    gpu, formats = facts["gpu"], list(facts["seconds"])
    lines = [f"{gpu['name']}: {gpu['bandwidth'] / 1e9:,.0f} GB/s ({gpu['source']})"]
    for kind in formats:
        operands, even = facts["runs_in"][kind], facts["break_even"][kind]
        lines.append(
            f"{kind}: {operands}, {gpu['rates'][operands] / 1e12:,.1f} T/s, break-even at {even:,.0f} FLOP/byte"
        )
    reached = any(row["reached"] is not None for row in facts["operations"])
    header = ["operation", "times", "shape", "GFLOP", "MB", "FLOP/byte", *(f"{kind} µs" for kind in formats)]
    body = []
    for row in facts["operations"]:
        floors = [f"{row['floors'][kind]['seconds'] * 1e6:.1f} {row['floors'][kind]['bound'][0]}" for kind in formats]
        size = [f"{row['operations'] / 1e9:.3f}", f"{row['bytes'] / 1e6:.3f}", f"{row['intensity']:.1f}"]
        body.append([row["name"], row["count"], row["shape"], *size, *floors])
        if reached:
            body[-1].append("-" if row["reached"] is None else percent(row["reached"]))
    lines.append(table([*header, *(["reached in 16 bits"] if reached else [])], body))
    whole = facts["seconds"]
    sums = [f"{kind} {whole[kind] * 1e3:.3f} ms ({whole[formats[0]] / whole[kind]:.2f} x)" for kind in formats]
    lines.append(f"floor of the blocks for {facts['tokens']:,} tokens: {', '.join(sums)}")
    lines.append("GFLOP, MB and FLOP/byte are those of one call in FP16; m and c: memory or compute bounds it")
    return "\n".join(lines)


def profile_text(facts: dict[str, Any]) -> str:
    """The numbers of svdq.profiling.profile."""
    what = "kernels" if facts["device"] == "cuda" else "operators"
    lines = [f"{facts['us'] / 1e3:.3f} ms in {facts['calls']:.0f} {what} a step of {facts['tokens']:,} tokens"]
    if facts["gap_share"] is not None:
        lines.append(f"of the GPU's timeline, {percent(facts['gap_share'])} lie between kernels")
    shares = [[row["name"], f"{row['us'] / 1e3:.3f}", percent(row["share"]), f"{row['calls']:.0f}"]
              for row in facts["categories"]]  # fmt: skip
    lines.append(table(["category", "ms", "share", what], shares))
    top = [[printable(row["name"])[:60], row["category"], f"{row['us'] / 1e3:.3f}", percent(row["share"]),
            f"{row['calls']:.0f}"] for row in facts["top"]]  # fmt: skip
    lines.append(table(["most time", "category", "ms", "share", "calls"], top))
    return "\n".join(lines)


def bench_text(facts: dict[str, Any]) -> str:
    """The rows of svdq.bench.bench, each against the first one, 16 bits eager, and against 16 bits by CUDA graph."""
    rows = facts["rows"]
    first = rows[0]
    kind = first["variant"].split()[0]
    graph = next((row for row in rows if row["variant"] == f"{kind} CUDA graph"), None)
    bases = [base for base in (first, graph) if base]
    header = ["variant", "ms a step", "spread", *(f"speed-up over {base['variant']}" for base in bases)]
    header += ["linears MB", f"of {kind}'s", *(["peak MB"] if first["peak_bytes"] else [])]
    body = []
    for row in rows:
        cells = [row["variant"], f"{row['ms_per_step']:.3f}", f"{row['spread_ms']:.3f}"]
        cells += [f"{base['ms_per_step'] / row['ms_per_step']:.2f} x" for base in bases]
        cells += [f"{row['linear_bytes'] / 1e6:.1f}", percent(row["linear_bytes"] / first["linear_bytes"])]
        body.append(cells + ([f"{row['peak_bytes'] / 1e6:.0f}"] if row["peak_bytes"] else []))
    return table(header, body)
