//! Finds stop strings across token boundaries, and withholds text that may be the beginning of one.

use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};

/// Looks for stop strings in a growing text. The first one that is complete ends the output; of
/// several that end at the same character, the longest counts. A copy shares the automaton.
#[derive(Clone, Debug)]
pub(super) struct Stops {
    texts: Arc<[String]>,
    finder: Option<AhoCorasick>,
    include: bool,
    /// Withheld text: the beginning of a stop string.
    withheld: String,
}

/// Result of adding a piece of text.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Seen {
    /// Text that can be sent.
    pub(super) text: String,
    /// The stop string that was found and ends the output.
    pub(super) stop: Option<String>,
}

impl Stops {
    /// Looks for these strings; with `include` the found one stays in the text.
    pub(super) fn new(stops: &[String], include: bool) -> Result<Self, aho_corasick::BuildError> {
        let finder = match stops {
            [] => None,
            stops => Some(AhoCorasick::builder().match_kind(MatchKind::Standard).build(stops)?),
        };
        Ok(Self { texts: stops.into(), finder, include, withheld: String::new() })
    }

    /// Adds text. A stop string that is complete while `early` is set does not count, now or later.
    pub(super) fn push(&mut self, text: &str, early: bool) -> Seen {
        let Some(finder) = &self.finder else { return Seen { text: text.to_owned(), stop: None } };
        let before = self.withheld.len();
        self.withheld.push_str(text);
        let found =
            finder.find_overlapping_iter(&self.withheld).filter(|found| !early && found.end() > before);
        if let Some(found) = found.min_by_key(|found| (found.end(), found.start())) {
            let end = if self.include { found.end() } else { found.start() };
            let text = self.withheld.get(..end).unwrap_or_default().to_owned();
            self.withheld.clear();
            return Seen { text, stop: self.texts.get(found.pattern().as_usize()).cloned() };
        }
        let rest = self.withheld.split_off(self.withheld.len() - self.beginning());
        Seen { text: std::mem::replace(&mut self.withheld, rest), stop: None }
    }

    /// Returns the withheld text at the end of the output.
    pub(super) fn flush(&mut self) -> String {
        std::mem::take(&mut self.withheld)
    }

    /// Length of the longest end of the text that begins a stop string, bytes.
    fn beginning(&self) -> usize {
        let longest = self.texts.iter().map(|stop| stop.len().saturating_sub(1)).max().unwrap_or(0);
        let starts = self.withheld.char_indices().map(|(at, _)| at);
        let tails = starts
            .skip_while(|at| self.withheld.len() - at > longest)
            .filter_map(|at| self.withheld.get(at..));
        let mut tails = tails
            .filter(|tail| self.texts.iter().any(|stop| stop.len() > tail.len() && stop.starts_with(tail)));
        tails.next().map_or(0, str::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (String, Option<String>) {
        let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
        let mut watch = Stops::new(&stops, include).unwrap();
        let mut text = String::new();
        for piece in pieces {
            let seen = watch.push(piece, false);
            text.push_str(&seen.text);
            if seen.stop.is_some() {
                return (text, seen.stop);
            }
        }
        text.push_str(&watch.flush());
        (text, None)
    }

    #[test]
    fn a_stop_is_found_wherever_the_pieces_break() {
        let text = "one — END two";
        for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
            let pieces = [&text[..cut], &text[cut..]];
            assert_eq!(run(&["END"], false, &pieces), ("one — ".into(), Some("END".into())));
            assert_eq!(run(&["END"], true, &pieces), ("one — END".into(), Some("END".into())));
            assert_eq!(run(&["— X", "ENDE"], false, &pieces), (text.into(), None));
        }
    }

    #[test]
    fn only_a_possible_stop_is_withheld() {
        let mut watch = Stops::new(&["\n\n".to_owned(), "stop".to_owned()], false).unwrap();
        assert_eq!(watch.push("a\n", false).text, "a");
        assert_eq!(watch.push("b st", false).text, "\nb ");
        assert_eq!(watch.push("ay", false).text, "stay");
        assert_eq!(watch.push("s", false).text, "");
        assert_eq!(watch.flush(), "s");
    }

    #[test]
    fn the_first_complete_stop_wins_and_of_equals_the_longest() {
        assert_eq!(run(&["cd", "b"], false, &["abcd"]), ("a".into(), Some("b".into())));
        assert_eq!(run(&["b", "ab"], false, &["xab"]), ("x".into(), Some("ab".into())));
        assert_eq!(run(&["abcd", "c"], false, &["a", "b", "c", "d"]), ("ab".into(), Some("c".into())));
    }

    #[test]
    fn a_stop_within_min_tokens_is_ignored_but_one_that_ends_after_it_counts() {
        let mut watch = Stops::new(&["ab".to_owned(), "b".to_owned(), "bcd".to_owned()], false).unwrap();
        assert_eq!(watch.push("xab", true), Seen { text: "xa".into(), stop: None });
        assert_eq!(watch.push("c", false), Seen { text: String::new(), stop: None });
        assert_eq!(watch.push("d", false), Seen { text: String::new(), stop: Some("bcd".into()) });
    }
}
