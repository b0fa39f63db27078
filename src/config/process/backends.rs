//! Reading the backends of a process file.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use super::{
    Backend, Budget, Connect, Device, Dialect, HostHeader, HttpVersion, Load, MethodName, Model, Probe,
    ProbeWhen, Replicas, ServedModel, Switchback, TokenizerSource, VerifyLimits,
};
use crate::config::named::FileKind;
use crate::config::problem::Refusal;
use crate::config::read::{Item, Section, boolean, parse_base, path, period, ratio, size, text, whole, word};
use crate::config::values::{self, Glob};
use crate::config::yaml::{Node, Value};

impl Default for Connect {
    fn default() -> Self {
        Self {
            http: HttpVersion::default(),
            host: HostHeader::default(),
            ca: None,
            identity: None,
            pass_auth: true,
            token_file: None,
            own_token_file: None,
        }
    }
}

impl Default for Load {
    fn default() -> Self {
        Self { url: "/metrics".to_owned(), every: Duration::from_millis(500) }
    }
}

impl Default for VerifyLimits {
    fn default() -> Self {
        let allow = vec![MethodName::Score, MethodName::FanOut, MethodName::Tree];
        Self { allow, explicit: false, context_max: 8192, bytes_max: 2 << 20 }
    }
}

impl Default for Probe {
    fn default() -> Self {
        Self { when: ProbeWhen::default(), calls: 40, within: Duration::from_secs(10) }
    }
}

impl Default for Budget {
    fn default() -> Self {
        let switchback = Switchback { window: Duration::from_secs(20), every: Duration::from_mins(30) };
        Self { extra_tokens: 0.25, slots: 0.10, switchback: Some(switchback) }
    }
}

/// Values read so far that must be unique in the file.
#[derive(Default)]
struct Seen {
    names: HashSet<String>,
    models: HashSet<String>,
    default: bool,
}

pub(super) fn read(item: &Item<'_>) -> Vec<Backend> {
    let mut seen = Seen::default();
    item.items().iter().filter_map(|item| backend(item, &mut seen)).collect()
}

fn backend(item: &Item<'_>, seen: &mut Seen) -> Option<Backend> {
    let mut section = item.section();
    let name = section.must("name", "a text", text);
    if let Some(name) = name.as_ref().filter(|name| !seen.names.insert((*name).clone())) {
        section.refuse("name", Refusal::new("not unique", "a name of its own"), &format!("{name:?}"));
    }
    let default = section.or("default", false, boolean);
    if default && std::mem::replace(&mut seen.default, true) {
        section.refuse("default", Refusal::new("not unique", "one default backend"), "true");
    }
    let dialect = section.or("dialect", Dialect::default(), word(Dialect::NAMES));
    let replicas = section.item("replicas");
    if replicas.is_none() {
        section.refuse(
            "replicas",
            Refusal::new("missing", "a list of URLs, { dns, every } or { model }"),
            "nothing",
        );
    }
    let replicas = replicas.and_then(|item| self::replicas(&item));
    if matches!(replicas, Some(Replicas::Here(_))) {
        section.forbid("ranks", "only where a server is called");
        section.forbid("connect", "only where a server is called");
        if !dialect.is_here() {
            section.refuse(
                "dialect",
                Refusal::new("not of a model in this process", "auto|onnx"),
                dialect.name(),
            );
        }
    }
    let ranks = section.or("ranks", 0, whole(0..=1024));
    let models = section.item("models").map_or_else(Vec::new, |item| models(&item, seen));
    let connect = connect(section.section("connect"));
    let load = load(section.section("load"));
    let methods = methods(section.section("verify"));
    let probe = probe(section.section("probe"));
    let budget = budget(section.section("budget"));
    let billed = section.or("billed", false, boolean);
    section.close();
    Some(Backend {
        name: name?,
        dialect,
        replicas: replicas?,
        ranks,
        models,
        connect,
        load,
        methods,
        probe,
        budget,
        billed,
        default,
    })
}

