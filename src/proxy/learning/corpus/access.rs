//! One request's view of the corpus: the texts that it reads, and the text that it adds at its end.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Contribution, CorpusHandle};
use crate::learning::recording::{Record, Recorder};
use foretell_core::draft;
use foretell_core::draft::Scope;
use foretell_core::draft::corpus::Key;
use foretell_core::units::TokenId;
use foretell_net::clock::unix_now;

/// One request's access to the corpus.
pub struct CorpusAccess {
    corpus: CorpusHandle,
    /// Key of its tenant's texts, if its policy reads those and it has a tenant; key of all
    /// tenants' texts, if its policy reads those.
    keys: [Option<Key>; 2],
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
        Self { corpus: corpus.clone(), keys, owner: tenant.map(Into::into), generation, recorded: None }
    }

    /// Has the request recorded: `record` is filled with its tokens when it ends.
    #[must_use]
    pub fn recording(self, recorder: &Recorder, record: Record) -> Self {
        Self { recorded: Some(Recorded { recorder: recorder.clone(), record }), ..self }
    }

    /// True if its lookups may read texts of other clients than its tenant.
    pub fn reads_others(&self) -> bool {
        let [_, of_all] = &self.keys;
        of_all.is_some()
    }

    /// Texts that its lookups may read.
    pub fn shared(&self) -> draft::Shared {
        let view = |key: &Option<Key>| key.as_ref().map(|key| self.corpus.view(key)).unwrap_or_default();
        let [of_tenant, of_all] = self.keys.each_ref().map(view);
        draft::Shared { of_tenant, of_all, ..draft::Shared::default() }
    }

    /// Adds the tokens of prompt and output, and records them.
    pub fn learn(&self, prompt: &[TokenId], output: &[TokenId]) {
        if let Some(Recorded { recorder, record }) = &self.recorded
            && !output.is_empty()
        {
            let (at, prompt, output) = (unix_now().as_secs(), prompt.to_vec(), output.to_vec());
            recorder.record(Record { at, prompt, output, ..record.clone() });
        }
        let keys: Vec<Key> = self.keys.iter().flatten().cloned().collect();
        if keys.is_empty() || prompt.is_empty() {
            return;
        }
        let (owner, generation) = (self.owner.clone(), self.generation);
        self.corpus.learn(Contribution { keys, owner, generation, text: [prompt, output].concat() });
    }
}
