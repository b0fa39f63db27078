//! Calls: their names and arguments, from findings to the pieces that a client gets.

use super::{Event, Machine, Slot, some};
use crate::parse::arguments::{self, Arguments, Converted};
use crate::parse::grammar::Names;
use crate::parse::growing::NameSearch;
use crate::parse::python::{self, Unread, Value};
use crate::parse::{ToolCall, Unsure, steps};

use foretell_core::session::parse::CallDelta;

/// Bytes that the conversions of a call may read whatever its length: those of a kilobyte, piece by
/// piece.
const CONVERTED_FREELY: usize = 256 << 10;
/// Bytes that they may read in addition for each byte of its arguments.
const CONVERTED_PER_BYTE: usize = 64;

impl Machine {
    /// A complete call; `None` if the server drops it.
    pub(super) fn call(&self, slot: &Slot) -> Result<Option<ToolCall>, Unsure> {
        let name = python::strip(&slot.name).to_owned();
        let is_mistral = self.setup.grammar.names == Names::Mistral;
        if is_mistral && slot.name.is_empty() && slot.arguments.is_empty() {
            return Ok(None);
        }
        if name.is_empty() && !is_mistral {
            return inner_call(slot);
        }
        let raw = python::strip(&slot.arguments);
        let arguments = match self.setup.grammar.arguments {
            _ if raw.is_empty() => "{}".to_owned(),
            Arguments::Json if is_mistral => first_value(raw)?.to_owned(),
            Arguments::Json => raw.to_owned(),
            _ => self.convert(slot, false).map_err(|_| Unsure)?.json,
        };
        if !self.accepts(&name) {
            return Ok(None);
        }
        let properties = arguments::properties(&self.setup.tools, &name);
        let arguments = arguments::fix_types(arguments, properties).map_err(|_| Unsure)?;
        Ok(Some(ToolCall { id: slot.id.clone(), name, arguments }))
    }

    /// Takes a finding within a call; appends what it makes certain.
    pub(super) fn on_call(&mut self, event: Event, calls: &mut Vec<CallDelta>) {
        match event {
            Event::CallStart => self.slots.push(Slot::default()),
            Event::Name(text) => self.slot(|slot| slot.name.push_str(&text)),
            Event::Argument(text) => self.on_argument(&text, calls),
            Event::CallEnd => {
                self.on_end(calls);
                self.note_end();
            }
            _ => {}
        }
    }

    fn slot(&mut self, change: impl FnOnce(&mut Slot)) {
        if let Some(slot) = self.slots.last_mut() {
            change(slot);
        }
    }

    fn on_argument(&mut self, text: &str, calls: &mut Vec<CallDelta>) {
        self.slot(|slot| slot.arguments.push_str(text));
        let Some(slot) = self.slots.last() else { return };
        if slot.is_named {
            if let Some(piece) = self.argument_piece(text) {
                self.piece(calls, None, piece);
            }
            return;
        }
        let Some(header) = self.header() else { return };
        let names = self.setup.grammar.names;
        match self.read_name(&header) {
            Some((id, name)) if self.accepts(&name) => {
                self.name(id, &name);
                let has_piece = matches!(names, Names::Kimi | Names::Mistral);
                let piece = if has_piece { text.to_owned() } else { String::new() };
                self.piece(calls, Some(name), piece);
            }
            // The arguments may have another name.
            None if names == Names::Kimi => self.slot(|slot| {
                slot.is_refused = slot.name.is_empty();
                slot.name.clear();
            }),
            _ => self.slot(|slot| slot.is_refused = true),
        }
    }

    /// The text of the newest call's name, which is all there when its arguments begin; without
    /// any, a name inside the arguments. `None` if it is not known yet, or was refused.
    fn header(&mut self) -> Option<String> {
        let is_inside = self.setup.grammar.names != Names::Mistral;
        let slot = self.slots.last_mut().filter(|slot| !slot.is_refused)?;
        if !slot.name.is_empty() || !is_inside {
            return Some(slot.name.clone());
        }
        let name = slot.inner_name.find(&slot.arguments, true)?.to_owned();
        slot.is_refused = name.is_empty();
        some(name)
    }

