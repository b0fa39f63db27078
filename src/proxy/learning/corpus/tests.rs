//! Tests of the corpus: texts are added after their requests, cleared on request, and kept over a
//! restart.

use std::io::Write;

use super::*;
use foretell_core::draft::Scope;
use foretell_core::draft::suffix::{Finder, Rules, Shape};

fn key(tenant: &str) -> Key {
    Key { model: "b/m".to_owned(), vocabulary: "v".to_owned(), tenant: Some(tenant.to_owned()) }
}

fn corpus() -> CorpusHandle {
    saved_to(None)
}

fn saved_to(snapshot: Option<PathBuf>) -> CorpusHandle {
    let limits = Limits { bytes: 1 << 20, ttl: Duration::from_hours(1) };
    let process_memory = http::memory::Memory::new(1 << 30);
    CorpusHandle::start(limits, &process_memory, Arc::new(Observer::new().unwrap()), snapshot).unwrap()
}

/// Adds the text of a request under one key.
fn say(corpus: &CorpusHandle, key: Key, text: &[TokenId]) {
    let scope = if key.tenant.is_some() { Scope::Tenant } else { Scope::Global };
    let tenant = key.tenant.clone();
    let request =
        CorpusAccess::new(corpus, &Key { tenant: None, ..key }, tenant.as_deref(), [scope].into_iter());
    request.learn(&text[..1], &text[1..]);
}

fn text(from: u32) -> Vec<TokenId> {
    (from..from + 60).collect()
}

/// The token drafted after a context.
fn next(corpus: &CorpusHandle, key: &Key, context: &[TokenId]) -> Option<TokenId> {
    let view = corpus.view(key);
    let finder = Finder::new(view.iter().map(|segment| segment.source()), context);
    finder.draft(&Rules::default(), Shape::Path).and_then(|draft| Some(draft.nodes.first()?.token))
}

/// Waits until every queued text has been indexed.
fn settle(corpus: &CorpusHandle) {
    assert_eq!(corpus.clear(Some("nobody")).unwrap(), 0);
}

#[test]
fn a_text_is_learnt_for_its_own_tenant_and_forgotten_with_it() {
    let corpus = corpus();
    say(&corpus, key("a"), &text(100));
    say(&corpus, key("b"), &text(500));
    settle(&corpus);
    assert_eq!(next(&corpus, &key("a"), &[109, 110]), Some(111));
    assert_eq!((next(&corpus, &key("b"), &[109, 110]), next(&corpus, &key("c"), &[109, 110])), (None, None));
    let held: Vec<_> =
        corpus.holdings().into_iter().map(|(key, held)| (key.tenant.unwrap(), held.texts)).collect();
    assert_eq!(held, [("a".to_owned(), 1), ("b".to_owned(), 1)]);
    let metrics = corpus.shared.observer.metrics().text();
    assert!(
        metrics.contains("foretell_corpus_texts 2") && metrics.contains("{event=\"learnt\"} 2"),
        "{metrics}"
    );
    assert_eq!(corpus.clear(Some("a")).unwrap(), 1);
    assert_eq!(
        (next(&corpus, &key("a"), &[109, 110]), next(&corpus, &key("b"), &[509, 510])),
        (None, Some(511))
    );
    assert_eq!((corpus.clear(None).unwrap(), corpus.holdings().len()), (1, 0));
}

#[test]
fn a_snapshot_is_for_its_owner_only_and_brings_everything_back() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("texts");
    let before = corpus();
    assert_eq!(before.load(&file).unwrap(), 0, "there is none yet");
    say(&before, key("a"), &text(100));
    say(&before, Key { tenant: None, ..key("") }, &text(500));
    assert_eq!(before.save(&file).unwrap(), 2);
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&file).unwrap());
    assert_eq!(mode & 0o777, 0o600);
    let after = corpus();
    assert_eq!(after.load(&file).unwrap(), 2);
    assert_eq!(next(&after, &key("a"), &[109, 110]), Some(111));
    assert_eq!(next(&after, &Key { tenant: None, ..key("") }, &[509, 510]), Some(511));
    assert_eq!(next(&after, &key("b"), &[109, 110]), None);
}

#[test]
fn only_a_regular_file_is_read_or_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let large = folder.path().join("large");
    let corpus = corpus();
    std::fs::File::create(&large).unwrap().set_len(corpus.shared.snapshot_bytes + 1).unwrap();
    say(&corpus, key("a"), &text(100));
    for path in [&fifo, folder.path(), std::path::Path::new("/dev/zero"), &large] {
        assert!(corpus.load(path).is_err(), "{}", path.display());
    }
    assert!(corpus.save(&fifo).is_err());
    assert!(corpus.save(&large).is_ok() && corpus.load(&large).is_ok());
}

