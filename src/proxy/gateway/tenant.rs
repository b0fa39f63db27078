//! The tenant of a request, as configured by `tenant` of the config file.

use std::net::IpAddr;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use sha2::{Digest, Sha256};

use foretell_config::process::{Tenant, TenantFallback};

/// Reason that a request is refused for its tenant: other servers could read another tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// The configured header occurs more than once. (Two `Authorization` fields are refused with
    /// the head.)
    Twice,
    /// A trusted peer names a tenant that is not UTF-8.
    NotUtf8,
}

impl Doubt {
    /// The fault of the request, in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Twice => "it names more than one tenant",
            Self::NotUtf8 => "its tenant is not UTF-8",
        }
    }
}

/// The tenant of a request that `peer` has sent: by the header of a trusted peer, else by the
/// fallback. A request with a doubtful tenant is refused, and has none.
pub fn of(configured: &Tenant, peer: Option<IpAddr>, headers: &HeaderMap) -> Option<String> {
    if doubt(configured, peer, headers).is_some() {
        return None;
    }
    named(configured, peer, headers).or_else(|| match configured.fallback {
        TenantFallback::None => None,
        TenantFallback::AuthorizationHash => hashed(headers),
    })
}

/// Reason that the tenant of a request from `peer` is doubtful; `None` if it is not.
pub fn doubt(configured: &Tenant, peer: Option<IpAddr>, headers: &HeaderMap) -> Option<Doubt> {
    let mut values = headers.get_all(configured.header.as_deref()?).iter();
    let value = values.next()?;
    if values.next().is_some() {
        return Some(Doubt::Twice);
    }
    let read = std::str::from_utf8(value.as_bytes());
    (is_trusted(configured, peer) && read.is_err()).then_some(Doubt::NotUtf8)
}

/// The tenant that the configured header names. `None` if the peer is not trusted, as it could name
/// any tenant.
fn named(configured: &Tenant, peer: Option<IpAddr>, headers: &HeaderMap) -> Option<String> {
    if !is_trusted(configured, peer) {
        return None;
    }
    let value = headers.get(configured.header.as_deref()?)?;
    // Not `to_str`, which refuses names beyond ASCII.
    let tenant = std::str::from_utf8(value.as_bytes()).ok()?;
    Some(tenant.to_owned()).filter(|tenant| !tenant.is_empty())
}

fn is_trusted(configured: &Tenant, peer: Option<IpAddr>) -> bool {
    peer.is_some_and(|peer| configured.trusted_peers.iter().any(|network| network.contains(peer)))
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
    #[case("10.1.2.3", &[("x-tenant", "müller")], Some("müller"))]
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
        let doubtful =
            |lines: &[(&'static str, &str)]| doubt(&configured, None, &headers(lines)) == Some(Doubt::Twice);
        assert!(!doubtful(&[]) && !doubtful(&[("x-tenant", "ide"), ("x-other", "a"), ("x-other", "b")]));
        assert!(doubtful(&[("x-tenant", "ide"), ("x-tenant", "web")]));
        assert!(doubtful(&[("x-tenant", ""), ("x-tenant", "ide")]));
        assert_eq!(
            of(&configured, Some([10, 0, 0, 1].into()), &headers(&[("x-tenant", "a"), ("x-tenant", "b")])),
            None
        );
        let unnamed = Tenant { header: None, ..configured };
        assert_eq!(doubt(&unnamed, None, &headers(&[("a", "1"), ("a", "2")])), None);
    }

    #[test]
    fn a_tenant_that_a_trusted_peer_does_not_name_in_utf_8_is_doubtful() {
        let configured = configured(TenantFallback::AuthorizationHash);
        let mut headers = headers(&[("authorization", "Bearer sk-1")]);
        headers.append("x-tenant", http::HeaderValue::from_bytes(b"m\xfcller").unwrap());
        let [trusted, other] = [[10, 0, 0, 1], [11, 0, 0, 1]].map(|peer| Some(peer.into()));
        assert_eq!(doubt(&configured, trusted, &headers), Some(Doubt::NotUtf8));
        assert_eq!(of(&configured, trusted, &headers), None, "nor the key's hash, which others may share");
        assert_eq!(doubt(&configured, other, &headers), None, "it may name nobody");
        assert!(of(&configured, other, &headers).is_some());
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
