//! Access of a command to a server: API key, header fields and certificate authority.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, HeaderValue};
use rustls::ClientConfig;

use foretell_net::fleet::{KeyFile, ReplicaSettings, tls};

/// The arguments of every command that sends requests to a server.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Access {
    /// File with the API key of the server, sent as `Authorization: Bearer`
    #[arg(long, value_name = "F")]
    pub api_key_file: Option<PathBuf>,
    /// A header field of every request, as `NAME: VALUE`; may be given several times
    #[arg(long = "header", value_name = "H")]
    pub headers: Vec<String>,
    /// Authority of the server's certificate, PEM, instead of the usual public ones
    #[arg(long, value_name = "F")]
    pub ca: Option<PathBuf>,
}

/// The arguments, read and checked.
#[derive(Clone, Debug, Default)]
pub struct Granted {
    /// Header fields for every request, the API key included.
    pub fields: HeaderMap,
    /// TLS settings; `None`: the usual public authorities.
    pub tls: Option<Arc<ClientConfig>>,
}

/// An argument that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Denied {
    /// The file cannot be read or is empty.
    #[error("--{flag}: {path}: {detail}", path = path.display())]
    File { flag: &'static str, path: PathBuf, detail: String },
    /// Not a valid header field; the text describes the fault, without the value.
    #[error("--header: not a header field, allowed NAME: VALUE, got {0}")]
    Header(String),
}

impl Access {
    /// Reads the files and parses the fields.
    ///
    /// # Errors
    /// The first argument that cannot be used.
    pub fn granted(&self) -> Result<Granted, Denied> {
        let file = |flag, path: &Path, detail: &dyn fmt::Display| Denied::File {
            flag,
            path: path.to_owned(),
            detail: detail.to_string(),
        };
        let mut fields = fields(&self.headers)?;
        if let Some(path) = &self.api_key_file {
            let key = KeyFile::open(path).map_err(|error| file("api-key-file", path, &error))?;
            fields.insert(AUTHORIZATION, key.value());
        }
        let tls = self.ca.as_ref().map(|path| {
            let authority = tls::client(Some(path), None);
            authority.map_err(|error| file("ca", path, &error.detail()))
        });
        Ok(Granted { fields, tls: tls.transpose()? })
    }
}

impl Granted {
    /// Settings of a replica at `url` with this access.
    #[must_use]
    pub fn settings(&self, name: &str, url: &str) -> ReplicaSettings {
        ReplicaSettings {
            internal_fields: self.fields.clone(),
            tls: self.tls.clone(),
            ..ReplicaSettings::new(name, url)
        }
    }
}

/// The header fields of these lines.
///
/// # Errors
/// The first line that is no header field.
pub(super) fn fields(lines: &[String]) -> Result<HeaderMap, Denied> {
    let mut fields = HeaderMap::new();
    for line in lines {
        let (name, value) = field(line)?;
        fields.append(name, value);
    }
    Ok(fields)
}

/// Parses `NAME: VALUE`. An error never shows the value, which may be a secret.
fn field(text: &str) -> Result<(HeaderName, HeaderValue), Denied> {
    let (name, value) = text.split_once(':').ok_or_else(|| Denied::Header("no colon".to_owned()))?;
    let denied = || Denied::Header(format!("{name:?} and a value"));
    let name = HeaderName::from_bytes(name.trim().as_bytes()).map_err(|_| denied())?;
    let mut value = HeaderValue::from_str(value.trim()).map_err(|_| denied())?;
    value.set_sensitive(true);
    Ok((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_and_a_key_file_wins_over_a_field_of_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let key = folder.path().join("key");
        std::fs::write(&key, "k\n").unwrap();
        let headers =
            ["X-Team:  ops ", "authorization: Bearer other", "x-team: dev"].map(str::to_owned).to_vec();
        let access = Access { api_key_file: Some(key.clone()), headers, ca: None };
        let fields = access.granted().unwrap().fields;
        assert_eq!(fields.get_all("x-team").iter().collect::<Vec<_>>(), ["ops", "dev"]);
        assert_eq!(fields.get_all(AUTHORIZATION).iter().collect::<Vec<_>>(), ["Bearer k"]);
        std::fs::write(&key, " \n").unwrap();
        let denied = access.granted().unwrap_err().to_string();
        assert!(
            denied.starts_with("--api-key-file: ") && denied.ends_with("key: the file is empty"),
            "{denied}"
        );
    }

    #[test]
    fn an_invalid_field_is_refused_without_showing_its_value() {
        for wrong in ["none", "bad name: secret", "x: a\u{7}secret", ": secret"] {
            let access = Access { headers: vec![wrong.to_owned()], ..Access::default() };
            let denied = access.granted().unwrap_err().to_string();
            assert!(!denied.contains("secret"), "{denied}");
        }
    }
}
