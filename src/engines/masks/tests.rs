use std::path::Path;

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::Whitespace::{Fixed, Free};
use super::*;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn target() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_file(&root().join("onnx/models/target/tokenizer.json")).unwrap())
}

fn asked(language: Language) -> Rules {
    Rules::Asked(Arc::new(Grammar { parameter: "response_format", language, any_whitespace: true }))
}

fn begin(tokenizer: &Arc<Tokenizer>, language: Language) -> Mask {
    let vocabulary = Vocabulary::new(Arc::clone(tokenizer));
    let compiled = Compiled::new(Library::Xgrammar(Free), &asked(language), &vocabulary).unwrap();
    Mask::new(&compiled, tokenizer.may_end())
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<TokenId> {
    tokenizer.encode(text, false).unwrap()
}

/// A grammar as `tests/engines/masks.py` has recorded it.
#[derive(Deserialize)]
struct Recorded {
    json: Option<String>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    tag: Option<String>,
    #[serde(default)]
    refused: bool,
    #[serde(default)]
    tokens: Vec<TokenId>,
    #[serde(default)]
    places: Vec<(usize, usize, String, bool)>,
}

impl Recorded {
    /// `None` for a schema with a number or a text that no request can have here.
    fn rules(&self) -> Option<Rules> {
        match (&self.tag, &self.json, &self.regex) {
            (Some(tag), ..) => Some(Rules::Tag(tag.as_str().into())),
            (_, Some(schema), _) => Some(asked(Language::Json(serde_json::from_str(schema).ok()?))),
            (_, _, Some(regex)) => Some(asked(Language::Regex(regex.clone()))),
            _ => self.choice.clone().map(Language::Choice).map(asked),
        }
    }
}

#[rstest::rstest]
#[case(Library::Xgrammar(Free), "xgrammar.jsonl")]
#[case(Library::Guidance(Free), "guidance.jsonl")]
#[case(Library::Xgrammar(Fixed), "xgrammar-fixed.jsonl")]
#[case(Library::Guidance(Fixed), "guidance-fixed.jsonl")]
fn every_place_allows_what_the_library_itself_allows_there(#[case] library: Library, #[case] file: &str) {
    let recorded = std::fs::read_to_string(root().join("tests/goldens").join(file)).unwrap();
    let recorded: Vec<Recorded> = recorded.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let tokenizer = target();
    let vocabulary = Vocabulary::new(Arc::clone(&tokenizer));
    let ends = tokenizer.may_end();
    let (mut followed, mut places) = (0, 0);
    for (line, recorded) in (1..).zip(&recorded) {
        let Some(rules) = recorded.rules().filter(|_| !recorded.refused) else { continue };
        let compiled = match Compiled::new(library, &rules, &vocabulary) {
            Ok(compiled) => compiled,
            // A reference that needs a library of its own stays plain.
            Err(MaskError::Guidance(error)) if error.starts_with("Reference segment") => continue,
            Err(MaskError::TooLong(_)) if matches!(library, Library::Guidance(_)) => continue,
            Err(error) => panic!("line {line}: {error}"),
        };
        let mut place = compiled.begin();
        for &(step, count, ref digest, complete) in &recorded.places {
            assert!(place.go_to(recorded.tokens[..step].iter().copied()), "line {line}, step {step}");
            let some = |token: &TokenId| *token as usize % 16 == step % 16 && !ends.contains(token);
            let text: Vec<TokenId> =
                (0..tokenizer.end()).filter(some).filter(|token| place.allows(*token)).collect();
            assert_eq!((text.len(), place.is_complete()), (count, complete), "line {line}, step {step}");
            let bytes: Vec<u8> = text.iter().flat_map(|token| token.to_le_bytes()).collect();
            let first = Sha256::digest(&bytes).first_chunk().copied().map(u128::from_be_bytes);
            assert_eq!(format!("{:032x}", first.unwrap()), *digest, "line {line}, step {step}");
            if let Some(all) = place.allowed(9_000) {
                assert_eq!(
                    all.into_iter().filter(some).collect::<Vec<_>>(),
                    text,
                    "line {line}, step {step}"
                );
            }
            places += 1;
        }
        followed += 1;
    }
    assert!(followed > 150 && places > 850, "{followed} grammars, {places} places");
}

#[test]
fn reasoning_is_bound_by_nothing_and_ends_at_a_token() {
    let tokenizer = target();
    let [yes, no] = ["yes", "no"].map(|text| ids(&tokenizer, text));
    let (marker, free, call, other) = (300, 301, yes[0], 302);
    let find = move |prompt: &[TokenId]| {
        Ok(prompt.is_empty().then(|| ReasoningEnds { marker, first: vec![call, other] }))
    };
    let mask = begin(&tokenizer, Language::Choice(vec!["yes".to_owned()]))
        .behind_reasoning(Box::new(find), Some(true));
    let [end] = tokenizer.may_end()[..1] else { panic!("an end") };
    // Behind this prompt there is no reasoning.
    assert_eq!((mask.follow(&[7], &[], &[free], false), mask.allowed(&[7], &[], 99).is_some()), (0, true));
    let mask = begin(&tokenizer, Language::Choice(vec!["yes".to_owned()]))
        .behind_reasoning(Box::new(find), Some(true));
    assert_eq!(mask.follow(&[], &[free], &no, false), no.len());
    assert_eq!((mask.follow(&[], &[free], &[end], true), mask.may_end(&[], &[free])), (1, true));
    assert_eq!(mask.says(&[], &[free], &[], free), Allows::Yes);
    assert_eq!(
        mask.says(&[], &[free], &[], call),
        Allows::Unknown,
        "the first of the output, or of reasoning"
    );
    assert_eq!(mask.says(&[], &[free], &[marker], free), Allows::No);
    assert_eq!(mask.says(&[], &[free, marker], &[], call), Allows::Yes);
    let whole = [&[free, marker], &yes[..]].concat();
    assert_eq!(mask.follow(&[], &[], &[&whole[..], &[end]].concat(), true), whole.len() + 1);
    assert_eq!(mask.follow(&[], &[free], &[marker, free], false), 1);
    assert_eq!(
        mask.follow(&[], &[free], &[&yes[..], &[free]].concat(), false),
        yes.len(),
        "without the marker"
    );
    assert_eq!((mask.allowed(&[], &[free], 9_000), mask.allowed(&[], &whole, 99).is_some()), (None, true));
    // One that may end reasoning, but does not begin what is allowed: with the server's own
    // sample the request fails, behind the marker it is barred.
    assert_eq!(mask.follow(&[], &[free], &[other, yes[0]], false), 1);
    assert!(!mask.allows(&[], &[free, other]) && mask.allows(&[], &[free, marker]));
    assert_eq!(mask.follow(&[], &[free], &[marker, other], false), 1);
    assert_eq!(mask.follow(&[], &[free, marker], &[other], false), 0);
    assert_eq!(mask.follow(&[], &[free, other], &[free], false), 0);
}

#[rstest::rstest]
fn places_are_reached_in_any_order(
    #[values(Library::Xgrammar(Free), Library::Guidance(Free))] library: Library,
) {
    let tokenizer = target();
    let vocabulary = Vocabulary::new(Arc::clone(&tokenizer));
    let compiled = Compiled::new(library, &asked(Language::JsonObject), &vocabulary).unwrap();
    let tokens = ids(&tokenizer, "{\"a\": [1, 2, {\"b\": \"c\"}]}");
    let fresh = |end: usize| {
        let mut place = compiled.begin();
        assert!(place.go_to(tokens[..end].iter().copied()));
        (place.allowed(9_000), place.is_complete())
    };
    let mut place = compiled.begin();
    for end in (0..=tokens.len()).rev().chain(0..=tokens.len()).step_by(2) {
        assert!(place.go_to(tokens[..end].iter().copied()));
        assert_eq!((place.allowed(9_000), place.is_complete()), fresh(end), "{end}");
    }
    let wrong = ids(&tokenizer, "{]");
    assert!(!place.go_to(wrong.into_iter()) && place.go_to(tokens.iter().copied()));
}

/// A lexer of its own for each output: what one needs does not end another.
#[test]
fn a_long_counted_text_is_followed_to_its_end() {
    let tokenizer = target();
    let vocabulary = Vocabulary::new(Arc::clone(&tokenizer));
    let schema = json!({"type": "string", "maxLength": 2_083});
    let compiled =
        Compiled::new(Library::Guidance(Free), &asked(Language::Json(schema)), &vocabulary).unwrap();
    for word in ["x", "q"] {
        let text = format!("\"{}", word.repeat(2_083 / word.len()));
        let tokens = ids(&tokenizer, &text);
        let mut place = compiled.begin();
        assert!(place.go_to(tokens.iter().copied()) && !place.is_lost());
        let more = ids(&tokenizer, "three")[0];
        assert!(!place.allows(more) && place.allows(ids(&tokenizer, "\"")[0]));
    }
}

/// Its masks depend on the tokens of forced texts, which are compared for vocabularies of bytes.
#[test]
fn llguidance_is_not_followed_with_a_vocabulary_of_words() {
    let words = json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"yes": 0, "no": 1}, "unk_token": "no"}});
    let tokenizer = Tokenizer::from_bytes(words.to_string().as_bytes()).unwrap();
    let vocabulary = Vocabulary::new(Arc::new(tokenizer));
    let rules = asked(Language::Choice(vec!["yes".to_owned()]));
    assert!(matches!(
        Compiled::new(Library::Guidance(Free), &rules, &vocabulary),
        Err(MaskError::Guidance(_))
    ));
    assert!(Compiled::new(Library::Xgrammar(Free), &rules, &vocabulary).is_ok());
}

