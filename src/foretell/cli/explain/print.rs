//! Prints an explanation as text.

use std::io::{self, Write};

use foretell_core::control::forecast::Length;
use foretell_policy::Explanation;
use foretell_policy::explain::{AcceptLine, DrafterLine, GateLine, Now, ParameterLine, PolicyLine};

/// Writes it line by line, the result first.
pub(super) fn words(explanation: &Explanation, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}: {}", explanation.path, explanation.words)?;
    head(explanation, out)?;
    writeln!(out, "steps (the first that does not pass decides)")?;
    for line in &explanation.steps {
        writeln!(out, "  {:<12} {:<8} {}", line.step, line.result, line.words)?;
    }
    writeln!(out, "parameters")?;
    explanation.parameters.iter().try_for_each(|line| parameter(line, out))?;
    writeln!(out, "policies (the first that matches applies)")?;
    explanation.policies.iter().try_for_each(|line| policy(line, out))?;
    if !explanation.drafters.is_empty() {
        writeln!(out, "drafters")?;
    }
    explanation.drafters.iter().try_for_each(|line| drafter(line, out))?;
    explanation.accept.as_ref().map_or(Ok(()), |line| accept(line, out))?;
    explanation.now.as_ref().map_or(Ok(()), |line| now(line, out))
}

fn accept(line: &AcceptLine, out: &mut dyn Write) -> io::Result<()> {
    let (least, most) = line.between;
    let tolerance = match (&line.exact, line.tolerance) {
        (Some(why), _) => format!("nothing is relaxed: {why}"),
        (None, Some(tolerance)) => format!("tolerance {tolerance:.3} now ({least:.3} to {most:.3} by load)"),
        (None, None) => format!("tolerance {least:.3} to {most:.3} by load, which is not known"),
    };
    writeln!(out, "accept       {}: {tolerance}", line.rule)
}

fn now(now: &Now, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "now")?;
    let token =
        now.token_seconds.map_or("not known".to_owned(), |seconds| format!("{:.1} ms", seconds * 1e3));
    writeln!(out, "  {:<12} {:.2}; a plain token takes {token}", "load", now.load)?;
    let gain = now.gain.as_ref().map_or("not known yet".to_owned(), |gain| {
        format!(
            "{:.2}x ({:.2} to {:.2}){}; based on {:.0} rounds and {}",
            gain.middle,
            gain.low,
            gain.high,
            slower(gain.middle),
            gain.rounds,
            costs(&gain.costs)
        )
    });
    writeln!(out, "  {:<12} {gain}", "speed")?;
    now.length.as_ref().map_or(Ok(()), |line| length(line, out))?;
    writeln!(out, "  {:<12} {:.1} plain tokens that speculation may lose", "regret", now.regret_budget)?;
    now.gates.iter().try_for_each(|line| gate(line, out))?;
    for why in &now.not_speculating {
        writeln!(out, "  {:<12} {}: {}", "plain", why.reason, why.words)?;
    }
    Ok(())
}

fn length(line: &Length, out: &mut dyn Write) -> io::Result<()> {
    let Length { drafter, best, rate, min_survival, lengths } = line;
    writeln!(
        out,
        "  {:<12} {best} tokens of `{drafter}` on average: a token is drafted if it survives with more than {min_survival:.2}; \
         a second is worth {rate:.0} tokens",
        "length"
    )?;
    lengths.iter().try_for_each(|row| {
        writeln!(
            out,
            "  {:<12} {:>2}: the last survives with {:.2}; {:.2} tokens in {:.1} ms, surplus {:+.2}",
            "",
            row.draft,
            row.survival,
            row.tokens,
            row.seconds * 1e3,
            row.surplus
        )
    })
}

/// The consequence of an expected speed that is below that of plain decoding.
fn slower(speed: f64) -> &'static str {
    if speed < 1.0 { ": slower than plain decoding, so it will not speculate" } else { "" }
}

/// The basis of the costs, in words.
fn costs(basis: &str) -> &str {
    match basis {
        "measured" => "measured costs",
        "probe" => "costs measured by a probe",
        _ => "guessed costs",
    }
}

fn gate(line: &GateLine, out: &mut dyn Write) -> io::Result<()> {
    let reads = line.reads.map_or("not reported".to_owned(), |reads| format!("{reads:.2}"));
    let state = if line.closed { "closed" } else { "open" };
    writeln!(out, "  {:<12} {state}: {} is {reads}, at most {}", "gate", line.gate, line.limit)
}

fn head(explanation: &Explanation, out: &mut dyn Write) -> io::Result<()> {
    if let Some(reason) = &explanation.reason {
        writeln!(out, "reason       {reason}")?;
    }
    for note in &explanation.notes {
        writeln!(out, "note         {note}")?;
    }
    let source = match explanation.facts_from.as_str() {
        "proxy" => "the running proxy",
        "server" => "the server",
        _ => "nobody: the server's properties are not known",
    };
    writeln!(out, "facts from   {source}")?;
    writeln!(out, "route        {}", explanation.request.route)?;
    let (model, backend) = (
        explanation.request.model.as_deref().unwrap_or("none"),
        explanation.backend.as_deref().unwrap_or("none"),
    );
    let replica =
        explanation.replica.as_ref().map_or(String::new(), |replica| format!(", replica {replica}"));
    writeln!(out, "model        {model} (backend {backend}{replica})")?;
    if let Some(tenant) = &explanation.request.tenant {
        writeln!(out, "tenant       {tenant}")?;
    }
    let temperature =
        explanation.temperature.map_or("not known".to_owned(), |temperature| temperature.to_string());
    writeln!(out, "temperature  {temperature}")?;
    if let Some(tokens) = explanation.prompt_tokens {
        let how =
            if explanation.prompt_tokens_exact { "counted" } else { "estimated: a quarter of the bytes" };
        writeln!(out, "prompt       {tokens} tokens ({how})")?;
    }
    if !explanation.verify.is_empty() {
        writeln!(out, "verify       {}", explanation.verify.join(", "))?;
    }
    explanation.gamma_max.map_or(Ok(()), |gamma| writeln!(out, "gamma        {gamma} at most"))
}

fn parameter(line: &ParameterLine, out: &mut dyn Write) -> io::Result<()> {
    let owner = line.owner.as_ref().map_or(String::new(), |owner| format!(" ({owner})"));
    let refused = line.refused.as_ref();
    let refused = refused.map_or(String::new(), |reason| format!(", prevents speculation: {reason}"));
    writeln!(out, "  {:<28} {}{owner}{refused}", line.name, line.treatment)
}

fn policy(line: &PolicyLine, out: &mut dyn Write) -> io::Result<()> {
    let result = match line.matches {
        Some(true) => format!("matches (mode {})", line.mode),
        Some(false) => format!("does not match: {}", line.mismatches.join("; ")),
        None if line.mismatches.is_empty() => "not known".to_owned(),
        None => format!("not known: {}", line.mismatches.join("; ")),
    };
    writeln!(out, "  {:<28} {result}", line.policy)
}

fn drafter(line: &DrafterLine, out: &mut dyn Write) -> io::Result<()> {
    let why = line.why.as_deref().unwrap_or_default();
    let result = match line.drafts {
        Some(true) if why.is_empty() => "drafts".to_owned(),
        Some(true) => format!("drafts; {why}"),
        Some(false) => format!("drafts nothing: {why}"),
        None => format!("not known: {why}"),
    };
    writeln!(out, "  {:<28} {result}", line.drafter)
}
