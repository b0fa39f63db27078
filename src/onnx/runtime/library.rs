//! Finds the shared library of ONNX Runtime and starts its environment, once per process.
//!
//! The library is loaded at run time and not linked, so that the proxy starts and passes requests
//! through on a machine without it: then model drafters are unavailable, with a message that lists
//! the searched paths.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ort::environment::Environment;
use ort::logging::LogLevel;
use parking_lot::Mutex;

use crate::open_error::LibraryError;

/// The version that `onnx/fetch.sh` unpacks.
pub const VERSION: &str = "1.31.1";

/// Inputs of the search; a value, so that the search can be tested.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// Value of `ORT_DYLIB_PATH`.
    pub named: Option<PathBuf>,
    pub binary: Option<PathBuf>,
    /// Value of `FORETELL_CACHE`.
    pub cache: Option<PathBuf>,
    pub directory: Option<PathBuf>,
    /// `XDG_CACHE_HOME`, or `.cache` in the home directory.
    pub user_cache: Option<PathBuf>,
}

impl Surroundings {
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

    /// Paths that may be the library, best first: next to the binary, in the Python environment
    /// that the binary was installed in, then the caches that `make` fills.
    pub fn candidates(&self) -> Vec<PathBuf> {
        let versioned = format!("libonnxruntime.so.{VERSION}");
        let unpacked = PathBuf::from(format!("onnxruntime-{VERSION}")).join("lib");
        let mut found = Vec::new();
        if let Some(folder) = self.binary.as_deref().and_then(Path::parent) {
            let sibling = folder.parent().unwrap_or(folder).join("lib");
            found.extend([sibling.join(&versioned), sibling.join("libonnxruntime.so")]);
        }
        found.extend(self.python());
        found.extend(self.caches().into_iter().map(|cache| cache.join(&unpacked).join(&versioned)));
        found
    }

    /// The libraries of the package `onnxruntime` in the environment of `PREFIX/bin/foretell`, the
    /// newest first.
    fn python(&self) -> Vec<PathBuf> {
        let prefix = self.binary.as_deref().and_then(|binary| binary.parent()?.parent());
        let Some(prefix) = prefix else { return Vec::new() };
        let folders = entries(&prefix.join("lib"), "python3");
        let packages = folders
            .iter()
            .flat_map(|python| ["site-packages", "dist-packages"].map(|name| python.join(name)));
        let mut found: Vec<PathBuf> = packages
            .flat_map(|packages| entries(&packages.join("onnxruntime/capi"), "libonnxruntime.so."))
            .collect();
        found.reverse();
        found
    }

    /// The configured cache, else those of the working directory, of the checkout that the binary
    /// was built in, and of the user.
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

    /// The path of the library: the configured one, else the first candidate that exists.
    pub fn find(&self) -> Result<PathBuf, LibraryError> {
        if let Some(named) = &self.named {
            return if named.is_file() { Ok(named.clone()) } else { Err(LibraryError::Named(named.clone())) };
        }
        let searched = self.candidates();
        searched.iter().find(|path| path.is_file()).cloned().ok_or(LibraryError::Missing { searched })
    }
}

/// Files and folders of a folder whose names begin so, sorted; none if it cannot be read.
fn entries(folder: &Path, begin: &str) -> Vec<PathBuf> {
    let listed = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = listed
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(begin))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

/// The started runtime and its path.
#[derive(Clone, Debug)]
pub struct Library {
    /// ONNX Runtime's environment, shared by all sessions.
    pub environment: Environment,
    /// The file that was loaded.
    pub path: PathBuf,
}

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
        .with_logger(Arc::new(|level, _, _, position, message| logged(level, position, message)))
        .with_telemetry(false)
        .build()
        .map_err(|error| unfit(error.to_string()))?;
    let library = Library { environment, path };
    *loaded = Some(library.clone());
    Ok(library)
}

/// Passes the runtime's messages to the log; its default is standard error.
fn logged(level: LogLevel, position: &str, message: &str) {
    match level {
        LogLevel::Verbose | LogLevel::Info => tracing::trace!(position, "ONNX Runtime: {message}"),
        LogLevel::Warning => tracing::warn!(position, "ONNX Runtime: {message}"),
        LogLevel::Error | LogLevel::Fatal => tracing::error!(position, "ONNX Runtime: {message}"),
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
    fn the_library_of_the_python_environment_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let capi = folder.path().join("lib/python3.12/site-packages/onnxruntime/capi");
        std::fs::create_dir_all(&capi).unwrap();
        let library = capi.join(format!("libonnxruntime.so.{VERSION}"));
        std::fs::write(&library, "").unwrap();
        let binary = Some(folder.path().join("bin/foretell"));
        assert_eq!(Surroundings { binary, ..Surroundings::default() }.find().unwrap(), library);
    }

    #[test]
    fn the_library_beside_the_binary_precedes_the_cache() {
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
        let sibling = folder.path().join("app/lib");
        std::fs::create_dir_all(&sibling).unwrap();
        std::fs::write(sibling.join(&file), "").unwrap();
        assert_eq!(surroundings.find().unwrap(), sibling.join(&file));
    }

    #[test]
    fn a_missing_library_names_every_searched_path() {
        let surroundings = Surroundings {
            binary: Some(PathBuf::from("/nowhere/app/bin/foretell")),
            cache: Some(PathBuf::from("/nowhere/cache")),
            ..Surroundings::default()
        };
        let message = surroundings.find().unwrap_err().to_string();
        for path in ["/nowhere/app/lib/", "/nowhere/cache/onnxruntime-", "make"] {
            assert!(message.contains(path), "{message}");
        }
    }
}
