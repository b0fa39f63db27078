//! Refuses request heads that are malformed or exceed a limit, before the request is interpreted.
//!
//! hyper accepts more than RFC 9112 allows. Anything that two parsers could read differently
//! (number of hosts, target, end of the body) is refused here, so that every server behind Foretell
//! reads the request as Foretell does.

use http::header::{AUTHORIZATION, HOST, TRANSFER_ENCODING};
use http::uri::{Authority, Scheme};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Uri, Version, request};

use crate::http::answer::error_response;
use crate::http::body::Body;
use crate::http::service::Bounds;

/// Bytes of a field besides its name and value: a colon, a space and the line end.
const FIELD: usize = 4;

/// Reason that a head is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Not exactly one valid `Host` (RFC 9112, 3.2).
    Host,
    /// A target in a form that the method does not allow (RFC 9112, 3.2).
    Target,
    /// The target exceeds `limits.uri`.
    TargetTooLong,
    /// The number of fields exceeds `limits.headers`.
    Fields,
    /// The bytes of the fields exceed `limits.header_bytes`.
    FieldBytes,
    /// `chunked` more than once (RFC 9112, 6.1).
    Chunked,
    /// Another transfer coding than `chunked` (RFC 9112, 6.1).
    Coding,
    /// More than one `Authorization`: the owner of the request would depend on the reader.
    Credentials,
    /// Space around the value of a field (RFC 9113, 8.2.1); HTTP/1.1 removes it.
    Space,
}

impl Refusal {
    /// Every reason.
    pub const ALL: [Self; 9] = [
        Self::Host,
        Self::Target,
        Self::TargetTooLong,
        Self::Fields,
        Self::FieldBytes,
        Self::Chunked,
        Self::Coding,
        Self::Credentials,
        Self::Space,
    ];

    pub const fn status(self) -> StatusCode {
        match self {
            Self::Host | Self::Target | Self::Chunked | Self::Credentials | Self::Space => {
                StatusCode::BAD_REQUEST
            }
            Self::TargetTooLong => StatusCode::URI_TOO_LONG,
            Self::Fields | Self::FieldBytes => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::Coding => StatusCode::NOT_IMPLEMENTED,
        }
    }

    /// The `code` of the error body, and the label in the metrics.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Host => "bad_host",
            Self::Target => "bad_target",
            Self::TargetTooLong => "uri_too_long",
            Self::Fields => "too_many_headers",
            Self::FieldBytes => "headers_too_large",
            Self::Chunked => "chunked_twice",
            Self::Coding => "transfer_coding",
            Self::Credentials => "authorization_twice",
            Self::Space => "space_in_field",
        }
    }

    /// Message of the error body.
    pub const fn message(self) -> &'static str {
        match self {
            Self::Host => "a request has exactly one valid Host field",
            Self::Target => "the request target is neither a path nor a URL",
            Self::TargetTooLong => "the request target is too long",
            Self::Fields => "the request has too many header fields",
            Self::FieldBytes => "the header fields of the request are too long",
            Self::Chunked => "the transfer coding chunked may be applied once",
            Self::Coding => "no transfer coding but chunked is understood",
            Self::Credentials => "a request has at most one Authorization field",
            Self::Space => "the value of a header field begins or ends with a space",
        }
    }

    /// The complete answer.
    pub fn response(self) -> Response<Body> {
        error_response(self.status(), self.message(), None, self.code())
    }
}

/// Reason that `head` is refused; `None` if it is accepted.
pub fn refusal(head: &request::Parts, bounds: &Bounds) -> Option<Refusal> {
    let fields = &head.headers;
    if head.uri.path_and_query().is_some_and(|target| target.as_str().len() > bounds.uri) {
        return Some(Refusal::TargetTooLong);
    }
    if fields.len() > bounds.headers {
        return Some(Refusal::Fields);
    }
    let bytes = fields.iter().map(|(name, value)| name.as_str().len() + value.len() + FIELD);
    if bytes.sum::<usize>() > bounds.header_bytes {
        return Some(Refusal::FieldBytes);
    }
    if fields.get_all(AUTHORIZATION).iter().nth(1).is_some() {
        return Some(Refusal::Credentials);
    }
    if head.version > Version::HTTP_11 {
        return refusal_of_http2(head);
    }
    if !is_hosted(head) {
        return Some(Refusal::Host);
    }
    if !has_a_target(head) {
        return Some(Refusal::Target);
    }
    coding(fields)
}

