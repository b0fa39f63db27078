//! `foretell explain`: what would happen to this request, and why?
//!
//! The answer is made by a pure function, which the admin interface shares.

use std::io::{self, Read, Write};

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::Serialize;

use super::{OK, USAGE};
use crate::config::policy::Policy;
use crate::config::process::{ClientControl, Dialect};
use crate::config::{Facts, Flags, Mode, PolicyMode, PolicySet, Process, Strings, load};
use crate::openai::{Control, Finding, Request, Route, understand};
use crate::words::BypassReason;
use crate::words::RideReason;

/// The arguments of `foretell explain`.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct ExplainArgs {
    /// The settings, as `serve` takes them.
    #[command(flatten)]
    pub flags: Flags,
    /// The body of the request, in JSON (`-` reads standard input)
    #[arg(long, value_name = "FILE")]
    pub request: String,
    /// completions or chat [default: chat if the body has messages]
    #[arg(long, value_name = "ROUTE")]
    pub route: Option<String>,
    /// A header of the request, as `NAME: VALUE`
    #[arg(long = "header", value_name = "HEADER")]
    pub headers: Vec<String>,
    /// The tenant of the request
    #[arg(long, value_name = "TENANT")]
    pub tenant: Option<String>,
    /// The answer in JSON
    #[arg(long)]
    pub json: bool,
}

/// The header with which a client lowers what Foretell may do.
pub const CONTROL_HEADER: &str = "x-foretell";

/// A request to be explained.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Its route.
    pub route: Route,
    /// Its body.
    pub body: &'a [u8],
    /// Its headers.
    pub headers: &'a HeaderMap,
    /// Its tenant.
    pub tenant: Option<&'a str>,
}

/// What would happen to a request, and why.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// `eligible` or `bypassed`.
    pub path: &'static str,
    /// Why it is bypassed, or why it would only ride.
    pub reason: Option<&'static str>,
    /// The same in a sentence.
    pub words: String,
    /// The route.
    pub route: &'static str,
    /// The model id as sent.
    pub model: String,
    /// The backend it goes to.
    pub backend: Option<String>,
    /// Effective temperature, as far as the body tells.
    pub temperature: f64,
    /// Length of the prompt.
    pub prompt_tokens: usize,
    /// Whether that was counted, or is a quarter of the bytes.
    pub prompt_tokens_exact: bool,
    /// Every parameter of the body.
    pub parameters: Vec<ParameterLine>,
    /// The policy that matches, as `name@revision`.
    pub policy: Option<String>,
    /// Every policy, in order.
    pub policies: Vec<PolicyLine>,
}

/// What is done with one parameter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ParameterLine {
    /// Its name.
    pub name: String,
    /// Whose it is.
    pub owner: Option<&'static str>,
    /// What is done with it: carried, emulated, inert, neutral, bypass or unknown.
    pub treatment: &'static str,
    /// Why it keeps the request from leaping.
    pub refused: Option<&'static str>,
}

/// Whether one policy matches.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyLine {
    /// `name@revision`.
    pub policy: String,
    /// What its requests may do.
    pub mode: &'static str,
    /// Every field that does not hold, as `FIELD wants WANTED, got GOT`; none means that it matches.
    pub mismatches: Vec<String>,
}

/// Explains a request; `None` if its body is no JSON object.
pub fn explain(question: &Question<'_>, process: &Process, policies: &PolicySet) -> Option<Explanation> {
    let (request, findings) = understand(question.route, question.body)?;
    let size = request.prompt_size();
    let routing = process.route(&request.model);
    let backend = routing.as_ref().map(|routing| routing.backend);
    let facts = Facts {
        model: &request.model,
        backend: backend.map_or("", |backend| &backend.name),
        tenant: question.tenant.or_else(|| named_tenant(question.headers, process)),
        route: question.route,
        headers: question.headers,
        temperature: request.sampling.temperature,
        prompt_tokens: size.tokens,
    };
    let policy = policies.first_match(&facts).map(|policy| &**policy);
    let dialect = backend.map(|backend| backend.dialect);
    let billed = backend.is_some_and(|backend| backend.billed);
    let control = control(question.headers, process);
    let bypass = bypass(question, process, control, &findings, policy)
        .or_else(|| no_plan(dialect, routing.is_some_and(|routing| routing.known), billed));
    let ride = ride(process, control, policy);
    let (path, reason, words) = match (bypass, ride) {
        (Some((reason, blame)), _) => ("bypassed", Some(reason.name()), bypassed_words(reason, blame)),
        (None, Some((reason, words))) => ("eligible", Some(reason.name()), words.to_owned()),
        (None, None) => {
            ("eligible", None, "it rides first, and leaps when that is expected to pay".to_owned())
        }
    };
    Some(Explanation {
        path,
        reason,
        words,
        route: question.route.name(),
        model: request.model.clone(),
        backend: backend.map(|backend| backend.name.clone()),
        temperature: request.sampling.temperature,
        prompt_tokens: size.tokens,
        prompt_tokens_exact: size.exact,
        parameters: findings.iter().map(parameter_line).collect(),
        policy: policy.map(Policy::label),
        policies: policies.policies().iter().map(|policy| policy_line(policy, &facts)).collect(),
    })
}

