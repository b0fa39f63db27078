//! Reads config file and policy files and reports all problems together.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::Uri;

use super::flags::{Flags, Overrides, Strings};
use super::named::{FileKind, Named, shown};
use super::policy::{self, ParsedPolicy};
use super::problem::{DOCUMENT, Problem, Refusal};
use super::process::{self, Backend, Parsed, Process, ProcessFile, Replicas, Tenant, TenantFallback};
use super::regular;
use super::trained;
use super::yaml::FILE_BYTES;
use foretell_core::draft::Scope;
use foretell_core::words::Mode;
use foretell_policy::{Accept, Drafter, Match, Policy, PolicyMode, PolicySet, Rule};
use foretell_wire::openai::Api;

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
/// (relative to that file's folder), then `policies` beside the config file. A folder that is
/// named explicitly must exist.
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

/// The config file, as problems without a line name it.
pub fn process_file(process: &Process) -> String {
    let file = process.file.as_ref().map(|file| file.path.display().to_string());
    file.unwrap_or_else(|| "(no config file)".to_owned())
}

/// Warning that the policy folder has no policy, so the built-in one is in force.
fn unruled(process: &Process, sources: &[(String, String)]) -> Option<String> {
    let empty = process.policies_must_exist && sources.is_empty();
    let dir = process.policies.display();
    empty.then(|| format!("no policy files in {dir}: the built-in policy `default` (mode auto) is in force"))
}

/// Warning that a lossy rule relaxes nothing.
fn inert(policy: &Policy) -> Option<String> {
    let Accept { rule, tolerance, .. } = &policy.accept;
    let inert = *rule != Rule::Exact && tolerance.max <= 0.0;
    let name = &policy.name;
    inert.then(|| {
        format!("policy {name}: accept.rule: {} relaxes nothing: tolerance.max is 0 or not set", rule.name())
    })
}

/// Warnings that a backend is left no method of verification.
fn unverified(process: &Process) -> Vec<String> {
    let left = |backend: &&Backend| backend.methods.allow.is_empty();
    let line = |backend: &Backend| {
        format!(
            "backend {}: verify.allow: [] leaves no method: its requests are passed through",
            backend.name
        )
    };
    process.backends.iter().filter(left).map(line).collect()
}

/// Warning that a list of a policy's match has no entry, so that it holds for no request.
fn unmatched(policy: &Policy) -> Option<String> {
    let Match { models, backends, tenants, routes, .. } = &policy.matcher;
    let empty = [
        ("models", models.as_ref().is_some_and(Vec::is_empty)),
        ("backends", backends.as_ref().is_some_and(Vec::is_empty)),
        ("tenants", tenants.as_ref().is_some_and(Vec::is_empty)),
        ("routes", routes.as_ref().is_some_and(Vec::is_empty)),
    ];
    let (list, _) = empty.into_iter().find(|(_, empty)| *empty)?;
    Some(format!("policy {}: it never applies: match.{list} is empty", policy.name))
}

/// Warnings about policies that no request reaches.
fn shadowed(policies: &PolicySet) -> Vec<String> {
    let policies = policies.policies();
    let Some(last) = policies.iter().position(|policy| policy.matcher == Match::default()) else {
        return Vec::new();
    };
    let (before, behind) = policies.split_at(last + 1);
    let taker = before.last().map_or("", |policy| &policy.name);
    let line = |policy: &Arc<Policy>| {
        format!("policy {}: it never applies: policy {taker} before it has no match", policy.name)
    };
    behind.iter().map(line).collect()
}

/// Listeners whose address clashes with an earlier one. They are compared as they come out of
/// file, flags and variables, so they have no line.
fn clashing(process: &Process) -> Vec<Problem> {
    let bound = bound(process);
    let file = process_file(process);
    let problem = |(index, (path, address)): (usize, &(String, SocketAddr))| {
        let (other, taken) = bound.iter().take(index).find(|(_, other)| clash(*address, *other))?;
        let refusal = Refusal::new(&format!("{other} ({taken}) takes it"), "an address of its own");
        Some(Problem::new(&file, None, path, refusal, format!("{:?}", address.to_string())))
    };
    bound.iter().enumerate().filter_map(problem).collect()
}

/// Replicas that are a listener of this process: requests would come back to it.
fn looping(process: &Process) -> Vec<Problem> {
    let bound = bound(process);
    let file = process_file(process);
    let mut problems = Vec::new();
    for (index, backend) in process.backends.iter().enumerate() {
        let Replicas::Urls(urls) = &backend.replicas else { continue };
        for (number, url) in urls.iter().enumerate() {
            let Some(address) = here(url) else { continue };
            let Some((listener, _)) = bound.iter().find(|(_, own)| clash(address, *own)) else { continue };
            let refusal = Refusal::new(&format!("{listener} is there"), "the address of a server");
            let path = format!("backends[{index}].replicas[{number}]");
            problems.push(Problem::new(&file, None, &path, refusal, format!("{:?}", url.to_string())));
        }
    }
    problems
}

