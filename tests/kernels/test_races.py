"""No two threads of a block touch the same shared memory without a barrier between them (see races.py)."""

import subprocess
import sys
from pathlib import Path

import emulate
import pytest

HERE = Path(__file__).parent


def sanitizer():
    if emulate.COMPILER is None or "g++" not in emulate.COMPILER:
        return None
    command = [emulate.COMPILER, "-print-file-name=libtsan.so"]
    path = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    return path if path.is_absolute() and path.is_file() else None


RUNTIME = sanitizer()
pytestmark = pytest.mark.skipif(RUNTIME is None, reason="no g++ with ThreadSanitizer")


def races(folder, *left_out):
    environment = {
        "PATH": "/usr/bin:/bin",
        "LD_PRELOAD": str(RUNTIME),
        "TSAN_OPTIONS": "exitcode=0 ignore_noninstrumented_modules=1",  # of Python's own nothing is asked
    }
    command = [sys.executable, HERE / "races.py", folder, *left_out]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("the sanitizer cannot map its memory on this kernel")
    assert "ran to the end" in run.stdout, run.stderr[-4000:]
    return run.stderr.count("WARNING: ThreadSanitizer: data race")


def test_no_kernel_has_a_race(tmp_path):
    assert races(tmp_path) == 0


@pytest.mark.parametrize(("file", "text"), [
    ("w4a4_small_m.cu", "__syncthreads();  // all partial sums are written"),
    ("w4a4_medium_m.cu", "__syncthreads();  // the ring is read"),
    ("w4a4_medium_m.cu", "__syncthreads();  // all sums are written"),
    ("w4a4_gemm_lora.cu", "__syncthreads();  // this group's stage has arrived"),
    ("nf4_few_rows.cu", "__syncthreads();          // table, map and zeros are there"),
    ("nf4_few_rows.cu", "__syncthreads();  // table and x are read"),
    ("nf4_few_rows.cu", "__syncthreads();  // all sums are there"),
    ("quantize_lora_down.cu", "if (first) __syncthreads();"),
    ("quantize_lora_down.cu", "] = row_most[h];\n    __syncthreads();"),
])  # fmt: skip
def test_a_missing_barrier_would_be_found(tmp_path, file, text):
    assert races(tmp_path, file, text, "__syncthreads();") > 0


@pytest.mark.parametrize(
    "wait", ["barrier_wait(full + at, phase);", "barrier_wait(empty + before, at ? phase : phase ^ 1);"]
)
def test_a_missing_wait_for_a_stage_would_be_found(tmp_path, wait):
    assert races(tmp_path, "w4a4_medium_m.cu", wait, wait) > 0


def test_a_missing_wait_for_the_other_block_would_be_found(tmp_path):
    text = "cluster_wait();  // each has the other's sums"
    assert races(tmp_path, "w4a4_medium_m.cu", text, "cluster_wait();") > 0


def test_a_missing_wait_for_the_cluster_would_be_found(tmp_path):
    """Of one block: its threads read what others of it wrote."""
    text = "cluster_arrive();\n    cluster_wait();\n    Scale"
    assert races(tmp_path, "quantize_lora_down.cu", text, "cluster_wait();") > 0
