//! The JSON Schema of the process file, as [`crate::config::policy::schema`] is that of policy files.
//!
//! Any value may be a variable of the environment (`${NAME}`). What a schema cannot say (names and addresses that are used
//! twice, an admin listener that is open to others, settings that exclude each other) is left to `foretell check`.

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
                    "off: relay. observe: relay, and draft in the shadow. auto: leap where it pays.",
                ),
            ),
            (
                "listen",
                json!({
                    "type": "array", "minItems": 1, "items": listener(), "description": "Where clients connect, http/1.1 and h2c.",
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
                json!({ "type": "array", "items": backend(), "description": "The services that are spoken to." }),
            ),
            (
                "drafters",
                json!({
                    "type": ["object", "null"], "additionalProperties": drafter(), "description": "Models that draft, by name.",
                }),
            ),
            ("memory", memory()),
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
        "The operator's listener: page, API, metrics.",
        &[
            ("address", address("127.0.0.1:9464", "Anything but loopback needs token_file.")),
            ("token_file", file("The bearer token that it asks for.")),
            ("hosts", texts("Names by which it is asked besides localhost and addresses.")),
        ],
    )
}

fn metrics() -> Value {
    object(
        "A listener with nothing but /metrics, /healthz and /readyz.",
        &[("address", or_null(&address_of("Where; null: none.")))],
    )
}

fn drain() -> Value {
    object(
        "How the process ends.",
        &[
            (
                "delay",
                duration(
                    "5s",
                    "Not ready, but still accepting. Where it is left out it ends as soon as no client is connected.",
                ),
            ),
            ("grace", duration("120s", "How long answers may take to end.")),
        ],
    )
}

fn client() -> Value {
    object(
        "What clients may ask for.",
        &[("control", words(&["off", "bounded"], "bounded", "What the header x-foretell may do."))],
    )
}

fn memory() -> Value {
    object(
        "What drafters remember over requests.",
        &[
            ("bytes", size("256MiB", "At most half of limits.memory.")),
            ("ttl", period("1h", "How long a text is remembered.")),
            ("snapshot", file("Where it is kept over restarts.")),
        ],
    )
}

fn ready() -> Value {
    object(
        "What /readyz waits for.",
        &[("require_backend", boolean(false, "Until a replica of every backend can be reached."))],
    )
}

fn policies() -> Value {
    object(
        "The policy files.",
        &[("dir", file("Their folder, from that of this file; `policies` beside it if left out."))],
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
                    "Form of the log; auto: text on a terminal, JSON elsewhere.",
                ),
            ),
            ("level", words(&names(LogLevel::NAMES), "info", "Least level of its lines.")),
            (
                "otlp",
                or_null(
                    &json!({ "type": "string", "pattern": "^https?://", "description": "Traces by OTLP over HTTP." }),
                ),
            ),
            (
                "share",
                share(
                    Some(1.0),
                    "Of the requests that have a line in the log and spans; failures always have a line.",
                ),
            ),
            ("text", boolean(false, "Requests may let their output be seen (x-foretell-text: on).")),
        ],
    )
}

/// Says at the top what the file is.
fn describe(schema: &mut Value) {
    let Some(top) = schema.as_object_mut() else { return };
    top.insert("$schema".to_owned(), "https://json-schema.org/draft/2020-12/schema".into());
    top.insert("title".to_owned(), "Foretell".into());
    top.insert("description".to_owned(), "The process file: listeners, limits, backends, drafters.".into());
    top.insert("type".to_owned(), "object".into());
    top.insert("required".to_owned(), json!(["version"]));
    top.insert(
        "patternProperties".to_owned(),
        json!({ "^x-": { "description": "Your own: a place for anchors." } }),
    );
}

/// Lets every value below be a variable of the environment.
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
        "Certificates; null: plain.",
        &[
            ("cert", text_of("The certificates, PEM.")),
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
        "Bounds on requests and on what they hold.",
        &[
            ("headers", whole(1, 10_000, Some(100), "Header fields of a request.")),
            ("header_bytes", size("32KiB", "Bytes of them.")),
            ("uri", size("8KiB", "Bytes of its target.")),
            ("speculate_body", size("8MiB", "Larger bodies are relayed unread.")),
            ("relay_body", or_null(&size_of("Larger bodies are refused; null: none."))),
            ("sessions", whole(0, 1_000_000, Some(1024), "More are relayed.")),
            (
                "memory",
                size(
                    "512MiB",
                    "Bodies and sessions; above it completions are relayed unread, above twice that answered with 503.",
                ),
            ),
            (
                "connections",
                or_null(&whole(
                    1,
                    10_000_000,
                    None,
                    "Clients at once; null: what the limit of open descriptors allows.",
                )),
            ),
        ],
    )
}

fn timeouts() -> Value {
    object(
        "Longest waits.",
        &[
            ("header", period("10s", "From connecting, or its first byte, to the end of a request's head.")),
            ("body", period("30s", "Silence inside a request's body.")),
            ("keep_alive", period("75s", "A connection without a request.")),
            ("connect", period("2s", "To connect to a replica.")),
            ("first_byte", no_period("To the head of an answer.")),
            ("idle", no_period("To the next byte of an answer that has begun.")),
            ("verify", period("2s", "For a verify call.")),
            ("draft", no_period("For a draft; null: as long as a draft can pay.")),
            ("pool_idle", duration("3s", "A connection to a replica that nobody uses.")),
        ],
    )
}

