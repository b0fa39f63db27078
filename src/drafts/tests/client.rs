//! A strict client of the drafts protocol, written from deploy/plugins/protocol.md.
#![allow(dead_code, reason = "each user needs a part of it")]
#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::needless_for_each,
    clippy::struct_field_names,
    reason = "tests"
)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

pub struct Client {
    pub stream: UnixStream,
    sequence: u64,
}

pub struct Row<'a> {
    pub row: u32,
    pub scheduled: u16,
    pub sampled: u16,
    pub room: u16,
    pub length: u32,
    pub tokens: &'a [u32],
}

#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    Welcome(u16),
    Refused(String),
    Drafts { sequence: u64, pause: u16, rows: Vec<(u32, Vec<u32>)> },
}

pub fn framed(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = (body.len() as u32 + 1).to_le_bytes().to_vec();
    frame.push(kind);
    frame.extend(body);
    frame
}

pub fn hello(version: u16, most: u16, vocabulary: u32) -> Vec<u8> {
    let mut body = b"foretell".to_vec();
    body.extend(version.to_le_bytes());
    body.extend(most.to_le_bytes());
    body.extend(vocabulary.to_le_bytes());
    body.extend(1_000_000_u32.to_le_bytes());
    body.extend(1_024_u16.to_le_bytes());
    for text in ["vllm", "0.32.0", "model"] {
        body.extend((text.len() as u16).to_le_bytes());
        body.extend(text.as_bytes());
    }
    framed(1, &body)
}

impl Client {
    /// Connects, and says hello.
    pub fn connect(path: &Path, most: u16, vocabulary: u32) -> Self {
        let mut this = Self::silent(path);
        this.send(&hello(1, most, vocabulary));
        assert_eq!(this.answer(), Answer::Welcome(1));
        this
    }

    /// Connects, and says nothing.
    pub fn silent(path: &Path) -> Self {
        Self { stream: UnixStream::connect(path).unwrap(), sequence: 0 }
    }

    pub fn send(&mut self, frame: &[u8]) {
        self.stream.write_all(frame).unwrap();
    }

    pub fn begin(&mut self, row: u32, prompt: u32, temperature: f32, id: &str) {
        let mut body = [row.to_le_bytes(), prompt.to_le_bytes(), temperature.to_le_bytes()].concat();
        body.extend((id.len() as u16).to_le_bytes());
        body.extend(id.as_bytes());
        self.send(&framed(2, &body));
    }

    pub fn text(&mut self, row: u32, from: u32, tokens: &[u32]) {
        for (part, chunk) in tokens.chunks(65_536).enumerate() {
            let from = from + (part * 65_536) as u32;
            let mut body = [row, from, chunk.len() as u32].map(u32::to_le_bytes).concat();
            chunk.iter().for_each(|token| body.extend(token.to_le_bytes()));
            self.send(&framed(3, &body));
        }
    }

    pub fn gone(&mut self, rows: &[u32]) {
        let mut body = (rows.len() as u16).to_le_bytes().to_vec();
        rows.iter().for_each(|row| body.extend(row.to_le_bytes()));
        self.send(&framed(5, &body));
    }

    /// Sends a step that took this long, microseconds; the pause and the drafts of the answer.
    pub fn step(&mut self, elapsed: u32, reads: bool, rows: &[Row<'_>]) -> (u16, Vec<(u32, Vec<u32>)>) {
        self.sequence += 1;
        let mut body = self.sequence.to_le_bytes().to_vec();
        [elapsed, 0, 0].iter().for_each(|word: &u32| body.extend(word.to_le_bytes()));
        body.extend([0, 0, u8::from(reads)]);
        body.extend((rows.len() as u16).to_le_bytes());
        for row in rows {
            body.extend(row.row.to_le_bytes());
            [row.scheduled, row.sampled, row.room].iter().for_each(|n| body.extend(n.to_le_bytes()));
            body.extend(row.length.to_le_bytes());
            body.extend((row.tokens.len() as u16).to_le_bytes());
            row.tokens.iter().for_each(|token| body.extend(token.to_le_bytes()));
        }
        self.send(&framed(4, &body));
        let Answer::Drafts { sequence, pause, rows: drafts } = self.answer() else { panic!("no drafts") };
        assert_eq!(sequence, self.sequence);
        for (row, tokens) in &drafts {
            let asked = rows.iter().find(|asked| asked.row == *row).expect("only rows of the step");
            assert!(
                (1..=usize::from(asked.room)).contains(&tokens.len()),
                "{} of {}",
                tokens.len(),
                asked.room
            );
        }
        (pause, drafts)
    }

    pub fn answer(&mut self) -> Answer {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).unwrap();
        let mut frame = vec![0; u32::from_le_bytes(length) as usize];
        self.stream.read_exact(&mut frame).unwrap();
        let word = |at: usize| u16::from_le_bytes([frame[at], frame[at + 1]]);
        match frame[0] {
            128 => Answer::Welcome(word(1)),
            129 => {
                assert_eq!(frame.len(), 3 + usize::from(word(1)));
                Answer::Refused(String::from_utf8(frame[3..].to_vec()).unwrap())
            }
            130 => drafts(&frame[1..]),
            kind => panic!("kind {kind}"),
        }
    }
}

fn drafts(body: &[u8]) -> Answer {
    let sequence = u64::from_le_bytes(body[..8].try_into().unwrap());
    let pause = u16::from_le_bytes([body[8], body[9]]);
    let (mut rows, mut at) = (Vec::new(), 12);
    for _ in 0..u16::from_le_bytes([body[10], body[11]]) {
        let word = |at: usize| u32::from_le_bytes(body[at..at + 4].try_into().unwrap());
        let (row, shape, count) = (word(at), body[at + 4], usize::from(body[at + 5]));
        assert_eq!(shape, 0, "vLLM takes chains");
        rows.push((row, (0..count).map(|n| word(at + 6 + 4 * n)).collect()));
        at += 6 + 4 * count;
    }
    assert_eq!(at, body.len(), "no byte too many");
    Answer::Drafts { sequence, pause, rows }
}
