//! The time of verify calls: a table over the number of draft nodes for every plan, size of the context and crowd.
//!
//! A table is made monotone and interpolated. A place that has not been measured is taken to cost what the nearest
//! measured one does.

use serde::{Deserialize, Serialize};

use std::collections::BTreeMap;

use super::pace::Crowd;
use super::{Belief, PRIOR_WEIGHT};
use crate::control::prospect::Prior;
use crate::units::Tick;
use crate::words::Plan;

/// Most nodes with an entry of their own in a table; larger drafts share the last.
pub const NODES_MAX: usize = 32;
/// Bounds between the sizes of contexts, in tokens: below the first, and from each one on.
pub const CONTEXTS: [usize; 5] = [128, 512, 2_048, 8_192, 32_768];
/// Nodes by which drafts must differ to show what a node costs.
const SLOPE_OVER: usize = 4;
/// A draft of a size that was hardly measured yet counts at most as so many times what others say that were: a lone hiccup
/// would keep it from being tried again.
const SURPRISE: f64 = 1.5;
/// What was hardly measured yet counts at most as so many times what a later call took, and by so much more as it had more nodes.
const HICCUP: f64 = 3.0;
/// Measurements from which on a size is well known.
const SURE: f64 = 2.0;
/// Share of what a call takes beyond a step that is taken to be the nodes', before two numbers of nodes are known.
const NODES_SHARE: f64 = 0.25;

/// Which table a call belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Place {
    plan: usize,
    size: usize,
    crowd: Crowd,
    /// Beside requests that ride: the engine is in a step when the call comes, and the call waits for its end.
    riders: bool,
}

impl Place {
    pub(super) fn new(plan: Plan, context: usize, crowd: Crowd, riders: bool) -> Self {
        Self { plan: plan.index(), size: size_of(context), crowd, riders }
    }

    /// How far another place of the same plan is.
    fn distance(self, other: Self) -> usize {
        let company = usize::from(self.riders != other.riders);
        2 * self.crowd.distance(other.crowd) + self.size.abs_diff(other.size) + company
    }
}

fn size_of(context: usize) -> usize {
    CONTEXTS.iter().filter(|&&edge| context >= edge).count()
}

/// How much longer a call waits for the engine in company `there` than in company `here`, seconds: beside riders for a step.
fn waits(here: bool, there: bool, token: f64) -> f64 {
    match (here, there) {
        (false, true) => token,
        (true, false) => -token,
        (true, true) | (false, false) => 0.0,
    }
}

/// Seconds of verify calls.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Verify {
    #[serde(with = "crate::control::pairs")]
    tables: BTreeMap<Place, Table>,
}

/// Draft nodes and seconds, both rising.
type Points = Vec<(usize, f64)>;

impl Verify {
    /// Notes a call that took `took` seconds; a ridden token takes `token`.
    pub(super) fn observe(&mut self, place: Place, nodes: usize, took: f64, token: f64, now: Tick) {
        if !self.tables.contains_key(&place) {
            let lent = self.nearest_place(place).map(|(known, table)| {
                let wait = waits(known.riders, place.riders, token);
                table
                    .points()
                    .into_iter()
                    .map(|(nodes, seconds)| (nodes, (seconds + wait).max(seconds * 0.5)))
                    .collect()
            });
            let lent = lent.unwrap_or_default();
            self.tables.insert(place, Table { lent, ..Table::default() });
        }
        let Some(table) = self.tables.get_mut(&place) else { return };
        table.observe(nodes, took, now);
        table.rebuild(token, now);
    }

    /// Takes what a probe has found. `token`: seconds per ridden token.
    pub(super) fn take_prior(&mut self, prior: &Prior, token: f64, now: Tick) {
        for (plan, curves) in prior.verify.iter().enumerate() {
            for curve in curves {
                let place =
                    Place { plan, size: size_of(curve.context), crowd: Crowd::default(), riders: false };
                let table = self.tables.entry(place).or_default();
                (table.lent, table.probed) = (curve.points.clone(), true);
                table.rebuild(token, now);
            }
        }
    }

    /// Expected seconds of a call where a ridden token takes `token`, and the crowd that it was measured in; `None` if nothing
    /// is known of its plan.
    pub(super) fn seconds(&self, place: Place, nodes: usize, token: f64) -> Option<(f64, Crowd)> {
        let (known, table) = self.nearest_place(place)?;
        let seconds = *table.curve.get(nodes.min(NODES_MAX))?;
        let wait = waits(known.riders, place.riders, token);
        Some(((seconds + wait).max(seconds * 0.5), known.crowd))
    }

    /// Whether something is known of calls of just this place.
    pub(super) fn is_known(&self, place: Place) -> bool {
        self.tables.contains_key(&place)
    }

