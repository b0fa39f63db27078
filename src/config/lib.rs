//! The config file and the policies: raw text to validated values.
//!
//! Parsing is pure and finds every error at once; reading files and the environment is a thin layer
//! around it. A flag takes precedence over `FORETELL_<FLAG>`, that over the file, and that over the
//! default.

pub mod declared;
pub mod difference;
pub mod flags;
pub mod kind;
pub mod load;
pub mod named;
pub mod policy;
pub mod problem;
pub mod process;
pub mod read;
pub mod reference;
pub mod regular;
pub mod store;
pub mod trained;
pub mod values;
pub mod variables;
pub mod watch;
pub mod yaml;

pub use flags::{Flags, Strings};
pub use load::{Attempt, Loaded, attempt, load, load_policies};
pub use named::{FileKind, Named};
pub use problem::Problem;
pub use process::Process;
pub use store::PolicyStore;