    fn on_end(&mut self, calls: &mut Vec<CallDelta>) {
        if self.setup.grammar.names == Names::Stripped {
            self.slot(|slot| slot.name = python::strip(&slot.name).to_owned());
        }
        let rest = self.last_piece();
        let Some(slot) = self.slots.last().filter(|slot| !slot.is_named) else {
            if !rest.is_empty() {
                self.piece(calls, None, rest);
            }
            return;
        };
        // A header that cannot be read is the name.
        let (id, name) = self.read_name(&slot.name).unwrap_or((None, slot.name.clone()));
        let is_final = self.setup.grammar.names == Names::Mistral;
        let name = if is_final { Some(name) } else { some(name).or_else(|| inner_name(&slot.arguments)) };
        if let Some(name) = name.filter(|name| self.accepts(name)) {
            self.name(id, &name);
            self.piece(calls, Some(name), rest);
        }
    }

    /// Notes the call that ended, for [`Self::convert`].
    fn note_end(&mut self) {
        let last = self.slots.len().saturating_sub(1);
        if self.setup.grammar.arguments == Arguments::Dsml
            && let Some(slot) = self.slots.last()
        {
            steps::read(slot.arguments.len());
            self.first_with.entry(slot.arguments.clone()).or_insert(last);
        }
    }

    fn piece(&self, calls: &mut Vec<CallDelta>, name: Option<String>, arguments: String) {
        let index = self.slots.len().saturating_sub(1) as u32;
        let id = name.as_ref().and_then(|_| self.slots.last()?.id.clone());
        calls.push(CallDelta { index, id, name, arguments });
    }

    fn name(&mut self, id: Option<String>, name: &str) {
        let text_keys = arguments::text_keys(arguments::properties(&self.setup.tools, name));
        self.slot(|slot| {
            slot.id = id;
            name.clone_into(&mut slot.name);
            slot.is_named = true;
            slot.text_keys = text_keys;
        });
    }

    /// Id and name in the text of a name.
    fn read_name(&self, header: &str) -> Option<(Option<String>, String)> {
        match self.setup.grammar.names {
            Names::Plain | Names::Mistral => Some((None, header.to_owned())),
            Names::Stripped => Some((None, python::strip(header).to_owned())),
            Names::Kimi => kimi_name(python::strip(header)),
        }
    }

    fn accepts(&self, name: &str) -> bool {
        let tools = &self.setup.tools;
        let is_known =
            !self.setup.grammar.checks_names || tools.is_empty() || arguments::has_function(tools, name);
        is_known && (!name.is_empty() || self.setup.grammar.names == Names::Mistral)
    }

    /// The JSON of a call's arguments. The server finds the function by them: the first call with
    /// the same ones has its name.
    fn convert(&self, slot: &Slot, is_partial: bool) -> Result<Converted, Unread> {
        let raw = slot.arguments.as_str();
        let Converted { json, open } = self.setup.grammar.arguments.convert(raw, is_partial)?;
        if self.setup.grammar.arguments != Arguments::Dsml || self.setup.tools.is_empty() {
            return Ok(Converted { json, open });
        }
        let first = self.first_with.get(raw).and_then(|&first| self.slots.get(first)).unwrap_or(slot);
        let properties = arguments::properties(&self.setup.tools, &first.name);
        Ok(Converted { json: arguments::unwrap(json, properties)?, open })
    }

    /// JSON of a call's arguments so far.
    fn fixed(&self, slot: &Slot, is_partial: bool) -> Result<Converted, Unread> {
        let Converted { json, open } = self.convert(slot, is_partial)?;
        if slot.name.is_empty() {
            return Ok(Converted { json, open });
        }
        let json = arguments::fix_types(json, arguments::properties(&self.setup.tools, &slot.name))?;
        Ok(Converted { json, open })
    }

