//! Reading the process file. The defaults are those of the documentation.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use indexmap::IndexMap;

use super::{
    Admin, ClientControl, Device, DrafterModel, Drain, Limits, Listen, LogFormat, LogLevel, Memory, Mode,
    Observe, Process, ServerTls, Tenant, TenantFallback, Timeouts, backends,
};
use crate::config::problem::{Problem, Problems, Refusal};
use crate::config::read::{Item, Section, address, boolean, duration, period, size, text, url, whole, word};
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
            memory: Memory::default(),
            policies: PathBuf::from("policies"),
            observe: Observe::default(),
        }
    }
}

impl Default for Admin {
    fn default() -> Self {
        Self { address: loopback(9464), token_file: None }
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
        }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            header: Duration::from_secs(10),
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
        Self { delay: Duration::from_secs(5), grace: Duration::from_mins(2) }
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self { bytes: 256 << 20, ttl: Duration::from_hours(1), snapshot: None }
    }
}

/// Reads a process file.
///
/// # Errors
/// Everything that is wrong with it, in the order of its lines.
pub fn parse(file: &str, source: &str) -> Result<Process, Vec<Problem>> {
    let root = yaml::parse(file, source)?;
    let problems = Problems::new(file);
    let process = read(&Item::root(&root, &problems));
    match problems.into_vec() {
        none if none.is_empty() => Ok(process),
        some => Err(some),
    }
}

fn read(root: &Item<'_>) -> Process {
    let default = Process::default();
    let mut top = root.section();
    version(&mut top);
    let process = Process {
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
        memory: memory(top.section("memory")),
        policies: policies(top.section("policies"), default.policies),
        observe: observe(top.section("observe")),
    };
    top.close();
    process
}

/// Every file says which version of the format it is written in.
pub(in crate::config) fn version(top: &mut Section<'_>) {
    top.must("version", "1", |node| match node.value {
        Value::Whole(1) => Ok(()),
        _ => Err(Refusal::new("unknown version", "1")),
    });
}

pub(super) fn path(node: &Node) -> Result<PathBuf, Refusal> {
    text(node).map(PathBuf::from).map_err(|_| Refusal::new("wrong type", "a path"))
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
    let address = section.must("address", "IP:PORT", address);
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
    let cert = section.must("cert", "a path", path);
    let key = section.must("key", "a path", path);
    let client_ca = section.maybe("client_ca", None, path);
    section.close();
    Some(ServerTls { cert: cert?, key: key?, client_ca })
}

fn admin(mut section: Section<'_>) -> Admin {
    let default = Admin::default();
    let admin = Admin {
        address: section.or("address", default.address, address),
        token_file: section.maybe("token_file", None, path),
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
    };
    section.close();
    limits
}

fn timeouts(mut section: Section<'_>) -> Timeouts {
    let default = Timeouts::default();
    let timeouts = Timeouts {
        header: section.or("header", default.header, period),
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
    let drain = Drain {
        delay: section.or("delay", default.delay, duration),
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

/// A header name, in lower case.
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
    let tokenizer = section.maybe("tokenizer", None, path);
    let device = section.or("device", Device::default(), word(Device::NAMES));
    let slots = section.or("slots", 64, whole(1..=4096));
    let context = section.or("context", 2048, whole(16..=1 << 20));
    section.close();
    Some(DrafterModel { path: model?, tokenizer, device, slots, context })
}

fn memory(mut section: Section<'_>) -> Memory {
    let default = Memory::default();
    let memory = Memory {
        bytes: section.or("bytes", default.bytes, size),
        ttl: section.or("ttl", default.ttl, period),
        snapshot: section.maybe("snapshot", None, path),
    };
    section.close();
    memory
}

fn policies(mut section: Section<'_>, default: PathBuf) -> PathBuf {
    let dir = section.or("dir", default, path);
    section.close();
    dir
}

fn observe(mut section: Section<'_>) -> Observe {
    let formats = &[("json", LogFormat::Json), ("text", LogFormat::Text)];
    let observe = Observe {
        log: section.or("log", LogFormat::default(), word(formats)),
        level: section.or("level", LogLevel::default(), word(LogLevel::NAMES)),
        otlp: section.maybe("otlp", None, url),
        text: section.or("text", false, boolean),
    };
    section.close();
    observe
}
