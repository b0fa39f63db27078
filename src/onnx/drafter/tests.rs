//! The service over a fake model: its drafts equal those of a plain loop, and nothing blocks it
//! forever.

use std::future::poll_fn;
use std::task::Poll;

use super::*;
use crate::fake::Fake;
use crate::sampler::Sampler;
use foretell_core::draft::{Stop, chance_by_entropy, chance_by_margin};

const VOCABULARY: usize = 97;

fn sampled(temperature: f64, seed: Option<u64>) -> Noise {
    Noise { seed, choice: 2, sampling: Sampling { temperature, ..Sampling::default() } }
}

fn greedy() -> Noise {
    sampled(0.0, None)
}

/// The choices of a loop over the model without a cache after `text`.
fn plain(fake: &Fake, noise: &Noise, text: &[TokenId], prompt_len: usize, count: usize) -> Vec<TokenId> {
    let mut text = text.to_vec();
    let start = text.len();
    let sampler = Sampler::new(noise.sampling.clone(), noise.seed.unwrap_or(0), noise.choice);
    for _ in 0..count {
        let (prompt, output) = text.split_at(prompt_len);
        let token = sampler.pick(&fake.logits(&text), prompt, output);
        text.push(token);
        if fake.config().eos.contains(&token) {
            break;
        }
    }
    text.split_off(start)
}

/// A text whose first `prompt_len` tokens are the prompt.
fn token_context(text: &[TokenId], prompt_len: usize) -> TokenContext {
    let (prompt, output) = text.split_at(prompt_len);
    TokenContext::new(prompt, output)
}

fn ids(drafted: &[Drafted]) -> Vec<TokenId> {
    drafted.iter().map(|&(token, _)| token).collect()
}

fn service(lanes: usize) -> (DrafterService, crate::fake::Controls) {
    let fake = Fake::new(VOCABULARY, 400, lanes);
    let controls = fake.controls();
    (DrafterService::start_with(Box::new(fake)), controls)
}

#[tokio::test]
async fn drafts_are_those_of_a_plain_loop_greedy_and_sampled() {
    let (service, _) = service(4);
    let fake = Fake::new(VOCABULARY, 400, 1);
    for noise in [greedy(), sampled(0.8, Some(11)), sampled(1.0, Some(12))] {
        let slot = service.slot(noise.clone()).await.unwrap();
        let mut text: Vec<TokenId> = (0..150).map(|index| index * 31 % 89).collect();
        for round in 0..12_usize {
            let drafted = slot.draft(token_context(&text, 140), 5).await.unwrap();
            assert_eq!(ids(&drafted), plain(&fake, &noise, &text, 140, 5), "round {round}");
            // Some rounds accept all tokens, some a part, some remove tokens of the context.
            match round % 3 {
                0 => text.extend(ids(&drafted)),
                1 => text.extend([1, 2]),
                _ => text.truncate(text.len() - 2),
            }
        }
    }
}

#[tokio::test]
async fn without_a_seed_a_slot_is_greedy_and_reports_margins() {
    let (service, _) = service(1);
    let slot = service.slot(sampled(0.9, None)).await.unwrap();
    let fake = Fake::new(VOCABULARY, 400, 1);
    let drafted = slot.draft(token_context(&[3, 4, 5], 3), 4).await.unwrap();
    assert_eq!(ids(&drafted), plain(&fake, &greedy(), &[3, 4, 5], 3, 4));
    let mut logits = fake.logits(&[3, 4, 5]);
    logits.sort_by(f32::total_cmp);
    let (best, second) = (logits[VOCABULARY - 1], logits[VOCABULARY - 2]);
    assert!((drafted[0].1 - (best - second)).abs() < 1e-6 && drafted[0].1 > 0.0);
}

#[tokio::test]
async fn a_draft_ends_where_the_model_is_unsure() {
    let (service, controls) = service(1);
    let fake = Fake::new(VOCABULARY, 400, 1);
    let noise = sampled(0.2, Some(3));
    let sampler = Sampler::new(noise.sampling.clone(), 3, 2);
    let slot = service.slot(noise).await.unwrap();
    let mut lengths = std::collections::BTreeSet::new();
    for first in 0..30 {
        let text = [first, 1, 2];
        let order = Order { min_survival: 0.4, ..6.into() };
        let whole = slot.order(token_context(&text, 3), Order { min_survival: 0.0, ..order }).await.unwrap();
        let mut stop = Stop::new(0.4);
        let sure = (0..whole.len()).take_while(|&at| {
            let output = ids(whole.get(..at).unwrap());
            let logits = fake.logits(&[&text[..], &output].concat());
            let distribution = sampler.process(&logits, &sampler.history(&text, &output));
            stop.goes_on(chance_by_entropy(distribution.entropy()))
        });
        let sure = sure.count();
        let before = controls.runs();
        let short = slot.order(token_context(&text, 3), order).await.unwrap();
        assert_eq!(short, whole[..sure]);
        assert!(controls.runs() - before <= sure + 1, "the last run tells that it is unsure");
        lengths.insert(sure);
    }
    assert!(lengths.len() > 1 && lengths.contains(&1), "{lengths:?}");
}

