//! The modes of the proxy.

use std::net::SocketAddr;

use foretell::app::Running;
use foretell::app::local;

use super::engines::Engine;
use crate::client::FORCED;
use crate::fakes::toy;

pub struct Mode {
    pub name: &'static str,
    /// Lines of the config file.
    process: &'static str,
    /// Lines of the policy.
    policy: &'static str,
    /// Header lines of the client.
    pub fields: &'static str,
    /// Nothing may be added to the request.
    pub adds_nothing: bool,
}

const ALL: &str = "holdback: { start: 1, floor: 1 }\n";
const NONE: &str = "holdback: { start: 0, floor: 0 }\n";

pub const MODES: [Mode; 7] = [
    Mode { name: "off", process: "mode: off\n", policy: NONE, fields: "", adds_nothing: true },
    Mode { name: "observe", process: "mode: observe\n", policy: NONE, fields: "", adds_nothing: true },
    Mode { name: "shadow", process: "", policy: "mode: shadow\n", fields: "", adds_nothing: true },
    Mode { name: "plain", process: "", policy: "mode: plain\n", fields: "", adds_nothing: true },
    Mode { name: "header", process: "", policy: NONE, fields: "x-foretell: plain\r\n", adds_nothing: true },
    // In the control group: plain, but with the fields that are added to eligible requests.
    Mode { name: "auto", process: "", policy: ALL, fields: "", adds_nothing: false },
    Mode { name: "forced", process: "", policy: NONE, fields: "", adds_nothing: false },
];

impl Mode {
    /// A proxy in this mode in front of this engine.
    pub async fn before(&self, address: SocketAddr, engine: &Engine) -> Running {
        let tokenizer = toy::folder().join("tokenizer.json").display().to_string();
        let tokenizer = if engine.own_words { "backend" } else { &tokenizer };
        let backend = engine.backend;
        let process = format!(
            "version: 1\ntimeouts: {{ verify: 10s }}\n{}backends:\n  - name: toy\n    replicas: [\"http://{address}\"]\n    \
             models: [{{ id: \"*\", tokenizer: {tokenizer} }}]\n    probe: {{ when: never }}\n{backend}",
            self.process,
        );
        // The control group is not forced: a fixed gamma has no control group.
        let forced = if self.name == "auto" { FORCED.replace(", fixed: 4", "") } else { FORCED.to_owned() };
        local::proxy(&process, &[&format!("{forced}{}", self.policy)]).await.unwrap()
    }
}
