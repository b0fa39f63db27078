//! Exactness of the core: its law by full enumeration, its text by identity with the plain run.

mod greedy;
mod law;
mod toy;
mod world;
