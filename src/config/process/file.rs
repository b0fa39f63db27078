//! Parses the config file. The defaults here are the documented ones.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use indexmap::IndexMap;
use serde_json::{Value as Json, json};

use super::{
    Admin, ClientControl, Corpus, DrafterModel, Fleet, Limits, Listen, LogFormat, LogLevel, Observe, Process,
    Ready, Record, ServerTls, Tenant, TenantFallback, Timeouts, backends, store,
};
use crate::declared::Slot;
use crate::flags::{Environment, Strings};
use crate::kind::{
    ADDRESS, Kind, address, boolean, duration, form, path, period, ratio, size, url, whole, word,
    word_or_hint,
};
use crate::named::{FileKind, Named};
use crate::problem::{Problem, Problems, Refusal};
use crate::read::{Item, Section};
use crate::variables;
use crate::yaml::{self, Value};
use foretell_core::session::VERIFY_TIMEOUT;
use foretell_core::words::Mode;
use foretell_net::http::drain::DrainTimes;
use foretell_net::http::listen::Bounds;
use foretell_onnx::open::DeviceChoice;

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
            drain: DrainTimes::default(),
            tenant: Tenant::default(),
            client: ClientControl::default(),
            backends: Vec::new(),
            drafters: IndexMap::new(),
            corpus: Corpus::default(),
            fleet: Fleet::default(),
            ready: Ready::default(),
            policies: PathBuf::from("policies"),
            policies_must_exist: false,
            mode_source: None,
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
            head: Bounds::default(),
            speculate_body: 8 << 20,
            passthrough_body: None,
            sessions: 1024,
            memory: 512 << 20,
            connections: None,
        }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            first_byte: None,
            idle: None,
            verify: VERIFY_TIMEOUT,
            draft: None,
            pool_idle: Duration::from_secs(3),
        }
    }
}

impl Default for Corpus {
    fn default() -> Self {
        Self { bytes: 256 << 20, ttl: Duration::from_hours(1), snapshot: None, record: None }
    }
}

/// Reads a config file.
///
/// # Errors
/// Every problem in the file, in the order of its lines.
pub fn parse(file: &str, source: &str) -> Result<Process, Vec<Problem>> {
    let Parsed { process, problems, .. } = parse_all(file, source, &Environment);
    if problems.is_empty() { Ok(process) } else { Err(problems) }
}

/// Result of reading a config file with or without errors.
#[derive(Clone, Debug, Default)]
pub struct Parsed {
    /// The settings; a setting with an error has its default.
    pub process: Process,
    /// Files and folders that the settings name; none has been opened.
    pub named: Vec<Named>,
    /// Settings that have no effect.
    pub warnings: Vec<String>,
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
    let (named, warnings) = (problems.named(), problems.warnings());
    Parsed { process, named, warnings, problems: problems.into_vec() }
}

/// The JSON Schema of a config file, draft 2020-12.
///
/// Any value may be an environment variable (`${NAME}`). Conditions that a schema cannot express
/// (names and addresses used twice, an admin listener that is open to others, settings that exclude
/// each other) are left to `foretell check`.
pub fn schema() -> Json {
    let mut schema = settings();
    variable(&mut schema);
    schema
}

/// The schema without environment variables.
pub(crate) fn settings() -> Json {
    let (empty, problems, slot) = (yaml::EMPTY, Problems::new("schema"), Slot::default());
    read(&Item::declaring(&empty, &problems, &slot));
    described(slot.schema(), "Foretell", "The config file: listeners, limits, backends, drafters.")
}

/// A schema of a whole file, with its head.
pub(crate) fn described(schema: Json, title: &str, says: &str) -> Json {
    let mut whole = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, "description": says,
        "patternProperties": { "^x-": { "description": "For your own use, such as YAML anchors." } },
    });
    if let (Some(whole), Json::Object(schema)) = (whole.as_object_mut(), schema) {
        whole.extend(schema);
        whole.insert("type".to_owned(), "object".into());
    }
    whole
}

