//! Benchmarks and comparisons.
