#!/usr/bin/env bash
# Speculation under load: the same proxy in `auto` against itself in `mode: off`, in front of
# `foretell target` at eight times its depth, with 1, 4, 16 and 32 clients.
#
#   tests/bench/load.sh INFLATED_MODEL_DIR [OUT_DIR]
#
# CLIENTS, WORKLOADS, ALTERNATIONS and MAX_TOKENS choose less or more. Exits 2 if a
# required ratio was not met.
set -euo pipefail
cd "$(dirname "$0")/../.."
inflated=${1:?model directory}
[ -f "$inflated/model.onnx" ] || { echo "no model in $inflated (make bench makes it)" >&2; exit 1; }
out=${2:-bench-out}
foretell=${FORETELL:-target/dist/foretell}
target=http://127.0.0.1:8190 auto=http://127.0.0.1:8180 off=http://127.0.0.1:8181 admin=http://127.0.0.1:9564
mkdir -p "$out"
pids=()
trap 'for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done; wait 2>/dev/null || true' EXIT

wait_for() {
  for _ in $(seq 300); do
    if python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=1)' "$1" 2>/dev/null; then return; fi
    sleep 0.1
  done
  echo "no answer from $1" >&2
  exit 1
}

"$foretell" target --model "$inflated" --name foretell-target --listen 127.0.0.1:8190 --lanes 32 >"$out/load-target.log" 2>&1 &
pids+=($!)
wait_for "$target/health"
"$foretell" serve --config tests/bench/foretell.yaml >"$out/load-auto.log" 2>&1 &
pids+=($!)
sed -e 's/^version: 1$/version: 1\nmode: off/' -e 's/127.0.0.1:8180/127.0.0.1:8181/' -e 's/127.0.0.1:9564/127.0.0.1:9565/' \
  -e "s|dir: policies|dir: $PWD/tests/bench/policies|" -e "s|path: onnx|path: $PWD/onnx|" tests/bench/foretell.yaml >"$out/load-off.yaml"
"$foretell" serve --config "$out/load-off.yaml" >"$out/load-off.log" 2>&1 &
pids+=($!)
wait_for "$admin/readyz"
wait_for http://127.0.0.1:9565/readyz

failed=0
for workload in ${WORKLOADS:-completion chat}; do
  "$foretell" bench --direct "$off" --through "$auto" --workload "tests/workloads/$workload.jsonl" \
    --concurrency "${CLIENTS:-1,4,16,32}" --alternations "${ALTERNATIONS:-6}" --max-tokens "${MAX_TOKENS:-64}" \
    --metrics-direct "$target/metrics" --metrics-through "$admin/metrics" \
    --json "$out/load-$workload.json" --html "$out/load-$workload.html" \
    --require '*.ratio>=0.98,*.low>=0.95' || failed=2
done
exit "$failed"
