//! The demo: the same prompts plain and speculated, side by side.
//!
//! Both sides are ordinary HTTP clients of servers in this process. They are called one after the
//! other, and the side that is called first changes with every prompt.

use std::fmt::{self, Write as _};
use std::io::Write;
use std::time::Duration;

use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::alternate::Side;
use super::canvas::Canvas;
use super::client::{Access, Client, Url};
use super::judge::Judge;
use super::report::{aligned, number};
use super::run::Stopped;
use super::stream::{Answer, Failure};
use super::workload::{self, Prompt, Settings, Workload};

/// Prompts of each workload sent through Foretell as a warm-up.
const WARM_UP: usize = 3;

/// Prompts whose right answer a reader can check: a text and the beginning of its new version,
/// which the model completes. The bundled target is able to do these; most instructions are beyond
/// a model of its size.
const SHOWCASE: [(&str, &str); 2] =
    [("edit", include_str!("demo/edit.jsonl")), ("revise", include_str!("demo/revise.jsonl"))];

/// The built-in workloads of the demo.
///
/// # Errors
/// None in practice: a test reads them.
pub fn showcase() -> Result<Vec<Workload>, workload::Error> {
    SHOWCASE.iter().map(|(name, text)| Workload::parse((*name).to_owned(), name, text)).collect()
}

/// Addresses of the servers of a demo.
#[derive(Clone, Debug)]
pub struct Stack {
    /// Root URL of the target.
    pub direct: Url,
    /// Root URL of the target through the proxy.
    pub through: Url,
    /// Root URL of the proxy's admin API.
    pub admin: Url,
    pub about: About,
}

/// Description of the models in a demo.
#[derive(Clone, Debug)]
pub struct About {
    /// The target's model id.
    pub model: String,
    /// Number of parameters, without the layers that `inflate` added.
    pub parameters: u64,
    /// Device of the target, as the runtime reports it: `cpu` or `cuda`.
    pub device: String,
    /// Factor by which its depth was multiplied; 1 means as trained.
    pub inflate: u32,
    pub drafters: Vec<String>,
}

impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millions = self.parameters as f64 / 1e6;
        write!(f, "{}: {millions:.1} M parameters on {}", self.model, self.device)?;
        if self.inflate > 1 {
            write!(f, ", inflated to {} times the depth (higher cost, same output)", self.inflate)?;
        }
        write!(f, "; drafters: {}", self.drafters.join(", "))
    }
}

/// A prompt with the answers of both sides.
#[derive(Clone, Debug)]
struct Shown {
    name: String,
    temperature: f64,
    direct: Answer,
    through: Answer,
}

impl Shown {
    fn identical(&self) -> bool {
        self.direct.text == self.through.text
    }
}

/// Shows `prompts` of every workload from both sides, alternately at temperature 0 and seeded at
/// 0.8; prompts whose plain answers loop are skipped, because a loop is easy to draft and shows
/// nothing. True if no text differs.
///
/// # Errors
/// A server does not answer.
pub async fn show(
    stack: &Stack,
    workloads: &[Workload],
    prompts: usize,
    canvas: Canvas,
    out: &mut impl Write,
) -> Result<bool, Stopped> {
    // A closed pipe is not an error: the exit code still reports the result.
    let _ = writeln!(out, "{}", canvas.bold(&stack.about.to_string()));
    let _ = write!(out, "Each prompt is sent twice: to the target itself, and through Foretell.");
    if canvas.colour {
        let _ = write!(out, " {}", canvas.speculated("Text in this colour came several tokens at a time."));
    }
    let _ = writeln!(out, "\n");
    let mut duo = Duo::new(stack);
    duo.warm_up(workloads).await?;
    let (mut shown, mut looping) = (Vec::new(), 0);
    for workload in workloads {
        let mut remaining = prompts;
        for (index, prompt) in workload.prompts.iter().enumerate() {
            if remaining == 0 {
                break;
            }
            let temperature = if (prompts - remaining).is_multiple_of(2) { 0.0 } else { 0.8 };
            let Some(one) = duo.compare(&workload.name, prompt, index, temperature).await? else {
                looping += 1;
                continue;
            };
            let _ = write!(out, "{}", side_by_side(&one, prompt, canvas));
            shown.push(one);
            remaining -= 1;
        }
    }
    let _ = writeln!(out, "{}", summary(&shown, canvas));
    if looping > 0 {
        let _ = writeln!(out, "{looping} more prompts were skipped: their plain answers loop.");
    }
    Ok(shown.iter().all(Shown::identical))
}

/// A client for each side.
struct Duo<'a> {
    stack: &'a Stack,
    direct: Client,
    through: Client,
    judge: Judge,
    /// Number of prompts compared so far.
    compared: usize,
}

impl<'a> Duo<'a> {
    fn new(stack: &'a Stack) -> Self {
        Self {
            stack,
            direct: Client::new(stack.direct.clone()),
            through: Client::new(stack.through.clone()),
            judge: Judge::new(stack.direct.clone(), Access::default()),
            compared: 0,
        }
    }

