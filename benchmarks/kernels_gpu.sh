#!/usr/bin/env bash
# Everything about the kernels that needs an NVIDIA GPU, in one run: build, tests, sanitizers, times, profiles.
#
# benchmarks/kernels_gpu.sh [OUT_DIR] [MODEL_DIR QUANTIZED IDS.jsonl]     from the repository's top, svdq[cuda] installed
#
# OUT_DIR (default benchmarks/results) gets kernels_<part>.txt. With the three files of benchmarks/smollm2_kernels.py that
# part runs too. Needs compute-sanitizer and ncu of a CUDA toolkit for their parts; says so where they are missing.
set -uo pipefail
out=${1:-benchmarks/results}
mkdir -p "$out"
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
part times "$python" benchmarks/kernels.py
part tests "$python" -m pytest -p no:cacheprovider -W ignore -m gpu tests/gpu -q --durations=5 --tb=short
if [ $# -ge 4 ]; then part smollm2 "$python" benchmarks/smollm2_kernels.py "$2" "$3" "$4"; fi
if command -v compute-sanitizer >/dev/null; then
  part memcheck compute-sanitizer --tool memcheck --error-exitcode 1 "$python" tests/gpu/sanitize.py
  part racecheck compute-sanitizer --tool racecheck --error-exitcode 1 "$python" tests/gpu/sanitize.py
else
  echo "== no compute-sanitizer here"
fi
if command -v ncu >/dev/null; then
  for shape in 16,4096,4096 700,1024,2048 4096,3072,3072; do
    part "profile_${shape//,/x}" ncu -k regex:quantize_lora_down\|w4a4 -c 2 --section SpeedOfLight --section WarpStateStats \
      --section Occupancy --section ComputeWorkloadAnalysis "$python" benchmarks/kernels.py --profile "$shape"
  done
else
  echo "== no ncu here"
fi
exit $failed
