//! A line through measurements: Bayesian linear regression whose old measurements fade.
//!
//! The prior is a mean and a scale for each coefficient, so that a line is usable after one
//! measurement, and coefficients that nothing was measured of stay where they began.
#![expect(clippy::indexing_slicing, reason = "every index is below MOST")]

use serde::{Deserialize, Serialize};

/// Maximum of a measurement that counts, as a multiple of what the line predicts.
const OUTLIER: f64 = 3.0;
/// Measurements from which on outliers are recognised.
const SETTLED: f64 = 8.0;
/// Most features of a line.
const MOST: usize = 6;

type Row = [f64; MOST];

/// Sums over measurements, in which older ones weigh less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<f64>", into = "Vec<f64>")]
pub struct Moments {
    /// Measurements.
    pub weight: f64,
    /// Of each feature times the value.
    products: Row,
    /// Of each feature times each other.
    squares: [Row; MOST],
}

/// A linear function of up to six features with uncertain coefficients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    mean: Row,
    /// Precision of the prior, in units of the measurements' variance.
    precision: Row,
    keep: f64,
    local: Moments,
    /// Measurements of others, which fill up the memory that local ones leave free.
    #[serde(skip)]
    lent: Moments,
    coefficients: Row,
}

/// Sums that are written: the weight, the products, and the squares without those that are there
/// twice.
const WRITTEN: usize = 1 + MOST + MOST * (MOST + 1) / 2;

/// With six significant digits, which is more than any of these figures is worth, and without the
/// zeros at the end.
impl From<Moments> for Vec<f64> {
    fn from(moments: Moments) -> Self {
        let mut sums = vec![moments.weight];
        sums.extend(moments.products);
        (0..MOST).for_each(|row| sums.extend(&moments.squares[row][..=row]));
        while sums.last().is_some_and(|sum| *sum == 0.0) {
            sums.pop();
        }
        for sum in &mut sums {
            *sum = format!("{sum:.5e}").parse().unwrap_or(0.0);
        }
        sums
    }
}

impl From<Vec<f64>> for Moments {
    fn from(sums: Vec<f64>) -> Self {
        let mut moments = Self::default();
        let mut sums = sums.into_iter().take(WRITTEN);
        moments.weight = sums.next().unwrap_or(0.0);
        moments.products.fill_with(|| sums.next().unwrap_or(0.0));
        for row in 0..MOST {
            for column in 0..=row {
                let sum = sums.next().unwrap_or(0.0);
                (moments.squares[row][column], moments.squares[column][row]) = (sum, sum);
            }
        }
        moments
    }
}

impl Moments {
    fn add(&mut self, features: &Row, value: f64, count: f64, keep: f64) {
        self.scale(keep.powf(count.min(1.0)));
        self.weight += count.min(1.0);
        for (row, (squares, product)) in self.squares.iter_mut().zip(&mut self.products).enumerate() {
            *product += features[row] * value;
            for (square, feature) in squares.iter_mut().zip(features) {
                *square += features[row] * feature;
            }
        }
    }

    fn scale(&mut self, share: f64) {
        self.weight *= share;
        let squares = self.squares.iter_mut().flatten();
        squares.chain(&mut self.products).for_each(|sum| *sum *= share);
    }

    /// These measurements with a weight of at most `most`.
    #[must_use]
    pub fn within(mut self, most: f64) -> Self {
        if self.weight > most.max(0.0) {
            self.scale(most.max(0.0) / self.weight);
        }
        self
    }

    /// Adds other measurements. Invalid ones are ignored: they may come from outside.
    pub fn merge(&mut self, other: &Self) {
        let sums = other.squares.iter().flatten().chain(&other.products);
        let valid = |sum: &f64| sum.abs() < MAX * MAX;
        if !(0.0..MAX).contains(&other.weight) || !sums.into_iter().all(valid) || !other.is_positive() {
            return;
        }
        self.weight += other.weight;
        let ours = self.squares.iter_mut().flatten().chain(&mut self.products);
        let theirs = other.squares.iter().flatten().chain(&other.products);
        ours.zip(theirs).for_each(|(our, their)| *our += their);
    }

    /// True if its squares can be those of measurements.
    fn is_positive(&self) -> bool {
        (0..MOST).all(|row| {
            (0..MOST).all(|column| {
                let both = self.squares[row][column];
                let most = self.squares[row][row] * self.squares[column][column];
                both * both <= most * (1.0 + 1e-4) + f64::MIN_POSITIVE
            })
        })
    }
}

/// Limit of figures that come from outside: far above any real one.
const MAX: f64 = 1e12;

impl Line {
    /// A line with coefficients of about `mean`, each known to about `scale`, through measurements
    /// with an error of about `noise`. A measurement weighs half after `half_life` others.
    pub fn new<const N: usize>(mean: [f64; N], scale: [f64; N], noise: f64, half_life: f64) -> Self {
        let mean = padded(mean);
        let mut precision = [1.0; MOST];
        for (precision, scale) in precision.iter_mut().zip(scale) {
            *precision = (noise / scale).powi(2);
        }
        Self {
            mean,
            precision,
            keep: 0.5_f64.powf(1.0 / half_life),
            local: Moments::default(),
            lent: Moments::default(),
            coefficients: mean,
        }
    }

    /// Notes that `value` was measured at these features, as `count` measurements. Values that are
    /// not finite are ignored, and one that is far too large counts as three times what was
    /// expected.
    pub fn note<const N: usize>(&mut self, features: [f64; N], value: f64, count: f64) {
        if value.is_finite() {
            let settled = self.weight() > SETTLED;
            let most = if settled { OUTLIER * self.at(features).max(0.0) } else { f64::MAX };
            self.weigh(features, value.min(most), count);
        }
    }

