//! Tolerance of an acceptance rule by temperature and load: two curves that the operator sets.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

/// Points (x, y) with ascending x; linear between them, constant beyond them. Without points it is
/// 1 everywhere.
pub type Curve = Vec<(f64, f64)>;

/// The most tolerance of a lossy rule, 0 (exact) to 1: the product of two curves, capped.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Tolerance {
    /// Points [temperature, tolerance], temperature rising. Without it 1 everywhere; always 0 at
    /// temperature 0.
    #[schemars(schema_with = "curve::<2>")]
    pub temperature: Curve,
    /// Points [load, factor], load from 0 (idle) to 1 (full or waiting) rising. Without it 1
    /// everywhere.
    #[schemars(schema_with = "curve::<1>")]
    pub load: Curve,
    /// Maximum of the product; 0 relaxes nothing. typical is as published at 1.
    #[schemars(range(min = 0, max = 1))]
    pub max: f64,
}

impl Default for Tolerance {
    fn default() -> Self {
        Self { temperature: Curve::new(), load: Curve::new(), max: 1.0 }
    }
}

/// The schema of a curve with x up to `MAX`.
fn curve<const MAX: u32>(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "array",
            "prefixItems": [
                { "type": "number", "minimum": 0, "maximum": MAX },
                { "type": "number", "minimum": 0, "maximum": 1 },
            ],
            "items": false,
            "minItems": 2,
        },
    })
}

impl Tolerance {
    /// The tolerance at a temperature and a load (0 to 1). Zero at temperature 0: a greedy text has
    /// no second choice.
    pub fn at(&self, temperature: f64, load: f64) -> f64 {
        if temperature <= 0.0 {
            return 0.0;
        }
        (value(&self.temperature, temperature) * value(&self.load, load)).clamp(0.0, self.max.clamp(0.0, 1.0))
    }
}

fn value(curve: &[(f64, f64)], x: f64) -> f64 {
    let Some(&(_, last)) = curve.last() else { return 1.0 };
    let after = curve.iter().position(|&(at, _)| at >= x);
    match after.map(|after| (after.checked_sub(1).and_then(|before| curve.get(before)), curve.get(after))) {
        Some((Some(&(from, low)), Some(&(to, high)))) => low + (high - low) * (x - from) / (to - from),
        Some((None, Some(&(_, first)))) => first,
        _ => last,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_two_points_it_is_linear_and_beyond_them_flat() {
        let curve = [(0.2, 0.0), (0.7, 0.2), (1.0, 0.3)];
        for (x, y) in [(0.0, 0.0), (0.2, 0.0), (0.45, 0.1), (0.7, 0.2), (0.85, 0.25), (1.0, 0.3), (2.0, 0.3)]
        {
            assert!((value(&curve, x) - y).abs() < 1e-12, "{x}");
        }
        assert!((value(&[], 0.3) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn the_curves_are_multiplied_and_the_product_is_capped() {
        let tolerance = Tolerance {
            temperature: vec![(0.0, 0.0), (1.0, 0.4)],
            load: vec![(0.0, 0.5), (1.0, 1.0)],
            max: 0.3,
        };
        assert!((tolerance.at(0.5, 0.0) - 0.1).abs() < 1e-12);
        assert!((tolerance.at(0.5, 1.0) - 0.2).abs() < 1e-12);
        assert!((tolerance.at(1.0, 1.0) - 0.3).abs() < 1e-12);
    }

    #[test]
    fn nothing_is_tolerated_at_temperature_zero_or_without_a_cap() {
        assert!(Tolerance { max: 1.0, ..Tolerance::default() }.at(0.0, 1.0).abs() < 1e-12);
        assert!(Tolerance { max: 0.0, ..Tolerance::default() }.at(1.0, 1.0).abs() < 1e-12);
    }
}
