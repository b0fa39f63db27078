//! Progress of long work, on standard error; invisible where that is not a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over a number of `units`, a plural such as `cells`.
pub fn bar(units: &str) -> ProgressBar {
    let style = format!("{{bar:28}} {{pos}}/{{len}} {units}, {{eta}} remaining  {{msg}}");
    let style = ProgressStyle::with_template(&style);
    ProgressBar::no_length().with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// For work of unknown length.
pub fn spinner(message: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {elapsed} {msg}");
    let bar = ProgressBar::new_spinner().with_message(message);
    bar.enable_steady_tick(Duration::from_millis(100));
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
}
