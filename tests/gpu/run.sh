#!/usr/bin/env bash
# The C contract and example programs on a machine with a GPU, CUDA's toolkit and gcc, but no Rust: run it where
# `make gpu-bundle` has put it. Prints a line a program; exits non-zero when one failed.
set -u
cd "$(dirname "$0")" || exit 2
# Links do not survive every way of copying a folder.
[ -e libgpupool.so ] || ln -sf libgpupool.so.0 libgpupool.so
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null) || { echo "no nvcc: CUDA's toolkit is needed"; exit 2; }
cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
bin=$(mktemp -d); log=${LOG_DIR:-$bin}; failed=0
export LD_LIBRARY_PATH=$PWD:$cuda/lib64:${LD_LIBRARY_PATH:-}
build() { gcc -std=c11 -O2 -g -Wall -Wextra -Werror -Iinclude -I"$cuda/include" "$1" -o "$bin/$(basename "$1" .c)" -L. -L"$cuda/lib64" -lgpupool -lcudart -ldl -lpthread; }
run() { # name, arguments
  local name=$1; shift
  if timeout 200 "$bin/$name" "$@" >"$log/$name.log" 2>&1; then echo "ok      $name: $(tail -n 1 "$log/$name.log")"
  else echo "FAILED  $name (status $?):"; head -n 40 "$log/$name.log"; failed=$((failed + 1)); fi
}
nvidia-smi -L || exit 2
for f in c/*.c c_examples/*.c; do build "$f" || { echo "FAILED  to build $f"; failed=$((failed + 1)); }; done
for p in driver_facts cnmem_contract pool_contract quickstart torch_swap; do run $p; done
GPUPOOL_BACKING=malloc run pool_contract
GPUPOOL_BACKING=malloc run cnmem_contract
run stress
for grow in --grow ""; do run caffe_train 128 --iterations 200 $grow; cat "$log/caffe_train.log"; done
echo "$failed failed"
exit $((failed > 0))
