//! Target, middlebox and proxy in one process, and a client that compares.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use foretell::app::Running;
use foretell::app::local::{self, LocalTarget};
use foretell_onnx::target::hugging::FolderWords;
use foretell_onnx::target::metrics::Metrics;
use foretell_onnx::target::scheduler::Engine;
use foretell_onnx::target::server::App;
use foretell_parsers::text::Tokenizer;
use foretell_proxy::serving::drafters::Drafters;
use tempfile::TempDir;

use super::middlebox::Middlebox;
use super::model::{self, Babble, Head};

use crate::client::panics;
pub use crate::client::{Answer, Ask, FORCED, events, get, metric, send, watch_panics};

pub const CONTEXT: usize = 4096;
/// Long enough for an answer on a busy machine, short enough for a test.
pub const VERIFY_TIMEOUT: Duration = Duration::from_secs(4);

pub struct House {
    _folder: TempDir,
    pub tokenizer: Arc<Tokenizer>,
    pub target: LocalTarget,
    pub middlebox: Middlebox,
    pub proxy: Running,
}

/// Starts the model drafters, given the target's vocabulary.
pub type Hire<'a> = Box<dyn FnOnce(&Arc<Tokenizer>) -> Drafters + 'a>;

/// The settings of a `House`.
pub struct Setup<'a> {
    pub methods: &'a str,
    pub policies: &'a [&'a str],
    /// More lines of the config file.
    pub more: String,
    pub step: Duration,
    pub drafters: Hire<'a>,
    /// The head of the target.
    pub head: Option<Head>,
}

impl Default for Setup<'_> {
    fn default() -> Self {
        Self {
            methods: "[tree]",
            policies: &[FORCED],
            more: String::new(),
            step: Duration::ZERO,
            drafters: Box::new(|_| Drafters::default()),
            head: None,
        }
    }
}

impl House {
    pub async fn build(method: Setup<'_>) -> Self {
        watch_panics();
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = model::words(folder.path());
        let babble = Babble::new(&tokenizer, CONTEXT, 24).with_step(method.step).with_head(method.head);
        let metrics = Arc::new(Metrics::new().unwrap());
        let engine = Engine::start(Box::new(babble), Arc::clone(&metrics)).unwrap();
        let words = Arc::new(FolderWords::read(folder.path()).unwrap());
        let target = LocalTarget::start(App::new("toy".into(), engine, words, metrics)).await.unwrap();
        let middlebox = Middlebox::before(target.address).await;
        let wait = VERIFY_TIMEOUT.as_millis();
        let process = format!(
            "version: 1\ntimeouts: {{ verify: {wait}ms, draft: {wait}ms }}\nbackends:\n  - name: toy\n    replicas: [\"http://{}\"]\n    \
             verify: {{ allow: {} }}\n    probe: {{ when: never }}\n{}",
            middlebox.address, method.methods, method.more,
        );
        let drafters = (method.drafters)(&tokenizer);
        let proxy = local::proxy_with(&process, method.policies, drafters).await.unwrap();
        Self { _folder: folder, tokenizer, target, middlebox, proxy }
    }

    pub fn front(&self) -> SocketAddr {
        self.proxy.gateway.addresses[0]
    }

    pub fn admin(&self) -> SocketAddr {
        self.proxy.gateway.admin.unwrap()
    }

    /// The target's own answer.
    pub async fn direct(&self, ask: &Ask) -> Answer {
        ask.send(self.target.address, "").await
    }

    /// The answer through the proxy.
    pub async fn through(&self, ask: &Ask, id: &str) -> Answer {
        ask.send(self.front(), &format!("te: trailers\r\nx-request-id: {id}\r\n")).await
    }

    /// The value of one line of the proxy's metrics, 0 if it is not there.
    pub async fn metric(&self, line: &str) -> f64 {
        metric(self.admin(), line).await
    }

    /// Asserts that no thread has panicked.
    pub fn assert_calm() {
        assert_eq!(panics(), Vec::<String>::new(), "panics");
    }
}
