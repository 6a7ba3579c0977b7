#!/usr/bin/env bash
# Whole PyTorch training steps on each allocator, each model in a process of its own; a Markdown table at the end.
#   PEERS=folder gpu/e2e.sh      the folder holds e2e.py; run it where `make gpu-bundle` has put it
#   REPS=3      repetitions, medians in the table (1)
#   QUICK=1     without the bare resnet and varlen, the slow ones
#   MODELS="mlp resnet varlen", ALLOCS="native expandable bare preload pluggable"
#   LIMIT=120   seconds a process may take
#   LOG_DIR     where e2e.log goes
# Held is what the whole device holds: nothing else may run there meanwhile. Some 12 s a process.
set -u
cd "$(dirname "$0")/.." || exit 2
[ -e libgpupool.so ] || [ ! -e libgpupool.so.0 ] || ln -sf libgpupool.so.0 libgpupool.so
lib=$PWD/libgpupool.so
[ -e "$lib" ] || { echo "no $lib: run gpu/e2e.sh of the bundle"; exit 2; }
[ -e "${PEERS:-.}/e2e.py" ] || { echo "PEERS must name the folder with e2e.py"; exit 2; }
models=${MODELS:-mlp resnet varlen} allocs=${ALLOCS:-native expandable bare preload pluggable} failed=0
log=${LOG_DIR:-$(mktemp -d)}; mkdir -p "$log"; log=$log/e2e.log; : >"$log"
nvidia-smi -L || exit 2

one() { # allocator, model
  local -a settings=("TAG=$1")
  case $1 in
    native) ;;
    # The second name is the one that PyTorch now prefers.
    expandable) settings+=(PYTORCH_{CUDA_,}ALLOC_CONF=expandable_segments:True) ;;
    bare) settings+=(PYTORCH_NO_CUDA_MEMORY_CACHING=1) ;;
    preload) settings+=(PYTORCH_NO_CUDA_MEMORY_CACHING=1 LD_PRELOAD="$lib") ;;
    pluggable) settings+=(E2E_ALLOC="$lib:gpupool_torch_malloc:gpupool_torch_free") ;;
    *) echo "no allocator $1"; return 1 ;;
  esac
  # "end" comes without the model's name: it is put there.
  timeout -k 5 "${LIMIT:-120}" env "${settings[@]}" python3 "$PEERS/e2e.py" "$2" 2>"$log.err" |
    sed -E "s/^($1 +)end /\1$2 end /" | tee -a "$log"
  [ "${PIPESTATUS[0]}" = 0 ] || { echo "FAILED  $1 $2:"; tail -n 8 "$log.err"; return 1; }
}
for ((rep = 0; rep < ${REPS:-1}; rep++)); do
  for model in $models; do
    for alloc in $allocs; do
      [ "${QUICK:-0}" != 0 ] && [ "$alloc" = bare ] && [ "$model" != mlp ] && continue
      one "$alloc" "$model" || failed=$((failed + 1))
    done
  done
done

# Lines: allocator model 2.5 ms/step held 820 live 100, and: allocator model end 800 MiB.
awk -v models="$models" -v allocs="$allocs" '
  $4 == "ms/step" { put($1, $2, "ms", $3); put($1, $2, "held", $6); put($1, $2, "live", $8) }
  $3 == "end" { put($1, $2, "end", $4) }
  function put(a, m, what, v) { key = a " " m " " what; seen[key, ++n[key]] = v + 0 }
  function median(a, m, what, key, k, i, j, t, v) {
    key = a " " m " " what; k = n[key]
    if (!k) return "-"
    for (i = 1; i <= k; i++) v[i] = seen[key, i]
    for (i = 2; i <= k; i++) for (j = i; j > 1 && v[j - 1] > v[j]; j--) { t = v[j]; v[j] = v[j - 1]; v[j - 1] = t }
    t = k % 2 ? v[(k + 1) / 2] : (v[k / 2] + v[k / 2 + 1]) / 2
    # Only the native allocator counts what is live.
    if (what == "live" && t == 0) return "-"
    return sprintf(what == "ms" ? "%.2f" : "%d", t)
  }
  END {
    nm = split(models, m, " "); na = split(allocs, a, " ")
    row = "\n| allocator |"; rule = "|---|"
    for (i = 1; i <= nm; i++) { row = row " " m[i] ": ms | held | live | end |"; rule = rule "---|---|---|---|" }
    print row; print rule
    for (j = 1; j <= na; j++) {
      row = "| " a[j] " |"
      for (i = 1; i <= nm; i++)
        for (k = 1; k <= split("ms held live end", what, " "); k++) row = row " " median(a[j], m[i], what[k]) " |"
      print row
    }
  }' "$log"
echo "medians of ${REPS:-1}; held, live and end in MiB; $failed failed"
exit $((failed > 0))