fn refusal_of_http2(head: &request::Parts) -> Option<Refusal> {
    let spaced = |value: &HeaderValue| value.as_bytes().trim_ascii().len() != value.len();
    if head.headers.values().any(spaced) {
        return Some(Refusal::Space);
    }
    (!has_an_authority(head)).then_some(Refusal::Host)
}

/// True if an HTTP/2 request names one host, by `:authority`, by `Host`, or by both alike (RFC
/// 9113, 8.3.1).
fn has_an_authority(head: &request::Parts) -> bool {
    if !one_host_at_most(&head.headers) {
        return false;
    }
    let host = head.headers.get(HOST).and_then(|host| host.to_str().ok());
    match (head.uri.authority(), host) {
        (None, host) => host.is_some(),
        (Some(authority), None) => is_host(authority.as_str()),
        (Some(authority), Some(host)) => is_host(authority.as_str()) && is_same(authority, host, &head.uri),
    }
}

/// True if both name the same host and port; the default port of the scheme may be omitted.
fn is_same(authority: &Authority, host: &str, target: &Uri) -> bool {
    let Ok(host) = host.parse::<Authority>() else { return false };
    let usual = if target.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
    let port = |authority: &Authority| authority.port_u16().unwrap_or(usual);
    authority.host().eq_ignore_ascii_case(host.host()) && port(authority) == port(&host)
}

/// True if there is a valid `Host`. HTTP/1.0 needs none.
fn is_hosted(head: &request::Parts) -> bool {
    let there = head.headers.contains_key(HOST);
    (there || head.version < Version::HTTP_11) && one_host_at_most(&head.headers)
}

fn one_host_at_most(fields: &HeaderMap) -> bool {
    let mut hosts = fields.get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (None, _) => true,
        (Some(host), None) => host.to_str().is_ok_and(is_host),
        (Some(_), Some(_)) => false,
    }
}

/// `uri-host [ ":" port ]`; the host may be empty.
fn is_host(text: &str) -> bool {
    if text.is_empty() {
        return true;
    }
    if text.contains(['@', ',']) {
        return false;
    }
    let Ok(authority) = text.parse::<Authority>() else { return false };
    let Some(port) = authority.as_str().strip_prefix(authority.host()) else { return false };
    match port.strip_prefix(':') {
        Some(digits) => digits.is_empty() || digits.parse::<u16>().is_ok(),
        None => port.is_empty(),
    }
}

/// True if the target has origin or absolute form; `*` is allowed for `OPTIONS` and an authority
/// for `CONNECT`.
fn has_a_target(head: &request::Parts) -> bool {
    match head.uri.path_and_query().map(http::uri::PathAndQuery::as_str) {
        Some("*") => head.method == Method::OPTIONS,
        Some(_) => head.uri.scheme().is_some() || head.uri.authority().is_none(),
        None => head.method == Method::CONNECT,
    }
}

fn coding(fields: &HeaderMap) -> Option<Refusal> {
    if !fields.contains_key(TRANSFER_ENCODING) {
        return None;
    }
    let codings: Vec<_> = codings(fields).collect();
    if codings.iter().any(|coding| !coding.eq_ignore_ascii_case("chunked")) {
        return Some(Refusal::Coding);
    }
    (codings.len() != 1).then_some(Refusal::Chunked)
}