#[test]
fn a_damaged_snapshot_is_refused_whole() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("texts");
    let corpus = corpus();
    say(&corpus, key("a"), &text(100));
    corpus.save(&file).unwrap();
    let whole = std::fs::read(&file).unwrap();
    corpus.clear(None).unwrap();
    for at in (0..whole.len()).step_by(7) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x15;
        std::fs::write(&file, &damaged).unwrap();
        // A changed `saved` is not detected: it only sets the age of the texts.
        if corpus.load(&file).is_ok() {
            assert!(at < whole.iter().position(|&byte| byte == b'\n').unwrap(), "byte {at}");
            corpus.clear(None).unwrap();
        }
        std::fs::write(&file, &whole[..at]).unwrap();
        assert!(corpus.load(&file).is_err(), "cut at {at}");
        assert_eq!(corpus.holdings().len(), 0);
    }
    std::fs::write(&file, "{\"version\":2,\"saved\":0,\"sha256\":\"\"}\n").unwrap();
    assert!(matches!(corpus.load(&file), Err(SnapshotError::Version { found: 2, supported: 1 })));
}

#[test]
fn cleared_texts_do_not_come_back_when_the_snapshot_cannot_be_written_anew() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("texts");
    let corpus = saved_to(Some(file.clone()));
    say(&corpus, key("a"), &text(100));
    corpus.save(&file).unwrap();
    // In the way of the new file.
    std::fs::create_dir(folder.path().join("texts.new")).unwrap();
    assert_eq!(corpus.clear(None).unwrap(), 1);
    assert!(!file.exists());
    assert_eq!(self::corpus().load(&file).unwrap(), 0);
}

#[test]
fn what_a_killed_process_left_of_a_snapshot_is_cleared_too() {
    let folder = tempfile::tempdir().unwrap();
    let left = folder.path().join("texts.new");
    std::fs::write(&left, "half").unwrap();
    let corpus = saved_to(Some(folder.path().join("texts")));
    assert_eq!(corpus.clear(None).unwrap(), 0);
    assert!(!left.exists());
}

#[test]
fn a_snapshot_that_cannot_be_removed_either_is_told() {
    // Neither it nor a file next to it can be written, even by root.
    let corpus = saved_to(Some("/proc/self/status".into()));
    say(&corpus, key("a"), &text(100));
    assert!(matches!(corpus.clear(None), Err(SnapshotError::File(_))));
    assert_eq!(corpus.holdings().len(), 0, "memory is cleared all the same");
}

#[test]
fn nothing_stays_of_a_file_that_could_not_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("texts");
    snapshot::replace(&file, b"old").unwrap();
    let full = |to: &mut io::BufWriter<std::fs::File>| {
        to.write_all(b"half")?;
        Err(io::Error::from(io::ErrorKind::StorageFull))
    };
    assert!(snapshot::replace_with(&file, full).is_err());
    assert_eq!(std::fs::read(&file).unwrap(), b"old");
    assert!(!folder.path().join("texts.new").exists());
}

#[test]
fn a_request_in_flight_during_a_clear_is_not_learnt() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("texts");
    let corpus = saved_to(Some(file.clone()));
    let scopes = || [Scope::Tenant, Scope::Global].into_iter();
    let all = Key { tenant: None, ..key("") };
    let [of_a, of_b] = ["a", "b"].map(|tenant| CorpusAccess::new(&corpus, &all, Some(tenant), scopes()));
    of_a.learn(&text(100), &[]);
    assert_eq!(corpus.save(&file).unwrap(), 2, "under both keys");
    assert_eq!(corpus.clear(Some("a")).unwrap(), 2);
    of_a.learn(&text(100), &[]);
    of_b.learn(&text(500), &[]);
    settle(&corpus);
    let context = [&[109, 110][..], &[509, 510]];
    let seen = |key: &Key| context.map(|context| next(&corpus, key, context));
    assert_eq!((seen(&key("a")), seen(&all)), ([None, None], [None, Some(511)]));
    let restarted = self::corpus();
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
fn texts_are_evicted_first_when_memory_is_short() {
    let process_memory = http::memory::Memory::new(100_000);
    let limits = Limits { bytes: 90_000, ttl: Duration::from_hours(1) };
    let corpus =
        CorpusHandle::start(limits, &process_memory, Arc::new(Observer::new().unwrap()), None).unwrap();
    (0..60).for_each(|n| say(&corpus, key("a"), &text(n * 100)));
    settle(&corpus);
    let before = process_memory.used();
    assert!(before > 30_000);
    let _bodies = process_memory.take(80_000);
    settle(&corpus);
    settle(&corpus);
    assert!(process_memory.used() - 80_000 < before * 3 / 4, "{}", process_memory.used());
}
