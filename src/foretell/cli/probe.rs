//! `foretell probe`: measures which methods a server can verify drafts with and their gain, and
//! suggests a policy.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use super::Exit;
use super::access::Access;
use super::progress;
use foretell_config::process::Dialect as Named;
use foretell_config::process::{Probe, VerifyLimits};

use foretell_core::words::{PassthroughReason, VerifyMethod};
use foretell_engines::Confirmation;
use foretell_engines::Engine;
use foretell_engines::probe::prospect::{ACCEPTANCES, Measured};
use foretell_engines::probe::{Cache, Findings};
use foretell_net::fleet::Replica;
use foretell_net::fleet::identity::{self, ModelConfig, Recognised, Renderer, Unknown};
use foretell_net::fleet::probe::{self, Limits, ProbeReport, Seen};
use foretell_net::random::fresh_seed;
use foretell_parsers::text::{TextError, Tokenizer};

/// Factor by which a longer probe is suggested.
const MORE_TIME: u64 = 6;

/// The arguments of `foretell probe`.
#[derive(clap::Args, Clone, Debug)]
pub struct ProbeArgs {
    /// The server
    #[arg(value_name = "URL")]
    pub url: String,
    /// Print the findings as JSON
    #[arg(long)]
    pub json: bool,
    /// API of its engine
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub engine: String,
    /// The tokenizer.json of its model, or a folder with one, if the server does not serve it
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,
    /// The model to request, if the server has several
    #[arg(long, value_name = "M")]
    pub model: Option<String>,
    /// Header fields and TLS settings for it
    #[command(flatten)]
    pub access: Access,
    /// It bills per token: request its list of models and nothing else
    #[arg(long)]
    pub billed: bool,
    /// Also measure the `score` method. On vLLM CPU builds without a compiler this can crash the
    /// server; use only if a request with logprobs has worked
    #[arg(long)]
    pub score: bool,
    /// Maximum time of the measurement; give a slow or busy server more, such as 60s
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = super::positive_duration)]
    pub within: Duration,
}

/// Result of probing a server.
enum Outcome {
    /// It was measured, or it has no verification method to measure.
    Report(Box<ProbeReport>),
    /// A proxy would pass every request through to it, for this reason.
    Passthrough { reason: PassthroughReason, why: String },
}

impl Outcome {
    /// The exit code of a probe without an error.
    fn exit(&self) -> Exit {
        match self {
            _ if !self.is_eligible() => Exit::RequirementNotMet,
            Self::Report(report) if report.measured_too_little() => Exit::RequirementNotMet,
            Self::Report(_) | Self::Passthrough { .. } => Exit::Done,
        }
    }

    /// True if requests to the server are eligible for speculation; that it would not pay, or that
    /// the server bills for it, is no fault.
    fn is_eligible(&self) -> bool {
        match self {
            Self::Report(report) => {
                let engine = &report.findings.engine;
                !engine.methods.is_empty() && defaults_problem(engine).is_none()
            }
            Self::Passthrough { reason, .. } => *reason == PassthroughReason::Billed,
        }
    }

    /// The operator's next step, if the outcome is not final.
    fn next(&self, within: Duration) -> Option<String> {
        let Self::Report(report) = self else { return None };
        let longer = within.as_secs().max(1).saturating_mul(MORE_TIME);
        report
            .measured_too_little()
            .then(|| format!("repeat it when the server is idle, or with --within {longer}s"))
    }
}

