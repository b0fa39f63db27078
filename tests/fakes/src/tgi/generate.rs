//! `/generate` and `/generate_stream`: validation of parameters, details of tokens, no end mark.

use serde_json::{Value, json};

use super::super::batch::{Batch, Reuse};
use super::super::fields::Fields;
use super::super::http::{Out, Request, Sent};
use super::super::sample::{Noise, Pipeline, Sampling, fresh_seed};
use super::super::sequence::{Finish, Hold, Piece, Sequence};
use super::super::toy::{Context, Row};
use super::{Refusal, Tgi, inputs};

/// One prompt to generate from.
pub(super) struct Job {
    pub sequence: Sequence,
    /// Set only if the request samples.
    pub seed: Option<u64>,
    pub details: bool,
    pub prefill: bool,
    pub top: usize,
    /// The text that `return_full_text` prepends to the output.
    before: String,
}

impl Tgi {
    pub(super) async fn generate(&self, request: &Request, out: &mut Out) -> Sent {
        let read = Fields::of(request).map_err(Refusal::from).and_then(|fields| {
            let stream =
                request.path == "/generate_stream" || (request.path == "/" && fields.flag("stream")?);
            let parameters = fields.object("parameters")?;
            Ok((self.job(self.encode(&inputs(&fields)?, false), &parameters, stream)?, stream))
        });
        let (job, stream) = match read {
            Ok(read) => read,
            Err(refusal) => return self.refuse(&refusal, out).await,
        };
        if stream { self.stream(job, out).await } else { self.whole(job, request.path == "/", out).await }
    }

    /// Reads and validates; unknown parameters are ignored.
    pub(super) fn job(
        &self,
        mut prompt: Vec<u32>,
        parameters: &Fields,
        stream: bool,
    ) -> Result<Job, Refusal> {
        let prefill = parameters.flag("decoder_input_details")?;
        if prefill && stream {
            return Err(Refusal::validation(
                "`decoder_input_details` == true is not supported when streaming tokens",
            ));
        }
        if let Some(message) = parameters.beyond(&["grammar", "typical_p", "watermark", "adapter_id"]) {
            return Err(Refusal::validation(message));
        }
        let top = parameters.uint("top_n_tokens")?.unwrap_or(0);
        let most = self.options.max_top_n_tokens;
        if top > most {
            return Err(Refusal::validation(format!(
                "`top_n_tokens` must be >= 0 and <= {most}. Given: {top}"
            )));
        }
        if prompt.is_empty() {
            return Err(Refusal::validation("`inputs` cannot be empty"));
        }
        let full = parameters.flag("return_full_text")?;
        let before = if full { self.house.toy.decode(&prompt, true) } else { String::new() };
        if let Some(kept) = parameters.uint("truncate")? {
            prompt.drain(..prompt.len().saturating_sub(kept as usize));
        }
        let (sampling, seed) = self.sampling(parameters, prompt.len())?;
        let mut sequence = Sequence::new(0, Context::new(&prompt), sampling, Hold::Nothing);
        if prefill {
            // Without ids the radix cache is neither read nor written.
            sequence.salt = fresh_seed();
        }
        Ok(Job { sequence, seed, details: parameters.flag("details")?, prefill, top: top as usize, before })
    }

    fn sampling(&self, parameters: &Fields, prompt: usize) -> Result<(Sampling, Option<u64>), Refusal> {
        let longest = self.house.setup.max_len;
        let max = match parameters.get("max_new_tokens") {
            Some(_) => parameters.uint("max_new_tokens")?.unwrap_or(0) as usize,
            None if parameters.0.contains_key("max_new_tokens") => longest.saturating_sub(prompt),
            None => 100,
        };
        let mut sampling = Sampling::new(Pipeline::TGI, Noise::fresh(), max);
        let read = |name: &str, own: f64| parameters.float(name).map(|value| value.unwrap_or(own));
        sampling.temperature = read("temperature", 1.0)?;
        sampling.repetition = read("repetition_penalty", 1.0)?;
        sampling.frequency = read("frequency_penalty", 0.0)?;
        sampling.top_p = read("top_p", 1.0)?;
        let top_k = parameters.int("top_k")?;
        sampling.top_k = top_k.unwrap_or(0).max(0) as usize;
        sampling.stop = parameters.texts("stop")?;
        // The text keeps its stop string [unverified: from memory].
        sampling.keep_stop = true;
        self.check(parameters, &sampling, top_k)?;
        if max == 0 {
            return Err(Refusal::validation("`max_new_tokens` must be strictly positive"));
        }
        if prompt + max > longest {
            return Err(Refusal::validation(format!(
                "`inputs` tokens + `max_new_tokens` must be <= {longest}. Given: {prompt} `inputs` tokens and {max} \
                 `max_new_tokens`"
            )));
        }
        // An active warper enables sampling, regardless of `do_sample` [unverified: from memory].
        let warped = (sampling.temperature - 1.0).abs() > 0.0 || sampling.top_k > 0 || sampling.top_p < 1.0;
        if !parameters.flag("do_sample")? && !warped {
            sampling.temperature = 0.0;
            return Ok((sampling, None));
        }
        let seed = parameters.uint("seed")?.unwrap_or_else(fresh_seed);
        sampling.noise = Noise::Restarting(seed);
        Ok((sampling, Some(seed)))
    }

