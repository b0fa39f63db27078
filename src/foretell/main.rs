//! The binary: the allocator and exit codes, nothing else.

use std::process::ExitCode;

/// Returns memory to the system soon after it is freed, where the system's own allocator would keep
/// for good what one burst of large bodies took. (Measured with 200 unfinished bodies of 8 MiB and
/// a limit of 128 MiB: at most 174 MiB more than at the start; jemalloc 212, glibc 247, most of
/// which it never returned.) Without huge pages: with them, 200 event streams took 53 MiB instead
/// of 29.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    foretell::cli::main()
}
