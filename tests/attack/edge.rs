//! The client edge: what a client may send, for how long, and what becomes of it.

use crate::kit::{Backend, Start, ask, get, post};

#[test]
fn what_is_well_formed_passes() {
    let backend = Backend::plain();
    let proxy = Start::before(backend.address).start();
    let answer = ask(proxy.address, post("/v1/embeddings", "", "{}"));
    assert_eq!((answer.status(), answer.text().as_str()), (200, "done"));
    assert_eq!(ask(proxy.address, get("/nothing", "")).status(), 404);
    assert_eq!(backend.requests("/v1/embeddings").len(), 1);
    assert_eq!(proxy.admin_get("/healthz").text(), "ok");
}