fn replicas(item: &Item<'_>) -> Option<Replicas> {
    match &item.node.value {
        Value::List(nodes) if nodes.is_empty() => {
            item.refuse(Refusal::new("empty", "at least one URL"));
            None
        }
        Value::List(_) => {
            let mut seen = HashSet::new();
            let mut once = |item: &Item<'_>| {
                let url = item.read(base)?;
                if !seen.insert(url.clone()) {
                    item.refuse(Refusal::new("not unique", "each replica once"));
                }
                Some(url)
            };
            Some(Replicas::Urls(item.items().iter().filter_map(&mut once).collect()))
        }
        Value::Map(_) => {
            let mut section = item.section();
            if let Some(folder) = section.item("model") {
                let folder = folder.read(path);
                if let Some(folder) = &folder {
                    section.names("model", FileKind::Model, folder);
                }
                return served(folder, section);
            }
            let name = section.must("dns", "HOST:PORT", host_and_port);
            let every = section.or("every", Duration::from_secs(5), period);
            let https = section.or("scheme", false, word(&[("http", false), ("https", true)]));
            section.close();
            name.map(|name| Replicas::Dns { name, every, https })
        }
        _ => {
            item.refuse(Refusal::new("wrong type", "a list of URLs, { dns, every } or { model }"));
            None
        }
    }
}

/// Reads the other keys of `replicas: { model: … }`, a model that runs in this process; `None` if
/// `folder` is.
fn served(folder: Option<PathBuf>, mut section: Section<'_>) -> Option<Replicas> {
    let default = ServedModel::of(folder.clone().unwrap_or_default());
    let model = ServedModel {
        name: section.maybe("name", default.name, text),
        device: section.or("device", default.device, word(Device::NAMES)),
        lanes: section.or("lanes", default.lanes, whole(1..=1024)),
        context: section.maybe("context", default.context, whole(1..=1 << 24)),
        threads: section.or("threads", default.threads, whole(0..=1024)),
        path: default.path,
    };
    section.close();
    folder.map(|_| Replicas::Here(model))
}

/// Reads a base URL: scheme, host, port and the path that is put before every request's path.
fn base(node: &Node) -> Result<http::Uri, Refusal> {
    let allowed = "http(s)://HOST[:PORT][/BASE]";
    parse_base(&text(node).map_err(|_| Refusal::new("wrong type", allowed))?)
}

