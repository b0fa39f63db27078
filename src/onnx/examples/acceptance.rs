//! Prints the mean acceptance length, by how the model drafter draws and how its draft is verified.
//!
//! `cargo run --release --example acceptance -- TARGET_DIR DRAFTER_DIR WORKLOAD [TEMPERATURE]
//! [GAMMA] [PROMPTS] [TOKENS] [WAY]`
//!
//! Both models must have one vocabulary. Every way writes texts of its own for the same prompts,
//! round by round, by the code that is shipped (`Sampler`, `accept::sampled`). `drafted`: tokens
//! drafted per round. `noise`: the drafter draws with the target's own noise, the target samples
//! and matches. `ratio-K`: the drafter draws from its K likeliest tokens alone. `-sL`: it stops
//! where its estimate of the survival probability (`draft::Stop`) is below L. With WAY: only ways
//! whose name begins with it; of `greedy`, also the share of accepted tokens by the margin of the
//! drafter's likeliest token, next to the estimate of `draft::chance_by_margin`.

#[cfg(not(feature = "onnx"))]
fn main() {
    eprintln!("built without the feature onnx");
}

#[cfg(feature = "onnx")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    measured::main()
}

#[cfg(feature = "onnx")]
mod measured {
    use std::error::Error;
    use std::path::Path;
    use std::time::Instant;

    use foretell_core::draft::{Sampled, Stop, chance_by_entropy, chance_by_margin};
    use foretell_core::session::accept::sampled::{self, Test};
    use foretell_core::units::SplitMix64;
    use foretell_core::words::Distribution;
    use foretell_engines::openai::Sampling;
    use foretell_engines::text::Tokenizer;
    use foretell_onnx::forward::{Feed, Forward, Lane, Logits, Rows};
    use foretell_onnx::open::DeviceChoice;
    use foretell_onnx::open::Options;
    use foretell_onnx::runtime::model::Model;
    use foretell_onnx::sampler::{Processed, Sampler};

    type Outcome<T> = Result<T, Box<dyn Error>>;

    #[derive(Clone, Copy)]
    enum How {
        Greedy,
        Noise,
        Sampled { test: Test, most: usize },
    }

    #[derive(Clone, Copy)]
    struct Way {
        how: How,
        /// Drafting stops where the survival probability is below it.
        least: f64,
    }

    impl Way {
        fn name(self) -> String {
            let how = match self.how {
                How::Greedy => "greedy".to_owned(),
                How::Noise => "noise".to_owned(),
                How::Sampled { test: Test::Ratio, most } => format!("ratio{}", most_name(most)),
                How::Sampled { test: Test::Block, most } => format!("block{}", most_name(most)),
            };
            if self.least > f64::NEG_INFINITY { format!("{how}-s{}", self.least) } else { how }
        }
    }

    fn most_name(most: usize) -> String {
        if most == usize::MAX { String::new() } else { format!("-{most}") }
    }

    /// A model and the text in its cache.
    struct Reader {
        model: Model,
        lane: Lane,
        text: Vec<u32>,
    }

    impl Reader {
        fn open(folder: &str) -> Outcome<Self> {
            let options = Options { device: DeviceChoice::Cpu, lanes: 1, threads: 1, ..Options::default() };
            let mut model = Model::open(Path::new(folder), &options)?;
            let lane = model.reserve().ok_or("no lane")?;
            Ok(Self { model, lane, text: Vec::new() })
        }

        /// The rows behind the last `rows` tokens of a text. Only its new tokens are fed.
        fn read(&mut self, text: &[u32], rows: usize) -> Outcome<Logits> {
            let shared = self.text.iter().zip(text).take_while(|(a, b)| a == b).count();
            let cached = shared.min(text.len() - rows);
            self.model.rewind(self.lane, cached);
            let tokens = text.get(cached..).unwrap_or_default();
            let from = Rows::From(tokens.len() - rows);
            let feed = Feed { lane: self.lane, tokens, parents: None, rows: from, draft: None };
            text.clone_into(&mut self.text);
            Ok(self.model.run(&[feed])?)
        }
    }

    #[derive(Clone, Copy, Default)]
    struct Sum {
        rounds: usize,
        drafted: usize,
        tokens: usize,
        /// Seconds of drafting and verifying without the runs of the models.
        own: f64,
    }

    struct Bench {
        target: Reader,
        drafter: Reader,
        temperature: f64,
        gamma: usize,
        tokens: usize,
        /// Margin of each token that was drafted greedily after accepted ones; true if it was
        /// accepted.
        margins: Vec<(f64, bool)>,
    }

    /// The distance of the two largest logits.
    fn margin(processed: &Processed<'_>) -> f64 {
        match processed.top(2)[..] {
            [(_, best), (_, next)] => f64::from(best - next),
            _ => 0.0,
        }
    }

