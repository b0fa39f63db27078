//! Reading the backends of a config file.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;

use super::{
    Backend, Connect, Dialect, HostHeader, Load, Model, Probe, ProbeWhen, Render, Replicas, TokenizerSource,
    VerifyLimits,
};
use crate::kind::{Kind, base, boolean, path, period, ratio, size, text, url, whole, word};
use crate::named::FileKind;
use crate::problem::Refusal;
use crate::read::{Item, Section};
use crate::values::Glob;
use crate::yaml::{Node, Value};
use foretell_core::words::VerifyMethod;
use foretell_engines::Dialect as Engine;
use foretell_parsers::parse::{Parsers, ReasoningFormat, ToolFormat};
use foretell_wire::openai::Api;

impl Default for Connect {
    fn default() -> Self {
        Self {
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
        let allow = vec![VerifyMethod::Score, VerifyMethod::FanOut, VerifyMethod::Tree];
        Self { allow, explicit: false, context_max: 8192, bytes_max: 2 << 20 }
    }
}

impl Default for Probe {
    fn default() -> Self {
        Self { when: ProbeWhen::default(), calls: 40, within: Duration::from_secs(10) }
    }
}

/// Share of the free sequences that verify requests by fan-out take on a backend without `budget`.
pub(crate) const SLOTS: f64 = 0.10;

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
    section.with(None, "description", json!("A service."));
    let name = section.must("name", "Its name in metrics, log and policies.", "a text", &text());
    if let Some(name) = name.as_ref().filter(|name| !seen.names.insert((*name).clone())) {
        section.refuse("name", Refusal::new("not unique", "a name of its own"), &format!("{name:?}"));
    }
    let default =
        section.or("default", "It gets requests for models that no backend lists.", false, &boolean());
    if default && std::mem::replace(&mut seen.default, true) {
        section.refuse("default", Refusal::new("not unique", "one default backend"), "true");
    }
    let dialect = section.or("engine", "API of its engine.", Dialect::default(), &word(Dialect::NAMES));
    let replicas = section.item("replicas", "One KV cache each.");
    section.require("replicas");
    if replicas.is_none() {
        section.refuse("replicas", Refusal::new("missing", "a list of URLs or { dns, every }"), "nothing");
    }
    let replicas = replicas.and_then(|item| self::replicas(&item));
    let ranks = section.or(
        "ranks",
        "Data-parallel ranks at each address, each a replica; 0: none.",
        0,
        &whole(0..=1024),
    );
    let says = "backend: its own pages render chats; else the URL of a `vllm launch render` for its model; null: nothing does.";
    let render = section.maybe("render", says, Some(Render::Backend), &render()).unwrap_or(Render::Never);
    if render != Render::Backend && !dialect.may_be(Engine::Vllm) {
        section.refuse("render", Refusal::new("not of this engine", "vllm|auto"), dialect.name());
    }
    let translates = routes(section.section("routes", "APIs other than chats and completions."));
    let models = section.item("models", "Its models.").map_or_else(Vec::new, |item| models(&item, seen));
    let connect = connect(section.section("connect", "Connections to it."));
    let load = load(section.section("load", "The engine's load report."));
    let methods = methods(section.section("verify", "Verification methods and their limits."));
    let probe = probe(section.section("probe", "Measurement of verification costs."));
    let slots = slots(section.section("budget", "Cost that speculation may impose on other requests."));
    let billed =
        section.or("billed", "It bills per token: no verify request is sent to it.", false, &boolean());
    section.close();
    Some(Backend {
        name: name?,
        dialect,
        replicas: replicas?,
        ranks,
        render,
        translates,
        models,
        connect,
        load,
        methods,
        probe,
        slots,
        billed,
        default,
    })
}

/// `backend`, or the URL of a server that renders for it.
fn render() -> Kind<Render> {
    let read = |node: &Node| {
        if text().read(node)? == "backend" {
            return Ok(Render::Backend);
        }
        let refused =
            |refusal: Refusal| Refusal { allowed: format!("backend|{}", refusal.allowed), ..refusal };
        url().read(node).map(Render::By).map_err(refused)
    };
    Kind::new(json!({ "type": "string", "pattern": "^(backend$|https?://)" }), read)
        .shown(|_| json!("backend"))
}