/// Where one text is left, its first token is.
#[test]
fn llguidance_forces_the_tokens_of_a_text_that_it_forces() {
    let tokenizer = target();
    let vocabulary = Vocabulary::new(Arc::clone(&tokenizer));
    let schema = json!({"type": "object", "properties": {"country": {"type": "string"}},
        "required": ["country"], "additionalProperties": false});
    let compiled =
        Compiled::new(Library::Guidance(Free), &asked(Language::Json(schema)), &vocabulary).unwrap();
    let mut place = compiled.begin();
    assert!(place.go_to(ids(&tokenizer, "{\"").into_iter()));
    let forced = place.allowed(100).unwrap();
    let whole = ids(&tokenizer, "country");
    assert_eq!(forced, whole[..1]);
    assert!(!ids(&tokenizer, "c").iter().any(|&shorter| place.allows(shorter)));
    for (rules, refused) in [
        (Rules::Tag("{}".into()), MaskError::Tag),
        (
            asked(Language::Json(json!({"type": "string", "x-guidance": {"lenient": true}}))),
            MaskError::Guidance("options of llguidance in a schema".to_owned()),
        ),
    ] {
        assert_eq!(Compiled::new(Library::Guidance(Free), &rules, &vocabulary).err(), Some(refused));
    }
}

