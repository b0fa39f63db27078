//! The connection to the store, and the commands that are used: those that Redis and Valkey have
//! had for long.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisConnectionInfo};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use super::{Fault, FaultKind, Settings, millis};
use foretell_net::fleet::key::secret;

/// Maximum bytes of an answer, and about the maximum in memory of one exchange, as of a snapshot:
/// the store is not trusted. 256 sidecars with entries of 64 KiB.
const MAX_BYTES: usize = 16 << 20;
/// Maximum keys of one request: their entries, of up to 256 KiB, fill half of an answer.
const KEYS_AT_ONCE: usize = 32;

/// A connection to the store. Its task ends with it.
pub struct Link {
    connection: MultiplexedConnection,
    driver: JoinHandle<()>,
    /// Bytes that may still be read.
    remaining: Arc<AtomicUsize>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Socket for S {}

impl Link {
    /// Connects and logs in.
    pub async fn open(settings: &Settings) -> Result<Self, Fault> {
        let url = &settings.url;
        let login = login(settings)?;
        let tcp = TcpStream::connect((url.host.as_str(), url.port)).await?;
        let socket: Box<dyn Socket> = match &settings.tls {
            None => Box::new(tcp),
            Some(tls) => {
                let name = ServerName::try_from(url.host.clone()).map_err(|error| Fault::connect(&error))?;
                Box::new(TlsConnector::from(Arc::clone(tls)).connect(name, tcp).await?)
            }
        };
        let remaining = Arc::new(AtomicUsize::new(MAX_BYTES));
        let socket = LimitedSocket { socket, remaining: Arc::clone(&remaining) };
        // The exchange has a time limit.
        let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let (connection, driver) = MultiplexedConnection::new_with_config(&login, socket, config).await?;
        Ok(Self { connection, driver: tokio::spawn(driver), remaining })
    }

    /// Begins an exchange, or a request that may have as long an answer.
    pub fn begin(&mut self) {
        self.remaining.store(MAX_BYTES, Ordering::Relaxed);
    }

    /// The members of a sorted set with a score of at least `since`, the highest first, `most` of
    /// them.
    pub async fn latest(&mut self, set: &str, since: u64, most: usize) -> Result<Vec<String>, Fault> {
        let mut command = redis::cmd("ZREVRANGEBYSCORE");
        command.arg(set).arg("+inf").arg(since).arg("LIMIT").arg(0).arg(most);
        Ok(command.query_async(&mut self.connection).await?)
    }

    /// The values of these keys, in their order; `None` for a key without one, and for those behind
    /// the first 16 MiB of values.
    pub async fn values(&mut self, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>, Fault> {
        let (mut values, mut bytes) = (Vec::with_capacity(keys.len()), 0);
        for some in keys.chunks(KEYS_AT_ONCE) {
            if bytes >= MAX_BYTES {
                break;
            }
            self.begin();
            let got: Vec<Option<Vec<u8>>> =
                redis::cmd("MGET").arg(some).query_async(&mut self.connection).await?;
            if got.len() != some.len() {
                return Err(Fault::answer("another number of values"));
            }
            bytes += got.iter().flatten().map(Vec::len).sum::<usize>();
            values.extend(got);
        }
        values.resize(keys.len(), None);
        Ok(values)
    }

    /// Sets the value of a key, which expires after `ttl`.
    pub async fn put(&mut self, key: &str, value: Vec<u8>, ttl: Duration) -> Result<(), Fault> {
        let mut command = redis::cmd("SET");
        command.arg(key).arg(value).arg("PX").arg(millis(ttl));
        Ok(command.query_async(&mut self.connection).await?)
    }

    /// Removes a key, and a member of a sorted set.
    pub async fn forget(&mut self, key: &str, set: &str, member: &str) -> Result<(), Fault> {
        let mut both = redis::pipe();
        both.cmd("DEL").arg(key).ignore();
        both.cmd("ZREM").arg(set).arg(member).ignore();
        Ok(both.query_async(&mut self.connection).await?)
    }

    /// Adds a member to a sorted set, or gives it the score `now`, Unix seconds, and drops those
    /// that were last noted longer than `ttl` ago.
    pub async fn note(&mut self, set: &str, member: &str, now: u64, ttl: Duration) -> Result<(), Fault> {
        let mut both = redis::pipe();
        both.cmd("ZADD").arg(set).arg(now).arg(member).ignore();
        both.cmd("ZREMRANGEBYSCORE").arg(set).arg("-inf").arg(now.saturating_sub(ttl.as_secs())).ignore();
        Ok(both.query_async(&mut self.connection).await?)
    }
}

/// The login, with the password that the file has now.
fn login(settings: &Settings) -> Result<RedisConnectionInfo, Fault> {
    let url = &settings.url;
    let file = |path| {
        let unreadable = |error: io::Error| format!("password file: {error}");
        secret(path).map_err(|error| Fault { kind: FaultKind::Password, cause: unreadable(error) })
    };
    let password = settings.password_file.as_deref().map(file).transpose()?.or_else(|| url.password.clone());
    let mut login = RedisConnectionInfo::default().set_db(url.database).set_skip_set_lib_name();
    if let Some(user) = &url.user {
        login = login.set_username(user);
    }
    if let Some(password) = password {
        login = login.set_password(password);
    }
    Ok(login)
}

/// A connection from which at most `remaining` bytes are read.
struct LimitedSocket {
    socket: Box<dyn Socket>,
    remaining: Arc<AtomicUsize>,
}

impl AsyncRead for LimitedSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        ready!(Pin::new(&mut self.socket).poll_read(context, into))?;
        let read = into.filled().len() - before;
        let remaining = self.remaining.load(Ordering::Relaxed);
        self.remaining.store(remaining.saturating_sub(read), Ordering::Relaxed);
        if read > remaining {
            return Poll::Ready(Err(io::Error::other("the answers are too large")));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for LimitedSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_store_cannot_fill_the_memory_in_one_exchange() {
        let (socket, mut store) = tokio::io::duplex(64);
        let remaining = Arc::new(AtomicUsize::new(8));
        let mut limited = LimitedSocket { socket: Box::new(socket), remaining: Arc::clone(&remaining) };
        store.write_all(b"12345678").await.unwrap();
        let mut read = [0; 8];
        limited.read_exact(&mut read).await.unwrap();
        store.write_all(b"9").await.unwrap();
        assert!(limited.read_u8().await.is_err());
        remaining.store(8, Ordering::Relaxed);
        store.write_all(b"0").await.unwrap();
        assert_eq!(limited.read_u8().await.unwrap(), b'0');
    }
}
