//! A line through measurements: Bayesian linear regression whose old measurements fade.
//!
//! The prior is a mean and a scale for each coefficient, so that a line is usable after one
//! measurement, and coefficients that nothing was measured of stay where they began.
#![expect(clippy::indexing_slicing, reason = "every index is below N")]

/// Maximum of a measurement that counts, as a multiple of what the line predicts.
const OUTLIER: f64 = 3.0;
/// Measurements from which on outliers are recognised.
const SETTLED: f64 = 8.0;

/// A linear function of `N` features with uncertain coefficients.
#[derive(Clone, Debug, PartialEq)]
pub struct Line<const N: usize> {
    mean: [f64; N],
    /// Precision of the prior, in units of the measurements' variance.
    precision: [f64; N],
    /// The measurements: sums of the products of their features.
    squares: [[f64; N]; N],
    /// The measurements: sums of features times what the prior's mean leaves unexplained.
    residuals: [f64; N],
    keep: f64,
    weight: f64,
    coefficients: [f64; N],
}

impl<const N: usize> Line<N> {
    /// A line with coefficients of about `mean`, each known to about `scale`, through measurements
    /// with an error of about `noise`. A measurement weighs half after `half_life` others.
    pub fn new(mean: [f64; N], scale: [f64; N], noise: f64, half_life: f64) -> Self {
        Self {
            mean,
            precision: scale.map(|scale| (noise / scale).powi(2)),
            squares: [[0.0; N]; N],
            residuals: [0.0; N],
            keep: 0.5_f64.powf(1.0 / half_life),
            weight: 0.0,
            coefficients: mean,
        }
    }

    /// Notes that `value` was measured at these features. Values that are not finite are ignored,
    /// and one that is far too large counts as three times what was expected.
    pub fn note(&mut self, features: [f64; N], value: f64) {
        if !value.is_finite() {
            return;
        }
        let expected = self.at(features);
        let value = if self.weight > SETTLED { value.min(OUTLIER * expected.max(0.0)) } else { value };
        let rest = value - dot(&self.mean, &features);
        for (row, (sums, residual)) in self.squares.iter_mut().zip(&mut self.residuals).enumerate() {
            *residual = *residual * self.keep + features[row] * rest;
            for (sum, feature) in sums.iter_mut().zip(features) {
                *sum = *sum * self.keep + features[row] * feature;
            }
        }
        self.weight = self.weight * self.keep + 1.0;
        self.coefficients = self.solved();
    }

    /// The value that is expected at these features.
    pub fn at(&self, features: [f64; N]) -> f64 {
        dot(&self.coefficients, &features)
    }

    /// The coefficients as they are estimated now.
    pub fn coefficients(&self) -> [f64; N] {
        self.coefficients
    }

    /// Measurements that count now.
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// The mean of the coefficients given the measurements: the solution of the normal equations.
    fn solved(&self) -> [f64; N] {
        let (mut matrix, mut sums) = (self.squares, self.residuals);
        for (index, precision) in self.precision.iter().enumerate() {
            matrix[index][index] += precision;
        }
        // Gauss without pivoting: the matrix is symmetric and positive definite.
        for pivot in 0..N {
            for row in pivot + 1..N {
                let factor = matrix[row][pivot] / matrix[pivot][pivot];
                let above = matrix[pivot];
                for (value, above) in matrix[row].iter_mut().zip(above) {
                    *value -= factor * above;
                }
                sums[row] -= factor * sums[pivot];
            }
        }
        let mut solution = [0.0; N];
        for row in (0..N).rev() {
            let known: f64 = (row + 1..N).map(|column| matrix[row][column] * solution[column]).sum();
            solution[row] = (sums[row] - known) / matrix[row][row];
        }
        std::array::from_fn(|index| self.mean[index] + solution[index])
    }
}

fn dot<const N: usize>(a: &[f64; N], b: &[f64; N]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Line<2> {
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
            line.note([1.0, x], 3.0 + 0.2 * x);
        }
        let [base, slope] = line.coefficients();
        assert!((base - 3.0).abs() < 0.02 && (slope - 0.2).abs() < 0.01, "{base} {slope}");
    }

    #[test]
    fn one_hiccup_is_no_trend_and_a_change_is_followed() {
        let mut line = line();
        (0..100).for_each(|_| line.note([1.0, 0.0], 1.0));
        line.note([1.0, 0.0], 500.0);
        assert!(line.at([1.0, 0.0]) < 1.1);
        (0..300).for_each(|_| line.note([1.0, 0.0], 2.0));
        assert!((line.at([1.0, 0.0]) - 2.0).abs() < 0.1);
        line.note([1.0, 0.0], f64::NAN);
        assert!(line.at([1.0, 0.0]).is_finite());
    }
}
