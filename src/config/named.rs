//! The files and folders that a process file names: where each is named, and what it has to hold.
//!
//! Parsing notes them and opens none. Whoever starts the proxy, or checks whether it would start, opens them all and
//! reports what is wrong at the place where they are named.

use std::path::{Path, PathBuf};

use super::problem::{Problem, Refusal};

/// What a named file has to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A token or a key; never nothing.
    Secret,
    /// Certificates of authorities, PEM.
    Authorities,
    /// A certificate chain, PEM.
    Chain,
    /// The private key of the certificate chain in this file, PEM.
    KeyOf(PathBuf),
    /// A `tokenizer.json`, or a folder with one.
    Tokenizer,
    /// The folder of a model that is served in this process.
    Model,
    /// The folder of a drafter.
    Drafter {
        /// Its tokenizer is in the folder too.
        tokenizer: bool,
    },
    /// The folder of the policies.
    Policies,
}

/// A file or folder that the process file names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// As written.
    pub path: PathBuf,
    /// What it has to hold.
    pub kind: FileKind,
    /// The process file, or the flag or variable that names it.
    pub file: String,
    /// The line there; flags and variables have none.
    pub line: Option<u64>,
    /// The place of the setting, such as `admin.token_file`.
    pub place: String,
}

impl Named {
    /// The problem that this file cannot be used.
    pub fn problem(&self, message: &str, allowed: impl Into<String>) -> Problem {
        let refusal = Refusal::new(message, allowed);
        Problem {
            file: self.file.clone(),
            line: self.line,
            path: self.place.clone(),
            message: refusal.message,
            allowed: refusal.allowed,
            got: shown(&self.path),
            suggestion: None,
        }
    }
}

/// A path as it is shown in a problem.
pub fn shown(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}