/// The APIs whose requests are translated.
fn routes(mut section: Section<'_>) -> Vec<Api> {
    let ways = &[("pass", false), ("translate", true)];
    let says = "pass: passed through; translate: sent as chats, which are eligible.";
    let mut translated = vec![Api::Messages, Api::Responses];
    translated.retain(|api| section.or(api.name(), says, false, &word(ways)));
    section.close();
    translated
}

fn replicas(item: &Item<'_>) -> Option<Replicas> {
    if item.slot().is_some() {
        let [list, dns] = ["", "Addresses that a name resolves to."].map(|says| item.alternative(says));
        urls(&list?);
        by_name(dns?.section());
        return None;
    }
    match &item.node.value {
        Value::List(nodes) if nodes.is_empty() => {
            item.refuse(Refusal::new("empty", "at least one URL"));
            None
        }
        Value::List(_) => Some(Replicas::Urls(urls(item))),
        Value::Map(_) => by_name(item.section()),
        _ => {
            item.refuse(Refusal::new("wrong type", "a list of URLs or { dns, every }"));
            None
        }
    }
}

fn urls(item: &Item<'_>) -> Vec<http::Uri> {
    let mut seen = HashSet::new();
    let mut once = |item: &Item<'_>| {
        let url = item.read(&base())?;
        if !seen.insert(url.clone()) {
            item.refuse(Refusal::new("not unique", "each replica once"));
        }
        Some(url)
    };
    let urls = item.items().iter().filter_map(&mut once).collect();
    for (keyword, value) in [("minItems", json!(1)), ("uniqueItems", json!(true))] {
        if let Some(slot) = item.slot() {
            slot.with(keyword, value);
        }
    }
    urls
}

fn by_name(mut section: Section<'_>) -> Option<Replicas> {
    let name = section.must("dns", "HOST:PORT.", "HOST:PORT", &host_and_port());
    let every = section.or("every", "Interval of resolving it.", Duration::from_secs(5), &period());
    let schemes = word(&[("http", false), ("https", true)]);
    let https = section.or("scheme", "Scheme of their URLs.", false, &schemes);
    section.close();
    name.map(|name| Replicas::Dns { name, every, https })
}

/// A host name with a port.
fn host_and_port() -> Kind<String> {
    let good = |text: &str| {
        text.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok_and(|port| port > 0)
        })
    };
    let refusal = || Refusal::new("not a host with a port", "HOST:PORT");
    let read = move |node: &Node| {
        let text = text().read(node)?;
        if good(&text) { Ok(text) } else { Err(refusal()) }
    };
    Kind::new(json!({ "type": "string", "pattern": r"^[^/]+:\d*[1-9]\d*$" }), read)
}

/// Settings that a backend's models share, as the first of them that names it says.
#[derive(Default)]
struct Common {
    ids: Vec<String>,
    tokenizer: Option<PathBuf>,
    parsers: Option<Parsers>,
    generation_config: Option<PathBuf>,
}

fn models(item: &Item<'_>, seen: &mut Seen) -> Vec<Model> {
    let mut common = Common::default();
    item.items().iter().filter_map(|item| model(item, seen, &mut common)).collect()
}

