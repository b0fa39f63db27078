//! Frames of an engine's plug-in to the drafts service.
//!
//! Input: frames as on the socket. What is no frame ends the connection; otherwise each step gets
//! an answer that keeps the room of its rows and the vocabulary.

use foretell_drafts::batch::Batch;
use foretell_drafts::frame::{self, Hello, Incoming, Step};
use foretell_drafts::joins::{Joined, Terms};
use foretell_net::http::memory::Memory;

/// Maximum size of an input, bytes.
const MAX_LEN: usize = 64 << 10;
/// The vocabulary of the engine.
const VOCABULARY: u32 = 200;

/// Runs one input.
pub fn run(input: &[u8]) {
    if input.len() > MAX_LEN {
        return;
    }
    let hello = Hello {
        version: 1,
        max_draft: 16,
        vocabulary: VOCABULARY,
        context: 1_000,
        rows: 16,
        engine: String::new(),
        engine_version: String::new(),
        model: String::new(),
    };
    let (mut batch, memory) = (Batch::new(&hello), Memory::new(16 << 20));
    let mut rest = input;
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        let Some((bytes, after)) = after.split_at_checked(u32::from_le_bytes(*length) as usize) else {
            return;
        };
        rest = after;
        match frame::read(bytes) {
            Ok(Incoming::Row { row, prompt, temperature, .. }) => {
                let joined = Joined::new(Terms::unknown());
                batch.begin(row, prompt as usize, temperature, joined, &memory);
            }
            Ok(Incoming::Text { row, from, tokens }) => {
                if let Some(unindexed) = batch.text(row, from as usize, &tokens) {
                    batch.indexed(row, unindexed.built());
                }
            }
            Ok(Incoming::Step(step)) => answered(&mut batch, &step),
            Ok(Incoming::Gone(rows)) => batch.end(&rows),
            Ok(Incoming::Hello(_)) | Err(_) => return,
        }
    }
}

fn answered(batch: &mut Batch, step: &Step) {
    let drafts = batch.step(step);
    assert_eq!(drafts.sequence, step.sequence);
    for (row, tokens) in &drafts.rows {
        let rooms = step.rows.iter().filter(|asked| asked.row == *row).map(|asked| usize::from(asked.room));
        assert!(rooms.max().is_some_and(|room| (1..=room).contains(&tokens.len())), "{drafts:?}");
        assert!(tokens.iter().all(|token| *token < VOCABULARY), "{drafts:?}");
    }
    let mut out = Vec::new();
    frame::drafts(&mut out, &drafts);
    batch.tidy();
}
