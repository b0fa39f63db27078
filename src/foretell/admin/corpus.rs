//! The corpus in the admin API: its size, and clearing it. Never a text.

use std::collections::BTreeMap;

use http::{Response, StatusCode};
use serde_json::{Value, json};

use super::{bad_request, json_response};
use foretell_config::values::percent_decoded;
use foretell_core::draft::corpus::Holdings;
use foretell_net::http::body::Body;
use foretell_proxy::learning::corpus::CorpusHandle;
use foretell_proxy::learning::snapshot::SnapshotError;

/// Answers `GET /api/corpus`: its size by tenant and model.
pub(super) fn shown(corpus: &CorpusHandle) -> Response<Body> {
    let mut sum = Holdings::default();
    let mut entries: BTreeMap<(Option<String>, String), Holdings> = BTreeMap::new();
    for (key, size) in corpus.holdings() {
        add(&mut sum, size);
        add(entries.entry((key.tenant, key.model)).or_default(), size);
    }
    let entry = |((tenant, model), size): (&(Option<String>, String), &Holdings)| {
        let scope = if tenant.is_some() { "tenant" } else { "global" };
        json!({
            "tenant": tenant,
            "scope": scope,
            "model": model,
            "texts": size.texts,
            "tokens": size.tokens,
            "bytes": size.bytes,
        })
    };
    let entries: Vec<Value> = entries.iter().map(entry).collect();
    let answer = json!({ "texts": sum.texts, "tokens": sum.tokens, "bytes": sum.bytes, "entries": entries });
    json_response(StatusCode::OK, &answer)
}

/// Answers `POST /api/corpus/clear?tenant=`: removes the texts of a tenant; without `tenant`, those
/// of all.
pub(super) async fn cleared(corpus: &CorpusHandle, query: Option<&str>, body: &[u8]) -> Response<Body> {
    if !matches!(body.trim_ascii(), b"" | b"{}") {
        // A tenant that is named there would be ignored, and everything cleared.
        return bad_request("allowed no body: the tenant is named by ?tenant=NAME", None);
    }
    let tenant = match tenant(query.unwrap_or_default()) {
        Ok(tenant) => tenant,
        Err(wrong) => return bad_request(&wrong, None),
    };
    let (cleared, of) = (corpus.clone(), tenant.clone());
    let cleared = tokio::task::spawn_blocking(move || cleared.clear(of.as_deref())).await;
    let gone = match cleared.unwrap_or(Err(SnapshotError::Stopped)) {
        Ok(gone) => gone,
        Err(SnapshotError::Stopped) => {
            let answer = json!({ "error": { "message": "the corpus has stopped; restart the process" } });
            return json_response(StatusCode::SERVICE_UNAVAILABLE, &answer);
        }
        Err(error) => {
            let message = format!("cleared from memory, and still in corpus.snapshot: {error}");
            let answer = json!({ "error": { "message": message } });
            return json_response(StatusCode::INTERNAL_SERVER_ERROR, &answer);
        }
    };
    tracing::info!(tenant, texts = gone, "texts cleared through the admin API");
    json_response(StatusCode::OK, &json!({ "tenant": tenant, "texts": gone }))
}

/// The tenant of a query; an error for any other parameter, since a misspelt name would clear
/// everything.
fn tenant(query: &str) -> Result<Option<String>, String> {
    let mut tenant = None;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("tenant", value)) if tenant.is_none() && !value.is_empty() => {
                tenant = Some(percent_decoded(value).ok_or("tenant is no percent-encoded text")?);
            }
            _ => return Err(format!("allowed tenant=NAME once, or nothing, got {pair:?}")),
        }
    }
    Ok(tenant)
}

fn add(to: &mut Holdings, size: Holdings) {
    to.texts += size.texts;
    to.tokens += size.tokens;
    to.bytes += size.bytes;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_is_named_once_and_nothing_else_is() {
        assert_eq!(tenant(""), Ok(None));
        assert_eq!(tenant("tenant=a%2Fb%20c%C3%BC"), Ok(Some("a/b cü".to_owned())));
        for wrong in ["tenants=a", "tenant=", "tenant", "tenant=a&tenant=b", "tenant=%FF", "all=1"] {
            assert!(tenant(wrong).is_err(), "{wrong}");
        }
    }
}
