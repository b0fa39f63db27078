//! HTTP for all servers of Foretell: listeners, client connections and their limits, network
//! threads, bodies and their memory, error answers, and shutdown.

pub mod activity;
pub mod allocator_purge;
pub mod answer;
pub mod body;
pub mod connections;
pub mod drain;
pub mod gather;
pub mod head;
pub mod headers;
pub mod listen;
pub mod memory;
pub mod opening;
pub mod replay;
pub mod request;
pub mod serve;
pub mod service;
pub mod socket;
pub mod workers;

use http::uri::Authority;

/// True if the port of an address, if it has one, can be called. [`Authority`] accepts any digits,
/// and reads those beyond 65,535 as no port at all.
pub fn is_callable(authority: &Authority) -> bool {
    let text = authority.as_str();
    let (_, address) = text.rsplit_once('@').unwrap_or(("", text));
    match authority.port_u16() {
        Some(port) => port > 0,
        None => address == authority.host(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_does_not_exist_is_not_read_as_the_usual_one() {
        for address in ["a", "a:1", "127.0.0.1:65535", "[::1]", "[::1]:80", "me:x@a:80"] {
            assert!(is_callable(&address.parse().unwrap()), "{address}");
        }
        for address in ["a:0", "a:65536", "127.0.0.1:80800", "[::1]:99999999999", "me:x@a:99999"] {
            assert!(!is_callable(&address.parse().unwrap()), "{address}");
        }
    }
}