#[test]
fn an_output_is_followed_up_to_the_first_token_that_is_barred() {
    let tokenizer = target();
    let mask = begin(&tokenizer, Language::Choice(vec!["yes".to_owned(), "no".to_owned()]));
    let end = tokenizer.id("<|end|>").unwrap();
    let [yes, no] = ["yes", "no"].map(|text| ids(&tokenizer, text));
    let longer = [&yes[..], &no].concat();
    assert_eq!(mask.follow(&[], &[], &longer, false), yes.len());
    assert_eq!(mask.follow(&[], &[], &[&yes[..], &[end]].concat(), true), yes.len() + 1);
    assert_eq!(mask.follow(&[], &yes, &[end], true), 1);
    assert_eq!(mask.follow(&[], &[], &[end], true), 0, "it may not end here");
    assert_eq!(mask.follow(&[], &yes, &[end], false), 0, "nor go on with the text of an end");
    assert_eq!(mask.follow(&[], &longer, &yes, false), 0, "a wrong output allows nothing");
    assert!(mask.may_end(&[], &yes) && !mask.may_end(&[], &[]));
    assert_eq!(mask.says(&[], &[], &yes, end), Allows::Unknown);
    assert_eq!(
        (mask.says(&[], &[], &[], yes[0]), mask.says(&[], &yes, &[], no[0])),
        (Allows::Yes, Allows::No)
    );
    assert_eq!(mask.allowed(&[], &yes, 100).unwrap(), tokenizer.may_end());
    assert_eq!((mask.allowed(&[], &[], 1), mask.allowed(&[], &longer, 100)), (None, None));
}

/// As xgrammar has it: a special token that does not end the text is its letters.
#[test]
fn special_tokens_are_text_inside_a_string() {
    let tokenizer = target();
    let mask = begin(&tokenizer, Language::Json(json!({"type": "string"})));
    let (user, quote) = (tokenizer.id("<|user|>").unwrap(), ids(&tokenizer, "\""));
    assert_eq!(mask.follow(&[], &quote, &[user, user], false), 2);
    assert_eq!(mask.follow(&[], &quote, &[user], true), 0);
    assert_eq!(mask.follow(&[], &[&quote[..], &[user]].concat(), &quote, false), 1);
}

