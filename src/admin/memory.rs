//! The drafters' memory in the admin API: how much is held, and forgetting. Never a text.

use std::collections::BTreeMap;

use http::{Response, StatusCode};
use serde_json::{Value, json};

use super::explain::decoded;
use super::{bad_request, json_response};
use crate::draft::memory::Holdings;
use crate::drive::memory::Memories;
use crate::http::body::Body;

/// Answers `GET /api/memory`: what is held, per tenant and model.
pub(super) fn shown(memories: &Memories) -> Response<Body> {
    let mut sum = Holdings::default();
    let mut shelves: BTreeMap<(Option<String>, String), Holdings> = BTreeMap::new();
    for (key, held) in memories.holdings() {
        add(&mut sum, held);
        add(shelves.entry((key.tenant, key.model)).or_default(), held);
    }
    let shelf = |((tenant, model), held): (&(Option<String>, String), &Holdings)| {
        let scope = if tenant.is_some() { "tenant" } else { "global" };
        json!({ "tenant": tenant, "scope": scope, "model": model, "texts": held.texts, "tokens": held.tokens, "successors": held.successors, "bytes": held.bytes })
    };
    let shelves: Vec<Value> = shelves.iter().map(shelf).collect();
    let told = json!({ "texts": sum.texts, "tokens": sum.tokens, "successors": sum.successors, "bytes": sum.bytes, "shelves": shelves });
    json_response(StatusCode::OK, &told)
}

/// Answers `POST /api/memory/clear?tenant=`: forgets the texts and successors of a tenant; without `tenant` everything.
pub(super) async fn cleared(memories: &Memories, query: Option<&str>) -> Response<Body> {
    let tenant = match tenant(query.unwrap_or_default()) {
        Ok(tenant) => tenant,
        Err(wrong) => return bad_request(&wrong, None),
    };
    let (memories, of) = (memories.clone(), tenant.clone());
    let cleared = tokio::task::spawn_blocking(move || memories.clear(of.as_deref())).await;
    let Some(gone) = cleared.ok().flatten() else {
        let told = json!({ "error": { "message": "the memory has stopped; restart the process" } });
        return json_response(StatusCode::SERVICE_UNAVAILABLE, &told);
    };
    tracing::info!(tenant, texts = gone, "texts forgotten, as the admin API was asked to");
    json_response(StatusCode::OK, &json!({ "tenant": tenant, "texts": gone }))
}

/// The tenant of a query; an error for anything else in it, for a misspelt name would forget everything.
fn tenant(query: &str) -> Result<Option<String>, String> {
    let mut tenant = None;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("tenant", value)) if tenant.is_none() && !value.is_empty() => {
                tenant = Some(decoded(value).ok_or("tenant is no percent-encoded text")?);
            }
            _ => return Err(format!("allowed tenant=NAME once, or nothing, got {pair:?}")),
        }
    }
    Ok(tenant)
}

fn add(to: &mut Holdings, held: Holdings) {
    to.texts += held.texts;
    to.tokens += held.tokens;
    to.successors += held.successors;
    to.bytes += held.bytes;
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
