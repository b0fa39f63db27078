//! Figures of a table: the traffic with Foretell against the same traffic without it.

use super::record::{Record, Served};
use super::traffic::Owner;
use foretell::bench::stats;
use foretell_core::control::costs::DELAY_ALLOWED;
use foretell_policy::Gates;

/// A figure. Ratios are through Foretell ÷ direct, with the same clients, texts and seeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Tokens per second of one of our clients.
    Ratio,
    /// Minimum of the ratio over the seeds: the cost of bad luck.
    MinRatio,
    /// Our ratio ÷ that of the best fixed gamma that meets the promise for first tokens (plain
    /// decoding is gamma 0).
    OfBest,
    /// Median of the request latency, all traffic.
    P50,
    /// 95th percentile of it.
    P95,
    /// Median of it, requests that are not ours.
    OthersP50,
    /// 95th percentile of it.
    OthersP95,
    /// Median of the time to the first token, all traffic.
    FirstP50,
    /// 95th percentile of it.
    FirstP95,
    /// Time by which first tokens come later, ÷ the larger of a tenth of their time and 20 ms: the
    /// larger of those of median and 95th percentile, all traffic. At most 1 is promised; not a
    /// ratio.
    FirstToken,
    /// Tokens per second of all traffic.
    Throughput,
    /// Tokens computed by the engine ÷ tokens emitted.
    Computed,
    /// Share of our requests that were speculated on; not a ratio.
    Speculated,
    /// Accepted ÷ drafted tokens; not a ratio.
    Accepted,
    /// Seconds from the beginning of the overload to the last verify request in it; not a ratio.
    Closes,
    /// Seconds from the end of the overload to the first verify request; not a ratio.
    Reopens,
}

impl Figure {
    pub const ALL: [Self; 16] = [
        Self::Ratio,
        Self::MinRatio,
        Self::OfBest,
        Self::P50,
        Self::P95,
        Self::OthersP50,
        Self::OthersP95,
        Self::FirstP50,
        Self::FirstP95,
        Self::FirstToken,
        Self::Throughput,
        Self::Computed,
        Self::Speculated,
        Self::Accepted,
        Self::Closes,
        Self::Reopens,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Ratio => "ratio",
            Self::MinRatio => "least_ratio",
            Self::OfBest => "of_best",
            Self::P50 => "p50",
            Self::P95 => "p95",
            Self::OthersP50 => "others_p50",
            Self::OthersP95 => "others_p95",
            Self::FirstP50 => "first_p50",
            Self::FirstP95 => "first_p95",
            Self::FirstToken => "first_token",
            Self::Throughput => "throughput",
            Self::Computed => "computed",
            Self::Speculated => "speculated",
            Self::Accepted => "accepted",
            Self::Closes => "closes",
            Self::Reopens => "reopens",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|figure| figure.name() == name)
    }

    pub fn names() -> String {
        Self::ALL.map(Self::name).join("|")
    }
}

/// Records of one mode, one for each seed.
#[derive(Clone, Debug, Default)]
pub struct Played(pub Vec<Record>);

/// Selection of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    All,
    Ours,
    Others,
}

/// The selected requests of some records.
fn served<'a>(
    records: impl Iterator<Item = &'a Record>,
    streams: &'a [Owner],
    which: Which,
) -> impl Iterator<Item = &'a Served> {
    let wanted = move |served: &&Served| match (which, streams.get(served.stream)) {
        (Which::All, _) => true,
        (Which::Ours, whose) => whose == Some(&Owner::Ours),
        (Which::Others, whose) => whose == Some(&Owner::Others),
    };
    records.flat_map(|record| &record.served).filter(wanted)
}

/// Mean tokens per second of a client.
fn speed<'a>(requests: impl Iterator<Item = &'a Served>) -> Option<f64> {
    let (tokens, seconds) = requests.fold((0.0, 0.0), |(tokens, seconds), served| {
        (tokens + served.tokens as f64, seconds + served.seconds())
    });
    (seconds > 0.0).then(|| tokens / seconds)
}

impl Played {
    fn served<'a>(&'a self, streams: &'a [Owner], which: Which) -> impl Iterator<Item = &'a Served> {
        served(self.0.iter(), streams, which)
    }

    /// Mean tokens per second of one of our clients.
    fn speed(&self, streams: &[Owner]) -> Option<f64> {
        speed(self.served(streams, Which::Ours))
    }

    fn quantile(&self, streams: &[Owner], which: Which, q: f64, of: impl Fn(&Served) -> f64) -> Option<f64> {
        stats::quantile(self.served(streams, which).map(of).collect(), q)
    }

    /// Tokens per second of all traffic, in the seconds in which requests begin.
    fn throughput(&self, seconds: f64) -> Option<f64> {
        let tokens = self.0.iter().map(|record| {
            let intervals = (seconds / record.interval) as usize;
            record.course.iter().take(intervals).map(|interval| interval.tokens).sum::<usize>()
        });
        let tokens: usize = tokens.sum();
        (tokens > 0).then(|| tokens as f64 / (seconds * self.0.len() as f64))
    }

    fn computed(&self) -> Option<f64> {
        let computed: u64 = self.0.iter().map(|record| record.computed.all).sum();
        let tokens: usize = self.0.iter().flat_map(|record| &record.served).map(|served| served.tokens).sum();
        (tokens > 0).then(|| computed as f64 / tokens as f64)
    }

