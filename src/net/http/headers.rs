//! Header fields that a proxy removes and adds.
//!
//! Hop-by-hop fields (RFC 9110, 7.6.1) are removed in both directions; all others pass unchanged.

use http::header::{
    CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, EXPECT, HOST, PROXY_AUTHORIZATION,
    TE, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Version, request};

use crate::http::service::Peer;

/// The client's control of speculation, such as `x-foretell: plain`.
pub const CONTROL: HeaderName = HeaderName::from_static("x-foretell");
/// `off`: nothing of the request is added to the corpus, and the corpus is not used for it.
pub const CORPUS: HeaderName = HeaderName::from_static("x-foretell-corpus");
/// Id of a request in the log: the client's, or one made by Foretell.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The path of the request: `speculated`, `plain` or `passthrough`.
pub const PATH: HeaderName = HeaderName::from_static("x-foretell-path");
/// The reason for that path.
pub const REASON: HeaderName = HeaderName::from_static("x-foretell-reason");
/// `name@revision` of the policy that decided about the request.
pub const POLICY: HeaderName = HeaderName::from_static("x-foretell-policy");
/// The parameter or header field that is the reason.
pub const PARAMETER: HeaderName = HeaderName::from_static("x-foretell-parameter");
/// Longest parameter name put into a header, bytes.
const PARAMETER_MAX: usize = 128;

/// Prefix of every field of Foretell.
const PREFIX: &str = "x-foretell";
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// True if the content type is `application/json`.
pub fn is_json(headers: &HeaderMap) -> bool {
    begins(headers, &CONTENT_TYPE, "application/json")
}

/// True if the content type is `text/event-stream`.
pub fn is_event_stream(headers: &HeaderMap) -> bool {
    begins(headers, &CONTENT_TYPE, "text/event-stream")
}

/// True if there is a content coding other than `identity`.
pub fn is_encoded(headers: &HeaderMap) -> bool {
    let codings = headers.get_all(CONTENT_ENCODING).into_iter();
    codings.map(HeaderValue::as_bytes).any(|coding| !coding.eq_ignore_ascii_case(b"identity"))
}

/// True if the value of a field begins with `wanted`, in letters of either case.
fn begins(headers: &HeaderMap, name: &HeaderName, wanted: &str) -> bool {
    let begun = |value: &HeaderValue| {
        value.as_bytes().get(..wanted.len()).map(|start| start.eq_ignore_ascii_case(wanted.as_bytes()))
    };
    headers.get(name).and_then(begun) == Some(true)
}

/// Removes every hop-by-hop field, including those named by `Connection`. Returns the protocol in
/// `Upgrade`, if `Connection` names that field.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) -> Option<HeaderValue> {
    let mut upgrade = None;
    if headers.contains_key(CONNECTION) {
        let named = named_by_connection(headers);
        if named.contains(&UPGRADE) {
            upgrade = headers.get(UPGRADE).cloned();
        }
        for name in named {
            headers.remove(name);
        }
        headers.remove(CONNECTION);
    }
    for name in [KEEP_ALIVE, PROXY_CONNECTION, TE, TRANSFER_ENCODING, UPGRADE, HTTP2_SETTINGS] {
        headers.remove(name);
    }
    upgrade
}

/// The name of a parameter as value of [`PARAMETER`]; `None` if it is too long or not printable
/// ASCII.
pub fn parameter(name: &str) -> Option<HeaderValue> {
    let plain = name.len() <= PARAMETER_MAX && name.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    if plain { HeaderValue::from_str(name).ok() } else { None }
}

fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    let values = headers.get_all(CONNECTION).into_iter().filter_map(|value| value.to_str().ok());
    let names = values.flat_map(|value| value.split(','));
    names.filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok()).collect()
}

