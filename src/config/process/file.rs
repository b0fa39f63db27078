//! Parses the process file. The defaults here are the documented ones.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use indexmap::IndexMap;

use super::{
    Admin, ClientControl, Corpus, Device, DrafterModel, Drain, Limits, Listen, LogFormat, LogLevel, Mode,
    Observe, Process, Ready, ServerTls, Tenant, TenantFallback, Timeouts, backends,
};
use crate::config::flags::{Environment, Strings};
use crate::config::named::{FileKind, Named};
use crate::config::problem::{Problem, Problems, Refusal};
use crate::config::read::{
    ADDRESS, Item, Section, address, boolean, duration, path, period, ratio, size, text, url, whole, word,
};
use crate::config::variables;
use crate::config::yaml::{self, Node, Value};

const fn loopback(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

impl Default for Process {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            listen: vec![Listen { address: loopback(8080), tls: None }],
            admin: Admin::default(),
            metrics: None,
            limits: Limits::default(),
            timeouts: Timeouts::default(),
            drain: Drain::default(),
            tenant: Tenant::default(),
            client: ClientControl::default(),
            backends: Vec::new(),
            drafters: IndexMap::new(),
            corpus: Corpus::default(),
            ready: Ready::default(),
            policies: PathBuf::from("policies"),
            policies_must_exist: false,
            observe: Observe::default(),
            file: None,
            policies_read: None,
        }
    }
}

impl Default for Admin {
    fn default() -> Self {
        Self { address: loopback(9464), token_file: None, hosts: Vec::new() }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            headers: 100,
            header_bytes: 32 << 10,
            uri: 8 << 10,
            speculate_body: 8 << 20,
            relay_body: None,
            sessions: 1024,
            memory: 512 << 20,
            connections: None,
        }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            header: Duration::from_secs(10),
            body: Duration::from_secs(30),
            keep_alive: Duration::from_secs(75),
            connect: Duration::from_secs(2),
            first_byte: None,
            idle: None,
            verify: Duration::from_secs(2),
            draft: None,
            pool_idle: Duration::from_secs(3),
        }
    }
}

impl Default for Drain {
    fn default() -> Self {
        Self { delay: Duration::from_secs(5), early: true, grace: Duration::from_mins(2) }
    }
}

impl Default for Corpus {
    fn default() -> Self {
        Self { bytes: 256 << 20, ttl: Duration::from_hours(1), snapshot: None }
    }
}

/// Reads a process file.
///
/// # Errors
/// Every problem in the file, in the order of its lines.
pub fn parse(file: &str, source: &str) -> Result<Process, Vec<Problem>> {
    let Parsed { process, problems, .. } = parse_all(file, source, &Environment);
    if problems.is_empty() { Ok(process) } else { Err(problems) }
}

/// Result of reading a process file with or without errors.
#[derive(Clone, Debug, Default)]
pub struct Parsed {
    /// The settings; a setting with an error has its default.
    pub process: Process,
    /// Files and folders that the settings name; none has been opened.
    pub named: Vec<Named>,
    /// Every problem in the file, in the order of its lines.
    pub problems: Vec<Problem>,
}

/// As [`parse`], with the variables of this environment, and returns the readable settings besides
/// the problems.
pub fn parse_all(file: &str, source: &str, environment: &dyn Strings) -> Parsed {
    let mut root = match yaml::parse(file, source) {
        Ok(root) => root,
        Err(problems) => return Parsed { problems, ..Parsed::default() },
    };
    let problems = Problems::new(file);
    variables::substitute(&mut root, environment, &problems);
    let process = read(&Item::root(&root, &problems));
    Parsed { process, named: problems.named(), problems: problems.into_vec() }
}

fn read(root: &Item<'_>) -> Process {
    let default = Process::default();
    let mut top = root.section();
    version(&mut top);
    let mut process = Process {
        mode: top.or("mode", default.mode, word(Mode::NAMES)),
        listen: top.item("listen").map_or(default.listen, |item| listen(&item)),
        admin: admin(top.section("admin")),
        metrics: metrics(top.section("metrics")),
        limits: limits(top.section("limits")),
        timeouts: timeouts(top.section("timeouts")),
        drain: drain(top.section("drain")),
        tenant: tenant(top.section("tenant")),
        client: client(top.section("client")),
        backends: top.item("backends").map_or_else(Vec::new, |item| backends::read(&item)),
        drafters: top.item("drafters").map_or_else(IndexMap::new, |item| drafters(&item)),
        policies_must_exist: false,
        file: None,
        policies_read: None,
        ..default
    };
    process.corpus = corpus(top.section("corpus"), process.limits.memory);
    process.ready = ready(top.section("ready"));
    process.policies = policies(top.section("policies"), process.policies);
    process.observe = observe(top.section("observe"));
    top.close();
    process
}

