//! A certificate chain and its key in two files that are replaced while the process runs:
//! certificates expire.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::time::Instant;

use super::{TlsError, certificates, private_key, provider, unusable};

/// Minimum time between two checks of the files.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Identifies one content of the two files.
type Stamp = [Option<(SystemTime, u64)>; 2];

/// The pair that the files held at most a second before the last handshake.
#[derive(Debug)]
pub(super) struct Pair {
    cert: PathBuf,
    key: PathBuf,
    kept: Mutex<Kept>,
}

#[derive(Debug)]
struct Kept {
    pair: Arc<CertifiedKey>,
    stamp: Stamp,
    looked: Instant,
}

impl Pair {
    /// Reads both files.
    ///
    /// # Errors
    /// One of them cannot be read, or the key is another certificate's.
    pub(super) fn open(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let stamp = stamp(cert, key);
        let pair = Arc::new(read(cert, key)?);
        let kept = Mutex::new(Kept { pair, stamp, looked: Instant::now() });
        Ok(Self { cert: cert.to_owned(), key: key.to_owned(), kept })
    }

    /// The pair for a handshake. Files that cannot be used, such as a certificate whose key is not
    /// there yet, change nothing until they change again.
    fn present(&self) -> Arc<CertifiedKey> {
        let mut kept = self.kept.lock();
        if kept.looked.elapsed() >= LOOK_EVERY {
            kept.looked = Instant::now();
            self.look(&mut kept);
        }
        Arc::clone(&kept.pair)
    }

    fn look(&self, kept: &mut Kept) {
        let stamp = stamp(&self.cert, &self.key);
        if stamp == kept.stamp {
            return;
        }
        kept.stamp = stamp;
        match read(&self.cert, &self.key) {
            Ok(pair) => {
                tracing::info!(path = %self.cert.display(), "certificate reloaded");
                kept.pair = Arc::new(pair);
            }
            Err(error) => {
                tracing::warn!(%error, "the certificate cannot be reloaded, the last one stays in use");
            }
        }
    }
}

fn read(cert: &Path, key: &Path) -> Result<CertifiedKey, TlsError> {
    CertifiedKey::from_der(certificates(cert)?, private_key(key)?, &provider())
        .map_err(|error| unusable(cert, error))
}

fn stamp(cert: &Path, key: &Path) -> Stamp {
    let one = |path| fs::metadata(path).ok().and_then(|found| Some((found.modified().ok()?, found.len())));
    [one(cert), one(key)]
}

impl ResolvesServerCert for Pair {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.present())
    }
}

impl ResolvesClientCert for Pair {
    fn resolve(&self, _: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.present()).filter(|pair| pair.key.choose_scheme(schemes).is_some())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
