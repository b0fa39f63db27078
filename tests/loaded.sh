#!/usr/bin/env bash
# No test may depend on the load of the machine: runs all of them, several times, while a load takes
# every core.
#
#   tests/loaded.sh [TIMES] [arguments of tests/run.sh]
#
# LOAD: processes of the load; one per core unless set. Prints a line per run, and exits 1 if any
# run failed.
set -euo pipefail
cd "$(dirname "$0")/.."
times=${1:-5}
[ $# -eq 0 ] || shift
load=${LOAD:-$(nproc)}
logs=target/loaded
mkdir -p "$logs"
tests/run.sh --no-run "$@"

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
for _ in $(seq "$load"); do
  sh -c 'while :; do :; done' &
  pids+=($!)
done

failed=0
for run in $(seq "$times"); do
  began=$SECONDS
  if tests/run.sh "$@" >"$logs/$run.log" 2>&1; then word=green; else word=FAILED failed=$((failed + 1)); fi
  tests=$(grep -E '^ *Summary|^test result' "$logs/$run.log" | tail -1 | sed 's/^ *//' || true)
  printf 'run %d of %d: %s in %ds with %d busy processes (%s)\n' "$run" "$times" "$word" $((SECONDS - began)) "$load" "$tests"
  [ "$word" = green ] || grep -E '^ *(FAIL|TIMEOUT|SIG)|^test .*FAILED' "$logs/$run.log" | sort -u || true
done
echo "$((times - failed)) of $times runs passed"
[ "$failed" -eq 0 ]