    /// Makes `now` the origin of time: every figure is as certain as it is now.
    pub(super) fn age(&mut self, now: Tick) {
        let means = self.tables.values_mut().flat_map(|table| &mut table.means);
        means.for_each(|mean| mean.age(now));
    }

    /// Whether a session has measured any call of this plan.
    pub(super) fn is_measured(&self, place: Place) -> bool {
        self.tables.iter().any(|(known, table)| known.plan == place.plan && !table.means.is_empty())
    }

    /// Seconds since a call was measured at the place nearest to this one; 0 if none was.
    pub(super) fn rest(&self, place: Place, now: Tick) -> f64 {
        let last = self.nearest_place(place).and_then(|(_, table)| table.means.iter().map(Belief::at).max());
        last.map_or(0.0, |last| now.seconds_since(last))
    }

    /// Seconds for each node more, as measured at the place nearest to this one; `None` if nobody can tell.
    pub(super) fn slope(&self, place: Place) -> Option<f64> {
        self.nearest_place(place)?.1.slope()
    }

    /// The largest number of nodes that was measured for this plan; `None` if none was.
    pub(super) fn reach(&self, place: Place) -> Option<usize> {
        let same = self.tables.iter().filter(|(known, _)| known.plan == place.plan);
        same.filter_map(|(_, table)| table.reach()).max()
    }

    /// The table nearest to this place; of two the smaller.
    fn nearest_place(&self, place: Place) -> Option<(Place, &Table)> {
        if let Some(table) = self.tables.get(&place) {
            return Some((place, table));
        }
        let same = self.tables.iter().filter(|(known, _)| known.plan == place.plan);
        same.min_by_key(|(known, _)| known.distance(place)).map(|(known, table)| (*known, table))
    }
}

/// Seconds of a verify call in one place, by draft nodes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Table {
    /// By number of nodes; empty before the first.
    means: Vec<Belief>,
    /// What was supposed before anything was measured here: by a probe, or by the nearest place.
    lent: Points,
    /// A probe has found that.
    #[serde(skip)]
    probed: bool,
    /// Expected seconds for every number of nodes.
    curve: Vec<f64>,
}

impl Table {
    fn observe(&mut self, nodes: usize, took: f64, now: Tick) {
        let nodes = nodes.min(NODES_MAX);
        let others = self.means.iter().enumerate().filter(|(other, _)| *other != nodes);
        let sure = others.map(|(_, mean)| mean.weight(now)).sum::<f64>() >= SURE;
        let said = self.curve.get(nodes).copied().filter(|_| sure);
        self.means.resize(NODES_MAX + 1, Belief::default());
        if let Some(mean) = self.means.get_mut(nodes) {
            let most = said.filter(|_| mean.weight(now) < SURE).map_or(f64::MAX, |said| SURPRISE * said);
            mean.observe(took.min(most), now);
        }
        for (other, mean) in self.means.iter_mut().enumerate().filter(|(_, mean)| mean.weight(now) < SURE) {
            let longer = (other as f64 / nodes.max(1) as f64).max(1.0);
            mean.bound(HICCUP * longer * took);
        }
    }

    /// The curve as points, to be lent to another place.
    fn points(&self) -> Points {
        self.curve.iter().copied().enumerate().collect()
    }

    fn reach(&self) -> Option<usize> {
        let measured = self.means.iter().rposition(|mean| mean.known().is_some());
        measured.max(self.lent.last().filter(|_| self.probed).map(|point| point.0))
    }

    /// Seconds for each node more, from the smallest to the largest draft that was measured; `None` where they are too near
    /// to each other to tell.
    fn slope(&self) -> Option<f64> {
        let known = |mean: &Belief| mean.known().is_some();
        let (least, most) = (self.means.iter().position(known)?, self.means.iter().rposition(known)?);
        let (low, high) = (self.curve.get(least)?, self.curve.get(most)?);
        (most >= least + SLOPE_OVER).then(|| (high - low) / (most - least) as f64)
    }

    /// What was supposed, scaled by how far measurements differ from it.
    fn supposed(&self, now: Tick) -> Vec<Option<f64>> {
        let (mut real, mut said) = (0.0, 0.0);
        for (nodes, mean) in self.means.iter().enumerate().filter(|_| !self.lent.is_empty()) {
            if let Some(value) = mean.known() {
                let weight = mean.weight(now);
                real += weight * value;
                said += weight * along(&self.lent, nodes, 0.0);
            }
        }
        let factor = if said > 0.0 { real / said } else { 1.0 };
        let at = |nodes: usize| self.lent.iter().find(|point| point.0 == nodes).map(|point| point.1 * factor);
        (0..=NODES_MAX).map(at).collect()
    }

    /// Monotone (pool adjacent violators), then linear between known points; beyond the last the slope of the last two.
    /// While there is but one, a part of what the call takes beyond a step of `token` seconds is taken to be its nodes'.
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
    }
}

/// Piecewise linear through `points` (rising in both coordinates), `slope` per node outside them.
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
