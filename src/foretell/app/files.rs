//! Opens every file that the settings name, before anything is started, and reports all problems
//! together; `check` and `serve` both use it.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use foretell_config::named::shown;
use foretell_config::problem::Refusal;
use foretell_config::process::Process;
use foretell_config::{Attempt, FileKind, Flags, Loaded, Named, Problem, Strings, attempt};
use foretell_net::fleet::{KeyFile, tls};
use foretell_onnx::folder;
use foretell_parsers::text::Tokenizer;
use foretell_proxy::learning::cipher::Cipher;
use foretell_wire::openai::GenerationConfig;

/// File name of a model's sampling defaults in its folder.
pub(super) const GENERATION_CONFIG: &str = "generation_config.json";
/// How a pointer of Git LFS begins.
const LFS_POINTER: &[u8; 34] = b"version https://git-lfs.github.com";

/// Reads all settings and opens all files that they name.
///
/// # Errors
/// Every problem found; with any of them nothing would start.
pub fn load(flags: &Flags, environment: &dyn Strings) -> Result<Loaded, Vec<Problem>> {
    let mut attempt = attempt(flags, environment);
    attempt.problems.extend(attempt.named.iter().filter_map(inspect));
    attempt.problems.extend(unrecorded(&attempt.process));
    attempt.problems.extend(no_backend(&attempt));
    if let Some(first) = attempt.files.first().map(|file| file.display().to_string()) {
        // Problems in the config file first, in the order of its lines; then the others in the
        // order found.
        attempt
            .problems
            .sort_by_key(|problem| (problem.file != first, (problem.file == first).then_some(problem.line)));
    }
    let mut loaded = attempt.done()?;
    loaded.warnings.extend(unsaved(&loaded.process));
    Ok(loaded)
}

/// The problem that the path of the folder of recordings is no folder.
fn unrecorded(process: &Process) -> Option<Problem> {
    let dir = &process.corpus.record.as_ref()?.dir;
    let refusal = Refusal::new("not a folder", "a folder, which is made if it does not exist");
    let taken = dir.exists() && !dir.is_dir();
    taken.then(|| Problem::new(process.shown_file(), None, "corpus.record.dir", refusal, shown(dir)))
}

/// Warning that the snapshot has no folder. The proxy serves without one.
fn unsaved(process: &Process) -> Option<String> {
    let file = process.corpus.snapshot.as_ref()?;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir())?;
    Some(format!("corpus.snapshot: no folder {}: nothing is stored over a restart", folder.display()))
}

/// The problem that no backend is configured.
fn no_backend(attempt: &Attempt) -> Option<Problem> {
    // Not reported in addition to other problems: the backend may be in a part that could not be
    // read.
    if !attempt.process.backends.is_empty() || !attempt.problems.is_empty() {
        return None;
    }
    let refusal = Refusal::sentence("no backend configured: add one under `backends`, or pass --backend URL");
    Some(Problem::new(attempt.process.shown_file(), None, "backends", refusal, String::new()))
}

/// The problem with a named file, if it has one.
fn inspect(named: &Named) -> Option<Problem> {
    let path = &named.path;
    match &named.kind {
        FileKind::Secret => {
            let refused = KeyFile::open(path).err()?;
            Some(named.problem(&refused.to_string(), "a file with a token in it"))
        }
        FileKind::Key => {
            let refused = Cipher::from_file(path).err()?;
            Some(named.problem(&refused.to_string(), "64 hexadecimal digits (openssl rand -hex 32)"))
        }
        FileKind::Authorities => {
            let refused = tls::authorities(path).err()?;
            Some(named.problem(&refused.detail(), "certificates in PEM"))
        }
        FileKind::Chain => {
            let refused = tls::certificates(path).err()?;
            Some(named.problem(&refused.detail(), "certificates in PEM"))
        }
        FileKind::KeyOf(chain) => {
            let refused = tls::key_of(chain, path).err()?;
            Some(named.problem(&refused.detail(), "the private key of the certificate, in PEM"))
        }
        FileKind::Tokenizer => tokenizer(named, path),
        FileKind::GenerationConfig => generation_config(named),
        FileKind::Drafter { tokenizer } => drafter(named, *tokenizer),
        // Policies are read and checked together with the settings.
        FileKind::Policies => None,
    }
}

