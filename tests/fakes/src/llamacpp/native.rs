//! `/completion`: tasks on slots, run together, in the server's own answer format.

use std::collections::VecDeque;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::super::batch::{Batch, Reuse};
use super::super::fields::Fields;
use super::super::http::{Out, Request, Sent};
use super::super::sample::Noise;
use super::super::sequence::{Finish, Hold, Piece, Sequence};
use super::super::toy::Context;
use super::params::{Params, settings};
use super::slots::{Deferred, Held, Task};
use super::{Llama, Refusal, refuse};

/// Tasks of one call that run together.
pub(super) struct Wave {
    pub batch: Batch,
    held: Vec<Held>,
    /// For each sequence: tokens of its prompt that were in its slot.
    pub cached: Vec<usize>,
}

impl Wave {
    pub async fn step(&mut self) -> Vec<(usize, Piece)> {
        let pieces = self.batch.step().await;
        for (held, sequence) in self.held.iter_mut().zip(&self.batch.sequences) {
            // The last token was sampled but never fed.
            let fed = sequence.context.len() - usize::from(!sequence.output().is_empty());
            held.tokens = sequence.context.tokens()[..fed].to_vec();
        }
        pieces
    }

    pub fn slot(&self, at: usize) -> usize {
        self.held[at].at
    }
}

/// Prompts without a slot, with their index in the call.
pub(super) type Queue = VecDeque<(usize, Vec<u32>)>;

impl Llama {
    /// Starts the tasks that find slots now, at least one; the others stay deferred.
    pub(super) async fn launch(&self, queue: &mut Queue, params: &Params) -> Wave {
        let mut deferred = Deferred::new(&self.slots, queue.len());
        let (mut sequences, mut held, mut cached) = (Vec::new(), Vec::new(), Vec::new());
        while let Some((index, prompt)) = queue.pop_front() {
            let children = params.n_cmpl - 1;
            let task = Task { prompt: &prompt, slot: params.id_slot, children, reuse: params.cache_prompt };
            let taken =
                if held.is_empty() { Some(self.slots.take(&task).await) } else { self.slots.try_take(&task) };
            let Some(taken) = taken else {
                queue.push_front((index, prompt));
                break;
            };
            deferred.launched(1);
            for (child, &at) in taken.slots.iter().enumerate() {
                let mut sequence = self.sequence(index + child, &prompt, params, child);
                // Children get the parent's state: nothing of their prompts is computed.
                sequence.cached = if child == 0 { taken.cached } else { prompt.len() };
                sequences.push(sequence);
                held.push(Held { slots: Arc::clone(&self.slots), at, tokens: prompt.clone() });
                cached.push(taken.cached);
            }
        }
        let batch = Batch::begin(&self.house, sequences, Reuse::Given).await;
        Wave { batch, held, cached }
    }

    fn sequence(&self, index: usize, prompt: &[u32], params: &Params, child: usize) -> Sequence {
        let mut sampling = params.sampling.clone();
        sampling.noise = match sampling.noise {
            Noise::Restarting(seed) => Noise::Restarting(seed.wrapping_add(child as u64)),
            Noise::Position(seed) => Noise::Position(seed),
        };
        let room = self.house.setup.max_len - prompt.len();
        sampling.max_tokens = params.n_predict.unwrap_or(room).min(room);
        let empty = sampling.max_tokens == 0 || prompt.is_empty();
        let mut sequence = Sequence::new(index, Context::new(prompt), sampling, Hold::Prefix);
        sequence.finish = empty.then_some(Finish::Length);
        sequence
    }

    pub(super) fn queue(prompts: Vec<Vec<u32>>, params: &Params) -> Queue {
        prompts.into_iter().enumerate().map(|(at, prompt)| (at * params.n_cmpl, prompt)).collect()
    }

    pub(super) async fn native(&self, request: &Request, out: &mut Out) -> Sent {
        let asked = self.asked(request);
        let (fields, params, prompts) = match asked {
            Ok(asked) => asked,
            Err(refusal) => return refuse(&refusal, out).await,
        };
        let count = prompts.len() * params.n_cmpl;
        let mut queue = Self::queue(prompts, &params);
        let wanted = fields.texts("response_fields").unwrap_or_default();
        if params.stream {
            return self.stream_native(&params, queue, count, &wanted, out).await;
        }
        let mut all = vec![Value::Null; count];
        while !queue.is_empty() {
            let mut wave = self.launch(&mut queue, &params).await;
            let mut pieces: Vec<Vec<Piece>> = wave.batch.sequences.iter().map(|_| Vec::new()).collect();
            loop {
                let step = wave.step().await;
                if step.is_empty() {
                    break;
                }
                for (at, piece) in step {
                    pieces[at].push(piece);
                }
            }
            for (at, pieces) in pieces.iter().enumerate() {
                let index = wave.batch.sequences[at].index;
                all[index] = chosen(self.last(&wave, at, &params, Some(pieces)), &wanted);
            }
        }
        let body = if all.len() == 1 { all.remove(0) } else { Value::from(all) };
        out.json_utf8(200, &body).await
    }

    pub(super) fn asked(&self, request: &Request) -> Result<(Fields, Params, Vec<Vec<u32>>), Refusal> {
        let fields = Fields::of(request)?;
        let prompts = self.prompts(&fields)?;
        let params = self.params(&fields)?;
        Ok((fields, params, prompts))
    }

