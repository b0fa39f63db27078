//! Every way in which a change reaches the proxy.

use super::{comes, is_named, write};
use crate::client::metric;
use crate::fakes::Pace;
use crate::groups::house::{before, engine, policy};

#[tokio::test]
async fn files_that_are_written_renamed_or_removed_are_reloaded_automatically() {
    let engine = engine(Pace::default()).await;
    let proxy = before(&engine, "", "", &policy("first", "")).await;
    let dir = proxy.folder().join("policies");
    write(&dir, "policy.yaml", &policy("second", ""));
    comes(&proxy, |policies| is_named(policies, "second")).await;
    // Reloaded by hand and reverted at once: the former content is a change as well.
    write(&dir, "policy.yaml", &policy("other", ""));
    assert!(is_named(&proxy.post("/api/reload").await.json(), "other"));
    write(&dir, "policy.yaml", &policy("second", ""));
    comes(&proxy, |policies| is_named(policies, "second")).await;
    // An editor's temporary file is ignored until it is renamed.
    write(&dir, ".policy.yaml.swp", "no policy at all");
    write(&dir, "policy.yaml~", "no policy at all");
    write(&dir, "new.tmp", &policy("third", ""));
    std::fs::rename(dir.join("new.tmp"), dir.join("policy.yaml")).unwrap();
    comes(&proxy, |policies| is_named(policies, "third")).await;
    // An empty folder is treated as one that is about to be filled: the built-in policy would
    // speculate on everything.
    std::fs::remove_file(dir.join("policy.yaml")).unwrap();
    comes(&proxy, |policies| policies["synchronized"] == false).await;
    assert!(is_named(&proxy.get("/api/policies").await.json(), "third"));
    assert_eq!(proxy.post("/api/reload").await.head.status(), 200);
    assert!(is_named(&proxy.get("/api/policies").await.json(), "default"));
    assert!(metric(proxy.admin, "foretell_config_synchronized ").await > 0.5);
    assert!(metric(proxy.admin, "foretell_config_reloads_total{result=\"success\"} ").await > 3.5);
}

/// As the kubelet does it: files are links to `..data/FILE`, and `..data` is a link that is
/// replaced by a rename.
#[tokio::test]
async fn a_configmap_is_swapped_as_a_whole() {
    let engine = engine(Pace::default()).await;
    let proxy = before(&engine, "", "", &policy("first", "")).await;
    let dir = proxy.folder().join("policies");
    std::fs::remove_file(dir.join("policy.yaml")).unwrap();
    for (number, names) in [["a1", "b1"], ["a2", "b2"], ["a3", "b3"]].into_iter().enumerate() {
        let data = format!("..2026_11_22_{number}");
        std::fs::create_dir(dir.join(&data)).unwrap();
        write(&dir.join(&data), "1.yaml", &policy(names[0], ""));
        write(&dir.join(&data), "2.yaml", &policy(names[1], ""));
        std::os::unix::fs::symlink(&data, dir.join("..data_tmp")).unwrap();
        std::fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
        for file in ["1.yaml", "2.yaml"].into_iter().filter(|_| number == 0) {
            std::os::unix::fs::symlink(format!("..data/{file}"), dir.join(file)).unwrap();
        }
        let both = |policies: &serde_json::Value| {
            let name = |at: usize| policies["policies"][at]["name"].as_str().map(str::to_owned);
            let found = (name(0), name(1));
            // Never a mix of the old and the new folder.
            let (Some(one), Some(two)) = &found else { return false };
            assert_eq!(one[1..], two[1..], "{policies}");
            one == names[0]
        };
        comes(&proxy, both).await;
    }
}

#[tokio::test]
async fn a_signal_reads_them_at_once_and_ends_nothing() {
    let engine = engine(Pace::default()).await;
    let proxy = before(&engine, "", "", &policy("first", "")).await;
    write(&proxy.folder().join("policies"), "policy.yaml", &policy("second", ""));
    proxy.signal("-HUP").await;
    comes(&proxy, |policies| is_named(policies, "second")).await;
    proxy.signal("-HUP").await;
    proxy.end().await;
}
