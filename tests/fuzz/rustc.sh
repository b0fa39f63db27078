#!/bin/sh
# The compiler with the coverage that libFuzzer follows, for Cargo's RUSTC_WORKSPACE_WRAPPER. Crates
# outside of this workspace are compiled as for the tests, and shared with them.
case " $* " in
  *" --crate-name foretell "* | *" --crate-name foretell_drafts "* | *" --crate-name foretell_fuzz "*)
    set -- "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
      -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
      -Cllvm-args=-sanitizer-coverage-trace-compares ;;
esac
exec "$@"
