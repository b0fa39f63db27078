use super::*;
use crate::sampler::Sampler;
use foretell_parsers::text::Tokenizer;
use foretell_wire::openai::Sampling;

const END: TokenId = 256;

/// One token per byte, `END`, and two tokens that no model of this vocabulary has a text for.
fn grammars() -> Grammars {
    Grammars::new(&bytes(), 259, &[END]).unwrap()
}

fn bytes() -> Tokenizer {
    let mut vocabulary = serde_json::Map::new();
    for (id, letter) in byte_letters().into_iter().enumerate() {
        vocabulary.insert(letter.to_string(), id.into());
    }
    let file = json!({
        "version": "1.0",
        "added_tokens": [{"id": END, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap()
}

/// The letters that byte-level vocabularies write bytes with, by byte.
fn byte_letters() -> Vec<char> {
    let plain = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut next = 256;
    let letter = |byte: u32| {
        let code = if plain(byte) {
            byte
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).unwrap()
    };
    (0..256).map(letter).collect()
}

fn grammar(value: &Value) -> Grammar {
    Grammar::of_structured_outputs(value).unwrap()
}

fn ids(text: &str) -> Vec<TokenId> {
    text.bytes().map(TokenId::from).collect()
}

fn position(grammars: &Grammars, grammar: &Grammar, text: &str) -> Result<GrammarPosition, String> {
    grammars.position_after(grammar, &ids(text), true, &Stop::default())
}

/// The tokens that may follow a text.
fn after(grammars: &Grammars, grammar: &Grammar, text: &str) -> Result<Vec<TokenId>, String> {
    let mut logits = vec![0.0; 259];
    match position(grammars, grammar, text)?.next(&Stop::default())? {
        Next::Of(allowed) => allowed.apply(&mut logits),
        other => panic!("{other:?}"),
    }
    Ok((0..).zip(logits).filter(|&(_, logit): &(TokenId, f32)| logit == 0.0).map(|(id, _)| id).collect())
}

#[test]
fn only_the_tokens_that_a_grammar_allows_may_follow() {
    let grammars = grammars();
    let choice = grammar(&json!({"choice": ["take", "tak", "\"ü\"\n"]}));
    assert_eq!(after(&grammars, &choice, "").unwrap(), ids("\"t"));
    assert_eq!(after(&grammars, &choice, "tak").unwrap(), [TokenId::from(b'e'), END]);
    assert_eq!(after(&grammars, &choice, "take").unwrap(), [END]);
    assert_eq!(after(&grammars, &choice, "\"").unwrap(), [0xC3]);
    let regex = grammar(&json!({"regex": "[ab]+c"}));
    assert_eq!(after(&grammars, &regex, "ab").unwrap(), ids("abc"));
    let lark = grammar(&json!({"grammar": "start: \"x\" (\"y\" | \"z\")"}));
    assert_eq!(after(&grammars, &lark, "x").unwrap(), ids("yz"));
}

#[test]
fn json_has_the_layout_that_was_asked_for() {
    let grammars = grammars();
    let schema = json!({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]});
    let fixed = grammar(&json!({"json": schema, "disable_any_whitespace": true}));
    assert_eq!(after(&grammars, &fixed, "{").unwrap(), ids("\""));
    let free = grammar(&json!({"json": schema}));
    assert_eq!(after(&grammars, &free, "{").unwrap(), ids("\n \""));
    assert_eq!(after(&grammars, &free, "{ ").unwrap(), ids("\""), "not for ever");
    assert_eq!(after(&grammars, &free, "{\n").unwrap(), ids(" \""));
    let any = grammar(&json!({"json_object": true}));
    assert_eq!(after(&grammars, &any, "").unwrap(), ids("{"));
}

#[test]
fn a_place_is_the_same_whether_its_beginning_was_kept_or_not() {
    let regex = grammar(&json!({"regex": "(ab|ac)*"}));
    let stored = grammars();
    for len in 0..40 {
        let text = "abac".repeat(10)[..len].to_owned();
        assert_eq!(after(&stored, &regex, &text), after(&grammars(), &regex, &text), "{text}");
    }
    assert_eq!(stored.stored.lock().len(), STORED_POSITIONS);
    assert_eq!(after(&stored, &regex, "aba").unwrap(), ids("bc"), "an earlier position, too");
}

#[test]
fn what_cannot_be_followed_is_an_error_in_words() {
    let grammars = grammars();
    let choice = grammar(&json!({"choice": ["a"]}));
    assert!(position(&grammars, &choice, "b").unwrap().is_lost());
    for wrong in [
        json!({"regex": "("}),
        json!({"grammar": "start: unknown"}),
        json!({"json": {"type": "nothing"}}),
        json!({"json": {"$ref": "#"}}),
        json!({"regex": "[^\\s\\S]"}),
    ] {
        let error = after(&grammars, &grammar(&wrong), "").unwrap_err();
        assert!(!error.is_empty() && !error.contains('\n'), "{wrong}: {error}");
    }
}

#[test]
fn a_lexer_that_has_no_states_left_is_replaced() {
    let grammars = grammars();
    let regex = grammar(&json!({"regex": "(a|b)*a(a|b){18}c"}));
    let mut random = foretell_core::units::SplitMix64::new(7);
    for _ in 0..60 {
        let text: String = (0..200).map(|_| if random.unit() < 0.5 { 'a' } else { 'b' }).collect();
        let (stop, mut position) = (Stop::default(), position(&grammars, &regex, "").unwrap());
        for token in ids(&text) {
            let next = position.follow(token, &stop);
            assert!(matches!(next, Ok(Next::Of(_))), "{next:?} {}", position.output.len());
        }
    }
}

#[test]
fn an_object_may_have_many_optional_properties() {
    let properties: serde_json::Map<String, Value> =
        (0..200).map(|at| (format!("p{at}"), json!({"type": "integer"}))).collect();
    let schema = json!({"type": "object", "properties": properties, "additionalProperties": false});
    let any = grammar(&json!({"json": schema}));
    assert_eq!(after(&grammars(), &any, "{\"p199\": 1").unwrap(), ids("\n 0123456789}"));
}

#[test]
fn a_very_ambiguous_grammar_ends_in_an_error() {
    let grammars = grammars();
    let lark = "start: a\na: a a a | a a | \"a\" | \"b\" | a b a\nb: \"\" | \"a\" b";
    let mut position = position(&grammars, &grammar(&json!({"grammar": lark})), "").unwrap();
    let stop = Stop::default();
    assert!((0..2_000).any(|_| position.follow(TokenId::from(b'a'), &stop).is_err()));
}

#[test]
fn after_the_end_nothing_is_bound() {
    let grammars = grammars();
    let (choice, stop) = (grammar(&json!({"choice": ["a"]})), Stop::default());
    let mut ended = position(&grammars, &choice, "a").unwrap();
    assert!(matches!(ended.next(&stop), Ok(Next::Of(allowed)) if allowed.is_within(&[END])));
    assert!(matches!(ended.follow(END, &stop), Ok(Next::Any)));
    let mut lost = position(&grammars, &choice, "").unwrap();
    assert!(lost.follow(7, &stop).is_err() && lost.is_lost());
    assert!(matches!(lost.next(&stop), Ok(Next::Nothing)));
}

/// As by `stop_token_ids` that repeat the model's own end.
#[test]
fn an_end_that_is_named_twice_is_masked_until_min_tokens() {
    let grammars = grammars();
    let choice = grammar(&json!({"choice": ["take", "tak"]}));
    let next = position(&grammars, &choice, "tak").unwrap().next(&Stop::default()).unwrap();
    let sampling = Sampling { temperature: 0.0, min_tokens: 4, ..Sampling::default() };
    let sampler = Sampler::new(sampling, 0, 0).with_ends(vec![END, END]);
    let mut history = sampler.history(&[], &ids("tak"));
    history.bind(&next);
    let mut logits = vec![0.0; 259];
    logits[END as usize] = 9.0;
    assert_eq!(sampler.next(&logits, &history), TokenId::from(b'e'));
}

#[test]
fn kept_places_have_a_limited_size_and_share_the_lexer_of_their_grammar() {
    let grammars = grammars();
    let [large, small] = ["(a|b)*a(a|b){8}c", "[ab]+"].map(|regex| grammar(&json!({"regex": regex})));
    for text in ["abab", "ababbbabaabab"] {
        after(&grammars, &large, text).unwrap();
    }
    after(&grammars, &small, "a").unwrap();
    let mut stored = grammars.stored.lock();
    let size = |stored: &StoredPosition| match &stored.position.state {
        GrammarState::Within(walk) => size_of_lexer(&walk.lexer),
        GrammarState::Ended | GrammarState::Lost => 0,
    };
    let sizes: Vec<usize> = stored.iter().map(size).collect();
    assert!(sizes.len() == 3 && sizes[0] > 1_000 && sizes[1] == sizes[2], "{sizes:?}");
    shrink(&mut stored, sizes[0] + sizes[1]);
    assert_eq!(stored.len(), 3);
    shrink(&mut stored, sizes[0] + sizes[1] - 1);
    assert_eq!(stored.len(), 1);
    assert_eq!(stored[0].position.output, ids("a"));
}

#[test]
fn a_usual_grammar_is_below_a_megabyte() {
    let grammars = grammars();
    let properties: serde_json::Map<String, Value> =
        (0..50).map(|at| (format!("p{at}"), json!({"type": "string"}))).collect();
    let schema = grammar(&json!({"json": {"type": "object", "properties": properties}}));
    after(&grammars, &schema, "{\"p7\": \"a text\", \"p9\": \"").unwrap();
    let stored = grammars.stored.lock();
    let GrammarState::Within(walk) = &stored[0].position.state else { panic!("it goes on") };
    let size = size_of_lexer(&walk.lexer);
    assert!(size < 1 << 20, "{size}");
}

/// Behind a node that is not allowed nothing may follow; each other one has what its text has.
#[test]
fn a_draft_has_at_each_node_what_its_text_has() {
    let (grammars, regex) = (grammars(), grammar(&json!({"regex": "(ab|ac)*d"})));
    let tokens = ids("abxad");
    let parents = [None, Some(0), Some(1), Some(1), None];
    let all = behind(position(&grammars, &regex, "").unwrap(), &tokens, &parents, &Stop::default());
    let texts = [Some(""), Some("a"), Some("ab"), None, Some("aba"), Some("d")];
    for (next, text) in all.iter().zip(texts) {
        let mut logits = vec![0.0; 259];
        match (next.as_ref().unwrap(), text) {
            (Next::Nothing, None) => continue,
            (Next::Of(allowed), Some(_)) => allowed.apply(&mut logits),
            other => panic!("{other:?}"),
        }
        let may: Vec<TokenId> = (0..259).filter(|&id| logits[id as usize] == 0.0).collect();
        assert_eq!(may, after(&grammars, &regex, text.unwrap()).unwrap(), "{text:?}");
    }
    assert_eq!(all.len(), texts.len());
}

#[allow(clippy::needless_pass_by_value)] // `json!` at the call reads best
fn json_of(schema: Value) -> Grammar {
    grammar(&json!({"json": schema}))
}

fn pattern(pattern: &str) -> Grammar {
    json_of(json!({"type": "string", "pattern": pattern}))
}

fn nested(depth: usize, wrap: impl Fn(Value) -> Value) -> Value {
    (0..depth).fold(json!({"type": "integer"}), |inner, _| wrap(inner))
}

/// Grammars that end, hang or fill a process that has no limits.
fn hostile() -> Vec<(&'static str, Grammar)> {
    let regex = |text: String| grammar(&json!({"regex": text}));
    let lark = |text: String| grammar(&json!({"grammar": text}));
    let many = |count: usize, name: &str| -> Value {
        (0..count)
            .map(|at| (format!("{name}{at}"), json!({"type": "integer"})))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    let doubled: serde_json::Map<String, Value> = (0..40)
        .map(|at| {
            let next = json!({"$ref": format!("#/$defs/d{}", at + 1)});
            (format!("d{at}"), json!({"allOf": [next, next]}))
        })
        .chain([("d40".to_owned(), json!({"type": "object", "properties": {"a": {"type": "integer"}}}))])
        .collect();
    let either: Vec<Value> =
        (1..30).map(|at| json!({"anyOf": [{"minLength": at}, {"maxLength": 9_000 + at}]})).collect();
    let terminals: Vec<String> = (0..40).map(|at| format!("T{at}: T{} T{}", at + 1, at + 1)).collect();
    let rules: Vec<String> = (0..40).map(|at| format!("r{at}: r{} r{}", at + 1, at + 1)).collect();
    vec![
        ("stars", regex(format!("a{}", "*".repeat(4_000)))),
        ("stars in a schema", pattern(&format!("a{}", "*".repeat(4_000)))),
        ("counts", pattern(&format!("a{}", "{0,1}".repeat(2_000)))),
        ("groups", regex(format!("{}a{}", "(".repeat(9_000), ")".repeat(9_000)))),
        ("groups below the nest limit", regex(format!("{}a{}", "(b".repeat(240), ")?".repeat(240)))),
        ("nested counts", regex("((a{0,50}b?){0,50}c?){0,50}".to_owned())),
        ("nested counts in a schema", pattern("((a{0,50}b?){0,50}c?){0,50}")),
        ("any counted", regex("(.{0,200}){0,200}".to_owned())),
        ("long class", pattern("[^a]{1,5000}")),
        ("longer class", regex("[^a]{1,1000000}".to_owned())),
        ("optional letters", regex("a?".repeat(10_000))),
        ("optional letters in a schema", pattern(&"a?".repeat(10_000))),
        ("the classic", regex(format!("{}{}", "a?".repeat(3_000), "a".repeat(3_000)))),
        ("the classic, counted", regex("(a?){800}a{800}".to_owned())),
        ("states", regex("(a|b)*a(a|b){4000}c".to_owned())),
        ("many words", regex((0..9_000).map(|at| format!("w{at}")).collect::<Vec<_>>().join("|"))),
        (
            "optional properties",
            json_of(json!({"type": "object", "minProperties": 300, "properties": many(600, "p")})),
        ),
        ("many properties", json_of(json!({"type": "object", "properties": many(3_000, "p")}))),
        (
            "one of many",
            json_of(json!({"type": "object", "minProperties": 1, "additionalProperties": false,
            "properties": many(2_000, "p")})),
        ),
        (
            "pattern properties",
            json_of(json!({"type": "object", "patternProperties": many(300, "^p[a-z]{1,9}")})),
        ),
        (
            "fewer of these",
            json_of(json!({"type": "object", "patternProperties": many(20, "^p[a-z]{1,9}x")})),
        ),
        ("least integer", json_of(json!({"type": "integer", "minimum": i64::MIN}))),
        (
            "numbers",
            json_of(json!({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308, "multipleOf": 1e-300})),
        ),
        ("multiples", json_of(json!({"type": "integer", "multipleOf": 999_999_937}))),
        (
            "many items",
            json_of(json!({"type": "array", "minItems": 1_000_000_000, "items": {"type": "integer"}})),
        ),
        ("long text", json_of(json!({"type": "string", "minLength": 1_000_000_000}))),
        ("deep lists", json_of(nested(60, |inner| json!({"type": "array", "items": inner})))),
        ("deeper lists", json_of(nested(600, |inner| json!({"type": "array", "items": inner})))),
        ("deep conjunctions", json_of(nested(30, |inner| json!({"allOf": [inner, {"minimum": 1}]})))),
        ("doubled references", json_of(json!({"$defs": doubled, "$ref": "#/$defs/d0"}))),
        ("many alternatives at once", json_of(json!({"type": "string", "allOf": either}))),
        ("terminals of terminals", lark(format!("start: T0\n{}\nT40: \"a\"", terminals.join("\n")))),
        ("rules of rules", lark(format!("start: r0\n{}\nr40: \"a\" |", rules.join("\n")))),
        ("parentheses", lark(format!("start: {}\"a\"{}", "(".repeat(30_000), ")".repeat(30_000)))),
        ("repeated rules", lark("start: a~1..1000000\na: b~1..1000000\nb: \"x\" | \"x\" b".to_owned())),
        ("too long", lark(format!("start: \"{}\"", "a".repeat(200_000)))),
        ("long", lark(format!("start: \"{}\"", "ab".repeat(50_000)))),
    ]
}

/// Each costs its request at most: it is refused, or followed within the limits, for outputs of
/// letters that many of these allow.
#[test]
fn a_hostile_grammar_ends_in_an_error_or_is_followed() {
    let grammars = Arc::new(grammars());
    for (name, hostile) in hostile() {
        let theirs = Arc::clone(&grammars);
        let followed = run_on_thread(move |stop| {
            let mut position = theirs.position_after(&hostile, &[], true, stop)?;
            let mut next = position.next(stop)?;
            for _ in 0..100 {
                let Next::Of(allowed) = &next else { break };
                let token =
                    b"\"a{[1bcx ".iter().map(|&byte| TokenId::from(byte)).find(|&token| allowed.has(token));
                let Some(token) = token else { break };
                next = position.follow(token, stop)?;
            }
            Ok(position.output.len())
        });
        match followed {
            Ok(tokens) => assert!(tokens <= 100, "{name}"),
            Err(why) => assert!(!why.is_empty() && !why.contains("<backtrace>"), "{name}: {why}"),
        }
    }
    let usual = json_of(json!({"type": "object", "properties": {"a": {"type": "integer"}}}));
    assert_eq!(after(&grammars, &usual, "{").unwrap(), ids("\n \"}"));
}

/// Those for which compiling takes more than linear time are refused before that.
#[test]
fn what_takes_too_long_to_compile_is_refused_by_its_size() {
    let refused = |name: &str| {
        let (_, grammar) = hostile().into_iter().find(|(own, _)| *own == name).unwrap();
        limits::check(&grammar.to_json().to_string(), &grammar).is_err()
    };
    for name in
        ["optional letters", "optional letters in a schema", "pattern properties", "deeper lists", "too long"]
    {
        assert!(refused(name), "{name}");
    }
    assert!(!refused("optional properties") && !refused("long"));
    let schema =
        json!({"type": "object", "description": "?".repeat(9_000), "properties": {"a": {"pattern": "a+?"}}});
    let rules = |more: &str| grammar(&json!({"grammar": format!("start: %json {schema}\n{more}")}));
    for (rules, is_refused) in [(rules(""), false), (rules(&"a: \"b\"?\n".repeat(5_000)), true)] {
        assert_eq!(limits::check(&rules.to_json().to_string(), &rules).is_err(), is_refused);
    }
}

/// Work that does not end is left alone, and told to stop.
#[test]
fn work_that_takes_too_long_is_an_error_and_is_stopped() {
    let (tell, told) = std::sync::mpsc::channel();
    let done = run_on_thread(move |stop| -> Result<(), String> {
        while !stop.is_set() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        tell.send(()).map_err(|error| error.to_string())
    });
    assert_eq!(done, Err(TOO_LARGE.to_owned()));
    told.recv().unwrap();
    assert_eq!(
        run_on_thread(|_| -> Result<(), String> { panic!("as on a bug") }),
        Err(limits::FAILED.to_owned())
    );
}
