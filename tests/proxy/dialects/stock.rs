//! A vLLM as `vllm serve MODEL` starts it: its defaults are those of the model's folder, as far as
//! its answers confirm them.

use std::time::Duration;

use foretell::app::Running;
use foretell::app::local;
use foretell_wire::openai::Route;
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::client::{Ask, FORCED, get};
use crate::fakes::house::Defaults;
use crate::fakes::vllm::{Options, Vllm};
use crate::fakes::{Fake, toy};
use crate::wire::PATIENCE;

const PROMPT: &str = "def area(width, height):\n    return width * height\n\n\ndef area(width, height):\n";

/// A model's folder with this generation config, if any.
fn folder(config: Option<&Value>) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(toy::folder().join(name), folder.path().join(name)).unwrap();
    }
    if let Some(config) = config {
        std::fs::write(folder.path().join("generation_config.json"), config.to_string()).unwrap();
    }
    folder
}

/// The fields of a file that says something else than vLLM in each of them.
fn file() -> Value {
    json!({"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "max_new_tokens": 40})
}

/// The defaults of a server that reads this file.
fn of(file: &Value) -> Defaults {
    let number = |name: &str| file[name].as_f64();
    Defaults {
        temperature: number("temperature"),
        top_p: number("top_p"),
        top_k: file["top_k"].as_i64(),
        min_p: number("min_p"),
        repetition_penalty: number("repetition_penalty"),
        presence_penalty: number("presence_penalty"),
        frequency_penalty: number("frequency_penalty"),
        max_new_tokens: file["max_new_tokens"].as_u64(),
        caps: false,
    }
}

async fn vllm(version: &'static str, defaults: Defaults) -> Fake<Vllm> {
    let mut options = Options::of(version);
    options.setup.temper.eos_every = None;
    options.setup.max_len = 400;
    let fake = Fake::start(Vllm::new(options)).await;
    *fake.house.defaults.lock() = defaults;
    fake
}

async fn proxy(fake: &Fake<Vllm>, folder: &TempDir) -> Running {
    let process = format!(
        "version: 1\ntimeouts: {{ verify: 10s }}\nbackends:\n  - name: toy\n    replicas: [\"http://{}\"]\n    \
         models: [{{ id: toy, tokenizer: {} }}]\n    probe: {{ when: never }}\n",
        fake.address,
        folder.path().display(),
    );
    let proxy = local::proxy(&process, &[FORCED]).await.unwrap();
    let known = async {
        while !replica(&proxy).await["engine_start"].is_string() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, known).await.expect("recognised");
    proxy
}

async fn replica(proxy: &Running) -> Value {
    get(proxy.gateway.admin.unwrap(), "/api/replicas").await.json()["replicas"][0].clone()
}

fn ask(route: Route, stream: bool, more: &Value) -> Ask {
    let mut fields = json!({"prompt": PROMPT});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Ask::new(route, stream, fields)
}

async fn problem(proxy: &Running) -> Value {
    replica(proxy).await["problem"].clone()
}

/// The reason and the parameter with which a request is passed through; `None` if it was served.
async fn passed(proxy: &Running, ask: &Ask) -> Option<(String, String)> {
    let got = ask.send(proxy.gateway.addresses[0], "").await;
    let head = |name: &str| got.message.head.get(name).unwrap_or_default().to_owned();
    (head("x-foretell-path") == "passthrough")
        .then(|| (head("x-foretell-reason"), head("x-foretell-parameter")))
}

/// Everything is left to the server but what makes it greedy: the text is the server's own, and it
/// is speculated on.
#[rstest]
#[case::v1("0.32.0")]
#[case::v2("0.33.0")]
#[case::reporting("0.29.0")]
#[case::older("0.14.0")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chats_and_completions_are_speculated_on(#[case] version: &'static str) {
    let mut own = file();
    for penalty in ["presence_penalty", "frequency_penalty"] {
        own.as_object_mut().unwrap().remove(penalty);
    }
    for config in [Some(&own), None] {
        let defaults = config.map_or_else(Defaults::default, of);
        let fake = vllm(version, defaults).await;
        let folder = folder(config);
        let proxy = proxy(&fake, &folder).await;
        assert_eq!(problem(&proxy).await, Value::Null, "{version} {config:?}");
        for (route, stream) in [(Route::Chat, true), (Route::Chat, false), (Route::Completions, true)] {
            let more = if config.is_none() { json!({"max_tokens": 60}) } else { json!({}) };
            let ask = ask(route, stream, &json!({"temperature": 0}));
            let ask = Ask { fields: merged(&ask.fields, &more), ..ask };
            let want = ask.send(fake.address, "").await;
            let got = ask.send(proxy.gateway.addresses[0], "").await;
            assert_eq!(got.plain, want.plain, "{version} {ask:?}");
            let reason = got.message.head.get("x-foretell-reason");
            assert_eq!(got.foretell()["path"], "speculated", "{version} {ask:?} {reason:?}");
        }
        assert_eq!(fake.house.fatal(), Vec::<String>::new());
    }
}

fn merged(one: &Value, more: &Value) -> Value {
    let mut all = one.clone();
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    all
}

/// The server has another value than the file in one field, as with `--override-generation-config`.
#[rstest]
#[case("temperature", |own: &mut Defaults| own.temperature = Some(0.9))]
#[case("top_p", |own: &mut Defaults| own.top_p = Some(0.5))]
#[case("top_k", |own: &mut Defaults| own.top_k = Some(50))]
#[case("min_p", |own: &mut Defaults| own.min_p = None)]
#[case("repetition_penalty", |own: &mut Defaults| own.repetition_penalty = None)]
#[case("presence_penalty", |own: &mut Defaults| own.presence_penalty = None)]
#[case("frequency_penalty", |own: &mut Defaults| own.frequency_penalty = Some(1.0))]
#[case("max_tokens", |own: &mut Defaults| own.max_new_tokens = Some(41))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_contradicts_the_file_is_passed_through_by_name(
    #[case] field: &str,
    #[case] change: fn(&mut Defaults),
) {
    let own = file();
    let mut defaults = of(&own);
    change(&mut defaults);
    let fake = vllm("0.32.0", defaults).await;
    let folder = folder(Some(&own));
    let proxy = proxy(&fake, &folder).await;
    let said = problem(&proxy).await;
    let says = format!("contradict the model's generation_config.json in {field}:");
    assert!(said.as_str().is_some_and(|said| said.contains(&says)), "{said}");
    // Every other field is the client's own.
    let mut all = json!({"temperature": 0.5, "top_p": 0.8, "top_k": 10, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 20});
    let whole = ask(Route::Chat, true, &all);
    assert_eq!(passed(&proxy, &whole).await, None);
    all.as_object_mut().unwrap().remove(field);
    let open = ask(Route::Chat, true, &all);
    let want = Some(("defaults_unknown".to_owned(), field.to_owned()));
    assert_eq!(passed(&proxy, &open).await, want);
    assert_eq!(fake.house.fatal(), Vec::<String>::new());
}

