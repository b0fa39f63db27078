//! The time of verify requests: a table over the number of draft nodes for every method, size of
//! the context and concurrency.
//!
//! A table is made monotone and interpolated. A key that has not been measured is assumed to cost
//! the same as the nearest measured one.

use serde::{Deserialize, Serialize};

use std::collections::BTreeMap;

use super::pace::ConcurrencyBucket;
use super::{Belief, CONCURRENCIES, PRIOR_WEIGHT};
use crate::control::learnt_costs::VerifyCosts;
use crate::control::prospect::Prior;
use crate::control::shared::Sum;
use crate::units::Tick;
use crate::words::VerifyMethod;

/// Maximum nodes with a separate entry in a table; larger drafts share the last.
pub const NODES_MAX: usize = 32;
/// Bounds between the sizes of contexts, in tokens: below the first, and from each one on.
pub const CONTEXTS: [usize; 5] = [128, 512, 2_048, 8_192, 32_768];
/// Minimum difference between numbers of nodes for a slope per node.
const SLOPE_OVER: usize = 4;
/// Maximum that counts for a size with few measurements, as a multiple of the prediction from the
/// other sizes: a single hiccup would keep the size from being retried.
const SURPRISE: f64 = 1.5;
/// Maximum for a size with few measurements, as a multiple of a later request's time, in proportion
/// to the nodes where it has more than that request.
const HICCUP: f64 = 3.0;
/// Measurements from which on a size is well known.
const SURE: f64 = 2.0;
/// Share of a request's time beyond a step that is attributed to its nodes, before two numbers of
/// nodes are known.
const NODES_SHARE: f64 = 0.25;

/// The table that a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct TableKey {
    method: usize,
    size: usize,
    concurrency: ConcurrencyBucket,
    /// Concurrent with plain requests: the engine is in a step when the request arrives, which
    /// waits for its end.
    plain_neighbours: bool,
}

impl TableKey {
    /// Key of a request by this method with `context` tokens of context. `plain_neighbours`: plain
    /// requests are in flight with it.
    pub(super) fn new(
        method: VerifyMethod,
        context: usize,
        concurrency: ConcurrencyBucket,
        plain_neighbours: bool,
    ) -> Self {
        Self { method: method.index(), size: size_of(context), concurrency, plain_neighbours }
    }

    /// Its figures for an operator, without any draft.
    pub(super) fn shown(self) -> VerifyCosts {
        let from = self.size.checked_sub(1).and_then(|before| CONTEXTS.get(before)).copied().unwrap_or(0);
        let to = CONTEXTS.get(self.size).map_or(String::new(), |next| (next - 1).to_string());
        VerifyCosts {
            method: VerifyMethod::ALL.get(self.method).map_or("", |method| method.name()),
            context: format!("{from}-{to}"),
            requests: self.concurrency.name(),
            plain_neighbours: self.plain_neighbours,
            drafts: Vec::new(),
        }
    }

    /// True if it is the key of a request: keys of others come from outside.
    pub(super) fn is_valid(self) -> bool {
        self.method < VerifyMethod::ALL.len()
            && self.size <= CONTEXTS.len()
            && self.concurrency.index() < CONCURRENCIES
    }

    /// Distance to another key of the same method.
    fn distance(self, other: Self) -> usize {
        let company = usize::from(self.plain_neighbours != other.plain_neighbours);
        2 * self.concurrency.distance(other.concurrency) + self.size.abs_diff(other.size) + company
    }
}

fn size_of(context: usize) -> usize {
    CONTEXTS.iter().filter(|&&edge| context >= edge).count()
}

/// Additional seconds that a request waits for the engine with plain neighbours as in `there`
/// compared with `here`: one step if there are some.
fn waits(here: bool, there: bool, token: f64) -> f64 {
    match (here, there) {
        (false, true) => token,
        (true, false) => -token,
        (true, true) | (false, false) => 0.0,
    }
}

