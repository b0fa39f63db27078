//! Access to the admin API: the token, the accepted host names, and the accepted web pages.

use http::header::{AUTHORIZATION, HOST, ORIGIN};
use http::uri::Authority;
use http::{HeaderName, HeaderValue, Response, request};

use super::{forbidden, unauthorized};
use foretell_net::fleet::key;
use foretell_net::http::body::Body;

/// A browser's statement about the origin of a request.
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Access rules of the admin API.
#[derive(Clone, Debug, Default)]
pub struct Guard {
    /// Bearer token that every request must carry, health checks excepted; `None`: no token is
    /// required.
    pub token: Option<String>,
    /// Host names accepted in the `Host` header, in addition to `localhost` and IP addresses.
    pub hosts: Vec<String>,
}

impl Guard {
    /// The refusal of a request, if it is refused. If a token is required, a missing or empty one
    /// never matches.
    pub(super) fn refusal(&self, head: &request::Parts) -> Option<Response<Body>> {
        let headers = &head.headers;
        if let Some(token) = &self.token {
            let given =
                headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
            if !given.is_some_and(|given| key::is_same(given, token.as_bytes())) {
                return Some(unauthorized("the admin token is missing or wrong"));
            }
        }
        self.stranger(head)
    }

    /// The refusal of a request for public files, which need no token: because of its host name, or
    /// because a web page of another origin sends it.
    pub(super) fn stranger(&self, head: &request::Parts) -> Option<Response<Body>> {
        if !self.knows_host(head) {
            let message = "the admin API does not accept this host name: use localhost, an address, or one of admin.hosts";
            return Some(match self.token {
                Some(_) => forbidden(message),
                None => unauthorized(message),
            });
        }
        from_another_page(head).then(|| forbidden("requests of web pages of other origins are refused"))
    }

    /// True if the request names this machine or a configured host. A web page whose DNS name was
    /// pointed here (DNS rebinding) does not.
    fn knows_host(&self, head: &request::Parts) -> bool {
        let named = head.headers.get_all(HOST).iter().all(|host| {
            let host = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
            host.is_some_and(|host| self.knows(&host))
        });
        named && head.uri.authority().is_none_or(|host| self.knows(host))
    }

    fn knows(&self, host: &Authority) -> bool {
        let name = host.host().trim_start_matches('[').trim_end_matches(']');
        name.eq_ignore_ascii_case("localhost")
            || name.parse::<std::net::IpAddr>().is_ok()
            || self.hosts.iter().any(|host| host.eq_ignore_ascii_case(name))
    }
}

/// True if a browser sent it on behalf of a web page of another origin than this listener's. The
/// host must have been checked before.
fn from_another_page(head: &request::Parts) -> bool {
    let mut origins = head.headers.get_all(ORIGIN).iter();
    let Some(origin) = origins.next() else { return changes_from_elsewhere(head) };
    let same = origins.next().is_none()
        && origin.to_str().ok().and_then(authority).is_some_and(|from| is_addressed_to(head, from));
    let said = head.headers.get_all(FETCH_SITE).iter().all(|site| site == "same-origin");
    !(same && said)
}

/// True if a browser says, without an `Origin`, that another site requests a change. A link to the
/// status page, which only reads, may be on any page.
fn changes_from_elsewhere(head: &request::Parts) -> bool {
    let is_same_site = |site: &HeaderValue| site == "same-origin" || site == "none";
    !head.method.is_safe() && !head.headers.get_all(FETCH_SITE).iter().all(is_same_site)
}

/// `host[:port]` of an origin; `None` of the opaque origin `null`.
fn authority(origin: &str) -> Option<&str> {
    let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"))?;
    Some(rest).filter(|rest| !rest.is_empty() && !rest.contains(['/', '@']))
}

