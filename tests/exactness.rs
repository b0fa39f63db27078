//! Exactness of the core: its law by full enumeration, its text by identity with the plain run.

#![allow(clippy::indexing_slicing, clippy::expect_used, clippy::panic, reason = "a test may fail")]

#[path = "exactness/backend.rs"]
mod backend;
#[path = "exactness/bugs.rs"]
mod bugs;
#[path = "exactness/greedy.rs"]
mod greedy;
#[path = "exactness/law.rs"]
mod law;
#[path = "exactness/seeded.rs"]
mod seeded;
#[path = "exactness/toy.rs"]
mod toy;
#[path = "exactness/world.rs"]
mod world;
