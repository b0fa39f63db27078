//! The proxy over real sockets, in front of fake engines and of a target whose every logit is
//! known.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use foretell_fakes::{self as fakes, wire};

mod bench;
mod bent;
mod client;
mod demo;
mod dialects;
#[path = "../../src/drafts/tests/client.rs"]
mod drafts_client;
mod end_to_end;
mod engine_faults;
mod fleet;
mod gateway;
mod groups;
mod parsers;
mod probe;
mod reasons;
mod reload;
mod store;
mod structured;
#[allow(clippy::needless_pass_by_value)] // `json!` at the call reads best
mod target;
mod text_only;
mod traces;
mod transparent;