fn model(item: &Item<'_>, seen: &mut Seen, common: &mut Common) -> Option<Model> {
    let mut section = item.section();
    section.with(None, "description", json!("A model."));
    let id = section.must("id", "Its id, or a pattern with * and ?.", "a model id or a pattern", &text());
    let aliases = section.list("aliases", "Further names of it.", Vec::new(), &text());
    let says = "Id of the model before it that it is an adapter of, for the reader: all models of a backend share \
                tokenizer, parsers and sampling defaults.";
    let base = section.maybe("base", says, None, &text());
    if let Some(base) = base.filter(|base| !common.ids.contains(base)) {
        section.refuse(
            "base",
            Refusal::new(
                "not a model before it",
                if common.ids.is_empty() { "none is".to_owned() } else { common.ids.join("|") },
            ),
            &format!("{base:?}"),
        );
    }
    common.ids.extend(id.clone());
    let source = |node: &Node| match text().read(node)?.as_str() {
        "backend" => Ok(TokenizerSource::Backend),
        _ => path().read(node).map(TokenizerSource::File),
    };
    let source = Kind::new(json!({ "type": "string", "minLength": 1 }), source).shown(|_| json!("backend"));
    let says = "backend: fetched from the server; else a tokenizer.json, or a folder with one.";
    let tokenizer = section.or("tokenizer", says, TokenizerSource::Backend, &source);
    if let TokenizerSource::File(path) = &tokenizer {
        section.names("tokenizer", FileKind::Tokenizer, path);
        if common.tokenizer.get_or_insert_with(|| path.clone()) != path {
            section.refuse("tokenizer", other_model(), &format!("{:?}", path.display().to_string()));
        }
    }
    let named = id.iter().map(|id| ("id", id)).chain(aliases.iter().map(|alias| ("aliases", alias)));
    for (key, name) in named.filter(|(_, name)| !seen.models.insert((*name).clone())).collect::<Vec<_>>() {
        section.refuse(key, Refusal::new("not unique", "each model once"), &format!("{name:?}"));
    }
    let says = "Output parsers that its server was started with; auto: those that it tells.";
    let parsers = section.item("parsers", says).map_or_else(Parsers::default, |item| parsers(&item));
    let named = Some(parsers).filter(|parsers| *parsers != Parsers::default());
    if named.is_some_and(|parsers| *common.parsers.get_or_insert(parsers) != parsers) {
        section.refuse("parsers", other_model(), "others");
    }
    let says = "vLLM and SGLang: its generation_config.json, or a folder with one, from which the server takes sampling \
                defaults; without it the one beside the tokenizer is read.";
    let generation_config = section.file("generation_config", says, FileKind::GenerationConfig);
    if let Some(path) = &generation_config
        && common.generation_config.get_or_insert_with(|| path.clone()) != path
    {
        section.refuse("generation_config", other_model(), &format!("{:?}", path.display().to_string()));
    }
    section.close();
    Some(Model { id: Glob::new(&id?), aliases, tokenizer, parsers, generation_config })
}

/// Tokenizer, parsers and sampling defaults belong to the server, which has one of each.
fn other_model() -> Refusal {
    Refusal::new("not that of an earlier model", "the same for all models of a backend, or another backend")
}

/// `auto`, or a parser by each of the server's two flags.
fn parsers(item: &Item<'_>) -> Parsers {
    if item.slot().is_some() {
        let [auto, named] = ["Those that the server tells.", "As its flags name them."];
        if let Some(auto) = item.alternative(auto) {
            auto.read(&word(&[("auto", ())]));
        }
        return item.alternative(named).map(|named| named_parsers(named.section())).unwrap_or_default();
    }
    if matches!(item.node.value, Value::Map(_)) {
        return named_parsers(item.section());
    }
    item.read(&word(&[("auto", ())]));
    Parsers::default()
}

fn named_parsers(mut section: Section<'_>) -> Parsers {
    let tools = parser(ToolFormat::ALL.iter().flat_map(|format| format.names()), ToolFormat::from_name);
    let reasoning =
        parser(ReasoningFormat::ALL.iter().flat_map(|format| format.names()), ReasoningFormat::from_name);
    let parsers = Parsers {
        tools: section.or("tools", "Its --tool-call-parser.", None, &tools),
        reasoning: section.or("reasoning", "Its --reasoning-parser.", None, &reasoning),
    };
    section.close();
    parsers
}

/// The name of a parser, or null for none.
fn parser<T: 'static>(
    names: impl Iterator<Item = &'static &'static str>,
    of: fn(&str) -> Option<T>,
) -> Kind<Option<T>> {
    let names: Vec<&'static str> = names.copied().collect();
    let schema = json!({ "enum": names.iter().copied().map(Some).chain([None]).collect::<Vec<_>>() });
    let read = move |node: &Node| {
        if node.value == Value::Null {
            return Ok(None);
        }
        let name = text().read(node)?;
        let refusal = || Refusal::new("unknown parser", names.join("|")).near(&name, &names);
        of(&name).map(Some).ok_or_else(refusal)
    };
    Kind::new(schema, read)
}

