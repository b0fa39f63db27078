#!/usr/bin/env bash
# The Rust tests: by cargo-nextest where it is installed, else by cargo itself. Arguments go to either.
set -euo pipefail
cd "$(dirname "$0")/.."
if cargo nextest --version >/dev/null 2>&1; then
  exec cargo nextest run --no-fail-fast "$@"
fi
case " $* " in *" --lib "*) ;; *) set -- --lib --bins --tests --examples "$@" ;; esac
exec cargo test --no-fail-fast "$@"
