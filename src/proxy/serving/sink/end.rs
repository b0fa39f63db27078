//! The end of a client's answer: stop, usage, trailers.

use http::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Value, json};

use crate::serving::failure::Failure;
use foretell_core::session::{Finish, Stopped};
use foretell_core::units::TokenId;
use foretell_core::words::Reason;
use foretell_net::http::headers;
use foretell_observe::Finished;
use foretell_wire::openai::usage::{Counts, Path, SpeculatedUsage, Usage};

/// How the output of a session ended. Its counts are in the request's record.
#[derive(Debug)]
pub struct End {
    /// Finish reason of the output; `None` if it broke off.
    pub finish: Option<Finish>,
    /// The stop text or token that ended the output; `None` at the limit.
    pub stopped: Option<Stopped>,
    /// The backend's usage if its stream carried it, else one counted here.
    pub usage: Usage,
    /// The error for the client if the output has no end.
    pub broken: Failure,
}

impl End {
    /// True if the output has an end.
    pub fn is_complete(&self) -> bool {
        self.finish.is_some()
    }

    /// The stop text or token as JSON, null if there is none. `names`: the engine names this
    /// token as a stop. Where that is not known, it names a stop token of the client's, and with
    /// `names_end` the end-of-text token.
    pub(super) fn stop(&self, names: impl Fn(TokenId) -> Option<bool>, names_end: bool) -> Value {
        let named = |token: TokenId, usual: bool| names(token).unwrap_or(usual).then_some(token);
        match &self.stopped {
            Some(Stopped::Text(text)) => json!(text),
            Some(Stopped::Token(token)) => json!(named(*token, true)),
            Some(Stopped::TextEnd(token)) => json!(named(*token, names_end)),
            None => Value::Null,
        }
    }

    /// The usage as the backend alone would report it.
    pub(super) fn plain_usage(&self, record: &Finished) -> Value {
        self.usage.to_value(u64::from(record.usage.output_tokens), None)
    }

    /// The usage that the client sees. `prediction`: the client sent a predicted output.
    pub(super) fn usage(&self, record: &Finished, prediction: bool) -> Value {
        let speculated_usage = SpeculatedUsage {
            path: record.path,
            reason: record.reason.map(Reason::name),
            policy: record.policy.as_deref(),
            counts: counts(record),
        };
        let mut usage = self.usage.clone();
        if prediction && let Some(counts) = &speculated_usage.counts {
            usage = usage.with_prediction(counts.accepted, counts.drafted.saturating_sub(counts.accepted));
        }
        // An answer that stayed plain has no member that the backend would not have sent.
        let speculated_usage =
            Some(&speculated_usage).filter(|speculated_usage| speculated_usage.path == Path::Speculated);
        usage.to_value(u64::from(record.usage.output_tokens), speculated_usage)
    }
}

/// The usage in the form of the backend's last event; `bare`: without members that are null.
pub(super) fn shown(mut usage: Value, bare: bool) -> Value {
    if bare && let Some(members) = usage.as_object_mut() {
        members.retain(|_, value| !value.is_null());
    }
    usage
}

/// The names that a stream declares in `Trailer`.
pub const TRAILERS: &str = "x-foretell-path, x-foretell-reason, x-foretell-accepted, x-foretell-drift";

/// The trailers of an answer with this record.
pub fn trailer_fields(record: &Finished) -> HeaderMap {
    let mut fields = HeaderMap::new();
    fields.insert(headers::PATH, HeaderValue::from_static(record.path.name()));
    if let Some(reason) = record.reason {
        fields.insert(headers::REASON, HeaderValue::from_static(reason.name()));
    }
    let Some(counts) = counts(record) else { return fields };
    fields.insert(HeaderName::from_static("x-foretell-accepted"), counts.accepted.into());
    if let Ok(drift) = HeaderValue::from_str(&counts.drift.charged.to_string()) {
        fields.insert(HeaderName::from_static("x-foretell-drift"), drift);
    }
    fields
}

/// Counts of the rounds; `None` if drafts may come from other clients' texts, which the counts
/// would reveal.
fn counts(record: &Finished) -> Option<Counts> {
    (!record.reads_others).then(|| Counts {
        rounds: record.speculation.rounds.len() as u32,
        drafted: record.drafted(),
        accepted: record.accepted(),
        drift: record.speculation.drift,
        output_tokens: record.usage.output_tokens,
    })
}
