//! A server that is stopped or hangs: connections are accepted, and nothing is answered.

use std::time::Duration;

use foretell::app::{Running, local};
use foretell_wire::openai::Route;
use futures_util::future::join_all;
use serde_json::{Value, json};

use super::house;
use crate::client::{Answer, Ask, FORCED, get, metric};
use crate::dialects::table::Server;
use crate::fakes::{Freezer, Setup, toy};
use crate::transparent::engines::{ENGINES, Engine};
use crate::wire::{PATIENCE, Wire};

/// A server that can be frozen, with the whole proxy in front.
struct Scene {
    engine: &'static Engine,
    server: Box<dyn Server>,
    freezer: Freezer,
    proxy: Running,
}

impl Scene {
    async fn build(engine: &'static Engine) -> Self {
        let mut setup = Setup::default();
        setup.pace.step = Duration::from_millis(2);
        let server = (engine.start)(setup).await;
        let freezer = Freezer::before(server.address()).await;
        let words = toy::folder().join("tokenizer.json").display().to_string();
        let tokenizer = if engine.own_words { String::new() } else { format!(", tokenizer: {words}") };
        let process = format!(
            "version: 1\nbackends:\n  - name: b\n    replicas: [\"http://{}\"]\n    models: [{{ id: {}{tokenizer} }}]\n    \
             probe: {{ when: never }}\n{}",
            freezer.address, engine.model, engine.backend
        );
        let proxy = local::proxy(&process, &[FORCED]).await.unwrap();
        Self { engine, server, freezer, proxy }
    }

    async fn replica(&self) -> Value {
        get(self.proxy.gateway.admin.unwrap(), "/api/replicas").await.json()["replicas"][0].clone()
    }

    async fn out(&self) -> Value {
        get(self.proxy.gateway.admin.unwrap(), "/api/status").await.json()["out"].clone()
    }

    /// Waits until its state is this one.
    async fn is(&self, state: &str) {
        let is = async {
            while self.replica().await["state"] != state {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        assert!(tokio::time::timeout(PATIENCE, is).await.is_ok(), "{}: never {state}", self.engine.name);
    }

    fn ask(&self, tokens: u32) -> Ask {
        let mut fields: Value = serde_json::from_str(self.engine.says).unwrap();
        let own = json!({"model": self.engine.model, "prompt": "one two three one two", "temperature": 0,
            "max_tokens": tokens});
        fields.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        Ask::new(Route::Completions, true, fields)
    }

    /// The bytes of a streamed completion.
    fn completion(&self, tokens: u32) -> Vec<u8> {
        self.ask(tokens).bytes(self.engine.fields)
    }
}

async fn nothing_is_lost(engine: &'static Engine) {
    let scene = Scene::build(engine).await;
    scene.is("ready").await;
    let admin = scene.proxy.gateway.admin.unwrap();
    let front = scene.proxy.gateway.addresses[0];
    let direct = scene.ask(1500).send(scene.server.address(), engine.fields).await;
    let mut stream = Wire::connect(front).await;
    stream.send(scene.completion(1500)).await;
    let head = stream.head().await.unwrap();
    assert_eq!(head.status(), 200, "{}", engine.name);
    scene.freezer.freeze();
    scene.is("silent").await;
    for (series, value) in [("up", 0.0), ("silent", 1.0), ("breaker_state", 2.0)] {
        let line = format!("foretell_replica_{series}{{replica=\"b/0\"}}");
        assert!((metric(admin, &line).await - value).abs() < 0.5, "{}: {series}", engine.name);
    }
    let shown = scene.replica().await;
    assert_eq!((&shown["up"], &shown["breaker"]), (&json!(false), &json!("open")));
    assert!(shown["last_error"]["text"].to_string().contains("answers nothing"), "{shown}");
    assert_eq!(scene.out().await, json!(["b"]), "{}", engine.name);
    // The only replica is not refused: the request waits.
    let mut waiting = Wire::connect(front).await;
    waiting.send(scene.completion(4)).await;
    let early = tokio::time::timeout(Duration::from_millis(300), waiting.head()).await;
    assert!(early.is_err(), "{}: {:?}", engine.name, early.unwrap().map(|head| head.status()));
    scene.freezer.thaw();
    scene.is("ready").await;
    assert_eq!(scene.out().await, json!([]));
    assert!(metric(admin, "foretell_replica_up{replica=\"b/0\"}").await > 0.5);
    for (to, changes) in [("open", 1.0), ("closed", 1.0)] {
        let line = format!("foretell_replica_breaker_transitions_total{{replica=\"b/0\",to=\"{to}\"}}");
        assert!((metric(admin, &line).await - changes).abs() < 0.5, "{}: {to}", engine.name);
    }
    assert_eq!(waiting.head().await.unwrap().status(), 200, "{}", engine.name);
    let through = Answer::read(&scene.ask(1500), stream.body(head).await.unwrap());
    assert_eq!(through.plain.text, direct.plain.text, "{}", engine.name);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_server_of_every_engine_is_silent_and_loses_nothing() {
    join_all(ENGINES.iter().map(|engine| tokio::spawn(nothing_is_lost(engine)))).await.into_iter().for_each(
        |done| {
            if let Err(failed) = done {
                std::panic::resume_unwind(failed.into_panic());
            }
        },
    );
}

#[tokio::test]
async fn while_a_replica_is_silent_the_others_are_preferred() {
    let frozen = house::Replica::saying("frozen").await;
    let freezer = Freezer::before(frozen.address).await;
    let other = house::Replica::saying("other").await;
    let gateway = house::before(&[freezer.address, other.address]).await;
    freezer.freeze();
    let silent = gateway.shared.fleet.replicas()[0].clone();
    while !silent.is_silent() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for _ in 0..30 {
        assert_eq!(house::ask(&gateway, house::completion()).await.text(), "other");
    }
    freezer.thaw();
    while silent.is_silent() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    while house::ask(&gateway, house::completion()).await.text() != "frozen" {}
}

#[tokio::test]
async fn a_server_that_answers_questions_is_not_silent_however_long_it_computes() {
    let mut replica = house::Replica::start(|request| match request.head.target() {
        ("POST", _) => house::Reply::Hold,
        _ => house::Reply::Bytes(house::answer(404, "", "no such page")),
    })
    .await;
    let gateway = house::before(&[replica.address]).await;
    let mut client = Wire::connect(gateway.addresses[0]).await;
    client.send(house::completion()).await;
    let only = gateway.shared.fleet.replicas()[0].clone();
    let mut questions = 0;
    while questions < 4 {
        questions += u32::from(replica.next().await.unwrap().head.target() == ("GET", "/v1/models"));
        assert!(!only.is_silent() && only.is_up());
    }
}

#[tokio::test]
async fn a_silent_process_that_ends_is_down_and_not_silent() {
    let replica = house::Replica::saying("x").await;
    let freezer = Freezer::before(replica.address).await;
    let gateway = house::before(&[freezer.address]).await;
    freezer.freeze();
    let only = gateway.shared.fleet.replicas()[0].clone();
    while !only.is_silent() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(freezer);
    while only.health_state() != foretell_net::fleet::HealthState::Down {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!only.is_silent());
}
