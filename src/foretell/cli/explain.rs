//! `foretell explain`: prints what would happen to a request, and why; or how much of a running
//! proxy's output is eligible.
//!
//! It calls the running proxy if there is one, else the server, and prints which of them. This
//! module decides nothing.

mod print;
mod query;
mod traffic;

use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::path::PathBuf;

use http::HeaderMap;

use super::Exit;
use super::access::{self, Access, Denied};
use super::{OK, USAGE};
use crate::admin::explain::{ExplainQuery, Question};
use crate::app;
use foretell_config::{Flags, Loaded, Process, Strings, load};
use foretell_policy::Explanation;
use foretell_wire::openai::Route;

/// The arguments of `foretell explain`.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(group = clap::ArgGroup::new("subject").required(true))]
pub struct ExplainArgs {
    /// The settings, as `serve` takes them. With --backend, --tokenizer, --engine or --policies
    /// the running proxy is not queried, unless --admin selects it
    #[command(flatten)]
    pub flags: Flags,
    /// The body of the request, in JSON (`-` reads standard input)
    #[arg(long, value_name = "FILE", group = "subject")]
    pub request: Option<String>,
    /// Instead of a request: the running proxy's traffic, as the share of its output tokens that
    /// are eligible, and why the others are not
    #[arg(long, group = "subject", conflicts_with_all = ["route", "headers", "tenant", "offline"])]
    pub traffic: bool,
    /// completions or chat [default: chat if the body has messages]
    #[arg(long, value_name = "ROUTE")]
    pub route: Option<String>,
    /// A header of the request, as `NAME: VALUE`
    #[arg(long = "header", value_name = "HEADER")]
    pub headers: Vec<String>,
    /// The tenant of the request, regardless of its headers
    #[arg(long, value_name = "TENANT")]
    pub tenant: Option<String>,
    /// The address that the request comes from, for tenant.trusted_peers
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub peer: String,
    /// File with the API key for recognising the server; the request itself has the headers of
    /// --header
    #[arg(long, value_name = "F")]
    pub api_key_file: Option<PathBuf>,
    /// Authority of the server's certificate, PEM, instead of that of the config file
    #[arg(long, value_name = "F")]
    pub ca: Option<PathBuf>,
    /// Ask neither the running proxy nor the server
    #[arg(long, conflicts_with = "admin")]
    pub offline: bool,
    /// The answer in JSON
    #[arg(long)]
    pub json: bool,
}

/// The request to explain, from the command line.
struct Given {
    body: Vec<u8>,
    headers: HeaderMap,
    query: ExplainQuery,
}

/// Explains a request, or the traffic, and prints the result. Returns the exit code: 1 if the proxy
/// named by `--admin`, or the one of `--traffic`, does not answer.
///
/// # Errors
/// `out` cannot be written.
pub fn run(args: &ExplainArgs, environment: &dyn Strings, out: &mut dyn Write) -> io::Result<u8> {
    if args.traffic {
        return traffic::run(args, environment, out);
    }
    let mut loaded = match load(&args.flags, environment) {
        Ok(loaded) => loaded,
        Err(problems) => {
            for problem in &problems {
                writeln!(out, "{problem}")?;
            }
            return Ok(USAGE);
        }
    };
    if let Err(denied) = args.enter(&mut loaded.process) {
        return writeln!(out, "{denied}").map(|()| USAGE);
    }
    let given = match Given::read(args) {
        Ok(given) => given,
        Err(wrong) => return writeln!(out, "{wrong}").map(|()| USAGE),
    };
    let explained = super::runtime()?.block_on(explained(args, &loaded, &given));
    match explained {
        Ok(explanation) if args.json => writeln!(out, "{}", serde_json::to_string_pretty(&explanation)?)?,
        Ok(explanation) => print::words(&explanation, out)?,
        Err(why) => {
            super::complain(&format_args!("foretell explain: {why}"));
            return Ok(Exit::Unreachable.code());
        }
    }
    Ok(OK)
}

impl ExplainArgs {
    /// Sets the key and authority of the command line for every backend.
    fn enter(&self, process: &mut Process) -> Result<(), Denied> {
        let Self { api_key_file, ca, .. } = self;
        Access { api_key_file: api_key_file.clone(), ca: ca.clone(), headers: Vec::new() }.granted()?;
        for connect in process.backends.iter_mut().map(|backend| &mut backend.connect) {
            let (auth, tls) = (&mut connect.auth, &mut connect.tls);
            auth.own_token_file = api_key_file.clone().or(auth.own_token_file.take());
            tls.ca = ca.clone().or(tls.ca.take());
        }
        Ok(())
    }
}

async fn explained(args: &ExplainArgs, loaded: &Loaded, given: &Given) -> Result<Explanation, String> {
    let Flags { backend, tokenizer, engine, policies, admin, .. } = &args.flags;
    let others_meant = [backend, tokenizer, engine, policies].iter().any(|flag| flag.is_some());
    let mut notes = Vec::new();
    if !args.offline && (admin.is_some() || !others_meant) {
        match query::proxy(&loaded.process, given).await {
            Ok(Some(explanation)) => return Ok(query::compared(explanation, &loaded.policies)),
            Ok(None) if admin.is_some() => {
                return Err(format!("no proxy answers at {}", loaded.process.admin.address));
            }
            Err(why) if admin.is_some() => return Err(why),
            Ok(None) => notes.push(nobody(&loaded.process)),
            Err(why) => notes.push(format!("{why}, so the server was queried")),
        }
    }
    let limit = loaded.process.limits.speculate_body;
    let mut question = Question::new(given.query.route, given.headers.clone(), &given.body, limit);
    question.peer = given.query.peer;
    question.tenant.clone_from(&given.query.tenant);
    let explanation =
        app::explain::explain(&loaded.process, &loaded.policies, &question, !args.offline).await;
    let mut explanation = explanation.map_err(|error| error.to_string())?;
    explanation.notes.extend(notes);
    Ok(explanation)
}

/// The note that no proxy answers.
fn nobody(process: &Process) -> String {
    let missing = if process.backends.is_empty() {
        ", and no config file (--config) or --backend names a server"
    } else {
        ""
    };
    format!("no proxy answers at {} (--admin){missing}", process.admin.address)
}

impl Given {
    fn read(args: &ExplainArgs) -> Result<Self, String> {
        let route = args.route.as_deref().map(|name| {
            let wrong = || format!("--route: unknown value, allowed completions|chat, got {name:?}");
            Route::parse(name).ok_or_else(wrong)
        });
        let peer: Option<IpAddr> = match args.peer.as_str() {
            "" => None,
            peer => {
                Some(peer.parse().map_err(|_| format!("--peer: not an address, allowed IP, got {peer:?}"))?)
            }
        };
        let query = ExplainQuery { route: route.transpose()?, peer, tenant: args.tenant.clone() };
        Ok(Self {
            body: read_body(args.request.as_deref().unwrap_or_default())?,
            headers: access::fields(&args.headers).map_err(|denied| denied.to_string())?,
            query,
        })
    }
}

fn read_body(path: &str) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    let read = match path {
        "-" => io::stdin().read_to_end(&mut body).map(|_| ()),
        path => std::fs::read(path).map(|bytes| body = bytes),
    };
    read.map(|()| body).map_err(|error| format!("{path}: {error}"))
}
