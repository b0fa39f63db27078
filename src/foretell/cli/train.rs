//! `foretell train`: makes a drafter of recorded requests.
//!
//! The trainer is a Python program (`onnx/train/traffic.py`, part of this binary) that runs in a
//! virtual environment, since there is no trainer in Rust for these models. It gets the tokens over
//! a pipe and reports in lines of JSON, so that nothing of an encrypted recording reaches the disk
//! but the drafter's weights.

mod environment;
mod folders;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use indicatif::ProgressBar;
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal as UnixSignal, SignalKind, signal};

use super::corpus::{Recording, RecordingError, Trained};
use super::demo::endpoints::bundled;
use super::{Exit, progress};
use foretell_config::trained;
use foretell_config::variables::Environment;
use foretell_net::clock::unix_now;

use environment::EnvironmentError;
use folders::TrainingFolders;
use foretell_core::units::TokenId;
use foretell_parsers::text::TextError;
use foretell_parsers::text::tokenizer::Tokenizer;
use foretell_proxy::learning::recording::Record;

/// Steps of the progress bar.
const STEPS: u64 = 1_000;

/// Train a drafter on recorded requests (`corpus.record`)
#[derive(clap::Args, Clone, Debug)]
pub struct TrainArgs {
    /// Folder of the recording
    #[arg(long, value_name = "DIR")]
    pub corpus: PathBuf,
    /// The key of an encrypted recording
    #[arg(long, value_name = "F")]
    pub key_file: Option<PathBuf>,
    /// Folder with the tokenizer.json of the target's model
    #[arg(long, value_name = "DIR")]
    pub target: PathBuf,
    /// Folder of the new drafter
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Drafter to start from, with the same tokenizer
    #[arg(long, value_name = "DIR")]
    pub base: Option<PathBuf>,
    /// Only requests of this tenant; may be repeated
    #[arg(long, value_name = "T")]
    pub tenant: Vec<String>,
    /// Only requests of this policy; may be repeated
    #[arg(long, value_name = "P")]
    pub policy: Vec<String>,
    /// Device to train on
    #[arg(long, value_name = "D", default_value = "cpu", value_parser = ["cpu", "cuda"])]
    pub device: String,
    /// Time for training, such as 30m
    #[arg(long, value_name = "T", default_value = "30m", value_parser = super::positive_duration)]
    pub budget: Duration,
    /// Python with PyTorch, onnx and onnxruntime [default: an environment, made on first use]
    #[arg(long, value_name = "F")]
    pub python: Option<PathBuf>,
}

