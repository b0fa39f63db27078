//! What the admin API can ask the configuration: policies, reload, explain, replicas.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::admin::{FileError, Hooks};
use crate::config::load::load_policies;
use crate::config::problem::Problem;
use crate::config::process::Process;
use crate::config::store::PolicyStore;
use crate::config::values::Revision;
use crate::drive::drafters::Drafters;
use crate::fleet::Replica;
use crate::fleet::identity::Identities;
use crate::gateway::Shared;
use crate::observe::Observer;

/// The configuration behind the admin API.
pub struct ConfigHooks {
    process: Process,
    store: Arc<PolicyStore>,
    drafters: Arc<Drafters>,
    identities: Arc<Identities>,
    observer: Arc<Observer>,
}

impl ConfigHooks {
    /// Over the parts of a proxy that is about to start.
    pub fn new(
        process: Process,
        store: Arc<PolicyStore>,
        drafters: Arc<Drafters>,
        identities: Arc<Identities>,
        shared: &Shared,
    ) -> Self {
        let hooks = Self { process, store, drafters, identities, observer: Arc::clone(&shared.observer) };
        hooks.tell(true);
        hooks
    }

    /// Shows in the metrics which policies are in force, and whether they are those of the files.
    fn tell(&self, taken: bool) {
        let policies = self.store.current();
        let labels: Vec<String> = policies.policies().iter().map(|policy| policy.label()).collect();
        let version = Revision::of(labels.join(",").as_bytes()).to_string();
        self.observer.metrics().configured(&version, taken);
    }
}

impl Hooks for ConfigHooks {
    fn policies(&self) -> Option<Value> {
        let synchronized = self.store.synchronized();
        let policies = self.store.current();
        let entries = policies.policies().iter().map(|policy| {
            json!({
                "name": policy.name,
                "revision": policy.revision.to_string(),
                "mode": policy.mode.name(),
                "synchronized": synchronized,
            })
        });
        Some(entries.collect())
    }

    fn reload(&self) -> Option<Result<Value, Vec<FileError>>> {
        let parse = || load_policies(&self.process);
        let build = |policies: &_| {
            self.drafters.extend(&self.process, policies).map_err(|error| {
                let allowed = "a drafter that loads".to_owned();
                vec![Problem {
                    file: self.process.policies.display().to_string(),
                    line: None,
                    path: format!("drafters.{}", error.name),
                    message: "cannot be loaded".to_owned(),
                    allowed,
                    got: error.detail,
                    suggestion: None,
                }]
            })
        };
        let outcome = self.store.reload(parse, build);
        self.tell(outcome.is_ok());
        Some(match outcome {
            Ok(_) => Ok(json!({ "policies": self.policies() })),
            Err(problems) => Err(problems.iter().map(file_error).collect()),
        })
    }

    fn replica(&self, replica: &Arc<Replica>) -> Option<Value> {
        self.identities.shown(replica)
    }

    fn reprobe(&self, replica: &Arc<Replica>) -> Option<Result<Value, String>> {
        Some(
            self.identities.reprobe(replica).map(|()| json!({ "replica": replica.label(), "reprobe": true })),
        )
    }
}

fn file_error(problem: &Problem) -> FileError {
    FileError {
        file: problem.file.clone(),
        line: problem.line.map_or(0, |line| usize::try_from(line).unwrap_or(usize::MAX)),
        path: problem.path.clone(),
        message: problem.explanation(),
    }
}
