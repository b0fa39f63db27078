//! `foretell target`, behind a fake that records requests and passes everything on.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use foretell::app::local::LocalTarget;
use foretell_onnx::target::hugging::FolderWords;
use foretell_onnx::target::metrics::Metrics;
use foretell_onnx::target::scheduler;
use foretell_onnx::target::server::App;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tempfile::TempDir;

use crate::dialects::table::{Server, Started};
use crate::end_to_end::model::{self, Babble};
use crate::fakes::http::{Gone, Out, Request, Sent};
use crate::fakes::{Engine, Fake, House, Setup};
use crate::wire::{Wire, chunk};

const CONTEXT: usize = 4096;
/// Leaves time for other calls during a plain request.
const STEP: Duration = Duration::from_millis(2);

struct Onnx {
    house: Arc<House>,
    target: LocalTarget,
    _words: TempDir,
}

pub fn start(setup: Setup) -> Started {
    async move {
        let words = tempfile::tempdir().unwrap();
        let babble = Babble::new(&model::words(words.path()), CONTEXT, 24).with_step(STEP);
        let metrics = Arc::new(Metrics::new().unwrap());
        let engine = scheduler::Engine::start(Box::new(babble), Arc::clone(&metrics)).unwrap();
        let read = Arc::new(FolderWords::read(words.path()).unwrap());
        let target = LocalTarget::start(App::new("toy".into(), engine, read, metrics)).await.unwrap();
        let onnx = Onnx { house: House::new(setup), target, _words: words };
        Box::new(Fake::start(onnx).await) as Box<dyn Server>
    }
    .boxed()
}

impl Engine for Onnx {
    fn house(&self) -> &Arc<House> {
        &self.house
    }

    fn serve<'a>(&'a self, request: Request, out: &'a mut Out) -> BoxFuture<'a, Sent> {
        pass(self.target.address, request, out).boxed()
    }
}

async fn pass(target: SocketAddr, request: Request, out: &mut Out) -> Sent {
    let query = if request.query.is_empty() { String::new() } else { format!("?{}", request.query) };
    let mut head = format!("{} {}{query} HTTP/1.1\r\n", request.method, request.path);
    for (name, value) in request.fields.iter().filter(|(name, _)| name != "transfer-encoding") {
        head.extend([name, ": ", value, "\r\n"]);
    }
    let mut target = Wire::connect(target).await;
    target.send([head.as_bytes(), b"\r\n", &request.body].concat()).await;
    let head = target.head().await.ok_or(Gone)?;
    let lines =
        head.fields.iter().fold(String::new(), |all, (name, value)| all + name + ": " + value + "\r\n");
    out.send(format!("{}\r\n{lines}\r\n", head.line).as_bytes()).await?;
    if head.get("transfer-encoding").is_none() {
        return out.send(&target.body(head).await.ok_or(Gone)?.body).await;
    }
    loop {
        let piece = target.chunk().await.ok_or(Gone)?;
        if piece.is_empty() {
            return out.send(b"0\r\n\r\n").await;
        }
        out.send(&chunk(&piece)).await?;
    }
}
