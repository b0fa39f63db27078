//! A process that is stopped by `SIGSTOP`, as its clients see it: connections are accepted by the
//! kernel, and nothing is read or answered until it is continued.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// An address in front of a server, which can be frozen.
pub struct Freezer {
    pub address: SocketAddr,
    frozen: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Freezer {
    pub async fn before(target: SocketAddr) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let frozen = watch::Sender::new(false);
        let state = frozen.clone();
        let task = tokio::spawn(async move {
            loop {
                runs(&state).await;
                let Ok((client, _)) = listener.accept().await else { return };
                tokio::spawn(join(client, target, state.clone()));
            }
        });
        Self { address, frozen, task }
    }

    /// Stops it.
    pub fn freeze(&self) {
        self.frozen.send_replace(true);
    }

    /// Continues it.
    pub fn thaw(&self) {
        self.frozen.send_replace(false);
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Resolves as soon as it runs.
async fn runs(frozen: &watch::Sender<bool>) {
    let _ = frozen.subscribe().wait_for(|frozen| !frozen).await;
}

async fn join(client: TcpStream, target: SocketAddr, frozen: watch::Sender<bool>) {
    let Ok(server) = TcpStream::connect(target).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (client_in, client_out) = client.into_split();
    let (server_in, server_out) = server.into_split();
    tokio::select! {
        () = pass(client_in, server_out, &frozen) => {}
        () = pass(server_in, client_out, &frozen) => {}
    }
}

async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, frozen: &watch::Sender<bool>) {
    let mut bytes = vec![0; 4096];
    loop {
        let Ok(count @ 1..) = from.read(&mut bytes).await else { return };
        runs(frozen).await;
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}
