#!/usr/bin/env bash
# The Python wheel, into target/wheel/dist: the program (maturin, `bindings = "bin"`) and the
# bundled models. PROFILE: Cargo's profile, `dist` by default.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
folder=$root/target/wheel
rm -rf "$folder" && mkdir -p "$folder/data/data/share/foretell"
cp -r onnx/models "$folder/data/data/share/foretell/models"
cp README.md "$folder"
sed "s#@ROOT@#$root#; s#@PROFILE@#${PROFILE:-dist}#" deploy/packages/pyproject.toml >"$folder/pyproject.toml"
maturin=$root/.cache/maturin
[ -x "$maturin/bin/maturin" ] || "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check \
  --root-user-action=ignore --target "$maturin" "$(grep -o 'maturin==[0-9.]*' deploy/packages/pyproject.toml)"
cd "$folder"
# The C library of the machine that builds is the oldest on which the wheel runs.
PYTHONPATH=$maturin "$maturin/bin/maturin" build --quiet --auditwheel skip --out "$folder/dist" --target-dir "$root/target"
ls "$folder"/dist/*.whl
