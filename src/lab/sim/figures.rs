//! What is measured of a table: its figures, as Foretell against no Foretell.

use super::record::{Record, Served};
use super::traffic::Whose;
use crate::lab::stats;

/// A figure. Ratios are through Foretell ÷ direct, with the same clients, texts and dice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Tokens per second that one of our clients gets.
    Ratio,
    /// The ratio of the seed in which it is least: what bad luck costs.
    LeastRatio,
    /// Our ratio ÷ that of the best fixed gamma (riding is gamma 0).
    OfBest,
    /// Median of a request's time, all traffic.
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
    /// Tokens per second of all traffic.
    Throughput,
    /// Tokens that the engine computed for each that was emitted.
    Computed,
    /// Share of our requests that leapt; no ratio.
    Leapt,
    /// Accepted ÷ drafted tokens; no ratio.
    Accepted,
    /// Seconds from the beginning of the overload to the last verify call in it; no ratio.
    Closes,
    /// Seconds from the end of the overload to the first verify call; no ratio.
    Reopens,
}

impl Figure {
    /// Every figure.
    pub const ALL: [Self; 15] = [
        Self::Ratio,
        Self::LeastRatio,
        Self::OfBest,
        Self::P50,
        Self::P95,
        Self::OthersP50,
        Self::OthersP95,
        Self::FirstP50,
        Self::FirstP95,
        Self::Throughput,
        Self::Computed,
        Self::Leapt,
        Self::Accepted,
        Self::Closes,
        Self::Reopens,
    ];

    /// Its name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ratio => "ratio",
            Self::LeastRatio => "least_ratio",
            Self::OfBest => "of_best",
            Self::P50 => "p50",
            Self::P95 => "p95",
            Self::OthersP50 => "others_p50",
            Self::OthersP95 => "others_p95",
            Self::FirstP50 => "first_p50",
            Self::FirstP95 => "first_p95",
            Self::Throughput => "throughput",
            Self::Computed => "computed",
            Self::Leapt => "leapt",
            Self::Accepted => "accepted",
            Self::Closes => "closes",
            Self::Reopens => "reopens",
        }
    }

    /// The figure of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|figure| figure.name() == name)
    }

    /// All names.
    pub fn names() -> String {
        Self::ALL.map(Self::name).join("|")
    }
}

/// Records of one mode, one for each seed.
#[derive(Clone, Debug, Default)]
pub struct Played(pub Vec<Record>);

/// Which requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    All,
    Ours,
    Others,
}

/// The requests of some records.
fn served<'a>(
    records: impl Iterator<Item = &'a Record>,
    streams: &'a [Whose],
    which: Which,
) -> impl Iterator<Item = &'a Served> {
    let wanted = move |served: &&Served| match (which, streams.get(served.stream)) {
        (Which::All, _) => true,
        (Which::Ours, whose) => whose == Some(&Whose::Ours),
        (Which::Others, whose) => whose == Some(&Whose::Others),
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
    fn served<'a>(&'a self, streams: &'a [Whose], which: Which) -> impl Iterator<Item = &'a Served> {
        served(self.0.iter(), streams, which)
    }

    /// Mean tokens per second of one of our clients.
    fn speed(&self, streams: &[Whose]) -> Option<f64> {
        speed(self.served(streams, Which::Ours))
    }

    fn quantile(&self, streams: &[Whose], which: Which, q: f64, of: impl Fn(&Served) -> f64) -> Option<f64> {
        stats::quantile(self.served(streams, which).map(of).collect(), q)
    }

    /// Tokens per second of all traffic, while requests begin.
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

    fn share(&self, of: impl Fn(&crate::session::Summary) -> (f64, f64)) -> Option<f64> {
        let summaries =
            self.0.iter().flat_map(|record| &record.served).filter_map(|served| served.summary.as_ref());
        let (part, all) = summaries.map(of).fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        (all > 0.0).then(|| part / all)
    }

    /// The latest verify call of any seed within these seconds, counted from their beginning; 0 without one.
    fn last_round(&self, (from, until): (f64, f64)) -> f64 {
        let of = |record: &Record| {
            let within = |place: usize| (from..until).contains(&(place as f64 * record.interval));
            let mut rounds =
                record.course.iter().enumerate().filter(|(place, at)| within(*place) && at.rounds > 0);
            rounds.next_back().map_or(0.0, |(place, _)| (place + 1) as f64 * record.interval - from)
        };
        self.0.iter().map(of).fold(0.0, f64::max)
    }

    /// The first verify call after this second, of the seed in which it comes last; `None` if one has none.
    fn first_round(&self, from: f64) -> Option<f64> {
        let of = |record: &Record| {
            let after = |place: usize| place as f64 * record.interval >= from;
            let mut rounds =
                record.course.iter().enumerate().filter(|(place, at)| after(*place) && at.rounds > 0);
            rounds.next().map(|(place, _)| place as f64 * record.interval - from)
        };
        self.0.iter().map(of).try_fold(0.0_f64, |latest, first| Some(latest.max(first?)))
    }
}

