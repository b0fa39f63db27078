//! Runs a benchmark: network and clock around the pure schedule (`alternate`) and evaluation
//! (`tally`).

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures_util::future::join_all;
use indicatif::ProgressBar;

use super::alternate::{Schedule, Side};
use super::client::{Access, Client, Url};
use super::counters::Counters;
use super::formula::{Costs, Unknown};
use super::judge::Judge;
use super::probed::Probed;
use super::stream::{Answer, Failure};
use super::tally::{Looping, Measured, Pair, Run, conclude};
use super::workload::{Settings, Workload};
use foretell_wire::openai::Route;

/// Maximum number of outputs of one side and run that are checked for loops.
const JUDGED: usize = 200;

/// Settings of a benchmark.
#[derive(Clone, Debug)]
pub struct Bench {
    /// Root URL of the server without Foretell.
    pub direct: Url,
    /// Root URL of the same server through Foretell.
    pub through: Url,
    /// Source of the costs in the formula; `None`: the formula's gain is not computed.
    pub costs: Option<CostSource>,
    /// Workloads, measured one after the other.
    pub workloads: Vec<Workload>,
    /// Numbers of concurrent clients; one run for each.
    pub concurrency: Vec<usize>,
    /// Sampling temperatures; one run for each.
    pub temperature: Vec<f64>,
    /// Number of measured alternations in each run.
    pub alternations: usize,
    /// Above temperature 0, send each prompt with a fixed seed.
    pub seeded: bool,
    /// Output limit of every prompt; `None`: that of the workload.
    pub max_tokens: Option<u32>,
    /// Model of every prompt; `None`: that of the workload.
    pub model: Option<String>,
    /// Header fields and TLS settings for both sides.
    pub access: Access,
}

#[derive(Clone, Debug)]
pub struct CostSource {
    /// Metrics page of Foretell, which reports drafting times.
    pub through: Url,
    pub target: TargetCosts,
}

/// Source of the target's step times.
#[derive(Clone, Debug)]
pub enum TargetCosts {
    /// The target's metrics page.
    Page(Url),
    /// Times measured by `foretell probe`.
    Probed(Probed),
}

/// A benchmark stopped because one side did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{side} ({url}): {failure}", side = side.name())]
pub struct Stopped {
    pub side: Side,
    pub url: String,
    /// Failure of the first request.
    pub failure: Failure,
}

/// Measures every combination of workload, temperature and clients in turn. Single failures are
/// counted; an error is returned only if a side answers no request of the warm-up, or cannot be
/// reached during all of a block.
pub async fn run(bench: &Bench, progress: &ProgressBar) -> Result<Vec<Run>, Stopped> {
    let cases: Vec<_> = bench
        .workloads
        .iter()
        .flat_map(|workload| bench.temperature.iter().map(move |&temperature| (workload, temperature)))
        .flat_map(|(workload, temperature)| {
            bench.concurrency.iter().map(move |&clients| (workload, temperature, clients))
        })
        .collect();
    progress.set_length((cases.len() * bench.alternations) as u64);
    let mut runs = Vec::new();
    for (workload, temperature, clients) in cases {
        progress.set_message(format!("{} T={temperature} clients={clients}", workload.name));
        runs.push(conclude(Case::new(bench, workload, temperature, clients).measure(progress).await?));
    }
    progress.finish_and_clear();
    Ok(runs)
}

/// One run (a line of the report) while it is measured.
struct Case<'a> {
    bench: &'a Bench,
    workload: &'a Workload,
    settings: Settings<'a>,
    schedule: Schedule,
    direct: Vec<Client>,
    through: Vec<Client>,
    meter: Meter,
}

impl<'a> Case<'a> {
    fn new(bench: &'a Bench, workload: &'a Workload, temperature: f64, clients: usize) -> Self {
        let connect = |url: &Url| {
            (0..clients).map(|_| Client::with_access(url.clone(), bench.access.clone())).collect()
        };
        Self {
            bench,
            workload,
            settings: Settings {
                temperature,
                max_tokens: bench.max_tokens,
                model: bench.model.as_deref(),
                seeded: bench.seeded && temperature > 0.0,
            },
            schedule: Schedule {
                prompts: workload.prompts.len(),
                concurrency: clients,
                alternations: bench.alternations,
            },
            direct: connect(&bench.direct),
            through: connect(&bench.through),
            meter: Meter::new(bench.costs.as_ref(), &bench.access),
        }
    }

    async fn measure(mut self, progress: &ProgressBar) -> Result<Measured, Stopped> {
        let schedule = self.schedule;
        for side in [Side::Direct, Side::Through] {
            let answers = self.block(side, &schedule.warm_up()).await;
            self.answering(side, &answers, |_| true)?;
        }
        let probed = self.meter.probed();
        let (mut alternations, mut costs) = (Vec::new(), Ok(Costs { probed, ..Costs::default() }));
        for alternation in schedule.alternations() {
            self.warm(&alternation.prompts).await;
            let first = self.metered(alternation.first, &alternation.prompts, &mut costs).await?;
            let second = self.metered(alternation.first.other(), &alternation.prompts, &mut costs).await?;
            let (direct, through) = match alternation.first {
                Side::Direct => (first, second),
                Side::Through => (second, first),
            };
            let pairs = alternation.prompts.into_iter().zip(direct).zip(through);
            alternations
                .push(pairs.map(|((prompt, direct), through)| Pair { prompt, direct, through }).collect());
            progress.inc(1);
        }
        Ok(Measured {
            workload: self.workload.name.clone(),
            concurrency: schedule.concurrency,
            temperature: self.settings.temperature,
            comparable: self.settings.temperature == 0.0 || self.settings.seeded,
            looping: looping(self.bench, self.workload, &alternations).await,
            alternations,
            costs,
        })
    }

