//! Sidecars that share what they measure over a real Redis or Valkey server, and each fault of it.

mod faults;
mod house;
mod sharing;
