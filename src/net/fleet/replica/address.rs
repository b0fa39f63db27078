//! Converts a configured address to the parts that a connection needs.

use std::sync::Arc;
use std::time::Duration;

use http::uri::{Authority, Scheme};
use http::{HeaderValue, Uri};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;

use crate::fleet::replica::{InvalidUrl, ReplicaKey, ReplicaSettings};
use crate::fleet::tls;

/// Opens connections, by TLS where the address is https.
pub(super) type Connector = HttpsConnector<HttpConnector>;

pub(super) fn host_of(scheme: &Scheme, authority: &Authority) -> Option<HeaderValue> {
    let usual = if *scheme == Scheme::HTTPS { 443 } else { 80 };
    let host = match authority.port_u16() {
        Some(port) if port != usual => format!("{}:{port}", authority.host()),
        _ => authority.host().to_owned(),
    };
    HeaderValue::try_from(host).ok()
}

pub(super) fn address(scheme: Scheme, authority: Authority) -> Result<Uri, http::Error> {
    Uri::builder().scheme(scheme).authority(authority).path_and_query("/").build()
}

pub(super) fn connector(
    settings: &ReplicaSettings,
    scheme: &Scheme,
    authority: &Authority,
    key: ReplicaKey,
) -> Result<Connector, InvalidUrl> {
    let invalid = |detail: String| InvalidUrl { url: settings.url.clone(), detail: format!("TLS: {detail}") };
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(settings.connect_timeout));
    tcp.set_keepalive(Some(Duration::from_mins(1)));
    let config = match &settings.tls {
        Some(config) => Arc::clone(config),
        None => tls::public().map_err(|error| invalid(error.to_string()))?,
    };
    let tls = HttpsConnectorBuilder::new().with_tls_config(ClientConfig::clone(&config)).https_or_http();
    if key.address.is_none() || *scheme != Scheme::HTTPS {
        return Ok(tls.enable_http1().wrap_connector(tcp));
    }
    // The address is one of several behind the name; the certificate is for the name.
    let name = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
    let name = ServerName::try_from(name).map_err(|error| invalid(error.to_string()))?;
    let tls = tls.with_server_name_resolver(FixedServerNameResolver::new(name));
    Ok(tls.enable_http1().wrap_connector(tcp))
}
