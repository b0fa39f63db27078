#!/usr/bin/env bash
# The numbers of docs/reliability.md, by parts; each prints a line per number and ends by itself.
#
#   tests/reliability/run.sh PART        quick | latency | memory | abuse | parsing | faults | lifecycle | tests | soak | all (all but soak)
#
# FORETELL names the binary. Exits 2 if a number is beyond its bound. `latency` needs nginx and wrk,
# `parsing` nginx (Debian packages), `tests` cargo-nextest or cargo. Loopback only.
set -uo pipefail
cd "$(dirname "$0")/../.."
part=${1:-all}
foretell=$(realpath "${FORETELL:-target/dist/foretell}") # scripts start it in other folders
here=tests/reliability
export PATH=$PATH:/usr/sbin PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=${PYTHONPATH:-}:.cache/python
beyond=0

run() { # a command, with its name
  echo "== $*"
  "$@" || { echo "   exit code $?"; beyond=2; }
}
script() { run python3 "$here/$1.py" --foretell "$foretell" "${@:2}"; }
rust() { # tests of a binary, by a filter
  if command -v cargo-nextest >/dev/null; then
    run cargo nextest run --test "$1" "${@:2}"
  else
    run cargo test --test "$1" -- "${@:2}"
  fi
}

quick() {
  script canaries --requests 5000
  script keep_alive --requests 1000 --idle 5000 --clients 500
  script drain --streams 100
}
latency() {
  run python3 tests/bench/passthrough.py --foretell "$foretell"
  script speed
}
memory() {
  script footprint
  run python3 $here/idle_streams.py --binary "$foretell" --count 4500
  run python3 $here/slow_heads.py --binary "$foretell" --count 9000
  script speculating
  script slow_reader
}
abuse() {
  script h2_abuse
  rust attack patience:: descriptors:: memory::
}
parsing() {
  script smuggling
  script bodies
  script grammars
  script bad_policies
  rust attack framing:: fields::
}
faults() {
  script canaries
  script keep_alive --idle 5000 --clients 2000
  script keep_alive --idle 20 --clients 60 --requests 20000
}
lifecycle() {
  script drain
  script restarts
  run python3 tests/bench/reload.py --foretell "$foretell" --changes 5
}
tests() {
  FORETELL_CASES=10000 rust pure exactness::
  FORETELL_CUTS=850 rust proxy end_to_end::partition
  rust proxy gateway:: fleet:: engine_faults:: reload:: end_to_end::faults
  rust unit config
}
soak() { script soak; }
all() { for one in latency memory abuse parsing faults lifecycle tests; do "$one"; done; }

case $part in
  quick | latency | memory | abuse | parsing | faults | lifecycle | tests | soak | all) "$part" ;;
  *) echo "no part $part" >&2; exit 64 ;;
esac
exit $beyond