fn host_and_port(node: &Node) -> Result<String, Refusal> {
    let text = text(node)?;
    let good = text.rsplit_once(':').is_some_and(|(host, port)| {
        !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    if good { Ok(text) } else { Err(Refusal::new("not a host with a port", "HOST:PORT")) }
}

fn models(item: &Item<'_>, seen: &mut Seen) -> Vec<Model> {
    item.items().iter().filter_map(|item| model(item, seen)).collect()
}

fn model(item: &Item<'_>, seen: &mut Seen) -> Option<Model> {
    let mut section = item.section();
    let id = section.must("id", "a model id or a pattern", text);
    let aliases = section.list("aliases", Vec::new(), text);
    let base = section.maybe("base", None, text);
    let tokenizer = section.or("tokenizer", TokenizerSource::Backend, |node| match text(node)?.as_str() {
        "backend" => Ok(TokenizerSource::Backend),
        _ => path(node).map(TokenizerSource::File),
    });
    if let TokenizerSource::File(path) = &tokenizer {
        section.names("tokenizer", FileKind::Tokenizer, path);
    }
    let named = id.iter().map(|id| ("id", id)).chain(aliases.iter().map(|alias| ("aliases", alias)));
    for (key, name) in named.filter(|(_, name)| !seen.models.insert((*name).clone())).collect::<Vec<_>>() {
        section.refuse(key, Refusal::new("not unique", "each model once"), &format!("{name:?}"));
    }
    section.close();
    Some(Model { id: Glob::new(&id?), aliases, base, tokenizer })
}

fn connect(mut section: Section<'_>) -> Connect {
    let default = Connect::default();
    let versions = &[("http1", HttpVersion::Http1), ("http2", HttpVersion::Http2)];
    let http = section.or("http", default.http, word(versions));
    let hosts = &[("backend", HostHeader::Backend), ("client", HostHeader::Client)];
    let host = section.or("host", default.host, word(hosts));
    let mut tls = section.section("tls");
    let ca = tls.file("ca", FileKind::Authorities);
    let identity = identity(&mut tls);
    tls.close();
    let mut auth = section.section("auth");
    let pass_auth = auth.or("pass", default.pass_auth, boolean);
    let token_file = auth.file("token_file", FileKind::Secret);
    let own_token_file = auth.file("own_token_file", FileKind::Secret);
    auth.close();
    section.close();
    Connect { http, host, ca, identity, pass_auth, token_file, own_token_file }
}

/// Reads `cert` and `key` of a client certificate. One without the other is a problem, and `None`
/// is returned.
fn identity(tls: &mut Section<'_>) -> Option<(PathBuf, PathBuf)> {
    let cert = tls.file("cert", FileKind::Chain);
    let key = tls.file("key", FileKind::KeyOf(cert.clone().unwrap_or_default()));
    match (cert, key) {
        (Some(cert), Some(key)) => Some((cert, key)),
        (None, None) => None,
        (Some(_), None) => {
            tls.refuse("key", Refusal::new("missing", "the key of `cert`"), "nothing");
            None
        }
        (None, Some(_)) => {
            tls.refuse("cert", Refusal::new("missing", "the certificate of `key`"), "nothing");
            None
        }
    }
}

fn load(mut section: Section<'_>) -> Load {
    let default = Load::default();
    let load = Load {
        url: section.or("url", default.url, |node| {
            let path = text(node)?;
            let good = path.starts_with('/') && path.parse::<http::uri::PathAndQuery>().is_ok();
            if good { Ok(path) } else { Err(Refusal::new("not a path of the backend", "/PATH")) }
        }),
        every: section.or("every", default.every, period),
    };
    section.close();
    load
}

fn methods(mut section: Section<'_>) -> VerifyLimits {
    let default = VerifyLimits::default();
    let names = &[
        ("score", MethodName::Score),
        ("fan_out", MethodName::FanOut),
        ("tree", MethodName::Tree),
        ("native", MethodName::Native),
        ("prediction", MethodName::Prediction),
    ];
    let allow = section.item("allow");
    let methods = VerifyLimits {
        explicit: allow.is_some(),
        allow: allow.map_or(default.allow, |item| item.list(word(names))),
        context_max: section.or("context_max", default.context_max, whole(1..=1 << 24)),
        bytes_max: section.or("bytes_max", default.bytes_max, size),
    };
    section.close();
    methods
}

fn probe(mut section: Section<'_>) -> Probe {
    let default = Probe::default();
    let probe = Probe {
        when: section.or(
            "when",
            default.when,
            word(&[("ready", ProbeWhen::Ready), ("never", ProbeWhen::Never)]),
        ),
        calls: section.or("calls", default.calls, whole(1..=10_000)),
        within: section.or("within", default.within, period),
    };
    section.close();
    probe
}

fn budget(mut section: Section<'_>) -> Budget {
    let default = Budget::default();
    let budget = Budget {
        extra_tokens: section.or("extra_tokens", default.extra_tokens, ratio),
        slots: section.or("slots", default.slots, ratio),
        switchback: section.maybe("switchback", default.switchback, switchback),
    };
    section.close();
    budget
}

/// Reads `WINDOW/EVERY`, such as `30s/10m`.
fn switchback(node: &Node) -> Result<Switchback, Refusal> {
    let refusal =
        || Refusal::new("not a window in a time", "WINDOW/EVERY with WINDOW shorter, such as 30s/10m");
    let text = text(node).map_err(|_| refusal())?;
    let (window, every) = text.split_once('/').ok_or_else(refusal)?;
    let window = values::duration(window).filter(|window| !window.is_zero()).ok_or_else(refusal)?;
    let every = values::duration(every).filter(|every| *every > window).ok_or_else(refusal)?;
    Ok(Switchback { window, every })
}
