//! Paths in a model folder, for every exporter. Needs no ONNX Runtime: configuration checks use it.

use std::fs;
use std::path::{Path, PathBuf};

/// Paths of a graph in its folder, in search order: Foretell's exports, optimum and the builder of
/// onnxruntime-genai, then onnx-community, then optimum before it exported every decoder as one
/// graph.
const GRAPHS: [&str; 4] =
    ["model.onnx", "onnx/model.onnx", "decoder_model_merged.onnx", "onnx/decoder_model_merged.onnx"];

/// A folder has no graph, or several and none is identifiable as the one to use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoGraph {
    #[error("no such folder")]
    Folder,
    #[error(
        "which ONNX graph? Expected {}, or a single file that ends in .onnx; found {}",
        GRAPHS.join(", "),
        listed(.0)
    )]
    Graphs(
        /// The graphs found, relative to the folder.
        Vec<String>,
    ),
}

fn listed(found: &[String]) -> String {
    if found.is_empty() { "none".to_owned() } else { found.join(", ") }
}

/// The graph of a folder: the one that `genai_config.json` names, else one of the usual names, else
/// the only one in it or in its folder `onnx`.
///
/// # Errors
/// There is none, or there are several and none has a usual name.
pub fn graph(folder: &Path) -> Result<PathBuf, NoGraph> {
    if !folder.is_dir() {
        return Err(NoGraph::Folder);
    }
    let named = named(&folder.join("genai_config.json"));
    let known = named.iter().map(String::as_str).chain(GRAPHS);
    if let Some(path) = known.map(|name| folder.join(name)).find(|path| path.is_file()) {
        return Ok(path);
    }
    let there: Vec<PathBuf> = ["", "onnx"].iter().flat_map(|inner| graphs(&folder.join(inner))).collect();
    if let [only] = there.as_slice() {
        return Ok(only.clone());
    }
    let name = |path: &PathBuf| path.strip_prefix(folder).unwrap_or(path).display().to_string();
    Err(NoGraph::Graphs(there.iter().map(name).collect()))
}

/// The file that describes a foreign model: the file that the builder of onnxruntime-genai writes,
/// else `config.json`.
pub fn description(folder: &Path) -> PathBuf {
    let genai = folder.join("genai_config.json");
    if genai.is_file() { genai } else { folder.join("config.json") }
}

/// The graph that a `genai_config.json` names; `None` if it cannot be read, which is reported when
/// it is opened.
fn named(path: &Path) -> Option<String> {
    let config: serde_json::Value = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    Some(config.pointer("/model/decoder/filename")?.as_str()?.to_owned())
}

/// The files of a folder that end in `.onnx`, by name. A folder that cannot be read has none.
fn graphs(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "onnx")).collect();
    found.sort();
    found
}
