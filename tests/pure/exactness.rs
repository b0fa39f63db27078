//! Exactness of the core: its output distribution by full enumeration, its text by identity with
//! plain decoding.

mod backend;
mod bugs;
mod distribution;
mod drawn;
mod greedy;
mod lossy;
mod seeded;
mod toy;
mod world;