    /// As [`Self::note`], whatever the value is.
    pub fn weigh<const N: usize>(&mut self, features: [f64; N], value: f64, count: f64) {
        let features = padded(features);
        if !(value.is_finite() && count.is_finite() && count > 0.0) {
            return;
        }
        let root = count.sqrt();
        self.local.add(&features.map(|feature| feature * root), value * root, count, self.keep);
        self.coefficients = self.solved();
    }

    /// The value that is expected at these features.
    pub fn at<const N: usize>(&self, features: [f64; N]) -> f64 {
        dot(&self.coefficients, &padded(features))
    }

    /// The first coefficients as they are estimated now.
    pub fn coefficients<const N: usize>(&self) -> [f64; N] {
        std::array::from_fn(|index| self.coefficients[index])
    }

    /// Measurements that count now.
    pub fn weight(&self) -> f64 {
        self.local.weight + self.filling().weight
    }

    /// The local measurements.
    pub fn local(&self) -> &Moments {
        &self.local
    }

    /// Replaces the measurements of others.
    pub fn lend(&mut self, lent: Moments) {
        self.lent = lent;
        self.coefficients = self.solved();
    }

    /// Makes the local measurements weigh this share of what they did.
    pub fn fade(&mut self, share: f64) {
        self.local.scale(share);
        self.coefficients = self.solved();
    }

    /// The part of the measurements of others that counts.
    fn filling(&self) -> Moments {
        self.lent.within(1.0 / (1.0 - self.keep) - self.local.weight)
    }

    /// The mean of the coefficients given the measurements: the solution of the normal equations.
    fn solved(&self) -> Row {
        let mut all = self.local;
        all.merge(&self.filling());
        let (mut matrix, mut sums) = (all.squares, all.products);
        for (index, precision) in self.precision.iter().enumerate() {
            matrix[index][index] += precision;
            sums[index] += precision * self.mean[index];
        }
        // Gauss without pivoting: the matrix is symmetric and positive definite.
        for pivot in 0..MOST {
            for row in pivot + 1..MOST {
                let factor = matrix[row][pivot] / matrix[pivot][pivot];
                let above = matrix[pivot];
                for (value, above) in matrix[row].iter_mut().zip(above) {
                    *value -= factor * above;
                }
                sums[row] -= factor * sums[pivot];
            }
        }
        let mut solution = [0.0; MOST];
        for row in (0..MOST).rev() {
            let known: f64 = (row + 1..MOST).map(|column| matrix[row][column] * solution[column]).sum();
            solution[row] = (sums[row] - known) / matrix[row][row];
        }
        solution
    }
}

fn padded<const N: usize>(values: [f64; N]) -> Row {
    const { assert!(N <= MOST) };
    std::array::from_fn(|index| values.get(index).copied().unwrap_or(0.0))
}

fn dot(a: &Row, b: &Row) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Line {
        Line::new([1.0, 0.5], [4.0, 0.5], 0.1, 64.0)
    }

    #[test]
    fn an_unmeasured_line_is_its_prior() {
        assert!((line().at([1.0, 2.0]) - 2.0).abs() < 1e-12);
    }

    #[test]
    fn it_goes_through_what_was_measured() {
        let mut line = line();
        for n in 0..200 {
            let x = f64::from(n % 7);
            line.note([1.0, x], 3.0 + 0.2 * x, 1.0);
        }
        let [base, slope] = line.coefficients::<2>();
        assert!((base - 3.0).abs() < 0.02 && (slope - 0.2).abs() < 0.01, "{base} {slope}");
    }

    #[test]
    fn one_hiccup_is_no_trend_and_a_change_is_followed() {
        let mut line = line();
        (0..100).for_each(|_| line.note([1.0, 0.0], 1.0, 1.0));
        line.note([1.0, 0.0], 500.0, 1.0);
        assert!(line.at([1.0, 0.0]) < 1.1);
        (0..300).for_each(|_| line.note([1.0, 0.0], 2.0, 1.0));
        assert!((line.at([1.0, 0.0]) - 2.0).abs() < 0.1);
        line.note([1.0, 0.0], f64::NAN, 1.0);
        assert!(line.at([1.0, 0.0]).is_finite());
    }

    #[test]
    fn measurements_of_others_fill_the_memory_that_local_ones_leave_free() {
        let (mut one, mut other) = (line(), line());
        (0..50).for_each(|n| one.note([1.0, f64::from(n % 5)], 2.0 + 0.5 * f64::from(n % 5), 1.0));
        other.lend(*one.local());
        assert!((other.at([1.0, 4.0]) - one.at([1.0, 4.0])).abs() < 1e-9);
        (0..600).for_each(|_| other.note([1.0, 0.0], 1.0, 1.0));
        let read: Moments = Vec::from(*one.local()).into();
        assert!((read.weight - one.weight()).abs() < 1e-3 && Vec::from(read).len() < 12);
        assert!((other.at([1.0, 0.0]) - 1.0).abs() < 0.05, "{}", other.at([1.0, 0.0]));
        let mut wrong = *one.local();
        wrong.squares[0][1] = 1e9;
        let before = line();
        let mut after = line();
        after.lend(wrong);
        assert!((after.at([1.0, 3.0]) - before.at([1.0, 3.0])).abs() < 1e-12);
    }
}
