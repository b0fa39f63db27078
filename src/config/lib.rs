//! The config file and the policies: raw text to validated values.
//!
//! A setting is a field of a struct. `schema` makes a JSON Schema of the structs, `check` compares
//! a file with it and finds every error at once, serde reads what is good, and `settle` of each
//! section judges the rules between settings. Reading files and the environment is a thin layer
//! around it. A flag takes precedence over `FORETELL_<FLAG>`, that over the file, and that over the
//! default.

pub mod at;
pub mod check;
pub mod difference;
pub mod flags;
pub mod forms;
mod listeners;
pub mod load;
pub mod named;
pub mod policy;
pub mod problem;
pub mod problems;
pub mod process;
pub mod reference;
pub mod regular;
pub mod schema;
pub mod store;
mod store_url;
pub mod trained;
pub mod values;
pub mod variables;
mod warnings;
pub mod watch;
pub mod yaml;

pub use flags::Flags;
pub use load::{Attempt, Loaded, attempt, load, load_policies};
pub use named::{FileKind, Named};
pub use problem::Problem;
pub use process::Process;
pub use store::PolicyStore;
pub use variables::Strings;