/// Seconds of verify requests, by key and number of draft nodes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Verify {
    #[serde(with = "crate::control::pairs")]
    tables: BTreeMap<TableKey, Table>,
}

/// Draft nodes and seconds, both ascending.
type Points = Vec<(usize, f64)>;

impl Verify {
    /// Notes a request with `nodes` draft nodes that took `took` seconds, where a plain token takes
    /// `token` seconds.
    pub(super) fn observe(&mut self, key: TableKey, nodes: usize, took: f64, token: f64, now: Tick) {
        if !self.tables.contains_key(&key) {
            let lent = self.nearest_key(key).map(|(known, table)| {
                let wait = waits(known.plain_neighbours, key.plain_neighbours, token);
                table
                    .points()
                    .into_iter()
                    .map(|(nodes, seconds)| (nodes, (seconds + wait).max(seconds * 0.5)))
                    .collect()
            });
            let lent = lent.unwrap_or_default();
            self.tables.insert(key, Table { lent, ..Table::default() });
        }
        let Some(table) = self.tables.get_mut(&key) else { return };
        table.observe(nodes, took, now);
        table.rebuild(token, now);
    }

    /// Takes the result of a probe. `token`: seconds per plain token.
    pub(super) fn take_prior(&mut self, prior: &Prior, token: f64, now: Tick) {
        for (method, curves) in prior.verify.iter().enumerate() {
            for curve in curves {
                let key = TableKey {
                    method,
                    size: size_of(curve.context),
                    concurrency: ConcurrencyBucket::default(),
                    plain_neighbours: false,
                };
                let table = self.tables.entry(key).or_default();
                (table.lent, table.probed) = (curve.points.clone(), true);
                table.rebuild(token, now);
            }
        }
    }

    /// Expected seconds of a request with `nodes` draft nodes where a plain token takes `token`
    /// seconds, and the concurrency at which it was measured; `None` if nothing is known of its
    /// method.
    pub(super) fn seconds(
        &self,
        key: TableKey,
        nodes: usize,
        token: f64,
    ) -> Option<(f64, ConcurrencyBucket)> {
        let (known, table) = self.nearest_key(key)?;
        let seconds = *table.curve.get(nodes.min(NODES_MAX))?;
        let wait = waits(known.plain_neighbours, key.plain_neighbours, token);
        Some(((seconds + wait).max(seconds * 0.5), known.concurrency))
    }

    /// True if requests with exactly this key are known.
    pub(super) fn is_known(&self, key: TableKey) -> bool {
        self.tables.contains_key(&key)
    }

    /// Makes `now` the origin of time, keeping the present certainty of every figure.
    pub(super) fn age(&mut self, now: Tick) {
        let means = self.tables.values_mut().flat_map(|table| &mut table.means);
        means.for_each(|mean| mean.age(now));
    }

    /// True if a session, here or at another sidecar, has measured any request by this method.
    pub(super) fn is_measured(&self, key: TableKey) -> bool {
        let measured = |mean: &Belief| mean.is_measured() || mean.weight(Tick(0)) > PRIOR_WEIGHT;
        let mut same = self.tables.iter().filter(|(known, _)| known.method == key.method);
        same.any(|(_, table)| table.means.iter().any(measured))
    }

    /// The tables in which something was measured here, with the means by number of nodes.
    pub(super) fn measured(&self) -> impl Iterator<Item = (TableKey, &[Belief])> {
        let tables = self.tables.iter().map(|(key, table)| (*key, &*table.means));
        tables.filter(|(_, means)| means.iter().any(Belief::is_measured))
    }

    /// Replaces the measurements of others. `token`: seconds per plain token.
    pub(super) fn lend(&mut self, lent: &BTreeMap<TableKey, BTreeMap<usize, Sum>>, token: f64, now: Tick) {
        for key in lent.keys() {
            self.tables.entry(*key).or_default();
        }
        self.tables.retain(|key, table| {
            let changed = table.lend(lent.get(key));
            if changed {
                table.rebuild(token, now);
            }
            !table.lent.is_empty() || table.means.iter().any(|mean| mean.known().is_some())
        });
    }

