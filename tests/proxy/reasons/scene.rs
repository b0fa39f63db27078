//! A scene: engines, configuration and a request that together cause one reason.

use std::collections::BTreeSet;
use std::fmt::Write;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::engines::{self, Engines, Start};
use super::proxy::Proxy;
use super::told::{Ask, Body};
use crate::fakes::Temper;
use crate::fakes::toy::{self, Context, Toy};
use crate::wire::PATIENCE;

pub const COMPLETIONS: &str = "/v1/completions";
pub const CHAT: &str = "/v1/chat/completions";
/// Speculates when that pays.
pub const PLAIN: &str = "version: 1\nname: plain\ndrafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }]\n\
    holdback: { start: 0, floor: 0 }\n";
pub use crate::client::FORCED;

/// The setup that causes a reason.
pub struct Scene {
    pub engines: Start,
    /// Lines of the config file.
    pub process: &'static str,
    /// Lines of the backend in it.
    pub backend: &'static str,
    /// Settings of its load signal.
    pub load: &'static str,
    /// The model's tokenizer is configured.
    pub tokenizer: bool,
    pub policy: String,
    pub ask: Ask,
    /// Runs before each request.
    pub before: fn(&Stage) -> BoxFuture<'_, ()>,
    /// Maximum number of requests until the random cause must have occurred.
    pub tries: usize,
}

impl Default for Scene {
    fn default() -> Self {
        Self {
            engines: engines::trace_settings,
            process: "",
            backend: "",
            load: "every: 100ms",
            tokenizer: true,
            policy: PLAIN.to_owned(),
            ask: completion(&json!({})),
            before: |_| std::future::ready(()).boxed(),
            tries: 1,
        }
    }
}

/// The ids of the usual prompt: eight, three times over.
pub fn prompt() -> Vec<u32> {
    (0..24).map(|at| 100 + at % 8).collect()
}

/// A prompt in which every token that the model may generate is followed by one that it never
/// generates after it.
pub fn misleading() -> Vec<u32> {
    let toy = Toy::new(Temper { eos_every: None, ..Temper::default() });
    let likely = |token: u32| {
        let row = toy.row(&Context::new(&[token]), 1);
        row.top(4).into_iter().map(|(token, _)| token).collect::<BTreeSet<u32>>()
    };
    let (mut all, mut new) = (BTreeSet::from([100]), vec![100]);
    while let Some(token) = new.pop() {
        new.extend(likely(token).into_iter().filter(|token| all.insert(*token)));
    }
    let never = |token: u32| {
        (200..toy.vocabulary() as u32)
            .find(|other| !all.contains(other) && !likely(token).contains(other))
            .unwrap()
    };
    all.iter().flat_map(|token| [*token, never(*token)]).collect()
}

/// A completion that every engine answers, with more or other fields.
pub fn completion(more: &Value) -> Ask {
    let mut body = json!({"model": "toy", "prompt": prompt(), "max_tokens": 3, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Ask { path: COMPLETIONS, fields: "", body: Body::Json(body) }
}

/// A chat.
pub fn chat(content: &Value, more: &Value) -> Ask {
    let mut body =
        json!({"model": "toy", "messages": [{"role": "user", "content": content}], "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Ask { path: CHAT, fields: "", body: Body::Json(body) }
}

/// A scene that is being played.
pub struct Stage {
    pub engines: Engines,
    pub proxy: Proxy,
}

impl Stage {
    pub async fn set(scene: &Scene) -> Self {
        let engines = (scene.engines)().await;
        let replicas: Vec<String> =
            engines.addresses.iter().map(|address| format!("\"http://{address}\"")).collect();
        let tokenizer = if scene.tokenizer {
            format!(", tokenizer: {:?}", toy::folder().display().to_string())
        } else {
            String::new()
        };
        let process = format!(
            "version: 1\nobserve: {{ log: json, level: debug }}\n{}backends:\n  - name: toy\n    replicas: [{}]\n    \
             models: [{{ id: toy{tokenizer} }}]\n    load: {{ {} }}\n    probe: {{ when: never }}\n{}",
            scene.process,
            replicas.join(", "),
            scene.load,
            scene.backend,
        );
        let proxy = Proxy::start(&process, &scene.policy).await;
        Self { engines, proxy }
    }

    /// Waits until `so` is true.
    pub async fn until<F: Future<Output = bool>>(&self, mut so: impl FnMut() -> F) {
        let waited = async {
            while !so().await {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, waited).await.expect("in time");
    }
}

/// Plays a scene: whole and as a stream, answer, metrics and log must report `way`. Returns the
/// faults found.
pub async fn play(scene: Scene, way: &str) -> String {
    let stage = Stage::set(&scene).await;
    let mut wrong = String::new();
    let streams: &[bool] = if matches!(scene.ask.body, Body::Raw(_)) { &[false] } else { &[false, true] };
    for stream in streams {
        let mut went = String::new();
        for attempt in 0..scene.tries {
            (scene.before)(&stage).await;
            let id = format!("{stream}-{attempt}");
            let reports = scene.ask.told(&stage.proxy, *stream, &id).await;
            reports.assert_agreed();
            went = reports.way();
            if went == way {
                break;
            }
        }
        if went != way {
            writeln!(wrong, "{way}, streamed {stream}: went {went}").unwrap();
        }
    }
    for house in &stage.engines.houses {
        assert_eq!(house.fatal(), Vec::<String>::new(), "{way}");
    }
    wrong
}
