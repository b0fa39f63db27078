//! The JSON Schema of the process file; that of policy files is in
//! [`crate::config::policy::schema`].
//!
//! Any value may be an environment variable (`${NAME}`). Conditions that a schema cannot express
//! (names and addresses used twice, an admin listener that is open to others, settings that exclude
//! each other) are left to `foretell check`.

use serde_json::{Value, json};

use super::{Device, Dialect, LogFormat, LogLevel, Mode};
use crate::config::policy::schema::{duration, names, object, or_null, period, share, texts, whole, words};

/// The schema, draft 2020-12.
pub fn schema() -> Value {
    let mut schema = object(
        "",
        &[
            ("version", json!({ "const": 1, "description": "Version of the file format." })),
            (
                "mode",
                words(
                    &names(Mode::NAMES),
                    Mode::default().name(),
                    "off: relay. observe: relay, and draft in the shadow. auto: speculate where it pays.",
                ),
            ),
            (
                "listen",
                json!({
                    "type": "array", "minItems": 1, "items": listener(), "description": "Listeners for clients, http/1.1 and h2c.",
                }),
            ),
            ("admin", admin()),
            ("metrics", metrics()),
            ("limits", limits()),
            ("timeouts", timeouts()),
            ("drain", drain()),
            ("tenant", tenant()),
            ("client", client()),
            (
                "backends",
                json!({ "type": "array", "items": backend(), "description": "The services that requests are sent to." }),
            ),
            (
                "drafters",
                json!({
                    "type": ["object", "null"], "additionalProperties": drafter(), "description": "Models that draft, by name.",
                }),
            ),
            ("corpus", corpus()),
            ("ready", ready()),
            ("policies", policies()),
            ("observe", observe()),
        ],
    );
    describe(&mut schema);
    variable(&mut schema);
    schema
}

/// The schema as the text of `deploy/schema.json`.
pub fn text() -> String {
    format!("{:#}\n", schema())
}

fn admin() -> Value {
    object(
        "The operator's listener: status page, API, metrics.",
        &[
            ("address", address("127.0.0.1:9464", "Any other than loopback requires token_file.")),
            ("token_file", file("File with the bearer token that it requires.")),
            ("hosts", texts("Host names accepted in requests, besides localhost and IP addresses.")),
        ],
    )
}

fn metrics() -> Value {
    object(
        "A listener with only /metrics, /healthz and /readyz.",
        &[("address", or_null(&address_of("Its address; null: none.")))],
    )
}

fn drain() -> Value {
    object(
        "Durations of a shutdown.",
        &[
            (
                "delay",
                duration(
                    "5s",
                    "Not ready, but still accepting. If not set, it ends as soon as no client is connected.",
                ),
            ),
            ("grace", duration("120s", "Time for open answers to end.")),
        ],
    )
}

fn client() -> Value {
    object(
        "Control by clients.",
        &[("control", words(&["off", "bounded"], "bounded", "Permission of the header x-foretell."))],
    )
}

fn corpus() -> Value {
    object(
        "Texts that drafters keep across requests.",
        &[
            ("bytes", size("256MiB", "Maximum size; at most half of limits.memory.")),
            ("ttl", period("1h", "Time that an unused text is kept.")),
            ("snapshot", file("File that preserves it over restarts.")),
        ],
    )
}

fn ready() -> Value {
    object(
        "Conditions of /readyz.",
        &[("require_backend", boolean(false, "Wait until a replica of every backend can be reached."))],
    )
}

fn policies() -> Value {
    object(
        "The policy files.",
        &[("dir", file("Their folder, relative to that of this file; default: `policies` beside it."))],
    )
}

fn observe() -> Value {
    object(
        "Log and traces.",
        &[
            (
                "log",
                words(
                    &names(LogFormat::NAMES),
                    "auto",
                    "Format of the log; auto: text on a terminal, JSON elsewhere.",
                ),
            ),
            ("level", words(&names(LogLevel::NAMES), "info", "Lowest level that is logged.")),
            (
                "otlp",
                or_null(
                    &json!({ "type": "string", "pattern": "^https?://", "description": "URL of a collector for traces by OTLP over HTTP." }),
                ),
            ),
            (
                "share",
                share(
                    Some(1.0),
                    "Share of the requests that have a line in the log and spans; failures always have a line.",
                ),
            ),
            (
                "text",
                boolean(false, "Requests may allow the operator to see their output (x-foretell-text: on)."),
            ),
        ],
    )
}

