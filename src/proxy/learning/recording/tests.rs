use std::os::unix::fs::PermissionsExt;

use tempfile::TempDir;

use super::segment::ReadError;
use super::*;
use foretell_observe::Observer;

fn record(tenant: Option<&str>, at: u64, output: &[TokenId]) -> Record {
    let tenant = tenant.map(ToOwned::to_owned);
    let (model, vocabulary, policy) = ("b/m".to_owned(), "v".to_owned(), "p".to_owned());
    Record { at, model, vocabulary, tenant, policy, prompt: vec![1, 2], output: output.to_vec() }
}

fn settings(folder: &TempDir) -> Settings {
    Settings { dir: folder.path().join("r"), max_bytes: 1 << 30, sample: 1.0, key_file: None }
}

fn key(folder: &TempDir, digit: char) -> PathBuf {
    let path = folder.path().join(format!("key-{digit}"));
    fs::write(&path, String::from(digit).repeat(64) + "\n").unwrap();
    path
}

/// Writes these records, in a process's life of their own.
fn write(settings: &Settings, records: &[Record]) {
    let cipher = settings.key_file.as_deref().map(|path| Cipher::from_file(path).unwrap());
    fs::create_dir_all(&settings.dir).unwrap();
    let (dir, max_bytes) = (settings.dir.clone(), settings.max_bytes);
    let mut writer = Writer { dir, max_bytes, cipher, segment: None };
    for record in records {
        writer.write(record).unwrap();
    }
}

fn read(dir: &Path, key: Option<&Path>) -> Result<Vec<Record>, ReadError> {
    let cipher = key.map(|path| Cipher::from_file(path).unwrap());
    let segments = segment::list(dir).unwrap();
    let read = segments.iter().map(|path| segment::read(path, cipher.as_ref()).map(|read| read.records));
    Ok(read.collect::<Result<Vec<_>, _>>()?.concat())
}

#[test]
fn what_is_recorded_is_read_again_and_only_the_owner_may_read_it() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(&folder);
    let observer = Arc::new(Observer::new().unwrap());
    let records = [record(None, 1, &[3]), record(Some("a"), 2, &[4, 5])];
    let recorder = Recorder::start(&settings, Arc::clone(&observer)).unwrap();
    for record in &records {
        assert!(recorder.draws());
        recorder.record(record.clone());
    }
    recorder.finish();
    let metrics = observer.metrics().text();
    assert!(metrics.contains(r#"foretell_recorded_requests_total{result="written"} 2"#), "{metrics}");
    assert_eq!(read(&settings.dir, None).unwrap(), records);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&settings.dir), 0o700);
    assert_eq!(mode(&segment::list(&settings.dir).unwrap()[0]), 0o600);
}

#[test]
fn no_request_is_one_of_an_empty_share() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { sample: 0.0, ..settings(&folder) };
    let recorder = Recorder::start(&settings, Arc::new(Observer::new().unwrap())).unwrap();
    assert!(!(0..1_000).any(|_| recorder.draws()));
    assert_eq!(
        fs::read_dir(&settings.dir).unwrap().count(),
        0,
        "nothing is written before the first request"
    );
}

#[test]
fn a_key_hides_every_byte_and_no_other_opens_it() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { key_file: Some(key(&folder, 'a')), ..settings(&folder) };
    let records = vec![record(Some("canary"), 1, &[3]), record(Some("canary"), 2, &[3])];
    write(&settings, &records);
    let path = &segment::list(&settings.dir).unwrap()[0];
    let bytes = fs::read(path).unwrap();
    assert!(!bytes.windows(6).any(|part| part == b"canary" || part == b"output"));
    let half = (bytes.len() - segment::head(true).len()) / 2;
    assert_ne!(bytes[bytes.len() - half..], bytes[bytes.len() - 2 * half..][..half], "each has its nonce");
    assert_eq!(read(&settings.dir, settings.key_file.as_deref()).unwrap(), records);
    assert!(matches!(read(&settings.dir, Some(&key(&folder, 'b'))), Err(ReadError::Damaged { .. })));
    assert!(matches!(read(&settings.dir, None), Err(ReadError::Sealed(_))));
    for wrong in ["", "ab", &"g".repeat(64), &"a".repeat(66)] {
        let path = folder.path().join("wrong");
        fs::write(&path, wrong).unwrap();
        assert!(matches!(Cipher::from_file(&path), Err(KeyError::Content)), "{wrong}");
    }
}