fn connect(mut section: Section<'_>) -> Connect {
    let default = Connect::default();
    let http1 = word(&[("http1", ())]);
    section.or("http", "Its version of HTTP; http1 is the only one.", (), &http1);
    let hosts = &[("backend", HostHeader::Backend), ("client", HostHeader::Client)];
    let host = section.or("host", "Source of the Host field.", default.host, &word(hosts));
    let mut tls = section.section("tls", "Certificates for https.");
    let ca = tls.file("ca", "Authorities of the server's certificate, PEM.", FileKind::Authorities);
    let identity = identity(&mut tls);
    tls.close();
    let mut auth = section.section("auth", "API keys.");
    let pass_auth = auth.or("pass", "Pass on the client's own.", default.pass_auth, &boolean());
    let token_file = auth.file("token_file", "File with a key that replaces the client's.", FileKind::Secret);
    let own = "File with the key of Foretell's own calls, never used for a client's.";
    let own_token_file = auth.file("own_token_file", own, FileKind::Secret);
    auth.close();
    section.close();
    Connect { host, ca, identity, pass_auth, token_file, own_token_file }
}

/// Reads `cert` and `key` of a client certificate. One without the other is a problem, and `None`
/// is returned.
fn identity(tls: &mut Section<'_>) -> Option<(PathBuf, PathBuf)> {
    let cert = tls.file("cert", "Foretell's own certificate, PEM.", FileKind::Chain);
    let key = tls.file("key", "Its key, PEM.", FileKind::KeyOf(cert.clone().unwrap_or_default()));
    tls.with(None, "dependentRequired", json!({ "cert": ["key"], "key": ["cert"] }));
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
    let read = |node: &Node| {
        let path = text().read(node)?;
        let good = path.starts_with('/') && path.parse::<http::uri::PathAndQuery>().is_ok();
        if good { Ok(path) } else { Err(Refusal::new("not a path of the backend", "/PATH")) }
    };
    let url = Kind::new(json!({ "type": "string", "pattern": "^/" }), read).shown(|path| json!(path));
    let load = Load {
        url: section.or("url", "A path of the backend.", default.url, &url),
        every: section.or("every", "Interval of reading it.", default.every, &period()),
    };
    section.close();
    load
}

/// Entries of `verify.allow`.
const ALLOWED: &[(&str, VerifyMethod)] =
    &[named(VerifyMethod::Score), named(VerifyMethod::FanOut), named(VerifyMethod::Tree)];
const _: () = assert!(ALLOWED.len() == VerifyMethod::ALL.len(), "every method can be allowed");

const fn named(method: VerifyMethod) -> (&'static str, VerifyMethod) {
    (method.name(), method)
}

fn methods(mut section: Section<'_>) -> VerifyLimits {
    let default = VerifyLimits::default();
    let allow = section.item("allow", "Allowed methods. Default: score, fan_out, tree.");
    let allow = allow.map(|item| item.list(&word(ALLOWED)));
    let methods = VerifyLimits {
        explicit: allow.is_some(),
        allow: allow.unwrap_or(default.allow),
        context_max: section.or(
            "context_max",
            "Maximum context of a verify request, tokens.",
            default.context_max,
            &whole(1..=1 << 24),
        ),
        bytes_max: section.or("bytes_max", "Maximum size of a round's requests.", default.bytes_max, &size()),
    };
    section.close();
    methods
}

fn probe(mut section: Section<'_>) -> Probe {
    let default = Probe::default();
    let when = word(&[("ready", ProbeWhen::Ready), ("never", ProbeWhen::Never)]);
    let probe = Probe {
        when: section.or("when", "When it runs; ready: as soon as a replica is ready.", default.when, &when),
        calls: section.or("calls", "Maximum calls.", default.calls, &whole(1..=10_000)),
        within: section.or("within", "Maximum time.", default.within, &period()),
    };
    section.close();
    probe
}

fn slots(mut section: Section<'_>) -> f64 {
    let says = "Sequences that verify requests by fan-out take while others' requests run ÷ free ones.";
    let slots = section.or("slots", says, SLOTS, &ratio());
    section.close();
    slots
}
