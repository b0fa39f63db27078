//! Calls the running proxy's admin API: about a request, or about its traffic.

use std::time::Duration;

use http::{HeaderMap, HeaderName, StatusCode};
use serde::de::DeserializeOwned;

use super::Given;
use crate::admin::explain::PREFIX;
use crate::cli::admin_port::{AdminPort, Fault};
use foretell_config::process::Process;
use foretell_observe::coverage::CoverageReport;
use foretell_policy::{Explanation, PolicySet};

/// Time limit of an answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The explanation of the proxy with these settings; `None` if no server listens on its admin
/// address.
///
/// # Errors
/// The address gives no valid answer, or the proxy refuses the request.
pub(super) async fn proxy(process: &Process, given: &Given) -> Result<Option<Explanation>, String> {
    let port = AdminPort::new(process.admin.address, process.admin.token_file.as_deref());
    answer(&port, call(&port, given), "explain").await
}

/// The coverage report of the proxy at this port; `None` if no server listens there.
///
/// # Errors
/// The address gives no valid answer, or the proxy refuses the request.
pub(super) async fn traffic(port: &AdminPort) -> Result<Option<CoverageReport>, String> {
    answer(port, port.get("/api/coverage"), "explain --traffic").await
}

/// Waits for an answer in JSON; `None` if no server listens. `command` is named in errors.
async fn answer<T: DeserializeOwned>(
    port: &AdminPort,
    call: impl Future<Output = Result<(StatusCode, Vec<u8>), Fault>>,
    command: &str,
) -> Result<Option<T>, String> {
    let address = port.address;
    let (status, body) = match tokio::time::timeout(TIMEOUT, call).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(Fault::Nobody)) => return Ok(None),
        Ok(Err(Fault::Other(why))) => {
            return Err(format!("the admin port {address} gives no answer ({why})"));
        }
        Err(_) => {
            return Err(format!("the admin port {address} gives no answer within {} s", TIMEOUT.as_secs()));
        }
    };
    match (status, serde_json::from_slice::<T>(&body)) {
        (StatusCode::OK, Ok(answer)) => Ok(Some(answer)),
        (StatusCode::UNAUTHORIZED, _) => {
            Err(format!("the proxy at {address} requires its admin token (admin.token_file)"))
        }
        _ => Err(format!("the server on the admin port {address} does not support {command} ({status})")),
    }
}

/// Sends the request.
async fn call(port: &AdminPort, given: &Given) -> Result<(StatusCode, Vec<u8>), Fault> {
    let mut fields = HeaderMap::new();
    for (name, value) in &given.headers {
        if let Ok(name) = HeaderName::try_from(format!("{PREFIX}{name}")) {
            fields.append(name, value.clone());
        }
    }
    port.post(&format!("/api/explain?{}", given.query.query()), fields, given.body.clone()).await
}

/// Adds a note if the running proxy's policies differ from those of the files.
pub(super) fn compared(mut explanation: Explanation, files: &PolicySet) -> Explanation {
    let running: Vec<&str> = explanation.policies.iter().map(|line| line.policy.as_str()).collect();
    let files: Vec<String> = files.policies().iter().map(|policy| policy.label()).collect();
    if running != files {
        let note = format!(
            "the running proxy has the policies {}, the files have {}: POST /api/reload takes those",
            running.join(", "),
            files.join(", ")
        );
        explanation.notes.push(note);
    }
    explanation
}
