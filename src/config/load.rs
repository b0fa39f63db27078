//! Reads config file and policy files and reports all problems together.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::flags::{Flags, Overrides};
use super::listeners::{clashing, looping};
use super::named::{FileKind, Named, shown};
use super::policy::{self, ParsedPolicy};
use super::problem::{DOCUMENT, Problem, Refusal};
use super::process::{self, Parsed, Process, ProcessFile};
use super::regular;
use super::trained;
use super::variables::Strings;
use super::warnings::{ineffective, inert, shadowed, unbelieved, unruled, unverified};
use super::yaml::FILE_BYTES;
use foretell_policy::{Drafter, Policy, PolicySet};

/// Config file that is read if none is named and this one exists.
const CONFIG_FILE: &str = "foretell.yaml";

/// Maximum number of policy files. Every request is compared with all of them in the worst case,
/// and each has time series of its own in the metrics.
const MAX_POLICIES: usize = 1_000;

/// The message for a drafter that a policy names and the config file does not declare.
pub const UNDECLARED: &str = "not declared under drafters of the config file";

/// The complete configuration, free of problems.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Settings of the config file, environment and flags.
    pub process: Process,
    /// The policies, in match order.
    pub policies: PolicySet,
    /// Every file that was read.
    pub files: Vec<PathBuf>,
    /// Settings that are allowed but have no effect or are not meant for production.
    pub warnings: Vec<String>,
}

/// Result of reading the configuration with or without problems.
#[derive(Clone, Debug, Default)]
pub struct Attempt {
    /// Settings of the config file, environment and flags; a setting with a problem has its
    /// default.
    pub process: Process,
    /// The policies without problems.
    pub policies: PolicySet,
    /// Every file that was read; the config file, if there is one, comes first.
    pub files: Vec<PathBuf>,
    /// Files and folders that the settings in force name.
    pub named: Vec<Named>,
    /// Settings that have no effect or are not meant for production.
    pub warnings: Vec<String>,
    /// Every problem, in the order of files and lines.
    pub problems: Vec<Problem>,
}

impl Attempt {
    /// The configuration with its warnings, if there is no problem.
    ///
    /// # Errors
    /// Every problem, if there is one.
    pub fn done(self) -> Result<Loaded, Vec<Problem>> {
        let Self { process, policies, files, mut warnings, problems, .. } = self;
        if !problems.is_empty() {
            return Err(problems);
        }
        warnings.extend(policies.policies().iter().filter_map(|policy| inert(policy)));
        warnings.extend(shadowed(&policies));
        Ok(Loaded { process, policies, files, warnings })
    }
}

/// Reads the config file and all policies.
///
/// # Errors
/// Every problem, in the order of files and lines.
pub fn load(flags: &Flags, environment: &dyn Strings) -> Result<Loaded, Vec<Problem>> {
    attempt(flags, environment).done()
}

/// Reads the config file and all policies, keeping the readable settings besides the problems.
pub fn attempt(flags: &Flags, environment: &dyn Strings) -> Attempt {
    let overrides = Overrides::new(flags, environment);
    let file = overrides.config().or_else(|| Some(PathBuf::from(CONFIG_FILE)).filter(|path| path.exists()));
    let mut parsed = Parsed::default();
    let mut source = None;
    if let Some(file) = &file {
        parsed = match read(file) {
            Ok(text) => {
                let parsed = process::parse_all(&file.display().to_string(), &text, environment);
                source = Some(ProcessFile { path: file.clone(), text });
                parsed
            }
            Err(problems) => Parsed { problems, ..Parsed::default() },
        };
    }
    let Parsed { mut process, mut named, mut warnings, mut problems } = parsed;
    let process_is_good = problems.is_empty();
    problems.extend(overrides.apply(&mut process).err().into_iter().flatten());
    named.retain(|named| overrides.leaves(&named.setting));
    named.extend(overrides.named());
    let folder = settle_policies(&overrides, file.as_deref(), &named, &mut process);
    let mut files: Vec<PathBuf> = file.iter().cloned().collect();
    let sources = sources(&process, &folder, &mut files, &mut problems);
    // With an unreadable config file every drafter would be reported as undeclared.
    let (policies, cautions) = parse_all(&sources, process_is_good.then_some(&process), &mut problems);
    process.policies_read = Some(fingerprint(&sources));
    process.policies_must_exist |= process.policies.is_dir();
    process.file = source;
    if process_is_good {
        problems.extend(clashing(&process));
        problems.extend(looping(&process));
    }
    warnings.extend(cautions);
    warnings.extend(unbelieved(&process));
    warnings.extend(unverified(&process));
    warnings.extend(unruled(&process, &sources));
    Attempt { process, policies, files, named, warnings, problems }
}

/// Source of the policy folder's setting: a file with a line, or a flag or variable.
#[derive(Clone, Debug, Default)]
struct FolderSource {
    file: String,
    line: Option<u64>,
    path: &'static str,
}