/// The library has no limits of its own: what is not refused has to end, soon.
#[test]
fn a_hostile_grammar_is_refused_or_cheap() {
    let texts = |count: usize| (0..count).map(|number| format!("a{number}")).collect::<Vec<_>>();
    let nested =
        |depth: usize| (0..depth).fold(json!({}), |inner, _| json!({"type": "array", "items": inner}));
    let properties = |count: usize, more: Value| {
        let mut schema = json!({"type": "object", "properties": {}});
        for name in texts(count) {
            schema["properties"][name] = json!({"type": "string"});
        }
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    };
    let recursive = json!({"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"});
    let refused = ["too deep", "large", "enum", "choice", "items", "parentheses"];
    let by_guidance = [
        "loop",
        "too deep",
        "large",
        "enum",
        "choice",
        "counted",
        "parentheses",
        "length",
        "letters",
        "repeated",
        "words",
        "description",
        "long",
        "forced",
    ];
    let vocabulary = Vocabulary::new(target());
    for (name, language) in [
        ("recursive", Language::Json(recursive)),
        ("loop", Language::Json(json!({"$ref": "#"}))),
        ("deep", Language::Json(nested(60))),
        ("too deep", Language::Json(nested(100))),
        ("large", Language::Json(json!({"type": "string", "description": "x".repeat(1 << 20)}))),
        ("enum", Language::Json(json!({"enum": texts(10_000)}))),
        ("short enum", Language::Json(json!({"enum": texts(500)}))),
        ("choice", Language::Choice(texts(10_000))),
        ("optional", Language::Json(properties(1_000, json!({})))),
        ("counted", Language::Json(properties(60, json!({"minProperties": 10, "maxProperties": 50})))),
        ("length", Language::Json(json!({"type": "string", "maxLength": 1_000_000_000}))),
        ("long", Language::Json(json!({"const": "x".repeat(3_000)}))),
        (
            "description",
            Language::Json(
                json!({"type": "object", "properties": {"description": {"type": "string", "maxLength": 9_000}}}),
            ),
        ),
        ("forced", Language::Regex("a{9000}".to_owned())),
        ("items", Language::Json(json!({"type": "array", "minItems": 1_000_000}))),
        ("alternatives", Language::Regex("(a|a)*b".to_owned())),
        ("powers", Language::Regex("(a|b)*a(a|b){200}".to_owned())),
        ("repeated", Language::Regex("(a{1,1000}){1,1000}".to_owned())),
        ("letters", Language::Regex(".{0,100000}x".to_owned())),
        ("words", Language::Regex(r"(\w{1,50}\s){1,50}\w+".to_owned())),
        ("parentheses", Language::Regex("(".repeat(20_000) + &")".repeat(20_000))),
    ] {
        let rules = asked(language);
        let compiled = Compiled::new(Library::Xgrammar(Free), &rules, &vocabulary);
        assert_eq!(compiled.is_err(), refused.contains(&name), "{name}");
        let of_guidance = Compiled::new(Library::Guidance(Free), &rules, &vocabulary);
        assert_eq!(of_guidance.is_err(), by_guidance.contains(&name), "{name}");
    }
}

#[test]
fn a_hostile_tag_is_refused_or_cheap() {
    let tag = |begin: &str, schema: &Value| {
        json!({"type": "tag", "begin": begin, "end": ")",
        "content": {"type": "json_schema", "json_schema": schema}})
    };
    let text = |format: &Value| json!({"type": "structural_tag", "format": format}).to_string();
    let triggered =
        |tags: &[Value]| text(&json!({"type": "triggered_tags", "triggers": ["("], "tags": tags}));
    let many: Vec<Value> = (0..500).map(|at| tag(&format!("(f{at}"), &json!({"type": "object"}))).collect();
    let deep = (0..80).fold(json!({}), |inner, _| json!({"type": "array", "items": inner}));
    let long = json!({"description": "x".repeat(MAX_TAG)});
    let vocabulary = Vocabulary::new(target());
    let refused = ["no JSON", "no tag", "deep", "long", "groups", "a token"];
    for (name, tag) in [
        ("no JSON", "{".to_owned()),
        ("no tag", "{}".to_owned()),
        ("many", triggered(&many)),
        ("deep", triggered(&[tag("(f", &deep)])),
        ("long", triggered(&[tag("(f", &long)])),
        (
            "groups",
            triggered(&[tag(
                "(f",
                &json!({"type": "string", "pattern": format!("{}a{}", "(".repeat(9_000), ")".repeat(9_000))}),
            )]),
        ),
        ("a token", text(&json!({"type": "token", "token": "<|end|>"}))),
    ] {
        let compiled = Compiled::new(Library::Xgrammar(Free), &Rules::Tag(tag.into()), &vocabulary);
        assert_eq!(compiled.is_err(), refused.contains(&name), "{name}");
    }
}
