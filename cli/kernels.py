"""svdq kernels: which CUDA kernels are compiled, and compiling them ahead of time."""

from __future__ import annotations

import time

import click

from svdq.cli import options


@click.command("kernels")
@click.option(
    "--build", metavar="ARCH,…", help="Compile all for these architectures, e.g. sm_89,sm_90a; without a GPU."
)
@options.output_options
@click.option("-v", "--verbose", is_flag=True, help="Print a row for every compiled kernel.")
def command(build, json_file, quiet, verbose):
    """Which CUDA kernels are compiled and cached. Exit 1 if one that --build compiles spills registers."""
    from svdq import report
    from svdq.kernels import compile as kernels
    from svdq.kernels import support
    from svdq.kernels.launch import device_architectures

    console = options.Console(quiet, json_file)
    wanted = [] if build is None else list(dict.fromkeys(name.strip() for name in build.split(",")))
    kernels.check_architectures(wanted)
    builds, failures = {}, []
    for arch in wanted:

        def progress(done: int, total: int, arch: str = arch) -> None:
            console.progress(arch, done, total, "kernel")

        start = time.perf_counter()
        built = kernels.build(arch, progress)
        seconds, found = time.perf_counter() - start, sum(kernel.from_cache for kernel in built.values())
        builds[arch] = {"compiled": len(built) - found, "from_cache": found, "seconds": seconds}
        console.say(f"{arch}: {len(built) - found} compiled in {seconds:.1f} s, {found} were in the cache")
        spills = {kernel: one.resources.spill_bytes for kernel, one in built.items()}
        failures += [f"{kernel} for {arch}: spills {count} bytes" for kernel, count in spills.items() if count]
    facts = {"builds": builds, "failures": failures} | kernels.inventory(wanted, device_architectures())
    facts["support"] = support.TABLE
    if verbose or build is None:
        console.say(report.kernels_text(facts, every_kernel=verbose))
    if failures:
        console.say("\n".join(report.listed(failures, "FAILED", most=30)))
    options.write_report(json_file, facts)
    return 1 if failures else 0
