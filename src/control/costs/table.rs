//! The time of verify calls: a table over the number of draft nodes for every plan and size of the context.
//!
//! A table is made monotone and interpolated. A context of a size that has not been measured is taken to cost what
//! the nearest measured size does.

use super::{Mean, PRIOR_WEIGHT};
use crate::control::prospect::Prior;
use crate::units::Tick;
use crate::words::Plan;

/// Most nodes with an entry of their own in a table; larger drafts share the last.
pub const NODES_MAX: usize = 32;
/// Bounds between the sizes of contexts, in tokens: below the first, and from each one on.
pub const CONTEXTS: [usize; 5] = [128, 512, 2_048, 8_192, 32_768];
/// Number of sizes of contexts.
const SIZES: usize = CONTEXTS.len() + 1;

/// Which table a call belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    plan: usize,
    size: usize,
}

impl Place {
    pub(super) fn new(plan: Plan, context: usize) -> Self {
        Self { plan: plan.index(), size: size_of(context) }
    }
}

fn size_of(context: usize) -> usize {
    CONTEXTS.iter().filter(|&&edge| context >= edge).count()
}

/// Seconds of verify calls by plan, size of the context and draft nodes.
#[derive(Debug)]
pub(super) struct Verify {
    tables: [[Table; SIZES]; Plan::ALL.len()],
}

impl Default for Verify {
    fn default() -> Self {
        Self { tables: std::array::from_fn(|_| std::array::from_fn(|_| Table::default())) }
    }
}

impl Verify {
    /// Notes a call that took `took` seconds. `slope`: seconds per node before two numbers of nodes are known. Entries
    /// that were measured last more than `keep` seconds ago are forgotten.
    pub(super) fn observe(
        &mut self,
        place: Place,
        nodes: usize,
        took: f64,
        slope: f64,
        now: Tick,
        keep: f64,
    ) {
        let lent = self.nearest(place).map(Table::points).unwrap_or_default();
        let Some(table) = self.tables.get_mut(place.plan).and_then(|sizes| sizes.get_mut(place.size)) else {
            return;
        };
        if table.curve.is_empty() {
            table.lent = lent;
        }
        table.observe(nodes, took, now);
        table.drop_older(now, keep);
        table.rebuild(slope);
    }

    /// Takes what a probe has found: for each size, the curve of the nearest context that it has measured.
    pub(super) fn take_prior(&mut self, prior: &Prior, slope: f64) {
        for (sizes, curves) in self.tables.iter_mut().zip(&prior.verify) {
            for (size, table) in sizes.iter_mut().enumerate() {
                let nearest = curves.iter().min_by_key(|curve| size_of(curve.context).abs_diff(size));
                table.prior = nearest.map(|curve| curve.points.clone()).unwrap_or_default();
                table.rebuild(slope);
            }
        }
    }

    /// Expected seconds of a call; `None` if nothing is known of its plan.
    pub(super) fn seconds(&self, place: Place, nodes: usize) -> Option<f64> {
        self.nearest(place)?.curve.get(nodes.min(NODES_MAX)).copied()
    }

    /// Whether something is known of calls of just this plan and size.
    pub(super) fn is_known(&self, place: Place) -> bool {
        self.table(place).is_some_and(|table| !table.curve.is_empty())
    }

    /// Whether a session has measured anything.
    pub(super) fn is_measured(&self) -> bool {
        self.tables.iter().flatten().any(Table::is_measured)
    }

    /// Forgets every measurement; what a probe has found stays.
    pub(super) fn forget(&mut self, slope: f64) {
        self.tables.iter_mut().flatten().for_each(|table| table.forget(slope));
    }

    fn table(&self, place: Place) -> Option<&Table> {
        self.tables.get(place.plan)?.get(place.size)
    }

    /// The table of the size nearest to this one of which anything is known; of two the smaller.
    fn nearest(&self, place: Place) -> Option<&Table> {
        let known =
            self.tables.get(place.plan)?.iter().enumerate().filter(|(_, table)| !table.curve.is_empty());
        known.min_by_key(|(size, _)| size.abs_diff(place.size)).map(|(_, table)| table)
    }
}

