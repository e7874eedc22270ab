"""benchmarks/soak.py, briefly: killed runs come to the bytes of one that was not killed, and a wrong byte is found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "benchmarks/soak.py"
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


def test_a_few_kills_change_no_byte(tmp_path):
    line = [sys.executable, SOAK, "--kills", "6", "--blocks", "4", "--seed", "1"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "calibrate: 3 kills" in done.stdout and "quantize: 3 kills" in done.stdout


def test_a_wrong_byte_is_an_error(tmp_path):
    program = (
        "import sys, soak, random, pathlib\n"
        "out = pathlib.Path(sys.argv[1]) / 'out'\n"
        "count = pathlib.Path(sys.argv[1]) / 'count'\n"
        "count.write_text('')\n"
        "def run():\n"
        "    count.write_text(count.read_text() + 'x')\n"
        "    out.write_bytes(b'good' if len(count.read_text()) == 1 else b'evil')\n"
        "soak.soak(run, out, 0, random.Random(0))\n"
    )
    line = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(
        line, cwd=SOAK.parent, env={**os.environ, "PYTHONSAFEPATH": "", "PYTHONPATH": ""},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "not the bytes of an uninterrupted run" in done.stderr
