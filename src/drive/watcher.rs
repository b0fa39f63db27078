//! What one session leaves behind for metrics, log and status page: when what happened, and for how long.

use std::time::Duration;

use crate::draft::{Source, Tree};
use crate::observe::Round;
use crate::session::{Event, Summary};
use crate::units::Tick;

use crate::drive::drafting::Reply;

/// A verify call under way.
struct Open {
    drafted: u32,
    drafter: &'static str,
    sent: Tick,
    draft: Duration,
}

/// The record of one session.
pub struct Watcher {
    started: Tick,
    first_byte: Option<Tick>,
    rounds: Vec<Round>,
    open: Option<Open>,
    drafting: Duration,
}

impl Watcher {
    /// A record of a request that was accepted at `started`.
    pub fn new(started: Tick) -> Self {
        Self { started, first_byte: None, rounds: Vec::new(), open: None, drafting: Duration::ZERO }
    }

    /// Output goes to the client.
    pub fn emitted(&mut self, now: Tick) {
        self.first_byte.get_or_insert(now);
    }

    /// A verify call goes out.
    pub fn verifying(&mut self, draft: &Tree, now: Tick) {
        let drafter = draft.nodes().first().map_or("none", |node| Source::name(node.votes.first().drafter.source));
        let spent = std::mem::take(&mut self.drafting);
        self.open = Some(Open { drafted: draft.len() as u32, drafter, sent: now, draft: spent });
    }

    /// An answer came. Time spent drafting counts for the next round.
    pub fn answered(&mut self, reply: &Reply, now: Tick) {
        if let Some(seconds) = reply.seconds {
            self.drafting += Duration::from_secs_f64(seconds);
        }
        if let (Event::Verdict(_), Some(open)) =
            (&reply.event, self.open.take_if(|_| reply.seconds.is_none()))
        {
            let verify = now - open.sent;
            let Open { drafted, drafter, draft, .. } = open;
            self.rounds.push(Round { drafted, accepted: 0, drafter, draft, verify });
        }
    }

    /// The session has counted its rounds so far.
    pub fn counted(&mut self, summary: &Summary) {
        let before: u32 = self.rounds.iter().rev().skip(1).map(|round| round.accepted).sum();
        if let Some(last) = self.rounds.last_mut() {
            last.accepted = summary.accepted.saturating_sub(before);
        }
    }

    /// The rounds that got a verdict.
    pub fn rounds(&self) -> &[Round] {
        &self.rounds
    }

    /// From accepting the request to the first output.
    pub fn first_byte(&self) -> Option<Duration> {
        self.first_byte.map(|tick| tick - self.started)
    }
}