/// Probes a server and prints the result.
pub async fn run(args: &ProbeArgs, out: &mut dyn Write) -> Exit {
    let named = Named::NAMES.iter().find(|(name, _)| *name == args.engine);
    let Some((_, dialect)) = named else {
        let names: Vec<_> = Named::NAMES.iter().map(|(name, _)| *name).collect();
        super::complain(&format_args!(
            "--engine: unknown value, allowed {}, got {:?}",
            names.join("|"),
            args.engine
        ));
        return Exit::Usage;
    };
    let tokenizer = match args.tokenizer.as_deref().map(tokenizer_file).transpose() {
        Ok(file) => file,
        Err(why) => {
            super::complain(&format_args!("foretell probe: --tokenizer: {why}"));
            return Exit::Usage;
        }
    };
    let granted = match args.access.granted() {
        Ok(granted) => granted,
        Err(denied) => {
            super::complain(&format_args!("foretell probe: {denied}"));
            return Exit::Usage;
        }
    };
    let replica = match Replica::new(granted.settings("probe", &args.url)) {
        Ok(replica) => replica,
        Err(error) => {
            super::complain(&format_args!("foretell probe: {error}"));
            return Exit::Usage;
        }
    };
    let spinner = progress::spinner("asking the server");
    let looked = look(args, *dialect, tokenizer.as_deref(), &replica).await;
    spinner.finish_and_clear();
    let outcome = match looked {
        Ok(outcome) => outcome,
        Err(Unknown::Foreign(reason, why)) => Outcome::Passthrough { reason, why },
        Err(unknown @ Unknown::PassedThrough(..)) => {
            Outcome::Passthrough { reason: PassthroughReason::NoVerifyMethod, why: unknown.to_string() }
        }
        Err(Unknown::Stranger(why) | Unknown::Unchecked(why)) => {
            Outcome::Passthrough { reason: PassthroughReason::NoVerifyMethod, why }
        }
        Err(Unknown::Locked(status)) => {
            let key = match args.access.api_key_file {
                None => "give a key with --api-key-file F, or other fields with --header",
                Some(_) => "the server does not accept the key of --api-key-file",
            };
            super::complain(&format_args!("foretell probe: {} answers {status}: {key}", args.url));
            return Exit::Unreachable;
        }
        Err(Unknown::Unreachable(why) | Unknown::Late(why)) => {
            super::complain(&format_args!("foretell probe: {} cannot be reached: {why}", args.url));
            return Exit::Unreachable;
        }
    };
    // A failed write, as to a closed pipe, is not an error.
    let _ = write_outcome(args, &outcome, out);
    outcome.exit()
}

/// The problem with the engine's defaults, for which requests that leave them open are passed
/// through; `None` if there is none.
fn defaults_problem(engine: &Engine) -> Option<String> {
    engine.defaults.confirmation.as_ref().and_then(Confirmation::problem)
}

fn write_outcome(args: &ProbeArgs, outcome: &Outcome, out: &mut dyn Write) -> io::Result<()> {
    match (outcome, args.json) {
        (Outcome::Report(report), false) => {
            write_report(&args.url, report, outcome.next(args.within).as_deref(), out)
        }
        (Outcome::Passthrough { reason, why }, false) => {
            writeln!(out, "server       {}", args.url)?;
            writeln!(out, "conclusion   Passed through ({}): {why}.", reason.name())
        }
        (_, true) => writeln!(out, "{}", serde_json::to_string_pretty(&as_json(args, outcome))?),
    }
}

fn as_json(args: &ProbeArgs, outcome: &Outcome) -> Value {
    let mut value = match outcome {
        Outcome::Report(report) => report.to_json(),
        Outcome::Passthrough { reason, why } => json!({
            "methods": [], "pays": null, "passthrough": reason.name(),
            "several_engines": *reason == PassthroughReason::SeveralEngines,
            "conclusion": format!("Passed through ({}): {why}.", reason.name()),
        }),
    };
    if let Some(fields) = value.as_object_mut() {
        fields.shift_insert(0, "url".to_owned(), args.url.as_str().into());
        if let Some(next) = outcome.next(args.within) {
            fields.insert("next".to_owned(), next.into());
        }
    }
    value
}

async fn look(
    args: &ProbeArgs,
    dialect: Named,
    file: Option<&Path>,
    replica: &Replica,
) -> Result<Outcome, Unknown> {
    if args.billed {
        let models = identity::models(replica).await?;
        let models = models.len();
        let why = format!("it bills per token, so only its list of models was requested ({models})");
        return Ok(Outcome::Passthrough { reason: PassthroughReason::Billed, why });
    }
    let named: &[VerifyMethod] = if args.score { &[VerifyMethod::Score] } else { &[] };
    let mut recognised = identity::recognise(replica, &Renderer::Itself, dialect.spoken(), named).await?;
    recognised.starts = identity::one_start(replica, &recognised).await?;
    if let Some(model) = &args.model {
        let models = identity::models(replica).await?;
        // Ollama names a model with or without its tag.
        let is_named = |id: &String| id == model || id.split(':').next() == Some(model);
        if !models.is_empty() && !models.iter().any(is_named) {
            let why = format!("the server has no model {model}; it has {}", models.join(", "));
            return Err(Unknown::Stranger(why));
        }
        recognised.engine.model.clone_from(model);
    }
    let seen = Seen {
        missing: recognised.missing.clone(),
        starts: recognised.starts,
        busy: false,
        calls: recognised.questions + recognised.starts,
    };
    if recognised.engine.methods.is_empty() {
        return Ok(Outcome::Report(Box::new(ProbeReport::new(unmeasured(recognised.engine), seen, 0.0))));
    }
    measure(file, replica, recognised, seen, args.within).await
}

