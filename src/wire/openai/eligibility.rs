//! Decides whether a request is eligible. Every parameter is looked up in the table; if one is not
//! carried exactly, the request is passed through, with a reason and the parameter that caused it.

use serde_json::{Map, Value};

use super::fields;
use super::json;
use super::parameters::{self, Parameter, Treatment};
use super::request::{Prompt, Request, Route};
use super::sampling::Sampling;
use foretell_core::words::{PassthroughReason, Refused};

/// The decision about a request, by its body alone.
#[derive(Clone, Debug)]
pub enum Judgement {
    /// It is eligible.
    Eligible(Box<Request>),
    /// The request is passed through.
    Passthrough {
        /// The first reason found.
        reason: PassthroughReason,
        /// The parameter that caused it; `None` if it is another reason.
        parameter: Option<String>,
    },
}

/// The judgement of one parameter of a body.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The parameter's name; members of an object are written `object.member`.
    pub parameter: String,
    /// Its row in the table; `None` if the parameter is unknown.
    pub row: Option<&'static Parameter>,
    /// Reason why it prevents speculation; `None` if it does not.
    pub refused: Option<PassthroughReason>,
}

/// Judges the body of a request.
pub fn judge(route: Route, body: &[u8]) -> Judgement {
    let Some((request, findings)) = understand(route, body) else {
        return Judgement::Passthrough { reason: PassthroughReason::Body, parameter: None };
    };
    match refusal(&findings) {
        Some((reason, parameter)) => Judgement::Passthrough { reason, parameter: Some(parameter.to_owned()) },
        None => Judgement::Eligible(Box::new(request)),
    }
}

/// Reason why a request with these parameters is not eligible, and the parameter that
/// caused it; `None` if it may.
pub fn refusal(findings: &[Finding]) -> Option<(PassthroughReason, &str)> {
    findings.iter().find_map(|finding| Some((finding.refused?, finding.parameter.as_str())))
}

/// Judges every parameter by itself, and reads all that can be read; `None` if the body is not a
/// JSON object. The request is eligible only if no finding refuses it.
pub fn understand(route: Route, body: &[u8]) -> Option<(Request, Vec<Finding>)> {
    let Some(Value::Object(members)) = json::parse(body) else { return None };
    let mut request = blank(route);
    let mut findings = Vec::new();
    for (name, value) in members.iter().filter(|(_, value)| !value.is_null()) {
        findings.push(look_up(route, name, value, &mut request));
        if let ("stream_options", Some(options)) = (name.as_str(), value.as_object()) {
            for (member, value) in options.iter().filter(|(_, value)| !value.is_null()) {
                findings.push(look_up(route, &format!("{name}.{member}"), value, &mut request));
            }
        }
    }
    require(route, &members, &mut findings);
    // Backends refuse `stream_options` without `stream`; the first call always streams, and would
    // hide that error.
    if !request.stream {
        refuse(&mut findings, "stream_options", PassthroughReason::Parameter);
    }
    request.body = members;
    Some((request, findings))
}

fn look_up(route: Route, name: &str, value: &Value, request: &mut Request) -> Finding {
    let row = parameters::find(route, name);
    let refused = match row.map(|row| row.treatment) {
        None => Some(PassthroughReason::UnknownParameter),
        Some(Treatment::Carried(field) | Treatment::Emulated(field)) => {
            fields::read(field, value, request).err()
        }
        Some(Treatment::Inert) => None,
        Some(Treatment::Rendered(reason)) => {
            request.rendered.extend(row.map(|row| Refused::by(reason, row.name)));
            None
        }
        Some(Treatment::Neutral(plain, reason)) => {
            (!plain.iter().any(|plain| plain.is(value))).then_some(reason)
        }
        Some(Treatment::Passthrough(reason)) => Some(reason),
    };
    Finding { parameter: name.to_owned(), row, refused }
}

/// Adds findings for required parameters: without these the backend returns an error, or applies a
/// default that is not known here.
fn require(route: Route, members: &Map<String, Value>, findings: &mut Vec<Finding>) {
    let subject = match route {
        Route::Completions => "prompt",
        Route::Chat => "messages",
    };
    for name in ["model", subject] {
        if members.get(name).is_none_or(Value::is_null) {
            let row = parameters::find(route, name);
            findings.push(Finding {
                parameter: name.to_owned(),
                row,
                refused: Some(PassthroughReason::Body),
            });
        }
    }
}

fn refuse(findings: &mut [Finding], name: &str, reason: PassthroughReason) {
    if let Some(finding) = findings.iter_mut().find(|finding| finding.parameter == name) {
        finding.refused.get_or_insert(reason);
    }
}

fn blank(route: Route) -> Request {
    Request {
        route,
        model: String::new(),
        prompt: Prompt::Text(String::new()),
        sampling: Sampling::default(),
        max_tokens: None,
        stop: Vec::new(),
        stop_token_ids: Vec::new(),
        include_stop: false,
        stream: false,
        include_usage: false,
        continuous_usage: false,
        reads_reasoning_usage: true,
        return_token_ids: false,
        prediction: None,
        tools: false,
        bars_tools: false,
        single_call: false,
        forced: None,
        rendered: Vec::new(),
        body: Map::new(),
    }
}
