"""The commands of docs/diffusion.md and docs/nunchaku.md run as they stand, one page after the other."""

import re
import shlex
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def commands(page):
    blocks = re.findall(r"```console(?: \w+)?\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [
        line.removeprefix("$ svdq ") for block in blocks for line in block.splitlines() if line.startswith("$ svdq ")
    ]


def test_the_commands_of_the_pages_run(flux_pipeline, svdq, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("FLUX").symlink_to(flux_pipeline)
    Path("prompts.txt").write_text("w3 w4 w5\nw8\n")
    Path("other-prompts.txt").write_text("w6 w7\n")
    told = []
    for command in [*commands("diffusion.md"), *commands("nunchaku.md")]:
        result = svdq(*shlex.split(command), *(["--rounds", "1"] if command.startswith("quantize") else []))
        assert result.code == 0, (command, result)
        told.append(result.out)
    assert len(told) == 7
    assert "the transformer's output on held-out" in told[4]
    assert Path("flux-nunchaku.safetensors").stat().st_size > 0
