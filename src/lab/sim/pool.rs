//! Independent simulations on all processors.

use std::num::NonZero;
use std::sync::Mutex;

/// The results of `work` for every number below `count`, in order, independent of the assignment to
/// processors.
pub fn each<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = Mutex::new(0..count);
    let results: Mutex<Vec<(usize, T)>> = Mutex::default();
    let run = || {
        while let Some(number) = next.lock().ok().and_then(|mut next| next.next()) {
            let result = work(number);
            if let Ok(mut results) = results.lock() {
                results.push((number, result));
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(count.max(1));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(run);
        }
    });
    let mut results = results.into_inner().unwrap_or_default();
    results.sort_by_key(|result| result.0);
    results.into_iter().map(|result| result.1).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_results_are_in_order() {
        assert_eq!(
            super::each(100, |number| number * 2),
            (0..100).map(|number| number * 2).collect::<Vec<_>>()
        );
        assert!(super::each(0, |number| number).is_empty());
    }
}
