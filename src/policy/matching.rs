//! Decides if a policy applies to a request.

use std::fmt;

use http::HeaderMap;
use indexmap::IndexMap;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};
use serde_json::json;

use super::{Fact, Glob};
use foretell_wire::openai::{Api, Route};

/// Conditions for a policy to apply: every field must hold; a list holds if one of its entries
/// does. `None` always holds.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Match {
    /// Model ids as clients send them, with * and ? for any characters.
    pub models: Option<Vec<Glob>>,
    /// Names of backends, with * and ?.
    pub backends: Option<Vec<Glob>>,
    /// Tenants, as determined by `tenant` of the config file.
    pub tenants: Option<Vec<String>>,
    /// APIs that clients ask by.
    #[serde(deserialize_with = "routes")]
    #[schemars(schema_with = "route_names")]
    pub routes: Option<Vec<Api>>,
    /// Header names, each with its allowed values.
    #[schemars(extend("propertyNames" = { "pattern": "^[!#$%&'*+.^_`|~0-9A-Za-z-]+$" }))]
    pub headers: IndexMap<String, Vec<String>>,
    /// The effective temperature, the server's default included.
    #[schemars(schema_with = "bounds::<2>")]
    pub temperature: Bounds,
    /// Length of the prompt, tokens; for a text prompt, a quarter of its bytes.
    #[schemars(schema_with = "bounds::<1_000_000_000>")]
    pub prompt_tokens: Bounds,
}

/// Values of `routes`.
const ROUTES: [Api; 4] =
    [Api::Completion(Route::Completions), Api::Completion(Route::Chat), Api::Messages, Api::Responses];

fn routes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<Api>>, D::Error> {
    let api = |name: &String| ROUTES.into_iter().find(|api| api.name() == name);
    Ok(Option::<Vec<String>>::deserialize(from)?.map(|names| names.iter().filter_map(api).collect()))
}

fn route_names(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "items": { "enum": ROUTES.map(Api::name) } })
}

/// A closed interval; `None` leaves a side unbounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Bounds {
    pub min: Option<f64>,
    pub max: Option<f64>,
}

/// The schema of bounds from 0 to `MAX`.
fn bounds<const MAX: u32>(_: &mut SchemaGenerator) -> Schema {
    let side =
        |says: &str| json!({ "type": ["number", "null"], "minimum": 0, "maximum": MAX, "description": says });
    json_schema!({
        "type": "object",
        "properties": { "min": side("Minimum, inclusive."), "max": side("Maximum, inclusive.") },
    })
}

impl Bounds {
    /// True if `value` lies in the interval.
    pub fn contains(&self, value: f64) -> bool {
        self.min.is_none_or(|min| value >= min) && self.max.is_none_or(|max| value <= max)
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.min, self.max) {
            (Some(min), Some(max)) => write!(formatter, "from {min} to {max}"),
            (Some(min), None) => write!(formatter, "from {min}"),
            (None, Some(max)) => write!(formatter, "up to {max}"),
            (None, None) => write!(formatter, "to all"),
        }
    }
}

/// Properties of a request that policies match on.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Model id as sent by the client.
    pub model: &'a str,
    /// Name of the chosen backend.
    pub backend: &'a str,
    /// Tenant; `None` if the request has none.
    pub tenant: Option<&'a str>,
    /// API that the client asks by.
    pub api: Api,
    /// Headers sent by the client.
    pub headers: &'a HeaderMap,
    pub temperature: Fact<f64>,
    /// Length of the prompt, tokens; may be an estimate.
    pub prompt_tokens: usize,
}

/// A condition that does not hold or is not known to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The property of the request, such as `temperature`.
    pub field: String,
    /// The policy's requirement, with a preposition: `up to 0`, `to chat or completions`.
    pub wanted: String,
    /// The request's value; the error says why it is not known.
    pub got: Result<String, &'static str>,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, wanted, got } = self;
        match got {
            Ok(got) => write!(formatter, "{field} is {got}; this policy applies only {wanted}"),
            Err(why) => {
                write!(formatter, "{field} is not known ({why}); this policy applies only {wanted}")
            }
        }
    }
}

/// A requirement that lists the values that match.
fn to_one_of<T: AsRef<str>>(values: impl IntoIterator<Item = T>) -> String {
    let values: Vec<String> = values.into_iter().map(|value| value.as_ref().to_owned()).collect();
    if values.is_empty() { "to none".to_owned() } else { format!("to {}", values.join(" or ")) }
}

impl Match {
    /// True if requests to this backend can match.
    pub fn has_backend(&self, name: &str) -> bool {
        glob_matches(self.backends.as_deref(), name)
    }

