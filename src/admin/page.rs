//! The status page for operators, in plain HTML.

use std::fmt::Write;

use crate::fleet::{Load, Replica};
use crate::gateway::Shared;
use crate::observe::recent;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;\
color:#222;background:#fff}h1{font-size:1.3rem}h2{font-size:1rem;margin-top:2rem}\
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.25rem .75rem .25rem 0;\
border-bottom:1px solid #ddd;font-variant-numeric:tabular-nums}\
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}td,th{border-color:#333}a{color:#8bf}}";

/// The page for the current state.
pub fn render(shared: &Shared) -> String {
    let state = escape(&shared.unready().unwrap_or_else(|| "ready".to_owned()));
    let mut page = format!(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width\">\
         <title>Foretell</title><style>{STYLE}</style><h1>Foretell {}</h1><p>{state}, mode {}</p>",
        env!("CARGO_PKG_VERSION"),
        shared.modes.process().name()
    );
    page.push_str(
        "<h2>Replicas</h2><table><tr><th>name<th>address<th>dialect<th>mode<th>state<th>breaker\
         <th>in flight<th>running<th>waiting<th>KV<th>last error</tr>",
    );
    shared.fleet.each(|replica| row(&mut page, &replica_cells(shared, replica)));
    page.push_str("</table><h2>Last completions</h2><table><tr>");
    for title in [
        "time", "id", "path", "reason", "model", "status", "rounds", "drafted", "accepted", "tokens", "ms",
        "error",
    ] {
        let _ = write!(page, "<th>{title}");
    }
    page.push_str("</tr>");
    shared.observer.recent().each(|finished| {
        row(
            &mut page,
            &[
                recent::time(finished),
                escape(&finished.id),
                finished.path.name().to_owned(),
                finished.reason.unwrap_or("").to_owned(),
                escape(finished.model.as_deref().unwrap_or("")),
                finished.status.to_string(),
                finished.rounds.len().to_string(),
                finished.drafted().to_string(),
                finished.accepted().to_string(),
                finished.output_tokens.to_string(),
                format!("{:.1}", finished.duration.as_secs_f64() * 1e3),
                escape(finished.error.as_deref().unwrap_or("")),
            ],
        );
    });
    page.push_str("</table><p><a href=/metrics>metrics</a> <a href=/api/sessions>sessions</a> ");
    page.push_str("<a href=/api/replicas>replicas</a> <a href=/api/policies>policies</a></p></html>");
    page
}

fn replica_cells(shared: &Shared, replica: &Replica) -> [String; 11] {
    let load = replica.load();
    let told = |show: &dyn Fn(&Load) -> String| load.as_ref().map_or_else(|| "–".to_owned(), show);
    [
        escape(replica.label()),
        escape(replica.url()),
        escape(&replica.dialect()),
        shared.modes.of(replica.name()).name().to_owned(),
        replica.standing().name().to_owned(),
        replica.breaker().name().to_owned(),
        replica.in_flight().to_string(),
        told(&|load| load.running.to_string()),
        told(&|load| load.waiting.to_string()),
        told(&|load| load.kv_usage.map_or_else(|| "–".to_owned(), |usage| format!("{:.0} %", usage * 100.0))),
        replica.last_error().map_or_else(String::new, |error| {
            format!("{} ({} s ago)", escape(&error.text), error.age().as_secs())
        }),
    ]
}

fn row(page: &mut String, cells: &[String]) {
    page.push_str("<tr>");
    for cell in cells {
        let _ = write!(page, "<td>{cell}");
    }
    page.push_str("</tr>");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
