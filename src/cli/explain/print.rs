//! Prints an explanation as text.

use std::io::{self, Write};

use crate::policy::Explanation;
use crate::policy::explain::{DrafterLine, ParameterLine, PolicyLine};

/// Writes it line by line, the result first.
pub(super) fn words(told: &Explanation, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}: {}", told.path, told.words)?;
    head(told, out)?;
    writeln!(out, "steps, of which the first that does not pass counts")?;
    for line in &told.steps {
        writeln!(out, "  {:<12} {:<8} {}", line.step, line.verdict, line.words)?;
    }
    writeln!(out, "parameters")?;
    told.parameters.iter().try_for_each(|line| parameter(line, out))?;
    writeln!(out, "policies, of which the first that matches counts")?;
    told.policies.iter().try_for_each(|line| policy(line, out))?;
    if !told.drafters.is_empty() {
        writeln!(out, "drafters")?;
    }
    told.drafters.iter().try_for_each(|line| drafter(line, out))
}

fn head(told: &Explanation, out: &mut dyn Write) -> io::Result<()> {
    if let Some(reason) = &told.reason {
        writeln!(out, "reason       {reason}")?;
    }
    for note in &told.notes {
        writeln!(out, "note         {note}")?;
    }
    let asked = match told.asked.as_str() {
        "proxy" => "the running proxy",
        "server" => "the server",
        _ => "nobody: what a server would say is not known",
    };
    writeln!(out, "asked        {asked}")?;
    writeln!(out, "route        {}", told.route)?;
    let (model, backend) =
        (told.model.as_deref().unwrap_or("none"), told.backend.as_deref().unwrap_or("none"));
    let replica = told.replica.as_ref().map_or(String::new(), |replica| format!(", replica {replica}"));
    writeln!(out, "model        {model} (backend {backend}{replica})")?;
    if let Some(tenant) = &told.tenant {
        writeln!(out, "tenant       {tenant}")?;
    }
    let temperature = told.temperature.map_or("not known".to_owned(), |temperature| temperature.to_string());
    writeln!(out, "temperature  {temperature}")?;
    if let Some(tokens) = told.prompt_tokens {
        let how = if told.prompt_tokens_exact { "counted" } else { "estimated: a quarter of the bytes" };
        writeln!(out, "prompt       {tokens} tokens ({how})")?;
    }
    if !told.plans.is_empty() {
        writeln!(out, "plans        {}", told.plans.join(", "))?;
    }
    told.gamma_max.map_or(Ok(()), |gamma| writeln!(out, "gamma        {gamma} at most"))
}

fn parameter(line: &ParameterLine, out: &mut dyn Write) -> io::Result<()> {
    let owner = line.owner.as_ref().map_or(String::new(), |owner| format!(" ({owner})"));
    let refused = line.refused.as_ref();
    let refused = refused.map_or(String::new(), |reason| format!(", keeps it from leaping: {reason}"));
    writeln!(out, "  {:<28} {}{owner}{refused}", line.name, line.treatment)
}

fn policy(line: &PolicyLine, out: &mut dyn Write) -> io::Result<()> {
    let verdict = match line.matches {
        Some(true) => format!("matches (mode {})", line.mode),
        Some(false) => format!("does not match: {}", line.mismatches.join("; ")),
        None if line.mismatches.is_empty() => "not known".to_owned(),
        None => format!("not known: {}", line.mismatches.join("; ")),
    };
    writeln!(out, "  {:<28} {verdict}", line.policy)
}

fn drafter(line: &DrafterLine, out: &mut dyn Write) -> io::Result<()> {
    let why = line.why.as_deref().unwrap_or_default();
    let verdict = match line.drafts {
        Some(true) => "drafts".to_owned(),
        Some(false) => format!("drafts nothing: {why}"),
        None => format!("not known: {why}"),
    };
    writeln!(out, "  {:<28} {verdict}", line.drafter)
}
