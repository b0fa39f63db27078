//! The backend of the comparison. It does as little as possible, so that mostly the proxies are
//! measured. A `POST` with the header `x-events` is answered with a stream of events that carry the
//! time at which they were written, any other request with one kilobyte.

use std::io;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::MissedTickBehavior;

use super::RelayError;

/// Nanoseconds since the first call in this process.
pub fn now() -> u64 {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Starts the backend on a thread of its own; returns its address.
pub(super) fn start(event_bytes: usize) -> Result<SocketAddr, RelayError> {
    let fails = || RelayError::io("backend");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(fails())?;
    listener.set_nonblocking(true).map_err(fails())?;
    let address = listener.local_addr().map_err(fails())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(fails())?;
    let serve = async move {
        let listener = TcpListener::from_std(listener)?;
        loop {
            let (stream, _) = listener.accept().await?;
            tokio::spawn(self::serve(stream, event_bytes));
        }
    };
    let serve = async move {
        let ended: io::Result<()> = serve.await;
        tracing::error!(?ended, "the backend stopped");
    };
    let thread = std::thread::Builder::new().name("backend".to_owned());
    thread.spawn(move || runtime.block_on(serve)).map_err(fails())?;
    Ok(address)
}

async fn serve(mut stream: TcpStream, event_bytes: usize) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let answer = [
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1024\r\n\r\n".to_vec(),
        vec![b'a'; 1024],
    ]
    .concat();
    let mut seen = Vec::with_capacity(8192);
    loop {
        let Some((head, length)) = head(&seen) else {
            if stream.read_buf(&mut seen).await? == 0 {
                return Ok(());
            }
            continue;
        };
        while seen.len() < head + length {
            if stream.read_buf(&mut seen).await? == 0 {
                return Ok(());
            }
        }
        let per_second = field(seen.get(..head).unwrap_or_default(), b"x-events:");
        seen.drain(..head + length);
        match per_second {
            Some(per_second) => return events(stream, per_second, event_bytes).await,
            None => stream.write_all(&answer).await?,
        }
    }
}

/// Sends `per_second` events per second until the client disconnects.
async fn events(mut stream: TcpStream, per_second: usize, bytes: usize) -> io::Result<()> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    let mut beat = tokio::time::interval(Duration::from_secs(1) / per_second.max(1) as u32);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        beat.tick().await;
        let event = format!("data: {:020}{}\n\n", now(), "x".repeat(bytes.saturating_sub(28)));
        let chunk = format!("{:x}\r\n{event}\r\n", event.len());
        stream.write_all(chunk.as_bytes()).await?;
    }
}

/// Lengths of the head and of the following body, bytes; `None` until the head is complete.
pub(super) fn head(seen: &[u8]) -> Option<(usize, usize)> {
    let head = seen.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
    Some((head, field(seen.get(..head)?, b"content-length:").unwrap_or(0)))
}

/// The number in a header field, if it is there.
fn field(head: &[u8], name: &[u8]) -> Option<usize> {
    let mut lines = head.split(|byte| *byte == b'\n');
    let line =
        lines.find(|line| line.get(..name.len()).is_some_and(|start| start.eq_ignore_ascii_case(name)))?;
    std::str::from_utf8(line.get(name.len()..)?).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_found_once_it_is_whole() {
        let message = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\nx-events: 50\r\n\r\nbody";
        assert_eq!(head(message), Some((message.len() - 4, 12)));
        assert_eq!(head(&message[..message.len() - 5]), None);
        assert_eq!(field(message, b"x-events:"), Some(50));
        assert_eq!(field(message, b"x-none:"), None);
    }
}
