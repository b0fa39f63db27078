//! Warnings of settings that are allowed and have no effect, with each other or with what the files
//! hold.

use std::sync::Arc;

use super::process::{Backend, Process, Tenant, TenantFallback};
use foretell_core::draft::Scope;
use foretell_core::words::Mode;
use foretell_policy::{Accept, Drafter, Match, Policy, PolicyMode, PolicySet, Rule};
use foretell_wire::openai::Api;

/// Warning that the policy folder has no policy, so the built-in one is in force.
pub(super) fn unruled(process: &Process, sources: &[(String, String)]) -> Option<String> {
    let empty = process.policies_must_exist && sources.is_empty();
    let dir = process.policies.display();
    empty.then(|| format!("no policy files in {dir}: the built-in policy `default` (mode auto) is in force"))
}

/// Warning that a lossy rule relaxes nothing.
pub(super) fn inert(policy: &Policy) -> Option<String> {
    let Accept { rule, tolerance, .. } = &policy.accept;
    let inert = *rule != Rule::Exact && tolerance.max <= 0.0;
    let name = &policy.name;
    inert.then(|| format!("policy {name}: accept.rule: {} relaxes nothing: tolerance.max is 0", rule.name()))
}

/// Warnings that no method of verification is allowed for a backend.
pub(super) fn unverified(process: &Process) -> Vec<String> {
    let is_bare = |backend: &&Backend| backend.methods.allow.is_empty();
    let line = |backend: &Backend| {
        format!(
            "backend {}: verify.allow: [] leaves no method: its requests are passed through",
            backend.name
        )
    };
    process.backends.iter().filter(is_bare).map(line).collect()
}

/// Warning that a list of a policy's match has no entry, so that it holds for no request.
fn unmatched(policy: &Policy) -> Option<String> {
    let Match { models, backends, tenants, routes, .. } = &policy.matcher;
    let empty = [
        ("models", models.as_ref().is_some_and(Vec::is_empty)),
        ("backends", backends.as_ref().is_some_and(Vec::is_empty)),
        ("tenants", tenants.as_ref().is_some_and(Vec::is_empty)),
        ("routes", routes.as_ref().is_some_and(Vec::is_empty)),
    ];
    let (list, _) = empty.into_iter().find(|(_, empty)| *empty)?;
    Some(format!("policy {}: it never applies: match.{list} is empty", policy.name))
}

/// Warnings about policies that no request reaches.
pub(super) fn shadowed(policies: &PolicySet) -> Vec<String> {
    let policies = policies.policies();
    let Some(last) = policies.iter().position(|policy| policy.matcher == Match::default()) else {
        return Vec::new();
    };
    let (before, behind) = policies.split_at(last + 1);
    let taker = before.last().map_or("", |policy| &policy.name);
    let line = |policy: &Arc<Policy>| {
        format!("policy {}: it never applies: policy {taker} before it has no match", policy.name)
    };
    behind.iter().map(line).collect()
}

/// Warnings about settings of a policy that have no effect with this config file.
pub(super) fn ineffective(policy: &Policy, process: &Process) -> Vec<String> {
    let unknown = unknown_backends(policy, process).into_iter();
    unknown
        .chain(unmatched(policy))
        .chain(untenanted(policy, process))
        .chain(unrecorded(policy, process))
        .chain(untranslated(policy, process))
        .collect()
}

/// Warnings that a policy names backends that there are none of.
fn unknown_backends(policy: &Policy, process: &Process) -> Vec<String> {
    // That there is no backend at all is a problem of its own.
    if process.backends.is_empty() {
        return Vec::new();
    }
    let named = policy.matcher.backends.iter().flatten();
    let unknown = named.filter(|glob| !process.backends.iter().any(|backend| glob.matches(&backend.name)));
    let name = &policy.name;
    unknown
        .map(|glob| format!("policy {name}: match.backends: no backend is named {}", glob.as_str()))
        .collect()
}

/// True if a drafter of the policy reads texts of the request's tenant.
fn drafts_of_tenant(policy: &Policy) -> bool {
    policy.drafters.iter().any(|drafter| match drafter {
        Drafter::Lookup(lookup) => lookup.corpus_scope() == Some(Scope::Tenant),
        Drafter::Model { .. } => false,
    })
}

/// Warning that a policy is for tenants, and no request has one.
fn untenanted(policy: &Policy, process: &Process) -> Option<String> {
    let Tenant { header, fallback, .. } = &process.tenant;
    let nobody = header.is_none() && *fallback == TenantFallback::None;
    let scoped = drafts_of_tenant(policy);
    let what = match policy.matcher.tenants {
        Some(_) => "match.tenants never applies",
        None if scoped => "scope: tenant drafts from the request's own text alone",
        None => return None,
    };
    let name = &policy.name;
    nobody
        .then(|| format!("policy {name}: {what} without tenant.header or tenant.fallback of the config file"))
}

/// Warning that a policy's requests are not recorded.
fn unrecorded(policy: &Policy, process: &Process) -> Option<String> {
    let why = match (process.corpus.record.is_some(), policy.mode, process.mode) {
        _ if !policy.corpus.record => return None,
        (false, ..) => "without corpus.record.dir of the config file".to_owned(),
        (true, PolicyMode::Auto, Mode::Auto) => return None,
        (true, PolicyMode::Auto, mode) => format!("in mode {}", mode.name()),
        (true, mode, _) => format!("with mode: {}", mode.name()),
    };
    Some(format!("policy {}: corpus.record has no effect {why}", policy.name))
}

/// Warning that a policy is for requests of APIs that no backend translates, which are passed
/// through.
fn untranslated(policy: &Policy, process: &Process) -> Option<String> {
    let routes = policy.matcher.routes.as_ref()?;
    if process.backends.is_empty() {
        return None;
    }
    let never = |api: &Api| {
        let is_other = matches!(api, Api::Messages | Api::Responses);
        is_other && !process.backends.iter().any(|backend| backend.routes.translated().contains(api))
    };
    let never: Vec<&str> = routes.iter().filter(|&api| never(api)).map(|api| api.name()).collect();
    let (name, apis) = (&policy.name, never.join(" and "));
    (!never.is_empty()).then(|| {
        format!(
            "policy {name}: match.routes: {apis} never apply, as no backend has routes: {{ ...: translate }}"
        )
    })
}

/// Warning that a tenant header is set but no peer is trusted to send it.
pub(super) fn unbelieved(process: &Process) -> Option<String> {
    let Tenant { header, trusted_peers, .. } = &process.tenant;
    let header = header.as_ref()?;
    let is_trusted = !trusted_peers.is_empty();
    (!is_trusted).then(|| format!("tenant.header: {header} is never trusted: tenant.trusted_peers is empty"))
}