    /// Prints the share of accepted tokens, by margin.
    fn print_margins(margins: &[(f64, bool)]) {
        println!("{:>7} {:>7} {:>9} {:>7}", "margin", "tokens", "accepted", "chance");
        let edges = [0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, f64::INFINITY];
        for (low, high) in edges.iter().zip(edges.iter().skip(1)) {
            let within: Vec<_> =
                margins.iter().filter(|(margin, _)| (*low..*high).contains(margin)).collect();
            let count = within.len().max(1) as f64;
            let mean = within.iter().map(|(margin, _)| margin).sum::<f64>() / count;
            let accepted = within.iter().filter(|(_, accepted)| *accepted).count() as f64 / count;
            println!("{mean:>7.2} {:>7} {accepted:>9.3} {:>7.3}", within.len(), chance_by_margin(mean));
        }
    }

    fn processed(sampler: &Sampler, row: &[f32], context: &[u32], most: usize) -> Option<Distribution> {
        let distribution = sampler.process(row, &sampler.history(&[], context)).distribution()?;
        if most >= distribution.entries().len() {
            return Some(distribution);
        }
        let mut top = distribution.entries().to_vec();
        top.select_nth_unstable_by(most, |a, b| b.1.total_cmp(&a.1));
        top.truncate(most);
        Distribution::new(top)
    }

    fn sampler(temperature: f64, seed: u64) -> Sampler {
        Sampler::new(Sampling { temperature, ..Sampling::default() }, seed, 0)
    }

    impl Bench {
        /// Generates one text after a prompt, round by round.
        fn play(&mut self, prompt: &[u32], way: Way, seed: u64) -> Outcome<Sum> {
            let (mut text, mut sum) = (prompt.to_vec(), Sum::default());
            let mut draws = SplitMix64::new(SplitMix64::mix(seed));
            while text.len() < prompt.len() + self.tokens {
                self.round(&mut text, way, seed, &mut draws, &mut sum)?;
            }
            Ok(sum)
        }

        fn round(
            &mut self,
            text: &mut Vec<u32>,
            way: Way,
            seed: u64,
            draws: &mut SplitMix64,
            sum: &mut Sum,
        ) -> Outcome<()> {
            let warm = sampler(self.temperature, seed);
            let drafts = match way.how {
                How::Greedy => sampler(0.0, seed),
                How::Noise | How::Sampled { .. } => warm.clone(),
            };
            let (mut draft, mut sampled) = (text.clone(), Sampled::default());
            let mut stop = Stop::new(way.least);
            let (base, mut margins) = (text.len(), Vec::new());
            while draft.len() < base + self.gamma {
                let rows = self.drafter.read(&draft, 1)?;
                let row = rows.row(0, 0).ok_or("no row")?;
                let started = Instant::now();
                if way.least > f64::NEG_INFINITY {
                    let greedy = matches!(way.how, How::Greedy);
                    let q = warm.process(row, &warm.history(&[], &draft));
                    let chance =
                        if greedy { chance_by_margin(margin(&q)) } else { chance_by_entropy(q.entropy()) };
                    if !stop.goes_on(chance) {
                        break;
                    }
                }
                let token = match way.how {
                    How::Greedy | How::Noise => drafts.pick(row, &[], &draft),
                    How::Sampled { most, .. } => {
                        let q = processed(&warm, row, &draft, most).ok_or("no distribution")?;
                        sampled.push(q, draws.unit())
                    }
                };
                sum.own += started.elapsed().as_secs_f64();
                if matches!(way.how, How::Greedy) {
                    margins.push(margin(&warm.process(row, &warm.history(&[], &draft))));
                }
                draft.push(token);
            }
            let gamma = draft.len() - base;
            let rows = self.target.read(&draft, gamma + 1)?;
            let started = Instant::now();
            let row = |position: usize| rows.row(0, position).ok_or("no row");
            let (run, next) = match way.how {
                How::Greedy | How::Noise => {
                    let mut run = 0;
                    loop {
                        let context = draft.get(..base + run).unwrap_or_default();
                        let token = warm.pick(row(run)?, &[], context);
                        if draft.get(base + run) != Some(&token) {
                            break (run, token);
                        }
                        run += 1;
                    }
                }
                How::Sampled { test, .. } => {
                    let distribution = |position: usize| {
                        let context = draft.get(..base + position).unwrap_or_default();
                        processed(&warm, row(position)?, context, usize::MAX).ok_or("no distribution")
                    };
                    let p: Vec<Distribution> = (0..=gamma).map(distribution).collect::<Result<_, _>>()?;
                    let kept = sampled::verify(test, &sampled, &p, |_, chance| draws.unit() < chance);
                    (kept.run, kept.next.ok_or("no distribution")?.draw(draws.unit()))
                }
            };
            sum.own += started.elapsed().as_secs_f64();
            let decided = margins.into_iter().take(run + 1).enumerate();
            self.margins.extend(decided.map(|(at, margin)| (margin, at < run)));
            text.extend(draft.get(base..base + run).unwrap_or_default());
            text.push(next);
            sum.rounds += 1;
            sum.drafted += gamma;
            sum.tokens += run + 1;
            Ok(())
        }
    }

