//! Header fields that only Foretell may set, and fields addressed to Foretell alone.

use crate::kit::{Backend, Start, ask, chunk, get, post, respond};

#[test]
fn foretell_fields_of_a_backend_never_reach_a_client() {
    let backend = Backend::answering(|request| {
        let claims = "x-foretell-policy: evil@00000000\r\nx-foretell-accepted: 99\r\nx-foretell-path: speculated\r\n\
                      x-foretell-reason: none\r\nx-foretell: off\r\nx-kept: yes\r\n";
        match request.target() {
            "/trailers" => {
                let head = format!(
                    "HTTP/1.1 200 OK\r\n{claims}trailer: x-foretell-drift, x-late\r\n\
                     transfer-encoding: chunked\r\n\r\n"
                );
                let trailers = b"0\r\nx-foretell-drift: 0.5\r\nx-late: yes\r\n\r\n".to_vec();
                [head.into_bytes(), chunk("abc"), trailers].concat()
            }
            _ => respond("200 OK", claims, "{}"),
        }
    });
    let proxy = Start::before(backend.address).start();
    for (request, path, reason) in [
        (post("/v1/completions", "", "{}"), "passthrough", "no_verify_method"),
        (post("/v1/files", "", "{}"), "passthrough", "route"),
        (get("/x", ""), "passthrough", "route"),
        (get("/trailers", "te: trailers\r\n"), "passthrough", "route"),
    ] {
        let answer = ask(proxy.address, request);
        assert_eq!((answer.status(), answer.field("x-kept")), (200, Some("yes")));
        assert_eq!(answer.field("x-foretell-path"), Some(path));
        assert_eq!(answer.field("x-foretell-reason"), Some(reason));
        for gone in ["x-foretell-policy", "x-foretell-accepted", "x-foretell", "x-foretell-drift"] {
            assert_eq!(answer.field(gone), None, "{gone}");
        }
        let all = answer.fields.iter().filter(|(name, _)| name == "x-foretell-path").count();
        assert_eq!(all, 1);
    }
    let mut wire = crate::kit::Wire::connect(proxy.address);
    wire.send(get("/trailers", "te: trailers\r\nconnection: close\r\n"));
    while wire.more() {}
    let all = String::from_utf8_lossy(wire.seen()).into_owned();
    assert!(all.contains("x-late: yes") && !all.contains("drift: 0.5"), "{all}");
}

#[test]
fn control_fields_never_reach_a_backend() {
    let backend = Backend::plain();
    let proxy = Start::before(backend.address).start();
    let fields = "x-foretell: plain\r\nx-foretell-corpus: off\r\nx-foretell-path: speculated\r\nX-Foretell-Policy: p\r\n\
                  x-foretell-anything: 1\r\nproxy-authorization: Basic c2VjcmV0\r\nauthorization: Bearer k\r\n\
                  x-kept: yes\r\n";
    for path in ["/v1/completions", "/v1/chat/completions", "/v1/files"] {
        assert_eq!(ask(proxy.address, post(path, fields, "{}")).status(), 200);
        let request = backend.requests(path).remove(0);
        assert_eq!(
            (request.field("x-kept"), request.field("authorization")),
            (Some("yes"), Some("Bearer k"))
        );
        for (name, _) in &request.fields {
            assert!(!name.starts_with("x-foretell") && name != "proxy-authorization", "{path}: {name}");
        }
    }
}

/// The tenant of a request must not depend on which of two fields a reader takes.
#[test]
fn a_request_that_names_two_tenants_is_refused() {
    let backend = Backend::plain();
    let tenants =
        "tenant: { header: x-tenant, trusted_peers: [127.0.0.1/32], fallback: authorization_hash }\n";
    let proxy = Start::before(backend.address).and(tenants).start();
    for (fields, code) in [
        ("authorization: Bearer a\r\nauthorization: Bearer b\r\n", "authorization_twice"),
        ("authorization: Bearer a\r\nAuthorization: Bearer a\r\n", "authorization_twice"),
        ("x-tenant: a\r\nx-tenant: b\r\n", "tenant_twice"),
        ("x-tenant: a\r\nX-Tenant: a\r\nauthorization: Bearer a\r\n", "tenant_twice"),
    ] {
        for path in ["/v1/completions", "/v1/chat/completions", "/v1/files"] {
            let answer = ask(proxy.address, post(path, fields, "{}"));
            assert_eq!(
                (answer.status(), &answer.json()["error"]["code"]),
                (400, &code.into()),
                "{path} {fields}"
            );
            assert!(backend.requests(path).is_empty());
        }
    }
    let latin = post("/v1/completions", "x-tenant: m?ller\r\n", "{}");
    let latin: Vec<u8> = latin.into_iter().map(|byte| if byte == b'?' { 0xfc } else { byte }).collect();
    let answer = ask(proxy.address, latin);
    assert_eq!((answer.status(), &answer.json()["error"]["code"]), (400, &"tenant_not_utf8".into()));
    let once = "x-tenant: m\u{fc}ller\r\nauthorization: Bearer a\r\n";
    assert_eq!(ask(proxy.address, post("/v1/files", once, "{}")).status(), 200);
    assert_eq!(backend.requests("/v1/files").len(), 1);
}