fn tokenizer(named: &Named, path: &Path) -> Option<Problem> {
    let refused = Tokenizer::from_file(path).err()?;
    let refused = what_else(path).map_or_else(|| refused.to_string(), str::to_owned);
    let found = named.problem(&refused, "a tokenizer.json, or a folder with one");
    Some(Problem { got: shown(path), ..found })
}

/// The known cause for which a tokenizer cannot be read, and the remedy.
fn what_else(path: &Path) -> Option<&'static str> {
    let file = in_folder(path, "tokenizer.json");
    let mut begin = [0; LFS_POINTER.len()];
    let read = File::open(&file).and_then(|mut file| file.read_exact(&mut begin));
    if read.is_ok() && begin == *LFS_POINTER {
        return Some(
            "the file is a pointer of Git LFS, not the tokenizer: run `git lfs pull` in the folder, or download the file",
        );
    }
    let has = |name: &str| path.join(name).is_file();
    if file.exists() {
        None
    } else if has("tekken.json") {
        Some(
            "the folder has a tekken.json and no tokenizer.json: take the tokenizer.json of the model's version for transformers",
        )
    } else if has("tokenizer.model") {
        Some(
            "the folder has a tokenizer.model and no tokenizer.json: make one with transformers, \
             `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`",
        )
    } else {
        None
    }
}

fn generation_config(named: &Named) -> Option<Problem> {
    let read = std::fs::read(in_folder(&named.path, GENERATION_CONFIG)).map_err(|error| error.to_string());
    let read = read.and_then(|json| GenerationConfig::read(&json).map_err(|error| error.to_string()));
    Some(named.problem(&read.err()?, "a generation_config.json, or a folder with one"))
}

/// The file of this name in a folder; a path that is no folder is the file.
pub(super) fn in_folder(path: &Path, name: &str) -> PathBuf {
    if path.is_dir() { path.join(name) } else { path.to_owned() }
}

/// The problem with the folder of a drafter, which may be the export of another tool, if its files
/// cannot be read. The runtime checks whether the graph runs.
fn drafter(named: &Named, with_tokenizer: bool) -> Option<Problem> {
    let folder = &named.path;
    let allowed = "a folder with an ONNX graph, config.json or genai_config.json, and tokenizer.json";
    let graph = match folder::graph(folder) {
        Ok(graph) => graph,
        Err(none) => return Some(named.problem(&none.to_string(), allowed)),
    };
    let found = described(named, &[graph, folder::description(folder)], allowed);
    found.or_else(|| with_tokenizer.then(|| tokenizer(named, folder)).flatten())
}

/// The problem with a graph and its description.
fn described(named: &Named, files: &[PathBuf; 2], allowed: &str) -> Option<Problem> {
    let problem = |file: &Path, error: &dyn std::fmt::Display| {
        let name = file.strip_prefix(&named.path).unwrap_or(file).display();
        Some(named.problem(&format!("{name}: {error}"), allowed))
    };
    for file in files {
        if let Err(error) = readable(file) {
            return problem(file, &error);
        }
    }
    let [_, config] = files;
    description(config).err().and_then(|error| problem(config, &error))
}

/// Opens the file and reads its first byte; an empty file is an error.
fn readable(path: &Path) -> io::Result<()> {
    let mut byte = [0];
    match File::open(path)?.read(&mut byte)? {
        0 => Err(io::Error::new(io::ErrorKind::InvalidData, "the file is empty")),
        _ => Ok(()),
    }
}

