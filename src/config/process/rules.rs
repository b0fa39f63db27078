//! Rules between the settings of a config file, the defaults that depend on other settings, and
//! the files that settings name.

use std::collections::HashSet;
use std::path::PathBuf;

use super::{
    Admin, Backend, ClientTls, Connect, Corpus, DrafterModel, Fleet, Listen, Model, Process, Render,
    Replicas, Tenant, TokenizerSource,
};
use crate::at::At;
use crate::flags::OPEN;
use crate::named::{FileKind, shown};
use crate::problem::Refusal;
use foretell_engines::Dialect as Engine;
use foretell_net::http::listen::Bounds;
use foretell_parsers::parse::Parsers;

/// Header fields with credentials: those of HTTP, and the keys of the APIs that are passed through.
const CREDENTIALS: [&str; 6] =
    ["authorization", "proxy-authorization", "cookie", "x-api-key", "api-key", "x-goog-api-key"];

impl Process {
    /// Reports what breaks a rule between settings, completes the settings that depend on others,
    /// and names the files.
    pub(super) fn settle(&mut self, at: &At<'_>) {
        listeners(&self.listen, &at.key("listen"));
        self.admin.settle(&at.key("admin"));
        let timeouts = &self.timeouts;
        self.limits.head = Bounds {
            header_timeout: timeouts.header,
            body: timeouts.body,
            keep_alive: timeouts.keep_alive,
            ..self.limits.head
        };
        self.drain.early = !at.key("drain").has("delay");
        self.tenant.settle(&at.key("tenant"));
        backends(&mut self.backends, &at.key("backends"));
        for (name, drafter) in &self.drafters {
            drafter.settle(&at.key("drafters").key(name));
        }
        self.corpus.settle(&at.key("corpus"), self.limits.memory);
        self.fleet.settle(&at.key("fleet"));
        let dir = self.policy_files.dir.as_deref();
        at.key("policies").names("dir", FileKind::Policies, dir);
        if let Some(dir) = dir {
            self.policies = dir.to_owned();
        }
    }
}

fn not_unique(allowed: &str) -> Refusal {
    Refusal::new("not unique", allowed)
}

fn listeners(listen: &[Listen], at: &At<'_>) {
    let mut seen = HashSet::new();
    for (listen, at) in listen.iter().zip(at.items()) {
        let address = listen.address;
        if address.port() != 0 && !seen.insert(address) {
            at.refuse("address", not_unique("each address once"), format!("{:?}", address.to_string()));
        }
        let Some(tls) = &listen.tls else { continue };
        let at = at.key("tls");
        at.names("cert", FileKind::Chain, Some(&tls.cert));
        at.names("key", FileKind::KeyOf(tls.cert.clone()), Some(&tls.key));
        at.names("client_ca", FileKind::Authorities, tls.client_ca.as_deref());
    }
}

impl Admin {
    fn settle(&self, at: &At<'_>) {
        if !self.address.ip().is_loopback() && self.token_file.is_none() {
            let refusal = Refusal::new(OPEN, "a loopback address, or any with token_file");
            at.refuse("address", refusal, format!("{:?}", self.address.to_string()));
        }
        at.names("token_file", FileKind::Secret, self.token_file.as_deref());
    }
}

impl Tenant {
    fn settle(&self, at: &At<'_>) {
        if let Some(header) = self.header.as_deref()
            && CREDENTIALS.contains(&header)
        {
            let allowed = "a header that only names it; for keys: fallback: authorization_hash";
            let refusal = Refusal::new("it has a credential, and tenants are shown and recorded", allowed);
            at.refuse("header", refusal, format!("{header:?}"));
        }
    }
}

impl DrafterModel {
    fn settle(&self, at: &At<'_>) {
        at.names("tokenizer", FileKind::Tokenizer, self.tokenizer.as_deref());
        at.names("path", FileKind::Drafter { tokenizer: self.tokenizer.is_none() }, Some(&self.path));
    }
}

impl Corpus {
    /// `memory`: `limits.memory`. Drafters may take half of it; the rest is for bodies and
    /// sessions.
    fn settle(&mut self, at: &At<'_>, memory: u64) {
        if !at.has("bytes") {
            self.bytes = self.bytes.min(memory / 2);
        } else if self.bytes > memory / 2 {
            at.refuse(
                "bytes",
                Refusal::new("too much", "at most half of limits.memory"),
                self.bytes.to_string(),
            );
        }
        if let Some(record) = &self.record {
            at.key("record").names("key_file", FileKind::Key, record.key_file.as_deref());
        }
    }
}

impl Fleet {
    fn settle(&self, at: &At<'_>) {
        let store = self.store.as_ref();
        if self.password_file.is_some() && store.is_some_and(|store| store.password.is_some()) {
            let allowed = "a password in the URL or in a file, not both";
            at.refuse("password_file", Refusal::new("a second password", allowed), "a file");
        }
        if self.ca.is_some() && store.is_some_and(|store| !store.tls) {
            at.refuse("ca", Refusal::new("no TLS", "a store at rediss://"), "a file");
        }
        at.names("password_file", FileKind::Secret, self.password_file.as_deref());
        at.names("ca", FileKind::Authorities, self.ca.as_deref());
    }
}

