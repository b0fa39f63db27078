#!/usr/bin/env bash
# Speed on both real engines: direct, through Foretell, and the engines' own speculation; figures
# under bench-out/engines.
#
#   tests/engines/speed.sh [speed.py's arguments]       e.g. --parts native
set -euo pipefail
here=$(dirname "$0")
for engine in llama vllm; do
  python3 "$here/speed.py" "$engine" "$@"
done