    fn check(&self, parameters: &Fields, sampling: &Sampling, top_k: Option<i64>) -> Result<(), Refusal> {
        let wrong = if sampling.temperature <= 0.0 {
            "`temperature` must be strictly positive"
        } else if sampling.repetition <= 0.0 {
            "`repetition_penalty` must be strictly positive"
        } else if !(-2.0..=2.0).contains(&sampling.frequency) {
            "`frequency_penalty` must be >= -2.0 and <= 2.0"
        } else if parameters.get("top_p").is_some() && !(sampling.top_p > 0.0 && sampling.top_p < 1.0) {
            // 1 is refused too.
            "`top_p` must be > 0.0 and < 1.0"
        } else if top_k.is_some_and(|top_k| top_k <= 0) {
            "`top_k` must be strictly positive"
        } else if parameters.uint("best_of")?.is_some_and(|best| best > 1) {
            "`best_of` != 1 is not allowed for this endpoint"
        } else {
            let (given, most) = (sampling.stop.len(), self.options.max_stop_sequences);
            if given > most {
                return Err(Refusal::validation(format!(
                    "`stop` supports up to {most} stop sequences. Given: {given}"
                )));
            }
            return Ok(());
        };
        Err(Refusal::validation(wrong))
    }

    async fn whole(&self, job: Job, compat: bool, out: &mut Out) -> Sent {
        let (seed, top, details) = (job.seed, job.top, job.details);
        let (before, prefill) = (job.before, job.prefill);
        let trouble = self.trouble.lock().take();
        if let Some(trouble) = trouble {
            return self.refuse(&trouble.refusal(false), out).await;
        }
        let mut batch = Batch::begin(&self.house, vec![job.sequence], Reuse::AfterStep).await;
        let pieces = batch.finish().await.remove(0);
        let sequence = &batch.sequences[0];
        let text = format!("{before}{}{}", sequence.text, sequence.tail(&self.house.toy));
        let mut body = json!({"generated_text": text});
        if details {
            let mut told = Self::details(sequence, seed);
            told["prefill"] = self.prefill(sequence, prefill);
            told["tokens"] = pieces.iter().map(|piece| self.token(piece)).collect();
            if top > 0 {
                told["top_tokens"] = pieces.iter().map(|piece| self.tops(piece, top)).collect();
            }
            body["details"] = told;
        }
        // The old route returns a list.
        let body = if compat { json!([body]) } else { body };
        out.json(200, &body).await
    }

    async fn stream(&self, job: Job, out: &mut Out) -> Sent {
        let (seed, top, before) = (job.seed, job.top, job.before);
        let trouble = self.trouble.lock().take();
        let mut batch = Batch::begin(&self.house, vec![job.sequence], Reuse::AfterStep).await;
        out.events().await?;
        for index in 1.. {
            let Some((_, piece)) = batch.step().await.pop() else { break };
            if let Some(trouble) = trouble {
                out.event(trouble.refusal(true).body()).await?;
                break;
            }
            let sequence = &batch.sequences[0];
            let mut event =
                json!({"index": index, "token": self.token(&piece), "generated_text": null, "details": null});
            if top > 0 {
                event["top_tokens"] = self.tops(&piece, top);
            }
            if piece.finish.is_some() {
                let text = format!("{before}{}{}", sequence.text, sequence.tail(&self.house.toy));
                event["generated_text"] = json!(text);
                event["details"] = Self::details(sequence, seed);
                event["details"]["input_length"] = json!(sequence.prompt);
            }
            // There is no space after the colon.
            out.piece(format!("data:{event}\n\n").as_bytes()).await?;
        }
        while !batch.step().await.is_empty() {}
        out.end().await
    }

    fn details(sequence: &Sequence, seed: Option<u64>) -> Value {
        let reason = sequence.finish.as_ref().map(native_reason);
        json!({"finish_reason": reason, "generated_tokens": sequence.output().len(), "seed": seed})
    }

    pub(super) fn token(&self, piece: &Piece) -> Value {
        self.entry(piece.token, &piece.text, told_row(piece))
    }

    fn tops(&self, piece: &Piece, top: usize) -> Value {
        let row = told_row(piece);
        row.top(top).into_iter().map(|(id, _)| self.entry(id, &self.house.toy.name(id), row)).collect()
    }

    fn entry(&self, id: u32, text: &str, row: &Row) -> Value {
        let special = self.house.toy.words.is_special(id);
        // A special token has a name, although it is not in the text.
        let text = if special { self.house.toy.name(id) } else { text.to_owned() };
        json!({"id": id, "text": text, "logprob": row.logprob(id), "special": special})
    }

    /// The prompt's own tokens, without ranks or alternatives; empty without the flag.
    fn prefill(&self, sequence: &Sequence, asked: bool) -> Value {
        if !asked || !self.options.prefill_logprobs {
            return json!([]);
        }
        let tokens = &sequence.context.tokens()[..sequence.prompt];
        let entry = |(at, &id): (usize, &u32)| {
            let logprob = (at > 0).then(|| self.house.toy.row(&sequence.context, at).logprob(id));
            json!({"id": id, "text": self.house.toy.name(id), "logprob": logprob})
        };
        tokens.iter().enumerate().map(entry).collect()
    }
}

/// Logprobs are reported after penalties and temperature.
pub(super) fn told_row(piece: &Piece) -> &Row {
    &piece.processed
}

pub(super) fn native_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Length => "length",
        Finish::Eos | Finish::StopToken(_) => "eos_token",
        Finish::StopText(_) => "stop_sequence",
    }
}
