//! Settings given by command-line flags and environment variables.

use std::collections::BTreeMap;
use std::path::PathBuf;

use foretell_core::words::Mode;
use foretell_parsers::parse::Parsers;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;

use super::check;
use super::forms::{self, Address, Base, UnixSocket};
use super::named::{FileKind, Named};
use super::problem::{Problem, Refusal};
use super::process::{Backend, Dialect, Listen, Model, Process, Replicas, TokenizerSource, file};
use super::values::Glob;
use super::variables::Strings;
use super::yaml::quote;

/// The path of a tokenizer among the settings.
const TOKENIZER: &str = "backends[0].models[0].tokenizer";

/// The message for an admin address that is reachable by others without a token.
pub const OPEN: &str = "open to others without a token";

/// Settings of the command line, as texts; `None` is a flag that was not given. Each can also be
/// set by the variable `FORETELL_<FLAG>`; the flag takes precedence, and an empty variable counts
/// as unset.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// The config file [env: FORETELL_CONFIG] [default: foretell.yaml, if it exists]
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<String>,
    /// One backend instead of those of the config file [env: FORETELL_BACKEND]
    #[arg(long, value_name = "URL")]
    pub backend: Option<String>,
    /// The tokenizer.json of the model of --backend, or a folder with one, if the server does not
    /// serve it [env: FORETELL_TOKENIZER]
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<String>,
    /// API of the backends' engines
    #[arg(long, value_name = "ENGINE", help = dialects())]
    pub engine: Option<String>,
    /// Address to serve clients on; :PORT is every IPv4 address, localhost:PORT is 127.0.0.1, port
    /// 0 a free one [env: FORETELL_LISTEN] [default: 127.0.0.1:8080]
    #[arg(long, value_name = "IP:PORT")]
    pub listen: Option<String>,
    /// Address of the admin API and the status page; any other than loopback requires
    /// admin.token_file [env: FORETELL_ADMIN] [default: 127.0.0.1:9464]
    #[arg(long, value_name = "IP:PORT")]
    pub admin: Option<String>,
    /// Unix socket of the drafts service, for engines with Foretell's plug-in
    /// [env: FORETELL_DRAFTS]
    #[arg(long, value_name = "unix:PATH")]
    pub drafts: Option<String>,
    /// Mode at the start: observe changes no request and measures what speculation would gain, auto
    /// speculates where that pays, off only passes requests through; POST /api/mode changes it at
    /// run time [env: FORETELL_MODE] [default: auto]
    #[arg(long, value_name = "MODE")]
    pub mode: Option<String>,
    /// Folder of the policies [env: FORETELL_POLICIES] [default: policies, beside the config file]
    #[arg(long, value_name = "DIR")]
    pub policies: Option<String>,
    /// Lowest level of log lines: error, warn, info, debug or trace [env: FORETELL_LOG_LEVEL]
    /// [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// Format of log lines: json, text or auto, which is text on a terminal and JSON elsewhere
    /// [env: FORETELL_LOG_FORMAT] [default: auto]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
}

/// The help of `--engine`.
fn dialects() -> String {
    let names: Vec<&str> = Dialect::NAMES.iter().map(|(name, _)| *name).collect();
    format!("API of the backends' engines: {} [env: FORETELL_ENGINE] [default: auto]", names.join(", "))
}

/// A setting's text and the flag or variable that it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Override {
    text: String,
    source: String,
}

/// Settings from flags and environment, by flag.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides(BTreeMap<&'static str, Override>);

impl Overrides {
    /// Combines both; a flag takes precedence over its variable, and an empty variable counts as
    /// unset.
    pub fn new(flags: &Flags, environment: &dyn Strings) -> Self {
        let given = |(name, flag): (&'static str, &Option<String>)| {
            if let Some(text) = flag {
                return Some((name, Override { text: text.clone(), source: format!("--{name}") }));
            }
            let source = format!("FORETELL_{}", name.replace('-', "_").to_uppercase());
            let text = environment.get(&source).filter(|text| !text.is_empty())?;
            Some((name, Override { text, source }))
        };
        let all = [
            ("config", &flags.config),
            ("backend", &flags.backend),
            ("tokenizer", &flags.tokenizer),
            ("engine", &flags.engine),
            ("listen", &flags.listen),
            ("admin", &flags.admin),
            ("drafts", &flags.drafts),
            ("mode", &flags.mode),
            ("policies", &flags.policies),
            ("log-level", &flags.log_level),
            ("log-format", &flags.log_format),
        ];
        Self(all.into_iter().filter_map(given).collect())
    }

