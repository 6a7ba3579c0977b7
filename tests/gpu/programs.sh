#!/usr/bin/env bash
# Unmodified programs, bare and under LD_PRELOAD=libgpupool.so: they must print the same results, and the library must
# have served their memory. Run it where `make gpu-bundle` has put it (gpu/programs.sh); it needs a GPU and nvcc, and of
# Python's frameworks it tries those that are there. Prints a table; exits 1 when a program differed or was not served.
#   ONLY="ptds torch_train"  these programs alone
#   JOBS=1                   one at a time, for honest times (4 run side by side otherwise)
#   LIMIT=120                seconds a run may take
#   LOG_DIR                  where the output goes
# Other settings of the library (GPUPOOL_FREE=sync ...) are handed on as they are.
set -u
cd "$(dirname "$0")/.." || exit 2
# Links do not survive every way of copying a folder.
[ -e libgpupool.so ] || [ ! -e libgpupool.so.0 ] || ln -sf libgpupool.so.0 libgpupool.so
lib=$PWD/libgpupool.so
[ -e "$lib" ] || { echo "no $lib: run gpu/programs.sh of the bundle"; exit 2; }
jobs=${JOBS:-4} limit=${LIMIT:-120}
bin=$(mktemp -d); log=${LOG_DIR:-$bin}; mkdir -p "$log"
# Both runs of torch.compile must find the same compiled kernels.
export TORCHINDUCTOR_CACHE_DIR=$bin/inductor TRITON_CACHE_DIR=$bin/triton PYTHONUNBUFFERED=1
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
nvidia-smi -L || exit 2

names="static_runtime ptds cupy_pool_off numba_arrays jax_platform torch_train torch_compile_graphs"
names=${ONLY:-$names}

both() { # name, command: the bare run, then the preloaded one; only the program itself is preloaded
  local name=$1; shift
  timeout -k 5 "$limit" "$@" >"$log/$name.bare.out" 2>"$log/$name.bare.err"
  echo $? >"$log/$name.bare.rc"
  [ "$(cat "$log/$name.bare.rc")" = 0 ] || return # nothing to compare with
  timeout -k 5 "$limit" env LD_PRELOAD="$lib" GPUPOOL_REPORT=1 "$@" >"$log/$name.pool.out" 2>"$log/$name.pool.err"
  echo $? >"$log/$name.pool.rc"
}
one() { # name
  local name=$1 flags=
  rm -f "$log/$name".{bare,pool}.{out,err,rc}
  if [ -e "gpu/$name.cu" ]; then
    [ "$name" = ptds ] && flags="--default-stream per-thread"
    # Without -cudart: the static runtime, nvcc's default.
    timeout 100 "${nvcc:-nvcc}" -O2 -arch=native $flags "gpu/$name.cu" -o "$bin/$name" >"$log/$name.build" 2>&1 ||
      timeout 100 "${nvcc:-nvcc}" -O2 $flags "gpu/$name.cu" -o "$bin/$name" >"$log/$name.build" 2>&1
    both "$name" "$bin/$name"
  else
    both "$name" python3 "gpu/$name.py"
  fi
}
for name in $names; do
  one "$name" &
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
done
wait

code() { cat "$log/$1.rc" 2>/dev/null || echo "not run"; }
seconds() { awk '$1 == "SECONDS" {t = $2} END {print t == "" ? "-" : t}' "$log/$1.out"; }
failed=0 compared=0 notes=
echo
echo "| program | bare s | with gpupool s | served mallocs | same result |"
echo "|---|---|---|---|---|"
for name in $names; do
  if [ "$(code "$name.bare")" != 0 ]; then
    echo "| $name | status $(code "$name.bare") | - | - | skipped: the bare run failed |"
    why=$(cat "$log/$name".{build,bare.err,bare.out} 2>/dev/null | tail -n 6)
    notes+=$'\n'"skipped: $name, bare:"$'\n'$why
    continue
  fi
  compared=$((compared + 1))
  # Of every process that the program began; frees and the gpupool door do not count.
  served=$(awk '/^gpupool: (runtime|driver) door: served/ {n += $5} END {print n + 0}' "$log/$name.pool.err")
  want=$(grep -E '^(RESULT|skipped:)' "$log/$name.bare.out") got=$(grep -E '^(RESULT|skipped:)' "$log/$name.pool.out")
  if [ "$(code "$name.pool")" != 0 ]; then same="no (status $(code "$name.pool"))"
  elif [ -z "$want" ] || [ "$want" != "$got" ]; then same=no
  elif [ "$served" = 0 ]; then same="yes, but not served"
  else same=yes; fi
  echo "| $name | $(seconds "$name.bare") | $(seconds "$name.pool") | $served | $same |"
  grep -q ^skipped: "$log/$name.bare.out" && notes+=$'\n'"$name: $(grep ^skipped: "$log/$name.bare.out")"
  if [ "$same" != yes ]; then
    failed=$((failed + 1))
    why=$(diff <(echo "$want") <(echo "$got") | cut -c1-200 | head -n 8; tail -n 12 "$log/$name.pool.err")
    notes+=$'\n'"FAILED  $name:"$'\n'$why
  fi
done
[ -z "$notes" ] || echo "$notes"
[ $compared -gt 0 ] || { echo "no program ran"; exit 1; }
echo "$compared compared, $failed failed"
exit $((failed > 0))