/// Chat bodies have messages.
pub fn guess_route(body: &[u8]) -> Route {
    let has_messages = understand(Route::Chat, body)
        .is_some_and(|(Request { body, .. }, _)| body.get("messages").is_some_and(|value| !value.is_null()));
    if has_messages { Route::Chat } else { Route::Completions }
}

fn named_tenant<'a>(headers: &'a HeaderMap, process: &Process) -> Option<&'a str> {
    headers.get(process.tenant.header.as_deref()?)?.to_str().ok()
}

fn control(headers: &HeaderMap, process: &Process) -> Option<Control> {
    let value = headers.get(CONTROL_HEADER).filter(|_| process.client == ClientControl::Bounded)?;
    Control::parse(value.to_str().ok()?).ok()
}

fn bypass<'a>(
    question: &Question<'_>,
    process: &Process,
    control: Option<Control>,
    findings: &'a [Finding],
    policy: Option<&Policy>,
) -> Option<(BypassReason, Option<&'a str>)> {
    if process.mode == Mode::Off {
        return Some((BypassReason::Off, None));
    }
    if control == Some(Control::Off) {
        return Some((BypassReason::Client, None));
    }
    if question.headers.get(http::header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity") {
        return Some((BypassReason::Encoded, None));
    }
    if question.body.len() as u64 > process.limits.speculate_body {
        return Some((BypassReason::Body, None));
    }
    let refused = findings.iter().find_map(|finding| Some((finding.refused?, finding.parameter.as_str())));
    if let Some((reason, parameter)) = refused {
        return Some((reason, Some(parameter)));
    }
    match policy.map(|policy| policy.mode) {
        None => Some((BypassReason::NoPolicy, None)),
        Some(PolicyMode::Off) => Some((BypassReason::Policy, None)),
        Some(PolicyMode::Shadow | PolicyMode::Ride | PolicyMode::Auto) => None,
    }
}

/// What only the backend could say is left open: `auto` finds out by asking.
fn no_plan(
    dialect: Option<Dialect>,
    known: bool,
    billed: bool,
) -> Option<(BypassReason, Option<&'static str>)> {
    match dialect {
        Some(_) if !known => Some((BypassReason::Route, None)),
        Some(_) if billed => Some((BypassReason::Billed, None)),
        // Without a configured backend nothing is known against it.
        Some(Dialect::Ollama | Dialect::Mlx | Dialect::OpenAi) => Some((BypassReason::NoPlan, None)),
        None | Some(_) => None,
    }
}

fn ride(
    process: &Process,
    control: Option<Control>,
    policy: Option<&Policy>,
) -> Option<(RideReason, &'static str)> {
    if control == Some(Control::Ride) {
        return Some((RideReason::Client, "it only rides: the client asked for it"));
    }
    match (policy.map(|policy| policy.mode), process.mode) {
        (Some(PolicyMode::Ride), _) => Some((RideReason::Policy, "it only rides: the policy says so")),
        (_, Mode::Observe) => {
            Some((RideReason::Observe, "it rides, with drafts in the shadow: the process observes"))
        }
        (Some(PolicyMode::Shadow), _) => {
            Some((RideReason::Shadow, "it rides, with drafts in the shadow: the policy says so"))
        }
        _ => None,
    }
}

fn bypassed_words(reason: BypassReason, blame: Option<&str>) -> String {
    match blame {
        Some(parameter) => format!("it is relayed because of {parameter}: {}", reason.words()),
        None => format!("it is relayed: {}", reason.words()),
    }
}

fn parameter_line(finding: &Finding) -> ParameterLine {
    ParameterLine {
        name: finding.parameter.clone(),
        owner: finding.row.map(|row| row.owner.name()),
        treatment: finding.row.map_or("unknown", |row| row.treatment.name()),
        refused: finding.refused.map(BypassReason::name),
    }
}

