//! Measures how much an output repeats itself.
//!
//! Small models at temperature 0 tend to fall into loops, and lookup drafters predict loops best,
//! so looping outputs make a benchmark look too good. Repetition of the prompt does not count;
//! copying is legitimate.

use std::collections::HashSet;
use std::hash::Hash;

/// Length of a window, in tokens or words.
const WINDOW: usize = 8;
/// Minimum share of repeated windows for an output to count as looping.
const LOOPS: f64 = 0.2;

/// Share, 0 to 1, of the output's windows that occurred earlier in the output and do not occur in
/// the prompt; 0 for an output shorter than a window.
pub fn repeated<T: Eq + Hash>(prompt: &[T], output: &[T]) -> f64 {
    let known: HashSet<&[T]> = prompt.windows(WINDOW).collect();
    let mut seen = HashSet::new();
    let (mut windows, mut repeated) = (0_u32, 0_u32);
    for window in output.windows(WINDOW) {
        windows += 1;
        let is_repeated = !seen.insert(window);
        repeated += u32::from(is_repeated && !known.contains(window));
    }
    f64::from(repeated) / f64::from(windows.max(1))
}

/// True if the share of repeated windows is at least 0.2.
pub fn loops<T: Eq + Hash>(prompt: &[T], output: &[T]) -> bool {
    repeated(prompt, output) >= LOOPS
}

/// The words of a text, used where there are no token ids.
pub fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact values are expected
mod tests {
    use super::*;

    #[test]
    fn fresh_text_does_not_loop() {
        let output: Vec<u32> = (0..64).collect();
        assert_eq!(repeated(&[], &output), 0.0);
    }

    #[test]
    fn a_cycle_loops_and_a_copy_of_the_prompt_does_not() {
        let cycle: Vec<u32> = (0..64).map(|i| i % 4).collect();
        // 57 windows, of which the first four are new.
        assert!((repeated(&[], &cycle) - 53.0 / 57.0).abs() < 1e-12);
        assert!(loops(&[], &cycle));
        assert!(!loops(&cycle, &cycle));
    }

    #[test]
    fn a_few_words_cannot_loop() {
        assert_eq!(repeated(&[], &words("a a a a")), 0.0);
        assert!(loops(&[], &words(&"ha ".repeat(20))));
    }
}