async fn measure(
    file: Option<&Path>,
    replica: &Replica,
    recognised: Recognised,
    mut seen: Seen,
    within: Duration,
) -> Result<Outcome, Unknown> {
    let mut engine = recognised.engine;
    let tokenizer = identity::tokenizer(replica, file, &engine).await?;
    engine.tokens.special = tokenizer.special();
    engine.tokens.may_end = tokenizer.may_end();
    seen.calls += if file.is_some() { 1 } else { 2 };
    if let Some(file) = file {
        identity::confirm(replica, &mut engine, &tokenizer, &ModelConfig::for_tokenizer(file)).await?;
    }
    seen.busy = !probe::is_idle(replica, &engine, &mut seen.calls).await;
    let (Probe { calls, .. }, methods) = (Probe::default(), VerifyLimits::default());
    let mut limits = Limits {
        calls: calls.saturating_sub(seen.calls),
        within,
        bytes_max: usize::try_from(methods.bytes_max).unwrap_or(usize::MAX),
        context_max: methods.context_max as usize,
        allow: VerifyMethod::ALL.to_vec(),
    };
    if engine.process.started.is_none() {
        let shown = probe::is_one(replica, &engine, &tokenizer, &limits, fresh_seed()).await;
        if probe::failed_method(&shown).is_some() {
            return Ok(Outcome::Report(Box::new(ProbeReport::new(shown, seen, 0.0))));
        }
        if let Some(why) = probe::unchecked(&shown) {
            return Err(Unknown::Unchecked(why));
        }
        if shown.several_engines {
            return Ok(Outcome::Passthrough {
                reason: PassthroughReason::SeveralEngines,
                why: probe::MANY.to_owned(),
            });
        }
        seen.calls += shown.calls;
        limits.calls = limits.calls.saturating_sub(shown.calls);
    }
    // Short calls, which do not count against the limit.
    seen.calls += engine.defaults.confirmation.as_ref().map_or(0, |confirmation| confirmation.calls);
    let begun = Instant::now();
    let findings = probe::measure(replica, &engine, &tokenizer, &limits, fresh_seed()).await;
    Ok(Outcome::Report(Box::new(ProbeReport::new(findings, seen, begun.elapsed().as_secs_f64()))))
}

/// The tokenizer file: this path, or the file in this folder.
///
/// # Errors
/// It does not exist.
fn tokenizer_file(path: &Path) -> Result<PathBuf, String> {
    let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
    match Tokenizer::from_file(&file) {
        Ok(_) => Ok(file),
        Err(error @ TextError::Read { .. }) => Err(error.to_string()),
        Err(error) => Err(format!("{}: {error}", file.display())),
    }
}

/// Findings about an engine that was not measured.
fn unmeasured(engine: Engine) -> Findings {
    Findings {
        engine,
        measured: Measured::default(),
        cache: Cache::default(),
        several_engines: false,
        unchecked: None,
        removed: Vec::new(),
        notes: Vec::new(),
        calls: 0,
    }
}

fn write_report(url: &str, report: &ProbeReport, next: Option<&str>, out: &mut dyn Write) -> io::Result<()> {
    write_engine(url, report, out)?;
    if !report.findings.measured.verify.is_empty() {
        write_cache(report, out)?;
        write_times(report, out)?;
        write_predictions(report, out)?;
    }
    for note in &report.findings.notes {
        writeln!(out, "note         {note}")?;
    }
    if report.seen.busy {
        writeln!(out, "note         it was not idle: its times are longer than those of an idle server")?;
    }
    writeln!(out, "conclusion   {}", report.judgement.words)?;
    if let Some(next) = next {
        writeln!(out, "next         {next}")?;
    }
    if let Some(policy) = &report.judgement.policy {
        writeln!(out, "policy")?;
        policy.lines().try_for_each(|line| writeln!(out, "  {line}"))?;
    }
    writeln!(out, "({} calls, {:.1} s)", report.calls(), report.seconds)
}

/// A setting without the digits added by a server's single precision: 0.8, not 0.800000011920929.
fn plain(value: f64) -> f32 {
    value as f32
}