/// `--generation-config vllm` where the folder has a file, and a file of the server's where the
/// folder has none.
#[rstest]
#[case::ignored(Some(file()), Defaults::default())]
#[case::missing(None, of(&file()))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_file_than_the_servers_is_noticed(#[case] config: Option<Value>, #[case] defaults: Defaults) {
    let fake = vllm("0.32.0", defaults).await;
    let folder = folder(config.as_ref());
    let proxy = proxy(&fake, &folder).await;
    let said = problem(&proxy).await;
    // One that no seed has decided is in doubt too.
    for field in [
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ] {
        assert!(said.as_str().is_some_and(|said| said.contains(field)), "{field}: {said}");
    }
    for (route, field) in [(Route::Chat, "temperature"), (Route::Completions, "temperature")] {
        let asked = ask(route, false, &json!({}));
        let want = Some(("defaults_unknown".to_owned(), field.to_owned()));
        assert_eq!(passed(&proxy, &asked).await, want);
    }
}

/// Ends of the text besides the tokenizer's own: those of the file are those of the server, or not.
#[rstest]
#[case::same(&[9], None)]
#[case::others(&[], Some("eos_token_id"))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ends_of_the_file_are_confirmed(#[case] ends: &[u32], #[case] contradicted: Option<&str>) {
    let mut options = Options::of("0.32.0");
    options.setup.temper.eos_every = None;
    options.setup.max_len = 400;
    options.other_ends = ends.to_vec();
    let fake = Fake::start(Vllm::new(options)).await;
    let eos = fake.house.toy.eos();
    let folder = folder(Some(&json!({"eos_token_id": [eos, 9]})));
    let proxy = proxy(&fake, &folder).await;
    let asked = ask(Route::Chat, true, &json!({"temperature": 0}));
    let got = passed(&proxy, &asked).await;
    assert_eq!(got.map(|(_, parameter)| parameter), contradicted.map(str::to_owned));
}

/// Another engine start is tested anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_start_of_the_engine_is_tested() {
    let own = file();
    let fake = vllm("0.32.0", of(&own)).await;
    let folder = folder(Some(&own));
    let proxy = proxy(&fake, &folder).await;
    assert_eq!(problem(&proxy).await, Value::Null);
    *fake.house.defaults.lock() = Defaults::default();
    fake.house.renew();
    let noticed = async {
        while problem(&proxy).await == Value::Null {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, noticed).await.is_ok());
}
