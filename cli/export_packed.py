"""svdq export-packed: a canonical file into the order that the tensor-core kernels read."""

from __future__ import annotations

import click

from svdq.cli import options


@click.command("export-packed")
@click.argument("file", metavar="OUT")
@click.argument("out", metavar="PACKED.safetensors")
@click.option("--layout", type=click.Choice(["mma", "rows"]), show_default="mma; rows where kernels read that",
              help="Fragment order (W4A4, NVFP4), or rows (all others, NVFP4).")  # fmt: skip
@click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), default="float16", show_default=True,
              help="Type of every 16-bit tensor in the file.")  # fmt: skip
@click.option(
    "--fuse", multiple=True, metavar="NAME=PART,PART,…", help="Fuse siblings, e.g. qkv_proj=q_proj,k_proj,v_proj."
)
@click.option(
    "--for",
    "runtime",
    type=click.Choice(["svdq", "nunchaku"]),
    default="svdq",
    show_default=True,
    help="nunchaku: a Flux or Qwen-Image transformer as its loader wants it; refuse what that runtime would misread.",
)
@click.option("--linears-only", is_flag=True, help="Leave the unquantized tensors out of the file.")
@options.output_options
def command(file, out, layout, dtype, fuse, runtime, linears_only, json_file, quiet):
    """Pack OUT.safetensors into PACKED.safetensors.

    A re-ordering with an exact inverse; only --dtype bfloat16 rounds (the float16 scales and factors).
    """
    from svdq import export, nunchaku, report
    from svdq.errors import ConfigError
    from svdq.preflight import check_output
    from svdq.quantized import open_quantized

    console = options.Console(quiet, json_file)
    source = open_quantized(file)
    if runtime == "nunchaku" and nunchaku.is_known(source):
        if fuse or linears_only:
            raise ConfigError("--fuse, --linears-only: --for nunchaku has its own order of a diffusion transformer")
        export.check_exportable(source, runtime)
        check_output(out, source.file.size, [source.file.path])
        numbers = nunchaku.export(source, out, dtype=dtype, progress=console.progress)
        console.say(
            f"{out}: {numbers['layers']} linears packed for nunchaku's loader, {numbers['fused']} fused groups, "
            f"rank {numbers['rank']}, {numbers['adaptive']} adaptive norms in 4 bits, {dtype}, "
            f"{report.size(numbers['bytes'])}"
        )
        options.write_report(json_file, numbers)
        return 0
    fuses = [export.parse_fuse(text) for text in fuse]
    export.check_exportable(source, runtime, layout, fuses)
    check_output(out, source.file.size, [source.file.path])
    numbers = export.export_packed(
        source,
        out,
        dtype=dtype,
        order=layout,
        fuses=fuses,
        runtime=runtime,
        linears_only=linears_only,
        progress=console.progress,
    )
    console.say(
        f"{out}: {numbers['layers']} linears packed for {numbers['layout']}, {numbers['fused']} fused groups, "
        f"{numbers['dtype']}, {report.size(numbers['bytes'])}"
    )
    options.write_report(json_file, numbers)
    return 0