/// A table as it was played.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Whose each stream is.
    pub streams: Vec<Whose>,
    /// Seconds in which requests begin.
    pub seconds: f64,
    /// The seconds of the overload.
    pub overload: Option<(f64, f64)>,
    /// Without Foretell.
    pub direct: Played,
    /// As the controller decides.
    pub auto: Played,
    /// With fixed gammas.
    pub fixed: Vec<(usize, Played)>,
}

impl Outcome {
    /// The value of a figure; `None` if it cannot be told.
    pub fn figure(&self, figure: Figure) -> Option<f64> {
        let latency = |which, q| self.by(|played| played.quantile(&self.streams, which, q, Served::seconds));
        let first = |q| self.by(|played| played.quantile(&self.streams, Which::All, q, Served::first_token));
        match figure {
            Figure::Ratio => self.by(|played| played.speed(&self.streams)),
            Figure::LeastRatio => self.least_ratio(),
            Figure::OfBest => self.best().and_then(|(_, best)| Some(self.figure(Figure::Ratio)? / best)),
            Figure::P50 => latency(Which::All, 0.5),
            Figure::P95 => latency(Which::All, 0.95),
            Figure::OthersP50 => latency(Which::Others, 0.5),
            Figure::OthersP95 => latency(Which::Others, 0.95),
            Figure::FirstP50 => first(0.5),
            Figure::FirstP95 => first(0.95),
            Figure::Throughput => self.by(|played| played.throughput(self.seconds)),
            Figure::Computed => self.by(Played::computed),
            Figure::Leapt => self.auto.share(|summary| (f64::from(u8::from(summary.speculated)), 1.0)),
            Figure::Accepted => {
                self.auto.share(|summary| (f64::from(summary.accepted), f64::from(summary.drafted)))
            }
            Figure::Closes => self.overload.map(|overload| self.auto.last_round(overload)),
            Figure::Reopens => self.auto.first_round(self.overload?.1),
        }
    }

    /// The best fixed gamma and its ratio; riding counts as gamma 0. `None` if none was played.
    pub fn best(&self) -> Option<(usize, f64)> {
        let fixed = self.fixed_ratios()?.into_iter();
        let best = fixed.fold((0, 1.0), |best, one| if one.1 > best.1 { one } else { best });
        (!self.fixed.is_empty()).then_some(best)
    }

    /// Our ratio with each fixed gamma; `None` if one cannot be told.
    pub fn fixed_ratios(&self) -> Option<Vec<(usize, f64)>> {
        let direct = self.direct.speed(&self.streams)?;
        self.fixed
            .iter()
            .map(|(gamma, played)| Some((*gamma, played.speed(&self.streams)? / direct)))
            .collect()
    }

    fn least_ratio(&self) -> Option<f64> {
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