/// Cause for which there is no drafter.
#[derive(Debug, thiserror::Error)]
enum TrainError {
    #[error(transparent)]
    Recording(#[from] RecordingError),
    #[error("--target: {0}")]
    Target(#[from] TextError),
    #[error("no recorded request has the vocabulary of {target} ({vocabulary}); there are {others}")]
    Nothing { target: String, vocabulary: String, others: String },
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    #[error("no recorded requests in {0}")]
    Empty(PathBuf),
    #[error("none of the {0} recorded requests of this vocabulary is chosen by --tenant and --policy")]
    NoneChosen(usize),
    #[error("{0} cannot be run: {1}; --python names a Python with PyTorch, onnx and onnxruntime")]
    Python(PathBuf, io::Error),
    #[error("the trainer: {0}")]
    Trainer(io::Error),
    #[error("{0}")]
    Failed(String),
    #[error("{0}: {1}")]
    File(String, io::Error),
}

/// A line of the trainer.
#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum TrainerEvent {
    Read {
        requests: u64,
        tokens: u64,
        validation: u64,
        vocabulary: u64,
        occurring: u64,
    },
    Resumed {
        share: f64,
    },
    /// There was a checkpoint of other requests.
    Discarded,
    Progress {
        share: f64,
        loss: f64,
        tokens_per_second: f64,
    },
    Validation {
        share: f64,
        mean: Lengths,
    },
    Done {
        groups: BTreeMap<String, Lengths>,
        mean: Lengths,
        parameters: u64,
        seconds: f64,
    },
    Error {
        message: String,
    },
}

/// Mean acceptance length on validation requests.
#[derive(Clone, Copy, Deserialize)]
struct Lengths {
    /// Of the drafter that training began with.
    before: Option<f64>,
    after: f64,
}

/// The texts that a drafter is trained on.
#[derive(Default)]
struct Texts {
    /// Prompt, output and policy of each request.
    requests: Vec<(Vec<TokenId>, Vec<TokenId>, String)>,
    tenants: BTreeSet<Option<String>>,
    /// Requests of other vocabularies.
    others: BTreeMap<String, usize>,
    /// Requests of this vocabulary that `--tenant` or `--policy` excludes.
    excluded: usize,
}

/// The drafter that training begins with.
struct Base {
    path: PathBuf,
    /// The tenants of the texts that it was trained on.
    tenants: Vec<Option<String>>,
}

impl Texts {
    /// The error if there are none.
    fn nothing(&self, args: &TrainArgs, target: &Path, vocabulary: String) -> TrainError {
        match (self.excluded, self.others.is_empty()) {
            (0, true) => return TrainError::Empty(args.corpus.clone()),
            (0, false) => {}
            (excluded, _) => return TrainError::NoneChosen(excluded),
        }
        let others: Vec<String> =
            self.others.iter().map(|(vocabulary, count)| format!("{count} of {vocabulary}")).collect();
        TrainError::Nothing { target: target.display().to_string(), vocabulary, others: others.join(", ") }
    }
}

/// Trains a drafter; the result is written to `out`.
pub fn run(args: &TrainArgs, out: &mut dyn Write) -> Exit {
    match train(args, out) {
        Ok(()) => Exit::Done,
        Err(error) => {
            super::complain(&format_args!("foretell train: {error}"));
            Exit::Unreachable
        }
    }
}

fn train(args: &TrainArgs, out: &mut dyn Write) -> Result<(), TrainError> {
    let target = folder(&args.target);
    let vocabulary = Tokenizer::from_file(&target.join("tokenizer.json"))?.fingerprint().to_string();
    let failed = |error| TrainError::File(args.out.display().to_string(), error);
    let folders = TrainingFolders::new(&args.out).map_err(failed)?;
    let base = base(args, &folders)?;
    let recording = Recording { dir: args.corpus.clone(), key_file: args.key_file.clone() };
    // A purge waits until the list names this training.
    let drafters = recording.drafters()?;
    let texts = read(args, &recording, &vocabulary, folders.until)?;
    if texts.requests.is_empty() {
        return Err(texts.nothing(args, &target, vocabulary));
    }
    let Texts { requests, mut tenants, .. } = texts;
    // The weights that it begins with may repeat the texts of their training.
    tenants.extend(base.iter().flat_map(|base| base.tenants.iter().cloned()));
    let tenants: Vec<Option<String>> = tenants.into_iter().collect();
    let made = |drafter: &Path, unfinished| {
        let (drafter, at) = (drafter.to_owned(), unix_now().as_secs());
        Trained { drafter, at, tenants: tenants.clone(), unfinished }
    };
    // However the training ends, a purge knows the tenants of its checkpoint, which may still be
    // that of an earlier training.
    drafters.add(made(&folders.work, true))?;
    drop(drafters);
    let environment = environment::prepare(args.python.as_deref())?;
    let trainer = Trainer::start(args, &target, &folders, base.as_ref(), &environment)?;
    let requests = trainer.train(requests, out)?;
    let done = made(&folders.out, false);
    let at = done.at;
    let drafters = recording.drafters()?;
    drafters.add(done.clone())?;
    folders.put(&trained::Origin { at, vocabulary, tenants: tenants.clone(), requests }).map_err(failed)?;
    drafters.put(done)?;
    Ok(drafters.forget(&folders.work)?)
}

/// The drafter to start from and the tenants of its texts. One that is to be replaced may be
/// absent: the same command then makes the first.
fn base(args: &TrainArgs, folders: &TrainingFolders) -> Result<Option<Base>, TrainError> {
    let Some(base) = &args.base else { return Ok(None) };
    let failed = |error| TrainError::File(base.display().to_string(), error);
    let path: PathBuf = std::path::absolute(base).map_err(failed)?.components().collect();
    if path == folders.out && !path.exists() {
        return Ok(None);
    }
    let origin = trained::read(&path).map_err(failed)?;
    let tenants = origin.map(|origin| origin.tenants).unwrap_or_default();
    Ok(Some(Base { path, tenants }))
}

/// The folder of a tokenizer, which may be named by its file.
fn folder(target: &Path) -> PathBuf {
    let file = target.is_file().then(|| target.parent()).flatten();
    file.unwrap_or(target).to_owned()
}

/// The chosen requests that ended before `until`, Unix seconds.
fn read(
    args: &TrainArgs,
    recording: &Recording,
    vocabulary: &str,
    until: u64,
) -> Result<Texts, RecordingError> {
    let mut texts = Texts::default();
    recording.each(|record| {
        let Record { at, tenant, policy, prompt, output, vocabulary: recorded, .. } = record;
        let of_tenant = args.tenant.is_empty() || tenant.as_ref().is_some_and(|it| args.tenant.contains(it));
        let of_policy = args.policy.is_empty() || args.policy.contains(&policy);
        if recorded != vocabulary {
            *texts.others.entry(recorded).or_default() += 1;
        } else if of_tenant && of_policy && at < until {
            texts.requests.push((prompt, output, policy));
            texts.tenants.insert(tenant);
        } else {
            texts.excluded += 1;
        }
        Ok(())
    })?;
    Ok(texts)
}

/// The bundled drafter, whose layers are a better start than none; `None` if it is not installed.
fn layers() -> Option<PathBuf> {
    let drafter = bundled(&Environment)?.join("draft-same");
    drafter.join("model.onnx").is_file().then_some(drafter)
}

/// SIGTERM, which is passed on to the trainer: it then saves a checkpoint and ends. In a container
/// this is the first process, which the kernel does not end by signals that it does not handle.
struct Terminations {
    runtime: Runtime,
    signals: UnixSignal,
}

impl Terminations {
    /// From here on the signal does not end this process; those that come before there is a trainer
    /// are passed on to it when it begins.
    fn caught() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let context = runtime.enter();
        let signals = signal(SignalKind::terminate())?;
        drop(context);
        Ok(Self { runtime, signals })
    }