#[tokio::test]
async fn a_greedy_draft_ends_where_another_token_is_nearly_as_likely() {
    let (service, _) = service(1);
    let slot = service.slot(sampled(0.0, None)).await.unwrap();
    let mut lengths = std::collections::BTreeSet::new();
    for first in 0..30 {
        let text = [first, 1, 2];
        let order = Order { min_survival: 0.12, ..6.into() };
        let whole = slot.order(token_context(&text, 3), Order { min_survival: 0.0, ..order }).await.unwrap();
        let mut stop = Stop::new(0.12);
        let sure = whole.iter().take_while(|(_, margin)| stop.goes_on(chance_by_margin((*margin).into())));
        let sure = sure.count();
        let short = slot.order(token_context(&text, 3), order).await.unwrap();
        assert_eq!(short, whole[..sure]);
        lengths.insert(sure);
    }
    assert!(lengths.len() > 1, "{lengths:?}");
}

#[tokio::test]
async fn shadowing_answers_every_position_in_one_pass() {
    let (service, controls) = service(1);
    let fake = Fake::new(VOCABULARY, 400, 1);
    for noise in [greedy(), sampled(0.7, Some(5))] {
        let slot = service.slot(noise.clone()).await.unwrap();
        let text: Vec<TokenId> = (0..60).map(|index| index * 7 % 83).collect();
        slot.draft(token_context(&text[..45], 40), 1).await.unwrap();
        let before = controls.runs();
        let chosen = slot.shadow(token_context(&text, 40), 4).await.unwrap();
        assert_eq!(controls.runs() - before, 1);
        let want: Vec<TokenId> =
            (44..=60).map(|position| plain(&fake, &noise, &text[..position], 40, 1)[0]).collect();
        assert_eq!(chosen, want);
    }
}

#[tokio::test]
async fn only_new_tokens_are_fed() {
    let (service, controls) = service(1);
    let slot = service.slot(greedy()).await.unwrap();
    let mut text: Vec<TokenId> = (0..100).collect::<Vec<_>>().iter().map(|index| index % 90).collect();
    let drafted = slot.draft(token_context(&text, 100), 4).await.unwrap();
    assert_eq!(controls.tokens(), 103, "the text and all but the last drafted token");
    text.extend(ids(&drafted));
    text.push(8);
    slot.draft(token_context(&text, 100), 1).await.unwrap();
    assert_eq!(controls.tokens(), 105, "the last drafted token and the bonus");
}