/// Adds title and description to the schema.
fn describe(schema: &mut Value) {
    let Some(top) = schema.as_object_mut() else { return };
    top.insert("$schema".to_owned(), "https://json-schema.org/draft/2020-12/schema".into());
    top.insert("title".to_owned(), "Foretell".into());
    top.insert("description".to_owned(), "The process file: listeners, limits, backends, drafters.".into());
    top.insert("type".to_owned(), "object".into());
    top.insert("required".to_owned(), json!(["version"]));
    top.insert(
        "patternProperties".to_owned(),
        json!({ "^x-": { "description": "For your own use, such as YAML anchors." } }),
    );
}

/// Allows an environment variable for every value below.
fn variable(schema: &mut Value) {
    let Some(members) = schema.as_object_mut() else { return };
    for word in ["properties", "items", "additionalProperties"] {
        match members.get_mut(word) {
            Some(Value::Object(inner)) if word == "properties" => inner.values_mut().for_each(variable),
            Some(inner) => variable(inner),
            None => {}
        }
    }
    for branch in members.get_mut("oneOf").and_then(Value::as_array_mut).into_iter().flatten() {
        variable(branch);
    }
    let inner = ["properties", "items", "additionalProperties", "oneOf", "const"];
    if inner.iter().all(|word| !members.contains_key(*word)) {
        *schema = json!({ "anyOf": [schema, { "type": "string", "pattern": r"\$\{" }] });
    }
}

fn required(mut schema: Value, keys: &[&str]) -> Value {
    if let Some(members) = schema.as_object_mut() {
        members.insert("required".to_owned(), json!(keys));
    }
    schema
}

fn boolean(default: bool, says: &str) -> Value {
    json!({ "type": "boolean", "default": default, "description": says })
}

fn text_of(says: &str) -> Value {
    json!({ "type": "string", "minLength": 1, "description": says })
}

fn file(says: &str) -> Value {
    or_null(&text_of(says))
}

fn address_of(says: &str) -> Value {
    json!({ "type": "string", "pattern": r"^.*:\d+$", "description": says })
}

fn address(default: &str, says: &str) -> Value {
    json!({ "type": "string", "pattern": r"^.*:\d+$", "default": default, "description": says })
}

fn size_of(says: &str) -> Value {
    json!({ "type": "string", "pattern": r"^0*[1-9]\d*(B|KiB|MiB|GiB)$", "description": says })
}

fn size(default: &str, says: &str) -> Value {
    json!({ "type": "string", "pattern": r"^0*[1-9]\d*(B|KiB|MiB|GiB)$", "default": default, "description": says })
}

fn no_period(says: &str) -> Value {
    or_null(&json!({ "type": "string", "pattern": r"^0*[1-9]\d*(ms|s|m|h)$", "description": says }))
}

fn listener() -> Value {
    let tls = object(
        "Certificates; null: plain HTTP.",
        &[
            ("cert", text_of("The certificate chain, PEM.")),
            ("key", text_of("Their key, PEM.")),
            ("client_ca", file("Clients need a certificate of these authorities.")),
        ],
    );
    let listener = object(
        "A listener.",
        &[
            ("address", address_of("IP:PORT, localhost:PORT or :PORT.")),
            ("tls", required(tls, &["cert", "key"])),
        ],
    );
    required(listener, &["address"])
}