fn policy_line(policy: &Policy, facts: &Facts<'_>) -> PolicyLine {
    let told = |mismatch: &crate::config::policy::Mismatch| {
        format!("{} wants {}, got {}", mismatch.field, mismatch.wanted, mismatch.got)
    };
    PolicyLine {
        policy: policy.label(),
        mode: policy.mode.name(),
        mismatches: policy.matcher.mismatches(facts).iter().map(told).collect(),
    }
}

/// Explains the request of a file. Returns the exit code.
///
/// # Errors
/// If `out` cannot be written.
pub fn run(args: &ExplainArgs, environment: &dyn Strings, out: &mut dyn Write) -> io::Result<u8> {
    let loaded = match load(&args.flags, environment) {
        Ok(loaded) => loaded,
        Err(problems) => {
            for problem in &problems {
                writeln!(out, "{problem}")?;
            }
            return Ok(USAGE);
        }
    };
    let asked = read_body(&args.request).and_then(|body| {
        let route = args.route.as_deref().map_or_else(|| Ok(guess_route(&body)), parse_route)?;
        Ok((body, route, parse_headers(&args.headers)?))
    });
    let (body, route, headers) = match asked {
        Ok(asked) => asked,
        Err(wrong) => return writeln!(out, "{wrong}").map(|()| USAGE),
    };
    let question = Question { route, body: &body, headers: &headers, tenant: args.tenant.as_deref() };
    let Some(explanation) = explain(&question, &loaded.process, &loaded.policies) else {
        let words = BypassReason::Body.words();
        return writeln!(out, "{}: {words}: not a JSON object with each key once", args.request)
            .map(|()| USAGE);
    };
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&explanation)?)?;
    } else {
        write_words(&explanation, out)?;
    }
    Ok(OK)
}

fn read_body(path: &str) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    let read = match path {
        "-" => io::stdin().read_to_end(&mut body).map(|_| ()),
        path => std::fs::read(path).map(|bytes| body = bytes),
    };
    read.map(|()| body).map_err(|error| format!("{path}: {error}"))
}

fn parse_route(name: &str) -> Result<Route, String> {
    let routes = [Route::Completions, Route::Chat];
    let found = routes.into_iter().find(|route| route.name() == name);
    found.ok_or_else(|| format!("--route: unknown value, allowed completions|chat, got {name:?}"))
}

fn parse_headers(lines: &[String]) -> Result<HeaderMap, String> {
    let header = |line: &String| {
        let (name, value) = line.split_once(':')?;
        let name = HeaderName::from_bytes(name.trim().as_bytes()).ok()?;
        Some((name, HeaderValue::from_str(value.trim()).ok()?))
    };
    let mut headers = HeaderMap::new();
    for line in lines {
        let wrong = || format!("--header: not a header, allowed NAME: VALUE, got {line:?}");
        let (name, value) = header(line).ok_or_else(wrong)?;
        headers.append(name, value);
    }
    Ok(headers)
}

fn write_words(told: &Explanation, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}: {}", told.path, told.words)?;
    if let Some(reason) = told.reason {
        writeln!(out, "reason       {reason}")?;
    }
    writeln!(out, "route        {}", told.route)?;
    let backend = told.backend.as_deref().unwrap_or("none");
    writeln!(out, "model        {} (backend {backend})", told.model)?;
    writeln!(out, "temperature  {}", told.temperature)?;
    let how = if told.prompt_tokens_exact { "counted" } else { "estimated: a quarter of the bytes" };
    writeln!(out, "prompt       {} tokens ({how})", told.prompt_tokens)?;
    writeln!(out, "parameters")?;
    for line in &told.parameters {
        let owner = line.owner.map_or(String::new(), |owner| format!(" ({owner})"));
        let refused =
            line.refused.map_or(String::new(), |reason| format!(", keeps it from leaping: {reason}"));
        writeln!(out, "  {:<28} {}{owner}{refused}", line.name, line.treatment)?;
    }
    writeln!(out, "policies, of which the first that matches counts")?;
    for line in &told.policies {
        let verdict = match line.mismatches.as_slice() {
            [] => format!("matches (mode {})", line.mode),
            some => format!("does not match: {}", some.join("; ")),
        };
        writeln!(out, "  {:<28} {verdict}", line.policy)?;
    }
    Ok(())
}