#[test]
fn damage_is_named_by_file_and_offset_and_a_cut_end_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    for key_file in [None, Some(key(&folder, 'a'))] {
        let dir = folder.path().join(if key_file.is_some() { "sealed" } else { "plain" });
        let settings = Settings { dir: dir.clone(), key_file: key_file.clone(), ..settings(&folder) };
        let cipher = key_file.as_deref().map(|path| Cipher::from_file(path).unwrap());
        let records = [record(None, 1, &[3; 20]), record(None, 2, &[4; 20])];
        write(&settings, &records[..1]);
        let path = segment::list(&dir).unwrap().remove(0);
        let first = fs::metadata(&path).unwrap().len() as usize;
        fs::remove_file(&path).unwrap();
        write(&settings, &records);
        let path = segment::list(&dir).unwrap().remove(0);
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&path, &bytes).unwrap();
            let starts = segment::head(key_file.is_some()).len();
            match segment::read(&path, cipher.as_ref()).unwrap_err() {
                ReadError::Foreign(_) => assert!(at < starts),
                ReadError::Damaged { file, offset, .. } => {
                    assert_eq!(file, path.display().to_string());
                    assert_eq!(offset, if at < first { starts } else { first }, "byte {at}");
                }
                other => panic!("{other}"),
            }
        }
        let head = segment::head(key_file.is_some()).len();
        for end in 0..whole.len() {
            fs::write(&path, &whole[..end]).unwrap();
            let read = segment::read(&path, cipher.as_ref()).unwrap();
            let complete = usize::from(end >= first);
            assert_eq!(read.records, records[..complete], "cut at {end}");
            let starts = if end < head { 0 } else { [head, first][complete] };
            assert_eq!(read.cut, (end > starts).then_some(starts));
        }
    }
}

#[test]
fn the_oldest_are_deleted_for_room() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { max_bytes: SEGMENTS * SEGMENT_BYTES, ..settings(&folder) };
    let records: Vec<Record> = (0..3_000).map(|at| record(None, at, &[7; 200])).collect();
    write(&settings, &records);
    let left = read(&settings.dir, None).unwrap();
    assert_eq!(left.last(), records.last());
    assert!(left.len() > 1_000 && left[0].at > 0, "{}", left.len());
    assert_eq!(left, records[records.len() - left.len()..]);
    let sizes = segment::list(&settings.dir).unwrap().into_iter().map(|path| path.metadata().unwrap().len());
    assert!(sizes.sum::<u64>() <= settings.max_bytes + SEGMENT_BYTES);
}