/// Removes the fields that only Foretell may set or read.
pub fn strip_foretell(headers: &mut HeaderMap) {
    let is_foretell = |name: &&HeaderName| {
        let rest = name.as_str().strip_prefix(PREFIX);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    let names: Vec<HeaderName> = headers.keys().filter(is_foretell).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}

/// Prepares the headers of a backend's answer for the client. Returns the protocol that it switches
/// to, if any.
pub fn from_backend(headers: &mut HeaderMap) -> Option<HeaderValue> {
    strip_foretell(headers);
    strip_hop_by_hop(headers)
}

/// Announces a chunked body for `GET` and `HEAD`, where hyper would assume that there is none.
pub fn frame(head: &mut request::Parts, body: &impl http_body::Body) {
    let bodiless = matches!(head.method, Method::GET | Method::HEAD);
    let sized = head.headers.contains_key(CONTENT_LENGTH) || body.size_hint().exact().is_some();
    if bodiless && !sized {
        head.headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
}

/// True if the client accepts trailers (`TE: trailers`).
pub fn takes_trailers(headers: &HeaderMap) -> bool {
    let values = headers.get_all(TE).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|coding| coding.trim().eq_ignore_ascii_case("trailers"))
}

/// Prepares the headers of a client's request for a backend: removes hop-by-hop and `x-foretell`
/// fields, adds `x-forwarded-*`. Returns the protocol that the client wants to switch to, if that
/// is allowed.
pub fn for_backend(
    headers: &mut HeaderMap,
    version: Version,
    host: Option<&str>,
    peer: Option<Peer>,
) -> Option<HeaderValue> {
    let trailers = takes_trailers(headers);
    let upgrade = strip_hop_by_hop(headers).filter(|protocol| may_switch(protocol, version));
    strip_foretell(headers);
    // hyper's server answers `100 Continue` itself when the body is read.
    for name in [EXPECT, PROXY_AUTHORIZATION] {
        headers.remove(name);
    }
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if let Some(protocol) = &upgrade {
        headers.insert(UPGRADE, protocol.clone());
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    }
    if version == Version::HTTP_2 {
        join_cookies(headers);
    }
    forwarded(headers, host, peer);
    upgrade
}

/// True for a switch from HTTP/1.1, but not to HTTP/2, which would circumvent the proxy's rules.
fn may_switch(protocol: &HeaderValue, version: Version) -> bool {
    version == Version::HTTP_11 && !protocol.as_bytes().to_ascii_lowercase().starts_with(b"h2")
}

/// HTTP/2 may split a cookie header, HTTP/1.1 may not (RFC 9113, 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(COOKIE).iter().nth(1).is_none() {
        return;
    }
    let pieces: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if let Ok(joined) = HeaderValue::from_bytes(&pieces.join(&b"; "[..])) {
        headers.insert(COOKIE, joined);
    }
}

