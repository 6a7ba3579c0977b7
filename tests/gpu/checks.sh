#!/usr/bin/env bash
# order.cu and hang.cu, bare and under LD_PRELOAD=libgpupool.so, where `make gpu-bundle` has put them (gpu/checks.sh).
# The bare driver says what is right: the preload must pass where it passes, and answer no call worse. If not: exit 1.
# What fails in both ways shows nothing, and is called unproven.
#   ROUNDS=10000   of order.cu (a tenth for pinned memory and peers)
#   FREES="order"  the values of GPUPOOL_FREE to try
set -u
cd "$(dirname "$0")/.." || exit 2
[ -e libgpupool.so ] || [ ! -e libgpupool.so.0 ] || ln -sf libgpupool.so.0 libgpupool.so
lib=$PWD/libgpupool.so
[ -e "$lib" ] || { echo "no $lib: run gpu/checks.sh of the bundle"; exit 2; }
rounds=${ROUNDS:-10000} failed=0 unproven=0
bin=$(mktemp -d); log=${LOG_DIR:-$bin}; mkdir -p "$log"
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null) ||
  { echo "no nvcc: CUDA's toolkit is needed"; exit 2; }
nvidia-smi -L || exit 2
build() {
  timeout 100 "$nvcc" -O2 -arch=native "gpu/$1.cu" -o "$bin/$1" -ldl ||
    timeout 100 "$nvcc" -O2 "gpu/$1.cu" -o "$bin/$1" -ldl
}
build order & build hang & wait
[ -x "$bin/order" ] && [ -x "$bin/hang" ] || { echo "FAILED  to build"; exit 1; }

fail() { echo "FAILED  $1:"; shift; for f; do tail -n 12 "$f"; done; failed=$((failed + 1)); }
served() { awk '/^gpupool: (runtime|driver) door: served|^gpupool: pinned memory: served/ {n += $5}
  END {print n + 0}' "$1"; }
# name, program and arguments: prints both answers, and FAILED when only the bare run passed.
both() {
  local name=$1 bare pool free n; shift
  timeout -k 5 60 "$@" >"$log/$name.bare" 2>&1; bare=$?
  echo "bare: $(tail -n 4 "$log/$name.bare" | paste -sd '|') (status $bare)"
  for free in ${FREES:-order}; do
    timeout -k 5 60 env LD_PRELOAD="$lib" GPUPOOL_FREE="$free" GPUPOOL_PINNED=1g GPUPOOL_REPORT=1 "$@" \
      >"$log/$name.$free" 2>"$log/$name.$free.err"; pool=$?
    n=$(served "$log/$name.$free.err")
    echo "  $free: $(tail -n 4 "$log/$name.$free" | paste -sd '|') (status $pool, served $n)"
    grep -q ^skipped: "$log/$name.$free" && continue
    if [ $pool != 0 ] && [ $bare = 0 ]; then fail "$name, GPUPOOL_FREE=$free" "$log/$name.$free.err"
    elif [ $pool != 0 ]; then unproven=$((unproven + 1))
    elif [ "$n" = 0 ]; then fail "$name, GPUPOOL_FREE=$free, was not served"; fi
  done
}
# What must be found is found: the next user takes the block without free and malloc.
for variant in streams destroyed pinned; do
  timeout -k 5 60 "$bin/order" $variant 1000 broken >"$log/broken" 2>&1
  [ $? = 1 ] && grep . "$log/broken" || fail "order $variant finds nothing broken" "$log/broken"
done
for variant in streams destroyed; do both "order-$variant" "$bin/order" $variant "$rounds"; done
for variant in pinned peer; do both "order-$variant" "$bin/order" $variant $((rounds / 10)); done
for test in wait_value spin copy; do both "hang-$test" "$bin/hang" $test; done

# Captures: line by line, each code is that of the bare driver, or 0.
timeout -k 5 60 "$bin/hang" capture >"$log/capture.bare" 2>&1 || fail "capture, bare" "$log/capture.bare"
timeout -k 5 60 env LD_PRELOAD="$lib" "$bin/hang" capture >"$log/capture.pool" 2>"$log/capture.err" ||
  fail capture "$log/capture.pool" "$log/capture.err"
awk -F': ' '
  # "end 0, run 0, calls 0 900" becomes end, run and the set of calls.
  function split_up(text, out, n, i, w) {
    split("", out); n = split(text, w, /[ ,]+/)
    out["end"] = w[2]; out["run"] = w[4]; out["calls"] = " "
    for (i = 6; i <= n; i++) out["calls"] = out["calls"] w[i] " "
  }
  FNR == NR { bare[$1] = $2; next }
  { split_up(bare[$1], b); split_up($2, p); bad = !($1 in bare)
    # Run is 0 where there was no graph to run.
    if (p["end"] != 0 && p["end"] != b["end"]) bad = 1
    if (p["run"] != 0 && p["run"] != b["run"]) bad = 1
    n = split(p["calls"], c, " ")
    for (i = 1; i <= n; i++) if (c[i] != 0 && !index(b["calls"], " " c[i] " ")) bad = 1
    printf "%-45s bare: %s; preload: %s%s\n", $1, bare[$1], $2, bad ? "  WORSE" : ""; worse += bad; lines++ }
  END { exit worse > 0 || lines < 18 }' "$log/capture.bare" "$log/capture.pool" || fail "capture, worse than bare"
echo "$failed failed, $unproven unproven"
exit $((failed > 0))
