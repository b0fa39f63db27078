//! `foretell bench`: compares a server called directly with the same server called through
//! Foretell.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Exit;
use super::access::{Access, Denied, Granted};
use super::progress;
use crate::bench::about::{self, About};
use crate::bench::alternate::Side;
use crate::bench::client::{self, Client, Url};
use crate::bench::probed::{Probed, Useless};
use crate::bench::require::Requirement;
use crate::bench::run::{self, Bench, CostSource, Stopped, TargetCosts};
use crate::bench::stream::Failure;
use crate::bench::tally::Run;
use crate::bench::workload::{BUILTIN, Prompt, Workload};
use crate::bench::{html, report};
use foretell_config::process::Dialect;
use foretell_net::fleet::Replica;
use foretell_net::fleet::identity::{self, Recognised, Renderer};

/// Compare a server called directly with the same server called through Foretell.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchArgs {
    /// Address of the server itself
    #[arg(long, value_name = "URL")]
    pub direct: Url,
    /// The same server through Foretell.
    #[arg(long, value_name = "URL")]
    pub through: Url,
    /// Files of prompts, one {"route": "completions" or "chat", "body": {the request}} per line;
    /// `builtin` is 20 tasks of rewriting, editing and extracting for any instruct model.
    #[arg(long, value_name = "F", default_value = BUILTIN, num_args = 1.., value_delimiter = ',')]
    pub workload: Vec<PathBuf>,
    /// Concurrent clients; one run for each number.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1")]
    pub concurrency: Vec<usize>,
    /// Temperatures; one run for each.
    #[arg(long, value_name = "T,T", value_delimiter = ',', default_value = "0")]
    pub temperature: Vec<f64>,
    /// Alternations of each run: a block of 5 prompts per client each way.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub alternations: usize,
    /// Give each prompt a fixed seed above temperature 0, so that texts can be compared.
    #[arg(long)]
    pub seeded: bool,
    /// Maximum output tokens of every prompt, instead of the workload's.
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// The model of every prompt, instead of the workload's [default for `builtin`: the first
    /// that the server lists].
    #[arg(long, value_name = "M")]
    pub model: Option<String>,
    /// Header fields and TLS settings for both servers.
    #[command(flatten)]
    pub access: Access,
    /// Metrics page of Foretell, for the gain predicted by the formula; with one of the next two.
    #[arg(long, value_name = "URL", requires = "costs")]
    pub metrics_through: Option<Url>,
    /// Metrics page of a target that times its steps (`foretell target`).
    #[arg(long, value_name = "URL", requires = "metrics_through", group = "costs")]
    pub metrics_direct: Option<Url>,
    /// Output of `foretell probe URL --json`, for a target that does not time its steps.
    #[arg(long, value_name = "F", requires = "metrics_through", group = "costs")]
    pub probe: Option<PathBuf>,
    /// Write the figures as JSON.
    #[arg(long, value_name = "F")]
    pub json: Option<PathBuf>,
    /// Write a page with plots.
    #[arg(long, value_name = "F")]
    pub html: Option<PathBuf>,
    /// Exit 2 unless met: WORKLOAD[.FIGURE]>=N or <=N, WORKLOAD may be *, FIGURE is
    /// ratio|low|high|gain|mean_acceptance_length|identical|looping|failures|first_token
    /// (first_token: added time ÷ max(5 %, 2 ms)).
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub require: Vec<Requirement>,
}

