//! The memory at work: learnt away from requests, forgotten when asked, and carried over a restart.

use super::*;
use crate::draft::suffix::{Finder, Rules, Shape};

fn key(tenant: &str) -> Key {
    Key { model: "b/m".to_owned(), vocabulary: "v".to_owned(), tenant: Some(tenant.to_owned()) }
}

fn memories() -> Memories {
    let limits = Limits { bytes: 1 << 20, ttl: Duration::from_hours(1) };
    let account = http::memory::Memory::new(1 << 30);
    Memories::start(limits, &account, Arc::new(Observer::new().unwrap()), None).unwrap()
}

/// A request says something under one key.
fn say(memories: &Memories, key: Key, text: &[TokenId]) {
    let scope = if key.tenant.is_some() { Scope::Tenant } else { Scope::Global };
    let tenant = key.tenant.clone();
    let request =
        Remembering::new(memories, &Key { tenant: None, ..key }, tenant.as_deref(), [scope].into_iter());
    request.learn(&text[..1], &text[1..], None);
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
    assert_eq!(memories.clear(Some("nobody")), Some(0));
}

#[test]
fn a_text_is_learnt_for_its_own_tenant_and_forgotten_with_it() {
    let memories = memories();
    say(&memories, key("a"), &text(100));
    say(&memories, key("b"), &text(500));
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
    assert_eq!(memories.clear(Some("a")), Some(1));
    assert_eq!(
        (next(&memories, &key("a"), &[109, 110]), next(&memories, &key("b"), &[509, 510])),
        (None, Some(511))
    );
    assert_eq!((memories.clear(None), memories.holdings().len()), (Some(1), 0));
}

#[test]
fn a_snapshot_is_for_its_owner_only_and_brings_everything_back() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("texts");
    let before = memories();
    assert_eq!(before.load(&file).unwrap(), 0, "there is none yet");
    say(&before, key("a"), &text(100));
    say(&before, Key { tenant: None, ..key("") }, &text(500));
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
fn what_is_no_file_is_neither_waited_for_nor_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let large = folder.path().join("large");
    let memories = memories();
    std::fs::File::create(&large).unwrap().set_len(memories.shared.snapshot_bytes + 1).unwrap();
    say(&memories, key("a"), &text(100));
    for path in [&fifo, folder.path(), std::path::Path::new("/dev/zero"), &large] {
        assert!(memories.load(path).is_err(), "{}", path.display());
    }
    assert!(memories.save(&fifo).is_err());
    assert!(memories.save(&large).is_ok() && memories.load(&large).is_ok());
}

#[test]
fn a_damaged_snapshot_is_refused_whole() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("texts");
    let memories = memories();
    say(&memories, key("a"), &text(100));
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
    assert!(matches!(memories.load(&file), Err(SnapshotError::Version { found: 2, own: 1 })));
}

#[test]
fn what_a_request_says_that_was_under_way_when_its_tenant_was_cleared_is_not_learnt() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("texts");
    let limits = Limits { bytes: 1 << 20, ttl: Duration::from_hours(1) };
    let account = http::memory::Memory::new(1 << 30);
    let observer = Arc::new(Observer::new().unwrap());
    let memories = Memories::start(limits, &account, observer, Some(file.clone())).unwrap();
    let scopes = || [Scope::Tenant, Scope::Global].into_iter();
    let all = Key { tenant: None, ..key("") };
    let [of_a, of_b] = ["a", "b"].map(|tenant| Remembering::new(&memories, &all, Some(tenant), scopes()));
    of_a.learn(&text(100), &[], None);
    assert_eq!(memories.save(&file).unwrap(), 2, "on both shelves");
    assert_eq!(memories.clear(Some("a")), Some(2));
    of_a.learn(&text(100), &[], None);
    of_b.learn(&text(500), &[], None);
    settle(&memories);
    let context = [&[109, 110][..], &[509, 510]];
    let seen = |key: &Key| context.map(|context| next(&memories, key, context));
    assert_eq!((seen(&key("a")), seen(&all)), ([None, None], [None, Some(511)]));
    let restarted = self::memories();
    assert_eq!(restarted.load(&file).unwrap(), 2);
    let seen = |key: &Key| context.map(|context| next(&restarted, key, context));
    assert_eq!(
        (seen(&key("a")), seen(&all)),
        ([None, None], [None, Some(511)]),
        "nor does the snapshot have it"
    );
    assert!(!folder.path().join("texts.new").exists());
}

#[test]
fn where_the_process_is_short_of_memory_texts_go_first() {
    let account = http::memory::Memory::new(100_000);
    let limits = Limits { bytes: 90_000, ttl: Duration::from_hours(1) };
    let memories = Memories::start(limits, &account, Arc::new(Observer::new().unwrap()), None).unwrap();
    (0..60).for_each(|n| say(&memories, key("a"), &text(n * 100)));
    settle(&memories);
    let before = account.used();
    assert!(before > 30_000);
    let _bodies = account.take(80_000);
    settle(&memories);
    settle(&memories);
    assert!(account.used() - 80_000 < before * 3 / 4, "{}", account.used());
}

#[test]
fn successors_are_learnt_for_a_tenant_and_an_epoch_and_forgotten_when_asked() {
    let memories = memories();
    let all = Key { tenant: None, ..key("") };
    let request = |tenant: Option<&str>, epoch: &str| {
        Remembering::new(&memories, &all, tenant, std::iter::empty()).recycling(&all, epoch)
    };
    let mut seen = Successors::default();
    seen.follows(7, 8);
    let finds = |tenant: Option<&str>, epoch: &str| {
        request(tenant, epoch).shared().successors.row(7).iter().next().map(|(token, _)| token)
    };
    let early = request(Some("a"), "1");
    request(None, "1").learn(&[1], &[2], Some(&seen));
    request(Some("a"), "1").learn(&[1], &[2], Some(&seen));
    settle(&memories);
    assert_eq!([finds(Some("a"), "1"), finds(Some("a"), "2")], [Some(8), None], "a new epoch starts clean");
    assert_eq!([finds(Some("b"), "1"), finds(None, "1")], [None, None]);
    let held = memories.holdings();
    assert_eq!((held.len(), held[0].1.successors, held[0].1.texts), (1, 1, 0), "no text is kept for it");
    assert!(memories.shared.observer.metrics().text().contains("foretell_remembered_successors 1"));
    assert_eq!(memories.clear(Some("a")), Some(0));
    early.learn(&[1], &[2], Some(&seen));
    settle(&memories);
    assert_eq!(
        (finds(Some("a"), "1"), memories.holdings().len()),
        (None, 0),
        "under way when it was cleared"
    );
}