    /// True if every condition holds for this request.
    pub fn matches(&self, subject: &Subject<'_>) -> Fact<bool> {
        let known = glob_matches(self.models.as_deref(), subject.model)
            && glob_matches(self.backends.as_deref(), subject.backend)
            && self.tenant_matches(subject.tenant)
            && self.routes.as_ref().is_none_or(|routes| routes.contains(&subject.api))
            && self.prompt_tokens.contains(subject.prompt_tokens as f64)
            && self.headers.iter().all(|(name, wanted)| header_matches(subject.headers, name, wanted));
        if !known {
            return Fact::Known(false);
        }
        self.temperature_matches(subject.temperature)
    }

    /// Every condition that does not hold or is not known to hold.
    pub fn mismatches(&self, subject: &Subject<'_>) -> Vec<Mismatch> {
        let fields = [
            glob_mismatch("model", self.models.as_deref(), subject.model),
            glob_mismatch("backend", self.backends.as_deref(), subject.backend),
            self.tenant_mismatch(subject.tenant),
            self.route_mismatch(subject.api),
            self.temperature_mismatch(subject.temperature),
            self.prompt_mismatch(subject.prompt_tokens),
        ];
        let headers =
            self.headers.iter().filter_map(|(name, wanted)| header_mismatch(subject.headers, name, wanted));
        fields.into_iter().flatten().chain(headers).collect()
    }

    fn tenant_matches(&self, tenant: Option<&str>) -> bool {
        let Some(wanted) = &self.tenants else { return true };
        tenant.is_some_and(|tenant| wanted.iter().any(|wanted| wanted == tenant))
    }

    fn tenant_mismatch(&self, tenant: Option<&str>) -> Option<Mismatch> {
        if self.tenant_matches(tenant) {
            return None;
        }
        let wanted = self.tenants.as_ref()?;
        let got = tenant.unwrap_or("none").to_owned();
        Some(Mismatch { field: "tenant".to_owned(), wanted: to_one_of(wanted), got: Ok(got) })
    }

    fn route_mismatch(&self, api: Api) -> Option<Mismatch> {
        let wanted = self.routes.as_ref().filter(|routes| !routes.contains(&api))?;
        let wanted = to_one_of(wanted.iter().map(|api| api.name()));
        Some(Mismatch { field: "route".to_owned(), wanted, got: Ok(api.name().to_owned()) })
    }

    /// Without bounds every temperature matches, even an unknown one.
    fn temperature_matches(&self, temperature: Fact<f64>) -> Fact<bool> {
        match temperature {
            _ if self.temperature == Bounds::default() => Fact::Known(true),
            Fact::Known(temperature) => Fact::Known(self.temperature.contains(temperature)),
            Fact::Unknown(why) => Fact::Unknown(why),
        }
    }

    fn temperature_mismatch(&self, temperature: Fact<f64>) -> Option<Mismatch> {
        let got = match (self.temperature_matches(temperature), temperature) {
            (Fact::Known(true), _) => return None,
            (_, Fact::Known(temperature)) => Ok(temperature.to_string()),
            (_, Fact::Unknown(why)) => Err(why),
        };
        Some(Mismatch { field: "temperature".to_owned(), wanted: self.temperature.to_string(), got })
    }

    fn prompt_mismatch(&self, tokens: usize) -> Option<Mismatch> {
        let wanted = self.prompt_tokens;
        (!wanted.contains(tokens as f64)).then(|| Mismatch {
            field: "prompt_tokens".to_owned(),
            wanted: wanted.to_string(),
            got: Ok(tokens.to_string()),
        })
    }
}

fn glob_matches(wanted: Option<&[Glob]>, got: &str) -> bool {
    wanted.is_none_or(|globs| globs.iter().any(|glob| glob.matches(got)))
}

fn glob_mismatch(field: &'static str, wanted: Option<&[Glob]>, got: &str) -> Option<Mismatch> {
    if glob_matches(wanted, got) {
        return None;
    }
    let wanted = to_one_of(wanted?.iter().map(Glob::as_str));
    Some(Mismatch { field: field.to_owned(), wanted, got: Ok(got.to_owned()) })
}

fn texts<'a>(headers: &'a HeaderMap, name: &str) -> impl Iterator<Item = &'a str> {
    headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok())
}

fn header_matches(headers: &HeaderMap, name: &str, wanted: &[String]) -> bool {
    texts(headers, name).any(|value| wanted.iter().any(|wanted| wanted == value))
}

fn header_mismatch(headers: &HeaderMap, name: &str, wanted: &[String]) -> Option<Mismatch> {
    let mismatch = || {
        let got: Vec<&str> = texts(headers, name).collect();
        let got = if got.is_empty() { "none".to_owned() } else { got.join(", ") };
        Mismatch { field: format!("header {name}"), wanted: to_one_of(wanted), got: Ok(got) }
    };
    (!header_matches(headers, name, wanted)).then(mismatch)
}
