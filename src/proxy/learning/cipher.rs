//! Encryption of texts at rest, in recordings: AES-256-GCM with an operator's key.

use std::io;
use std::path::Path;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

use foretell_config::regular;

/// Maximum size of a key file, bytes.
const MAX_FILE: u64 = 4_096;

/// Error of reading a key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] io::Error),
    /// Its content is no key.
    #[error("it is no key of 64 hexadecimal digits")]
    Content,
}

/// Seals texts with a key, and opens them.
pub struct Cipher {
    key: LessSafeKey,
    random: SystemRandom,
}

impl Cipher {
    /// The cipher of a file with a key of 64 hexadecimal digits.
    ///
    /// # Errors
    /// The file cannot be read, or is no key.
    pub fn from_file(path: &Path) -> Result<Self, KeyError> {
        let (bytes, _) = regular::read(path, MAX_FILE)?;
        let digit = |digit: u8| char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        let pairs = bytes.trim_ascii().chunks(2).map(|pair| match pair {
            [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
            _ => None,
        });
        let key: Vec<u8> = pairs.collect::<Option<_>>().ok_or(KeyError::Content)?;
        let key = UnboundKey::new(&AES_256_GCM, &key).map_err(|_| KeyError::Content)?;
        Ok(Self { key: LessSafeKey::new(key), random: SystemRandom::new() })
    }

    /// 12 random bytes and the sealed payload. It opens only in the same `context`.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub fn seal(&self, payload: &[u8], context: &[u8]) -> io::Result<Vec<u8>> {
        let mut nonce = [0; NONCE_LEN];
        let failed = |_| io::Error::other("a text cannot be encrypted");
        self.random.fill(&mut nonce).map_err(failed)?;
        let mut sealed = payload.to_vec();
        let once = Nonce::assume_unique_for_key(nonce);
        self.key.seal_in_place_append_tag(once, Aad::from(context), &mut sealed).map_err(failed)?;
        Ok([&nonce[..], &sealed].concat())
    }

    /// The payload; `None` if it was changed, or sealed with another key or in another context.
    pub fn open(&self, body: &[u8], context: &[u8]) -> Option<Vec<u8>> {
        let (nonce, sealed) = body.split_at_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut payload = sealed.to_vec();
        let len = self.key.open_in_place(nonce, Aad::from(context), &mut payload).ok()?.len();
        payload.truncate(len);
        Some(payload)
    }
}

/// Bytes as hexadecimal digits.
pub fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
