//! Finds the shared library of ONNX Runtime and starts its environment, once per process.
//!
//! The library is loaded at run time and not linked, so that the proxy starts and relays on a machine that
//! has none: then model drafters are missing, with a message that lists where it was searched.

use std::env;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ort::environment::Environment;
use ort::logging::LogLevel;
use parking_lot::Mutex;

/// The version that `onnx/fetch.sh` unpacks.
pub const VERSION: &str = "1.31.1";

/// Why there is no ONNX Runtime.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// `ORT_DYLIB_PATH` names a file that is not there.
    #[error("ORT_DYLIB_PATH names {0}, which does not exist")]
    Named(PathBuf),
    /// It is nowhere that was searched.
    #[error(
        "ONNX Runtime was not found; `make` fetches it, or set ORT_DYLIB_PATH; searched:{}",
        list(searched)
    )]
    Missing {
        /// The files that were looked for, in order.
        searched: Vec<PathBuf>,
    },
    /// A file was found that is no ONNX Runtime of a version that fits.
    #[error("{path} cannot be used as ONNX Runtime: {reason}")]
    Unfit {
        /// Path of the library.
        path: PathBuf,
        /// The loader's error.
        reason: String,
    },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().fold(String::new(), |mut text, path| {
        let _ = write!(text, "\n  {}", path.display());
        text
    })
}

/// What the search looks at; a value, so that the search can be tested.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// Value of `ORT_DYLIB_PATH`.
    pub named: Option<PathBuf>,
    /// Path of the running binary.
    pub binary: Option<PathBuf>,
    /// Value of `FORETELL_CACHE`.
    pub cache: Option<PathBuf>,
    /// The working directory.
    pub directory: Option<PathBuf>,
    /// `XDG_CACHE_HOME`, or `.cache` in the home directory.
    pub user_cache: Option<PathBuf>,
}

impl Surroundings {
    /// The surroundings of this process.
    pub fn here() -> Self {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self {
            named: variable("ORT_DYLIB_PATH"),
            binary: env::current_exe().ok(),
            cache: variable("FORETELL_CACHE"),
            directory: env::current_dir().ok(),
            user_cache: variable("XDG_CACHE_HOME")
                .or_else(|| variable("HOME").map(|home| home.join(".cache"))),
        }
    }

    /// The files that may be the library, best first: beside the binary, then the caches that `make` fills.
    pub fn candidates(&self) -> Vec<PathBuf> {
        let versioned = format!("libonnxruntime.so.{VERSION}");
        let unpacked = PathBuf::from(format!("onnxruntime-{VERSION}")).join("lib");
        let mut found = Vec::new();
        if let Some(folder) = self.binary.as_deref().and_then(Path::parent) {
            let beside = folder.parent().unwrap_or(folder).join("lib");
            found.extend([beside.join(&versioned), beside.join("libonnxruntime.so")]);
        }
        found.extend(self.caches().into_iter().map(|cache| cache.join(&unpacked).join(&versioned)));
        found
    }

    /// The cache that is named, else those of the working directory, of the checkout that the binary was
    /// built in, and of the user.
    fn caches(&self) -> Vec<PathBuf> {
        let mut caches: Vec<PathBuf> = self.cache.iter().cloned().collect();
        caches.extend(self.directory.iter().map(|directory| directory.join(".cache")));
        let above = self.binary.iter().flat_map(|binary| binary.ancestors().skip(1));
        caches.extend(
            above.filter(|folder| folder.join("Cargo.toml").is_file()).map(|root| root.join(".cache")),
        );
        caches.extend(self.user_cache.iter().map(|cache| cache.join("foretell")));
        let mut seen = std::collections::HashSet::new();
        caches.retain(|cache| seen.insert(cache.clone()));
        caches
    }

    /// The path of the library: the one that is named, else the first candidate that exists.
    pub fn find(&self) -> Result<PathBuf, LibraryError> {
        if let Some(named) = &self.named {
            return if named.is_file() { Ok(named.clone()) } else { Err(LibraryError::Named(named.clone())) };
        }
        let searched = self.candidates();
        searched.iter().find(|path| path.is_file()).cloned().ok_or(LibraryError::Missing { searched })
    }
}

/// The started runtime and where it came from.
#[derive(Clone, Debug)]
pub struct Library {
    /// ONNX Runtime's environment, shared by all sessions.
    pub environment: Environment,
    /// The file that was loaded.
    pub path: PathBuf,
}

/// Loads the library, or answers with the one that is loaded.
pub fn load() -> Result<Library, LibraryError> {
    static LOADED: Mutex<Option<Library>> = Mutex::new(None);
    let mut loaded = LOADED.lock();
    if let Some(library) = loaded.as_ref() {
        return Ok(library.clone());
    }
    let path = Surroundings::here().find()?;
    let unfit = |reason: String| LibraryError::Unfit { path: path.clone(), reason };
    let builder = ort::init_from(&path).map_err(|error| unfit(error.to_string()))?;
    let environment = builder
        .with_name("foretell")
        .with_logger(Arc::new(|level, _, _, place, message| logged(level, place, message)))
        .with_telemetry(false)
        .build()
        .map_err(|error| unfit(error.to_string()))?;
    let library = Library { environment, path };
    *loaded = Some(library.clone());
    Ok(library)
}

/// Passes the runtime's own messages on to the log; by itself it would write to standard error.
fn logged(level: LogLevel, place: &str, message: &str) {
    match level {
        LogLevel::Verbose | LogLevel::Info => tracing::trace!(place, "ONNX Runtime: {message}"),
        LogLevel::Warning => tracing::warn!(place, "ONNX Runtime: {message}"),
        LogLevel::Error | LogLevel::Fatal => tracing::error!(place, "ONNX Runtime: {message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_library_is_taken_or_refused_but_never_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let named = folder.path().join("own.so");
        let surroundings = Surroundings { named: Some(named.clone()), ..Surroundings::default() };
        assert!(matches!(surroundings.find(), Err(LibraryError::Named(path)) if path == named));
        std::fs::write(&named, "").unwrap();
        assert_eq!(surroundings.find().unwrap(), named);
    }

    #[test]
    fn the_library_beside_the_binary_goes_before_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let file = format!("libonnxruntime.so.{VERSION}");
        let cached = folder.path().join(format!("work/.cache/onnxruntime-{VERSION}/lib"));
        std::fs::create_dir_all(&cached).unwrap();
        std::fs::write(cached.join(&file), "").unwrap();
        let surroundings = Surroundings {
            binary: Some(folder.path().join("app/bin/foretell")),
            directory: Some(folder.path().join("work")),
            ..Surroundings::default()
        };
        assert_eq!(surroundings.find().unwrap(), cached.join(&file));
        let beside = folder.path().join("app/lib");
        std::fs::create_dir_all(&beside).unwrap();
        std::fs::write(beside.join(&file), "").unwrap();
        assert_eq!(surroundings.find().unwrap(), beside.join(&file));
    }

    #[test]
    fn a_missing_library_names_every_place_that_was_searched() {
        let surroundings = Surroundings {
            binary: Some(PathBuf::from("/nowhere/app/bin/foretell")),
            cache: Some(PathBuf::from("/nowhere/cache")),
            ..Surroundings::default()
        };
        let message = surroundings.find().unwrap_err().to_string();
        for place in ["/nowhere/app/lib/", "/nowhere/cache/onnxruntime-", "make"] {
            assert!(message.contains(place), "{message}");
        }
    }
}
