//! `foretell corpus`: shows, prints or removes requests recorded for training.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Exit;
use foretell_config::values;
use foretell_net::clock::unix_now;
use foretell_proxy::learning::cipher::{Cipher, KeyError};
use foretell_proxy::learning::recording::segment::{self, ReadError};
use foretell_proxy::learning::recording::{Purge, PurgeScope, Record, purge, purge_all};

/// File in a recording that names the drafters trained on it.
const DRAFTERS: &str = "drafters.json";
/// File that is locked while a process reads or changes that list.
const LOCK: &str = "drafters.lock";

/// Show, print or purge what `corpus.record` has recorded.
#[derive(clap::Args, Clone, Debug)]
pub struct CorpusArgs {
    #[command(subcommand)]
    command: CorpusCommand,
}

#[derive(clap::Subcommand, Clone, Debug)]
enum CorpusCommand {
    /// Count requests and tokens by model, vocabulary, policy and tenant
    Stats(Recording),
    /// Print the recorded requests, a JSON object a line
    Export(Recording),
    /// Remove recorded requests, and name the drafters that were trained on them
    Purge(PurgeArgs),
}

/// A recording.
#[derive(clap::Args, Clone, Debug)]
pub struct Recording {
    /// Folder of the recording (`corpus.record.dir`)
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// The key of an encrypted recording (`corpus.record.key_file`)
    #[arg(long, value_name = "F")]
    pub key_file: Option<PathBuf>,
}

#[derive(clap::Args, Clone, Debug)]
#[command(group(clap::ArgGroup::new("which").required(true).args(["all", "tenant", "older_than"])))]
struct PurgeArgs {
    #[command(flatten)]
    recording: Recording,
    /// Everything
    #[arg(long)]
    all: bool,
    /// The requests of this tenant
    #[arg(long, value_name = "T")]
    tenant: Option<String>,
    /// The requests that ended longer ago than this, such as 720h
    #[arg(long, value_name = "AGE", value_parser = values::duration_or_why)]
    older_than: Option<Duration>,
}

/// A drafter that was trained on a recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trained {
    /// Its folder.
    pub drafter: PathBuf,
    /// Time of its training, Unix seconds.
    pub at: u64,
    /// Its requests' tenants; `None` for those without one.
    pub tenants: Vec<Option<String>>,
    /// The training has not ended: the folder is that of its checkpoint.
    #[serde(default)]
    pub unfinished: bool,
}

/// Cause for which a recording cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// The key cannot be used.
    #[error("--key-file {0:?}: {1}")]
    Key(PathBuf, KeyError),
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Some segments could not be purged.
    #[error("{} files stay as they are; the first: {}", .0.len(), .0.first().map_or_else(String::new, ToString::to_string))]
    NotPurged(Vec<ReadError>),
    /// The list of drafters, or the output, cannot be read or written.
    #[error("{0}: {1}")]
    File(String, io::Error),
}

/// Runs the command; results are written to `out`.
pub fn run(args: &CorpusArgs, out: &mut dyn Write) -> Exit {
    let done = match &args.command {
        CorpusCommand::Stats(recording) => stats(recording, out),
        CorpusCommand::Export(recording) => export(recording, out),
        CorpusCommand::Purge(args) => purged(args, out),
    };
    match done {
        Ok(()) => Exit::Done,
        // A closed pipe.
        Err(RecordingError::File(_, error)) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Done,
        Err(error) => {
            super::complain(&format_args!("foretell corpus: {error}"));
            Exit::Unreachable
        }
    }
}

impl Recording {
    /// Its key, if one is named.
    fn cipher(&self) -> Result<Option<Cipher>, RecordingError> {
        let read = |path: &PathBuf| {
            Cipher::from_file(path).map_err(|error| RecordingError::Key(path.clone(), error))
        };
        self.key_file.as_ref().map(read).transpose()
    }

    /// Its records, oldest first, a segment at a time. An incomplete last record is reported and
    /// skipped.
    ///
    /// # Errors
    /// See [`RecordingError`].
    pub fn each(&self, mut take: impl FnMut(Record) -> io::Result<()>) -> Result<(), RecordingError> {
        let cipher = self.cipher()?;
        let shown = self.dir.display().to_string();
        let segments = segment::list(&self.dir).map_err(|error| RecordingError::File(shown, error))?;
        for path in segments {
            let read = match segment::read(&path, cipher.as_ref()) {
                // A sidecar that makes room, or a purge, has removed it.
                Err(_) if !path.exists() => continue,
                read => read?,
            };
            if let Some(offset) = read.cut {
                let path = path.display();
                super::complain(&format_args!(
                    "{path}: the last record, at byte {offset}, is incomplete and ignored"
                ));
            }
            for record in read.records {
                take(record).map_err(unwritten)?;
            }
        }
        Ok(())
    }

    /// The list of drafters that were trained on it, once no other process has it.
    ///
    /// # Errors
    /// Its lock cannot be taken.
    pub fn drafters(&self) -> Result<Drafters, RecordingError> {
        let path = self.dir.join(LOCK);
        let open = || File::options().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let locked = open().and_then(|lock| lock.lock().map(|()| lock));
        let lock = locked.map_err(|error| RecordingError::File(self.dir.display().to_string(), error))?;
        Ok(Drafters { path: self.dir.join(DRAFTERS), _lock: lock })
    }
}

/// The list of drafters that were trained on a recording; no other process changes it, or purges
/// the recording, before this is dropped.
pub struct Drafters {
    path: PathBuf,
    _lock: File,
}