#[test]
fn a_purge_removes_and_recording_goes_on_in_a_new_segment() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(&folder);
    fs::create_dir_all(&settings.dir).unwrap();
    let (dir, max_bytes) = (settings.dir.clone(), settings.max_bytes);
    let mut writer = Writer { dir, max_bytes, cipher: None, segment: None };
    let records = [record(Some("a"), 1, &[3]), record(Some("b"), 2, &[4]), record(None, 3, &[5])];
    for record in &records {
        writer.write(record).unwrap();
    }
    let purged = |which: &PurgeScope| {
        let Purge { gone, remaining, failed } = purge(&settings.dir, None, which).unwrap();
        assert!(failed.is_empty(), "{failed:?}");
        (gone, remaining)
    };
    assert_eq!(purged(&PurgeScope::Tenant("a".to_owned())), (1, 2));
    writer.write(&records[0]).unwrap();
    assert_eq!(segment::list(&settings.dir).unwrap().len(), 2);
    assert_eq!(purged(&PurgeScope::Before(3)), (2, 1));
    assert_eq!(read(&settings.dir, None).unwrap(), records[2..]);
    fs::write(settings.dir.join("1.records"), "damaged").unwrap();
    fs::write(settings.dir.join("1.records.new"), "of a purge that was ended").unwrap();
    let damaged = purge(&settings.dir, None, &PurgeScope::Before(4)).unwrap();
    assert_eq!((damaged.gone, damaged.remaining, damaged.failed.len()), (1, 0, 1), "the others are purged");
    assert!(!settings.dir.join("1.records.new").exists());
    purge_all(&settings.dir).unwrap();
    drop(writer);
    assert_eq!(fs::read_dir(&settings.dir).unwrap().count(), 0);
}

#[test]
fn a_purge_leaves_no_incomplete_record_behind() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(&folder);
    write(&settings, &[record(Some("b"), 1, &[3]), record(Some("a"), 2, &[444_444])]);
    let path = segment::list(&settings.dir).unwrap().remove(0);
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() - 2]).unwrap();
    let holds = |path: &Path| String::from_utf8_lossy(&fs::read(path).unwrap()).contains("444444");
    assert!(holds(&path));
    let purged = purge(&settings.dir, None, &PurgeScope::Tenant("a".to_owned())).unwrap();
    assert_eq!((purged.gone, purged.remaining), (0, 1));
    assert!(!holds(&path));
}

#[test]
fn removing_goes_on_behind_a_file_that_cannot_be_removed_or_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let [gone, kept, last] = ["gone", "kept", "last"].map(|name| folder.path().join(name));
    fs::create_dir(&kept).unwrap();
    fs::write(&last, "").unwrap();
    assert!(remove(vec![gone.clone(), kept.clone(), last.clone()]).is_err(), "a folder is no file");
    assert!(kept.exists() && !last.exists());
    assert!(remove(vec![gone]).is_ok());
}

#[test]
fn a_folder_that_was_removed_is_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(&folder);
    let (dir, max_bytes) = (settings.dir.clone(), settings.max_bytes);
    let mut writer = Writer { dir: dir.clone(), max_bytes, cipher: None, segment: None };
    for at in 0..2 {
        writer.write(&record(None, at, &[3])).unwrap();
        assert_eq!(segment::list(&dir).unwrap().len(), 1);
        fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn a_full_disk_stops_recording_and_is_counted() {
    let full = Path::new("/dev/full");
    if !full.exists() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(&folder);
    let observer = Arc::new(Observer::new().unwrap());
    fs::create_dir_all(&settings.dir).unwrap();
    let file = OpenOptions::new().append(true).open(full).unwrap();
    let segment = Segment { path: full.to_owned(), file, len: 0 };
    let (dir, max_bytes) = (settings.dir.clone(), settings.max_bytes);
    let writer = Writer { dir, max_bytes, cipher: None, segment: Some(segment) };
    let (records, inbox) = sync_channel(WAITING);
    let shared = Shared {
        sample: 1.0,
        random: SharedSplitMix64::seeded(1),
        waiting: AtomicUsize::new(6),
        observer: Arc::clone(&observer),
    };
    for at in 0..2 {
        records.send(Note::Record(record(None, at, &[3]))).unwrap();
    }
    drop(records);
    writer.run(&inbox, &shared);
    assert!(observer.metrics().text().contains(r#"foretell_recorded_requests_total{result="failed"} 2"#));
    let fault = observer.recording_fault().unwrap();
    assert!(fault.starts_with(&settings.dir.display().to_string()) && fault.contains("space"), "{fault}");
    assert_eq!(shared.waiting.into_inner(), 0);
    assert!(full.exists(), "a device is not removed");
}
