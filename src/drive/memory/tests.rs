//! The memory at work: learnt away from requests, forgotten when asked, and carried over a restart.

use super::*;
use crate::draft::suffix::{Finder, Rules, Shape};

fn key(tenant: &str) -> Key {
    Key { model: "b/m".to_owned(), vocabulary: "v".to_owned(), tenant: Some(tenant.to_owned()) }
}

fn memories() -> Memories {
    let limits = Limits { bytes: 1 << 20, ttl: Duration::from_hours(1) };
    let account = http::memory::Memory::new(1 << 30);
    Memories::start(limits, &account, Arc::new(Observer::new().unwrap())).unwrap()
}

fn text(from: u32) -> Vec<TokenId> {
    (from..from + 60).collect()
}

/// The token that is expected behind a context.
fn next(memories: &Memories, key: &Key, context: &[TokenId]) -> Option<TokenId> {
    let view = memories.view(key);
    let finder = Finder::new(view.iter().map(|segment| segment.source()), context);
    finder.draft(&Rules::default(), Shape::Path).and_then(|draft| Some(draft.nodes.first()?.token))
}

/// Waits until everything that was handed over has been learnt.
fn settle(memories: &Memories) {
    assert_eq!(memories.clear(Some("nobody")), 0);
}

#[test]
fn a_text_is_learnt_for_its_own_tenant_and_forgotten_with_it() {
    let memories = memories();
    memories.learn(&[key("a")], &text(100));
    memories.learn(&[key("b")], &text(500));
    settle(&memories);
    assert_eq!(next(&memories, &key("a"), &[109, 110]), Some(111));
    assert_eq!(
        (next(&memories, &key("b"), &[109, 110]), next(&memories, &key("c"), &[109, 110])),
        (None, None)
    );
    let held: Vec<_> =
        memories.holdings().into_iter().map(|(key, held)| (key.tenant.unwrap(), held.texts)).collect();
    assert_eq!(held, [("a".to_owned(), 1), ("b".to_owned(), 1)]);
    let metrics = memories.shared.observer.metrics().text();
    assert!(
        metrics.contains("foretell_remembered_texts 2") && metrics.contains("{event=\"learnt\"} 2"),
        "{metrics}"
    );
    assert_eq!(memories.clear(Some("a")), 1);
    assert_eq!(
        (next(&memories, &key("a"), &[109, 110]), next(&memories, &key("b"), &[509, 510])),
        (None, Some(511))
    );
    assert_eq!((memories.clear(None), memories.holdings().len()), (1, 0));
}

#[test]
fn a_snapshot_is_for_its_owner_only_and_brings_everything_back() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("texts");
    let before = memories();
    assert_eq!(before.load(&file).unwrap(), 0, "there is none yet");
    before.learn(&[key("a")], &text(100));
    before.learn(&[Key { tenant: None, ..key("") }], &text(500));
    assert_eq!(before.save(&file).unwrap(), 2);
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&file).unwrap());
    assert_eq!(mode & 0o777, 0o600);
    let after = memories();
    assert_eq!(after.load(&file).unwrap(), 2);
    assert_eq!(next(&after, &key("a"), &[109, 110]), Some(111));
    assert_eq!(next(&after, &Key { tenant: None, ..key("") }, &[509, 510]), Some(511));
    assert_eq!(next(&after, &key("b"), &[109, 110]), None);
}

#[test]
fn a_damaged_snapshot_is_refused_whole() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("texts");
    let memories = memories();
    memories.learn(&[key("a")], &text(100));
    memories.save(&file).unwrap();
    let whole = std::fs::read(&file).unwrap();
    memories.clear(None);
    for at in (0..whole.len()).step_by(7) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x15;
        std::fs::write(&file, &damaged).unwrap();
        // When it was saved may be changed unseen: it only says how old the texts are.
        if memories.load(&file).is_ok() {
            assert!(at < whole.iter().position(|&byte| byte == b'\n').unwrap(), "byte {at}");
            memories.clear(None);
        }
        std::fs::write(&file, &whole[..at]).unwrap();
        assert!(memories.load(&file).is_err(), "cut at {at}");
        assert_eq!(memories.holdings().len(), 0);
    }
    std::fs::write(&file, "{\"version\":2,\"saved\":0,\"sha256\":\"\"}\n").unwrap();
    assert!(matches!(memories.load(&file), Err(SnapshotError::Version(2))));
}
