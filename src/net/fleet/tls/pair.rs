//! A certificate chain and its key in two files that are replaced while the process runs:
//! certificates expire.

use std::path::Path;
use std::sync::Arc;

use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::{TlsError, certificates, private_key, provider, unusable};
use crate::fleet::reread::Reread;

/// The pair in the files about a second before a handshake.
#[derive(Debug)]
pub(super) struct Pair(Reread<CertifiedKey>);

impl Pair {
    /// Reads both files, now and whenever one of them changes.
    ///
    /// # Errors
    /// One of them cannot be read, or the key is another certificate's.
    pub(super) fn open(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let (cert, key) = (cert.to_owned(), key.to_owned());
        Reread::open(vec![cert.clone(), key.clone()], move || read(&cert, &key)).map(Self)
    }
}

fn read(cert: &Path, key: &Path) -> Result<CertifiedKey, TlsError> {
    CertifiedKey::from_der(certificates(cert)?, private_key(key)?, &provider())
        .map_err(|error| unusable(cert, error))
}

impl ResolvesServerCert for Pair {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.value())
    }
}

impl ResolvesClientCert for Pair {
    fn resolve(&self, _: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.value()).filter(|pair| pair.key.choose_scheme(schemes).is_some())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
