//! One request's view of the corpus: the texts that it reads, and what it leaves when it ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Contribution, CorpusHandle, Epoch};
use crate::clock::unix_now;
use crate::learning::recording::{Record, Recorder};
use foretell_core::draft;
use foretell_core::draft::corpus::Key;
use foretell_core::draft::{Scope, Successors};
use foretell_core::units::TokenId;

/// One request's access to the corpus.
pub struct CorpusAccess {
    corpus: CorpusHandle,
    /// Key of its tenant's texts, if its policy reads those and it has a tenant; key of all
    /// tenants' texts, if its policy reads those.
    keys: [Option<Key>; 2],
    /// Key and epoch of its successors, if its policy uses them and it has a tenant.
    epoch: Option<Epoch>,
    owner: Option<Arc<str>>,
    /// Number of clears when it began.
    generation: u64,
    /// Its recording, if it is recorded.
    recorded: Option<Recorded>,
}

/// Where and how a request is recorded.
struct Recorded {
    recorder: Recorder,
    /// Its record, without tokens.
    record: Record,
}

impl CorpusAccess {
    /// Access to the texts of these scopes, which the request reads and is added to. Without a
    /// trusted tenant, the scope `tenant` covers the request alone.
    pub fn new(
        corpus: &CorpusHandle,
        key: &Key,
        tenant: Option<&str>,
        scopes: impl Iterator<Item = Scope>,
    ) -> Self {
        let mut keys = [None, None];
        for scope in scopes {
            match scope {
                Scope::Request => {}
                Scope::Tenant => {
                    keys[0] = tenant.map(|tenant| Key { tenant: Some(tenant.to_owned()), ..key.clone() });
                }
                Scope::Global => keys[1] = Some(key.clone()),
            }
        }
        let generation = corpus.shared.generation.load(Ordering::SeqCst);
        Self {
            corpus: corpus.clone(),
            keys,
            epoch: None,
            owner: tenant.map(Into::into),
            generation,
            recorded: None,
        }
    }

    /// Has the request recorded: `record` is filled with its tokens when it ends.
    #[must_use]
    pub fn recording(self, recorder: &Recorder, record: Record) -> Self {
        Self { recorded: Some(Recorded { recorder: recorder.clone(), record }), ..self }
    }

    /// Adds access to the successors of its tenant in this epoch of its engine; requests without a
    /// tenant have none.
    #[must_use]
    pub fn recycling(self, key: &Key, epoch: &str) -> Self {
        let tenant = self.owner.as_deref().map(ToOwned::to_owned);
        let epoch = tenant.map(|tenant| (Key { tenant: Some(tenant), ..key.clone() }, epoch.into()));
        Self { epoch, ..self }
    }

    /// True if its lookups may read texts of other clients than its tenant.
    pub fn reads_others(&self) -> bool {
        let [_, of_all] = &self.keys;
        of_all.is_some()
    }

    /// Texts and successors that its lookups may read.
    pub fn shared(&self) -> draft::Shared {
        let view = |key: &Option<Key>| key.as_ref().map(|key| self.corpus.view(key)).unwrap_or_default();
        let [of_tenant, of_all] = self.keys.each_ref().map(view);
        let successors = self.epoch.as_ref().map(|epoch| self.corpus.successors(epoch)).unwrap_or_default();
        draft::Shared { of_tenant, of_all, successors, ..draft::Shared::default() }
    }

    /// Adds the tokens of prompt and output, and the successors that the request has seen; records
    /// the tokens.
    pub fn learn(&self, prompt: &[TokenId], output: &[TokenId], seen: Option<&Successors>) {
        if let Some(Recorded { recorder, record }) = self.recorded.as_ref().filter(|_| !output.is_empty()) {
            let (at, prompt, output) = (unix_now().as_secs(), prompt.to_vec(), output.to_vec());
            recorder.record(Record { at, prompt, output, ..record.clone() });
        }
        let keys: Vec<Key> = self.keys.iter().flatten().filter(|_| !prompt.is_empty()).cloned().collect();
        let text = if keys.is_empty() { Vec::new() } else { [prompt, output].concat() };
        let seen = self.epoch.clone().zip(seen.filter(|seen| seen.tokens() > 0).cloned());
        if !keys.is_empty() || seen.is_some() {
            let owner = self.owner.clone();
            let generation = self.generation;
            self.corpus.learn(Contribution { keys, owner, generation, text, seen });
        }
    }
}
