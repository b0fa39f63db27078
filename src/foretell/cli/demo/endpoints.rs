//! Paths of a demo's models and addresses of its servers.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use super::DemoArgs;
use crate::app::local::FREE;
use crate::bench::workload::{Error, Workload};
use foretell_config::Strings;
use foretell_config::forms::{self, Address};

/// Workloads of the repository that are shown after the built-in ones, if the repository exists.
const OTHERS: [&str; 4] = ["chat", "completion", "prose", "hostile"];
/// Folder of the models in the repository.
const IN_REPOSITORY: &str = "onnx/models";
/// File that identifies a folder of models.
const SIGN: &str = "target/config.json";

/// Paths and addresses of a demo.
#[derive(Debug, PartialEq, Eq)]
pub struct DemoEndpoints {
    /// Folder of the bundled models.
    pub models: PathBuf,
    /// The target.
    pub direct: SocketAddr,
    /// Foretell.
    pub listen: SocketAddr,
    /// Its admin API.
    pub admin: SocketAddr,
}

/// Reason that a path or address is not known.
#[derive(Debug, PartialEq, Eq)]
pub enum EndpointError {
    /// Not an address to listen on.
    Address {
        /// The flag or variable.
        setting: String,
        got: String,
        allowed: String,
    },
    /// The named folder has no models.
    Named {
        /// The flag or variable.
        setting: &'static str,
        folder: PathBuf,
    },
    /// No folder has models.
    Models(Vec<PathBuf>),
}

impl fmt::Display for EndpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { setting, got, allowed } => {
                write!(f, "{setting}: not an address, allowed {allowed}, got {got:?}")
            }
            Self::Named { setting, folder } => {
                write!(f, "{setting}: no bundled models in {} (no {SIGN})", folder.display())
            }
            Self::Models(looked) => {
                write!(f, "no bundled models: give --models DIR or FORETELL_MODELS; looked for {SIGN} in")?;
                looked.iter().try_for_each(|folder| write!(f, "\n  {}", folder.display()))
            }
        }
    }
}

impl DemoEndpoints {
    /// The paths and addresses from flags, variables and defaults.
    ///
    /// # Errors
    /// The first invalid one.
    pub fn read(args: &DemoArgs, environment: &dyn Strings) -> Result<Self, EndpointError> {
        let program = std::env::current_exe().ok();
        let here = std::env::current_dir().ok();
        let models = models(args.models.as_deref(), environment, program.as_deref(), here.as_deref())?;
        let address = |flag: &Option<String>, name: &str, port: u16| {
            let variable = format!("FORETELL_{}", name.to_uppercase());
            let (setting, text) = match flag {
                Some(text) => (format!("--{name}"), Some(text.clone())),
                None => (variable.clone(), environment.get(&variable).filter(|text| !text.is_empty())),
            };
            match text {
                Some(got) => forms::parse::<Address>(&got).map_err(|refusal| EndpointError::Address {
                    setting,
                    got,
                    allowed: refusal.allowed,
                }),
                None if args.once => Ok(FREE),
                None => Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)),
            }
        };
        Ok(Self {
            direct: address(&args.direct, "direct", 8000)?,
            listen: address(&args.listen, "listen", 8080)?,
            admin: address(&args.admin, "admin", 9464)?,
            models,
        })
    }
}

/// The folder of the bundled models; `None` if they are not installed.
pub fn bundled(environment: &dyn Strings) -> Option<PathBuf> {
    let (program, here) = (std::env::current_exe().ok(), std::env::current_dir().ok());
    models(None, environment, program.as_deref(), here.as_deref()).ok()
}

/// The folder of the models: that of the flag, of the variable, of the installed program, or of the
/// repository.
fn models(
    flag: Option<&Path>,
    environment: &dyn Strings,
    program: Option<&Path>,
    here: Option<&Path>,
) -> Result<PathBuf, EndpointError> {
    let there = |folder: &Path| folder.join(SIGN).is_file();
    let variable = environment.get("FORETELL_MODELS").filter(|text| !text.is_empty()).map(PathBuf::from);
    let named = flag.map(|folder| ("--models", folder.to_owned()));
    if let Some((setting, folder)) = named.or(variable.map(|folder| ("FORETELL_MODELS", folder))) {
        return if there(&folder) { Ok(folder) } else { Err(EndpointError::Named { setting, folder }) };
    }
    let bin = program.and_then(Path::parent);
    let installed = bin
        .into_iter()
        .flat_map(|bin| [bin.join("models"), bin.parent().unwrap_or(bin).join("share/foretell/models")]);
    let above = |start: Option<&Path>| {
        start
            .into_iter()
            .flat_map(Path::ancestors)
            .map(|folder| folder.join(IN_REPOSITORY))
            .collect::<Vec<_>>()
    };
    let mut looked: Vec<PathBuf> = installed.chain(above(here)).chain(above(bin)).collect();
    let mut known = std::collections::HashSet::new();
    looked.retain(|folder| known.insert(folder.clone()));
    looked.iter().find(|folder| there(folder)).cloned().ok_or(EndpointError::Models(looked))
}