    fn pass_on(self, trainer: Pid) {
        let Self { runtime, mut signals } = self;
        thread::spawn(move || {
            runtime.block_on(async {
                while signals.recv().await.is_some() {
                    // It may have ended meanwhile.
                    let _ended = kill_process(trainer, Signal::TERM);
                }
            });
        });
    }
}

/// The running trainer.
struct Trainer {
    child: Child,
    bar: ProgressBar,
}

impl Trainer {
    fn start(
        args: &TrainArgs,
        target: &Path,
        folders: &TrainingFolders,
        base: Option<&Base>,
        environment: &environment::Prepared,
    ) -> Result<Self, TrainError> {
        let mut command = Command::new(&environment.python);
        command.arg(&environment.script).arg("--tokenizer").arg(target);
        command.arg("--out").arg(folders.drafter()).arg("--work").arg(&folders.work);
        command.arg("--budget").arg(args.budget.as_secs_f64().to_string()).arg("--device").arg(&args.device);
        let start =
            base.map(|base| ("--base", base.path.clone())).or_else(|| Some(("--layers-of", layers()?)));
        command.args(start.into_iter().flat_map(|(flag, folder)| [flag.into(), folder.into_os_string()]));
        let failed = |error| TrainError::Python(environment.python.clone(), error);
        let terminations = Terminations::caught().map_err(failed)?;
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        terminations.pass_on(Pid::from_child(&child));
        let bar = progress::bar("of the time").with_message("starting");
        bar.set_length(STEPS);
        Ok(Self { child, bar })
    }

