//! Settings of the config file that have been edited since it was read.

use std::collections::BTreeMap;

use super::check::is_reserved;
use super::problem::{Problem, Refusal};
use super::yaml::{self, Node, Value};

/// Settings that take effect while the process runs.
const LIVE: [&str; 1] = ["mode"];

/// One problem for each setting that differs between two texts of a config file and that only a
/// restart can change. A removed setting has no line.
///
/// # Errors
/// The new text is not YAML.
pub fn refused(file: &str, running: &str, edited: &str) -> Result<Vec<Problem>, Vec<Problem>> {
    let before = leaves(&yaml::parse(file, running)?);
    let after = leaves(&yaml::parse(file, edited)?);
    let paths: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let shown = |leaf: Option<&Node>, without: &str| leaf.map_or(without.to_owned(), Node::got);
    let value =
        |leaves: &BTreeMap<String, Node>, path: &String| leaves.get(path).map(|leaf| leaf.value.clone());
    let differs = |path: &&String| value(&before, path) != value(&after, path);
    let matters = |path: &&String| !LIVE.contains(&path.as_str()) && !is_reserved(path);
    let found = paths.into_iter().filter(differs).filter(matters);
    let mut problems: Vec<Problem> = found
        .map(|path| {
            let (was, is) = (before.get(path), after.get(path));
            let refusal = Refusal::new(
                "cannot change while the process runs",
                format!("{} until a restart", shown(was, "the default")),
            );
            let line = is.map(|leaf| leaf.line).filter(|&line| line > 0);
            Problem::new(file, line, path, refusal, shown(is, "nothing"))
        })
        .collect();
    problems.sort_by_key(|problem| problem.line);
    Ok(problems)
}

/// Every value other than a list or map, by its path.
fn leaves(root: &Node) -> BTreeMap<String, Node> {
    let mut leaves = BTreeMap::new();
    gather(root, String::new(), &mut leaves);
    leaves
}

fn gather(node: &Node, path: String, leaves: &mut BTreeMap<String, Node>) {
    match &node.value {
        Value::Map(members) => {
            for (key, member) in members {
                let path = if path.is_empty() { key.name.clone() } else { format!("{path}.{}", key.name) };
                gather(member, path, leaves);
            }
        }
        Value::List(items) => {
            for (index, item) in items.iter().enumerate() {
                gather(item, format!("{path}[{index}]"), leaves);
            }
        }
        _ => {
            leaves.insert(path, node.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_that_need_a_restart_are_listed_with_their_line() {
        let running = "version: 1\nmode: auto\nlimits: { sessions: 10 }\nbackends: [{ name: a }]\n";
        let edited = "version: 1\n# a remark\nmode: off\nlimits:\n  sessions: 20\n  uri: 4KiB\nbackends: [{ name: a }]\n";
        let found = refused("f.yaml", running, edited).unwrap();
        let shown: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "f.yaml:5: limits.sessions: cannot change while the process runs, allowed 10 until a restart, got 20",
                "f.yaml:6: limits.uri: cannot change while the process runs, allowed the default until a restart, got \"4KiB\"",
            ]
        );
        assert_eq!(refused("f.yaml", running, running).unwrap(), []);
        assert!(refused("f.yaml", running, "a: [").is_err());
    }
}