    /// Sends the last prompts of each workload through Foretell, so that the controller has learnt
    /// the costs of its requests and the acceptance of its drafts. They are not the prompts shown,
    /// so no shown prompt is in a cache. The target has nothing to learn.
    async fn warm_up(&mut self, workloads: &[Workload]) -> Result<(), Stopped> {
        let spinner = spinner("warming up".into());
        let last = workloads.iter().flat_map(|workload| workload.prompts.iter().rev().take(WARM_UP));
        for (index, prompt) in last.enumerate() {
            self.one(Side::Through, prompt, index, 0.0).await?;
        }
        spinner.finish_and_clear();
        Ok(())
    }

    /// The answers of both sides; `None` if the plain answer loops.
    async fn compare(
        &mut self,
        workload: &str,
        prompt: &Prompt,
        index: usize,
        temperature: f64,
    ) -> Result<Option<Shown>, Stopped> {
        let name = format!("{workload} {}", index + 1);
        let spinner = spinner(name.clone());
        // Untimed: it puts the prompt into the server's cache; otherwise only the second side would
        // find it there.
        let plain = self.one(Side::Direct, prompt, index, temperature).await?;
        let loops = self.judge.loops(&prompt.text(), &plain.text, prompt.model()).await;
        let answers = if loops { None } else { Some(self.both(prompt, index, temperature).await?) };
        spinner.finish_and_clear();
        Ok(answers.map(|(direct, through)| Shown { name, temperature, direct, through }))
    }

    async fn both(
        &mut self,
        prompt: &Prompt,
        index: usize,
        temperature: f64,
    ) -> Result<(Answer, Answer), Stopped> {
        self.compared += 1;
        if self.compared.is_multiple_of(2) {
            let through = self.one(Side::Through, prompt, index, temperature).await?;
            Ok((self.one(Side::Direct, prompt, index, temperature).await?, through))
        } else {
            let direct = self.one(Side::Direct, prompt, index, temperature).await?;
            Ok((direct, self.one(Side::Through, prompt, index, temperature).await?))
        }
    }

    async fn one(
        &mut self,
        side: Side,
        prompt: &Prompt,
        index: usize,
        temperature: f64,
    ) -> Result<Answer, Stopped> {
        let settings = Settings { temperature, max_tokens: None, model: None, seeded: temperature > 0.0 };
        let mut prompt = prompt.clone();
        // With token ids the answer shows the number of tokens in each event.
        prompt.body.insert("return_token_ids".into(), true.into());
        let body = prompt.request(&settings, index);
        let (client, url) = match side {
            Side::Direct => (&mut self.direct, &self.stack.direct),
            Side::Through => (&mut self.through, &self.stack.through),
        };
        let stopped = |failure: Failure| Stopped { side, url: url.to_string(), failure };
        client.complete(prompt.route, body).await.map_err(stopped)
    }
}

/// A spinner on standard error while a request runs; invisible if that is not a terminal.
fn spinner(message: String) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(message);
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

fn speed(answer: &Answer) -> Option<f64> {
    let seconds = answer.last.as_secs_f64();
    (seconds > 0.0).then(|| answer.completion_tokens as f64 / seconds)
}

fn mean_acceptance_length(answer: &Answer) -> Option<f64> {
    let usage = answer.foretell.as_ref().filter(|usage| usage.rounds > 0)?;
    Some((usage.accepted + usage.rounds) as f64 / usage.rounds as f64)
}

fn ratio(shown: &Shown) -> Option<f64> {
    Some(speed(&shown.through)? / speed(&shown.direct)?)
}

fn side_by_side(shown: &Shown, prompt: &Prompt, canvas: Canvas) -> String {
    let temperature =
        if shown.temperature > 0.0 { format!("T={}, seeded", shown.temperature) } else { "T=0".into() };
    let last = prompt.text();
    let last = last.trim_end().lines().last().unwrap_or_default().trim();
    let last: String = last.chars().filter(|char| !char.is_control()).take(60).collect();
    let heading = format!("── {} ({}, {temperature})", shown.name, prompt.route.name());
    let mut text = match &prompt.says {
        None => format!("{} {}\n", canvas.bold(&heading), canvas.faint(&format!("… {last}"))),
        Some(says) => format!("{} {says}\n{}", canvas.bold(&heading), given(prompt, canvas)),
    };
    let plain = format!("plain, {} tokens/s", number(speed(&shown.direct), 0));
    let speculated = format!("foretell, {} tokens/s", number(speed(&shown.through), 0));
    if canvas.is_wide() && canvas.colour {
        text += &canvas.columns([&plain, &speculated], shown.direct.runs(), shown.through.runs());
    } else if shown.identical() {
        text += &canvas.column(shown.through.runs());
    } else {
        for (way, answer) in [("plain", &shown.direct), ("foretell", &shown.through)] {
            let _ = write!(text, "  [{way}]\n{}", canvas.column(answer.runs()));
        }
    }
    let rounds = match &shown.through.foretell {
        Some(usage) if usage.rounds > 0 => {
            format!(
                "{} rounds, {} of {} drafted tokens accepted",
                usage.rounds, usage.accepted, usage.drafted
            )
        }
        Some(usage) => format!("{} ({})", usage.path, usage.reason.as_deref().unwrap_or("no reason given")),
        None => "the answer has no usage.foretell".into(),
    };
    let same = if shown.identical() { "same text" } else { "THE TEXTS DIFFER" };
    let line = format!("{plain}; {speculated}: {} times; {rounds}; {same}", number(ratio(shown), 2));
    text + &format!("  {}\n\n", canvas.faint(&line))
}

