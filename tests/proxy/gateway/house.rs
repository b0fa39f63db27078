//! Starting a gateway for a test.

use std::net::SocketAddr;

use foretell::fleet::BackendSettings;
use foretell::gateway::{Brains, Gateway, Settings};

/// Listens on free ports before `backend`, on the test's own runtime.
pub fn settings(backend: SocketAddr) -> Settings {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    Settings {
        listen: vec![any.into()],
        admin: Some(any),
        workers: 0,
        ..Settings::new(BackendSettings::new("b", format!("http://{backend}")))
    }
}

pub async fn start(settings: Settings) -> Gateway {
    Gateway::start(settings, Brains::default()).await.unwrap()
}

/// A gateway with default settings and its address.
pub async fn before(backend: SocketAddr) -> (Gateway, SocketAddr) {
    let gateway = start(settings(backend)).await;
    let address = gateway.addresses[0];
    (gateway, address)
}
