//! A client that has sent half a head costs little more memory than that half.

use std::time::Duration;

use crate::kit::{Backend, Start, Wire, eventually};

const HALF: &str = "POST /v1/chat/completions HTTP/1.1\r\nhost: api\r\nauthorization: Bearer a\r\nx-slow: ";
const MANY: usize = 400;

#[test]
fn half_a_head_has_no_buffers_of_a_whole_request() {
    let backend = Backend::plain();
    let proxy = Start::before(backend.address)
        .and("limits: { connections: 1000 }")
        .and("timeouts: { header: 10m }")
        .start();
    let hold = |count: usize| -> Vec<Wire> {
        (0..count)
            .map(|_| {
                let mut wire = Wire::connect(proxy.address);
                wire.send(HALF);
                wire
            })
            .collect()
    };
    let all_open = |count: usize| eventually("all are open", || (proxy.descriptors() > count).then_some(()));
    // One-time allocations of the first connections are not counted.
    let mut held = hold(50);
    all_open(50);
    std::thread::sleep(Duration::from_millis(500));
    let before = proxy.resident();
    held.extend(hold(MANY));
    all_open(50 + MANY);
    std::thread::sleep(Duration::from_millis(500));
    let each = (proxy.resident().saturating_sub(before)) / MANY as u64;
    assert!(each < 12 << 10, "{each} bytes for each half of a head");
    // They are valid requests once the rest arrives, byte by byte or at once.
    for wire in held.iter_mut().take(20) {
        for byte in ["a", "\r", "\n", "content-length: 2\r\n\r", "\n{", "}"] {
            wire.send(byte);
        }
        assert_eq!(wire.answer().status(), 200);
    }
}
