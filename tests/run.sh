#!/usr/bin/env bash
# The Rust tests: by cargo-nextest where it is installed, else by cargo itself. Arguments are passed
# on.
set -euo pipefail
cd "$(dirname "$0")/.."
# All tests run even if one fails. (nextest refuses the two arguments together.)
case " $* " in *" --no-run "*) ;; *) set -- --no-fail-fast "$@" ;; esac
if cargo nextest --version >/dev/null 2>&1; then
  exec cargo nextest run "$@"
fi
case " $* " in *" --lib "*) ;; *) set -- --lib --bins --tests --examples "$@" ;; esac
exec cargo test "$@"
