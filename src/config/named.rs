//! The files and folders that a config file names: the setting of each, and its required content.
//!
//! Parsing records them and opens none. `serve` and `check` open them all (see `app::files`) and
//! report problems at the setting that names them.

use std::path::{Path, PathBuf};

use super::problem::{Problem, Refusal};

/// Required content of a named file or folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A token or key; an empty file is refused.
    Secret,
    /// A key of 64 hexadecimal digits.
    Key,
    /// Certificates of authorities (PEM).
    Authorities,
    /// A certificate chain (PEM).
    Chain,
    /// The private key (PEM) of the certificate chain in the file given here.
    KeyOf(PathBuf),
    /// A `tokenizer.json` file, or a folder that has one.
    Tokenizer,
    /// A `generation_config.json` file, or a folder that has one.
    GenerationConfig,
    /// The folder of a drafter model.
    Drafter {
        /// The folder must also have the tokenizer.
        tokenizer: bool,
    },
    /// The folder of the policy files.
    Policies,
}

/// A file or folder that the config file names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// The path as written in the setting.
    pub path: PathBuf,
    /// Its required content.
    pub kind: FileKind,
    /// The config file, or the flag or environment variable, that names it.
    pub file: String,
    /// Line in the config file; `None` for flags and variables.
    pub line: Option<u64>,
    /// Path of the setting, such as `admin.token_file`.
    pub setting: String,
}

impl Named {
    /// A problem with this file, reported where it is named.
    pub fn problem(&self, message: &str, allowed: impl Into<String>) -> Problem {
        let refusal = Refusal::new(message, allowed);
        Problem::new(&self.file, self.line, &self.setting, refusal, shown(&self.path))
    }
}

/// A path as shown in a problem.
pub fn shown(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}
