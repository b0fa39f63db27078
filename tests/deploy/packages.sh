#!/usr/bin/env bash
# Installs each package in an empty place, puts it in front of a server, and asks it: the wheel in an
# empty venv, the .deb unpacked, the image as a container. Prints a line for each.
#
#   packages.sh [wheel|deb|image …]      all of them unless named
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; rm -rf "$work"' EXIT
free() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
until_up() { # URL
  for _ in $(seq 300); do curl --silent --fail --output /dev/null "$1" && return; sleep 0.2; done
  echo "nobody answers at $1" >&2
  return 1
}
# The answer that the proxy at a port gives; every package answers the same.
asked() {
  curl --silent --fail "http://127.0.0.1:$1/v1/completions" --header 'content-type: application/json' \
    --data '{"model":"toy","prompt":"fn main() {","max_tokens":16,"temperature":0}' |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["usage"]["completion_tokens"], "tokens")'
}

# The server behind it: the bundled target.
backend=$(free)
FORETELL_CACHE=$PWD/.cache "${FORETELL:-target/dist/foretell}" target --model onnx/models/target --name toy --listen "127.0.0.1:$backend" \
  --log-level error >"$work/target.log" &
pids+=($!)
until_up "http://127.0.0.1:$backend/health"

serves() { # NAME PORT ADMIN: asks, and says how long since $began
  until_up "http://127.0.0.1:$3/readyz"
  echo "$1: $(asked "$2") after $((SECONDS - began)) s"
}

wheel() {
  began=$SECONDS
  python3 -m venv "$work/venv"
  "$work/venv/bin/pip" install --quiet --disable-pip-version-check target/wheel/dist/foretell-*.whl
  local port admin
  port=$(free) admin=$(free)
  (cd "$work" && exec env -i PATH=/usr/bin:/bin HOME="$work" "$work/venv/bin/foretell" serve --backend "http://127.0.0.1:$backend" \
    --listen "127.0.0.1:$port" --admin "127.0.0.1:$admin" 2>"$work/wheel.log") &
  pids+=($!)
  serves wheel "$port" "$admin"
  # Its own ONNX Runtime and models, and nothing of the repository.
  (cd "$work" && env -i PATH=/usr/bin:/bin HOME="$work" "$work/venv/bin/foretell" demo --once --prompts 1 >"$work/demo.log")
  echo "wheel: demo ended after $((SECONDS - began)) s"
}

deb() {
  began=$SECONDS
  local root=$work/deb port admin
  port=$(free) admin=$(free)
  dpkg-deb --extract target/debian/foretell_*.deb "$root"
  [ -f "$root/lib/systemd/system/foretell.service" ]
  "$root/usr/bin/foretell" check --config "$root/etc/foretell/foretell.yaml"
  "$root/usr/bin/foretell" serve --config "$root/etc/foretell/foretell.yaml" --backend "http://127.0.0.1:$backend" \
    --listen "127.0.0.1:$port" --admin "127.0.0.1:$admin" 2>"$work/deb.log" &
  pids+=($!)
  serves deb "$port" "$admin"
}

# The image's own entry point in a container; buildah needs neither cgroups nor a daemon.
image() {
  began=$SECONDS
  local port admin container entry
  port=$(free) admin=$(free)
  export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
  container=$(buildah from --quiet oci-archive:target/image/foretell-oci.tar)
  entry=$(buildah inspect --format '{{index .OCIv1.Config.Entrypoint 0}}' "$container")
  buildah run "$container" -- "$entry" serve --backend "http://127.0.0.1:$backend" \
    --listen "127.0.0.1:$port" --admin "127.0.0.1:$admin" 2>"$work/image.log" &
  pids+=($!)
  serves image "$port" "$admin"
  # The container ends with its program.
  curl --silent --fail --output /dev/null --request POST "http://127.0.0.1:$admin/api/drain" || true
  kill %% 2>/dev/null || true
  wait $! 2>/dev/null || true
  buildah rm "$container" >/dev/null
}

for package in "${@:-wheel deb image}"; do
  for each in $package; do "$each"; done
done