/// The address of a URL that names this machine as such; `None` for other hosts.
fn here(url: &Uri) -> Option<SocketAddr> {
    let host = url.host()?.trim_start_matches('[').trim_end_matches(']');
    let ip = if host == "localhost" { Ok(Ipv4Addr::LOCALHOST.into()) } else { host.parse::<IpAddr>() };
    let ip = ip.ok().filter(|ip| ip.is_loopback() || ip.is_unspecified())?;
    let port = url.port_u16().unwrap_or(if url.scheme_str() == Some("https") { 443 } else { 80 });
    Some(SocketAddr::new(ip, port))
}

/// The listeners, each with the path of its setting.
fn bound(process: &Process) -> Vec<(String, SocketAddr)> {
    let listen = process.listen.iter().enumerate();
    let mut bound: Vec<(String, SocketAddr)> =
        listen.map(|(index, listen)| (format!("listen[{index}].address"), listen.address)).collect();
    bound.push(("admin.address".to_owned(), process.admin.address));
    bound.extend(process.metrics.map(|address| ("metrics.address".to_owned(), address)));
    bound
}

/// True if two sockets cannot listen on these addresses at the same time. `[::]` takes the port of
/// IPv4 as well.
fn clash(one: SocketAddr, other: SocketAddr) -> bool {
    let takes = |all: IpAddr, own: IpAddr| all.is_unspecified() && (all.is_ipv6() || own.is_ipv4());
    let same = one.ip() == other.ip() || takes(one.ip(), other.ip()) || takes(other.ip(), one.ip());
    same && one.port() == other.port() && one.port() != 0
}

/// Warnings about settings of a policy that have no effect with this config file.
fn ineffective(policy: &Policy, process: &Process) -> Vec<String> {
    let told = unknown_backends(policy, process).into_iter();
    told.chain(unmatched(policy))
        .chain(untenanted(policy, process))
        .chain(unrecorded(policy, process))
        .chain(untranslated(policy, process))
        .collect()
}

/// Warnings that a policy names backends that there are none of.
fn unknown_backends(policy: &Policy, process: &Process) -> Vec<String> {
    // That there is no backend at all is a problem of its own.
    let named = policy.matcher.backends.iter().flatten().filter(|_| !process.backends.is_empty());
    let unknown = named.filter(|glob| !process.backends.iter().any(|backend| glob.matches(&backend.name)));
    let name = &policy.name;
    unknown
        .map(|glob| format!("policy {name}: match.backends: no backend is named {}", glob.as_str()))
        .collect()
}

/// True if a drafter of the policy reads texts of the request's tenant.
fn drafts_of_tenant(policy: &Policy) -> bool {
    policy.drafters.iter().any(|drafter| match drafter {
        Drafter::Lookup(lookup) => lookup.corpus_scope() == Some(Scope::Tenant),
        Drafter::Model { .. } => false,
    })
}

/// Warning that a policy is for tenants, and no request has one.
fn untenanted(policy: &Policy, process: &Process) -> Option<String> {
    let Tenant { header, fallback, .. } = &process.tenant;
    let nobody = header.is_none() && *fallback == TenantFallback::None;
    let scoped = drafts_of_tenant(policy);
    let what = match policy.matcher.tenants {
        Some(_) => "match.tenants never applies",
        None if scoped => "scope: tenant drafts from the request's own text alone",
        None => return None,
    };
    let name = &policy.name;
    nobody
        .then(|| format!("policy {name}: {what} without tenant.header or tenant.fallback of the config file"))
}

/// Warning that a policy's requests are not recorded.
fn unrecorded(policy: &Policy, process: &Process) -> Option<String> {
    let why = match (process.corpus.record.is_some(), policy.mode, process.mode) {
        _ if !policy.corpus.record => return None,
        (false, ..) => "without corpus.record.dir of the config file".to_owned(),
        (true, PolicyMode::Auto, Mode::Auto) => return None,
        (true, PolicyMode::Auto, mode) => format!("in mode {}", mode.name()),
        (true, mode, _) => format!("with mode: {}", mode.name()),
    };
    Some(format!("policy {}: corpus.record has no effect {why}", policy.name))
}

/// Warning that a policy is for requests of APIs that no backend translates, which are passed
/// through.
fn untranslated(policy: &Policy, process: &Process) -> Option<String> {
    let routes = policy.matcher.routes.as_ref().filter(|_| !process.backends.is_empty())?;
    let never = |api: &Api| {
        let is_other = matches!(api, Api::Messages | Api::Responses);
        is_other && !process.backends.iter().any(|backend| backend.translates.contains(api))
    };
    let never: Vec<&str> = routes.iter().filter(|&api| never(api)).map(|api| api.name()).collect();
    let (name, apis) = (&policy.name, never.join(" and "));
    (!never.is_empty()).then(|| {
        format!(
            "policy {name}: match.routes: {apis} never apply, as no backend has routes: {{ ...: translate }}"
        )
    })
}

/// Warning that a tenant header is set but no peer is trusted to send it.
fn unbelieved(process: &Process) -> Option<String> {
    let Tenant { header, trusted_peers, .. } = &process.tenant;
    let header = header.as_ref().filter(|_| trusted_peers.is_empty())?;
    Some(format!("tenant.header: {header} is never trusted: tenant.trusted_peers is empty"))
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
    let dir = Some(&process.policies).filter(|_| !missing);
    let paths = dir.map_or(Ok(Vec::new()), |dir| policy_files(dir)).unwrap_or_else(|found| {
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
