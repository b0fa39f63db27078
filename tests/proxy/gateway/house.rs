//! Starting a gateway for a test.

use std::net::SocketAddr;

use foretell::app::Gateway;
use foretell_net::fleet::ReplicaSettings;
use foretell_proxy::gateway::Settings;

/// Listens on free ports in front of `backend`, on the test's own runtime.
pub fn settings(backend: SocketAddr) -> Settings {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    Settings {
        listen: vec![any.into()],
        admin: Some(any),
        workers: 0,
        ..Settings::new(ReplicaSettings::new("b", format!("http://{backend}")))
    }
}

pub async fn start(settings: Settings) -> Gateway {
    Gateway::start(settings, None, None).await.unwrap()
}

/// A gateway with default settings and its address.
pub async fn before(backend: SocketAddr) -> (Gateway, SocketAddr) {
    let gateway = start(settings(backend)).await;
    let address = gateway.addresses[0];
    (gateway, address)
}
