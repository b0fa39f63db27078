//! Settings given by command-line flags and environment variables.

use foretell_parsers::parse::Parsers;
use http::Uri;
use std::path::PathBuf;

use super::kind::{parse_address, parse_base};
use super::named::{FileKind, Named};
use super::problem::{Problem, Refusal};
use super::process::{
    Backend, Connect, Dialect, Load, LogFormat, LogLevel, MODE_HINTS, MODES, Model, Process, Replicas,
    TokenizerSource, VerifyLimits,
};
use super::values::Glob;
use super::yaml::quote;

/// The path of a tokenizer among the settings.
const TOKENIZER: &str = "backends[0].models[0].tokenizer";

/// The message for an admin address that is reachable by others without a token.
pub const OPEN: &str = "open to others without a token";

/// A source of named texts, such as the environment; parsing accesses the outside world only
/// through it.
pub trait Strings {
    /// The text of this name, if it exists.
    fn get(&self, name: &str) -> Option<String>;
}

/// The environment of the process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Environment;

impl Strings for Environment {
    fn get(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }
}

impl Strings for std::collections::BTreeMap<String, String> {
    fn get(&self, name: &str) -> Option<String> {
        Self::get(self, name).cloned()
    }
}

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

/// Settings from flags and environment; a flag takes precedence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    config: Option<Override>,
    backend: Option<Override>,
    tokenizer: Option<Override>,
    dialect: Option<Override>,
    listen: Option<Override>,
    admin: Option<Override>,
    mode: Option<Override>,
    policies: Option<Override>,
    log_level: Option<Override>,
    log_format: Option<Override>,
}

impl Overrides {
    /// Combines both; a flag takes precedence over its variable, and an empty variable counts as
    /// unset.
    pub fn new(flags: &Flags, environment: &dyn Strings) -> Self {
        let given = |flag: &Option<String>, name: &str| {
            if let Some(text) = flag {
                return Some(Override { text: text.clone(), source: format!("--{name}") });
            }
            let source = format!("FORETELL_{}", name.replace('-', "_").to_uppercase());
            let text = environment.get(&source).filter(|text| !text.is_empty())?;
            Some(Override { text, source })
        };
        Self {
            config: given(&flags.config, "config"),
            backend: given(&flags.backend, "backend"),
            tokenizer: given(&flags.tokenizer, "tokenizer"),
            dialect: given(&flags.engine, "engine"),
            listen: given(&flags.listen, "listen"),
            admin: given(&flags.admin, "admin"),
            mode: given(&flags.mode, "mode"),
            policies: given(&flags.policies, "policies"),
            log_level: given(&flags.log_level, "log-level"),
            log_format: given(&flags.log_format, "log-format"),
        }
    }

    /// Path of the config file, if a flag or variable sets it.
    pub fn config(&self) -> Option<PathBuf> {
        self.config.as_ref().map(|given| PathBuf::from(&given.text))
    }

    /// Path of the policy folder, if a flag or variable sets it.
    pub fn policies(&self) -> Option<PathBuf> {
        self.policies.as_ref().map(|given| PathBuf::from(&given.text))
    }

    /// The flag or variable that sets the policy folder, if one does.
    pub fn policies_source(&self) -> Option<&str> {
        self.policies.as_ref().map(|given| given.source.as_str())
    }