/// Values of the backends before one, which must be unique in the file.
#[derive(Default)]
struct Seen {
    names: HashSet<String>,
    models: HashSet<String>,
    default: bool,
}

fn backends(backends: &mut [Backend], at: &At<'_>) {
    let mut seen = Seen::default();
    for (backend, at) in backends.iter_mut().zip(at.items()) {
        backend.settle(&at, &mut seen);
    }
}

impl Backend {
    fn settle(&mut self, at: &At<'_>, seen: &mut Seen) {
        if !seen.names.insert(self.name.clone()) {
            at.refuse("name", not_unique("a name of its own"), format!("{:?}", self.name));
        }
        if self.default && std::mem::replace(&mut seen.default, true) {
            at.refuse("default", not_unique("one default backend"), "true");
        }
        if let Replicas::Urls(urls) = &self.replicas {
            let mut known = HashSet::new();
            for (url, at) in urls.iter().zip(at.key("replicas").items()) {
                if !known.insert(url) {
                    at.refuse_this(not_unique("each replica once"));
                }
            }
        }
        if self.render != Render::Backend && !self.dialect.may_be(Engine::Vllm) {
            at.refuse("render", Refusal::new("not of this engine", "vllm|auto"), self.dialect.name());
        }
        let mut common = Common::default();
        for (model, at) in self.models.iter().zip(at.key("models").items()) {
            model.settle(&at, seen, &mut common);
        }
        self.connect.settle(&at.key("connect"));
        self.methods.explicit = at.key("verify").has("allow");
    }
}

/// Settings that a backend's models share, as the first of them that names it says.
#[derive(Default)]
struct Common {
    ids: Vec<String>,
    tokenizer: Option<PathBuf>,
    parsers: Option<Parsers>,
    generation_config: Option<PathBuf>,
}

impl Model {
    fn settle(&self, at: &At<'_>, seen: &mut Seen, common: &mut Common) {
        if let Some(base) = self.base.as_ref().filter(|base| !common.ids.contains(base)) {
            let before = if common.ids.is_empty() { "none is".to_owned() } else { common.ids.join("|") };
            at.refuse("base", Refusal::new("not a model before it", before), format!("{base:?}"));
        }
        common.ids.push(self.id.as_str().to_owned());
        let aliases = self.aliases.iter().map(|alias| ("aliases", alias.as_str()));
        for (key, name) in [("id", self.id.as_str())].into_iter().chain(aliases) {
            if !seen.models.insert(name.to_owned()) {
                at.refuse(key, not_unique("each model once"), format!("{name:?}"));
            }
        }
        if let TokenizerSource::File(path) = &self.tokenizer {
            at.names("tokenizer", FileKind::Tokenizer, Some(path));
            shared(&mut common.tokenizer, path, "tokenizer", at);
        }
        if self.parsers != Parsers::default() && *common.parsers.get_or_insert(self.parsers) != self.parsers {
            at.refuse("parsers", other_model(), "others");
        }
        if let Some(path) = &self.generation_config {
            at.names("generation_config", FileKind::GenerationConfig, Some(path));
            shared(&mut common.generation_config, path, "generation_config", at);
        }
    }
}

/// Reports a file that is not that of the models before.
fn shared(common: &mut Option<PathBuf>, path: &PathBuf, key: &str, at: &At<'_>) {
    if common.get_or_insert_with(|| path.clone()) != path {
        at.refuse(key, other_model(), shown(path));
    }
}

/// Tokenizer, parsers and sampling defaults belong to the server, which has one of each.
fn other_model() -> Refusal {
    Refusal::new("not that of an earlier model", "the same for all models of a backend, or another backend")
}

impl Connect {
    fn settle(&self, at: &At<'_>) {
        let ClientTls { ca, cert, key } = &self.tls;
        let (tls, auth) = (at.key("tls"), at.key("auth"));
        tls.names("ca", FileKind::Authorities, ca.as_deref());
        tls.names("cert", FileKind::Chain, cert.as_deref());
        tls.names("key", FileKind::KeyOf(cert.clone().unwrap_or_default()), key.as_deref());
        if cert.is_some() && key.is_none() {
            tls.refuse("key", Refusal::new("missing", "the key of `cert`"), "nothing");
        }
        if key.is_some() && cert.is_none() {
            tls.refuse("cert", Refusal::new("missing", "the certificate of `key`"), "nothing");
        }
        auth.names("token_file", FileKind::Secret, self.auth.token_file.as_deref());
        auth.names("own_token_file", FileKind::Secret, self.auth.own_token_file.as_deref());
    }
}