/// The prompt as its model reads it, in faint print.
fn given(prompt: &Prompt, canvas: Canvas) -> String {
    let text = prompt.text();
    let lines = text.trim_end().lines().map(|line| {
        let shown: String = line.chars().filter(|char| !char.is_control()).collect();
        format!("{}\n", canvas.faint(&format!("  > {shown}")))
    });
    lines.collect()
}

fn summary(shown: &[Shown], canvas: Canvas) -> String {
    let heading =
        ["prompt", "T", "plain tok/s", "foretell tok/s", "ratio", "length", "first token ms", "same text"];
    let mut rows = vec![heading.map(ToOwned::to_owned).to_vec()];
    let first = |answer: &Answer| answer.first().as_secs_f64() * 1e3;
    for one in shown {
        rows.push(vec![
            one.name.clone(),
            one.temperature.to_string(),
            number(speed(&one.direct), 1),
            number(speed(&one.through), 1),
            number(ratio(one), 2),
            number(mean_acceptance_length(&one.through), 2),
            format!("{:.1} → {:.1}", first(&one.direct), first(&one.through)),
            if one.identical() { "yes" } else { "NO" }.into(),
        ]);
    }
    let table = aligned(&rows);
    let (heading, rest) = table.split_once('\n').unwrap_or((&table, ""));
    let same = shown.iter().filter(|one| one.identical()).count();
    format!(
        "{}\n{rest}\n{same} of {} texts are the same both ways; a single request is a coarse measurement, \
         `foretell bench` takes medians.",
        canvas.bold(heading),
        shown.len()
    )
}

/// Example commands to try while the servers run.
pub fn invitation(stack: &Stack) -> String {
    let (through, admin, model) = (&stack.through, &stack.admin, &stack.about.model);
    let post = |path: &str, body: &Value| {
        format!("  curl -N {through}{path} -H 'content-type: application/json' \\\n    -d '{body}'\n")
    };
    let completion =
        json!({"model": model, "prompt": "def fibonacci(n):\n", "max_tokens": 64, "temperature": 0});
    let chat = json!({"model": model, "messages": [{"role": "user", "content": "Write a function that adds two numbers."}],
        "max_tokens": 64, "temperature": 0, "stream": true, "stream_options": {"include_usage": true}});
    format!(
        "Serving until Ctrl-C. The target answers at {}, Foretell in front of it at {through}:\n\n{}\n{}\n\
         \x20 curl -s {admin}/metrics | grep ^foretell_\n\nStatus page: {admin}/\n",
        stack.direct,
        post("/v1/completions", &completion),
        post("/v1/chat/completions", &chat),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about() -> About {
        About {
            model: "foretell-target".into(),
            parameters: 6_450_000,
            device: "cpu".into(),
            inflate: 8,
            drafters: vec!["prompt_lookup".into(), "draft-same".into()],
        }
    }

    #[test]
    fn the_first_line_describes_the_models() {
        assert_eq!(
            about().to_string(),
            "foretell-target: 6.5 M parameters on cpu, inflated to 8 times the depth (higher cost, same output); \
             drafters: prompt_lookup, draft-same"
        );
        assert!(!About { inflate: 1, ..about() }.to_string().contains("inflated"));
    }

    #[test]
    fn the_showcase_has_descriptions_and_warm_up_prompts() {
        for workload in showcase().unwrap() {
            assert!(workload.prompts.len() >= 2 + WARM_UP, "{}", workload.name);
            assert!(workload.prompts.iter().all(|prompt| prompt.says.is_some()), "{}", workload.name);
        }
    }

    #[test]
    fn the_curl_lines_can_be_pasted() {
        let at = |port: u16| Url::from(std::net::SocketAddr::from(([127, 0, 0, 1], port)));
        let text = invitation(&Stack { direct: at(1), through: at(2), admin: at(3), about: about() });
        for body in text.split("-d '").skip(1).map(|rest| rest.split('\'').next().unwrap()) {
            assert!(serde_json::from_str::<Value>(body).is_ok(), "{body}");
        }
        assert_eq!(text.matches("curl ").count(), 3);
        assert!(text.contains("Status page: http://127.0.0.1:3/\n"));
    }
}
