//! Inputs of operators, clients and collectors other than request bodies: calls of the admin API,
//! control headers, tenants, networks, trace contexts.
//!
//! Input: the first byte selects the kind; then the text, in parts.

use std::net::IpAddr;

use foretell::admin::explain;
use foretell_config::process::{Tenant, TenantFallback};
use foretell_config::values::Network;
use foretell_net::http::headers;
use foretell_policy::Glob;
use foretell_policy::form;
use foretell_proxy::gateway::{route, tenant};
use foretell_wire::openai::control_header::{Control, GAMMA_MAX};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};

use crate::bytes::Bytes;

/// Maximum size of an input, bytes.
const MAX_LEN: usize = 16 << 10;

/// Runs one input.
pub fn run(input: &[u8]) {
    if input.len() > MAX_LEN {
        return;
    }
    let mut input = Bytes(input);
    let choice = input.below(4);
    let parts = input.bodies();
    let text = |at: usize| parts.get(at).map(|part| String::from_utf8_lossy(part)).unwrap_or_default();
    match choice {
        0 => question(&text(0), parts.get(1).copied().unwrap_or_default(), &fields(&text(2))),
        1 => words(&text(0), &text(1)),
        2 => network(&text(0), &text(1)),
        _ => passed_on(&fields(&text(0)), &text(1)),
    }
}

/// Header fields, one per line.
fn fields(text: &str) -> HeaderMap {
    let field = |line: &str| {
        let (name, value) = line.split_once(':')?;
        let name: HeaderName = name.trim().parse().ok()?;
        Some((name, HeaderValue::from_bytes(value.trim().as_bytes()).ok()?))
    };
    text.lines().take(64).filter_map(field).collect()
}

/// `POST /api/explain`.
fn question(query: &str, body: &[u8], fields: &HeaderMap) {
    let Ok(uri) = format!("/api/explain?{query}").parse::<Uri>() else { return };
    let mut call = Request::builder().method(Method::POST).uri(uri).body(()).expect("a request");
    *call.headers_mut() = fields.clone();
    let (call, ()) = call.into_parts();
    let Ok(asked) = explain::Question::of_call(&call, Some(body), 8 << 10) else { return };
    let again =
        explain::ExplainQuery { route: Some(asked.route), peer: asked.peer, tenant: asked.tenant.clone() };
    let uri: Uri = format!("/api/explain?{}", again.query()).parse().expect("a query is part of a URL");
    let mut call = Request::builder().uri(uri).body(()).expect("a request").into_parts().0;
    call.headers = HeaderMap::new();
    let Ok(read) = explain::Question::of_call(&call, Some(body), 8 << 10) else {
        panic!("{} is not read", again.query())
    };
    assert_eq!((read.route, read.peer, read.tenant), (asked.route, asked.peer, asked.tenant));
    let _ = asked.body.is_some();
}

/// Values of control headers and parameters.
fn words(text: &str, other: &str) {
    match Control::parse(text) {
        Ok(Control::Gamma(gamma)) => {
            assert!((1..=GAMMA_MAX).contains(&gamma));
            assert_eq!(Control::parse(&format!("gamma={gamma}")), Ok(Control::Gamma(gamma)));
        }
        Ok(Control::Off | Control::Plain) => {}
        Err(error) => assert!(error.0.chars().count() <= 40),
    }
    let _ = form::duration(text);
    let _ = form::size(text);
    let glob = Glob::new(text);
    assert_eq!(glob.as_str(), text);
    assert!(glob.matches(text) && (!glob.is_exact() || glob.matches(other) == (text == other)), "{text:?}");
}

/// Networks hold exactly the addresses that share their first bits.
fn network(network: &str, address: &str) {
    let (Ok(network), Ok(address)) = (network.parse::<Network>(), address.parse::<IpAddr>()) else { return };
    let configured = Tenant {
        header: Some("x-tenant".to_owned()),
        trusted_peers: vec![network],
        fallback: TenantFallback::None,
    };
    let mut fields = HeaderMap::new();
    fields.insert("x-tenant", HeaderValue::from_static("a"));
    let named = tenant::of(&configured, Some(address), &fields);
    assert_eq!(named.is_some(), network.contains(address));
    assert_eq!(network.contains(address), network.contains(address.to_canonical()));
    assert_eq!(tenant::of(&configured, None, &fields), None);
}

/// Header fields passed on to a server, and the tenant of a client.
fn passed_on(fields: &HeaderMap, uri: &str) {
    let configured = Tenant {
        header: Some("x-tenant".to_owned()),
        trusted_peers: Vec::new(),
        fallback: TenantFallback::AuthorizationHash,
    };
    if let Some(tenant) = tenant::of(&configured, None, fields) {
        assert!(tenant.len() == 16 && fields.contains_key("authorization"));
    }
    let mut passed = fields.clone();
    let _ = headers::strip_hop_by_hop(&mut passed);
    headers::strip_foretell(&mut passed);
    for name in ["connection", "transfer-encoding", "x-foretell", "keep-alive", "proxy-connection"] {
        assert!(!passed.contains_key(name), "{name} was passed on");
    }
    let _ = (headers::is_encoded(fields), headers::takes_trailers(fields));
    if let Ok(uri) = uri.parse::<Uri>() {
        let _ = (route::candidate(&Method::POST, &uri), route::is_repeatable(&Method::POST, &uri));
    }
}