    /// The tokenizer, if it is set.
    pub fn named(&self) -> Option<Named> {
        self.tokenizer.as_ref().map(|given| Named {
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
        let replaced =
            [(&self.backend, "backends["), (&self.listen, "listen["), (&self.policies, "policies.")];
        !replaced.into_iter().any(|(given, prefix)| given.is_some() && setting.starts_with(prefix))
    }

    /// Applies these settings to `process`.
    ///
    /// # Errors
    /// Every setting that is malformed or not allowed.
    pub fn apply(&self, process: &mut Process) -> Result<(), Vec<Problem>> {
        let mut problems = Vec::new();
        if let Some(dir) = self.policies() {
            process.policies = dir;
        }
        if let Some(given) = &self.mode {
            match one_of(&given.text, MODES) {
                Ok(mode) => (process.mode, process.mode_source) = (mode, Some(given.source.clone())),
                Err(refusal) => {
                    problems.push(problem(given, "mode", refusal.hinted(&given.text, MODE_HINTS)));
                }
            }
        }
        let observe = &mut process.observe;
        let level = |text: &str| one_of(text, LogLevel::NAMES);
        set(self.log_level.as_ref(), "observe.level", &mut problems, level, |level| observe.level = level);
        let format = |text: &str| one_of(text, LogFormat::NAMES);
        set(self.log_format.as_ref(), "observe.log", &mut problems, format, |format| observe.log = format);
        set(self.listen.as_ref(), "listen", &mut problems, parse_address, |address| {
            process.listen = vec![super::process::Listen { address, tls: None }];
        });
        set(self.admin.as_ref(), "admin.address", &mut problems, parse_address, |address| {
            process.admin.address = address;
        });
        let needs_token = !process.admin.address.ip().is_loopback() && process.admin.token_file.is_none();
        if let Some(given) = self.admin.as_ref().filter(|_| needs_token) {
            let allowed = "a loopback address, or any with admin.token_file";
            let refusal = Refusal::new(OPEN, allowed);
            problems.push(problem(given, "admin.address", refusal));
        }
        set(self.backend.as_ref(), "backends", &mut problems, parse_base, |url| {
            process.backends = vec![one_backend(url)];
        });
        set(
            self.tokenizer.as_ref(),
            TOKENIZER,
            &mut problems,
            |path| self.tokenized(path),
            |model| process.backends.iter_mut().for_each(|backend| backend.models = vec![model.clone()]),
        );
        let dialect = |text: &str| one_of(text, Dialect::NAMES);
        set(self.dialect.as_ref(), "backends[0].engine", &mut problems, dialect, |dialect| {
            process.backends.iter_mut().for_each(|backend| backend.dialect = dialect);
        });
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}

impl Overrides {
    /// Every model of the one server, with this tokenizer.
    fn tokenized(&self, path: &str) -> Result<Model, Refusal> {
        if self.backend.is_none() {
            return Err(Refusal::new("no server for it", "together with --backend URL"));
        }
        Ok(Model {
            id: Glob::new("*"),
            aliases: Vec::new(),
            tokenizer: TokenizerSource::File(path.into()),
            parsers: Parsers::default(),
            generation_config: None,
        })
    }
}

fn set<T>(
    given: Option<&Override>,
    path: &str,
    problems: &mut Vec<Problem>,
    parse: impl FnOnce(&str) -> Result<T, Refusal>,
    put: impl FnOnce(T),
) {
    let Some(given) = given else { return };
    match parse(&given.text) {
        Ok(value) => put(value),
        Err(refusal) => problems.push(problem(given, path, refusal)),
    }
}

fn problem(given: &Override, path: &str, refusal: Refusal) -> Problem {
    Problem::new(&given.source, None, path, refusal, quote(&given.text))
}

/// The value with this name.
fn one_of<T: Copy>(text: &str, all: &[(&str, T)]) -> Result<T, Refusal> {
    let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
    let found = all.iter().find(|(name, _)| *name == text);
    found
        .map(|(_, value)| *value)
        .ok_or_else(|| Refusal::new("unknown value", names.join("|")).near(text, &names))
}

fn one_backend(url: Uri) -> Backend {
    Backend {
        name: "default".to_owned(),
        dialect: Dialect::default(),
        replicas: Replicas::Urls(vec![url]),
        ranks: 0,
        render: super::process::Render::default(),
        translates: Vec::new(),
        models: Vec::new(),
        connect: Connect::default(),
        load: Load::default(),
        methods: VerifyLimits::default(),
        probe: super::process::Probe::default(),
        slots: super::process::SLOTS,
        billed: false,
        default: false,
    }
}