/// The transfer codings of a message, in the order they were applied. A value that is not ASCII
/// gives an unknown one.
pub fn codings(fields: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = fields.get_all(TRANSFER_ENCODING).iter().map(|value| value.to_str().unwrap_or("?"));
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|coding| !coding.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(method: &str, target: &str, version: Version, lines: &[(&'static str, &str)]) -> request::Parts {
        let mut request = http::Request::builder().method(method).uri(target).version(version);
        for (name, value) in lines {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[rstest::rstest]
    #[case("a", true)]
    #[case("a:80", true)]
    #[case("a:", true)]
    #[case("", true)]
    #[case("[::1]:80", true)]
    #[case("a.b-c_d", true)]
    #[case("a b", false)]
    #[case("a/b", false)]
    #[case("u@a", false)]
    #[case("a:b", false)]
    #[case("a:99999", false)]
    #[case("a,b", false)]
    #[case("a?b", false)]
    fn a_host_is_a_name_and_perhaps_a_port(#[case] host: &str, #[case] ok: bool) {
        let head = head("GET", "/", Version::HTTP_11, &[("host", host)]);
        assert_eq!(refusal(&head, &Bounds::default()).is_none(), ok);
    }

    #[rstest::rstest]
    #[case(&["chunked"], None)]
    #[case(&["Chunked"], None)]
    #[case(&["chunked, chunked"], Some(Refusal::Chunked))]
    #[case(&["chunked", "chunked"], Some(Refusal::Chunked))]
    #[case(&[","], Some(Refusal::Chunked))]
    #[case(&["gzip, chunked"], Some(Refusal::Coding))]
    #[case(&["gzip", "chunked"], Some(Refusal::Coding))]
    #[case(&["identity"], Some(Refusal::Coding))]
    #[case(&["chunked;q=1"], Some(Refusal::Coding))]
    fn chunked_is_the_only_coding_and_applied_once(
        #[case] codings: &[&str],
        #[case] wanted: Option<Refusal>,
    ) {
        let mut lines = vec![("host", "a")];
        lines.extend(codings.iter().map(|coding| ("transfer-encoding", *coding)));
        assert_eq!(refusal(&head("POST", "/", Version::HTTP_11, &lines), &Bounds::default()), wanted);
    }

    #[rstest::rstest]
    #[case("/", &[], false)]
    #[case("/", &["a"], true)]
    #[case("/", &["a", "a"], false)]
    #[case("http://a/", &[], true)]
    #[case("http://a/", &["A"], true)]
    #[case("http://a/", &["a:80"], true)]
    #[case("https://a:443/", &["a"], true)]
    #[case("http://[::1]:8080/", &["[::1]:8080"], true)]
    #[case("http://a/", &["evil"], false)]
    #[case("http://a/", &["a:81"], false)]
    #[case("http://a:8080/", &["a"], false)]
    #[case("http://a/", &[""], false)]
    #[case("http://u@a/", &[], false)]
    #[case("http://a/", &["a", "evil"], false)]
    fn over_http2_one_host_is_named(#[case] target: &str, #[case] hosts: &[&str], #[case] ok: bool) {
        let hosts: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
        let refused = refusal(&head("GET", target, Version::HTTP_2, &hosts), &Bounds::default());
        assert_eq!(refused, (!ok).then_some(Refusal::Host));
    }

    #[test]
    fn each_limit_has_its_answer() {
        let bounds = Bounds { headers: 2, header_bytes: 64, uri: 4, ..Bounds::default() };
        let of = |target, lines: &[_]| {
            let mut head = head("GET", target, Version::HTTP_11, lines);
            head.version = Version::HTTP_10;
            refusal(&head, &bounds)
        };
        let long = "v".repeat(60);
        assert_eq!(of("/abc", &[("a", "1"), ("b", "2")]), None);
        assert_eq!(of("/abcd", &[]), Some(Refusal::TargetTooLong));
        assert_eq!(of("/", &[("a", "1"), ("b", "2"), ("c", "3")]), Some(Refusal::Fields));
        assert_eq!(of("/", &[("a", &long)]), Some(Refusal::FieldBytes));
        let statuses = Refusal::ALL.map(|refusal| refusal.response().status().as_u16());
        assert_eq!(statuses, [400, 400, 414, 431, 431, 400, 501, 400, 400]);
    }
}
