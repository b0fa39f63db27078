//! Certificates of both ends: the requirements on a backend's, and those of Foretell.
//!
//! A certificate's name is always checked; there is no setting to disable that.

mod pair;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use pair::Pair;

/// Certificates that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read as PEM.
    #[error("{path}: {error}")]
    File { path: PathBuf, error: pem::Error },
    /// A file contains no certificate.
    #[error("{path}: no certificate in it")]
    Empty { path: PathBuf },
    /// A certificate and its key, or an authority, cannot be used.
    #[error("{path}: {detail}")]
    Unusable { path: PathBuf, detail: String },
}

impl From<TlsError> for io::Error {
    fn from(error: TlsError) -> Self {
        Self::other(error)
    }
}

impl TlsError {
    /// The fault, without the name of the file.
    pub fn detail(&self) -> String {
        match self {
            Self::File { error, .. } => error.to_string(),
            Self::Empty { .. } => "no certificate in it".to_owned(),
            Self::Unusable { detail, .. } => detail.clone(),
        }
    }
}

/// TLS towards a backend: `ca` must have signed its certificate (the usual public authorities if
/// `None`); `identity` is the certificate chain and key that Foretell shows, reread when the files
/// change.
///
/// # Errors
/// A file cannot be used.
pub fn client(ca: Option<&Path>, identity: Option<(&Path, &Path)>) -> Result<Arc<ClientConfig>, TlsError> {
    let roots = match ca {
        Some(path) => authorities(path)?,
        None => webpki_roots::TLS_SERVER_ROOTS.iter().cloned().collect(),
    };
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(ca.unwrap_or(Path::new("tls")), error))?
        .with_root_certificates(roots);
    let config = match identity {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => builder.with_client_cert_resolver(Arc::new(Pair::open(cert, key)?)),
    };
    Ok(Arc::new(config))
}

/// TLS of a listener, for http/1.1 and h2, with a certificate that is reread when its files change;
/// with `client_ca`, only clients with a certificate of that authority are accepted.
///
/// # Errors
/// A file cannot be used.
pub fn server(cert: &Path, key: &Path, client_ca: Option<&Path>) -> Result<Arc<ServerConfig>, TlsError> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(cert, error))?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(authorities(path)?), provider());
            builder.with_client_cert_verifier(verifier.build().map_err(|error| unusable(path, error))?)
        }
    };
    let mut config = builder.with_cert_resolver(Arc::new(Pair::open(cert, key)?));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// TLS towards a backend without settings: created once and shared by the replicas.
pub(super) fn public() -> Result<Arc<ClientConfig>, TlsError> {
    static PUBLIC: OnceLock<Arc<ClientConfig>> = OnceLock::new();
    if let Some(config) = PUBLIC.get() {
        return Ok(Arc::clone(config));
    }
    let config = client(None, None)?;
    Ok(Arc::clone(PUBLIC.get_or_init(|| config)))
}

/// Checks that the private key in `key` is that of the certificate in `chain`, if `chain` can be
/// read.
///
/// # Errors
/// The key cannot be read, or is another certificate's.
pub fn key_of(chain: &Path, key: &Path) -> Result<(), TlsError> {
    let read = private_key(key)?;
    // A fault of the certificate is reported where the certificate is named.
    let Ok(chain) = certificates(chain) else { return Ok(()) };
    CertifiedKey::from_der(chain, read, &provider()).map(|_| ()).map_err(|error| unusable(key, error))
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn unusable(path: &Path, error: impl std::fmt::Display) -> TlsError {
    TlsError::Unusable { path: path.to_owned(), detail: error.to_string() }
}

/// The certificates in a file.
///
/// # Errors
/// It cannot be read, or contains none.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let fault = |error| TlsError::File { path: path.to_owned(), error };
    let read = CertificateDer::pem_file_iter(path).map_err(fault)?;
    let read: Vec<_> = read.collect::<Result<_, _>>().map_err(fault)?;
    if read.is_empty() { Err(TlsError::Empty { path: path.to_owned() }) } else { Ok(read) }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| TlsError::File { path: path.to_owned(), error })
}

/// The authorities in a file.
///
/// # Errors
/// It cannot be read, or contains none.
pub fn authorities(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| unusable(path, error))?;
    }
    Ok(roots)
}
