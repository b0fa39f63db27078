//! Detects changes of the configuration files by polling them.
//!
//! A poll reads the files' metadata (size, times, inode), which costs microseconds; every few
//! seconds the caller reads the files themselves, for a file system without reliable metadata, and
//! compares their content with the last one. Unlike a subscription to the kernel's events this
//! detects every way in which files change: written in place, renamed over, swapped by a symbolic
//! link one or two folders up (a Kubernetes `ConfigMap`), mounted over a network; and it needs no
//! watch that a machine may run out of.
//!
//! A file that is being written is ignored until it has stayed the same for one poll.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use super::load::policy_files;
use super::process::Process;

/// Time between two polls. A change is seen by the first, and reported by the second that finds no
/// newer one.
pub const EVERY: Duration = Duration::from_millis(250);
/// Number of polls after which the files themselves are read, and refused ones are tried again.
pub const READ_EVERY: u32 = 20;

/// The metadata of the files at the last poll.
#[derive(Debug)]
pub struct Watch {
    process: Process,
    signature: u64,
    /// True if the files have changed, and were not yet the same for two polls.
    unsettled: bool,
    looks: u32,
}

impl Watch {
    /// Watches the policy files and the config file. Earlier edits count as a change.
    pub fn new(process: Process) -> Self {
        Self { process, signature: 0, unsettled: true, looks: 0 }
    }

    /// Polls once; blocks for as long as the file system takes. Returns true if the files are to be
    /// read: their content may differ from that at the last true.
    pub fn changed(&mut self) -> bool {
        let signature = self.says();
        self.looks = self.looks.wrapping_add(1);
        if std::mem::replace(&mut self.signature, signature) != signature {
            self.unsettled = true;
            return false;
        }
        std::mem::take(&mut self.unsettled) || self.looks.is_multiple_of(READ_EVERY)
    }

    fn files(&self) -> Vec<PathBuf> {
        let own = self.process.file.iter().map(|file| file.path.clone());
        policy_files(&self.process.policies).unwrap_or_default().into_iter().chain(own).collect()
    }

    fn says(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for path in self.files() {
            let said = std::fs::metadata(&path).ok();
            let said = said.map(|said| {
                (said.len(), said.ino(), said.dev(), said.mtime_nsec(), said.ctime_nsec(), said.ctime())
            });
            (path, said).hash(&mut hasher);
        }
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn policy(gamma: u32) -> String {
        format!("version: 1\nname: a\ngamma: {{ max: {gamma} }}\n")
    }

    /// A watch that has seen the existing files.
    fn watch(dir: &Path) -> Watch {
        let mut watch = Watch::new(Process { policies: dir.to_owned(), ..Process::default() });
        assert!(sees(&mut watch), "what was edited before");
        watch
    }

    /// Polls until nothing is unsettled; true if a change was seen.
    fn sees(watch: &mut Watch) -> bool {
        (0..3).filter(|_| watch.changed()).count() == 1
    }

    #[test]
    fn every_way_to_change_a_file_is_seen_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.yaml");
        std::fs::write(&file, policy(1)).unwrap();
        let mut watch = watch(dir.path());
        assert!(!sees(&mut watch));
        std::fs::write(&file, policy(2)).unwrap();
        assert!(sees(&mut watch) && !sees(&mut watch), "written in place");
        std::fs::write(dir.path().join(".a.yaml.tmp"), policy(3)).unwrap();
        assert!(!sees(&mut watch), "an editor's own file");
        std::fs::rename(dir.path().join(".a.yaml.tmp"), &file).unwrap();
        assert!(sees(&mut watch), "renamed over");
        std::fs::remove_file(&file).unwrap();
        assert!(sees(&mut watch), "gone");
    }

    #[test]
    fn a_swapped_link_two_folders_up_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for (name, gamma) in [("..1", 1), ("..2", 2)] {
            std::fs::create_dir(at(name)).unwrap();
            std::fs::write(at(name).join("a.yaml"), policy(gamma)).unwrap();
        }
        std::os::unix::fs::symlink("..1", at("..data")).unwrap();
        std::os::unix::fs::symlink("..data/a.yaml", at("a.yaml")).unwrap();
        let mut watch = watch(dir.path());
        std::os::unix::fs::symlink("..2", at("..data_tmp")).unwrap();
        std::fs::rename(at("..data_tmp"), at("..data")).unwrap();
        assert!(sees(&mut watch));
    }

    #[test]
    fn a_file_that_is_being_written_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.yaml");
        let mut watch = watch(dir.path());
        let whole = policy(4);
        for end in 1..whole.len() {
            std::fs::write(&file, &whole[..end]).unwrap();
            assert!(!watch.changed(), "{end}");
        }
        assert!(watch.changed());
    }
}