/// Reads `version`, the format version, which every file must have; only 1 exists.
pub(in crate::config) fn version(top: &mut Section<'_>) {
    top.must("version", "1", |node| match node.value {
        Value::Whole(1) => Ok(()),
        _ => Err(Refusal::new("unknown version", "1")),
    });
}

fn listen(item: &Item<'_>) -> Vec<Listen> {
    let items = item.items();
    if items.is_empty() && matches!(item.node.value, Value::List(_)) {
        item.refuse(Refusal::new("empty", "at least one listener"));
    }
    let mut seen = HashSet::new();
    items.iter().filter_map(|item| listener(item, &mut seen)).collect()
}

fn listener(item: &Item<'_>, seen: &mut HashSet<SocketAddr>) -> Option<Listen> {
    let mut section = item.section();
    let address = section.must("address", ADDRESS, address);
    if let Some(address) = address.filter(|address| address.port() != 0 && !seen.insert(*address)) {
        section.refuse(
            "address",
            Refusal::new("not unique", "each address once"),
            &format!("{:?}", address.to_string()),
        );
    }
    let tls =
        section.item("tls").filter(|item| !item.node.is_null()).and_then(|item| server_tls(item.section()));
    section.close();
    address.map(|address| Listen { address, tls })
}

fn server_tls(mut section: Section<'_>) -> Option<ServerTls> {
    let cert = section.must_file("cert", FileKind::Chain);
    let key = section.must_file("key", FileKind::KeyOf(cert.clone().unwrap_or_default()));
    let client_ca = section.file("client_ca", FileKind::Authorities);
    section.close();
    Some(ServerTls { cert: cert?, key: key?, client_ca })
}

fn admin(mut section: Section<'_>) -> Admin {
    let default = Admin::default();
    let admin = Admin {
        address: section.or("address", default.address, address),
        token_file: section.file("token_file", FileKind::Secret),
        hosts: section.list("hosts", Vec::new(), host),
    };
    if !admin.address.ip().is_loopback() && admin.token_file.is_none() {
        let allowed = "a loopback address, or any with token_file";
        let got = format!("{:?}", admin.address.to_string());
        section.refuse("address", Refusal::new("open to others without a token", allowed), &got);
    }
    section.close();
    admin
}

fn metrics(mut section: Section<'_>) -> Option<SocketAddr> {
    let address = section.maybe("address", None, address);
    section.close();
    address
}

fn limits(mut section: Section<'_>) -> Limits {
    let default = Limits::default();
    let limits = Limits {
        headers: section.or("headers", default.headers, whole(1..=10_000)),
        header_bytes: section.or("header_bytes", default.header_bytes, size),
        uri: section.or("uri", default.uri, size),
        speculate_body: section.or("speculate_body", default.speculate_body, size),
        relay_body: section.maybe("relay_body", default.relay_body, size),
        sessions: section.or("sessions", default.sessions, whole(0..=1_000_000)),
        memory: section.or("memory", default.memory, size),
        connections: section.maybe("connections", default.connections, whole(1..=10_000_000)),
    };
    section.close();
    limits
}

fn timeouts(mut section: Section<'_>) -> Timeouts {
    let default = Timeouts::default();
    let timeouts = Timeouts {
        header: section.or("header", default.header, period),
        body: section.or("body", default.body, period),
        keep_alive: section.or("keep_alive", default.keep_alive, period),
        connect: section.or("connect", default.connect, period),
        first_byte: section.maybe("first_byte", default.first_byte, period),
        idle: section.maybe("idle", default.idle, period),
        verify: section.or("verify", default.verify, period),
        draft: section.maybe("draft", default.draft, period),
        pool_idle: section.or("pool_idle", default.pool_idle, duration),
    };
    section.close();
    timeouts
}

