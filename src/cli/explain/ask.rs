//! Asks the running proxy over its admin API.

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::uri::InvalidUri;
use http::{HeaderName, HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Limited};

use super::Given;
use crate::admin::explain::PREFIX;
use crate::config::process::Process;
use crate::fleet::{Replica, ReplicaSettings, SendError, SendErrorKind};
use crate::http::body::full;
use crate::policy::{Explanation, PolicySet};

/// Longest time for an answer.
const WITHIN: Duration = Duration::from_secs(10);
/// Largest answer that is read, bytes; an explanation is far smaller.
const MOST: usize = 16 << 20;

/// Asks the proxy with these settings; `None` if no server listens on its admin address.
///
/// # Errors
/// The address gives no valid answer, or the proxy refuses the request.
pub(super) async fn proxy(process: &Process, given: &Given) -> Result<Option<Explanation>, String> {
    let address = reachable(process.admin.address);
    let (status, body) = match tokio::time::timeout(WITHIN, call(process, address, given)).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(Fault::Nobody)) => return Ok(None),
        Ok(Err(Fault::Other(why))) => {
            return Err(format!("the admin port {address} gives no answer ({why})"));
        }
        Err(_) => {
            return Err(format!("the admin port {address} gives no answer within {} s", WITHIN.as_secs()));
        }
    };
    match (status, serde_json::from_slice::<Explanation>(&body)) {
        (StatusCode::OK, Ok(told)) => Ok(Some(told)),
        (StatusCode::UNAUTHORIZED, _) => {
            Err(format!("the proxy at {address} wants its admin token (admin.token_file)"))
        }
        _ => Err(format!("what listens on the admin port {address} explains nothing ({status})")),
    }
}

/// An address to connect to, from one to listen on: the unspecified address becomes loopback.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// Why a call got no answer.
enum Fault {
    /// No server listens on the address.
    Nobody,
    Other(String),
}

impl From<SendError> for Fault {
    fn from(error: SendError) -> Self {
        if error.kind() == SendErrorKind::Connect { Self::Nobody } else { Self::Other(error.to_string()) }
    }
}

async fn call(process: &Process, address: SocketAddr, given: &Given) -> Result<(StatusCode, Vec<u8>), Fault> {
    let other = |error: &dyn Display| Fault::Other(error.to_string());
    let settings = ReplicaSettings::new("admin", format!("http://{address}"));
    let admin = Replica::new(settings).map_err(|error| other(&error))?;
    let mut request = Request::new(full(given.body.clone()));
    *request.method_mut() = Method::POST;
    let path = format!("/api/explain?{}", given.asked.query());
    *request.uri_mut() = path.parse().map_err(|error: InvalidUri| other(&error))?;
    for (name, value) in &given.headers {
        if let Ok(name) = HeaderName::try_from(format!("{PREFIX}{name}")) {
            request.headers_mut().append(name, value.clone());
        }
    }
    if let Some(token) = token(process) {
        request.headers_mut().insert(AUTHORIZATION, token);
    }
    let response = admin.ask(request).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MOST).collect().await;
    Ok((status, body.map_err(|error| other(&error))?.to_bytes().to_vec()))
}

/// The `Authorization` value with the admin token; `None` if no token file is set or it cannot be read.
fn token(process: &Process) -> Option<HeaderValue> {
    let text = std::fs::read_to_string(process.admin.token_file.as_deref()?).ok()?;
    HeaderValue::try_from(format!("Bearer {}", text.trim())).ok()
}

/// Adds a note if the running proxy's policies differ from those of the files.
pub(super) fn compared(mut told: Explanation, files: &PolicySet) -> Explanation {
    let running: Vec<&str> = told.policies.iter().map(|line| line.policy.as_str()).collect();
    let files: Vec<String> = files.policies().iter().map(|policy| policy.label()).collect();
    if running != files {
        let note = format!(
            "the running proxy has the policies {}, the files have {}: POST /api/reload takes those",
            running.join(", "),
            files.join(", ")
        );
        told.notes.push(note);
    }
    told
}