/// Seconds of a verify call of one plan and size of the context, by draft nodes.
#[derive(Debug, Default)]
struct Table {
    /// By number of nodes: the mean, and when it was last measured; empty before the first.
    means: Vec<(Mean, Tick)>,
    /// What a probe has found, by number of nodes.
    prior: Vec<(usize, f64)>,
    /// What was known of the nearest other size when this one was first measured.
    lent: Vec<(usize, f64)>,
    /// Expected seconds for every number of nodes, from means and prior; empty while nothing is known.
    curve: Vec<f64>,
}

impl Table {
    fn observe(&mut self, nodes: usize, took: f64, now: Tick) {
        self.means.resize(NODES_MAX + 1, (Mean::default(), Tick::default()));
        if let Some((mean, at)) = self.means.get_mut(nodes.min(NODES_MAX)) {
            mean.observe(took);
            *at = now;
        }
    }

    /// The curve as points, to be lent to another size.
    fn points(&self) -> Vec<(usize, f64)> {
        self.curve.iter().copied().enumerate().collect()
    }

    fn is_measured(&self) -> bool {
        self.means.iter().any(|(mean, _)| mean.known().is_some())
    }

    /// Forgets every measurement; what a probe has found stays.
    fn forget(&mut self, slope: f64) {
        *self = Self { prior: std::mem::take(&mut self.prior), ..Self::default() };
        self.rebuild(slope);
    }

    /// The prior where nothing is measured, else what another size of the context has shown; scaled by how far
    /// measurements differ from it.
    fn supposed(&self) -> Vec<Option<f64>> {
        let points = if self.prior.is_empty() { &self.lent } else { &self.prior };
        let prior = |nodes: usize| (!points.is_empty()).then(|| along(points, nodes, 0.0));
        let (mut real, mut said) = (0.0, 0.0);
        for (nodes, (mean, _)) in self.means.iter().enumerate() {
            if let Some((value, prior)) = mean.known().zip(prior(nodes)) {
                real += mean.weight * value;
                said += mean.weight * prior;
            }
        }
        let factor = if said > 0.0 { real / said } else { 1.0 };
        let at = |nodes: usize| points.iter().find(|point| point.0 == nodes).map(|point| point.1 * factor);
        (0..=NODES_MAX).map(at).collect()
    }

    /// Forgets entries that were measured last more than `seconds` ago.
    fn drop_older(&mut self, now: Tick, seconds: f64) {
        for (mean, at) in &mut self.means {
            if now.seconds_since(*at) > seconds {
                *mean = Mean::default();
            }
        }
    }

    /// Monotone (pool adjacent violators), then linear between measured points; beyond the last the slope
    /// of the last two, or the prior slope.
    fn rebuild(&mut self, slope: f64) {
        let mut blocks: Vec<(f64, f64, usize, usize)> = Vec::new();
        let supposed = self.supposed();
        for (nodes, supposed) in supposed.into_iter().enumerate() {
            let mean = self.means.get(nodes).map(|measured| measured.0).unwrap_or_default();
            let known = mean.known().map(|value| (value, mean.weight));
            let Some((value, weight)) = known.or_else(|| Some((supposed?, PRIOR_WEIGHT))) else { continue };
            let mut block = (value, weight, nodes, nodes);
            while let Some(&(value, weight, first, _)) = blocks.last().filter(|last| last.0 > block.0) {
                let sum = weight + block.1;
                block = ((value * weight + block.0 * block.1) / sum, sum, first, block.3);
                blocks.pop();
            }
            blocks.push(block);
        }
        let points: Vec<(usize, f64)> = blocks
            .iter()
            .flat_map(|&(value, _, first, last)| {
                let end = (last > first).then_some((last, value));
                std::iter::once((first, value)).chain(end)
            })
            .collect();
        self.curve = if points.is_empty() {
            Vec::new()
        } else {
            (0..=NODES_MAX).map(|nodes| along(&points, nodes, slope)).collect()
        };
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
            y + (nodes - x) as f64 * measured.unwrap_or(slope).max(slope * 0.25)
        }
        (None, Some(&(x, y))) => (y - (x - nodes) as f64 * slope).max(y * 0.5),
        (None, None) => 0.0,
    }
}