fn limits() -> Value {
    object(
        "Limits of requests and of their memory.",
        &[
            ("headers", whole(1, 10_000, Some(100), "Maximum header fields of a request.")),
            ("header_bytes", size("32KiB", "Maximum size of them.")),
            ("uri", size("8KiB", "Maximum size of its target.")),
            ("speculate_body", size("8MiB", "Larger bodies are relayed unread.")),
            ("relay_body", or_null(&size_of("Larger bodies are refused; null: no limit."))),
            (
                "sessions",
                whole(
                    0,
                    1_000_000,
                    Some(1024),
                    "Maximum concurrent speculated requests; further ones are relayed.",
                ),
            ),
            (
                "memory",
                size(
                    "512MiB",
                    "Memory of bodies and sessions; above it completions are relayed unread, above twice that answered with 503.",
                ),
            ),
            (
                "connections",
                or_null(&whole(
                    1,
                    10_000_000,
                    None,
                    "Maximum concurrent clients; null: as many as the limit of open descriptors allows.",
                )),
            ),
        ],
    )
}

fn timeouts() -> Value {
    object(
        "Maximum waits.",
        &[
            ("header", period("10s", "From connecting, or its first byte, to the end of a request's head.")),
            ("body", period("30s", "Silence within a request's body.")),
            ("keep_alive", period("75s", "A connection without a request.")),
            ("connect", period("2s", "To connect to a replica.")),
            ("first_byte", no_period("To the head of an answer.")),
            ("idle", no_period("To the next byte of an answer that has begun.")),
            ("verify", period("2s", "For a verify request.")),
            ("draft", no_period("For a draft; null: as long as a draft can pay.")),
            ("pool_idle", duration("3s", "An unused connection to a replica.")),
        ],
    )
}

fn tenant() -> Value {
    let header = json!({ "type": "string", "pattern": "^[!#$%&'*+.^_`|~0-9A-Za-z-]+$", "description": "Header that names it." });
    let peer = json!({ "type": "string", "pattern": r"^[0-9A-Fa-f:.]*[0-9A-Fa-f:](/\d+)?$" });
    object(
        "The tenant of a request.",
        &[
            ("header", or_null(&header)),
            (
                "trusted_peers",
                json!({ "type": "array", "items": peer, "description": "Peers whose header is trusted, IP or IP/BITS." }),
            ),
            ("fallback", words(&["none", "authorization_hash"], "none", "Tenant without a trusted header.")),
        ],
    )
}

fn verify_limits() -> Value {
    object(
        "Verification methods and their limits.",
        &[
            (
                "allow",
                json!({
                    "type": "array", "items": { "enum": ["score", "fan_out", "tree", "native", "prediction"] },
                    "description": "Allowed methods. Default: score, fan_out, tree.",
                }),
            ),
            ("context_max", whole(1, 1 << 24, Some(8192), "Maximum context of a verify request, tokens.")),
            ("bytes_max", size("2MiB", "Maximum size of a round's requests.")),
        ],
    )
}

fn backend() -> Value {
    let models = object(
        "A model.",
        &[
            ("id", text_of("Its id, or a pattern with * and ?.")),
            ("aliases", texts("Further names of it.")),
            ("base", file("The model that it is an adapter of.")),
            (
                "tokenizer",
                text_of("backend: fetched from the server; else a tokenizer.json, or a folder with one."),
            ),
        ],
    );
    let backend = object(
        "A service.",
        &[
            ("name", text_of("Its name in metrics, log and policies.")),
            ("default", boolean(false, "It gets requests for models that no backend lists.")),
            ("dialect", words(&names(Dialect::NAMES), "auto", "API of its engine.")),
            ("replicas", replicas()),
            (
                "ranks",
                whole(0, 1024, Some(0), "Data-parallel ranks at each address, each a replica; 0: none."),
            ),
            (
                "models",
                json!({ "type": "array", "items": required(models, &["id"]), "description": "Its models." }),
            ),
            ("connect", connect()),
            (
                "load",
                object(
                    "The engine's load report.",
                    &[
                        (
                            "url",
                            json!({ "type": "string", "pattern": "^/", "default": "/metrics", "description": "A path of the backend." }),
                        ),
                        ("every", period("500ms", "Interval of reading it.")),
                    ],
                ),
            ),
            ("verify", verify_limits()),
            (
                "probe",
                object(
                    "Measurement of verification costs.",
                    &[
                        (
                            "when",
                            words(
                                &["ready", "never"],
                                "ready",
                                "When it runs; ready: as soon as a replica is ready.",
                            ),
                        ),
                        ("calls", whole(1, 10_000, Some(40), "Maximum calls.")),
                        ("within", period("10s", "Maximum time.")),
                    ],
                ),
            ),
            (
                "budget",
                object(
                    "Cost that speculation may impose on other requests.",
                    &[
                        ("extra_tokens", share(Some(0.25), "Rejected draft tokens ÷ generated tokens.")),
                        (
                            "slots",
                            share(Some(0.10), "Extra sequence slots ÷ running requests; no effect yet."),
                        ),
                        (
                            "switchback",
                            or_null(&json!({
                                "type": "string", "pattern": r"^0*[1-9]\d*(ms|s|m|h)/\d+(ms|s|m|h)$", "default": "20s/30m",
                                "description": "Time-sliced A/B windows of plain decoding, WINDOW/EVERY; null: none.",
                            })),
                        ),
                    ],
                ),
            ),
            ("billed", boolean(false, "It bills per token: no verify request is sent to it.")),
        ],
    );
    required(backend, &["name", "replicas"])
}

