//! The certain parts of an object whose shape is known: keys, punctuation, values without a choice.
//!
//! The output is followed through the shapes that the prompt requests. Shapes that it contradicts
//! are dropped; the proposal is the common prefix of the continuations by the remaining ones. It
//! ends where the model is free.

use super::json::{Bracket, Event, Level, Position, Scanner, Style};
use super::shapes::{Field, Form, Shape, ShapeId, Shapes};

/// Maximum bytes of a proposal: more than the longest draft has.
const PROPOSAL_MAX: usize = 256;

/// The possible shapes of the object that is being written.
#[derive(Clone, Debug)]
pub struct Skeleton {
    scanner: Scanner,
    frames: Frames,
}

/// State of each open level, and the form of earlier objects.
#[derive(Clone, Debug)]
struct Frames {
    open: Vec<Frame>,
    /// The form of the last object that had the shape of one.
    form: Option<Form>,
}

/// An object or array that is open.
#[derive(Clone, Debug)]
struct Frame {
    /// The shapes that the output does not contradict.
    live: Vec<(Form, ShapeId)>,
    /// The keys of its members so far.
    keys: Vec<String>,
}

/// A proposal, and the number of shapes behind it.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    /// The key or value that the text ends in, as far as it is written, its quote included.
    pub begun: String,
    /// The text that comes next.
    pub rest: String,
    /// Number of shapes that it is the common prefix of.
    pub shapes: usize,
}

impl Skeleton {
    /// The skeleton of an output that has not begun; earlier objects had the layout `style`, and
    /// calls the form `form`.
    pub fn new(style: Style, form: Option<Form>) -> Self {
        Self { scanner: Scanner::with(style), frames: Frames { open: Vec::new(), form } }
    }

    /// Reads a byte of the output.
    pub fn step(&mut self, byte: u8, shapes: &Shapes) {
        let Self { scanner, frames } = self;
        scanner.step(byte, |event| frames.on_event(event, shapes));
    }

    /// The text that comes next by the shapes; `None` where that is not known.
    pub fn proposal(&self, shapes: &Shapes) -> Option<Proposal> {
        let top = self.frames.open.len().checked_sub(1)?;
        // A single brace in running text is usually not JSON.
        if top == 0 && self.scanner.position() == Position::Opened {
            return None;
        }
        let quote = if self.scanner.position() == Position::Key { "\"" } else { "" };
        let begun = quote.to_owned() + std::str::from_utf8(self.begun()).ok()?;
        let writer = Writer { shapes, skeleton: self };
        let frame = self.frames.open.get(top)?;
        let from = |form| Some((form, writer.from(top, form, false)?));
        let (form, rest) = Form::beginning(self.frames.form).find_map(from)?;
        let shapes = frame.live.iter().filter(|(of, _)| *of == form).count();
        Some(Proposal { begun, rest, shapes }).filter(|proposal| !proposal.rest.is_empty())
    }

    /// The key or value that the text ends in.
    fn begun(&self) -> &[u8] {
        match self.scanner.position() {
            Position::Key | Position::Text | Position::Literal => self.scanner.word(),
            _ => &[],
        }
    }
}

impl Frames {
    fn on_event(&mut self, event: Event<'_>, shapes: &Shapes) {
        match event {
            Event::Opened(bracket) => self.opened(bracket, shapes),
            Event::Key(key) => {
                let key = String::from_utf8_lossy(key).into_owned();
                let Some(frame) = self.open.last_mut() else { return };
                frame.live.retain(|&(_, id)| shapes.field(id, &key).is_some());
                // Keys of an object that has no possible shape do not count.
                if !frame.live.is_empty() {
                    frame.keys.push(key);
                }
            }
            Event::Scalar(value) => self.valued(value, shapes),
            Event::Closed => {
                let frame = self.open.pop();
                let form = frame.and_then(|frame| frame.live.first().map(|&(form, _)| form));
                if self.open.is_empty() {
                    self.form = form.or(self.form);
                }
            }
            Event::Broken => self.open.clear(),
        }
    }

    fn opened(&mut self, bracket: Bracket, shapes: &Shapes) {
        let mut live = match self.open.last() {
            None => shapes.roots().to_vec(),
            Some(frame) => frame.values(shapes),
        };
        live.retain(|&(_, id)| {
            matches!(
                (bracket, shapes.get(id)),
                (Bracket::Object, Some(Shape::Object(_))) | (Bracket::Array, Some(Shape::Array(_)))
            )
        });
        self.open.push(Frame { live, keys: Vec::new() });
    }