    /// Path of the config file, if a flag or variable sets it.
    pub fn config(&self) -> Option<PathBuf> {
        self.0.get("config").map(|given| PathBuf::from(&given.text))
    }

    /// The flag or variable that sets the policy folder, if one does.
    pub fn policies_source(&self) -> Option<&str> {
        self.0.get("policies").map(|given| given.source.as_str())
    }

    /// The tokenizer, if it is set.
    pub fn named(&self) -> Option<Named> {
        self.0.get("tokenizer").map(|given| Named {
            path: (&given.text).into(),
            kind: FileKind::Tokenizer,
            file: given.source.clone(),
            line: None,
            setting: TOKENIZER.to_owned(),
        })
    }

    /// True if the config file's setting at `setting` stays in force, that is, no flag or
    /// variable replaces it.
    pub fn leaves(&self, setting: &str) -> bool {
        let replaced = [("backend", "backends["), ("listen", "listen["), ("policies", "policies.")];
        !replaced.into_iter().any(|(flag, prefix)| self.0.contains_key(flag) && setting.starts_with(prefix))
    }

    /// Applies these settings to `process`.
    ///
    /// # Errors
    /// Every setting that is malformed or not allowed.
    pub fn apply(&self, process: &mut Process) -> Result<(), Vec<Problem>> {
        let mut problems = Vec::new();
        let mut set = |flag: &str, path: &str, put: &mut dyn FnMut(&str) -> Result<(), Refusal>| {
            let Some(given) = self.0.get(flag) else { return };
            if let Err(refusal) = put(&given.text) {
                problems.push(Problem::new(&given.source, None, path, refusal, quote(&given.text)));
            }
        };
        set("policies", "policies.dir", &mut |dir| {
            process.policies = dir.into();
            Ok(())
        });
        set("mode", "mode", &mut |text| {
            process.mode = word::<Mode>("mode", text)?;
            process.mode_source = self.0.get("mode").map(|given| given.source.clone());
            Ok(())
        });
        let observe = &mut process.observe;
        set("log-level", "observe.level", &mut |text| {
            word("observe/properties/level", text).map(|level| observe.level = level)
        });
        set("log-format", "observe.log", &mut |text| {
            word("observe/properties/log", text).map(|log| observe.log = log)
        });
        set("listen", "listen", &mut |text| {
            process.listen = vec![Listen { address: forms::parse::<Address>(text)?, tls: None }];
            Ok(())
        });
        set("drafts", "drafts.listen", &mut |text| {
            process.drafts.listen = Some(forms::parse::<UnixSocket>(text)?);
            Ok(())
        });
        let admin = &mut process.admin;
        set("admin", "admin.address", &mut |text| {
            forms::parse::<Address>(text).map(|address| admin.address = address)
        });
        let is_open = !admin.address.ip().is_loopback() && admin.token_file.is_none();
        set("admin", "admin.address", &mut |_| {
            let refusal = Refusal::new(OPEN, "a loopback address, or any with admin.token_file");
            if is_open { Err(refusal) } else { Ok(()) }
        });
        let backends = &mut process.backends;
        set("backend", "backends", &mut |text| {
            let replicas = Replicas::Urls(vec![forms::parse::<Base>(text)?]);
            *backends = vec![Backend { replicas, ..Backend::default() }];
            Ok(())
        });
        set("tokenizer", TOKENIZER, &mut |path| {
            let model = self.tokenized(path)?;
            for backend in backends.iter_mut() {
                backend.models = vec![model.clone()];
            }
            Ok(())
        });
        set("engine", "backends[0].engine", &mut |text| {
            let dialect: Dialect = word("backends/items/properties/engine", text)?;
            for backend in backends.iter_mut() {
                backend.dialect = dialect;
            }
            Ok(())
        });
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    /// Every model of the one server, with this tokenizer.
    fn tokenized(&self, path: &str) -> Result<Model, Refusal> {
        if !self.0.contains_key("backend") {
            return Err(Refusal::new("no server for it", "together with --backend URL"));
        }
        Ok(Model {
            id: Glob::new("*"),
            aliases: Vec::new(),
            base: None,
            tokenizer: TokenizerSource::File(path.into()),
            parsers: Parsers::default(),
            generation_config: None,
        })
    }
}

/// The value with this name, as the setting at `path` of the schema takes it.
fn word<T: DeserializeOwned>(path: &str, text: &str) -> Result<T, Refusal> {
    let schema = file::settings().pointer(&format!("/properties/{path}"));
    check::word(schema.unwrap_or(&Json::Null), text)
}
