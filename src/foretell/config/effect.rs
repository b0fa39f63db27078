//! Settings that this version accepts but that have no effect, in one table: `check` and `serve`
//! warn of each that a file sets. Once a setting has an effect, it must be removed from the table;
//! a test walks every key that a file may have, so none can be forgotten.

use std::path::Path;

use super::flags::Strings;
use super::problem::Problems;
use super::regular;
use super::variables;
use super::yaml::{self, FILE_BYTES, Node, Value};

/// A warning about a setting.
#[derive(Clone, Copy, Debug)]
struct Remark {
    /// Path of the setting; `[]` stands for any element of a list.
    path: &'static str,
    /// The values that cause the warning.
    at: At,
    /// Text of the warning, after path and value.
    says: &'static str,
}

/// The values of a setting that cause a warning.
#[derive(Clone, Copy, Debug)]
enum At {
    /// Every value except these and `null`.
    AllBut(&'static [&'static str]),
    /// `null`.
    Null,
}

const NOTHING: At = At::AllBut(&[]);

const fn ignored(path: &'static str, says: &'static str) -> Remark {
    Remark { path, at: NOTHING, says }
}

/// Settings of the process file that have no effect.
const PROCESS: &[Remark] = &[
    ignored(
        "backends[].models[].base",
        "has no effect: an adapter is routed and verified like every other model",
    ),
    ignored("backends[].budget.slots", "has no effect yet: the engine's free slots are not counted"),
];

/// Settings of a policy file that have no effect.
const POLICY: &[Remark] = &[];

/// Settings that have an effect but are not meant for production.
const CAUTIONS: &[Remark] = &[
    Remark { path: "gamma.fixed", at: NOTHING, says: "speculates at any cost: it is for tests and sweeps" },
    Remark {
        path: "accept.rule",
        at: At::AllBut(&["exact"]),
        says: "is lossy: texts may drift from the model's own, within max_drift and max_drift_rate, and each answer says what it was charged",
    },
    Remark {
        path: "accept.max_drift",
        at: At::Null,
        says: "leaves the drift of a whole output without bound: max_drift_rate allows more with every token",
    },
];

/// The kind of file that is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The process file.
    Process,
    /// A policy file.
    Policy,
}

impl Kind {
    fn remarks(self) -> impl Iterator<Item = &'static Remark> {
        let (without_effect, cautions): (_, &[Remark]) = match self {
            Self::Process => (PROCESS, &[]),
            Self::Policy => (POLICY, CAUTIONS),
        };
        without_effect.iter().chain(cautions)
    }
}

/// The warnings about a file's settings, as `FILE:LINE: PATH: TEXT`. None for an unreadable file,
/// which is reported elsewhere.
pub fn warnings(kind: Kind, file: &Path, environment: &dyn Strings) -> Vec<String> {
    let name = file.display().to_string();
    let text = match kind {
        Kind::Process => std::fs::read_to_string(file).ok(),
        Kind::Policy => {
            regular::read(file, FILE_BYTES).ok().and_then(|(bytes, _)| String::from_utf8(bytes).ok())
        }
    };
    let Some(mut root) = text.and_then(|text| yaml::parse(&name, &text).ok()) else { return Vec::new() };
    if kind == Kind::Process {
        variables::substitute(&mut root, environment, &Problems::new(&name));
    }
    remarks(kind, &name, &root)
}

fn remarks(kind: Kind, file: &str, root: &Node) -> Vec<String> {
    let mut found = Vec::new();
    each(root, root.line, &SettingPath::default(), &mut |position, line, node| {
        let got = node.shown();
        let got = got.trim_matches('"');
        let remark = kind.remarks().find(|remark| remark.path == position.pattern && remark.at.holds(got));
        if let Some(Remark { says, .. }) = remark {
            let value = if matches!(node.value, Value::Map(_) | Value::List(_)) { "" } else { got };
            let gap = if value.is_empty() { "" } else { " " };
            found.push(format!("{file}:{line}: {}: {value}{gap}{says}", position.shown));
        }
    });
    found
}

impl At {
    fn holds(self, got: &str) -> bool {
        match self {
            Self::AllBut(these) => !these.contains(&got) && got != "null",
            Self::Null => got == "null",
        }
    }
}

/// Path of a setting: as the tables write it (`[]`) and as users see it (`[0]`).
#[derive(Clone, Default)]
struct SettingPath {
    pattern: String,
    shown: String,
}

impl SettingPath {
    fn key(&self, name: &str) -> Self {
        let join = |path: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        Self { pattern: join(&self.pattern), shown: join(&self.shown) }
    }

    fn element(&self, index: usize) -> Self {
        Self { pattern: format!("{}[]", self.pattern), shown: format!("{}[{index}]", self.shown) }
    }
}

/// Calls `show` for every setting of a document, with its path and line.
fn each(node: &Node, line: u64, position: &SettingPath, show: &mut impl FnMut(&SettingPath, u64, &Node)) {
    show(position, line, node);
    match &node.value {
        Value::Map(entries) => {
            for (key, node) in entries {
                each(node, key.line, &position.key(&key.name), show);
            }
        }
        Value::List(nodes) => {
            for (index, node) in nodes.iter().enumerate() {
                each(node, node.line, &position.element(index), show);
            }
        }
        Value::Null | Value::Bool(_) | Value::Whole(_) | Value::Number(_) | Value::Text(_) => {}
    }
}

#[cfg(test)]
mod tests;
