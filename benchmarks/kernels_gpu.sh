#!/usr/bin/env bash
# Everything about the kernels that needs an NVIDIA GPU, in one run: build, tests, sanitizers, times, profiles.
#
# benchmarks/kernels_gpu.sh [OUT_DIR] [MODEL_DIR QUANTIZED IDS.jsonl]     svdq[cuda] installed, pytest and hypothesis too
#
# OUT_DIR (default benchmarks/results) gets kernels_<part>.txt. With the three files of benchmarks/smollm2_kernels.py that
# part runs too. Needs compute-sanitizer and ncu of a CUDA toolkit for their parts; says so where they are missing.
set -uo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
out=$(realpath -m "${1:-$repository/benchmarks/results}")
mkdir -p "$out"
smollm2=()
if [ $# -ge 4 ]; then smollm2=("$(realpath "$2")" "$(realpath "$3")" "$(realpath "$4")"); fi
cd "$(mktemp -d)" || exit 1  # not the repository: its folders would be found before the installed packages
python=${PYTHON:-python3}
failed=0

part() {  # name, command …
  local name=$1
  shift
  echo "== $name"
  if "$@" >"$out/kernels_$name.txt" 2>&1; then tail -3 "$out/kernels_$name.txt"; else
    failed=1
    echo "FAILED"
    tail -30 "$out/kernels_$name.txt"
  fi
}

part build "$python" -m svdq.cli.main kernels --build "$("$python" -c 'import torch
from svdq.kernels.compile import architecture
print(architecture(torch.cuda.get_device_capability()))')"
part times "$python" "$repository/benchmarks/kernels.py"
part nvfp4 "$python" "$repository/benchmarks/nvfp4.py"
part tests "$python" -m pytest -p no:cacheprovider -W ignore -m gpu --rootdir "$repository" -c "$repository/pyproject.toml" \
  "$repository/tests/gpu" -q --durations=5 --tb=short
if [ ${#smollm2[@]} -gt 0 ]; then part smollm2 "$python" "$repository/benchmarks/smollm2_kernels.py" "${smollm2[@]}"; fi
if command -v compute-sanitizer >/dev/null; then
  # API errors are other libraries' questions for functions that the driver may lack
  part memcheck compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 "$python" "$repository/tests/gpu/sanitize.py"
  part racecheck compute-sanitizer --tool racecheck --error-exitcode 1 "$python" "$repository/tests/gpu/sanitize.py"
else
  echo "== no compute-sanitizer here"
fi
if command -v ncu >/dev/null; then
  for shape in 16,4096,4096 64,4096,4096 700,1024,2048 4096,3072,3072; do
    part "profile_${shape//,/x}" ncu -k "regex:quantize_lora_down|w4a4|wgmma|expand_codes" -c 6 --section SpeedOfLight --section WarpStateStats \
      --section Occupancy --section ComputeWorkloadAnalysis --section MemoryWorkloadAnalysis "$python" "$repository/benchmarks/kernels.py" --profile "$shape"
  done
else
  echo "== no ncu here"
fi
exit $failed
