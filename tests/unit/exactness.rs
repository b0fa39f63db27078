//! Exactness of the core: its law by full enumeration, its text by identity with the plain run.

mod ahead;
mod backend;
mod bugs;
mod drawn;
mod greedy;
mod law;
mod lossy;
mod sampled;
mod seeded;
mod toy;
mod world;