    fn share(&self, of: impl Fn(&foretell_core::session::Summary) -> (f64, f64)) -> Option<f64> {
        let summaries =
            self.0.iter().flat_map(|record| &record.served).filter_map(|served| served.summary.as_ref());
        let (part, all) = summaries.map(of).fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        (all > 0.0).then(|| part / all)
    }

    /// The latest verify request of any seed within these seconds, counted from their beginning; 0
    /// without one.
    fn last_round(&self, (from, until): (f64, f64)) -> f64 {
        let of = |record: &Record| {
            let within = |position: usize| (from..until).contains(&(position as f64 * record.interval));
            let mut rounds =
                record.course.iter().enumerate().filter(|(position, at)| within(*position) && at.rounds > 0);
            rounds.next_back().map_or(0.0, |(position, _)| (position + 1) as f64 * record.interval - from)
        };
        self.0.iter().map(of).fold(0.0, f64::max)
    }

    /// The first verify request after this second, maximum over the seeds; `None` if a seed has
    /// none.
    fn first_round(&self, from: f64) -> Option<f64> {
        let of = |record: &Record| {
            let after = |position: usize| position as f64 * record.interval >= from;
            let mut rounds =
                record.course.iter().enumerate().filter(|(position, at)| after(*position) && at.rounds > 0);
            rounds.next().map(|(position, _)| position as f64 * record.interval - from)
        };
        self.0.iter().map(of).try_fold(0.0_f64, |latest, first| Some(latest.max(first?)))
    }
}

/// Records of a table, for every mode.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub streams: Vec<Owner>,
    /// Seconds in which requests begin.
    pub seconds: f64,
    /// The seconds of the overload.
    pub overload: Option<(f64, f64)>,
    /// Without Foretell.
    pub direct: Played,
    /// With the controller's decisions.
    pub auto: Played,
    pub fixed: Vec<(usize, Played)>,
}

impl Outcome {
    /// The value of a figure; `None` if it is unknown.
    pub fn figure(&self, figure: Figure) -> Option<f64> {
        let latency = |which, q| self.by(|played| played.quantile(&self.streams, which, q, Served::seconds));
        let first = |q| self.by(|played| played.quantile(&self.streams, Which::All, q, Served::first_token));
        match figure {
            Figure::Ratio => self.by(|played| played.speed(&self.streams)),
            Figure::MinRatio => self.min_ratio(),
            Figure::OfBest => self.best().and_then(|(_, best)| Some(self.figure(Figure::Ratio)? / best)),
            Figure::P50 => latency(Which::All, 0.5),
            Figure::P95 => latency(Which::All, 0.95),
            Figure::OthersP50 => latency(Which::Others, 0.5),
            Figure::OthersP95 => latency(Which::Others, 0.95),
            Figure::FirstP50 => first(0.5),
            Figure::FirstP95 => first(0.95),
            Figure::FirstToken => self.first_token(&self.auto),
            Figure::Throughput => self.by(|played| played.throughput(self.seconds)),
            Figure::Computed => self.by(Played::computed),
            Figure::Speculated => self.auto.share(|summary| (f64::from(u8::from(summary.speculated)), 1.0)),
            Figure::Accepted => {
                self.auto.share(|summary| (f64::from(summary.accepted), f64::from(summary.drafted)))
            }
            Figure::Closes => self.overload.map(|overload| self.auto.last_round(overload)),
            Figure::Reopens => self.auto.first_round(self.overload?.1),
        }
    }

    /// The best fixed gamma that meets the promise for first tokens, and its ratio; plain decoding
    /// counts as gamma 0. `None` if none was played.
    pub fn best(&self) -> Option<(usize, f64)> {
        let played = self.fixed_ratios()?.into_iter().zip(&self.fixed);
        let meets = |played: &Played| self.first_token(played).is_some_and(|late| late <= 1.0);
        let fixed = played.filter(|(_, (_, played))| meets(played)).map(|(ratio, _)| ratio);
        let best = fixed.fold((0, 1.0), |best, one| if one.1 > best.1 { one } else { best });
        (!self.fixed.is_empty()).then_some(best)
    }

    /// See [`Figure::FirstToken`].
    pub fn first_token(&self, through: &Played) -> Option<f64> {
        let late = |q: f64| {
            let of = |played: &Played| played.quantile(&self.streams, Which::All, q, Served::first_token);
            let (direct, through) = (of(&self.direct)?, of(through)?);
            Some((through - direct) / ((Gates::default().first_token - 1.0) * direct).max(DELAY_ALLOWED))
        };
        Some(late(0.5)?.max(late(0.95)?))
    }

    /// Our ratio with each fixed gamma; `None` if one is unknown.
    pub fn fixed_ratios(&self) -> Option<Vec<(usize, f64)>> {
        let direct = self.direct.speed(&self.streams)?;
        self.fixed
            .iter()
            .map(|(gamma, played)| Some((*gamma, played.speed(&self.streams)? / direct)))
            .collect()
    }

    fn min_ratio(&self) -> Option<f64> {
        let speed = |record: &Record| speed(served(std::iter::once(record), &self.streams, Which::Ours));
        let pairs = self.auto.0.iter().zip(&self.direct.0);
        pairs
            .map(|(auto, direct)| Some(speed(auto)? / speed(direct)?))
            .try_fold(f64::MAX, |least, ratio| Some(least.min(ratio?)))
    }

    fn by(&self, of: impl Fn(&Played) -> Option<f64>) -> Option<f64> {
        let (auto, direct) = (of(&self.auto)?, of(&self.direct)?);
        (direct > 0.0).then(|| auto / direct)
    }
}