fn tenant() -> Value {
    let header =
        json!({ "type": "string", "pattern": "^[!#$%&'*+.^_`|~0-9A-Za-z-]+$", "description": "Its header." });
    let peer = json!({ "type": "string", "pattern": r"^[0-9A-Fa-f:.]*[0-9A-Fa-f:](/\d+)?$" });
    object(
        "Who a request belongs to.",
        &[
            ("header", or_null(&header)),
            (
                "trusted_peers",
                json!({ "type": "array", "items": peer, "description": "Peers whose header is believed, IP or IP/BITS." }),
            ),
            ("fallback", words(&["none", "authorization_hash"], "none", "Without such a header.")),
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
                text_of("backend: asked of the server; else a tokenizer.json, or a folder with one."),
            ),
        ],
    );
    let backend = object(
        "A service.",
        &[
            ("name", text_of("Its name in metrics, log and policies.")),
            ("default", boolean(false, "It gets requests for models that no backend names.")),
            ("dialect", words(&names(Dialect::NAMES), "auto", "How it is spoken to.")),
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
                    "Where its engine tells its load.",
                    &[
                        (
                            "url",
                            json!({ "type": "string", "pattern": "^/", "default": "/metrics", "description": "A path of the backend." }),
                        ),
                        ("every", period("500ms", "How often it is asked.")),
                    ],
                ),
            ),
            (
                "plans",
                object(
                    "How drafts may be verified.",
                    &[
                        (
                            "allow",
                            json!({
                                "type": "array", "items": { "enum": ["score", "fan_out", "tree", "native", "prediction"] },
                                "description": "Default: score, fan_out, tree.",
                            }),
                        ),
                        (
                            "context_max",
                            whole(1, 1 << 24, Some(8192), "Most context tokens of a verify call."),
                        ),
                        ("bytes_max", size("2MiB", "Most bytes of a round.")),
                    ],
                ),
            ),
            (
                "probe",
                object(
                    "Measuring what verifying costs.",
                    &[
                        ("when", words(&["ready", "never"], "ready", "When.")),
                        ("calls", whole(1, 10_000, Some(40), "Most calls.")),
                        ("within", period("10s", "Longest time.")),
                    ],
                ),
            ),
            (
                "budget",
                object(
                    "What leaping may cost others.",
                    &[
                        ("extra_tokens", share(Some(0.25), "Tokens computed for nothing, of the engine's.")),
                        ("slots", share(Some(0.10), "Free slots of the engine; no effect yet.")),
                        (
                            "switchback",
                            or_null(&json!({
                                "type": "string", "pattern": r"^0*[1-9]\d*(ms|s|m|h)/\d+(ms|s|m|h)$", "default": "20s/30m",
                                "description": "Ride-only windows, WINDOW/EVERY; null: none.",
                            })),
                        ),
                    ],
                ),
            ),
            ("billed", boolean(false, "It bills per token: it is never asked to verify.")),
        ],
    );
    required(backend, &["name", "replicas"])
}

fn replicas() -> Value {
    let url = json!({ "type": "string", "pattern": r"^(https?://[^?#@]+|.*\$\{.*)$" });
    let urls = json!({ "type": "array", "minItems": 1, "uniqueItems": true, "items": url });
    let dns = object(
        "Addresses behind a name.",
        &[
            (
                "dns",
                json!({ "type": "string", "pattern": r"^[^/]+:\d*[1-9]\d*$", "description": "HOST:PORT." }),
            ),
            ("every", period("5s", "How often it is resolved.")),
            ("scheme", words(&["http", "https"], "http", "How they are spoken to.")),
        ],
    );
    let model = object(
        "An ONNX model that Foretell runs itself.",
        &[
            ("model", text_of("Its folder.")),
            ("name", file("Its id; null: the name of the folder.")),
            ("device", words(&names(Device::NAMES), "auto", "Where it runs.")),
            ("lanes", whole(1, 1024, None, "Sequences at once.")),
            (
                "context",
                or_null(&whole(
                    1,
                    1 << 24,
                    None,
                    "Most tokens of a sequence; null: what it was trained for.",
                )),
            ),
            ("threads", whole(0, 1024, None, "Threads; 0: as many as there are cores.")),
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
        "How it is connected to.",
        &[
            ("http", words(&["http1", "http2"], "http1", "Version.")),
            ("host", words(&["backend", "client"], "backend", "Whose Host field it gets.")),
            ("tls", tls),
            (
                "auth",
                object(
                    "Keys.",
                    &[
                        ("pass", boolean(true, "The client's own goes on to it.")),
                        ("token_file", file("The key that takes its place.")),
                        ("own_token_file", file("For Foretell's own calls, never on a client's.")),
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
            ("device", words(&names(Device::NAMES), "auto", "Where it runs.")),
            ("slots", whole(1, 4096, Some(64), "Sessions whose cache it keeps.")),
            ("context", whole(16, 1 << 20, Some(2048), "Most tokens of a sequence.")),
        ],
    );
    required(drafter, &["path"])
}