#[tokio::test]
async fn sessions_step_in_one_batch() {
    let (service, controls) = service(8);
    let mut slots = Vec::new();
    for _ in 0..8 {
        slots.push(service.slot(greedy()).await.unwrap());
    }
    let before = controls.runs();
    let drafts = slots.iter().enumerate().map(|(index, slot)| async move {
        slot.draft(token_context(&[index as TokenId, 1], 1), 6).await.unwrap()
    });
    let mut drafts = Box::pin(futures_util::future::join_all(drafts));
    // No run ends before every request is sent.
    controls.pause(true);
    poll_fn(|context| {
        let _: () = assert!(drafts.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
    controls.pause(false);
    let drafts = drafts.await;
    let fake = Fake::new(VOCABULARY, 400, 1);
    for (index, drafted) in drafts.iter().enumerate() {
        assert_eq!(ids(drafted), plain(&fake, &greedy(), &[index as TokenId, 1], 1, 6));
    }
    let runs = controls.runs() - before;
    assert!(
        runs <= 7,
        "{runs} runs for 8 drafts of 6: a first one for those that came in time, then all of them"
    );
}

#[tokio::test]
async fn slots_are_given_back_and_none_is_left_when_all_are_taken() {
    let (service, _) = service(2);
    let first = service.slot(greedy()).await.unwrap();
    let second = service.slot(greedy()).await.unwrap();
    assert!(service.slot(greedy()).await.is_none());
    drop(first);
    let third = service.slot(greedy()).await.expect("the first slot is free again");
    assert!(
        third.draft(token_context(&[1], 1), 2).await.is_ok()
            && second.draft(token_context(&[2], 1), 2).await.is_ok()
    );
    // A session that goes away while it waits for a slot takes none with it.
    drop(third);
    give_up(service.slot(greedy())).await;
    assert!(service.slot(greedy()).await.is_some());
}

#[tokio::test]
async fn an_abandoned_draft_leaves_the_slot_usable() {
    let (service, _) = service(1);
    let slot = service.slot(greedy()).await.unwrap();
    let fake = Fake::new(VOCABULARY, 400, 1);
    for _ in 0..20 {
        let text: Vec<TokenId> = (0..300).map(|index| index % 90).collect();
        give_up(slot.draft(token_context(&text, 10), 32)).await;
        let drafted = slot.draft(token_context(&[5, 6], 1), 3).await.unwrap();
        assert_eq!(ids(&drafted), plain(&fake, &greedy(), &[5, 6], 1, 3));
    }
}

/// Sends a request and drops it without waiting for the answer.
async fn give_up<T>(question: impl Future<Output = T>) {
    let mut question = Box::pin(question);
    poll_fn(|context| {
        let _ = question.as_mut().poll(context);
        Poll::Ready(())
    })
    .await;
}

#[tokio::test]
async fn tokens_read_for_an_abandoned_request_are_not_read_again() {
    let fake = Fake::new(VOCABULARY, 2_000, 1);
    let controls = fake.controls();
    let service = DrafterService::start_with(Box::new(fake));
    let slot = service.slot(greedy()).await.unwrap();
    let text: Vec<TokenId> = (0..1_000).map(|index| index % 90).collect();
    controls.pause(true);
    let mut reading = Box::pin(slot.draft(token_context(&text[..900], 800), 32));
    while controls.runs() == 0 {
        poll_fn(|context| {
            let _: () = assert!(reading.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        tokio::task::yield_now().await;
    }
    drop(reading);
    let mut again = Box::pin(slot.draft(token_context(&text, 800), 4));
    poll_fn(|context| {
        let _: () = assert!(again.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
    controls.pause(false);
    let drafted = again.await.unwrap();
    assert_eq!(ids(&drafted), plain(&Fake::new(VOCABULARY, 2_000, 1), &greedy(), &text, 800, 4));
    assert_eq!(
        controls.tokens(),
        1_000 + 3,
        "every token of the text once, and all but the last drafted one"
    );
}

#[tokio::test]
async fn a_request_abandoned_before_its_turn_takes_no_run() {
    let (service, controls) = service(2);
    let (busy, slot) = (service.slot(greedy()).await.unwrap(), service.slot(greedy()).await.unwrap());
    slot.draft(token_context(&[7; 50], 40), 1).await.unwrap();
    let before = controls.tokens();
    controls.pause(true);
    let mut other = Box::pin(busy.draft(token_context(&[1, 2], 1), 1));
    poll_fn(|context| {
        let _: () = assert!(other.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
    give_up(slot.draft(token_context(&[9; 300], 40), 8)).await;
    controls.pause(false);
    other.await.unwrap();
    slot.draft(token_context(&[7; 51], 40), 1).await.unwrap();
    assert_eq!(
        controls.tokens() - before,
        2 + 1,
        "two of the other's, and the new one of the text that it knows"
    );
}

#[tokio::test]
async fn a_failing_model_is_a_fault_and_the_slot_recovers() {
    let (service, controls) = service(1);
    let slot = service.slot(greedy()).await.unwrap();
    let want = slot.draft(token_context(&[1, 2, 3], 3), 3).await.unwrap();
    controls.fail(true);
    assert!(matches!(slot.draft(token_context(&[1, 2, 3, 4], 3), 3).await, Err(DraftFault::Model(_))));
    controls.fail(false);
    assert_eq!(slot.draft(token_context(&[1, 2, 3], 3), 3).await.unwrap(), want);
}

#[tokio::test]
async fn a_crashed_thread_is_a_fault_for_everyone_and_a_panic_for_none() {
    let (service, controls) = service(2);
    let slot = service.slot(greedy()).await.unwrap();
    controls.crash();
    assert_eq!(slot.draft(token_context(&[1], 1), 3).await, Err(DraftFault::Stopped));
    assert_eq!(slot.shadow(token_context(&[1, 2], 1), 0).await, Err(DraftFault::Stopped));
    assert!(service.slot(greedy()).await.is_none());
}

#[tokio::test]
async fn limits_are_kept_and_nonsense_is_refused() {
    let (service, _) = service(1);
    let slot = service.slot(greedy()).await.unwrap();
    let long: Vec<TokenId> = (0..401).map(|index| index % 90).collect();
    let refused = slot.draft(token_context(&long, 1), 1).await;
    assert_eq!(refused, Err(DraftFault::TooLong { len: 401, context: 400 }));
    let near = slot.draft(token_context(&long[..398], 1), 8).await.unwrap();
    assert!(near.len() <= 3, "two more tokens fit, and the row of the last one");
    assert!(slot.draft(token_context(&[1], 1), 0).await.unwrap().is_empty());
    for (text, prompt_len, from) in [(vec![], 0, 0), (vec![1, 2], 0, 0), (vec![1, 2], 1, 2)] {
        assert!(matches!(
            slot.shadow(token_context(&text, prompt_len), from).await,
            Err(DraftFault::Invalid(_))
        ));
    }
    let eos = VOCABULARY as TokenId - 1;
    let fake = Fake::new(VOCABULARY, 400, 1);
    let text = (0..96)
        .map(|token| [token, 9])
        .find(|text| plain(&fake, &greedy(), text, 1, 31).last() == Some(&eos))
        .expect("one of the texts ends");
    let drafted = ids(&slot.draft(token_context(&text, 1), 32).await.unwrap());
    assert_eq!(drafted, plain(&fake, &greedy(), &text, 1, 32));
    assert_eq!(drafted.last(), Some(&eos), "nothing is drafted behind the end");
}

/// A target may have more tokens than a drafter of the same tokenizer.
#[tokio::test]
async fn a_token_that_the_model_does_not_have_costs_its_own_draft_only() {
    let (service, _) = service(2);
    let (slot, other) = (service.slot(greedy()).await.unwrap(), service.slot(greedy()).await.unwrap());
    let fake = Fake::new(VOCABULARY, 400, 1);
    let beyond = token_context(&[3, VOCABULARY as TokenId, 5], 3);
    let (drafted, refused) =
        tokio::join!(slot.draft(token_context(&[3, 4, 5], 3), 4), other.draft(beyond, 4));
    assert!(matches!(refused, Err(DraftFault::Invalid(_))));
    assert_eq!(ids(&drafted.unwrap()), plain(&fake, &greedy(), &[3, 4, 5], 3, 4));
    assert!(other.draft(token_context(&[3, 4, 5], 3), 4).await.is_ok());
}

#[tokio::test]
async fn penalties_count_the_text_and_the_draft_before_each_token() {
    let (service, _) = service(1);
    let fake = Fake::new(VOCABULARY, 400, 1);
    let mut noise = sampled(0.9, Some(5));
    (noise.sampling.repetition_penalty, noise.sampling.frequency_penalty) = (1.3, 0.4);
    let slot = service.slot(noise.clone()).await.unwrap();
    let mut text: Vec<TokenId> = (0..40).map(|index| index * 7 % 23).collect();
    for _ in 0..4 {
        let drafted = slot.draft(token_context(&text, 30), 8).await.unwrap();
        assert_eq!(ids(&drafted), plain(&fake, &noise, &text, 30, 8));
        text.extend(ids(&drafted).iter().take(3));
        text.truncate(text.len() - 1);
    }
    let choices = slot.shadow(token_context(&text, 30), 4).await.unwrap();
    let wanted = (34..=text.len()).map(|at| plain(&fake, &noise, &text[..at], 30, 1)[0]);
    assert_eq!(choices, wanted.collect::<Vec<_>>());
}

#[tokio::test]
async fn no_id_beyond_the_vocabulary_is_ever_drafted() {
    const END: TokenId = 20;
    let (service, _) = service(3);
    let service = service.bounded(END);
    let text: Vec<TokenId> = (0..30).map(|index| index * 7 % END).collect();
    for noise in [greedy(), sampled(0.9, Some(4))] {
        let slot = service.slot(noise).await.unwrap();
        for from in 1..text.len() {
            let drafted = slot.draft(token_context(&text[..from], 1), 6).await.unwrap();
            assert!(ids(&drafted).iter().all(|&token| token < END), "{drafted:?}");
        }
        let shadow = slot.shadow(token_context(&text, 1), 1).await.unwrap();
        assert!(shadow.iter().all(|&token| token < END), "{shadow:?}");
    }
}
