//! What a probe finds at engines that are made on purpose, what it costs them, and what the proxy makes of it.

mod command;
mod cpu_build;
mod engines;
mod house;
mod serve;
