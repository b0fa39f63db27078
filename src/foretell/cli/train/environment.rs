//! The trainer's programs and the Python that runs them, in the user's cache.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::super::{complain, progress};

/// The trainer and the files that it imports, by their paths below the repository's `onnx` folder.
const PROGRAMS: &[(&str, &str)] = &[
    ("train/traffic.py", include_str!("../../../../onnx/train/traffic.py")),
    ("train/traffic_data.py", include_str!("../../../../onnx/train/traffic_data.py")),
    ("train/traffic_report.py", include_str!("../../../../onnx/train/traffic_report.py")),
    ("train/model.py", include_str!("../../../../onnx/train/model.py")),
    ("train/train.py", include_str!("../../../../onnx/train/train.py")),
    ("train/data.py", include_str!("../../../../onnx/train/data.py")),
    ("train/graph.py", include_str!("../../../../onnx/train/graph.py")),
    ("export/bundle.py", include_str!("../../../../onnx/export/bundle.py")),
    ("train/requirements.txt", include_str!("../../../../onnx/train/requirements.txt")),
];

/// Cause for which the trainer cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// There is no cache folder.
    #[error("no cache folder: set FORETELL_CACHE")]
    NoCache,
    /// A file cannot be written.
    #[error("{0}: {1}")]
    File(String, io::Error),
    /// A program cannot be run.
    #[error("{0} cannot be run ({1}); name a Python with PyTorch, onnx and onnxruntime by --python")]
    Run(String, io::Error),
    /// The environment cannot be made.
    #[error("{0} failed; name a Python with PyTorch, onnx and onnxruntime by --python")]
    Failed(String),
}

/// The trainer, ready to be run.
pub struct Prepared {
    /// The Python to run it with.
    pub python: PathBuf,
    /// The trainer.
    pub script: PathBuf,
}

/// Writes the trainer into the cache, and makes its environment unless `python` is one.
pub fn prepare(python: Option<&Path>) -> Result<Prepared, EnvironmentError> {
    let cache = cache().ok_or(EnvironmentError::NoCache)?.join(concat!("train-", env!("CARGO_PKG_VERSION")));
    for (name, text) in PROGRAMS {
        let path = cache.join(name);
        let failed = |error| EnvironmentError::File(path.display().to_string(), error);
        path.parent().map_or(Ok(()), fs::create_dir_all).map_err(failed)?;
        fs::write(&path, text).map_err(failed)?;
    }
    let script = cache.join("train/traffic.py");
    let python = match python {
        Some(python) => python.to_owned(),
        None => environment(&cache)?,
    };
    Ok(Prepared { python, script })
}

/// The Python of an environment with the pinned packages, which is made on first use.
fn environment(cache: &Path) -> Result<PathBuf, EnvironmentError> {
    let venv = cache.join("venv");
    let (python, done) = (venv.join("bin/python"), venv.join("done"));
    if !done.exists() {
        let into = venv.display();
        complain(&format_args!(
            "installing PyTorch for training, once (3 GB with its CUDA libraries), into {into}"
        ));
        let spinner = progress::spinner("installing");
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
        let requirements = cache.join("train/requirements.txt");
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "-r"]).arg(&requirements))?;
        fs::write(&done, "").map_err(|error| EnvironmentError::File(done.display().to_string(), error))?;
        spinner.finish_and_clear();
    }
    Ok(python)
}

fn run(command: &mut Command) -> Result<(), EnvironmentError> {
    let program = command.get_program().display().to_string();
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(EnvironmentError::Failed(format!("{program} for the training environment"))),
        Err(error) => Err(EnvironmentError::Run(program, error)),
    }
}

/// `FORETELL_CACHE`, else the user's cache.
fn cache() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user = || variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    variable("FORETELL_CACHE").or_else(|| Some(user()?.join("foretell")))
}