    fn valued(&mut self, value: &[u8], shapes: &Shapes) {
        let Some(frame) = self.open.last_mut() else { return };
        let Some(key) = frame.keys.last() else { return };
        frame.live.retain(|&(_, id)| {
            let shape = shapes.field(id, key).and_then(|field| shapes.get(field.shape));
            match shape {
                Some(Shape::Choices(choices)) => choices.iter().any(|choice| choice.as_bytes() == value),
                _ => true,
            }
        });
    }
}

impl Frame {
    /// The possible shapes of a value at this position.
    fn values(&self, shapes: &Shapes) -> Vec<(Form, ShapeId)> {
        let value = |&(form, id): &(Form, ShapeId)| match shapes.get(id)? {
            Shape::Array(item) => Some((form, *item)),
            Shape::Object(_) => shapes.field(id, self.keys.last()?).map(|field| (form, field.shape)),
            Shape::Choices(_) | Shape::Text | Shape::Free => None,
        };
        self.live.iter().filter_map(value).collect()
    }
}

impl Shapes {
    fn field(&self, id: ShapeId, key: &str) -> Option<&Field> {
        match self.get(id)? {
            Shape::Object(fields) => fields.iter().find(|field| field.key == key),
            Shape::Array(_) | Shape::Choices(_) | Shape::Text | Shape::Free => None,
        }
    }
}

/// Writes the continuation of the output.
struct Writer<'a> {
    shapes: &'a Shapes,
    skeleton: &'a Skeleton,
}

/// Result of writing. `Err`: the model is free from here on, or enough is written.
type Written = Result<(), Stop>;

/// No more can be written.
struct Stop;

/// A text that is being written.
struct Text(String);

impl Text {
    fn put(&mut self, text: &str) -> Written {
        self.0.push_str(text);
        if self.0.len() < PROPOSAL_MAX { Ok(()) } else { Err(Stop) }
    }

    /// Appends the rest of `text`, of which `begun` is there already.
    fn finish(&mut self, text: &str, begun: &[u8]) -> Written {
        let rest = text.as_bytes().strip_prefix(begun).and_then(|rest| std::str::from_utf8(rest).ok());
        self.put(rest.ok_or(Stop)?)
    }

    /// Appends the rest of the whitespace `gap` if `begun` is its beginning; otherwise nothing.
    fn space(&mut self, gap: &str, begun: &str) -> Written {
        self.put(gap.strip_prefix(begun).unwrap_or_default())
    }
}

/// Whitespace before each member of an object.
#[derive(Clone, Debug)]
struct Layout {
    lead: String,
    /// Additional indentation per level; `None` where objects are written on one line.
    unit: Option<String>,
}

impl Layout {
    /// True if every member stands on a separate line.
    fn is_tall(&self) -> bool {
        self.unit.is_some()
    }

    /// The layout of an object within this one.
    fn inner(&self) -> Self {
        let lead = self.unit.as_ref().map_or_else(|| self.lead.clone(), |unit| self.lead.clone() + unit);
        Self { lead, unit: self.unit.clone() }
    }

    /// Whitespace before the closing bracket.
    fn end(&self) -> &str {
        let unit = self.unit.as_deref().unwrap_or_default();
        self.lead.strip_suffix(unit).unwrap_or(&self.lead)
    }
}