fn replicas() -> Value {
    let url = json!({ "type": "string", "pattern": r"^(https?://[^?#@]+|.*\$\{.*)$" });
    let urls = json!({ "type": "array", "minItems": 1, "uniqueItems": true, "items": url });
    let dns = object(
        "Addresses that a name resolves to.",
        &[
            (
                "dns",
                json!({ "type": "string", "pattern": r"^[^/]+:\d*[1-9]\d*$", "description": "HOST:PORT." }),
            ),
            ("every", period("5s", "Interval of resolving it.")),
            ("scheme", words(&["http", "https"], "http", "Scheme of their URLs.")),
        ],
    );
    let model = object(
        "An ONNX model that Foretell runs itself.",
        &[
            ("model", text_of("Its folder.")),
            ("name", file("Its id; null: the name of the folder.")),
            ("device", words(&names(Device::NAMES), "auto", "Device that it runs on.")),
            ("lanes", whole(1, 1024, None, "Maximum concurrent sequences.")),
            (
                "context",
                or_null(&whole(
                    1,
                    1 << 24,
                    None,
                    "Maximum tokens of a sequence; null: the model's own limit.",
                )),
            ),
            ("threads", whole(0, 1024, None, "Threads; 0: one per core.")),
        ],
    );
    let shapes = [urls, required(dns, &["dns"]), required(model, &["model"])];
    let shapes = shapes.map(|mut shape| {
        if let Some(kind) = shape.get_mut("type").filter(|kind| kind.is_array()) {
            *kind = "object".into();
        }
        shape
    });
    json!({ "oneOf": shapes, "description": "One KV cache each." })
}

fn connect() -> Value {
    let mut tls = object(
        "Certificates for https.",
        &[
            ("ca", file("Authorities of the server's certificate, PEM.")),
            ("cert", file("Foretell's own certificate, PEM.")),
            ("key", file("Its key, PEM.")),
        ],
    );
    if let Some(tls) = tls.as_object_mut() {
        tls.insert("dependentRequired".to_owned(), json!({ "cert": ["key"], "key": ["cert"] }));
    }
    object(
        "Connections to it.",
        &[
            ("http", words(&["http1", "http2"], "http1", "HTTP version.")),
            ("host", words(&["backend", "client"], "backend", "Source of the Host field.")),
            ("tls", tls),
            (
                "auth",
                object(
                    "API keys.",
                    &[
                        ("pass", boolean(true, "Pass on the client's own.")),
                        ("token_file", file("File with a key that replaces the client's.")),
                        (
                            "own_token_file",
                            file("File with the key of Foretell's own calls, never used for a client's."),
                        ),
                    ],
                ),
            ),
        ],
    )
}

fn drafter() -> Value {
    let drafter = object(
        "A model that drafts.",
        &[
            ("path", text_of("Its folder.")),
            ("tokenizer", file("A tokenizer.json, or a folder with one; null: that of its folder.")),
            ("device", words(&names(Device::NAMES), "auto", "Device that it runs on.")),
            ("slots", whole(1, 4096, Some(64), "Maximum concurrent sessions.")),
            ("context", whole(16, 1 << 20, Some(2048), "Maximum tokens of a sequence.")),
        ],
    );
    required(drafter, &["path"])
}
