//! Known faults of the proxy under a grammar. Each test is to pass, and to be moved to where it
//! belongs, once its fault is mended.

use super::*;
use crate::fakes::{Fault, When};

/// At the second word more than 1,024 tokens are allowed, and more than 64 that are not are likelier
/// than the likeliest of them (`Calls::ask_allowed`, `BANS`). The client gets an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "src: an answer is broken off where many likelier tokens are barred"]
async fn an_answer_goes_on_where_many_likelier_tokens_are_barred() {
    let mut options = options("0.33.0");
    options.setup.temper.seed = 1;
    let scene = Scene::of(options).await;
    let structure = json!({"structured_outputs": {"regex": "[a-z]{3,8}( [a-z]{3,8}){2,9}[.]"}});
    for number in 0..12 {
        let prompt = format!("{PROMPT} {number}");
        let ask = asked(Route::Completions, false, &structure, &json!({"prompt": prompt}));
        scene.proves(&ask).await;
        scene.alike(&ask).await;
    }
    scene.leave().await;
}

/// A page of something else in place of the answer to a question about the library proves nothing,
/// and is taken as the sign of another library for good (`structured::shows`).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "src: an unreadable answer is taken for another library"]
async fn an_unreadable_answer_is_no_sign_of_another_library() {
    let scene = Scene::of(options("0.33.0")).await;
    let ask = asked(Route::Chat, true, &schema(&json!({"type": "object"})), &json!({}));
    let faults = &scene.engine.house.faults;
    faults.at(When::path(COMPLETIONS).holding("allowed_token_ids"), 0, Fault::Garbage);
    assert_eq!(scene.alike(&ask).await, plain("grammar"));
    scene.is_quiet().await;
    assert_eq!(faults.struck(), 1);
    scene.proves(&ask).await;
    scene.leave().await;
}