    /// Hands the requests over and follows the training to its end; the number of requests that it
    /// was trained on.
    fn train(
        mut self,
        requests: Vec<(Vec<TokenId>, Vec<TokenId>, String)>,
        out: &mut dyn Write,
    ) -> Result<u64, TrainError> {
        let input = self.child.stdin.take().map(BufWriter::new);
        let writer = thread::spawn(move || {
            let Some(mut input) = input else { return Ok(()) };
            for (prompt, output, group) in requests {
                let line = json!({ "prompt": prompt, "output": output, "group": group });
                serde_json::to_writer(&mut input, &line)?;
                input.write_all(b"\n")?;
            }
            input.flush()
        });
        let mut result = Ok(None);
        let lines = self.child.stdout.take().map(|stdout| BufReader::new(stdout).split(b'\n'));
        for line in lines.into_iter().flatten().map_while(Result::ok) {
            // A library may print other lines, in any encoding.
            let Ok(event) = serde_json::from_slice(&line) else { continue };
            match self.show(event, out) {
                Ok(Some(count)) if matches!(result, Ok(None)) => result = Ok(Some(count)),
                Ok(_) => {}
                Err(error) => result = Err(error),
            }
        }
        self.bar.finish_and_clear();
        let status = self.child.wait().map_err(TrainError::Trainer)?;
        let count = result?;
        // The trainer's error says more than a closed pipe.
        if !status.success() {
            return Err(TrainError::Failed(format!("the trainer ended with {status}")));
        }
        writer.join().unwrap_or(Ok(())).map_err(TrainError::Trainer)?;
        count.ok_or_else(|| TrainError::Failed("the trainer has read no requests".to_owned()))
    }

    /// Shows a line of the trainer; returns the number of requests if the line has it.
    fn show(&self, event: TrainerEvent, out: &mut dyn Write) -> Result<Option<u64>, TrainError> {
        // A closed pipe does not stop the training.
        let mut say = |line: String| self.bar.suspend(|| drop(writeln!(out, "{line}")));
        match event {
            TrainerEvent::Read { requests, tokens, validation, vocabulary, occurring } => {
                say(format!(
                    "{requests} requests, {tokens} tokens; {validation} for validation; {occurring} of {vocabulary} tokens occur"
                ));
                return Ok(Some(requests));
            }
            TrainerEvent::Resumed { share } => say(format!("goes on at {:.0} % of the time", 100.0 * share)),
            TrainerEvent::Discarded => {
                say("begins anew: the last training was one of other requests".to_owned());
            }
            TrainerEvent::Progress { share, loss, tokens_per_second } => {
                self.bar.set_position((share * STEPS as f64) as u64);
                self.bar.set_message(format!("loss {loss:.3}, {tokens_per_second:.0} tokens/s"));
            }
            TrainerEvent::Validation { share, mean } => {
                say(format!(
                    "{:3.0} %: mean acceptance length on validation requests {}",
                    100.0 * share,
                    mean.shown()
                ));
            }
            TrainerEvent::Done { groups, mean, parameters, seconds } => {
                say(format!("{parameters} parameters, trained for {seconds:.0} s"));
                for (group, lengths) in groups {
                    say(format!("policy {group}: mean acceptance length {}", lengths.shown()));
                }
                say(format!("all: mean acceptance length {}", mean.shown()));
                if mean.before.is_some_and(|before| before >= mean.after) {
                    say("no better than the drafter that it began with".to_owned());
                }
            }
            TrainerEvent::Error { message } => return Err(TrainError::Failed(message)),
        }
        Ok(None)
    }
}

impl Lengths {
    fn shown(self) -> String {
        match self.before {
            Some(before) => format!("{before:.2} -> {:.2}", self.after),
            None => format!("{:.2}", self.after),
        }
    }
}