/// Reason that a benchmark cannot start.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error(transparent)]
    Access(#[from] Denied),
    #[error(transparent)]
    Workload(#[from] crate::bench::workload::Error),
    #[error("--{flag}: allowed {allowed}, got {got}")]
    Value { flag: &'static str, allowed: &'static str, got: String },
    #[error("{path}: {source}")]
    Probe { path: PathBuf, source: Useless },
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
}

/// Runs the benchmark; tables go to `out`, progress and errors to standard error.
pub async fn run(args: &BenchArgs, out: &mut impl Write) -> Exit {
    let (bench, files) = match args.bench().and_then(|bench| Ok((bench, args.files()?))) {
        Ok(ready) => ready,
        Err(unusable) => {
            super::complain(&format_args!("foretell bench: {unusable}"));
            return Exit::Usage;
        }
    };
    let bench = match with_model(bench).await {
        Ok(bench) => bench,
        Err(stopped) => {
            super::complain(&format_args!("foretell bench: {stopped}"));
            return Exit::Unreachable;
        }
    };
    let about = match &args.html {
        Some(_) => about(args, &bench).await,
        None => About::default(),
    };
    let runs = match run::run(&bench, &progress::bar("alternations")).await {
        Ok(runs) => runs,
        Err(stopped) => {
            super::complain(&format_args!("foretell bench: {stopped}"));
            return Exit::Unreachable;
        }
    };
    // A closed pipe is not an error: the files and the exit code are still produced.
    let _ = out.write_all(report::table(&runs).as_bytes());
    if let Err(unusable) = files.write(&runs, &about) {
        super::complain(&format_args!("foretell bench: {unusable}"));
        return Exit::Unreachable;
    }
    judge(&args.require, &runs, out)
}

/// Sets the server's first model for prompts that name none.
async fn with_model(mut bench: Bench) -> Result<Bench, Stopped> {
    let nameless = |workload: &Workload| workload.prompts.iter().any(|prompt| prompt.model().is_empty());
    if bench.model.is_some() || !bench.workloads.iter().any(nameless) {
        return Ok(bench);
    }
    let mut server = Client::with_access(bench.direct.clone(), bench.access.clone());
    let stopped = |failure| Stopped { side: Side::Direct, url: bench.direct.to_string(), failure };
    let listed = server.get("/v1/models").await.map_err(stopped)?;
    let first = listed.pointer("/data/0/id").and_then(Value::as_str);
    let none = || stopped(Failure::Unreadable("/v1/models lists no model: give --model M".to_owned()));
    let model = first.ok_or_else(none)?.to_owned();
    let others = listed.get("data").and_then(Value::as_array).map_or(0, Vec::len).saturating_sub(1);
    if others > 0 {
        super::complain(&format_args!(
            "foretell bench: model {model}; {others} more are listed, --model M takes another"
        ));
    }
    bench.model = Some(model);
    Ok(bench)
}

/// Description of server and machine for the report.
async fn about(args: &BenchArgs, bench: &Bench) -> About {
    let model = bench.model.as_deref();
    let first_model = || bench.workloads.first()?.prompts.first().map(Prompt::model);
    About {
        date: about::now(),
        machine: about::machine(),
        foretell: super::VERSION.to_owned(),
        engine: engine(args, &bench.direct).await,
        model: model.or_else(first_model).unwrap_or_default().to_owned(),
        direct: bench.direct.to_string(),
        through: bench.through.to_string(),
        command: about::command(std::env::args()),
    }
}

/// Name and version of the engine; empty if it is not recognised.
async fn engine(args: &BenchArgs, url: &Url) -> String {
    let Some(replica) = args
        .access
        .granted()
        .ok()
        .and_then(|granted| Replica::new(granted.settings("bench", &url.to_string())).ok())
    else {
        return String::new();
    };
    match identity::recognise(&replica, &Renderer::Itself, Dialect::Auto.spoken(), &[]).await {
        Ok(Recognised { engine, .. }) => format!("{} {}", engine.dialect.name(), engine.version),
        Err(_) => String::new(),
    }
}

fn judge(requirements: &[Requirement], runs: &[Run], out: &mut impl Write) -> Exit {
    let shortfalls: Vec<_> =
        requirements.iter().flat_map(|requirement| requirement.shortfalls(runs)).collect();
    for shortfall in &shortfalls {
        let _ = writeln!(out, "NOT MET: {shortfall}");
    }
    if shortfalls.is_empty() {
        if !requirements.is_empty() {
            let _ = writeln!(out, "all {} requirements met", requirements.len());
        }
        Exit::Done
    } else {
        Exit::RequirementNotMet
    }
}

impl BenchArgs {
    fn bench(&self) -> Result<Bench, Unusable> {
        let value = |flag, allowed, got: String| Err(Unusable::Value { flag, allowed, got });
        if let Some(clients) = self.concurrency.iter().find(|&&clients| !(1..=1024).contains(&clients)) {
            return value("concurrency", "1 to 1024", clients.to_string());
        }
        if let Some(temperature) = self.temperature.iter().find(|&&t| !(0.0..=2.0).contains(&t)) {
            return value("temperature", "0 to 2", temperature.to_string());
        }
        if self.alternations == 0 {
            return value("alternations", "at least 1", "0".into());
        }
        let read = self.workload.iter().map(|path| Workload::read(path));
        let workloads: Vec<Workload> = read.collect::<Result<_, _>>()?;
        if let Some(unknown) = self.require.iter().find_map(|required| required.unknown(&workloads)) {
            return value("require", "the name of a measured workload", unknown.to_owned());
        }
        let Granted { fields, tls } = self.access.granted()?;
        Ok(Bench {
            access: client::Access { fields, tls },
            model: self.model.clone(),
            direct: self.direct.clone(),
            through: self.through.clone(),
            costs: self.costs()?,
            workloads,
            concurrency: self.concurrency.clone(),
            temperature: self.temperature.clone(),
            alternations: self.alternations,
            seeded: self.seeded,
            max_tokens: self.max_tokens,
        })
    }

    fn costs(&self) -> Result<Option<CostSource>, Unusable> {
        let target = match (&self.metrics_direct, &self.probe) {
            (Some(page), _) => TargetCosts::Page(page.clone()),
            (None, Some(path)) => TargetCosts::Probed(probed(path)?),
            (None, None) => return Ok(None),
        };
        Ok(self.metrics_through.clone().map(|through| CostSource { through, target }))
    }

    fn files(&self) -> Result<Files, Unusable> {
        Ok(Files {
            json: ReportFile::open(self.json.as_deref())?,
            html: ReportFile::open(self.html.as_deref())?,
        })
    }
}

fn probed(path: &Path) -> Result<Probed, Unusable> {
    let json =
        std::fs::read_to_string(path).map_err(|source| Unusable::File { path: path.to_owned(), source })?;
    Probed::parse(&json).map_err(|source| Unusable::Probe { path: path.to_owned(), source })
}

/// The output files. They are opened before the measurement, so that a wrong path fails at once,
/// and replaced after it.
struct Files {
    json: Option<ReportFile>,
    html: Option<ReportFile>,
}

struct ReportFile {
    path: PathBuf,
}

impl ReportFile {
    fn open(path: Option<&Path>) -> Result<Option<Self>, Unusable> {
        path.map(|path| {
            let opened = OpenOptions::new().create(true).append(true).open(path);
            opened.map_err(|source| Unusable::File { path: path.to_owned(), source })?;
            Ok(Self { path: path.to_owned() })
        })
        .transpose()
    }

    fn write(self, text: &str) -> Result<(), Unusable> {
        std::fs::write(&self.path, text).map_err(|source| Unusable::File { path: self.path, source })
    }
}

impl Files {
    fn write(self, runs: &[Run], about: &About) -> Result<(), Unusable> {
        if let Some(json) = self.json {
            json.write(&report::json(runs))?;
        }
        if let Some(html) = self.html {
            html.write(&html::page(runs, about))?;
        }
        Ok(())
    }
}
