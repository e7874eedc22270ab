"""svdq kernels: what is compiled, compiling ahead of time, and one line for what cannot be."""

import itertools
import json
import re
import sys

import pytest

from svdq import report
from svdq.kernels import compile as kernels
from svdq.kernels import launch, support
from svdq.kernels.compile import ARCHITECTURES, HOPPER, Compiled, Kernel, Resources, all_kernels

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="no CUDA compiler there")

SMALL = [kernels.inv_rms_kernel("f16"), kernels.inv_rms_kernel("bf16")]
KERNELS = {arch: all_kernels(arch) for arch in ARCHITECTURES}
EVERY = sum(map(len, KERNELS.values()))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test sees the user's cache, or the GPUs that happen to be here."""
    monkeypatch.setenv("SVDQ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "device_architectures", list)
    return tmp_path / "cache"


@pytest.fixture
def full_cache(own_cache, kernel_cache, monkeypatch):
    monkeypatch.setenv("SVDQ_CACHE_DIR", str(kernel_cache))
    return kernel_cache


@pytest.fixture
def two_kernels(monkeypatch):
    """As if the package had two small kernels."""
    monkeypatch.setattr(kernels, "all_kernels", lambda arch: SMALL)


def short(kernel):
    """inv_rms<f16>: as the table names it."""
    return f"{kernel.name}<{', '.join(str(value) for _, value in kernel.constants)}>"


def rows(text):
    """Kernel → the cells of its row. A cell ends where its column's header does, and may be blank."""
    lines = text.splitlines()
    ends = [found.end() for found in re.finditer(r"\S+", lines[0])]
    names = {"kernel", *map(short, all_kernels(HOPPER))}
    cells = {}
    for line in lines:
        name = re.split(r"\s{2,}", line)[0]
        if name in names:
            rest = line[len(name) :].rjust(len(line))
            cells[name] = [rest[start:end].strip() for start, end in itertools.pairwise(ends)]
    return cells


# ---- the list


def test_an_empty_cache_lists_every_kernel_as_not_compiled(svdq, own_cache):
    result = svdq("kernels")
    assert (result.code, result.err) == (0, "")
    wanted = {
        short(kernel): ["-" if kernel in KERNELS[arch] else "" for arch in ARCHITECTURES] for kernel in KERNELS[HOPPER]
    }
    assert rows(result.out) == {"kernel": list(ARCHITECTURES)} | wanted
    assert "- is not compiled, a blank not for that one\n" in result.out
    version = ".".join(map(str, kernels.compiler_version()))
    assert result.out.splitlines()[-1] == f"{own_cache}: 0 of {EVERY} compiled by NVRTC {version}, 0 B"
    assert not own_cache.exists()


def test_a_full_cache_lists_registers_and_shared_bytes(svdq, full_cache):
    out = svdq("kernels").out
    assert f": {EVERY} of {EVERY} compiled by NVRTC" in out.splitlines()[-1]
    table = rows(out)
    for kernel in KERNELS[HOPPER]:
        for arch, cell in zip(ARCHITECTURES, table[short(kernel)], strict=True):
            if kernel not in KERNELS[arch]:
                assert cell == ""
                continue
            entry = kernels.cached_file(kernel, arch).read_bytes()
            numbers = json.loads(entry[len(b"svdq-cubin-1\n") + 32 :].partition(b"\n")[0])
            assert cell.split("/")[:2] == [str(numbers["registers"]), str(numbers["shared_bytes"])]


def test_what_runs_where_stands_under_the_list(svdq):
    lines = svdq("kernels").out.splitlines()
    (header,) = (i for i, line in enumerate(lines) if line.startswith("architectures"))
    found = [re.split(r"\s{2,}", line) for line in lines[header : header + 1 + len(support.TABLE)]]
    assert found == [
        ["architectures", *support.FORMATS],
        *([arch, *row.values()] for arch, row in support.TABLE.items()),
    ]


@pytest.mark.parametrize("order", [["sm_90a", "sm_89"], ["sm_89", "sm_90a"]])
def test_an_architecture_of_its_own_kernels_may_stand_first(order):
    facts = kernels.inventory(order)
    text = report.kernels_text(facts)
    blank = {name: [cell == "" for cell in row] for name, row in rows(text).items() if name != "kernel"}
    own = {short(kernel) for kernel in set(KERNELS[HOPPER]) - set(KERNELS["sm_89"])}
    assert blank == {name: [name in own and arch == "sm_89" for arch in order] for name in map(short, KERNELS[HOPPER])}
    total = len(KERNELS[HOPPER]) + len(KERNELS["sm_89"])
    assert f": 0 of {total} compiled" in text.splitlines()[-1]


def test_the_table_fits_120_columns_beside_another_gpu(svdq, monkeypatch):
    monkeypatch.setattr(kernels, "cached", lambda kernel, arch: Compiled(b"", Resources(128, 35840, 0), True))
    monkeypatch.setattr(launch, "device_architectures", lambda: ["sm_103a"])
    assert max(len(line) for line in svdq("kernels").out.splitlines()[:-1]) <= 120


def test_spills_stand_behind_the_shared_bytes(svdq, two_kernels, monkeypatch):
    monkeypatch.setattr(kernels, "_resources", lambda log, kernel: Resources(255, 16, 64))
    svdq("kernels", "--build", "sm_89")
    cells = ["-", "-", "255/16/64", "-", "-", "-"]
    assert rows(svdq("kernels").out) == {"kernel": list(ARCHITECTURES)} | {short(kernel): cells for kernel in SMALL}


@pytest.mark.parametrize(("here", "header"), [
    (["sm_89"], ["sm_80", "sm_86", "sm_89*", "sm_90a", "sm_100a", "sm_120a"]),
    (["sm_87"], ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_87*"]),
])  # fmt: skip
def test_the_architecture_of_a_gpu_here_is_marked(svdq, monkeypatch, here, header):
    monkeypatch.setattr(launch, "device_architectures", lambda: here)
    out = svdq("kernels").out
    assert rows(out)["kernel"] == header
    assert f"* of a GPU here: {here[0]}\n" in out


def test_verbose_gives_every_compiled_kernel_a_row(svdq, two_kernels):
    svdq("kernels", "--build", "sm_89")
    header, *lines = svdq("kernels", "-v").out.splitlines()[:-1]
    assert re.split(r"\s{2,}", header)[-3:] == ["shared bytes", "spill bytes", "cubin bytes"]
    found = [re.split(r"\s{2,}", line) for line in lines]
    stored = [kernels.cached(kernel, "sm_89") for kernel in SMALL]
    assert found == [
        [str(kernel), "sm_89", str(one.resources.registers), str(one.resources.shared_bytes), "0", str(len(one.cubin))]
        for kernel, one in zip(SMALL, stored, strict=True)
    ]


# ---- ahead of time


def test_build_compiles_for_every_architecture_named(svdq, two_kernels, own_cache):
    result = svdq("kernels", "--build", "sm_89,sm_90a")
    assert (result.code, result.err) == (0, "")
    lines = [re.sub(r"\d+\.\d s", "_ s", line) for line in result.out.splitlines()]
    assert lines == [f"{arch}: 2 compiled in _ s, 0 were in the cache" for arch in ("sm_89", "sm_90a")]
    assert sorted(file.name[:14] for file in own_cache.iterdir()) == ["inv_rms-sm_89-"] * 2 + ["inv_rms-sm_90a"] * 2


def test_build_skips_what_is_cached(svdq, two_kernels):
    kernels.compile_kernel(SMALL[1], "sm_89")
    assert re.fullmatch(r"sm_89: 1 compiled in .* s, 1 were in the cache\n", svdq("kernels", "--build", "sm_89").out)
    assert re.fullmatch(r"sm_89: 0 compiled in .* s, 2 were in the cache\n", svdq("kernels", "--build", "sm_89").out)


def test_an_architecture_named_twice_is_built_once(svdq, two_kernels):
    assert svdq("kernels", "--build", "sm_89, sm_89").out.count("sm_89") == 1


def test_a_spill_fails_and_is_named(svdq, two_kernels, monkeypatch):
    spills = {SMALL[0]: 0, SMALL[1]: 64}
    monkeypatch.setattr(kernels, "_resources", lambda log, kernel: Resources(255, 16, spills[kernel]))
    result = svdq("kernels", "--build", "sm_89")
    assert result.code == 1
    assert result.out.endswith("FAILED (1):\n  inv_rms<SCALAR=bf16> for sm_89: spills 64 bytes\n")


def test_progress_counts_kernels(two_kernels):
    seen = []
    kernels.build("sm_89", lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


# ---- reports


def test_the_json_report_has_every_number(svdq, two_kernels, own_cache, tmp_path):
    result = svdq("kernels", "--build", "sm_89", "--json", tmp_path / "report.json", "-q")
    assert (result.code, result.out, result.err) == (0, "", "")
    report = json.loads((tmp_path / "report.json").read_text())
    seconds = report["builds"]["sm_89"].pop("seconds")
    stored = {str(kernel): kernels.cached(kernel, "sm_89") for kernel in SMALL}
    assert seconds > 0 and report == {
        "cache": str(own_cache),
        "nvrtc": ".".join(map(str, kernels.compiler_version())),
        "devices": [],
        "support": support.TABLE,
        "builds": {"sm_89": {"compiled": 2, "from_cache": 0}},
        "failures": [],
        "architectures": {
            "sm_89": {
                name: {
                    "registers": one.resources.registers,
                    "shared_bytes": one.resources.shared_bytes,
                    "spill_bytes": 0,
                    "cubin_bytes": len(one.cubin),
                }
                for name, one in stored.items()
            }
        },
    }


def test_json_on_standard_output_stands_there_alone(svdq):
    report = json.loads(svdq("kernels", "--json", "-").out)
    assert list(report["architectures"]) == sorted(ARCHITECTURES)
    wanted = {arch: sorted(map(str, listed)) for arch, listed in KERNELS.items()}
    assert {arch: list(kinds) for arch, kinds in report["architectures"].items()} == wanted
    assert {found for kinds in report["architectures"].values() for found in kinds.values()} == {None}


# ---- mistakes: one line, exit code 2


@pytest.mark.parametrize(("wanted", "words"), [
    ("sm_75", ["sm_75", "sm_80 (Ampere) or newer"]),
    ("sm_77", ["sm_77", "sm_80 (Ampere) or newer"]),
    ("sm_999a", ["NVRTC", "sm_999a"]),
    ("sm_89a", ["NVRTC", "sm_89a"]),
    ("compute_90", ["'compute_90'", "sm_89 or sm_90a"]),
    ("sm_90b", ["'sm_90b'", "sm_89 or sm_90a"]),
    ("ada", ["'ada'", "sm_89 or sm_90a"]),
    ("", ["''", "sm_89 or sm_90a"]),
])  # fmt: skip
def test_a_wrong_architecture_is_refused_before_anything_is_compiled(refused, own_cache, wanted, words):
    line = refused("kernels", "--build", f"sm_89,{wanted}")
    assert [word for word in words if word not in line] == []
    assert not own_cache.exists()


def test_build_refuses_a_cache_that_cannot_be_written(refused, two_kernels, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SVDQ_CACHE_DIR", str(tmp_path / "file" / "cache"))
    line = refused("kernels", "--build", "sm_89")
    assert "file/cache: cannot be written" in line and "SVDQ_CACHE_DIR" in line


def test_a_kernel_that_does_not_compile_is_an_error_not_a_traceback(svdq, monkeypatch):
    monkeypatch.setattr(kernels, "all_kernels", lambda arch: [Kernel("inv_rms", (("SCALAR", "f17"),))])
    result = svdq("kernels", "--build", "sm_89")
    assert result.code == 2
    assert result.err.startswith("svdq: inv_rms<SCALAR=f17>: NVRTC") and "Traceback" not in result.err


@pytest.mark.parametrize("arguments", [[], ["--build", "sm_89"]])
def test_a_missing_cuda_core_is_one_line(refused, monkeypatch, arguments):
    for name in [name for name in sys.modules if name.startswith("cuda.core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    kernels.cuda_core.cache_clear()
    kernels.compiler_version.cache_clear()
    assert "pip install 'svdq[cuda]'" in refused("kernels", *arguments)


def test_a_missing_libnvrtc_is_one_line(refused, monkeypatch):
    from cuda.bindings import nvrtc

    def absent():
        raise RuntimeError('Failure finding "libnvrtc.so.13"\nlistdir("/somewhere"):')

    monkeypatch.setattr(nvrtc, "nvrtcVersion", absent)
    kernels.compiler_version.cache_clear()
    assert "pip install nvidia-cuda-nvrtc" in refused("kernels")
