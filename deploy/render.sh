#!/usr/bin/env bash
# Renders the plain manifests of deploy/kubernetes from the chart, which is the only source.
#
#   render.sh [FOLDER]     output folder; default deploy/kubernetes
#   HELM                   the program; default `helm` (that of `make test-deploy`: .cache/deploy/bin)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/kubernetes}
for values in "$here"/chart/examples/*.yaml; do
  shape=$(basename "$values" .yaml)
  mkdir -p "$folder/$shape"
  {
    echo "# Rendered by deploy/render.sh from deploy/chart with examples/$shape.yaml: edit those."
    "${HELM:-helm}" template llm "$here/chart" --values "$values"
  } >"$folder/$shape/foretell.yaml"
done