fn write_engine(url: &str, report: &ProbeReport, out: &mut dyn Write) -> io::Result<()> {
    let engine = &report.findings.engine;
    writeln!(out, "server       {url}")?;
    writeln!(out, "engine       {} {}", engine.dialect.name(), engine.version)?;
    let context = engine.context.map_or("not reported".to_owned(), |tokens| format!("{tokens} tokens"));
    writeln!(out, "model        {} (context {context})", engine.model)?;
    let defaults = match &engine.defaults.sampling {
        None => {
            "not known: requests that leave fields unset use fan_out on their route, or are passed through"
                .to_owned()
        }
        Some(of) => format!(
            "temperature {}, top_p {}, top_k {}, min_p {}, repetition_penalty {}",
            plain(of.temperature),
            plain(of.top_p),
            of.top_k.map_or("all".to_owned(), |k| k.to_string()),
            plain(of.min_p),
            plain(of.repetition_penalty)
        ),
    };
    writeln!(out, "defaults     {defaults}")?;
    match &engine.defaults.confirmation {
        Some(confirmation) if confirmation.problem().is_none() => {
            writeln!(out, "             of the model's folder, confirmed by {} calls", confirmation.calls)?;
        }
        _ => {}
    }
    if let Some(problem) = defaults_problem(engine) {
        writeln!(out, "problem      {problem}.")?;
    }
    if let Some(most) = engine.limits.most {
        writeln!(out, "max_tokens   {most} at most")?;
    }
    if engine.speculates {
        writeln!(out, "speculates   by itself: requests are decoded plainly here")?;
    }
    let connections = report.seen.starts;
    if connections > 0 {
        writeln!(out, "one engine   {connections} connections show one start time")?;
    }
    let methods: Vec<_> = engine.methods.iter().map(|method| method.name()).collect();
    writeln!(
        out,
        "methods      {}",
        if methods.is_empty() { "none".to_owned() } else { methods.join(", ") }
    )?;
    for (method, why) in report.missing() {
        writeln!(out, "  no {:<10}{why}", method.name())?;
    }
    if let Some(setting) = engine.quirks().render_setting {
        let chats = if engine.pages.renders {
            "speculated on once models[].parsers names its parsers".to_owned()
        } else {
            format!("passed through: it takes {setting}")
        };
        writeln!(out, "tool chats   {chats}")?;
    }
    Ok(())
}

fn write_cache(report: &ProbeReport, out: &mut dyn Write) -> io::Result<()> {
    let (cache, engine) = (&report.findings.cache, &report.findings.engine);
    let state = match cache.works {
        Some(true) => "on",
        Some(false) => "off",
        None => "not known",
    };
    let how = if cache.reported { "reported by the server" } else { "seen by the times" };
    let times = cache.cold.zip(cache.warm).map_or(String::new(), |(cold, warm)| {
        format!("; a long prompt: first {}, repeated {}", millis(cold), millis(warm))
    });
    let block =
        if engine.cache.block == 1 { "1 token".to_owned() } else { format!("{} tokens", engine.cache.block) };
    writeln!(out, "prefix cache {state} ({how}{times}; block size {block})")?;
    let seeds = match probe::noise(engine) {
        "position" => "a seeded output continues the same from any position: seeded requests are eligible",
        "ignored" => "seeds are ignored",
        _ => {
            "a seeded output does not continue the same from another position: seeded requests are passed through"
        }
    };
    writeln!(out, "seeds        {seeds}")
}

fn write_times(report: &ProbeReport, out: &mut dyn Write) -> io::Result<()> {
    let measured = &report.findings.measured;
    writeln!(out, "a round takes, by drafted tokens")?;
    for (method, context) in measured.positions() {
        let rounds = [0, 2, 4, 8].map(|gamma| {
            measured
                .round(method, context, gamma)
                .map_or("-".to_owned(), |round| format!("{gamma}: {}", millis(round)))
        });
        writeln!(out, "  {:<10}context {context:>5}   {}", method.name(), rounds.join("   "))?;
    }
    for (context, token) in &measured.token {
        writeln!(out, "a token      {} at context {context}", millis(*token))?;
    }
    let switches = [
        ("into plain decoding", measured.switch_out),
        ("out of it", measured.switch_in),
        ("cancelling", measured.cancel),
    ];
    let times: Vec<_> = switches
        .iter()
        .filter_map(|(what, seconds)| Some(format!("{what} {}", millis((*seconds)?))))
        .collect();
    if times.is_empty() { Ok(()) } else { writeln!(out, "switching    {}", times.join(", ")) }
}

fn write_predictions(report: &ProbeReport, out: &mut dyn Write) -> io::Result<()> {
    let prospects = report.prospects();
    if prospects.is_empty() {
        return Ok(());
    }
    let heads = ACCEPTANCES.map(|acceptance| format!("{acceptance:<16}"));
    writeln!(out, "{:<32}{}", "speedup, by acceptance", heads.concat().trim_end())?;
    for (method, context) in report.findings.measured.positions() {
        let gains = ACCEPTANCES.map(|acceptance| {
            let same = prospects.iter().find(|prospect| {
                (prospect.method, prospect.context) == (method, context)
                    && (prospect.acceptance - acceptance).abs() < 1e-9
            });
            let gain = same.map(|best| format!("{:.2} (gamma {})", best.gain, best.gamma));
            format!("{:<16}", gain.unwrap_or_default())
        });
        let position = format!("  {:<10}context {context:>5}", method.name());
        writeln!(out, "{position:<32}{}", gains.concat().trim_end())?;
    }
    Ok(())
}

fn millis(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1e3)
}
