//! Texts of tenants that sidecars share: sealed, found by the tenant's requests at another sidecar
//! and by no others, and gone from all sidecars once they are cleared at one.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::house::{Server, lines, until, until_fault, until_sidecars, until_up};
use crate::client::{Answer, Ask, metric};
use crate::fakes::vllm::Vllm;
use crate::fakes::{Fake, Pace};
use crate::groups::house::{GATES, ask, before, engine};
use crate::reasons::proxy::Proxy;
use crate::wire::PATIENCE;

const TENANT: &str = "acme-research";
const RECEIVED: &str = "foretell_corpus_texts_total{event=\"received\"} ";
const SENT: &str = "foretell_corpus_texts_total{event=\"sent\"} ";

/// A file with a key of this digit.
fn key(folder: &Path, digit: char) -> String {
    let file = folder.join(format!("key-{digit}"));
    std::fs::write(&file, digit.to_string().repeat(64)).unwrap();
    file.display().to_string()
}

/// A sidecar whose policy drafts from the texts of a tenant, and shares them or does not.
async fn sidecar(engine: &Fake<Vllm>, url: &str, key: &str, share: bool) -> Proxy {
    let process = format!(
        "fleet: {{ store: {url:?}, sync: 50ms, tenant_key_file: {key:?} }}\n\
         tenant: {{ header: x-tenant, trusted_peers: [127.0.0.1/32] }}\n"
    );
    let policy = format!(
        "version: 1\nname: p\ndrafters: [{{ kind: suffix, scope: tenant }}]\n{GATES}\n\
         gamma: {{ fixed: 8 }}\ncorpus: {{ share: {share} }}\n"
    );
    before(engine, &process, "", &policy).await
}

/// A request of a tenant.
async fn send(proxy: &Proxy, tenant: &str, number: u32) -> Answer {
    let answer = ask(number).send(proxy.front, &format!("x-tenant: {tenant}\r\n")).await;
    assert_eq!(answer.plain.status, 200, "{}", answer.message.text());
    answer
}

/// Number of texts that a sidecar has of a tenant.
async fn texts(proxy: &Proxy, tenant: &str) -> u64 {
    let corpus = proxy.get("/api/corpus").await.json();
    let of = |entry: &&Value| entry["tenant"] == tenant;
    corpus["entries"].as_array().unwrap().iter().find(of).map_or(0, |entry| entry["texts"].as_u64().unwrap())
}