    /// Seconds per additional node, as measured at the nearest key; `None` if it is not known.
    pub(super) fn slope(&self, key: TableKey) -> Option<f64> {
        self.nearest_key(key)?.1.slope
    }

    /// The largest number of nodes that was measured for this method; `None` if none was.
    pub(super) fn reach(&self, key: TableKey) -> Option<usize> {
        let same = self.tables.iter().filter(|(known, _)| known.method == key.method);
        same.filter_map(|(_, table)| table.reach()).max()
    }

    /// The table nearest to this key; of two the smaller.
    fn nearest_key(&self, key: TableKey) -> Option<(TableKey, &Table)> {
        if let Some(table) = self.tables.get(&key) {
            return Some((key, table));
        }
        let same = self.tables.iter().filter(|(known, _)| known.method == key.method);
        same.min_by_key(|(known, _)| known.distance(key)).map(|(known, table)| (*known, table))
    }
}

/// Seconds of verify requests with one key, by draft nodes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Table {
    /// By number of nodes; empty before the first.
    means: Vec<Belief>,
    /// The assumption before anything was measured here: from a probe, or from the nearest key.
    lent: Points,
    #[serde(skip)]
    probed: bool,
    /// Expected seconds for every number of nodes.
    curve: Vec<f64>,
    /// Seconds per additional node, as measured; `None` before drafts of different lengths were.
    #[serde(default)]
    slope: Option<f64>,
}

impl Table {
    /// Takes measurements of others, by number of nodes; returns true if they are not those before.
    fn lend(&mut self, lent: Option<&BTreeMap<usize, Sum>>) -> bool {
        if lent.is_some() {
            self.means.resize(NODES_MAX + 1, Belief::default());
        }
        let lent = |nodes: usize| lent.and_then(|lent| lent.get(&nodes)).copied().unwrap_or_default();
        let mut changed = false;
        for (nodes, mean) in self.means.iter_mut().enumerate() {
            changed |= mean.lend(lent(nodes));
        }
        changed
    }

    fn observe(&mut self, nodes: usize, took: f64, now: Tick) {
        let nodes = nodes.min(NODES_MAX);
        let others = self.means.iter().enumerate().filter(|(other, _)| *other != nodes);
        let sure = others.map(|(_, mean)| mean.weight(now)).sum::<f64>() >= SURE;
        let said = if sure { self.curve.get(nodes).copied() } else { None };
        self.means.resize(NODES_MAX + 1, Belief::default());
        if let Some(mean) = self.means.get_mut(nodes) {
            let most = match said {
                Some(said) if mean.weight(now) < SURE => SURPRISE * said,
                _ => f64::MAX,
            };
            mean.observe(took.min(most), now);
        }
        for (other, mean) in self.means.iter_mut().enumerate().filter(|(_, mean)| mean.weight(now) < SURE) {
            let longer = (other as f64 / nodes.max(1) as f64).max(1.0);
            mean.cap(HICCUP * longer * took);
        }
    }

    /// The curve as points, to be lent to another key.
    fn points(&self) -> Points {
        self.curve.iter().copied().enumerate().collect()
    }

    fn reach(&self) -> Option<usize> {
        let measured = self.means.iter().rposition(|mean| mean.known().is_some());
        if self.probed { measured.max(self.lent.last().map(|point| point.0)) } else { measured }
    }

