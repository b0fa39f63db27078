#!/usr/bin/env bash
# Through Foretell against direct, side by side in one run: our own target at two costs, every workload.
#
#   tests/bench.sh INFLATED_MODEL_DIR [OUT_DIR]
#
# INFLATED_MODEL_DIR is the bundled target with its depth multiplied (`make bench` makes it): the same
# function at the cost of a bigger model. Exits 2 if a ratio falls short of its bound.
set -euo pipefail
cd "$(dirname "$0")/.."
inflated=${1:?model directory}
out=${2:-bench-out}
alternations=${ALTERNATIONS:-20}
foretell=target/release/foretell
direct=http://127.0.0.1:8190
through=http://127.0.0.1:8180
admin=http://127.0.0.1:9564
pids=()
mkdir -p "$out"
trap 'for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done; wait 2>/dev/null || true' EXIT

wait_for() {
  for _ in $(seq 300); do
    if python3 - "$1" <<'PY' 2>/dev/null; then return; fi
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=1)
PY
    sleep 0.1
  done
  echo "no answer from $1" >&2
  exit 1
}

start() {
  pids=()
  "$foretell" target --model "$1" --name foretell-target --listen 127.0.0.1:8190 >"$out/target.log" 2>&1 &
  pids+=($!)
  wait_for "$direct/health"
  "$foretell" serve --config tests/bench/foretell.yaml >"$out/serve.log" 2>&1 &
  pids+=($!)
  wait_for "$admin/readyz"
}

stop() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  pids=()
}

failed=0
run() { # cost workload temperature bounds
  echo
  echo "== $1, $2, temperature $3"
  "$foretell" bench --direct "$direct" --through "$through" \
    --metrics-direct "$direct/metrics" --metrics-through "$admin/metrics" \
    --workload "tests/workloads/$2.jsonl" --concurrency 1 --temperature "$3" --alternations "$alternations" \
    --json "$out/$1-$2-t$3.json" --html "$out/$1-$2-t$3.html" --require "$4" || failed=2
}

start "$inflated"
run inflated rewrite 0 'ratio>=2.2,gain_over_formula>=0.8'
run inflated completion 0 'ratio>=1.25,gain_over_formula>=0.8'
run inflated completion 0.8 'ratio>=1.1'
run inflated prose 0 'ratio>=0.98,gain_over_formula>=0.8'
run inflated chat 0 'ratio>=0.98,gain_over_formula>=0.8'
run inflated hostile 0 'ratio>=0.98,ratio.low>=0.95,gain_over_formula>=0.8'
stop

start onnx/models/target
run plain rewrite 0 'ratio>=1.3,gain_over_formula>=0.8'
for workload in completion prose chat hostile; do
  run plain "$workload" 0 'ratio>=0.95,gain_over_formula>=0.8'
done
stop

exit "$failed"
