//! Every parameter that makes a request ineligible is named by the header and by `explain`, for the
//! engines that the dialects' tests (`dialects::parameters`) leave out.

use std::collections::BTreeSet;

use foretell_wire::openai::{Route, parameters};
use rstest::rstest;
use serde_json::json;

use super::engines::ENGINES;
use super::modes::MODES;
use crate::dialects::contract::PROMPTS;
use crate::dialects::parameters::{Said, asks, blamed, settings};
use crate::fakes::Setup;

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_refused_parameter_is_named_before(#[values("onnx")] name: &str) {
    let engine = ENGINES.iter().find(|engine| engine.name == name).unwrap();
    let server = (engine.start)(Setup::default()).await;
    let forced = MODES.iter().find(|mode| mode.name == "forced").unwrap();
    let proxy = forced.before(server.address(), engine).await;
    let said = Said { prompt: PROMPTS[0].to_owned(), text: "never there".to_owned(), token: 300 };
    let (mut wrong, mut refused, mut named) = (String::new(), BTreeSet::new(), BTreeSet::new());
    for route in [Route::Completions, Route::Chat] {
        for row in parameters::TABLE.iter().filter(|row| row.routes.has(route) && !carries(name, row.name)) {
            for setting in settings(row, &said).into_iter().filter(|setting| setting.refused.is_some()) {
                refused.insert((route.name(), row.name));
                for mut ask in asks(route, row, &setting, &said) {
                    ask.fields["model"] = json!(engine.model);
                    let answer = ask.send(proxy.gateway.addresses[0], engine.fields).await;
                    let head = |field| answer.message.head.get(field).unwrap_or_default();
                    if (head("x-foretell-path"), head("x-foretell-parameter")) == ("passthrough", row.name) {
                        named.insert((route.name(), row.name));
                    }
                    let admin = proxy.gateway.admin.unwrap();
                    wrong += &blamed(name, admin, row, &setting, &ask, &answer).await;
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert_eq!(named, refused);
}

/// True if this engine verifies drafts under the grammar that the parameter asks for.
fn carries(engine: &str, parameter: &str) -> bool {
    engine == "onnx" && ["response_format", "structured_outputs"].contains(&parameter)
}