    /// Seconds per additional node, at least 0: the least squares of the means by their weights,
    /// which idle time does not reduce, for a slope needs drafts of different lengths; `None` where
    /// those that were measured are too alike.
    fn fitted(&self) -> Option<f64> {
        let known = |mean: &Belief| mean.known().is_some();
        let (least, most) = (self.means.iter().position(known)?, self.means.iter().rposition(known)?);
        if most < least + SLOPE_OVER {
            return None;
        }
        let (mut weight, mut x, mut y, mut spread, mut common) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for (nodes, mean) in self.means.iter().enumerate() {
            let Some(seconds) = mean.known() else { continue };
            let mass = mean.weight(Tick::default());
            weight += mass;
            let (before, share) = ([nodes as f64 - x, seconds - y], mass / weight);
            (x, y) = (x + share * before[0], y + share * before[1]);
            spread += mass * before[0] * (nodes as f64 - x);
            common += mass * before[0] * (seconds - y);
        }
        Some((common / spread).max(0.0))
    }

    /// The assumption, scaled by the ratio of measurements to it.
    fn supposed(&self, now: Tick) -> Vec<Option<f64>> {
        let (mut real, mut said) = (0.0, 0.0);
        for (nodes, mean) in self.means.iter().enumerate() {
            if !self.lent.is_empty()
                && let Some(value) = mean.known()
            {
                let weight = mean.weight(now);
                real += weight * value;
                said += weight * along(&self.lent, nodes, 0.0);
            }
        }
        let factor = if said > 0.0 { real / said } else { 1.0 };
        let at = |nodes: usize| self.lent.iter().find(|point| point.0 == nodes).map(|point| point.1 * factor);
        (0..=NODES_MAX).map(at).collect()
    }

    /// Monotone (pool adjacent violators), then linear between known points; beyond the last the
    /// slope of the last two. While there is only one, a share of its time beyond a step of `token`
    /// seconds is attributed to its nodes.
    fn rebuild(&mut self, token: f64, now: Tick) {
        let mut blocks: Vec<(f64, f64, usize, usize)> = Vec::new();
        for (nodes, supposed) in self.supposed(now).into_iter().enumerate() {
            let mean = self.means.get(nodes).copied().unwrap_or_default();
            let known = mean.known().map(|value| (value, mean.weight(now)));
            let Some((value, weight)) = known.or_else(|| Some((supposed?, PRIOR_WEIGHT))) else { continue };
            let mut block = (value, weight, nodes, nodes);
            while let Some(&(value, weight, first, _)) = blocks.last().filter(|last| last.0 > block.0) {
                let sum = weight + block.1;
                block = ((value * weight + block.0 * block.1) / sum, sum, first, block.3);
                blocks.pop();
            }
            blocks.push(block);
        }
        let points: Points = blocks
            .iter()
            .flat_map(|&(value, _, first, last)| {
                let end = (last > first).then_some((last, value));
                std::iter::once((first, value)).chain(end)
            })
            .collect();
        let least = super::SLOPE * token;
        let slope = match points.as_slice() {
            [(nodes, seconds)] => ((seconds - token) * NODES_SHARE / (*nodes).max(1) as f64).max(least),
            _ => least,
        };
        self.curve = (0..=NODES_MAX).map(|nodes| along(&points, nodes, slope)).collect();
        self.slope = self.fitted();
    }
}

/// Piecewise linear through `points` (ascending in both coordinates), `slope` per node outside
/// them.
fn along(points: &[(usize, f64)], nodes: usize, slope: f64) -> f64 {
    let below = points.iter().rev().find(|point| point.0 <= nodes);
    let above = points.iter().find(|point| point.0 >= nodes);
    match (below, above) {
        (Some(&(x0, y0)), Some(&(x1, y1))) if x1 > x0 => {
            y0 + (y1 - y0) * (nodes - x0) as f64 / (x1 - x0) as f64
        }
        (Some(&(_, y)), Some(_)) => y,
        (Some(&(x, y)), None) => {
            let measured =
                points.first().filter(|first| first.0 < x).map(|&(x0, y0)| (y - y0) / (x - x0) as f64);
            y + (nodes - x) as f64 * measured.unwrap_or(slope).max(slope * 0.05)
        }
        (None, Some(&(x, y))) => (y - (x - nodes) as f64 * slope).max(y * 0.5),
        (None, None) => 0.0,
    }
}
