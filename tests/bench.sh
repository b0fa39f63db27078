#!/usr/bin/env bash
# Through Foretell against direct, interleaved in one run: `foretell target` at two costs, every
# workload.
#
#   tests/bench.sh INFLATED_MODEL_DIR [OUT_DIR]
#
# INFLATED_MODEL_DIR is the bundled target with its depth multiplied (`make bench` makes it): the
# same function at the cost of a bigger model. Exits 2 if a required ratio was not met.
set -euo pipefail
cd "$(dirname "$0")/.."
inflated=${1:?model directory}
[ -f "$inflated/model.onnx" ] || { echo "no model in $inflated (make bench makes it)" >&2; exit 1; }
out=${2:-bench-out}
alternations=${ALTERNATIONS:-20}
foretell=${FORETELL:-target/dist/foretell}
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
bench() { # name, temperature, requirements, workloads...
  local name=$1 temperature=$2 require=$3
  shift 3
  echo
  echo "== $name, temperature $temperature"
  "$foretell" bench --direct "$direct" --through "$through" --workload "$@" --concurrency 1 \
    --metrics-direct "$direct/metrics" --metrics-through "$admin/metrics" \
    --temperature "$temperature" --seeded --alternations "$alternations" \
    --json "$out/$name.json" --html "$out/$name.html" --require "$require" || failed=2
}
all=(tests/workloads/{rewrite,completion,prose,chat,hostile}.jsonl)

start "$inflated"
bench inflated-greedy 0 \
  'rewrite>=2.2,completion>=1.25,hostile>=0.98,hostile.low>=0.95,*.gain>=0.8,*.first_token<=1,*.identical>=1' "${all[@]}"
bench inflated-sampled 0.8 'completion>=1.1,*.identical>=1' tests/workloads/completion.jsonl
stop

start onnx/models/target
bench plain-greedy 0 'rewrite>=1.3,*>=0.95,*.gain>=0.8,*.first_token<=1,*.identical>=1' "${all[@]}"
stop

exit "$failed"