    /// The arguments' JSON that became certain with a piece of their text.
    fn argument_piece(&mut self, text: &str) -> Option<String> {
        let grammar = self.setup.grammar;
        if grammar.arguments == Arguments::Json {
            return some(text.to_owned());
        }
        if grammar.converts_at.is_some_and(|c| !text.contains(c)) {
            return None;
        }
        if let Some(piece) = self.added(text) {
            return some(piece);
        }
        if !self.may_convert() {
            return None;
        }
        let fixed = self.fixed(self.slots.last()?, true);
        let Converted { json, open } = fixed.map_err(|_| self.is_sure = false).ok()?;
        let slot = self.slots.last_mut()?;
        let safe = arguments::safe_prefix(&json, slot.text_keys.as_deref());
        let piece = safe.strip_prefix(slot.sent.as_str())?.to_owned();
        // All but the end of the text and of the object is sent.
        let is_sent = json.strip_prefix(safe) == Some("\"}");
        slot.open = if is_sent { open.map(|length| slot.arguments.len() - length) } else { None };
        safe.clone_into(&mut slot.sent);
        some(piece)
    }

    /// True if all arguments may be converted with a piece. The server does it with every piece. Of
    /// long arguments, several pieces are converted together here, so that all conversions of a
    /// call read [`CONVERTED_PER_BYTE`] times as much as it has: the client gets the same text a
    /// little later.
    fn may_convert(&mut self) -> bool {
        let Some(slot) = self.slots.last_mut() else { return false };
        let length = slot.arguments.len();
        let is_due = slot.converted + length <= CONVERTED_FREELY + CONVERTED_PER_BYTE * length;
        slot.converted += if is_due { length } else { 0 };
        is_due
    }

    /// The JSON that a piece adds to an argument that is a text; `None` if all has to be converted.
    /// A client may send a file as one argument, so that each piece must not cost more than the one
    /// before.
    fn added(&mut self, text: &str) -> Option<String> {
        let slot = self.slots.last_mut()?;
        let from = slot.open.take()?;
        steps::read(slot.arguments.len() - from);
        if arguments::may_contain_tag(slot.arguments.get(from..)?) {
            return None;
        }
        slot.open = Some(slot.arguments.len());
        let before = slot.arguments.strip_suffix(text)?;
        let added = self.setup.grammar.arguments.added(before, text);
        slot.sent.push_str(&added);
        Some(added)
    }

    /// The rest of the arguments, at the end of a call.
    fn last_piece(&mut self) -> String {
        if self.setup.grammar.arguments == Arguments::Json || self.slots.is_empty() {
            return String::new();
        }
        let Some(Ok(Converted { json, .. })) = self.slots.last().map(|slot| self.fixed(slot, false)) else {
            self.is_sure = false;
            return String::new();
        };
        let Some(slot) = self.slots.last_mut() else { return String::new() };
        let Some(piece) = json.strip_prefix(slot.sent.as_str()).map(str::to_owned) else {
            return String::new();
        };
        slot.sent = json;
        piece
    }
}

/// The first value in a text of JSON, and all of another text.
fn first_value(text: &str) -> Result<&str, Unsure> {
    match python::load_first(text) {
        Ok(first) => Ok(text.strip_suffix(first.rest).unwrap_or(text)),
        Err(Unread::Invalid) => Ok(text),
        Err(_) => Err(Unsure),
    }
}

/// A call without a name: an object of JSON may have it, with the arguments.
fn inner_call(slot: &Slot) -> Result<Option<ToolCall>, Unsure> {
    let fields = match python::load(python::strip(&slot.arguments)) {
        Ok(Value::Object(fields)) => fields,
        Ok(_) | Err(Unread::Invalid) => return Ok(None),
        Err(_) => return Err(Unsure),
    };
    match fields.iter().find(|(key, _)| key == "name") {
        None => Ok(None),
        Some((_, Value::Text(name))) if name.is_empty() => Ok(None),
        // No grammar here writes calls so; what the server makes of it is not recorded.
        Some(_) => Err(Unsure),
    }
}

fn inner_name(arguments: &str) -> Option<String> {
    NameSearch::default().find(arguments, true).filter(|name| !name.is_empty()).map(str::to_owned)
}

