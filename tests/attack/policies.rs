//! An unreadable policy is an error and is never silently left out.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use crate::kit::{Backend, Proxy, Start, ask, eventually, post};
use crate::ops_kit::{foretell, write};

const GOOD: &str = "version: 1\nname: a\n";

fn policy(name: &str) -> String {
    format!("version: 1\nname: {name}\n")
}

/// Creates something at a path that is not a readable file.
type Spoil = fn(&Path);

/// Every kind of directory entry that is named like a policy and cannot be read as one.
fn spoilt() -> Vec<(&'static str, Spoil)> {
    let mut all: Vec<(&'static str, Spoil)> = vec![
        ("a dangling link", |path| symlink("nowhere.yaml", path).unwrap()),
        ("a loop of links", |path| symlink(path.file_name().unwrap(), path).unwrap()),
        ("a FIFO", |path| {
            assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
        }),
        ("a link to a device", |path| symlink("/dev/zero", path).unwrap()),
        ("a folder", |path| std::fs::create_dir(path).unwrap()),
        ("a socket", |path| drop(std::os::unix::net::UnixListener::bind(path).unwrap())),
        ("a large file", |path| std::fs::File::create(path).unwrap().set_len(11 << 20).unwrap()),
        ("no text", |path| std::fs::write(path, [0xff, 0xfe, 0]).unwrap()),
    ];
    // File permissions do not restrict root.
    let probe = tempfile::NamedTempFile::new().unwrap();
    std::fs::set_permissions(probe.path(), PermissionsExt::from_mode(0o0)).unwrap();
    if std::fs::File::open(probe.path()).is_err() {
        all.push(("no permission", |path| {
            std::fs::write(path, policy("b")).unwrap();
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o0)).unwrap();
        }));
    }
    all
}

fn remove(path: &Path) {
    std::fs::remove_file(path).or_else(|_| std::fs::remove_dir(path)).unwrap();
}

#[test]
fn check_and_serve_refuse_a_policy_that_cannot_be_read() {
    for (what, spoil) in spoilt() {
        for name in ["b.yaml", "b.yml"] {
            let folder = tempfile::tempdir().unwrap();
            let process = "version: 1\nbackends: [{ name: b, replicas: [\"http://127.0.0.1:1\"] }]\n\
                listen: [{ address: \"127.0.0.1:0\" }]\nadmin: { address: \"127.0.0.1:0\" }\n";
            write(folder.path(), &[("foretell.yaml", process), ("policies/a.yaml", GOOD)]);
            spoil(&folder.path().join("policies").join(name));
            for command in ["check", "serve"] {
                let told = foretell(folder.path(), &[command, "--config", "foretell.yaml"]);
                assert_eq!(told.code, Some(64), "{command}, {what}: {told:?}");
                assert!(told.all().contains(&format!("policies/{name}: ")), "{command}, {what}: {told:?}");
            }
        }
    }
}

fn synchronized(proxy: &Proxy) -> f64 {
    proxy.metric("foretell_config_synchronized")
}

fn policies(proxy: &Proxy) -> Vec<String> {
    let shown = proxy.admin_get("/api/policies").json();
    let names = shown["policies"].as_array().unwrap().iter();
    names.map(|policy| policy["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_reload_that_meets_one_keeps_what_is_in_force() {
    let backend = Backend::plain();
    let mut start = Start::before(backend.address);
    start.policies = vec![("a.yaml", policy("a")), ("b.yaml", policy("b"))];
    let proxy = start.start();
    let file = proxy.folder.path().join("policies/b.yaml");
    for (what, spoil) in spoilt() {
        std::fs::remove_file(&file).unwrap();
        spoil(&file);
        let answer = proxy.admin_post("/api/reload", "");
        let told = answer.json();
        assert_eq!(answer.status(), 422, "{what}: {told}");
        let named = told["errors"][0]["file"].as_str().unwrap_or_default();
        assert!(named.ends_with("b.yaml"), "{what}: {told}");
        assert!(synchronized(&proxy) < 1.0, "{what}");
        assert_eq!(policies(&proxy), ["a", "b"], "{what}");
        assert_eq!(ask(proxy.address, post("/v1/files", "", "{}")).status(), 200, "{what}: it still serves");
        remove(&file);
        std::fs::write(&file, policy("b")).unwrap();
        eventually("all is well again", || {
            (proxy.admin_post("/api/reload", "").status() == 200 && synchronized(&proxy) >= 1.0).then_some(())
        });
    }
}

/// Too many policies are an error that names the limit, instead of a slow proxy.
#[test]
fn there_is_a_limit_to_policies() {
    let folder = tempfile::tempdir().unwrap();
    let process = "version: 1\nbackends: [{ name: b, replicas: [\"http://127.0.0.1:1\"] }]\n";
    write(folder.path(), &[("foretell.yaml", process), ("policies/0000.yaml", &policy("p0"))]);
    let add = |n: usize, text: &str| {
        std::fs::write(folder.path().join(format!("policies/{n:04}.yaml")), text).unwrap();
    };
    (1..1000).for_each(|n| add(n, &policy(&format!("p{n}"))));
    let check = || foretell(folder.path(), &["check", "--config", "foretell.yaml"]);
    let told = check();
    assert_eq!(told.code, Some(0), "{told:?}");
    add(1000, &policy("p1000"));
    let told = check();
    assert_eq!(told.code, Some(64), "{told:?}");
    assert!(told.all().contains("at most 1000") && told.all().contains("1001"), "{told:?}");
    (1..=1000)
        .for_each(|n| std::fs::remove_file(folder.path().join(format!("policies/{n:04}.yaml"))).unwrap());
    let long = format!("# {}\n", "x".repeat(6 << 20));
    (1..=2).for_each(|n| add(n, &format!("{}{long}", policy(&format!("p{n}")))));
    let told = check();
    assert_eq!(told.code, Some(64), "{:?}", told.code);
    assert!(told.all().contains("at most 10MiB"), "{:?}", told.code);
}