    fn prompts(workload: &str, target: &str, most: usize) -> Outcome<Vec<Vec<u32>>> {
        let tokenizer = Tokenizer::from_file(&Path::new(target).join("tokenizer.json"))?;
        let mut prompts = Vec::new();
        for line in std::fs::read_to_string(workload)?.lines().take(most) {
            let entry: serde_json::Value = serde_json::from_str(line)?;
            let text = entry.pointer("/body/prompt").and_then(serde_json::Value::as_str);
            let text = text.ok_or("the workload has a request without a text prompt")?;
            prompts.push(tokenizer.encode(text, true)?);
        }
        Ok(prompts)
    }

    /// Mean acceptance length and its standard error over prompts, as a ratio of sums.
    fn of_rounds(sums: &[Sum]) -> (f64, f64) {
        let total = |of: fn(&Sum) -> usize| sums.iter().map(of).sum::<usize>() as f64;
        let (tokens, rounds) = (total(|sum| sum.tokens), total(|sum| sum.rounds));
        let mean = tokens / rounds;
        let spread: f64 = sums.iter().map(|sum| (sum.tokens as f64 - mean * sum.rounds as f64).powi(2)).sum();
        (mean, spread.sqrt() / rounds)
    }

    pub fn main() -> Outcome<()> {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let usage =
            "usage: acceptance TARGET_DIR DRAFTER_DIR WORKLOAD [TEMPERATURE] [GAMMA] [PROMPTS] [TOKENS]";
        let [target, drafter, workload, rest @ ..] = arguments.as_slice() else { return Err(usage.into()) };
        let number = |index: usize, default: usize| rest.get(index).map_or(Ok(default), |text| text.parse());
        let temperature = rest.first().map_or(Ok(0.8), |text| text.parse())?;
        let (gamma, count, tokens) = (number(1, 4)?, number(2, 20)?, number(3, 128)?);
        let prompts = prompts(workload, target, count)?;
        let mut bench = Bench {
            target: Reader::open(target)?,
            drafter: Reader::open(drafter)?,
            temperature,
            gamma,
            tokens,
            margins: Vec::new(),
        };
        let sampled = |test, most| How::Sampled { test, most };
        let all = usize::MAX;
        let hows = [
            How::Greedy,
            How::Noise,
            sampled(Test::Ratio, all),
            sampled(Test::Block, all),
            sampled(Test::Ratio, 64),
            sampled(Test::Block, 64),
            sampled(Test::Block, 16),
        ];
        let always = f64::NEG_INFINITY;
        let leasts = [0.1, 0.2, 0.3];
        let stops = leasts
            .into_iter()
            .flat_map(|least| [How::Greedy, How::Noise, sampled(Test::Block, all)].map(|how| (how, least)));
        let ways = hows.map(|how| (how, always)).into_iter().chain(stops);
        println!("{} prompts, {tokens} tokens, T={temperature}, gamma {gamma}", prompts.len());
        println!(
            "{:<14} {:>6} {:>6} {:>8} {:>9} {:>12}",
            "way", "length", "+-", "drafted", "accepted", "own ms/round"
        );
        for (how, least) in ways {
            let way = Way { how, least };
            if rest.get(4).is_some_and(|only| !way.name().starts_with(only.as_str())) {
                continue;
            }
            let sums = prompts.iter().enumerate().map(|(at, prompt)| bench.play(prompt, way, 7 + at as u64));
            let sums = sums.collect::<Outcome<Vec<Sum>>>()?;
            let margins = std::mem::take(&mut bench.margins);
            let total = |of: fn(&Sum) -> f64| sums.iter().map(of).sum::<f64>();
            let (e_n, error) = of_rounds(&sums);
            let rounds = total(|sum| sum.rounds as f64);
            let drafted = total(|sum| sum.drafted as f64);
            let accepted = total(|sum| sum.tokens as f64) - rounds;
            println!(
                "{:<14} {e_n:>6.3} {error:>6.3} {:>8.2} {:>9.3} {:>12.3}",
                way.name(),
                drafted / rounds,
                accepted / drafted,
                1e3 * total(|sum| sum.own) / rounds
            );
            if rest.get(4).is_some() && !margins.is_empty() && least < 0.0 {
                print_margins(&margins);
            }
        }
        Ok(())
    }
}
