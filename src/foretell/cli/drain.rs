//! `foretell drain`: drains a running proxy, and waits until it is empty.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use http::{HeaderMap, StatusCode};
use indicatif::ProgressBar;
use serde_json::Value;

use super::Exit;
use super::admin_port::{AdminPort, Fault};
use super::progress;
use foretell_config::{Flags, Problem, Strings};

/// Drain a running proxy: it is no longer ready, finishes open requests within drain.grace, and
/// exits.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct DrainArgs {
    /// The config file of the proxy, for its admin address and token [env: FORETELL_CONFIG]
    /// [default: foretell.yaml, if it exists]
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<String>,
    /// Its admin address [env: FORETELL_ADMIN] [default: that of the config file, else
    /// 127.0.0.1:9464]
    #[arg(long, value_name = "IP:PORT")]
    pub admin: Option<String>,
    /// File with its admin token [default: admin.token_file of the config file]
    #[arg(long, value_name = "F")]
    pub token_file: Option<PathBuf>,
    /// Do not wait until it is empty
    #[arg(long)]
    pub no_wait: bool,
}

/// Starts the drain, and returns once the proxy is empty; the result is written to `out`.
pub async fn run(args: &DrainArgs, environment: &dyn Strings, out: &mut impl Write) -> Exit {
    let port = match port(args, environment) {
        Ok(port) => port,
        Err(problems) => {
            for problem in &problems {
                super::complain(problem);
            }
            return Exit::Usage;
        }
    };
    if let Some((path, error)) = args.token_file.as_ref().and_then(|path| Some((path, fs::read(path).err()?)))
    {
        super::complain(&format_args!("--token-file {}: {error}", path.display()));
        return Exit::Usage;
    }
    if !args.no_wait
        && let Some(open) = open_requests(&port).await
    {
        let requests = if open == 1 { "request" } else { "requests" };
        super::complain(&format_args!(
            "waiting for {open} open {requests} to end, for drain.grace at most, and for load balancers (drain.delay)"
        ));
    }
    let waits = (!args.no_wait).then(|| progress::spinner("waiting for open requests to end"));
    let path = if args.no_wait { "/api/drain" } else { "/api/drain?wait=1" };
    let answer = port.post(path, HeaderMap::new(), Vec::new()).await;
    waits.inspect(ProgressBar::finish_and_clear);
    let why = match answer {
        Ok((StatusCode::OK, body)) if says_draining(&body) => {
            let _ = writeln!(out, "{}", if args.no_wait { "draining" } else { "drained" });
            return Exit::Done;
        }
        Ok((StatusCode::UNAUTHORIZED, _)) if port.has_token() => "the admin token is wrong".to_owned(),
        Ok((StatusCode::UNAUTHORIZED, _)) => "an admin token is required: set --token-file".to_owned(),
        Ok((status, _)) => format!("the server there does not support draining ({status})"),
        Err(fault @ Fault::Nobody) => fault.to_string(),
        Err(Fault::Other(why)) => format!("it ended, or stopped answering, before it was empty ({why})"),
    };
    super::complain(&format_args!("foretell drain: {}: {why}", port.address));
    Exit::Unreachable
}

/// Number of requests in flight; `None` if the proxy does not report it.
async fn open_requests(port: &AdminPort) -> Option<u64> {
    match port.get("/api/status").await {
        Ok((StatusCode::OK, body)) => serde_json::from_slice::<Value>(&body).ok()?.get("in_flight")?.as_u64(),
        _ => None,
    }
}

/// True if this is the answer of a proxy: other servers answer 200 to any path.
fn says_draining(body: &[u8]) -> bool {
    serde_json::from_slice::<Value>(body)
        .is_ok_and(|answer| answer.get("draining") == Some(&Value::Bool(true)))
}

/// The admin port of the selected proxy.
///
/// # Errors
/// The problems because of which its address is not known.
fn port(args: &DrainArgs, environment: &dyn Strings) -> Result<AdminPort, Vec<Problem>> {
    let flags = Flags { config: args.config.clone(), admin: args.admin.clone(), ..Flags::default() };
    AdminPort::of(&flags, args.token_file.clone(), environment)
}