    /// Sends the prompts to the server once, untimed. Otherwise the side that sends a prompt second
    /// would find it in the server's prefix cache, and the first side would not.
    async fn warm(&mut self, prompts: &[usize]) {
        let settings = Settings { max_tokens: Some(1), ..self.settings };
        for &index in prompts {
            let prompt = self.workload.prompts.get(index);
            if let (Some(prompt), Some(client)) = (prompt, self.direct.first_mut()) {
                // Failures are ignored here: the timed request reports them.
                let _ = client.complete(prompt.route, prompt.request(&settings, index)).await;
            }
        }
    }

    /// Runs one block and adds the servers' counts during it to `costs`.
    async fn metered(
        &mut self,
        side: Side,
        prompts: &[usize],
        costs: &mut Result<Costs, Unknown>,
    ) -> Result<Vec<Result<Answer, Failure>>, Stopped> {
        let before = self.meter.read().await;
        let answers = self.block(side, prompts).await;
        let after = self.meter.read().await;
        let spent = before.and_then(|before| Ok(after? - before));
        match (costs.as_mut(), spent) {
            (Ok(sum), Ok(spent)) if side == Side::Direct => sum.direct += spent,
            (Ok(sum), Ok(spent)) => sum.through += spent,
            (Ok(_), Err(unknown)) => *costs = Err(unknown),
            (Err(_), _) => {}
        }
        self.answering(side, &answers, |failure| matches!(failure, Failure::Unreachable(_)))?;
        Ok(answers)
    }

    /// Sends the prompts to one side; the answers are in the order of `prompts`.
    async fn block(&mut self, side: Side, prompts: &[usize]) -> Vec<Result<Answer, Failure>> {
        let requests: Vec<(Route, Bytes)> = prompts
            .iter()
            .filter_map(|&index| {
                let prompt = self.workload.prompts.get(index)?;
                Some((prompt.route, prompt.request(&self.settings, index)))
            })
            .collect();
        let clients = match side {
            Side::Direct => &mut self.direct,
            Side::Through => &mut self.through,
        };
        let (next, requests) = (&AtomicUsize::new(0), &requests);
        let lanes = clients.iter_mut().map(|client| async move {
            let mut answers = Vec::new();
            loop {
                let position = next.fetch_add(1, Ordering::Relaxed);
                let Some((route, body)) = requests.get(position) else { return answers };
                answers.push((position, client.complete(*route, body.clone()).await));
            }
        });
        let mut answers: Vec<_> = join_all(lanes).await.into_iter().flatten().collect();
        answers.sort_by_key(|(position, _)| *position);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }

    /// Returns an error if every request of a block failed with a failure that `hopeless` accepts.
    fn answering(
        &self,
        side: Side,
        answers: &[Result<Answer, Failure>],
        hopeless: impl Fn(&Failure) -> bool,
    ) -> Result<(), Stopped> {
        let url = match side {
            Side::Direct => &self.bench.direct,
            Side::Through => &self.bench.through,
        };
        if !answers.iter().all(|answer| answer.as_ref().is_err_and(&hopeless)) {
            return Ok(());
        }
        match answers.first() {
            Some(Err(failure)) => Err(Stopped { side, url: url.to_string(), failure: failure.clone() }),
            _ => Ok(()),
        }
    }
}

/// Reads the metrics pages before and after each block; `None`: no costs are wanted.
struct Meter(Option<Pages>);

struct Pages {
    proxy: Client,
    target: Target,
}

enum Target {
    Page(Client),
    Probed(Probed),
}

impl Meter {
    fn new(source: Option<&CostSource>, access: &Access) -> Self {
        let client = |url: &Url| Client::with_access(url.clone(), access.clone());
        Self(source.map(|CostSource { through, target }| Pages {
            proxy: client(through),
            target: match target {
                TargetCosts::Page(url) => Target::Page(client(url)),
                TargetCosts::Probed(probed) => Target::Probed(probed.clone()),
            },
        }))
    }

    fn probed(&self) -> Option<Probed> {
        match self.0.as_ref()?.target {
            Target::Probed(ref probed) => Some(probed.clone()),
            Target::Page(_) => None,
        }
    }

    async fn read(&mut self) -> Result<Counters, Unknown> {
        let Pages { proxy, target } = self.0.as_mut().ok_or(Unknown::NoPages)?;
        let counters = match target {
            Target::Page(target) => {
                let page = target.page().await.map_err(|_| Unknown::NoCounters)?;
                Counters::of_target(&page).ok_or(Unknown::NoCounters)?
            }
            Target::Probed(_) => Counters::default(),
        };
        let page = proxy.page().await.map_err(|_| Unknown::NoCounters)?;
        counters.with_drafts(&page).ok_or(Unknown::NoCounters)
    }
}

/// Share of looping outputs of both sides.
async fn looping(bench: &Bench, workload: &Workload, alternations: &[Vec<Pair>]) -> Looping {
    let mut judge = Judge::new(bench.direct.clone(), bench.access.clone());
    let mut shares = [None; 2];
    for (share, side) in shares.iter_mut().zip([Side::Direct, Side::Through]) {
        let (mut judged, mut looping) = (0, 0);
        for pair in alternations.iter().flatten().take(JUDGED) {
            let (Ok(answer), Some(prompt)) = (pair.of(side), workload.prompts.get(pair.prompt)) else {
                continue;
            };
            let model = bench.model.as_deref().unwrap_or(prompt.model());
            judged += 1;
            looping += u32::from(judge.loops(&prompt.text(), &answer.text, model).await);
        }
        *share = (judged > 0).then(|| f64::from(looping) / f64::from(judged));
    }
    let [direct, through] = shares;
    Looping { direct, through, by_words: judge.by_words() }
}