/// `functions.NAME:INDEX` at the start of a header.
fn kimi_name(header: &str) -> Option<(Option<String>, String)> {
    let line = header.split('\n').next()?;
    let colon = line.rmatch_indices(':').map(|(at, _)| at).find(|&at| {
        at > 0 && line.get(at + 1..).is_some_and(|rest| rest.starts_with(|c: char| c.is_numeric()))
    })?;
    let digits =
        line.get(colon + 1..)?.chars().take_while(|c| c.is_numeric()).map(char::len_utf8).sum::<usize>();
    let id = python::strip(line.get(..colon + 1 + digits)?);
    let name = id.split(':').next()?;
    let name = name.strip_prefix("functions.").unwrap_or(name);
    (!name.is_empty()).then(|| (Some(id.to_owned()), name.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use serde_json::json;

    use super::super::Setup;
    use super::*;
    use crate::parse::grammar::{self, Grammar};
    use crate::parse::{Template, Vocabulary};

    /// A machine within the arguments of a call of `f`.
    fn machine(grammar: &'static Grammar, has_tools: bool) -> Machine {
        let properties = json!({"x": {"type": "string"}, "y": {"type": "integer"}, "z": {"enum": ["a"]}});
        let tool =
            json!({"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}});
        let tools = if has_tools { vec![tool] } else { Vec::new() };
        let vocabulary = Vocabulary { id: &|_| None, special: &[] };
        let setup = Setup::new(grammar, &vocabulary, Template(None), &tools);
        let mut machine = Machine::calls(Arc::clone(&setup), false, false);
        machine.slots.push(Slot::default());
        machine.name(None, "f");
        machine
    }

    /// Adds a piece, once as it is and once with all arguments reconverted.
    fn added_alike(machine: &mut Machine, piece: &str) {
        let mut slow = machine.clone();
        slow.slot(|slot| slot.open = None);
        let [mut told, mut whole] = [Vec::new(), Vec::new()];
        machine.on_argument(piece, &mut told);
        slow.on_argument(piece, &mut whole);
        assert_eq!((&told, &machine.slots[0].sent), (&whole, &slow.slots[0].sent), "{:?}", slow.slots[0]);
        assert_eq!(machine.is_sure, slow.is_sure);
    }

    const PIECES: [&str; 30] = [
        "a",
        "b c",
        "\n",
        "\n\n",
        "<",
        "</",
        "<p",
        "p",
        "arameter",
        "parameter",
        ">",
        "=",
        " ",
        "/",
        "\"",
        "\\",
        "é😀",
        "7",
        "<parameter=x>",
        "<parameter=y>",
        "</parameter>",
        "<parameter name=\"x\">",
        "<parameter name=z>",
        "<arg_key>x</arg_key>",
        "<arg_key>y</arg_key>",
        "<arg_key>",
        "<arg_value>",
        "</arg_value>",
        "</arg",
        "_value>",
    ];

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

        #[test]
        fn a_piece_that_is_added_is_what_converting_all_again_gives(
            pieces in proptest::collection::vec(prop::sample::select(PIECES.to_vec()), 1..40),
            family in 0_usize..3,
            has_tools: bool,
        ) {
            let (grammar, begin) = [
                (&grammar::QWEN3, "<parameter=x>"),
                (&grammar::GLM, "<arg_key>x</arg_key><arg_value>"),
                (&grammar::MINIMAX_M2, "<parameter name=\"x\">"),
            ][family];
            let mut machine = machine(grammar, has_tools);
            for piece in std::iter::once(begin).chain(pieces) {
                added_alike(&mut machine, piece);
            }
        }
    }

    /// A file of 1 MB as one argument, among others with half a tag in it: converting all of it
    /// with every piece would take minutes.
    #[test]
    fn a_long_argument_costs_no_more_per_piece_than_a_short_one() {
        let begins = ["<parameter=x>", "<arg_key>x</arg_key><arg_value>", "<parameter name=\"x\">"];
        for (grammar, begin) in [&grammar::QWEN3, &grammar::GLM, &grammar::MINIMAX_M2].into_iter().zip(begins)
        {
            let mut machine = machine(grammar, true);
            let mut calls = Vec::new();
            machine.on_argument(begin, &mut calls);
            machine.on_argument("if a", &mut calls);
            for at in 0..150_000 {
                machine.on_argument(if at % 7 == 0 { " < b >\n" } else { " let c;" }, &mut calls);
                assert!(machine.slots[0].open.is_some());
            }
            assert!(machine.slots[0].sent.len() > 1_000_000);
        }
    }
}