/// Allows an environment variable for every value below.
fn variable(schema: &mut Json) {
    let Some(members) = schema.as_object_mut() else { return };
    for word in ["properties", "items", "additionalProperties"] {
        match members.get_mut(word) {
            Some(Json::Object(inner)) if word == "properties" => inner.values_mut().for_each(variable),
            Some(inner) => variable(inner),
            None => {}
        }
    }
    for branch in members.get_mut("oneOf").and_then(Json::as_array_mut).into_iter().flatten() {
        variable(branch);
    }
    let inner = ["properties", "items", "additionalProperties", "oneOf", "const"];
    if inner.iter().all(|word| !members.contains_key(*word)) {
        *schema = json!({ "anyOf": [schema, { "type": "string", "pattern": r"\$\{" }] });
    }
}

/// Every mode with its name in files.
pub(crate) const MODES: &[(&str, Mode)] = &{
    let [off, observe, auto] = Mode::ALL;
    [(off.name(), off), (observe.name(), observe), (auto.name(), auto)]
};

/// Modes of policies, and their names for the whole process.
pub(crate) const MODE_HINTS: &[(&str, &str)] = &[
    ("shadow", "observe (shadow is a mode of policies)"),
    ("plain", "observe (plain is a mode of policies)"),
];

fn read(root: &Item<'_>) -> Process {
    let default = Process::default();
    let mut top = root.section();
    version(&mut top);
    let mode = "off: pass requests through. observe: pass them through, and draft in the shadow. auto: speculate where it pays.";
    let mode = top.or("mode", mode, default.mode, &word_or_hint(MODES, MODE_HINTS));
    let listen = top
        .item("listen", "Listeners for clients, http/1.1 and h2c.")
        .map_or(default.listen, |item| listen(&item));
    let admin = admin(top.section("admin", "The operator's listener: status page, API, metrics."));
    let metrics = metrics(top.section("metrics", "A listener with only /metrics, /healthz and /readyz."));
    let mut limits = limits(top.section("limits", "Limits of requests and of their memory."));
    let timeouts = timeouts(top.section("timeouts", "Maximum waits."), &mut limits.head);
    let mut process = Process {
        mode,
        listen,
        admin,
        metrics,
        limits,
        timeouts,
        drain: drain(top.section("drain", "Durations of a shutdown.")),
        tenant: tenant(top.section("tenant", "The tenant of a request.")),
        client: client(top.section("client", "Control by clients.")),
        backends: top
            .item("backends", "The services that requests are sent to.")
            .map_or_else(Vec::new, |item| backends::read(&item)),
        drafters: top
            .item("drafters", "Models that draft, by name.")
            .map_or_else(IndexMap::new, |item| drafters(&item)),
        policies_must_exist: false,
        file: None,
        policies_read: None,
        ..default
    };
    process.corpus =
        corpus(top.section("corpus", "Texts that drafters keep across requests."), process.limits.memory);
    process.fleet = store::read(top.section("fleet", "The store over which sidecars share what they learn."));
    process.ready = ready(top.section("ready", "Conditions of /readyz."));
    process.policies = policies(top.section("policies", "The policy files."), process.policies);
    process.observe = observe(top.section("observe", "Log and traces."));
    top.close();
    process
}

/// Reads `version`, the format version, which every file must have; only 1 exists.
pub(crate) fn version(top: &mut Section<'_>) {
    let one = Kind::new(json!({ "const": 1 }), |node| match node.value {
        Value::Whole(1) => Ok(()),
        Value::Number(_) => Err(Refusal::new("not a whole number", "1")),
        _ => Err(Refusal::new("unknown version", "1")),
    });
    top.must("version", "Version of the file format.", "1", &one);
}

fn listen(item: &Item<'_>) -> Vec<Listen> {
    let items = item.items();
    if let Some(slot) = item.slot() {
        slot.with("minItems", json!(1));
    }
    if items.is_empty() && matches!(item.node.value, Value::List(_)) {
        item.refuse(Refusal::new("empty", "at least one listener"));
    }
    let mut seen = HashSet::new();
    items.iter().filter_map(|item| listener(item, &mut seen)).collect()
}

