"""The table of formats and GPUs against the kernels that are compiled."""

import pytest

from svdq.kernels import support
from svdq.kernels.compile import ARCHITECTURES, all_kernels

NAMES = {name: {kernel.name for kernel in all_kernels(name)} for name in ARCHITECTURES}
ROWS = {name: row for names, row in support.TABLE.items() for name in names.split(", ")}


def test_every_listed_architecture_has_one_row_and_every_row_every_format():
    assert list(ROWS) == list(ARCHITECTURES)
    assert {tuple(row) for row in support.TABLE.values()} == {support.FORMATS}


def test_only_hopper_has_run_anything():
    assert {name for name, row in ROWS.items() for word in row.values() if word in ("native", "emulated")} == {"sm_90a"}


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [("W4A4", "w4a4_gemm_lora"), ("W4A8", "w4_wgmma_lora"), ("NF4", "nf4_few_rows"), ("NVFP4", "fp4_small_m")],
)
def test_a_format_is_there_where_its_kernel_is_compiled(kind, kernel):
    assert {name: row[kind] != "no" for name, row in ROWS.items()} == {n: kernel in names for n, names in NAMES.items()}


def test_nvfp4_is_native_where_the_kernel_for_its_tensor_cores_is_compiled():
    native = {name for name, row in ROWS.items() if row["NVFP4"].startswith("native")}
    assert native == {name for name, names in NAMES.items() if "fp4_gemm_lora" in names}