fn description(path: &Path) -> Result<(), String> {
    let text = std::fs::read(path).map_err(|error| error.to_string())?;
    let read: Result<serde_json::Map<String, serde_json::Value>, _> = serde_json::from_slice(&text);
    read.map(|_| ()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn named(kind: FileKind, path: PathBuf) -> Named {
        Named { path, kind, file: "f.yaml".into(), line: Some(7), setting: "a.b".into() }
    }

    #[test]
    fn sampling_defaults_are_numbers_in_a_file_or_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("generation_config.json");
        let problem = |path: &Path| inspect(&named(FileKind::GenerationConfig, path.to_owned()));
        assert!(problem(folder.path()).is_some(), "there is none");
        for (content, wrong) in [(r#"{"top_k": 20}"#, false), (r#"{"top_p": "0.8"}"#, true), ("[]", true)] {
            std::fs::write(&path, content).unwrap();
            assert_eq!(problem(folder.path()).is_some(), wrong, "{content}");
            assert_eq!(problem(&path).is_some(), wrong, "{content}");
        }
    }

    #[test]
    fn a_secret_of_nothing_but_space_is_none_and_its_content_is_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        for (content, wrong) in [("", true), (" \r\n\t", true), ("a\nb\n", true), ("s3cret\n", false)] {
            std::fs::write(&path, content).unwrap();
            let found = inspect(&named(FileKind::Secret, path.clone()));
            assert_eq!(found.is_some(), wrong, "{content:?}");
        }
        std::fs::write(&path, "very\u{7}secret").unwrap();
        let found = inspect(&named(FileKind::Secret, path)).unwrap().to_string();
        assert!(found.starts_with("f.yaml:7: a.b: ") && !found.contains("very"), "{found}");
    }

    #[test]
    fn the_bundled_models_are_good_and_a_folder_without_a_graph_is_not() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("onnx/models");
        for model in ["target", "draft-same", "draft-other"] {
            for kind in [FileKind::Drafter { tokenizer: true }, FileKind::Tokenizer] {
                assert_eq!(inspect(&named(kind, models.join(model))), None, "{model}");
            }
        }
        let found = inspect(&named(FileKind::Drafter { tokenizer: true }, models)).unwrap().to_string();
        assert!(found.contains("found none"), "{found}");
    }

    #[test]
    fn exports_of_other_tools_are_good_for_drafters() {
        let exports = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exports");
        for export in ["optimum/fp32", "optimum/hub", "optimum/merged", "genai/int4"] {
            let kind = FileKind::Drafter { tokenizer: true };
            assert_eq!(inspect(&named(kind, exports.join(export))), None, "{export}");
        }
        let none = named(FileKind::Drafter { tokenizer: false }, exports.join("optimum"));
        let found = inspect(&none).unwrap().to_string();
        assert!(found.contains("onnx/model.onnx") && found.contains("found none"), "{found}");
    }

    #[test]
    fn settings_replaced_by_a_flag_are_not_checked() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("foretell.yaml");
        let process = "version: 1\nbackends: [{ name: a, replicas: [\"http://h:1\"], connect: { tls: { ca: nowhere } } }]\n\
            listen: [{ address: \"127.0.0.1:0\", tls: { cert: no, key: no } }]\n";
        std::fs::write(&file, process).unwrap();
        let flags = Flags { config: Some(file.display().to_string()), ..Flags::default() };
        assert_eq!(load(&flags, &BTreeMap::new()).unwrap_err().len(), 3);
        let flags = Flags { backend: Some("http://h:1".into()), listen: Some("127.0.0.1:0".into()), ..flags };
        assert!(load(&flags, &BTreeMap::new()).is_ok());
    }

    #[test]
    fn the_cause_for_which_a_tokenizer_is_none_is_named_with_the_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        assert_eq!(what_else(folder.path()), None);
        put("tokenizer.model", "");
        assert!(what_else(folder.path()).unwrap().contains("save_pretrained"));
        put("tekken.json", "{}");
        assert!(what_else(folder.path()).unwrap().contains("a tekken.json and no tokenizer.json"));
        put("tokenizer.json", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n");
        for path in [folder.path().to_owned(), folder.path().join("tokenizer.json")] {
            assert!(what_else(&path).unwrap().contains("git lfs pull"));
        }
        put("tokenizer.json", "{}");
        assert_eq!(what_else(folder.path()), None);
    }
}
