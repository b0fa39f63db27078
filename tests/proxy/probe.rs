//! Probes of purpose-built engines: their findings, their cost, and their effect on the proxy.

mod busy;
mod command;
mod cpu_build;
mod engines;
pub mod house;
mod serve;