/// Workloads of the repository that contains the models; none if they are elsewhere.
///
/// # Errors
/// A workload that exists but cannot be used.
pub fn others(models: &Path) -> Result<Vec<Workload>, Error> {
    let Some(root) = models.ancestors().find(|folder| folder.join(IN_REPOSITORY) == models) else {
        return Ok(Vec::new());
    };
    let files = OTHERS.map(|name| root.join("tests/workloads").join(format!("{name}.jsonl")));
    files.iter().filter(|file| file.is_file()).map(|file| Workload::read(file)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn none() -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    /// A folder with models at this path in it.
    fn with_models(setting: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let sign = folder.path().join(setting).join(SIGN);
        std::fs::create_dir_all(sign.parent().unwrap()).unwrap();
        std::fs::write(sign, "{}").unwrap();
        folder
    }

    #[test]
    fn the_flag_wins_over_the_variable_and_that_over_found_folders() {
        let [flag, variable] = [with_models(""), with_models("")];
        let installed = with_models("share/foretell/models");
        let program = installed.path().join("bin/foretell");
        let repository = with_models(IN_REPOSITORY);
        let inside = repository.path().join("docs/deep");
        let set = BTreeMap::from([("FORETELL_MODELS".to_owned(), variable.path().display().to_string())]);
        let find = |flag: Option<&Path>, set: &BTreeMap<String, String>, program: &Path| {
            models(flag, set, Some(program), Some(&inside)).unwrap()
        };
        assert_eq!(find(Some(flag.path()), &set, &program), flag.path());
        assert_eq!(find(None, &set, &program), variable.path());
        assert_eq!(find(None, &none(), &program), installed.path().join("share/foretell/models"));
        let built = repository.path().join("target/release/foretell");
        assert_eq!(find(None, &none(), &built), repository.path().join(IN_REPOSITORY));
        let elsewhere = models(None, &none(), Some(&built), Some(Path::new("/"))).unwrap();
        assert_eq!(elsewhere, repository.path().join(IN_REPOSITORY), "by the program's own path");
    }

    #[test]
    fn missing_models_are_reported_with_every_searched_path() {
        let empty = tempfile::tempdir().unwrap();
        let named = models(Some(empty.path()), &none(), None, None).unwrap_err();
        assert!(named.to_string().starts_with("--models: no bundled models in "), "{named}");
        let program = Path::new("/opt/foretell/bin/foretell");
        let told = models(None, &none(), Some(program), Some(Path::new("/srv"))).unwrap_err().to_string();
        for setting in [
            "FORETELL_MODELS",
            "\n  /opt/foretell/bin/models",
            "\n  /opt/foretell/share/foretell/models",
            "\n  /srv/onnx/models",
            "\n  /opt/foretell/onnx/models",
        ] {
            assert!(told.contains(setting), "{setting}: {told}");
        }
        assert_eq!(told.matches("\n  /onnx/models").count(), 1, "{told}");
    }

    #[test]
    fn ports_are_stable_and_free_ones_where_it_runs_once() {
        let folder = with_models("");
        let args = DemoArgs { models: Some(folder.path().to_owned()), ..DemoArgs::default() };
        let places = DemoEndpoints::read(&args, &none()).unwrap();
        let shown = [places.direct, places.listen, places.admin].map(|setting| setting.to_string());
        assert_eq!(shown, ["127.0.0.1:8000", "127.0.0.1:8080", "127.0.0.1:9464"]);
        let set = BTreeMap::from([("FORETELL_LISTEN".to_owned(), ":7000".to_owned())]);
        let once = DemoEndpoints::read(&DemoArgs { once: true, ..args.clone() }, &set).unwrap();
        assert_eq!((once.direct, once.admin, once.listen.to_string().as_str()), (FREE, FREE, "0.0.0.0:7000"));
        let wrong = DemoArgs { admin: Some("there".to_owned()), ..args };
        let told = DemoEndpoints::read(&wrong, &none()).unwrap_err().to_string();
        assert!(told.starts_with("--admin: not an address, allowed IP:PORT"), "{told}");
    }

    #[test]
    fn the_repositorys_own_models_add_workloads() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join(IN_REPOSITORY);
        let names: Vec<String> = others(&models).unwrap().into_iter().map(|workload| workload.name).collect();
        assert_eq!(names, OTHERS);
        assert_eq!(others(with_models("").path()).unwrap().len(), 0);
    }
}