/// True if the request is addressed to this `host[:port]` and no other. A browser omits the port of
/// the scheme in both.
fn is_addressed_to(head: &request::Parts, from: &str) -> bool {
    let mut hosts = head.headers.get_all(HOST).iter();
    let named = hosts.next().map(|host| host.to_str().unwrap_or_default());
    let named = [named, head.uri.authority().map(Authority::as_str)];
    let mut named = named.into_iter().flatten().peekable();
    hosts.next().is_none() && named.peek().is_some() && named.all(|host| host.eq_ignore_ascii_case(from))
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn head(target: &str, field: Option<(HeaderName, &str)>) -> request::Parts {
        let mut request = Request::new(());
        *request.uri_mut() = target.parse().unwrap();
        request.headers_mut().extend(field.map(|(name, value)| (name, value.parse().unwrap())));
        request.into_parts().0
    }

    #[rstest::rstest]
    #[case(None, true)]
    #[case(Some("127.0.0.1:9464"), true)]
    #[case(Some("localhost"), true)]
    #[case(Some("[::1]:9464"), true)]
    #[case(Some("foretell.example:9464"), true)]
    #[case(Some("evil.example"), false)]
    fn only_this_machines_own_names_and_those_of_the_operator_reach_it(
        #[case] host: Option<&str>,
        #[case] ok: bool,
    ) {
        let guard = Guard { token: None, hosts: vec!["Foretell.example".into()] };
        assert_eq!(guard.refusal(&head("/", host.map(|host| (HOST, host)))).is_none(), ok);
        let target = host.map_or("/".to_owned(), |host| format!("http://{host}/"));
        assert_eq!(guard.refusal(&head(&target, None)).is_none(), ok, "as HTTP/2 names it");
    }

    #[test]
    fn a_missing_or_wrong_token_is_refused() {
        for token in ["", "s3cret"] {
            let guard = Guard { token: Some(token.to_owned()), ..Guard::default() };
            for given in [None, Some(""), Some("Bearer"), Some("Bearer "), Some("bearer s3cret")] {
                let head = head("/", given.map(|given| (AUTHORIZATION, given)));
                assert_eq!(guard.refusal(&head).unwrap().status(), 401, "{token:?} {given:?}");
            }
        }
        let guard = Guard { token: Some("s3cret".to_owned()), ..Guard::default() };
        assert!(guard.refusal(&head("/", Some((AUTHORIZATION, "Bearer s3cret")))).is_none());
    }

    #[rstest::rstest]
    #[case("http://localhost:9464", "localhost:9464", None, true)]
    #[case("http://LOCALHOST:9464", "localhost:9464", Some("same-origin"), true)]
    #[case("https://foretell.example", "foretell.example", Some("same-origin"), true)]
    #[case("http://[::1]:9464", "[::1]:9464", None, true)]
    #[case("http://localhost:9464", "localhost:9464", Some("same-site"), false)]
    #[case("http://localhost:9464", "localhost:9464", Some("cross-site"), false)]
    #[case("http://localhost:8080", "localhost:9464", None, false)]
    #[case("http://localhost", "localhost:9464", None, false)]
    #[case("http://127.0.0.1:9464", "localhost:9464", None, false)]
    #[case("http://localhost:9464.evil.example", "localhost:9464", None, false)]
    #[case("http://localhost:9464/", "localhost:9464", None, false)]
    #[case("http://evil.example@localhost:9464", "localhost:9464", None, false)]
    #[case("http://evil.example", "localhost:9464", None, false)]
    #[case("http://evil.example", "evil.example", Some("same-origin"), false)]
    #[case("file://localhost:9464", "localhost:9464", None, false)]
    #[case("null", "localhost:9464", None, false)]
    #[case("", "", None, false)]
    fn only_its_own_page_may_ask(
        #[case] origin: &str,
        #[case] host: &str,
        #[case] site: Option<&str>,
        #[case] ok: bool,
    ) {
        let guard = Guard { token: None, hosts: vec!["foretell.example".into()] };
        let mut head = head("/api/mode", Some((HOST, host)));
        head.headers.insert(ORIGIN, origin.parse().unwrap());
        head.headers.extend(site.map(|site| (FETCH_SITE, site.parse().unwrap())));
        assert_eq!(guard.refusal(&head).is_none(), ok);
        head.headers.append(ORIGIN, "http://evil.example".parse().unwrap());
        assert!(guard.refusal(&head).is_some(), "two origins");
    }

    #[rstest::rstest]
    #[case("POST", &[], true)]
    #[case("POST", &["none"], true)]
    #[case("POST", &["same-origin"], true)]
    #[case("POST", &["same-site"], false)]
    #[case("POST", &["cross-site"], false)]
    #[case("POST", &["Cross-Site"], false)]
    #[case("POST", &[""], false)]
    #[case("POST", &["same-origin", "cross-site"], false)]
    #[case("DELETE", &["cross-site"], false)]
    #[case("GET", &["cross-site"], true)]
    #[case("HEAD", &["same-site"], true)]
    fn a_change_that_another_site_asks_for_is_refused_without_an_origin_too(
        #[case] method: &str,
        #[case] sites: &[&str],
        #[case] ok: bool,
    ) {
        let mut head = head("/api/mode", Some((HOST, "localhost:9464")));
        head.method = method.parse().unwrap();
        for site in sites {
            head.headers.append(FETCH_SITE, site.parse().unwrap());
        }
        assert_eq!(Guard::default().refusal(&head).is_none(), ok);
    }

    #[test]
    fn two_hosts_are_no_origin() {
        let guard = Guard::default();
        let mut both = head("http://127.0.0.1:9464/api/mode", Some((HOST, "localhost:9464")));
        both.headers.insert(ORIGIN, "http://localhost:9464".parse().unwrap());
        assert!(guard.refusal(&both).is_some());
        let mut none = head("/api/mode", None);
        none.headers.insert(ORIGIN, "http://localhost:9464".parse().unwrap());
        assert!(guard.refusal(&none).is_some());
    }
}
