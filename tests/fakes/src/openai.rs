//! What engines that speak the OpenAI interface have in common.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

/// A fresh id with a prefix.
pub fn id(prefix: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("{prefix}-{:032x}", NEXT.fetch_add(1, Ordering::SeqCst))
}

/// Seconds since 1970.
pub fn created() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// A text parted by a reasoning parser: what comes before the marker, and what comes after it.
pub fn reasoning(text: &str, marker: Option<&str>) -> (Option<String>, Option<String>) {
    match marker.map(|marker| text.split_once(marker)) {
        None => (None, Some(text.to_owned())),
        Some(Some((thought, said))) => (Some(thought.to_owned()), Some(said.to_owned())),
        // The end of the thought has not come: all of it is thought.
        Some(None) => (Some(text.to_owned()), None),
    }
}

/// Parts a streamed text as `reasoning` does: gives (thought, said) of every delta.
pub struct Parting {
    marker: Option<String>,
    seen: String,
    told: (usize, usize),
}

impl Parting {
    pub fn new(marker: Option<&str>) -> Self {
        Self { marker: marker.map(str::to_owned), seen: String::new(), told: (0, 0) }
    }

    pub fn push(&mut self, text: &str, last: bool) -> (String, String) {
        let Some(marker) = &self.marker else { return (String::new(), text.to_owned()) };
        self.seen.push_str(text);
        let (thought, said) = self.seen.split_once(marker.as_str()).unwrap_or((&self.seen, ""));
        let open = !last && !self.seen.contains(marker.as_str());
        let begun = |at: &usize| thought.is_char_boundary(*at) && marker.starts_with(&thought[*at..]);
        let held = if open { (0..thought.len()).find(begun).unwrap_or(thought.len()) } else { thought.len() };
        let delta = (thought[self.told.0.min(held)..held].to_owned(), said[self.told.1..].to_owned());
        self.told = (self.told.0.max(held), said.len());
        delta
    }
}

/// Counters and gauges in the text format.
#[derive(Default)]
pub struct Exposition(pub String);

impl Exposition {
    pub fn add(&mut self, kind: &str, name: &str, labels: &str, value: impl std::fmt::Display) {
        let line =
            if labels.is_empty() { format!("{name} {value}") } else { format!("{name}{{{labels}}} {value}") };
        let family = name.strip_suffix("_total").unwrap_or(name);
        let family = if kind == "counter" { family } else { name };
        self.0.extend(["# HELP ", family, " ", family, "\n# TYPE ", family, " ", kind, "\n", &line, "\n"]);
    }

    pub fn gauge(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        self.add("gauge", name, labels, value);
    }

    pub fn counter(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        self.add("counter", name, labels, value);
    }
}

/// The list of one model.
pub fn models(id: &str, owner: &str, max_len: usize) -> Value {
    json!({"object": "list", "data": [{"id": id, "object": "model", "created": created(), "owned_by": owner,
        "root": id, "parent": null, "max_model_len": max_len}]})
}