    async fn stream_native(
        &self,
        params: &Params,
        mut queue: Queue,
        count: usize,
        wanted: &[String],
        out: &mut Out,
    ) -> Sent {
        out.stream("text/event-stream").await?;
        // Each task marks its beginning; the first mark is the head, the others are sent as events.
        for _ in 1..count {
            out.event("null").await?;
        }
        while !queue.is_empty() {
            let mut wave = self.launch(&mut queue, params).await;
            loop {
                let pieces = wave.step().await;
                if pieces.is_empty() {
                    break;
                }
                for (at, piece) in pieces {
                    // A token that ends in the middle of a character is never sent.
                    if !piece.incomplete {
                        out.event(self.partial(&wave, at, params, &piece)).await?;
                    }
                    if piece.finish.is_some() {
                        out.event(chosen(self.last(&wave, at, params, None), wanted)).await?;
                    }
                }
            }
            let ended = |sequence: &Sequence| sequence.output().is_empty();
            for at in (0..wave.batch.sequences.len()).filter(|&at| ended(&wave.batch.sequences[at])) {
                out.event(chosen(self.last(&wave, at, params, None), wanted)).await?;
            }
        }
        out.end().await
    }

    pub(super) fn partial(&self, wave: &Wave, at: usize, params: &Params, piece: &Piece) -> Value {
        let sequence = &wave.batch.sequences[at];
        let mut event = json!({"index": sequence.index, "content": piece.text, "tokens": [piece.token], "stop": false,
            "id_slot": -1, "tokens_predicted": sequence.output().len(), "tokens_evaluated": sequence.prompt});
        if params.n_probs > 0 {
            event["completion_probabilities"] = self.probabilities(std::slice::from_ref(piece), params);
        }
        event
    }

    /// The final object of a sequence; on a stream its text and tokens have been sent before.
    pub(super) fn last(&self, wave: &Wave, at: usize, params: &Params, pieces: Option<&[Piece]>) -> Value {
        let sequence = &wave.batch.sequences[at];
        let count = sequence.output().len();
        let (stop, word) = match &sequence.finish {
            Some(Finish::Eos | Finish::StopToken(_)) => ("eos", ""),
            Some(Finish::StopText(text)) => ("word", text.as_str()),
            Some(Finish::Length) => ("limit", ""),
            None => ("none", ""),
        };
        let tokens = if params.return_tokens && pieces.is_some() { sequence.output() } else { &[] };
        let text = if pieces.is_some() {
            sequence.text.clone() + &sequence.tail(&self.house.toy)
        } else {
            String::new()
        };
        let fed = (sequence.context.len() - usize::from(count > 0)).max(usize::from(count > 0));
        let full = sequence.context.len() >= self.house.setup.max_len;
        let prompt = self.house.toy.decode(&sequence.context.tokens()[..sequence.prompt], false);
        let mut settings = settings(params);
        settings["stop"] = json!(params.sampling.stop);
        let mut body = json!({"index": sequence.index, "content": text, "tokens": tokens, "id_slot": wave.slot(at),
            "stop": true, "model": self.house.setup.model, "tokens_predicted": count,
            "tokens_evaluated": sequence.prompt, "generation_settings": settings, "prompt": prompt,
            "has_new_line": sequence.text.contains('\n'), "truncated": full, "stop_type": stop,
            "stopping_word": word, "tokens_cached": fed, "timings": timings(wave, at)});
        if let Some(pieces) = pieces.filter(|_| params.n_probs > 0) {
            body["completion_probabilities"] = self.probabilities(pieces, params);
        }
        body
    }

    pub(super) fn probabilities(&self, pieces: &[Piece], params: &Params) -> Value {
        let complete = pieces.iter().filter(|piece| !piece.incomplete);
        let entry = |piece: &Piece| {
            let row = if params.post_sampling { &piece.processed } else { &piece.raw };
            let (key, tops) =
                if params.post_sampling { ("prob", "top_probs") } else { ("logprob", "top_logprobs") };
            let told = |id: u32, logprob: f32| {
                let name = self.house.toy.name(id);
                let value = if params.post_sampling { logprob.exp() } else { logprob };
                json!({"id": id, "token": name, "bytes": name.as_bytes(), key: value})
            };
            let mut own = told(piece.token, row.logprob(piece.token));
            own[tops] = row.top(params.n_probs).into_iter().map(|(id, logprob)| told(id, logprob)).collect();
            own
        };
        complete.map(entry).collect()
    }
}

pub(super) fn timings(wave: &Wave, at: usize) -> Value {
    let sequence = &wave.batch.sequences[at];
    let cached = wave.cached[at];
    json!({"cache_n": cached, "prompt_n": sequence.prompt - cached, "prompt_ms": 1.0, "prompt_per_token_ms": 1.0,
        "prompt_per_second": 1000.0, "predicted_n": sequence.output().len(), "predicted_ms": 1.0,
        "predicted_per_token_ms": 1.0, "predicted_per_second": 1000.0})
}

/// Only the requested fields, under the requested names (`json_get_nested_values`).
fn chosen(body: Value, wanted: &[String]) -> Value {
    if wanted.is_empty() {
        return body;
    }
    let field = |name: &String| {
        let found = name.split('/').try_fold(&body, |value, part| value.get(part))?;
        Some((name.clone(), found.clone()))
    };
    Value::Object(wanted.iter().filter_map(field).collect::<Map<_, _>>())
}
