#!/usr/bin/env bash
# Fetches the dependencies of the status page's tests into .cache/page: playwright-core (pinned by
# package-lock.json) from npm, and Chromium from Debian where none is installed. Debian keeps only
# its current Chromium, so that one is not pinned; the tests print its version. Prints errors only.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
to="${FORETELL_CACHE:-$here/../../.cache}/page"
mkdir -p "$to"
fail() { printf 'tests/page/fetch.sh: %s\n' "$1" >&2; exit 1; }

command -v node >/dev/null && command -v npm >/dev/null || fail "needs node (20 or later) and npm: Debian packages nodejs and npm"
[ "$(node -p 'process.versions.node.split(".")[0]')" -ge 20 ] || fail "needs node 20 or later, got $(node --version)"

if ! cmp -s "$here/package-lock.json" "$to/package-lock.json" || [ ! -d "$to/node_modules/playwright-core" ]; then
  rm -rf "$to/package-lock.json" "$to/node_modules"
  cp "$here/package.json" "$to/"
  cp "$here/package-lock.json" "$to/package-lock.new.json"
  (cd "$to" && mv package-lock.new.json package-lock.json \
    && npm ci --ignore-scripts --no-audit --no-fund >npm.log 2>&1) \
    || { rm -f "$to/package-lock.json"; tail -5 "$to/npm.log" >&2; fail "playwright-core cannot be had from npm"; }
fi

# The name must not be that of a program: `command -v` would find the function.
browser() { [ -n "$(type -P chromium chromium-browser google-chrome "$to/debian/usr/bin/chromium")" ]; }
browser && exit 0
command -v apt-get >/dev/null || fail "needs Chromium: install it, or set CHROMIUM to its path"
if [ "$(id -u)" = 0 ]; then
  { apt-get update && apt-get install -y --no-install-recommends chromium; } >"$to/apt.log" 2>&1 \
    || { tail -5 "$to/apt.log" >&2; fail "Chromium cannot be had from Debian (package chromium)"; }
else
  # Without the right to install it, Chromium and its dependencies are unpacked into the cache.
  mkdir -p "$to/packages" "$to/debian"
  (cd "$to/packages" && apt-get install -s --no-install-recommends chromium | awk '/^Inst /{print $2}' | xargs apt-get download) \
    >"$to/apt.log" 2>&1 || { tail -5 "$to/apt.log" >&2; fail "Chromium cannot be had from Debian (package chromium)"; }
  for package in "$to"/packages/*.deb; do dpkg -x "$package" "$to/debian"; done
fi
browser || fail "Chromium was fetched but cannot be found"
