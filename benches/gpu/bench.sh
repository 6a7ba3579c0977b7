#!/usr/bin/env bash
# The library's figures on a machine with a GPU, CUDA's toolkit and gcc, but no Rust: run it where `make gpu-bundle` put it.
# A line a figure: name, value, unit. With PEERS=<folder of the peers' benchmark: run_peers.sh, bench_alloc.cu and so on>
# their workloads follow: gpupool opened, all peers, gpupool preloaded. All goes to standard output, and to OUT (a file, or
# a folder that gets bench.txt).
set -u
cd "$(dirname "$0")/.." || exit 2
if [ -n "${OUT:-}" ] && [ -z "${GPUPOOL_BENCH_TEE:-}" ]; then
  case $OUT in /*) ;; *) OUT=$OLDPWD/$OUT ;; esac
  [ -d "$OUT" ] && OUT=$OUT/bench.txt
  GPUPOOL_BENCH_TEE=1 OUT=$OUT bash bench/bench.sh 2>&1 | tee "$OUT"
  exit "${PIPESTATUS[0]}"
fi
# CUDA_HOME, else where nvcc is, on the path or in its usual place. nvcc itself is for the peers alone.
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
cuda=${CUDA_HOME:-$([ -n "$nvcc" ] && dirname "$(dirname "$(readlink -f "$nvcc")")")}
[ -n "$cuda" ] && [ -e "$cuda/include/cuda_runtime_api.h" ] || { echo "no CUDA toolkit: set CUDA_HOME"; exit 2; }
export GPUPOOL_SO=${GPUPOOL_SO:-$PWD/libgpupool.so.0} LD_LIBRARY_PATH=$cuda/lib64:${LD_LIBRARY_PATH:-}
bin=$(mktemp -d); failed=0
trap 'rm -rf "$bin"' EXIT
gcc -std=gnu11 -O2 -Wall -Wextra -Werror -Iinclude -I"$cuda/include" bench/figures.c -o "$bin/figures" \
  -L"$cuda/lib64" -lcudart -ldl -lpthread -lm || exit 2
[ -n "$nvcc" ] && export PATH=$PATH:$(dirname "$nvcc") # run_peers.sh asks for it there
run() { timeout 150 "$@" || { echo "FAILED (status $?): $*"; failed=$((failed + 1)); }; }
command -v nvidia-smi >/dev/null && nvidia-smi -L
peak=$("$bin/figures" w6_peak)
limit=$((peak * 115 / 100))
figures() { # the setting for a program's environment, or none
  run env "$@" "$bin/figures" pairs
  run env "$@" "$bin/figures" w6
  run env "$@" GPUPOOL_MAX_MEM=$limit "$bin/figures" w6_limited
}
echo "== figures, preloaded"; figures LD_PRELOAD="$GPUPOOL_SO"
echo "== figures, opened only"; figures
echo "skipped: w6_driver_calls_per_op: a real driver does not tell how often it was called"
if [ -n "${PEERS:-}" ]; then
  echo "== peers; gpupool opened only"
  bash "$PEERS/run_peers.sh" "$bin/peers" 2>&1 || failed=$((failed + 1))
  echo "== gpupool, preloaded"
  if cd "$bin/peers"; then
    for part in "" w6; do run env LD_PRELOAD="$GPUPOOL_SO" ./bench ./p_gpupool.so $part; done
  fi
fi
echo "$failed failed"
exit $((failed > 0))
