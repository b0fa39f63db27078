//! The origin of a drafter that was trained on recorded requests: the tenants whose texts its
//! drafts may repeat.

use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use foretell_policy::{Drafter, Policy, PolicySet};

/// File of a drafter's folder that names it.
const NAME: &str = "trained.json";

/// The requests that a drafter was trained on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Time of its training, Unix seconds.
    pub at: u64,
    pub vocabulary: String,
    /// The tenants of its requests; `None` for those without one.
    pub tenants: Vec<Option<String>>,
    pub requests: u64,
}

impl Origin {
    /// True if a policy for these tenants (`None`: for all) shares no tenant's text with another
    /// by it: it was trained on texts of no tenant, or of the one that the policy is for.
    pub fn stays_with(&self, tenants: Option<&[String]>) -> bool {
        let named: Vec<&String> = self.tenants.iter().flatten().collect();
        match (named.as_slice(), tenants) {
            ([], _) => true,
            ([own], Some([only])) => *own == only && self.tenants.len() == 1,
            _ => false,
        }
    }
}

/// True if no policy that drafts with the model `name` would repeat the text of a tenant, on which
/// it was trained, to another; or if it accepts that.
pub fn stay_apart(origin: Option<&Origin>, name: &str, policies: &PolicySet) -> bool {
    let Some(origin) = origin else { return true };
    let keeps = |policy: &Policy| {
        let tenants = policy.matcher.tenants.as_deref();
        let drafts = |drafter: &Drafter| matches!(drafter, Drafter::Model { model, shares: false, .. } if model == name);
        !policy.drafters.iter().any(drafts) || origin.stays_with(tenants)
    };
    policies.policies().iter().all(|policy| keeps(policy))
}

/// Writes the origin into a drafter's folder.
///
/// # Errors
/// It cannot be written.
pub fn write(drafter: &Path, origin: &Origin) -> io::Result<()> {
    fs::write(drafter.join(NAME), serde_json::to_vec_pretty(origin)?)
}

/// The origin of a drafter; `None` for one that was not trained on recorded requests.
///
/// # Errors
/// Its file cannot be read.
pub fn read(drafter: &Path) -> io::Result<Option<Origin>> {
    match fs::read(drafter.join(NAME)) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy;

    #[test]
    fn the_texts_of_a_tenant_stay_with_it() {
        let of = |tenants: &[Option<&str>]| Origin {
            at: 1,
            vocabulary: "v".to_owned(),
            tenants: tenants.iter().map(|tenant| tenant.map(ToOwned::to_owned)).collect(),
            requests: 1,
        };
        let policy = |tenants: &[&str]| tenants.iter().map(|tenant| (*tenant).to_owned()).collect::<Vec<_>>();
        assert!(of(&[None]).stays_with(None) && of(&[None]).stays_with(Some(&policy(&["a"]))));
        assert!(of(&[Some("a")]).stays_with(Some(&policy(&["a"]))));
        for (tenants, asked) in [
            (of(&[Some("a")]), None),
            (of(&[Some("a")]), Some(policy(&["a", "b"]))),
            (of(&[Some("a")]), Some(policy(&["b"]))),
            (of(&[Some("a"), Some("b")]), Some(policy(&["a"]))),
            (of(&[None, Some("a")]), Some(policy(&["a"]))),
        ] {
            assert!(!tenants.stays_with(asked.as_deref()), "{tenants:?} {asked:?}");
        }
    }

    #[test]
    fn policies_that_share_a_text_with_another_tenant_are_found() {
        let policies = |text: &str| {
            let text = format!("version: 1\nname: p\n{text}\n");
            PolicySet::new(vec![policy::parse("p.yaml", &text).unwrap().policy])
        };
        let drafts = "drafters: [{ kind: model, model: ours }]";
        let accepts = "drafters: [{ kind: model, model: ours, i_accept_sharing: true }]";
        let origin =
            Origin { at: 1, vocabulary: "v".to_owned(), tenants: vec![Some("a".to_owned())], requests: 1 };
        let apart = |text: &str, name: &str| stay_apart(Some(&origin), name, &policies(text));
        assert!(!apart(drafts, "ours"));
        assert!(apart(drafts, "other") && apart(accepts, "ours"));
        assert!(apart(&format!("match: {{ tenants: [a] }}\n{drafts}"), "ours"));
        assert!(stay_apart(None, "ours", &policies(drafts)));
    }

    #[test]
    fn a_folder_keeps_its_origin() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()).unwrap(), None);
        let origin = Origin {
            at: 3,
            vocabulary: "v".to_owned(),
            tenants: vec![None, Some("a".to_owned())],
            requests: 7,
        };
        write(folder.path(), &origin).unwrap();
        assert_eq!(read(folder.path()).unwrap(), Some(origin));
        std::fs::write(folder.path().join(NAME), "{").unwrap();
        assert!(read(folder.path()).is_err());
    }
}