fn listener(item: &Item<'_>, seen: &mut HashSet<SocketAddr>) -> Option<Listen> {
    let mut section = item.section();
    section.with(None, "description", json!("A listener."));
    let address = section.must("address", "IP:PORT, localhost:PORT or :PORT.", ADDRESS, &address());
    if let Some(address) = address.filter(|address| address.port() != 0 && !seen.insert(*address)) {
        section.refuse(
            "address",
            Refusal::new("not unique", "each address once"),
            &format!("{:?}", address.to_string()),
        );
    }
    let tls = section
        .item("tls", "Certificates; null: plain HTTP.")
        .filter(|item| item.slot().is_some() || !item.node.is_null())
        .and_then(|item| server_tls(item.section()));
    section.close();
    address.map(|address| Listen { address, tls })
}

fn server_tls(mut section: Section<'_>) -> Option<ServerTls> {
    let cert = section.must_file("cert", "The certificate chain, PEM.", FileKind::Chain);
    let key = section.must_file("key", "Their key, PEM.", FileKind::KeyOf(cert.clone().unwrap_or_default()));
    let client_ca =
        section.file("client_ca", "Clients need a certificate of these authorities.", FileKind::Authorities);
    section.close();
    Some(ServerTls { cert: cert?, key: key?, client_ca })
}

