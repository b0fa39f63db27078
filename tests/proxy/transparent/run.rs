//! Every cell of one engine: sent direct, sent through the proxy in every mode, compared.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use foretell::app;
use foretell_wire::openai::Route;

use super::cases::{CASES, Case, body};
use super::compare::{Said, both, first_difference, request_difference, said};
use super::engines::{Engine, Running};
use super::modes::{MODES, Mode};
use crate::client::{panics, watch_panics};
use crate::fakes::http::Request;
use crate::fakes::{Setup, Temper};
use crate::wire::{Message, PATIENCE, Wire, post};

/// Maximum number of different answers of an engine before its cache is warm.
const WARM: usize = 8;

/// The result.
#[derive(Default)]
pub struct Told {
    pub cells: usize,
    pub speculated: usize,
    /// Reasons of answers that were not speculated on where that is forced.
    pub reasons: BTreeMap<String, usize>,
    /// Name of the cell, and the first difference.
    pub different: Vec<(String, String)>,
}

/// One engine, and a proxy in front of it for every mode.
struct Scene {
    engine: &'static Engine,
    server: Running,
    proxies: Vec<(&'static Mode, app::Running)>,
}

pub async fn all(engine: &'static Engine) -> Told {
    watch_panics();
    let mut result = Told::default();
    let (stop, parsed) = {
        let plain = Scene::build(engine, setup()).await;
        let text = plain.text(Route::Chat).await;
        let stop = plain.text(Route::Completions).await;
        plain.compare(false, &part(&stop, 2), &mut result).await;
        (
            part(&stop, 2),
            Setup { reasoning_end: Some(part(&text, 3)), tool_call: Some(call(&text)), ..setup() },
        )
    };
    let scene = Scene::build(engine, parsed).await;
    scene.compare(true, &stop, &mut result).await;
    result
}

/// A model whose outputs sometimes end by themselves.
fn setup() -> Setup {
    Setup { temper: Temper { eos_every: Some(60), ..Temper::default() }, ..Setup::default() }
}

/// Three characters of a text, from a fraction of it on.
fn part(text: &str, fraction: usize) -> String {
    text.chars().skip(text.chars().count() / fraction).take(3).collect()
}

/// The markers around a tool call: three characters of the later part of a text, and a text that is
/// not in it.
fn call(text: &str) -> (String, String) {
    let begin = text.chars().skip(text.chars().count() * 2 / 3).take(3).collect();
    (begin, "</tool_call>".to_owned())
}

impl Scene {
    async fn build(engine: &'static Engine, setup: Setup) -> Self {
        let server = (engine.start)(setup).await;
        let pace = *server.house().pace.lock();
        let mut proxies = Vec::new();
        for mode in &MODES {
            proxies.push((mode, mode.before(server.address(), engine).await));
        }
        // The engine has been identified by now.
        *server.house().pace.lock() = pace;
        server.house().keep_requests();
        Self { engine, server, proxies }
    }

    /// The engine's whole output for the prompt.
    async fn text(&self, route: Route) -> String {
        let body = body(self.engine, route, false, &serde_json::json!({}));
        let answer = self.ask(self.server.address(), route, "", &body).await;
        let choice = &answer.json()["choices"][0];
        choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap_or_default().to_owned()
    }

    async fn compare(&self, parsers: bool, stop: &str, result: &mut Told) {
        for case in CASES.iter().filter(|case| case.parsers == parsers) {
            for &route in case.routes {
                for &stream in case.ways {
                    self.cell(case, route, stream, stop, result).await;
                }
            }
        }
        self.leave().await;
    }

    async fn cell(&self, case: &Case, route: Route, stream: bool, stop: &str, result: &mut Told) {
        let bytes = body(self.engine, route, stream, &(case.fields)(stop, route));
        let direct = self.settled(route, &bytes, stream).await;
        let wanted = self.requests(route);
        for (mode, proxy) in &self.proxies {
            let message = self.ask(proxy.gateway.addresses[0], route, mode.fields, &bytes).await;
            let through = said(message, stream);
            let sent = self.requests(route);
            result.cells += 1;
            result.speculated += usize::from(through.speculated);
            if mode.name == "forced" && !through.speculated {
                *result.reasons.entry(through.reason()).or_default() += 1;
            }
            let difference = difference(mode, [&direct, &through], [&wanted, &sent]);
            if let Some(difference) = difference {
                let way = if stream { "streamed" } else { "whole" };
                let cell = format!("{}/{}/{}/{}/{way}", self.engine.name, mode.name, case.name, route.name());
                result.different.push((cell, difference));
            }
        }
    }

    /// The engine's answer once its cache is as warm as for the others: when it answers the same
    /// twice.
    async fn settled(&self, route: Route, body: &[u8], stream: bool) -> Said {
        let own = self.server.address();
        let mut last = said(self.ask(own, route, "", body).await, stream);
        for _ in 0..WARM {
            let next = said(self.ask(own, route, "", body).await, stream);
            if first_difference(&last, &next).is_none() {
                return next;
            }
            last = next;
        }
        panic!("{} does not answer the same twice", self.engine.name);
    }

    async fn ask(&self, to: SocketAddr, route: Route, fields: &str, body: &[u8]) -> Message {
        let fields = format!(
            "content-type: application/json\r\naccept-encoding: gzip, br\r\nuser-agent: any/1\r\nte: trailers\r\n\
             connection: te\r\nx-own: 1\r\n{}{fields}",
            self.engine.fields
        );
        Wire::connect(to).await.ask(post(route.path(), &fields, body)).await
    }

    /// The generating requests since the last call.
    fn requests(&self, route: Route) -> Vec<Request> {
        let mut all = self.server.house().take_requests();
        all.retain(|request| request.route() == ("POST", route.path()));
        all
    }

    async fn leave(&self) {
        let house = self.server.house();
        let idle = async {
            while house.running() > 0 {
                tokio::task::yield_now().await;
            }
        };
        assert!(tokio::time::timeout(PATIENCE, idle).await.is_ok(), "sequences still run");
        assert_eq!(house.fatal(), Vec::<String>::new(), "{}", self.engine.name);
        assert_eq!(panics(), Vec::<String>::new(), "panics");
    }
}

/// The first difference of a cell; answers and requests are direct, then through.
fn difference(mode: &Mode, said: [&Said; 2], requests: [&[Request]; 2]) -> Option<String> {
    if mode.adds_nothing && said[1].speculated {
        return Some("it was speculated on".to_owned());
    }
    let sent = mode.adds_nothing.then(|| request_difference(requests[0], requests[1])).flatten();
    both(sent, first_difference(said[0], said[1]))
}
