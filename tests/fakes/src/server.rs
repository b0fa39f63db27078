//! A fake engine at an address: connections, faults, restarts, and an alternating front.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::BoxFuture;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::fault::Fault;
use super::house::House;
use super::http::{Gone, Out, Reader, Request, Sent};

/// A fake engine: its house, and its answers to requests.
pub trait Engine: Send + Sync + 'static {
    fn house(&self) -> &Arc<House>;

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent>;

    /// Called when the process restarts: resets state outside of the house.
    fn renewed(&self) {}
}

/// A running fake. It ends when dropped.
pub struct Fake<E: Engine> {
    pub address: SocketAddr,
    pub engine: Arc<E>,
    pub house: Arc<House>,
    /// Counter: every change closes all connections. Odd means down.
    state: Arc<watch::Sender<u64>>,
    task: JoinHandle<()>,
}

impl<E: Engine> Fake<E> {
    pub async fn start(engine: E) -> Self {
        Self::start_at(engine, SocketAddr::from(([127, 0, 0, 1], 0))).await
    }

    #[allow(clippy::unused_async)] // so that it is called where there is a runtime
    pub async fn start_at(engine: E, address: SocketAddr) -> Self {
        let engine = Arc::new(engine);
        let listener = bind(address);
        let address = listener.local_addr().unwrap();
        let state = Arc::new(watch::Sender::new(0));
        let task = tokio::spawn(accept(listener, Arc::clone(&engine), Arc::clone(&state)));
        let house = Arc::clone(engine.house());
        Self { address, engine, house, state, task }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Ends all connections and accepts no new ones until it is revived.
    pub fn kill(&self) {
        self.state.send_modify(|state| *state |= 1);
    }

    pub fn is_down(&self) -> bool {
        *self.state.borrow() % 2 == 1
    }

    /// Starts it again after a kill, as a new process.
    pub fn revive(&self) {
        self.house.renew();
        self.engine.renewed();
        self.state.send_modify(|state| *state = (*state | 1) + 1);
    }

    /// Starts a new process at the same address.
    pub fn restart(&self) {
        self.kill();
        self.revive();
    }
}

impl<E: Engine> Drop for Fake<E> {
    fn drop(&mut self) {
        self.kill();
        self.task.abort();
    }
}

fn bind(address: SocketAddr) -> TcpListener {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address).unwrap();
    socket.listen(1024).unwrap()
}

async fn accept<E: Engine>(first: TcpListener, engine: Arc<E>, state: Arc<watch::Sender<u64>>) {
    let address = first.local_addr().unwrap();
    let mut listener = Some(first);
    let mut changes = state.subscribe();
    loop {
        let down = *changes.borrow_and_update() % 2 == 1;
        if down {
            listener = None;
        } else if listener.is_none() {
            listener = Some(bind(address));
        }
        let next = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            _ = changes.changed() => {}
            accepted = next => {
                let Ok((stream, _)) = accepted else { continue };
                let (engine, state) = (Arc::clone(&engine), Arc::clone(&state));
                tokio::spawn(async move {
                    let mut changes = state.subscribe();
                    tokio::select! {
                        _ = changes.changed() => {}
                        () = converse(stream, engine, &state) => {}
                    }
                });
            }
        }
    }
}

async fn converse<E: Engine>(stream: TcpStream, engine: Arc<E>, state: &watch::Sender<u64>) {
    stream.set_nodelay(true).unwrap();
    let (reader, writer) = stream.into_split();
    let (mut reader, mut out) = (Reader::new(reader), Out::new(writer));
    let house = engine.house();
    house.note(|tally| tally.connections += 1);
    while let Some(request) = reader.request(out.writer()).await {
        house.note(|tally| {
            *tally.calls.entry(request.path.clone()).or_default() += 1;
            if let Some(parent) = request.get("traceparent") {
                tally.traced.push((request.path.clone(), parent.to_owned()));
            }
        });
        house.came(&request);
        let last = request.get("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"));
        out.begin(house.faults.note(&request));
        let answered = tokio::select! {
            sent = answer(&*engine, request, &mut out, state) => Some(sent),
            () = reader.closed() => None,
        };
        house.note(|tally| tally.cancelled += usize::from(answered.is_none()));
        if answered != Some(Ok(())) || last {
            return;
        }
    }
}

