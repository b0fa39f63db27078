//! The binary: the allocator and exit codes, nothing else.

use std::process::ExitCode;

/// Gives memory back to the system soon after it is freed: what one burst of large bodies took is not kept for good, as
/// the system's own allocator does. (Measured over 200 unfinished bodies of 8 MiB and a limit of 128 MiB: 174 MiB more
/// than at the start at the most; jemalloc 212, glibc 247 and most of that for good.) Without huge pages: with them, 200
/// event streams took 53 MiB instead of 29.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    foretell::cli::main()
}