fn drain(mut section: Section<'_>) -> Drain {
    let default = Drain::default();
    let delay = section.item("delay").and_then(|item| item.read(duration));
    let drain = Drain {
        delay: delay.unwrap_or(default.delay),
        early: delay.is_none(),
        grace: section.or("grace", default.grace, duration),
    };
    section.close();
    drain
}

fn tenant(mut section: Section<'_>) -> Tenant {
    let fallbacks =
        &[("none", TenantFallback::None), ("authorization_hash", TenantFallback::AuthorizationHash)];
    let tenant = Tenant {
        header: section.maybe("header", None, header_name),
        trusted_peers: section.list("trusted_peers", Vec::new(), |node| {
            let parsed = text(node).ok().and_then(|text| text.parse().ok());
            parsed.ok_or_else(|| Refusal::new("not a network", "IP or IP/BITS"))
        }),
        fallback: section.or("fallback", TenantFallback::default(), word(fallbacks)),
    };
    section.close();
    tenant
}

/// Reads a host name without a port.
fn host(node: &Node) -> Result<String, Refusal> {
    let named = text(node).ok().filter(|name| {
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        name.bytes().all(is_name)
    });
    named.ok_or_else(|| Refusal::new("not a host name", "a name without a port"))
}

/// Reads a header name and lowers its case.
fn header_name(node: &Node) -> Result<String, Refusal> {
    let parsed = text(node).ok().and_then(|text| http::HeaderName::from_bytes(text.as_bytes()).ok());
    parsed.map(|name| name.to_string()).ok_or_else(|| Refusal::new("not a header name", "a header name"))
}

fn client(mut section: Section<'_>) -> ClientControl {
    let words = &[("off", ClientControl::Off), ("bounded", ClientControl::Bounded)];
    let control = section.or("control", ClientControl::default(), word(words));
    section.close();
    control
}

fn drafters(item: &Item<'_>) -> IndexMap<String, DrafterModel> {
    let read = |(name, item): (&str, Item<'_>)| Some((name.to_owned(), drafter(item.section())?));
    item.members().into_iter().filter_map(read).collect()
}

fn drafter(mut section: Section<'_>) -> Option<DrafterModel> {
    let model = section.must("path", "a path", path);
    let tokenizer = section.file("tokenizer", FileKind::Tokenizer);
    if let Some(model) = &model {
        section.names("path", FileKind::Drafter { tokenizer: tokenizer.is_none() }, model);
    }
    let device = section.or("device", Device::default(), word(Device::NAMES));
    let slots = section.or("slots", 64, whole(1..=4096));
    let context = section.or("context", 2048, whole(16..=1 << 20));
    section.close();
    Some(DrafterModel { path: model?, tokenizer, device, slots, context })
}

/// `whole`: `limits.memory`. Drafters may take half of it; the rest is for bodies and sessions.
fn corpus(mut section: Section<'_>, whole: u64) -> Corpus {
    let bytes = Corpus::default().bytes.min(whole / 2);
    let default = Corpus { bytes, ..Corpus::default() };
    let corpus = Corpus {
        bytes: section.or("bytes", default.bytes, size),
        ttl: section.or("ttl", default.ttl, period),
        snapshot: section.maybe("snapshot", None, path),
    };
    if corpus.bytes > whole / 2 {
        let allowed = "at most half of limits.memory";
        section.refuse("bytes", Refusal::new("too much", allowed), &corpus.bytes.to_string());
    }
    section.close();
    corpus
}

fn ready(mut section: Section<'_>) -> Ready {
    let require_backend = section.or("require_backend", false, boolean);
    section.close();
    Ready { require_backend }
}

fn policies(mut section: Section<'_>, default: PathBuf) -> PathBuf {
    let dir = section.file("dir", FileKind::Policies);
    section.close();
    dir.unwrap_or(default)
}

fn observe(mut section: Section<'_>) -> Observe {
    let observe = Observe {
        log: section.or("log", LogFormat::default(), word(LogFormat::NAMES)),
        level: section.or("level", LogLevel::default(), word(LogLevel::NAMES)),
        otlp: section.maybe("otlp", None, url),
        share: section.or("share", 1.0, ratio),
        text: section.or("text", false, boolean),
    };
    section.close();
    observe
}