impl Writer<'_> {
    /// The text that follows in the frame at `level`, and after it; `after`: an inner frame has
    /// just been completed. Empty where the model is free; `None` if no shape of this form remains.
    fn from(&self, level: usize, form: Form, after: bool) -> Option<String> {
        let frame = self.skeleton.frames.open.get(level)?;
        let mut common: Option<String> = None;
        let mut ends = true;
        for &(_, id) in frame.live.iter().filter(|(of, _)| *of == form) {
            let mut text = Text(String::new());
            let written = self.rest(&mut text, level, id, after);
            if text.0.is_empty() && written.is_err() {
                // The key or value that has begun is not in this shape, or the model is free.
                if self.contradicts(level, id) {
                    continue;
                }
                return Some(String::new());
            }
            let both = common.as_ref().is_some_and(|common| *common != text.0);
            ends &= written.is_ok() && !both;
            common = Some(common.map_or_else(|| text.0.clone(), |common| shared(&common, &text.0)));
        }
        let mut text = common?;
        if ends && text.len() < PROPOSAL_MAX && level > 0 {
            text += &self.from(level - 1, form, true).unwrap_or_default();
        }
        Some(text)
    }

    /// True if the key or value that has begun is not in this shape.
    fn contradicts(&self, level: usize, id: ShapeId) -> bool {
        let begun = self.skeleton.begun();
        let top = level + 1 == self.skeleton.frames.open.len();
        if !top || begun.is_empty() {
            return false;
        }
        match (self.skeleton.scanner.position(), self.shapes.get(id)) {
            (Position::Key, Some(Shape::Object(fields))) => {
                !fields.iter().any(|field| field.key.as_bytes().starts_with(begun))
            }
            (Position::Text, _) => match self.value_of(level, id).and_then(|value| self.shapes.get(value)) {
                Some(Shape::Choices(choices)) => {
                    !choices.iter().any(|choice| choice.as_bytes().starts_with(begun))
                }
                _ => false,
            },
            _ => false,
        }
    }

    /// The shape of the value that the frame's last key names, or of an item.
    fn value_of(&self, level: usize, id: ShapeId) -> Option<ShapeId> {
        match self.shapes.get(id)? {
            Shape::Array(item) => Some(*item),
            Shape::Object(_) => {
                let key = self.skeleton.frames.open.get(level)?.keys.last()?;
                self.shapes.field(id, key).map(|field| field.shape)
            }
            Shape::Choices(_) | Shape::Text | Shape::Free => None,
        }
    }

    /// Writes the rest of an object or array that has begun.
    fn rest(&self, text: &mut Text, level: usize, id: ShapeId, after: bool) -> Written {
        let scanner = &self.skeleton.scanner;
        let layout = self.layout(level);
        let (position, gap) =
            if after { (Position::Valued, "") } else { (scanner.position(), scanner.gap()) };
        let value = || self.value_of(level, id).ok_or(Stop);
        match (self.shapes.get(id), position) {
            (Some(Shape::Object(_)), Position::Named) => {
                text.put(":")?;
                text.put(&scanner.style().colon)?;
                self.value(text, value()?, &layout, b"")?;
            }
            (Some(Shape::Object(_)), Position::Colon) => {
                text.space(&scanner.style().colon, gap)?;
                self.value(text, value()?, &layout, b"")?;
            }
            (Some(Shape::Object(_)), Position::Text) => {
                self.value(text, value()?, &layout, scanner.word())?;
            }
            (Some(Shape::Array(item)), Position::Opened | Position::Comma) => {
                let flat = position == Position::Comma && !layout.is_tall();
                text.space(if flat { &scanner.style().comma } else { &layout.lead }, gap)?;
                self.value(text, *item, &layout, b"")?;
            }
            (Some(Shape::Array(item)), Position::Text) => self.value(text, *item, &layout, scanner.word())?,
            (
                Some(Shape::Object(_)),
                Position::Opened | Position::Comma | Position::Key | Position::Valued,
            ) => {}
            _ => return Err(Stop),
        }
        let Some(Shape::Object(fields)) = self.shapes.get(id) else { return Err(Stop) };
        let keys: Vec<&str> = self.keys(level);
        let position = if matches!(position, Position::Named | Position::Colon | Position::Text) {
            Position::Valued
        } else {
            position
        };
        self.members(text, fields, &keys, (position, gap), &layout)
    }

    fn keys(&self, level: usize) -> Vec<&str> {
        self.skeleton
            .frames
            .open
            .get(level)
            .map_or_else(Vec::new, |frame| frame.keys.iter().map(String::as_str).collect())
    }

    /// Writes the members that follow those with `keys`, and the closing brace.
    fn members(
        &self,
        text: &mut Text,
        fields: &[Field],
        keys: &[&str],
        (mut position, mut gap): (Position, &str),
        layout: &Layout,
    ) -> Written {
        let last = |key: &&str| fields.iter().position(|field| field.key == *key);
        let (before, behind) = fields.split_at(keys.last().and_then(last).map_or(0, |last| last + 1));
        let fresh = |field: &&Field| !keys.contains(&field.key.as_str());
        let mut open: Vec<&Field> = behind.iter().chain(before).filter(fresh).collect();
        loop {
            let begun = if position == Position::Key { self.skeleton.begun() } else { b"" };
            let forced = matches!(position, Position::Key | Position::Comma);
            let fits = |field: &&Field| field.key.as_bytes().starts_with(begun);
            let required = open.iter().position(|field| field.required && fits(field));
            let next = required.or_else(|| forced.then(|| open.iter().position(fits)).flatten());
            let Some(field) = next.map(|next| open.remove(next)) else {
                return Self::end(text, fields, (position, gap), layout);
            };
            match position {
                Position::Valued => {
                    text.put(",")?;
                    let comma = &self.skeleton.scanner.style().comma;
                    text.put(if layout.is_tall() { &layout.lead } else { comma })?;
                }
                Position::Comma if !layout.is_tall() => {
                    text.space(&self.skeleton.scanner.style().comma, gap)?;
                }
                Position::Key => {}
                _ => text.space(&layout.lead, gap)?,
            }
            if position != Position::Key {
                text.put("\"")?;
            }
            text.finish(&field.key, begun)?;
            text.put("\":")?;
            text.put(&self.skeleton.scanner.style().colon)?;
            self.value(text, field.shape, layout, b"")?;
            (position, gap) = (Position::Valued, "");
        }
    }

    /// Writes the closing brace if no member is required after it.
    fn end(text: &mut Text, fields: &[Field], (position, gap): (Position, &str), layout: &Layout) -> Written {
        match position {
            Position::Valued => text.space(layout.end(), gap)?,
            Position::Opened if fields.is_empty() => {}
            _ => return Err(Stop),
        }
        text.put("}")
    }

    /// Writes a value, of which `begun` is there already, within an object or array with this
    /// layout.
    fn value(&self, text: &mut Text, shape: ShapeId, outer: &Layout, begun: &[u8]) -> Written {
        match self.shapes.get(shape) {
            Some(Shape::Choices(choices)) => {
                let mut fit = choices.iter().filter(|choice| choice.as_bytes().starts_with(begun));
                let first = fit.next().ok_or(Stop)?.clone();
                let mut alone = true;
                let common = fit.fold(first, |common, choice| {
                    alone = false;
                    shared(&common, choice)
                });
                text.finish(&common, begun)?;
                if alone { Ok(()) } else { Err(Stop) }
            }
            Some(Shape::Text) if begun.is_empty() => {
                text.put("\"")?;
                Err(Stop)
            }
            Some(Shape::Object(fields)) if begun.is_empty() => {
                text.put("{")?;
                if fields.is_empty() {
                    return Err(Stop);
                }
                self.members(text, fields, &[], (Position::Opened, ""), &outer.inner())
            }
            Some(Shape::Array(item)) if begun.is_empty() => {
                let layout = outer.inner();
                text.put("[")?;
                text.put(&layout.lead)?;
                self.value(text, *item, &layout, b"")?;
                // Another item may follow.
                Err(Stop)
            }
            _ => {
                // The whitespace may be a part of the next token.
                let trimmed = text.0.trim_end().len();
                text.0.truncate(trimmed);
                Err(Stop)
            }
        }
    }

    fn layout(&self, level: usize) -> Layout {
        let scanner = &self.skeleton.scanner;
        let levels = scanner.levels();
        // Before its first member is written, a level is laid out as the one around it, or by its
        // first line break.
        let begins = |level: usize| levels.len() == level + 1 && scanner.position() == Position::Opened;
        let lead = |level: usize| match levels.get(level) {
            Some(_) if begins(level) => scanner.gap(),
            open => open.map(|level: &Level| level.lead.as_str()).unwrap_or_default(),
        };
        let indent = |level: usize| lead(level).rsplit_once('\n').map(|(_, indent)| indent);
        let unit = |level: usize| {
            let outer = level.checked_sub(1).and_then(indent).unwrap_or_default();
            indent(level).and_then(|indent| indent.strip_prefix(outer)).map(str::to_owned)
        };
        match level.checked_sub(1) {
            Some(outer) if begins(level) && indent(level).is_none_or(str::is_empty) => {
                self.layout(outer).inner()
            }
            _ => Layout { lead: lead(level).to_owned(), unit: unit(level) },
        }
    }
}

/// The common prefix of two texts.
fn shared(one: &str, other: &str) -> String {
    let same = one.chars().zip(other.chars()).take_while(|(one, other)| one == other);
    same.map(|(one, _)| one).collect()
}

#[cfg(test)]
mod tests;