/// Determines the policy folder: a flag or variable first, then the config file's setting
/// (relative to that file's folder), then `policies` in the folder of the config file. A folder
/// that is named explicitly must exist.
fn settle_policies(
    overrides: &Overrides,
    file: Option<&Path>,
    named: &[Named],
    process: &mut Process,
) -> FolderSource {
    const PATH: &str = "policies.dir";
    if let Some(folder) = overrides.policies_source() {
        process.policies_must_exist = true;
        return FolderSource { file: folder.to_owned(), line: None, path: PATH };
    }
    let folder = file.and_then(Path::parent).unwrap_or(Path::new(""));
    process.policies = folder.join(&process.policies);
    match named.iter().find(|named| named.kind == FileKind::Policies) {
        Some(named) => {
            process.policies_must_exist = true;
            FolderSource { file: named.file.clone(), line: named.line, path: PATH }
        }
        None => FolderSource { file: process.policies.display().to_string(), line: None, path: PATH },
    }
}

/// The policy files as they are on disk now, as (path, text) in match order: the input of a reload.
///
/// # Errors
/// Every file that cannot be read, and a missing folder if it must exist.
pub fn policy_sources(process: &Process) -> Result<Vec<(String, String)>, Vec<Problem>> {
    let mut problems = Vec::new();
    let folder =
        FolderSource { file: process.policies.display().to_string(), line: None, path: "policies.dir" };
    let sources = sources(process, &folder, &mut Vec::new(), &mut problems);
    if problems.is_empty() { Ok(sources) } else { Err(problems) }
}

/// Reads and checks all policies again.
///
/// # Errors
/// Every problem, in the order of files and lines.
pub fn load_policies(process: &Process) -> Result<PolicySet, Vec<Problem>> {
    parse_policies(&policy_sources(process)?, process)
}

/// Parses policies and checks them against each other and the config file: unique names, declared
/// drafters.
///
/// # Errors
/// Every problem, in the order of files and lines.
pub fn parse_policies(sources: &[(String, String)], process: &Process) -> Result<PolicySet, Vec<Problem>> {
    parse_with_warnings(sources, process).map(|(policies, _)| policies)
}

/// As [`parse_policies`], with warnings: settings that are not meant for production, rules that
/// relax nothing, and a lack of files.
///
/// # Errors
/// Every problem, in the order of files and lines.
pub fn parse_with_warnings(
    sources: &[(String, String)],
    process: &Process,
) -> Result<(PolicySet, Vec<String>), Vec<Problem>> {
    let mut problems = Vec::new();
    let (policies, mut warnings) = parse_all(sources, Some(process), &mut problems);
    if !problems.is_empty() {
        return Err(problems);
    }
    warnings.extend(policies.policies().iter().filter_map(|policy| inert(policy)));
    warnings.extend(shadowed(&policies));
    warnings.extend(unruled(process, sources));
    Ok((policies, warnings))
}

/// A hash of files, as (path, text), that identifies them.
pub fn fingerprint(sources: &[(String, String)]) -> u64 {
    let mut hasher = DefaultHasher::new();
    sources.hash(&mut hasher);
    hasher.finish()
}

/// Reads the policy files. `files` receives their paths, the unreadable ones included.
fn sources(
    process: &Process,
    folder: &FolderSource,
    files: &mut Vec<PathBuf>,
    problems: &mut Vec<Problem>,
) -> Vec<(String, String)> {
    let missing = process.policies_must_exist && !process.policies.is_dir();
    if missing {
        let refusal = Refusal::new("no such folder", "a folder with policy files");
        problems.push(Problem::new(
            &folder.file,
            folder.line,
            folder.path,
            refusal,
            shown(&process.policies),
        ));
    }
    let paths = if missing { Ok(Vec::new()) } else { policy_files(&process.policies) };
    let paths = paths.unwrap_or_else(|found| {
        problems.extend(found);
        Vec::new()
    });
    if paths.len() > MAX_POLICIES {
        let refusal = Refusal::new("too many policy files", format!("at most {MAX_POLICIES}"));
        problems.push(Problem::new(&folder.file, folder.line, folder.path, refusal, paths.len().to_string()));
        return Vec::new();
    }
    let mut sources = Vec::new();
    let mut left = FILE_BYTES;
    for path in paths {
        match read_text(&path, left, "the policy files are too large together") {
            Ok(text) => {
                left = left.saturating_sub(text.len() as u64);
                sources.push((path.display().to_string(), text));
            }
            Err(found) => problems.extend(found),
        }
        files.push(path);
    }
    sources
}

/// The text of a regular file of at most `most` bytes.
fn read_text(path: &Path, most: u64, too_large: &str) -> Result<String, Vec<Problem>> {
    let (bytes, _) = regular::read(path, most).map_err(|error| match error.kind() {
        ErrorKind::FileTooLarge => self::too_large(path, too_large, &error.to_string()),
        _ => unreadable(path, &error),
    })?;
    let text = String::from_utf8(bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error));
    text.map_err(|error| unreadable(path, &error))
}