async fn answer<E: Engine>(engine: &E, request: Request, out: &mut Out, state: &watch::Sender<u64>) -> Sent {
    let error = br#"{"error":{"message":"not now","type":"server_error","param":null,"code":null}}"#;
    let json = ("content-type", "application/json");
    match out.fault.clone() {
        Some(Fault::Status(status)) => out.whole(status, &[json], error).await,
        Some(Fault::Later(status, seconds)) => {
            out.whole(status, &[json, ("retry-after", &seconds.to_string())], error).await
        }
        Some(Fault::Garbage) => out.whole(200, &[json], b"<html>It works!</html>").await,
        Some(Fault::Empty) => out.whole(200, &[json], b"").await,
        Some(Fault::Hang) => std::future::pending().await,
        Some(Fault::Stall) => {
            out.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{")
                .await?;
            std::future::pending().await
        }
        Some(Fault::Reset) => out.reset(),
        Some(Fault::Kill) => {
            state.send_modify(|state| *state |= 1);
            Err(Gone)
        }
        Some(Fault::Reload) => {
            engine.house().reload();
            engine.serve(request, out).await
        }
        Some(Fault::Slow(by)) => {
            tokio::time::sleep(by).await;
            engine.serve(request, out).await
        }
        _ => engine.serve(request, out).await,
    }
}

/// One address in front of several servers: every new connection goes to the next.
pub struct Front {
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

impl Front {
    #[allow(clippy::unused_async)] // as `start_at`
    pub async fn before(targets: Vec<SocketAddr>) -> Self {
        let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0)));
        let address = listener.local_addr().unwrap();
        let next = AtomicUsize::new(0);
        let task = tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let target = targets[next.fetch_add(1, Ordering::SeqCst) % targets.len()];
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(target).await else { return };
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                });
            }
        });
        Self { address, task }
    }
}

/// One address in front of several servers, all traffic to one of them. It switches to the next
/// after the current one has sent a given number of bytes.
pub struct Switch {
    pub address: SocketAddr,
    state: Arc<Switching>,
    task: JoinHandle<()>,
}

struct Switching {
    targets: Vec<SocketAddr>,
    /// Index of the target of new connections.
    now: watch::Sender<usize>,
    /// Bytes that the target may still send before the switch.
    left: AtomicUsize,
    /// True if connections to the previous target are cut at the switch.
    cuts: bool,
}

impl Switch {
    #[allow(clippy::unused_async)] // as `start_at`
    pub async fn before(targets: Vec<SocketAddr>, cuts: bool) -> Self {
        let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0)));
        let address = listener.local_addr().unwrap();
        let left = AtomicUsize::new(usize::MAX);
        let state = Arc::new(Switching { targets, now: watch::Sender::new(0), left, cuts });
        let shared = Arc::clone(&state);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(Arc::clone(&shared).join(client));
            }
        });
        Self { address, state, task }
    }

    /// Switches after `bytes` further bytes from the target.
    pub fn after(&self, bytes: usize) {
        self.state.left.store(bytes, Ordering::SeqCst);
    }

    /// True if it has switched.
    pub fn has_switched(&self) -> bool {
        *self.state.now.borrow() > 0
    }
}

impl Switching {
    async fn join(self: Arc<Self>, client: TcpStream) {
        let mut changes = self.now.subscribe();
        let position = *changes.borrow_and_update();
        let Some(target) = self.targets.get(position) else { return };
        let Ok(server) = TcpStream::connect(target).await else { return };
        client.set_nodelay(true).unwrap();
        let (mut client_in, mut client_out) = client.into_split();
        let (mut server_in, mut server_out) = server.into_split();
        let up = async { tokio::io::copy(&mut client_in, &mut server_out).await.map(drop) };
        let down = self.pass(position, &mut server_in, &mut client_out);
        tokio::select! {
            _ = changes.changed(), if self.cuts => {}
            _ = up => {}
            _ = down => {}
        }
    }

    /// Passes on bytes from the target until the switch.
    async fn pass(
        &self,
        position: usize,
        from: &mut OwnedReadHalf,
        to: &mut OwnedWriteHalf,
    ) -> std::io::Result<()> {
        let mut bytes = vec![0; 4096];
        loop {
            let count = from.read(&mut bytes).await?;
            if count == 0 {
                return Ok(());
            }
            let own = position == *self.now.borrow();
            let left = self.left.load(Ordering::SeqCst);
            if own && left <= count {
                self.left.store(usize::MAX, Ordering::SeqCst);
                self.now.send_modify(|now| *now += 1);
                if self.cuts {
                    return to.write_all(&bytes[..left]).await;
                }
            } else if own && left < usize::MAX {
                self.left.fetch_sub(count, Ordering::SeqCst);
            }
            to.write_all(&bytes[..count]).await?;
        }
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}