impl Drafters {
    /// All of them.
    ///
    /// # Errors
    /// The list cannot be read.
    pub fn all(&self) -> Result<Vec<Trained>, RecordingError> {
        let failed = |error| RecordingError::File(self.path.display().to_string(), error);
        match fs::read(&self.path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| failed(error.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(failed(error)),
        }
    }

    /// Adds the tenants of a new drafter to those of the one in its folder: until the folder is
    /// replaced, either may be there.
    ///
    /// # Errors
    /// The list cannot be read or written.
    pub fn add(&self, mut trained: Trained) -> Result<(), RecordingError> {
        let earlier = self.all()?.into_iter().find(|known| known.drafter == trained.drafter);
        trained.tenants.extend(earlier.into_iter().flat_map(|known| known.tenants));
        trained.tenants.sort();
        trained.tenants.dedup();
        self.put(trained)
    }

    /// Replaces the entry of a drafter's folder.
    ///
    /// # Errors
    /// The list cannot be read or written.
    pub fn put(&self, trained: Trained) -> Result<(), RecordingError> {
        self.forget_and(&trained.drafter.clone(), Some(trained))
    }

    /// Removes a deleted folder from the list.
    ///
    /// # Errors
    /// The list cannot be read or written.
    pub fn forget(&self, folder: &Path) -> Result<(), RecordingError> {
        self.forget_and(folder, None)
    }

    fn forget_and(&self, folder: &Path, now: Option<Trained>) -> Result<(), RecordingError> {
        let mut all = self.all()?;
        all.retain(|known| known.drafter != folder);
        all.extend(now);
        let failed = |error| RecordingError::File(self.path.display().to_string(), error);
        let bytes = serde_json::to_vec_pretty(&all).map_err(|error| failed(error.into()))?;
        foretell_proxy::learning::snapshot::replace(&self.path, &bytes).map_err(failed)
    }
}

/// Sums of the requests of one kind.
#[derive(Default)]
struct Sum {
    requests: usize,
    prompt: usize,
    output: usize,
    first: Option<u64>,
    last: u64,
}

fn stats(recording: &Recording, out: &mut dyn Write) -> Result<(), RecordingError> {
    let mut sums: BTreeMap<[String; 4], Sum> = BTreeMap::new();
    recording.each(|Record { at, model, vocabulary, tenant, policy, prompt, output }| {
        let tenant = tenant.unwrap_or_else(|| "-".to_owned());
        let sum = sums.entry([model, vocabulary, policy, tenant]).or_default();
        sum.requests += 1;
        sum.prompt += prompt.len();
        sum.output += output.len();
        sum.first = sum.first.or(Some(at));
        sum.last = at;
        Ok(())
    })?;
    let mut print = || {
        for ([model, vocabulary, policy, tenant], sum) in &sums {
            let Sum { requests, prompt, output, first, last } = sum;
            let hours = last.saturating_sub(first.unwrap_or(*last)) as f64 / 3600.0;
            writeln!(
                out,
                "model {model}, policy {policy}, tenant {tenant}, vocabulary {vocabulary}: {requests} requests in {hours:.1} h, \
                 {prompt} tokens of prompts, {output} of outputs"
            )?;
        }
        if sums.is_empty() {
            writeln!(out, "no recorded requests in {}", recording.dir.display())
        } else {
            Ok(())
        }
    };
    print().map_err(unwritten)
}

fn export(recording: &Recording, out: &mut dyn Write) -> Result<(), RecordingError> {
    let mut out = io::BufWriter::new(out);
    recording.each(|record| {
        serde_json::to_writer(&mut out, &record)?;
        out.write_all(b"\n")
    })?;
    out.flush().map_err(unwritten)
}

fn purged(args: &PurgeArgs, out: &mut dyn Write) -> Result<(), RecordingError> {
    let PurgeArgs { recording, tenant, older_than, .. } = args;
    let unread = |error| RecordingError::File(recording.dir.display().to_string(), error);
    let drafters = recording.drafters()?;
    let which = match (tenant, older_than) {
        (Some(tenant), _) => Some(PurgeScope::Tenant(tenant.clone())),
        (_, Some(age)) => Some(PurgeScope::Before(unix_now().as_secs().saturating_sub(age.as_secs()))),
        _ => None,
    };
    let (line, purge) = if let Some(which) = &which {
        let purge = purge(&recording.dir, recording.cipher()?.as_ref(), which).map_err(unread)?;
        (format!("{} requests removed, {} remain", purge.gone, purge.remaining), purge)
    } else {
        // All of a recording can be removed without its key.
        let segments = segment::list(&recording.dir).map_err(unread)?.len();
        purge_all(&recording.dir).map_err(unread)?;
        (format!("everything is removed: {segments} files"), Purge::default())
    };
    let concerned = |trained: &Trained| match &which {
        None => true,
        Some(PurgeScope::Tenant(tenant)) => trained.tenants.contains(&Some(tenant.clone())),
        Some(PurgeScope::Before(_)) => purge.gone > 0,
    };
    let mut lines = vec![line];
    let named = drafters.all()?.into_iter().filter(concerned);
    lines.extend(named.map(|trained| {
        let folder = trained.drafter.display();
        if trained.unfinished {
            format!("the checkpoint of a training on such requests that did not end: {folder}")
        } else {
            format!("trained on such requests, and still in use if a policy names it: {folder}")
        }
    }));
    writeln!(out, "{}", lines.join("\n")).map_err(unwritten)?;
    if purge.failed.is_empty() { Ok(()) } else { Err(RecordingError::NotPurged(purge.failed)) }
}

fn unwritten(error: io::Error) -> RecordingError {
    RecordingError::File("output".to_owned(), error)
}