/// The policies without problems, and the warnings about their settings.
fn parse_all(
    sources: &[(String, String)],
    process: Option<&Process>,
    problems: &mut Vec<Problem>,
) -> (PolicySet, Vec<String>) {
    let (mut policies, mut warnings): (Vec<Policy>, _) = (Vec::new(), Vec::new());
    for (file, text) in sources {
        match policy::parse(file, text) {
            Ok(placed) => {
                problems.extend(against_others(file, &placed, &policies));
                problems.extend(process.into_iter().flat_map(|process| undeclared(file, &placed, process)));
                problems.extend(process.into_iter().flat_map(|process| shared(file, &placed, process)));
                warnings.extend(placed.warnings);
                warnings.extend(process.into_iter().flat_map(|process| ineffective(&placed.policy, process)));
                policies.push(placed.policy);
            }
            Err(found) => problems.extend(found),
        }
    }
    if sources.is_empty() {
        let built_in = policy::built_in().unwrap_or_else(|found| {
            problems.extend(found);
            PolicySet::default()
        });
        return (built_in, warnings);
    }
    (PolicySet::new(policies), warnings)
}

fn against_others(file: &str, placed: &ParsedPolicy, others: &[Policy]) -> Option<Problem> {
    let name = &placed.policy.name;
    let refusal = Refusal::new("not unique", "a name that no other policy has");
    let twin = others.iter().any(|other| other.name == *name);
    twin.then(|| Problem::new(file, Some(placed.name_line), "name", refusal, format!("{name:?}")))
}

fn undeclared(file: &str, placed: &ParsedPolicy, process: &Process) -> Vec<Problem> {
    let declared: Vec<&str> = process.drafters.keys().map(String::as_str).collect();
    let missing = |(index, drafter): (usize, &Drafter)| match drafter {
        Drafter::Model { model, .. } if !process.drafters.contains_key(model) => {
            let allowed = if declared.is_empty() { "none".to_owned() } else { declared.join("|") };
            let refusal = Refusal::new(UNDECLARED, allowed);
            let line = placed.drafter_lines.get(index).copied();
            let path = format!("drafters[{index}].model");
            Some(Problem::new(file, line, path, refusal.near(model, &declared), format!("{model:?}")))
        }
        _ => None,
    };
    placed.policy.drafters.iter().enumerate().filter_map(missing).collect()
}

/// Drafters that would repeat the texts of a tenant, on which they were trained, to another.
fn shared(file: &str, placed: &ParsedPolicy, process: &Process) -> Vec<Problem> {
    let tenants = placed.policy.matcher.tenants.as_deref();
    let problem = |(index, drafter): (usize, &Drafter)| {
        let Drafter::Model { model, shares: false, .. } = drafter else { return None };
        let folder = &process.drafters.get(model)?.path;
        let refusal = match trained::read(folder) {
            Ok(origin) if origin.as_ref().is_none_or(|origin| origin.stays_with(tenants)) => return None,
            Ok(_) => {
                let allowed = "match.tenants with the tenant of its texts alone, or i_accept_sharing: true";
                Refusal::new("trained on texts of other tenants", allowed)
            }
            Err(error) => Refusal::new("the origin of its texts cannot be read", error.to_string()),
        };
        let line = placed.drafter_lines.get(index).copied();
        Some(Problem::new(file, line, format!("drafters[{index}].model"), refusal, format!("{model:?}")))
    };
    placed.policy.drafters.iter().enumerate().filter_map(problem).collect()
}

/// The policy files of a folder, sorted by name; empty if the folder does not exist.
pub fn policy_files(dir: &Path) -> Result<Vec<PathBuf>, Vec<Problem>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        // A dangling link counts as present: it was meant to be read.
        Err(error) if error.kind() == ErrorKind::NotFound && dir.symlink_metadata().is_err() => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(unreadable(dir, &error)),
    };
    let paths: Result<Vec<PathBuf>, _> = entries.map(|entry| entry.map(|entry| entry.path())).collect();
    let mut paths = paths.map_err(|error| unreadable(dir, &error))?;
    paths.retain(|path| policy::is_policy_file(path));
    paths.sort();
    Ok(paths)
}

/// The text of a config file.
///
/// # Errors
/// It cannot be read, is no regular file or too large, or is not UTF-8.
pub fn read(path: &Path) -> Result<String, Vec<Problem>> {
    read_text(path, FILE_BYTES, "the file is too large")
}

fn too_large(path: &Path, message: &str, got: &str) -> Vec<Problem> {
    let refusal = Refusal::new(message, "at most 10MiB");
    vec![Problem::new(path.display().to_string(), None, DOCUMENT, refusal, got)]
}

fn unreadable(path: &Path, error: &io::Error) -> Vec<Problem> {
    let refusal = Refusal::sentence(match error.kind() {
        ErrorKind::InvalidData => "is not UTF-8 text; save it in UTF-8".to_owned(),
        _ => format!("cannot open file: {error}"),
    });
    vec![Problem::new(path.display().to_string(), None, DOCUMENT, refusal, String::new())]
}
