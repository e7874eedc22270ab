"""No two threads of a block touch the same shared memory without a barrier between them (see races.py)."""

import json
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


LEFT_OUT = [
    ("w4a4_small_m.cu", "__syncthreads();  // all partial sums are written", "__syncthreads();"),
    ("w4a4_medium_m.cu", "__syncthreads();  // the ring is read", "__syncthreads();"),
    ("w4a4_medium_m.cu", "__syncthreads();  // all sums are written", "__syncthreads();"),
    ("w4a4_medium_m.cu", "cluster_wait();  // each has the other's sums", "cluster_wait();"),
    ("w4a4_gemm_lora.cu", "__syncthreads();  // this group's stage has arrived", "__syncthreads();"),
    ("nf4_few_rows.cu", "__syncthreads();          // table, map and zeros are there", "__syncthreads();"),
    ("nf4_few_rows.cu", "__syncthreads();  // table and x are read", "__syncthreads();"),
    ("nf4_few_rows.cu", "__syncthreads();  // all sums are there", "__syncthreads();"),
    ("quantize_lora_down.cu", "if (first) __syncthreads();", "__syncthreads();"),
    ("quantize_lora_down.cu", "] = row_most[h];\n    __syncthreads();", "__syncthreads();"),
    # of one block: its threads read what others of it wrote
    ("quantize_lora_down.cu", "cluster_arrive();\n    cluster_wait();\n    Scale", "cluster_wait();"),
    *[
        ("w4a4_medium_m.cu", wait, wait)
        for wait in ("barrier_wait(full + at, phase);", "barrier_wait(empty + before, at ? phase : phase ^ 1);")
    ],
]


FOUND = 66  # exit status


@pytest.fixture(scope="module")
def statuses(tmp_path_factory):
    """Without each of LEFT_OUT, and at last of the kernels as they are."""
    folder = tmp_path_factory.mktemp("races")
    environment = {
        "PATH": "/usr/bin:/bin",
        "LD_PRELOAD": str(RUNTIME),
        # of Python's own nothing is asked
        "TSAN_OPTIONS": f"exitcode={FOUND} halt_on_error=1 ignore_noninstrumented_modules=1 die_after_fork=0",
    }
    command = [sys.executable, HERE / "races.py", folder, json.dumps(LEFT_OUT)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("the sanitizer cannot map its memory on this kernel")
    assert run.returncode == 0, run.stderr[-4000:]
    print(run.stderr)
    return json.loads(run.stdout)


def test_no_kernel_has_a_race(statuses):
    assert statuses[-1] == 0


@pytest.mark.parametrize("index", range(len(LEFT_OUT)), ids=["-".join(item[:2]) for item in LEFT_OUT])
def test_a_missing_barrier_or_wait_would_be_found(statuses, index):
    assert statuses[index] == FOUND
