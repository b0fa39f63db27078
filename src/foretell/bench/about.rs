//! Date, machine, engine and command of a benchmark, as shown in its report.

use std::path::Path;
use std::thread::available_parallelism;

use time::OffsetDateTime;
use time::macros::format_description;

/// Conditions of a benchmark: enough to judge its figures or to repeat it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// Day and time of the start, UTC.
    pub date: String,
    /// The machine on which the benchmark ran; the server may be another.
    pub machine: String,
    /// Version of this program.
    pub foretell: String,
    /// Name and version of the engine; empty if it was not recognised.
    pub engine: String,
    pub model: String,
    /// Root URL of the server itself.
    pub direct: String,
    /// Root URL of the server through Foretell.
    pub through: String,
    /// The command line, without the values of header fields.
    pub command: String,
}

impl About {
    /// Date, engine and model, in one line.
    pub fn summary(&self) -> String {
        let parts = [&self.date, &self.engine, &self.model];
        parts.into_iter().filter(|part| !part.is_empty()).map(String::as_str).collect::<Vec<_>>().join(" · ")
    }

    /// Names and values, in the order of a report; empty ones are omitted.
    pub fn rows(&self) -> Vec<(&'static str, &str)> {
        let Self { date, machine, foretell, engine, model, direct, through, command } = self;
        let all: [(&str, &str); 8] = [
            ("Date", date),
            ("Engine", engine),
            ("Model", model),
            ("Direct", direct),
            ("Through", through),
            ("Foretell", foretell),
            ("Measured from", machine),
            ("Command", command),
        ];
        all.into_iter().filter(|(_, value)| !value.is_empty()).collect()
    }
}

/// The time now, as `2026-11-23 08:15 UTC`.
pub fn now() -> String {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute] UTC");
    OffsetDateTime::now_utc().format(format).unwrap_or_default()
}

/// Processor, cores and memory of this machine, as reported by the system.
pub fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(Path::new(path)).unwrap_or_default();
    let cores = available_parallelism().map_or(0, std::num::NonZero::get);
    described(&read("/proc/cpuinfo"), cores, &read("/proc/meminfo"))
}

fn described(cpuinfo: &str, cores: usize, meminfo: &str) -> String {
    let value = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let kib = value(meminfo, "MemTotal").and_then(|text| text.split(' ').next()?.parse::<f64>().ok());
    let parts = [
        value(cpuinfo, "model name"),
        (cores > 0).then(|| if cores == 1 { "1 core".to_owned() } else { format!("{cores} cores") }),
        kib.map(|kib| format!("{:.0} GiB of memory", kib / f64::from(1 << 20))),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// A command line that can be shown: values of `--header` are masked, and arguments that a shell
/// would split are quoted.
pub fn command(arguments: impl Iterator<Item = String>) -> String {
    let mut header = false;
    let shown = arguments.map(|argument| {
        let masked = match (std::mem::take(&mut header), argument.strip_prefix("--header=")) {
            (true, _) => mask(&argument),
            (false, Some(field)) => format!("--header={}", mask(field)),
            (false, None) => argument,
        };
        header = masked == "--header";
        let plain = |char: char| char.is_ascii_alphanumeric() || "-_./:=,@%+*<>".contains(char);
        if !masked.is_empty() && masked.chars().all(plain) { masked } else { format!("'{masked}'") }
    });
    shown.collect::<Vec<_>>().join(" ")
}

fn mask(field: &str) -> String {
    let name = field.split(':').next().unwrap_or_default();
    format!("{name}: …")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_described_from_system_files() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Some  CPU @ 2.0GHz\nprocessor\t: 1\n";
        let told = described(cpuinfo, 2, "MemTotal:       25165824 kB\nMemFree: 1 kB\n");
        assert_eq!(told, "Some CPU @ 2.0GHz, 2 cores, 24 GiB of memory");
        assert_eq!(described("", 1, ""), "1 core");
    }

    #[test]
    fn a_command_line_shows_no_values_of_header_fields() {
        let words = [
            "foretell",
            "bench",
            "--header",
            "X-Key: s3cret",
            "--header=authorization: Bearer s3cret",
            "a b",
        ];
        let shown = command(words.into_iter().map(str::to_owned));
        assert_eq!(shown, "foretell bench --header 'X-Key: …' '--header=authorization: …' 'a b'");
    }

    #[test]
    fn unknown_values_have_no_row() {
        let about = About { date: now(), ..About::default() };
        assert_eq!((about.rows().len(), about.summary().as_str()), (1, about.date.as_str()));
        assert!(
            about.date.ends_with(" UTC") && about.date.len() == "2026-11-23 08:15 UTC".len(),
            "{}",
            about.date
        );
    }
}
