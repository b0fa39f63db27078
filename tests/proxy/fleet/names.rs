//! What a backend receives from the client: its key, its model's name, its path; and the rank that
//! is to work.

use std::sync::Arc;

use foretell::app::local;
use foretell_net::fleet::{Auth, KeyFile, ModelName, ReplicaSettings};
use tokio::time::timeout;

use super::house::{self, Replica, ask};
use crate::wire::{Message, PATIENCE, Wire, post};

async fn seen_with(auth: Auth) -> Message {
    let mut replica = Replica::saying("x").await;
    let backend =
        ReplicaSettings { auth, ..ReplicaSettings::new("b", format!("http://{}", replica.address)) };
    let gateway = house::start(house::settings(vec![backend])).await;
    ask(&gateway, post("/v1/completions", "authorization: Bearer client\r\n", b"{}")).await;
    replica.next().await.unwrap()
}

#[tokio::test]
async fn the_clients_key_is_passed_on_removed_or_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    std::fs::write(&file, "own\n").unwrap();
    let own = Auth::Replace(Arc::new(KeyFile::open(&file).unwrap()));
    for (auth, wanted) in
        [(Auth::Pass, Some("Bearer client")), (Auth::Strip, None), (own, Some("Bearer own"))]
    {
        assert_eq!(seen_with(auth).await.head.get("authorization"), wanted);
    }
}

/// The next request that is not about the server itself.
async fn posted(replica: &mut Replica) -> Message {
    loop {
        let request = replica.next().await.unwrap();
        if request.head.target().0 == "POST" {
            return request;
        }
    }
}

#[tokio::test]
async fn a_key_file_that_changes_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    std::fs::write(&file, "first").unwrap();
    let mut replica = Replica::saying("x").await;
    let process = format!(
        "version: 1\nbackends:\n  - name: b\n    engine: ollama\n    replicas: [\"http://{}/base/v1\"]\n    \
         connect: {{ host: client, auth: {{ token_file: \"{}\" }} }}\n",
        replica.address,
        file.display()
    );
    let running = local::proxy(&process, &[]).await.unwrap();
    let address = running.gateway.addresses[0];
    let ask = || async move { Wire::connect(address).await.ask(post("/v1/embeddings", "", b"{}")).await };
    ask().await;
    let request = posted(&mut replica).await;
    assert_eq!(request.head.get("authorization"), Some("Bearer first"));
    assert_eq!(request.head.get("host"), Some("api"), "the client's");
    assert_eq!(request.head.target().1, "/base/v1/embeddings");
    std::fs::write(&file, "second key").unwrap();
    let taken = async {
        loop {
            ask().await;
            if posted(&mut replica).await.head.get("authorization") == Some("Bearer second key") {
                return;
            }
        }
    };
    timeout(PATIENCE, taken).await.expect("usually within a second");
}

#[tokio::test]
async fn a_name_decides_where_a_request_goes_and_passes_as_it_was_written() {
    let (mut big, mut small) = (Replica::saying("big").await, Replica::saying("small").await);
    let named = |name: &str, replica: &Replica, models: Vec<ModelName>| ReplicaSettings {
        models,
        ..ReplicaSettings::new(name, format!("http://{}", replica.address))
    };
    let one = ModelName { id: "llama-70b".into(), aliases: vec!["llama".into()] };
    let lora = ModelName { id: "lora-*".into(), ..ModelName::default() };
    let other = ModelName { id: "tiny".into(), ..ModelName::default() };
    let backends = vec![named("small", &small, vec![other]), named("big", &big, vec![one, lora])];
    let gateway = house::start(house::settings(backends)).await;
    for model in ["llama-70b", "llama", "lora-7"] {
        let body = format!("{{ \"model\" : \"{model}\", \"prompt\":\"p\" }}");
        assert_eq!(ask(&gateway, post("/v1/completions", "", body.as_bytes())).await.text(), "big");
        assert_eq!(big.next().await.unwrap().text(), body);
    }
    assert_eq!(ask(&gateway, post("/v1/completions", "", b"{\"model\":\"who\"}")).await.text(), "small");
    assert_eq!(small.next().await.unwrap().text(), "{\"model\":\"who\"}");
    let replicas = gateway.shared.fleet.replicas();
    assert_eq!(replicas[1].model("lora-7").unwrap().id, "lora-*");
    assert_eq!(replicas[1].model("llama").unwrap().id, "llama-70b");
}

#[tokio::test]
async fn each_rank_is_a_replica_and_its_requests_say_so() {
    let mut replica = Replica::saying("x").await;
    let process = format!(
        "version: 1\nbackends:\n  - {{ name: b, engine: ollama, ranks: 3, replicas: [\"http://{}\"] }}\n",
        replica.address
    );
    let running = local::proxy(&process, &[]).await.unwrap();
    let labels: Vec<_> =
        running.gateway.shared.fleet.replicas().iter().map(|r| (r.label().to_owned(), r.rank())).collect();
    assert_eq!(labels, [("b/0".into(), Some(0)), ("b/1".into(), Some(1)), ("b/2".into(), Some(2))]);
    let mut ranks = std::collections::BTreeSet::new();
    while ranks.len() < 3 {
        Wire::connect(running.gateway.addresses[0]).await.ask(house::completion()).await;
        let request = replica.next().await.unwrap();
        ranks.insert(request.head.get("x-data-parallel-rank").unwrap().to_owned());
    }
    assert_eq!(ranks.into_iter().collect::<Vec<_>>(), ["0", "1", "2"]);
}