/// Waits until a sidecar has so many texts of a tenant.
async fn until_texts(proxy: &Proxy, tenant: &str, number: u64) {
    let begun = Instant::now();
    while texts(proxy, tenant).await != number {
        assert!(begun.elapsed() < PATIENCE, "{}\n{}", texts(proxy, tenant).await, proxy.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Sends new requests, from this number on, until one sidecar has received a text of the other: a
/// purge that is being carried out may remove some.
async fn share(from: &Proxy, to: &Proxy, number: u32) {
    let before = metric(to.admin, RECEIVED).await;
    let begun = Instant::now();
    for number in number.. {
        send(from, TENANT, number).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        if metric(to.admin, RECEIVED).await > before {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{}", to.log());
    }
}

/// Two sidecars that have each other's texts of two tenants.
async fn pair(engine: &Fake<Vllm>, server: &Server, key: &str) -> [Proxy; 2] {
    let url = server.url();
    let both = [sidecar(engine, &url, key, true).await, sidecar(engine, &url, key, true).await];
    for (proxy, number) in both.iter().zip([1, 50]) {
        send(proxy, TENANT, number).await;
        send(proxy, "other", number + 1).await;
    }
    for proxy in &both {
        until_texts(proxy, TENANT, 2).await;
        until_texts(proxy, "other", 2).await;
    }
    both
}

/// All that the store holds, as text.
fn everything(server: &Server) -> String {
    let dump = |key: &String| match key.as_str() {
        stream if stream.contains(":texts:") || stream.contains(":purges:") => {
            format!("{key} {:?}", server.command(&["XRANGE", key, "-", "+"]))
        }
        set if set.contains(":tenants:") => {
            format!("{key} {:?}", server.command(&["ZRANGE", key, "0", "-1"]))
        }
        other => other.to_owned(),
    };
    server.keys("*").iter().map(dump).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_drafts_from_its_texts_at_another_sidecar() {
    let Some(server) = Server::start(&[]).await else { return };
    let (engine, folder) = (engine(Pace::default()).await, tempfile::tempdir().unwrap());
    let (url, key_a) = (server.url(), key(folder.path(), 'a'));
    let first = sidecar(&engine, &url, &key_a, true).await;
    let second = sidecar(&engine, &url, &key_a, true).await;
    let alone = send(&first, TENANT, 1).await;
    server.until_keys("foretell:1:texts:*", 1).await;
    send(&second, TENANT, 50).await;
    until_texts(&second, TENANT, 2).await;
    until_texts(&first, TENANT, 2).await;
    assert_eq!(metric(second.admin, RECEIVED).await as u64, 1);

    let again = send(&second, TENANT, 1).await;
    assert_eq!((&again.plain, &again.ids), (&alone.plain, &alone.ids));
    let count = |answer: &Answer, name: &str| answer.foretell()[name].as_u64().unwrap();
    assert!(
        count(&again, "accepted") > count(&alone, "accepted")
            && count(&again, "rounds") < count(&alone, "rounds"),
        "{} {}",
        again.foretell(),
        alone.foretell()
    );
    send(&second, "other", 50).await;
    until_texts(&second, "other", 1).await;

    // Another key is another fleet: it finds nothing, and nobody finds anything of it.
    let stranger = sidecar(&engine, &url, &key(folder.path(), 'b'), true).await;
    send(&stranger, TENANT, 70).await;
    until(&stranger, SENT, |sent| sent > 0.5).await;
    until_texts(&stranger, TENANT, 1).await;
    assert_eq!((texts(&first, TENANT).await, metric(stranger.admin, RECEIVED).await), (2, 0.0));

    let held = everything(&server);
    let ids: Vec<String> = ask(1).fields["prompt"].as_array().unwrap().iter().map(Value::to_string).collect();
    assert!(
        held.contains(":texts:") && !held.contains(TENANT) && !held.contains(&ids[..4].join(",")),
        "{held}"
    );
}

/// The turns of a chat at two sidecars: each keeps of every turn what is new.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_turns_of_a_chat_are_kept_once_at_every_sidecar() {
    let Some(server) = Server::start(&[]).await else { return };
    let (engine, folder) = (engine(Pace::default()).await, tempfile::tempdir().unwrap());
    let key = key(folder.path(), 'a');
    let proxies = [
        sidecar(&engine, &server.url(), &key, true).await,
        sidecar(&engine, &server.url(), &key, true).await,
    ];
    let mut prompt: Vec<u32> = (0..600).map(|at| 100 + at * 7 % 1_000).collect();
    send(&proxies[1], TENANT, 1).await;
    for (turn, proxy) in [(0, &proxies[0]), (1, &proxies[1]), (2, &proxies[0]), (3, &proxies[1])] {
        let ask = Ask { fields: json!({"prompt": prompt, "max_tokens": 8, "temperature": 0}), ..ask(0) };
        let answer = ask.send(proxy.front, &format!("x-tenant: {TENANT}\r\n")).await;
        assert_eq!(answer.plain.status, 200, "{}", answer.message.text());
        for proxy in &proxies {
            until_texts(proxy, TENANT, turn + 2).await;
        }
        prompt.extend((0..200).map(|at| 200 + (at + turn as u32) * 11 % 1_000));
    }
    for proxy in &proxies {
        let corpus = proxy.get("/api/corpus").await.json();
        let tokens = corpus["tokens"].as_u64().unwrap();
        // 600 tokens, three times 200, and at each turn up to 64 before them and a part of a chunk.
        assert!((1_200..1_200 + 4 * (64 + 128) + 64).contains(&tokens), "{corpus}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_others_write_into_a_stream_is_left_out() {
    let Some(server) = Server::start(&[]).await else { return };
    let (engine, folder) = (engine(Pace::default()).await, tempfile::tempdir().unwrap());
    let key = key(folder.path(), 'a');
    let [first, second] = pair(&engine, &server, &key).await;
    // Random bytes, none at all, and the texts of one tenant moved to the other.
    let [one, other]: [String; 2] = server.keys("foretell:1:texts:*").try_into().unwrap();
    server.command(&["XADD", &one, "*", "t", "no text of this fleet, but long enough for one"]);
    server.command(&["XADD", &one, "*", "t", ""]);
    let lua = "for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do \
               redis.call('XADD', KEYS[2], '*', 't', entry[2][2]) end";
    server.command(&["EVAL", lua, "2", &one, &other]);
    let fleet = one.split(':').nth(3).unwrap();
    server.command(&["XADD", &format!("foretell:1:purges:{fleet}"), "*", "p", "null"]);
    until_fault(&first, "answer").await;
    until_fault(&second, "answer").await;
    send(&first, TENANT, 90).await;
    until_texts(&second, TENANT, 3).await;
    assert_eq!((texts(&first, "other").await, texts(&second, "other").await), (2, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_that_are_cleared_at_one_sidecar_are_gone_from_all_and_from_the_store() {
    let Some(mut server) = Server::start(&[]).await else { return };
    let (engine, folder) = (engine(Pace::default()).await, tempfile::tempdir().unwrap());
    let key = key(folder.path(), 'a');
    let [first, second] = pair(&engine, &server, &key).await;
    first.post(&format!("/api/corpus/clear?tenant={TENANT}")).await;
    until_texts(&second, TENANT, 0).await;
    until_texts(&first, TENANT, 0).await;
    server.until_keys("foretell:1:texts:*", 1).await;
    assert_eq!(texts(&second, "other").await, 2);

    // A store that is full has room for a purge once the texts are gone; one that is down gets it
    // when it is back.
    share(&first, &second, 20).await;
    server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    until_fault(&second, "full").await;
    first.post(&format!("/api/corpus/clear?tenant={TENANT}")).await;
    until_fault(&first, "full").await;
    server.command(&["CONFIG", "SET", "maxmemory", "0"]);
    until_texts(&second, TENANT, 0).await;
    server.stop().await;
    until_up(&first, false).await;
    first.post("/api/corpus/clear").await;
    assert_eq!((texts(&first, "other").await, texts(&second, "other").await), (0, 2));
    server.again().await;
    until_texts(&second, "other", 0).await;
    server.until_keys("foretell:1:texts:*", 0).await;

    // Later texts are shared again, also with a sidecar that starts later and reads the purge then.
    let third = sidecar(&engine, &server.url(), &key, true).await;
    send(&third, TENANT, 7).await;
    share(&first, &third, 60).await;
}

/// Ids in the future behind which nothing is read, or can be written, and a key of another type.
const DAMAGES: [&[&str]; 3] = [
    &["XADD", "KEY", "18446744073709551615-18446744073709551615", "p", "junk"],
    &["XADD", "KEY", "9999999999999-7", "p", "junk"],
    &["EVAL", "redis.call('DEL', KEYS[1]); redis.call('SET', KEYS[1], 'junk')", "1", "KEY"],
];

/// Clears at a sidecar, again if the store takes longer than the answer waits.
async fn clear(proxy: &Proxy, query: &str) -> Value {
    let begun = Instant::now();
    loop {
        let answer = proxy.post(&format!("/api/corpus/clear{query}")).await.json();
        if answer["fleet"]["store"] == "written" {
            return answer;
        }
        assert!(begun.elapsed() < PATIENCE, "{answer}\n{}", proxy.log());
    }
}

fn damage(server: &Server, key: &str, command: &[&str]) {
    let words: Vec<&str> = command.iter().map(|word| if *word == "KEY" { key } else { *word }).collect();
    server.command(&words);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_another_writer_has_damaged_is_renewed_and_a_clear_reaches_all() {
    let Some(server) = Server::start(&[]).await else { return };
    let (engine, folder) = (engine(Pace::default()).await, tempfile::tempdir().unwrap());
    let key = key(folder.path(), 'a');
    let [first, second] = pair(&engine, &server, &key).await;
    let fleet = server.keys("foretell:1:texts:*")[0].split(':').nth(3).unwrap().to_owned();
    for (command, number) in DAMAGES.iter().zip([200, 300, 400]) {
        damage(&server, &format!("foretell:1:purges:{fleet}"), command);
        clear(&first, &format!("?tenant={TENANT}")).await;
        until_texts(&second, TENANT, 0).await;
        until_texts(&first, TENANT, 0).await;
        // The next texts are read again, also where their streams are damaged.
        share(&first, &second, number).await;
        for stream in server.keys("foretell:1:texts:*") {
            damage(&server, &stream, command);
        }
        share(&first, &second, number + 50).await;
    }
    assert_eq!(texts(&second, "other").await, 2, "no other tenant is cleared");
    assert!(
        lines(&first, "was damaged by another writer") + lines(&second, "was damaged by another writer") > 3
    );
    until_fault(&first, "damaged").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clear_says_which_steps_of_it_are_open() {
    let Some(mut server) = Server::start(&[]).await else { return };
    let (engine, folder) = (engine(Pace::default()).await, tempfile::tempdir().unwrap());
    let key = key(folder.path(), 'a');
    let [first, second] = pair(&engine, &server, &key).await;
    until_sidecars(&first, 1).await;
    let cleared = clear(&first, &format!("?tenant={TENANT}")).await;
    let fleet = &cleared["fleet"];
    assert_eq!(fleet["sidecars"], 1, "{cleared}");
    assert!(fleet["open"][0].as_str().unwrap().starts_with("1 other sidecar"), "{cleared}");
    until_texts(&second, TENANT, 0).await;
    server.stop().await;
    until_up(&first, false).await;
    let waiting = first.post("/api/corpus/clear").await.json();
    let fleet = &waiting["fleet"];
    assert_eq!(fleet["store"], "waiting", "{waiting}");
    let open = fleet["open"][0].as_str().unwrap();
    assert!(open.contains("does not have it yet (") && open.contains("refused"), "{waiting}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_shared_unless_the_policy_says_so() {
    let Some(server) = Server::start(&[]).await else { return };
    let (engine, folder) = (engine(Pace::default()).await, tempfile::tempdir().unwrap());
    let proxy = sidecar(&engine, &server.url(), &key(folder.path(), 'a'), false).await;
    send(&proxy, TENANT, 1).await;
    until_texts(&proxy, TENANT, 1).await;
    until_up(&proxy, true).await;
    server.until_keys("foretell:1:sidecar:*", 1).await;
    assert!(server.keys("foretell:1:texts:*").is_empty());
    let sharing = sidecar(&engine, &server.url(), &key(folder.path(), 'a'), true).await;
    let fields = format!("x-tenant: {TENANT}\r\nx-foretell-corpus: off\r\n");
    ask(2).send(sharing.front, &fields).await;
    // Exchanged after the others.
    send(&sharing, "other", 3).await;
    server.until_keys("foretell:1:texts:*", 1).await;
    assert_eq!((texts(&sharing, TENANT).await, metric(sharing.admin, SENT).await), (0, 1.0));
}