/// Appends the client to `x-forwarded-for`, and sets protocol and host unless an earlier proxy has.
fn forwarded(headers: &mut HeaderMap, host: Option<&str>, peer: Option<Peer>) {
    if let Some(peer) = peer.map(|peer| peer.address.ip()) {
        let chain = headers.get_all(FORWARDED_FOR).iter().filter_map(|value| value.to_str().ok());
        let chain: Vec<&str> = chain.collect();
        let value = if chain.is_empty() { peer.to_string() } else { format!("{}, {peer}", chain.join(", ")) };
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(FORWARDED_FOR, value);
        }
    }
    if !headers.contains_key(FORWARDED_PROTO) {
        let secure = peer.is_some_and(|peer| peer.secure);
        let protocol = if secure { "https" } else { "http" };
        headers.insert(FORWARDED_PROTO, HeaderValue::from_static(protocol));
    }
    if !headers.contains_key(FORWARDED_HOST) {
        let value =
            headers.get(HOST).cloned().or_else(|| host.and_then(|host| HeaderValue::try_from(host).ok()));
        if let Some(value) = value {
            headers.insert(FORWARDED_HOST, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        lines.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    #[test]
    fn media_types_and_codings_are_in_letters_of_either_case() {
        assert!(is_json(&headers(&[("content-type", "Application/JSON; charset=utf-8")])));
        assert!(is_event_stream(&headers(&[("content-type", "TEXT/event-stream")])));
        assert!(!is_json(&headers(&[("content-type", "application/js")])) && !is_json(&HeaderMap::new()));
        assert!(is_encoded(&headers(&[("content-encoding", "gzip")])));
        assert!(!is_encoded(&headers(&[("content-encoding", "Identity")])) && !is_encoded(&HeaderMap::new()));
    }

    #[test]
    fn fields_named_by_any_connection_line_are_removed() {
        let mut map =
            headers(&[("x-stays", "1"), ("x-foo", "1"), ("x-bar", "1"), ("keep-alive", "timeout=5")]);
        map.append(CONNECTION, "close, X-Foo".parse().unwrap());
        map.append(CONNECTION, "x-bar".parse().unwrap());
        assert_eq!(strip_hop_by_hop(&mut map), None);
        assert_eq!(map, headers(&[("x-stays", "1")]));
    }

    #[test]
    fn an_upgrade_counts_only_if_connection_names_it() {
        let mut map = headers(&[("upgrade", "websocket")]);
        assert_eq!(strip_hop_by_hop(&mut map), None);
        let mut map = headers(&[("upgrade", "websocket"), ("connection", "keep-alive, Upgrade")]);
        assert_eq!(strip_hop_by_hop(&mut map).unwrap(), "websocket");
        assert!(map.is_empty());
    }

    #[test]
    fn http2_is_never_tunnelled() {
        let offer =
            [("upgrade", "h2c"), ("connection", "upgrade, http2-settings"), ("http2-settings", "AAMAAABk")];
        let mut map = headers(&offer);
        assert_eq!(for_backend(&mut map, Version::HTTP_11, None, None), None);
        assert_eq!(map, headers(&[("x-forwarded-proto", "http")]));
    }

    #[test]
    fn the_client_is_appended_once_and_an_earlier_proxys_fields_stay() {
        let mut map =
            headers(&[("host", "api"), ("x-forwarded-for", "1.2.3.4"), ("x-forwarded-proto", "https")]);
        map.append("x-forwarded-for", "5.6.7.8".parse().unwrap());
        let peer = Peer { address: ([9, 9, 9, 9], 1234).into(), secure: true };
        for_backend(&mut map, Version::HTTP_11, None, Some(peer));
        assert_eq!(map["x-forwarded-for"], "1.2.3.4, 5.6.7.8, 9.9.9.9");
        assert_eq!(map.get_all("x-forwarded-for").iter().count(), 1);
        assert_eq!(map["x-forwarded-proto"], "https");
        assert_eq!(map["x-forwarded-host"], "api");
    }

    #[test]
    fn the_first_proxy_sets_the_clients_protocol() {
        for (secure, protocol) in [(true, "https"), (false, "http")] {
            let mut map = HeaderMap::new();
            let peer = Peer { address: ([9, 9, 9, 9], 1234).into(), secure };
            for_backend(&mut map, Version::HTTP_11, None, Some(peer));
            assert_eq!(map["x-forwarded-proto"], protocol);
        }
    }

    #[test]
    fn foretells_own_fields_are_removed_and_trailers_requested_again() {
        let mut map =
            headers(&[("x-foretell", "plain"), ("te", "gzip, Trailers"), ("expect", "100-continue")]);
        map.extend(headers(&[("x-foretell-path", "x"), ("proxy-authorization", "Basic eDp5")]));
        map.insert("x-foretelling", "not ours".parse().unwrap());
        for_backend(&mut map, Version::HTTP_2, Some("h:1"), None);
        assert_eq!(
            map,
            headers(&[
                ("te", "trailers"),
                ("x-foretelling", "not ours"),
                ("x-forwarded-proto", "http"),
                ("x-forwarded-host", "h:1")
            ])
        );
    }

    #[test]
    fn foretells_own_fields_from_a_backend_are_removed() {
        let mut map = headers(&[("x-foretell-policy", "p"), ("x-foretell", "off"), ("x-stays", "1")]);
        map.append("x-foretell-policy", "q".parse().unwrap());
        assert_eq!(from_backend(&mut map), None);
        assert_eq!(map, headers(&[("x-stays", "1")]));
    }

    #[rstest::rstest]
    #[case("GET", None, true)]
    #[case("HEAD", None, true)]
    #[case("POST", None, false)]
    #[case("GET", Some("3"), false)]
    fn a_body_of_unknown_length_is_announced_where_hyper_would_omit_it(
        #[case] method: &str,
        #[case] length: Option<&str>,
        #[case] announced: bool,
    ) {
        let mut head = http::Request::builder().method(method);
        if let Some(length) = length {
            head = head.header(CONTENT_LENGTH, length);
        }
        let mut head = head.body(()).unwrap().into_parts().0;
        let stream =
            futures_util::stream::pending::<Result<http_body::Frame<bytes::Bytes>, std::io::Error>>();
        frame(&mut head, &http_body_util::StreamBody::new(stream));
        assert_eq!(head.headers.contains_key(TRANSFER_ENCODING), announced);
        let mut head = http::Request::builder().method(method).body(()).unwrap().into_parts().0;
        frame(&mut head, &crate::http::body::full("abc"));
        assert!(head.headers.is_empty());
    }

    #[test]
    fn a_cookie_that_http2_split_is_whole_again() {
        let mut map = HeaderMap::new();
        map.append(COOKIE, "a=1".parse().unwrap());
        map.append(COOKIE, "b=2".parse().unwrap());
        for_backend(&mut map, Version::HTTP_2, None, None);
        assert_eq!(map.get_all(COOKIE).iter().collect::<Vec<_>>(), ["a=1; b=2"]);
    }
}
