//! The tenant of a request, as configured by `tenant` of the process file.

use std::net::IpAddr;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use sha2::{Digest, Sha256};

use crate::config::process::{Tenant, TenantFallback};

/// The tenant of a request that `peer` has sent: by the header of a trusted peer, else by the
/// fallback. A request with a doubtful tenant is refused, and has none.
pub fn of(configured: &Tenant, peer: Option<IpAddr>, headers: &HeaderMap) -> Option<String> {
    if is_doubtful(configured, headers) {
        return None;
    }
    named(configured, peer, headers).or_else(|| match configured.fallback {
        TenantFallback::None => None,
        TenantFallback::AuthorizationHash => hashed(headers),
    })
}

/// True if the configured header occurs more than once, so that the tenant would depend on the
/// reader. Two `Authorization` fields are refused with the head.
pub fn is_doubtful(configured: &Tenant, headers: &HeaderMap) -> bool {
    let name = configured.header.as_deref();
    name.is_some_and(|name| headers.get_all(name).iter().nth(1).is_some())
}

/// The tenant that the configured header names. `None` if the peer is not trusted, as it could name
/// any tenant.
fn named(configured: &Tenant, peer: Option<IpAddr>, headers: &HeaderMap) -> Option<String> {
    let name = configured.header.as_deref()?;
    let trusted =
        peer.is_some_and(|peer| configured.trusted_peers.iter().any(|network| network.contains(peer)));
    let value = headers.get(name).filter(|_| trusted)?;
    value.to_str().ok().filter(|tenant| !tenant.is_empty()).map(ToOwned::to_owned)
}

/// The first 16 hex digits of the SHA-256 of the credential: enough that no two keys of a fleet
/// share them.
fn hashed(headers: &HeaderMap) -> Option<String> {
    let hash = Sha256::digest(headers.get(AUTHORIZATION)?.as_bytes());
    hash.first_chunk().map(|first| format!("{:016x}", u64::from_be_bytes(*first)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configured(fallback: TenantFallback) -> Tenant {
        let trusted_peers = vec!["10.0.0.0/8".parse().unwrap()];
        Tenant { header: Some("x-tenant".to_owned()), trusted_peers, fallback }
    }

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    #[rstest::rstest]
    #[case("10.1.2.3", &[("x-tenant", "ide")], Some("ide"))]
    #[case("::ffff:10.1.2.3", &[("x-tenant", "ide")], Some("ide"))]
    #[case("11.1.2.3", &[("x-tenant", "ide")], None)]
    #[case("10.1.2.3", &[("x-tenant", "")], None)]
    #[case("10.1.2.3", &[], None)]
    fn only_a_trusted_peer_names_a_tenant(
        #[case] peer: &str,
        #[case] lines: &[(&'static str, &str)],
        #[case] wanted: Option<&str>,
    ) {
        let configured = configured(TenantFallback::None);
        assert_eq!(of(&configured, Some(peer.parse().unwrap()), &headers(lines)).as_deref(), wanted);
        assert_eq!(of(&configured, None, &headers(lines)), None);
    }

    #[test]
    fn a_tenant_is_named_once() {
        let configured = configured(TenantFallback::AuthorizationHash);
        let doubtful = |lines: &[(&'static str, &str)]| is_doubtful(&configured, &headers(lines));
        assert!(!doubtful(&[]) && !doubtful(&[("x-tenant", "ide"), ("x-other", "a"), ("x-other", "b")]));
        assert!(doubtful(&[("x-tenant", "ide"), ("x-tenant", "web")]));
        assert!(doubtful(&[("x-tenant", ""), ("x-tenant", "ide")]));
        assert_eq!(
            of(&configured, Some([10, 0, 0, 1].into()), &headers(&[("x-tenant", "a"), ("x-tenant", "b")])),
            None
        );
        assert!(!is_doubtful(&Tenant { header: None, ..configured }, &headers(&[("a", "1"), ("a", "2")])));
    }

    #[test]
    fn a_tenant_is_the_hash_of_its_credential() {
        let configured = configured(TenantFallback::AuthorizationHash);
        let of =
            |lines: &[(&'static str, &str)]| of(&configured, Some([10, 0, 0, 1].into()), &headers(lines));
        // printf 'Bearer sk-1' | sha256sum
        assert_eq!(of(&[("authorization", "Bearer sk-1")]).as_deref(), Some("c3e9a1c985d603e4"));
        assert_ne!(of(&[("authorization", "Bearer sk-2")]), of(&[("authorization", "Bearer sk-1")]));
        assert_eq!(of(&[("authorization", "Bearer sk-1"), ("x-tenant", "ide")]).as_deref(), Some("ide"));
        assert_eq!(of(&[]), None);
    }
}
