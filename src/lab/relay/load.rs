//! The load of one turn, and its measurements.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use hdrhistogram::Histogram;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::LocalSet;
use tokio::time::MissedTickBehavior;

use super::RelayError;
use super::backend::{head, now};

/// Amount of load.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Requests per second.
    pub requests: u32,
    /// Body size of a request, bytes.
    pub request_bytes: usize,
    /// Number of event streams held open.
    pub streams: usize,
    /// Events per second on each stream.
    pub events: u32,
    /// Size of an event, bytes.
    pub event_bytes: usize,
    /// Time at the start of a turn that is not measured.
    pub warm_up: Duration,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            requests: 1000,
            request_bytes: 1024,
            streams: 200,
            events: 50,
            event_bytes: 200,
            warm_up: Duration::from_secs(2),
        }
    }
}

/// Measurements of one turn; latencies are in nanoseconds.
#[derive(Debug)]
pub struct Measured {
    /// Latencies from writing a request's first byte to reading its answer's last byte.
    pub requests: Histogram<u64>,
    /// Latencies from the backend writing an event to its arrival at the client.
    pub events: Histogram<u64>,
    /// Number of requests without a complete answer and of streams that ended.
    pub failures: u64,
    /// Processor time used by the proxy.
    pub busy: Busy,
}

/// Processor time of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Busy {
    /// In its own code.
    pub user: Duration,
    /// In the kernel on its behalf.
    pub system: Duration,
}

impl Busy {
    pub(super) fn plus(self, other: Self) -> Self {
        Self { user: self.user + other.user, system: self.system + other.system }
    }

    pub(super) fn since(self, before: Self) -> Self {
        Self {
            user: self.user.saturating_sub(before.user),
            system: self.system.saturating_sub(before.system),
        }
    }
}

impl Measured {
    pub(super) fn new() -> Result<Self, hdrhistogram::CreationError> {
        let histogram = || Histogram::new_with_bounds(1, 60_000_000_000, 3);
        Ok(Self { requests: histogram()?, events: histogram()?, failures: 0, busy: Busy::default() })
    }

    pub(super) fn line(&self) -> String {
        let micros = |histogram: &Histogram<u64>, q| histogram.value_at_quantile(q) / 1000;
        format!(
            "requests {:>6} p50 {:>5} p99 {:>6} us   events {:>7} p50 {:>5} p99 {:>6} us   failures {}   busy {:.2} + {:.2} s",
            self.requests.len(),
            micros(&self.requests, 0.5),
            micros(&self.requests, 0.99),
            self.events.len(),
            micros(&self.events, 0.5),
            micros(&self.events, 0.99),
            self.failures,
            self.busy.user.as_secs_f64(),
            self.busy.system.as_secs_f64()
        )
    }
}

struct Turn {
    load: Load,
    address: SocketAddr,
    idle: RefCell<Vec<TcpStream>>,
    measured: RefCell<Measured>,
    from: u64,
}

/// Applies the load to `address` for `length`.
pub(super) fn turn(load: Load, address: SocketAddr, length: Duration) -> Result<Measured, RelayError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(RelayError::io("load"))?;
    let turn = Rc::new(Turn {
        load,
        address,
        idle: RefCell::default(),
        measured: RefCell::new(Measured::new()?),
        from: now() + load.warm_up.as_nanos() as u64,
    });
    let local = LocalSet::new();
    let _ = local.block_on(&runtime, async { tokio::time::timeout(length, all(&turn)).await });
    let measured = turn.measured.replace(Measured::new()?);
    Ok(measured)
}

async fn all(turn: &Rc<Turn>) {
    for n in 0..turn.load.streams {
        let turn = Rc::clone(turn);
        tokio::task::spawn_local(async move {
            // Streams start spread over one period, so that their events do not coincide.
            let period = Duration::from_secs(1) / turn.load.events.max(1);
            tokio::time::sleep(period.mul_f64(n as f64 / turn.load.streams as f64)).await;
            let _ = turn.stream().await;
            turn.measured.borrow_mut().failures += 1;
        });
    }
    if turn.load.requests == 0 {
        return std::future::pending().await;
    }
    let mut beat = tokio::time::interval(Duration::from_secs(1) / turn.load.requests);
    beat.set_missed_tick_behavior(MissedTickBehavior::Burst);
    loop {
        beat.tick().await;
        let turn = Rc::clone(turn);
        tokio::task::spawn_local(async move {
            if turn.request().await.is_err() {
                turn.measured.borrow_mut().failures += 1;
            }
        });
    }
}

impl Turn {
    async fn connect(&self) -> io::Result<TcpStream> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    async fn request(&self) -> io::Result<()> {
        let idle = self.idle.borrow_mut().pop();
        let mut stream = match idle {
            Some(stream) => stream,
            None => self.connect().await?,
        };
        let body = "b".repeat(self.load.request_bytes);
        let request = format!(
            "POST /v1/embeddings HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer some-key\r\nuser-agent: load\r\n\
             content-type: application/json\r\naccept: */*\r\ncontent-length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        );
        let begun = now();
        stream.write_all(request.as_bytes()).await?;
        let mut seen = Vec::with_capacity(4096);
        loop {
            if stream.read_buf(&mut seen).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if head(&seen).is_some_and(|(head, length)| seen.len() >= head + length) {
                break;
            }
        }
        if !seen.starts_with(b"HTTP/1.1 200") {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if begun >= self.from {
            self.measured.borrow_mut().requests.saturating_record(now() - begun);
        }
        self.idle.borrow_mut().push(stream);
        Ok(())
    }

    async fn stream(&self) -> io::Result<()> {
        let mut stream = self.connect().await?;
        let request = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\nx-events: {}\r\ncontent-length: 2\r\n\r\n{{}}",
            self.address, self.load.events
        );
        stream.write_all(request.as_bytes()).await?;
        let mut seen = Vec::with_capacity(8192);
        loop {
            if stream.read_buf(&mut seen).await? == 0 {
                return Ok(());
            }
            let arrived = now();
            let mut from = 0;
            while let Some((at, written)) = event(&seen, from) {
                from = at;
                if written >= self.from {
                    self.measured.borrow_mut().events.saturating_record(arrived.saturating_sub(written));
                }
            }
            seen.drain(..from);
        }
    }
}

/// The first complete event after `from`: where it ends, and when it was written (nanoseconds).
fn event(seen: &[u8], from: usize) -> Option<(usize, u64)> {
    let rest = seen.get(from..)?;
    let data = rest.windows(6).position(|six| six == b"data: ")? + 6;
    let end = data + rest.get(data..)?.windows(2).position(|two| two == b"\n\n")? + 2;
    let written = std::str::from_utf8(rest.get(data..data + 20)?).ok()?.parse().ok()?;
    Some((from + end, written))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_events_are_taken_however_they_are_cut() {
        let seen =
            b"20\r\ndata: 00000000000000000123xx\n\n\r\n20\r\ndata: 00000000000000000456\n\n\r\ndata: 000";
        let (first, written) = event(seen, 0).unwrap();
        assert_eq!(written, 123);
        let (second, written) = event(seen, first).unwrap();
        assert_eq!(written, 456);
        assert_eq!(event(seen, second), None);
    }
}
