#!/bin/sh
# Makes the bundled models again, from the pinned packages to the committed files.
# Two cores need about two hours; the schedules go by the clock, so a busy machine gives a weaker
# model, not a longer run. Usage: onnx/train/all.sh [WORK_DIR]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work=${1:-$root/.cache/train}
models=$root/onnx/models
mkdir -p "$work"
[ -x "$work/venv/bin/python" ] || python3 -m venv "$work/venv"
py=$work/venv/bin/python
"$py" -m pip install -q -r "$here/requirements.txt"
export OMP_WAIT_POLICY=passive
cd "$here"

"$py" corpus.py fetch "$work"
"$py" corpus.py build "$work"
for kind in same other; do
    "$py" tokenizer.py "$work" $kind "$work/tok-$kind"
    "$py" corpus.py pack "$work" "$work/tok-$kind/tokenizer.json" "$work/ids-$kind"
done

"$py" train.py target "$work/ids-same" "$work/target" 60
"$py" export.py "$work/target/final.pt" "$work/tok-same" "$models/target"

"$py" own_text.py "$models/target" "$work/ids-same" "$work/own.npz" 2
"$py" distil.py "$work/target/final.pt" "$work/ids-same" "$work/draft-same" 16 --own "$work/own.npz"
"$py" export.py "$work/draft-same/final.pt" "$work/tok-same" "$models/draft-same"

"$py" train.py draft-other "$work/ids-other" "$work/draft-other" 6 \
    --start "$work/draft-same/final.pt" "$work/tok-same/tokenizer.json" "$work/tok-other/tokenizer.json"
"$py" export.py "$work/draft-other/final.pt" "$work/tok-other" "$models/draft-other"

"$py" pools.py "$work" "$work/tok-same/tokenizer.json" "$work/pools"
"$py" choose_workloads.py "$work/pools" "$root/tests/workloads" "$models"
"$py" gate.py "$models" "$root/tests/workloads" "$work/gate.json"
"$py" card.py "$models" "$work" "$work/gate.json"
