//! The conditions of a round: what draft length and tolerance depend on besides the text.

/// Temperature, load of the engine and tolerance of a round when its draft was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Conditions {
    /// Temperature of the request.
    pub temperature: f64,
    /// Load of the engine, 0 to 1, by which curves are looked up.
    pub load: f64,
    /// Tolerance of the acceptance rule, 0 (exact) to 1.
    pub tolerance: f64,
}

impl Conditions {
    /// Names of the ranges of temperatures.
    pub const TEMPERATURES: [&str; 4] = ["0", "0-0.5", "0.5-0.9", "0.9-"];
    /// Names of the ranges of loads.
    pub const LOADS: [&str; 4] = ["0-0.25", "0.25-0.5", "0.5-0.75", "0.75-1"];

    /// The range of its temperature: those by which acceptance is learnt.
    pub fn temperature_range(&self) -> &'static str {
        let [zero, low, middle, high] = Self::TEMPERATURES;
        match self.temperature {
            temperature if temperature <= 0.0 => zero,
            temperature if temperature <= 0.5 => low,
            temperature if temperature <= 0.9 => middle,
            _ => high,
        }
    }

    /// The quarter of its load.
    pub fn load_range(&self) -> &'static str {
        let quarter = (self.load.clamp(0.0, 1.0) * 4.0) as usize;
        Self::LOADS.get(quarter.min(3)).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_is_in_a_range() {
        let ranges = |temperature, load| {
            let conditions = Conditions { temperature, load, tolerance: 0.0 };
            (conditions.temperature_range(), conditions.load_range())
        };
        assert_eq!(ranges(0.0, 0.0), ("0", "0-0.25"));
        assert_eq!(ranges(0.5, 0.25), ("0-0.5", "0.25-0.5"));
        assert_eq!(ranges(0.7, 0.74), ("0.5-0.9", "0.5-0.75"));
        assert_eq!(ranges(2.0, 7.0), ("0.9-", "0.75-1"));
    }
}