fn admin(mut section: Section<'_>) -> Admin {
    let default = Admin::default();
    let admin = Admin {
        address: section.or(
            "address",
            "Any other than loopback requires token_file.",
            default.address,
            &address(),
        ),
        token_file: section.file(
            "token_file",
            "File with the bearer token that it requires.",
            FileKind::Secret,
        ),
        hosts: section.list(
            "hosts",
            "Host names accepted in requests, besides localhost and IP addresses.",
            Vec::new(),
            &host(),
        ),
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
    let address = section.maybe("address", "Its address; null: none.", None, &address());
    section.close();
    address
}

fn limits(mut section: Section<'_>) -> Limits {
    let Limits { head, speculate_body, passthrough_body, sessions, memory, connections } = Limits::default();
    let limits = Limits {
        head: Bounds {
            headers: section.or("headers", "Maximum header fields of a request.", head.headers, &whole(1..=10_000)),
            header_bytes: section.or("header_bytes", "Maximum size of them.", head.header_bytes, &size()),
            uri: section.or("uri", "Maximum size of its target.", head.uri, &size()),
            ..head
        },
        speculate_body: section.or(
            "speculate_body",
            "Larger bodies are passed through; unread, unless their model selects the backend.",
            speculate_body,
            &size(),
        ),
        passthrough_body: section.maybe("passthrough_body", "Larger bodies are refused; null: no limit.", passthrough_body, &size()),
        sessions: section.or(
            "sessions",
            "Maximum concurrent speculated requests; further ones are passed through.",
            sessions,
            &whole(0..=1_000_000),
        ),
        memory: section.or(
            "memory",
            "Memory of bodies and sessions; above it completions are passed through unread, above twice that answered with 503.",
            memory,
            &size(),
        ),
        connections: section.maybe(
            "connections",
            "Maximum concurrent clients; null: as many as the limit of open descriptors allows.",
            connections,
            &whole(1..=10_000_000),
        ),
    };
    section.close();
    limits
}

/// Reads `timeouts`; `head` gets those for clients.
fn timeouts(mut section: Section<'_>, head: &mut Bounds) -> Timeouts {
    let default = Timeouts::default();
    let header = "From connecting, or its first byte, to the end of a request's head.";
    head.header_timeout = section.or("header", header, head.header_timeout, &period());
    head.body = section.or("body", "Silence within a request's body.", head.body, &period());
    let keep_alive = "A connection without a request.";
    head.keep_alive = section.or("keep_alive", keep_alive, head.keep_alive, &period());
    let timeouts = Timeouts {
        connect: section.or("connect", "To connect to a replica.", default.connect, &period()),
        first_byte: section.maybe("first_byte", "To the head of an answer.", default.first_byte, &period()),
        idle: section.maybe("idle", "To the next byte of an answer that has begun.", default.idle, &period()),
        verify: section.or("verify", "For a verify request.", default.verify, &period()),
        draft: section.maybe(
            "draft",
            "For a draft; null: as long as a draft can pay.",
            default.draft,
            &period(),
        ),
        pool_idle: section.or(
            "pool_idle",
            "An unused connection to a replica.",
            default.pool_idle,
            &duration(),
        ),
    };
    section.close();
    timeouts
}

fn drain(mut section: Section<'_>) -> DrainTimes {
    let default = DrainTimes::default();
    let delay = "Not ready, but still accepting. If not set, it ends as soon as no client is connected.";
    let early = !section.has("delay");
    let drain = DrainTimes {
        delay: section.or("delay", delay, default.delay, &duration()),
        early,
        grace: section.or("grace", "Time for open answers to end.", default.grace, &duration()),
    };
    section.close();
    drain
}

fn tenant(mut section: Section<'_>) -> Tenant {
    let fallbacks =
        &[("none", TenantFallback::None), ("authorization_hash", TenantFallback::AuthorizationHash)];
    let network = form(
        r"^[0-9A-Fa-f:.]*[0-9A-Fa-f:](/\d+)?$",
        || Refusal::new("not a network", "IP or IP/BITS"),
        |text| text.parse().ok(),
    );
    let tenant = Tenant {
        header: section.maybe("header", "Header that names it.", None, &header_name()),
        trusted_peers: section.list(
            "trusted_peers",
            "Peers whose header is trusted, IP or IP/BITS.",
            Vec::new(),
            &network,
        ),
        fallback: section.or(
            "fallback",
            "Tenant without a trusted header.",
            TenantFallback::default(),
            &word(fallbacks),
        ),
    };
    if let Some(header) = tenant.header.as_deref().filter(|header| CREDENTIALS.contains(header)) {
        let allowed = "a header that only names it; for keys: fallback: authorization_hash";
        let refusal = Refusal::new("it has a credential, and tenants are shown and recorded", allowed);
        section.refuse("header", refusal, &format!("{header:?}"));
    }
    section.close();
    tenant
}

/// Header fields with credentials: those of HTTP, and the keys of the APIs that are passed through.
const CREDENTIALS: [&str; 6] =
    ["authorization", "proxy-authorization", "cookie", "x-api-key", "api-key", "x-goog-api-key"];

/// A host name without a port.
fn host() -> Kind<String> {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    let parse = move |name: &str| name.bytes().all(is_name).then(|| name.to_owned());
    form(r"^[A-Za-z0-9._-]+$", || Refusal::new("not a host name", "a name without a port"), parse)
}

/// A header name, in lower case.
fn header_name() -> Kind<String> {
    let parse = |text: &str| Some(http::HeaderName::from_bytes(text.as_bytes()).ok()?.to_string());
    form(HEADER_NAME, || Refusal::new("not a header name", "a header name"), parse)
}

/// Pattern of a header name.
pub(crate) const HEADER_NAME: &str = "^[!#$%&'*+.^_`|~0-9A-Za-z-]+$";

fn client(mut section: Section<'_>) -> ClientControl {
    let words = &[("off", ClientControl::Off), ("bounded", ClientControl::Bounded)];
    let control =
        section.or("control", "Permission of the header x-foretell.", ClientControl::default(), &word(words));
    section.close();
    control
}

fn drafters(item: &Item<'_>) -> IndexMap<String, DrafterModel> {
    let read = |(name, item): (&str, Item<'_>)| Some((name.to_owned(), drafter(item.section())?));
    item.members().into_iter().filter_map(read).collect()
}

fn drafter(mut section: Section<'_>) -> Option<DrafterModel> {
    section.with(None, "description", json!("A model that drafts."));
    let model = section.must("path", "Its folder.", "a path", &path());
    let tokenizer = section.file(
        "tokenizer",
        "A tokenizer.json, or a folder with one; null: that of its folder.",
        FileKind::Tokenizer,
    );
    if let Some(model) = &model {
        section.names("path", FileKind::Drafter { tokenizer: tokenizer.is_none() }, model);
    }
    let device =
        section.or("device", "Device that it runs on.", DeviceChoice::default(), &word(DeviceChoice::NAMES));
    let slots = section.or("slots", "Maximum concurrent sessions.", 64, &whole(1..=4096));
    let context = section.or("context", "Maximum tokens of a sequence.", 2048, &whole(16..=1 << 20));
    section.close();
    Some(DrafterModel { path: model?, tokenizer, device, slots, context })
}

/// `whole`: `limits.memory`. Drafters may take half of it; the rest is for bodies and sessions.
fn corpus(mut section: Section<'_>, whole: u64) -> Corpus {
    let bytes = Corpus::default().bytes.min(whole / 2);
    let default = Corpus { bytes, ..Corpus::default() };
    let corpus = Corpus {
        bytes: section.or("bytes", "Maximum size; at most half of limits.memory.", default.bytes, &size()),
        ttl: section.or("ttl", "Time that an unused text is kept.", default.ttl, &period()),
        snapshot: section.maybe("snapshot", "File that preserves it over restarts.", None, &path()),
        record: section
            .item("record", RECORD)
            .filter(|item| item.slot().is_some() || !item.node.is_null())
            .and_then(|item| record(item.section())),
    };
    if corpus.bytes > whole / 2 {
        let allowed = "at most half of limits.memory";
        section.refuse("bytes", Refusal::new("too much", allowed), &corpus.bytes.to_string());
    }
    section.close();
    corpus
}

const RECORD: &str = "Where requests of policies with `corpus.record` are written, for `foretell train`.";

fn record(mut section: Section<'_>) -> Option<Record> {
    let max_bytes = "Maximum size; the oldest texts are deleted for room.";
    let key_file = "File with 64 hexadecimal digits, by which it is encrypted (AES-256-GCM).";
    let dir = section.must("dir", "Folder; it is made if it does not exist.", "a path", &path());
    let record = Record {
        dir: dir.clone().unwrap_or_default(),
        max_bytes: section.or("max_bytes", max_bytes, 1 << 30, &size()),
        sample: section.or("sample", "Share of the requests that are recorded.", 1.0, &ratio()),
        key_file: section.file("key_file", key_file, FileKind::Key),
    };
    section.close();
    dir.map(|_| record)
}

fn ready(mut section: Section<'_>) -> Ready {
    let says = "Wait until a replica of every backend can be reached.";
    let require_backend = section.or("require_backend", says, false, &boolean());
    section.close();
    Ready { require_backend }
}

fn policies(mut section: Section<'_>, default: PathBuf) -> PathBuf {
    let says = "Their folder, relative to that of this file; default: `policies` beside it.";
    let dir = section.file("dir", says, FileKind::Policies);
    section.close();
    dir.unwrap_or(default)
}

fn observe(mut section: Section<'_>) -> Observe {
    let observe = Observe {
        log: section.or(
            "log",
            "Format of the log; auto: text on a terminal, JSON elsewhere.",
            LogFormat::default(),
            &word(LogFormat::NAMES),
        ),
        level: section.or(
            "level",
            "Lowest level that is logged.",
            LogLevel::default(),
            &word(LogLevel::NAMES),
        ),
        otlp: section.maybe("otlp", "URL of a collector for traces by OTLP over HTTP.", None, &url()),
        share: section.or(
            "share",
            "Share of the requests that have a line in the log and spans; failures always have a line.",
            1.0,
            &ratio(),
        ),
    };
    section.close();
    observe
}
