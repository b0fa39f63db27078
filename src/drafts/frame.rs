//! The frames of the drafts protocol (deploy/plugins/protocol.md): bytes to values and back.
//!
//! PURE. Every count is checked against the bytes that are there before anything is allocated, so a
//! frame costs no more memory than its length.

use foretell_core::units::TokenId;

/// Version of the protocol.
pub const VERSION: u16 = 1;
/// Largest frame, kind included, bytes.
pub const FRAME_BYTES: usize = 8 << 20;
/// Longest text in a frame, bytes.
const TEXT_BYTES: usize = 4096;
const MAGIC: &[u8; 8] = b"foretell";

/// A frame that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {0} bytes; 1 to 8,388,608 are allowed")]
    Length(usize),
    #[error("a frame of unknown kind {0}")]
    Kind(u8),
    #[error("a frame that ends too early")]
    Short,
    #[error("a frame with {0} bytes too many")]
    Long(usize),
    #[error("a token id below 0")]
    Token,
    #[error("a text that is no UTF-8, or is longer than 4,096 bytes")]
    Text,
    #[error("the first frame is not a hello of this protocol")]
    Hello,
}

/// The plug-in's introduction of its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Version of the protocol that it speaks.
    pub version: u16,
    /// Maximum draft tokens of a row.
    pub max_draft: u16,
    /// Number of token ids.
    pub vocabulary: u32,
    /// Maximum tokens of a row.
    pub context: u32,
    /// Maximum rows of a step.
    pub rows: u16,
    pub engine: String,
    pub engine_version: String,
    pub model: String,
}

/// A frame of the plug-in.
#[derive(Clone, Debug, PartialEq)]
pub enum Incoming {
    Hello(Hello),
    /// A row begins.
    Row {
        row: u32,
        /// Tokens of its prompt.
        prompt: u32,
        temperature: f32,
        /// Id that the engine gave its request.
        id: String,
    },
    /// Tokens of a row, from this position on.
    Text {
        row: u32,
        from: u32,
        tokens: Vec<TokenId>,
    },
    Step(Step),
    /// Rows that have ended.
    Gone(Vec<u32>),
}

/// A step of the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    pub sequence: u64,
    /// Duration of the engine's step, microseconds; 0 if unknown.
    pub elapsed: u32,
    /// Time that the plug-in waited for the last answer, microseconds.
    pub waited: u32,
    /// Answers that came too late, since the hello.
    pub late: u32,
    /// Steps of the engine since the last frame that sent none.
    pub skipped: u16,
    /// The engine also read prompts in this step.
    pub reads: bool,
    /// The rows, in the engine's order.
    pub rows: Vec<StepRow>,
}

/// A row in a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepRow {
    pub row: u32,
    /// Draft tokens that the engine verified in the step that has ended.
    pub scheduled: u16,
    /// Tokens that the row emitted in it.
    pub sampled: u16,
    /// Maximum draft tokens that it takes now; 0 asks for none.
    pub room: u16,
    /// Tokens of the row.
    pub length: u32,
    /// Its last tokens that were not sent before.
    pub tokens: Vec<TokenId>,
}

/// The drafts for one step: row and tokens of each chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drafts {
    pub sequence: u64,
    /// Steps for which the plug-in need not ask.
    pub pause: u16,
    pub rows: Vec<(u32, Vec<TokenId>)>,
}

/// Reads the bytes of one frame after its length.
///
/// # Errors
/// The frame is not one of the protocol.
pub fn read(frame: &[u8]) -> Result<Incoming, FrameError> {
    let mut bytes = Bytes(frame);
    let incoming = match bytes.u8()? {
        1 => Incoming::Hello(hello(&mut bytes)?),
        2 => Incoming::Row {
            row: bytes.u32()?,
            prompt: bytes.u32()?,
            temperature: f32::from_bits(bytes.u32()?),
            id: bytes.text()?,
        },
        3 => {
            let (row, from, count) = (bytes.u32()?, bytes.u32()?, bytes.u32()?);
            Incoming::Text { row, from, tokens: bytes.tokens(count as usize)? }
        }
        4 => Incoming::Step(step(&mut bytes)?),
        5 => {
            let count = bytes.u16()?;
            Incoming::Gone((0..count).map(|_| bytes.u32()).collect::<Result<_, _>>()?)
        }
        kind => return Err(FrameError::Kind(kind)),
    };
    if bytes.0.is_empty() { Ok(incoming) } else { Err(FrameError::Long(bytes.0.len())) }
}

fn hello(bytes: &mut Bytes<'_>) -> Result<Hello, FrameError> {
    if &bytes.array::<8>()? != MAGIC {
        return Err(FrameError::Hello);
    }
    Ok(Hello {
        version: bytes.u16()?,
        max_draft: bytes.u16()?,
        vocabulary: bytes.u32()?,
        context: bytes.u32()?,
        rows: bytes.u16()?,
        engine: bytes.text()?,
        engine_version: bytes.text()?,
        model: bytes.text()?,
    })
}

fn step(bytes: &mut Bytes<'_>) -> Result<Step, FrameError> {
    let sequence = bytes.u64()?;
    let (elapsed, waited, late) = (bytes.u32()?, bytes.u32()?, bytes.u32()?);
    let (skipped, flags, count) = (bytes.u16()?, bytes.u8()?, bytes.u16()?);
    let rows = (0..count).map(|_| step_row(bytes)).collect::<Result<_, _>>()?;
    Ok(Step { sequence, elapsed, waited, late, skipped, reads: flags & 1 == 1, rows })
}

fn step_row(bytes: &mut Bytes<'_>) -> Result<StepRow, FrameError> {
    let row = bytes.u32()?;
    let (scheduled, sampled, room) = (bytes.u16()?, bytes.u16()?, bytes.u16()?);
    let (length, count) = (bytes.u32()?, bytes.u16()?);
    Ok(StepRow { row, scheduled, sampled, room, length, tokens: bytes.tokens(usize::from(count))? })
}

/// Appends a `welcome`.
pub fn welcome(out: &mut Vec<u8>) {
    framed(out, 128, |out| out.extend(VERSION.to_le_bytes()));
}

/// Appends a `refused` with the reason.
pub fn refused(out: &mut Vec<u8>, why: &str) {
    let why = why.get(..why.floor_char_boundary(TEXT_BYTES)).unwrap_or_default();
    framed(out, 129, |out| {
        out.extend((why.len() as u16).to_le_bytes());
        out.extend(why.as_bytes());
    });
}

/// Appends the `drafts` of one step, as chains of at most 255 tokens.
pub fn drafts(out: &mut Vec<u8>, drafts: &Drafts) {
    framed(out, 130, |out| {
        out.extend(drafts.sequence.to_le_bytes());
        out.extend(drafts.pause.to_le_bytes());
        out.extend((drafts.rows.len() as u16).to_le_bytes());
        for (row, tokens) in &drafts.rows {
            let tokens = tokens.get(..255).unwrap_or(tokens);
            out.extend(row.to_le_bytes());
            out.extend([0, tokens.len() as u8]);
            out.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        }
    });
}

fn framed(out: &mut Vec<u8>, kind: u8, body: impl FnOnce(&mut Vec<u8>)) {
    let from = out.len();
    out.extend([0; 4]);
    out.push(kind);
    body(out);
    let length = (out.len() - from - 4) as u32;
    if let Some(bytes) = out.get_mut(from..from + 4) {
        bytes.copy_from_slice(&length.to_le_bytes());
    }
}

/// Bytes of a frame that have not been read.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or(FrameError::Short)?;
        self.0 = rest;
        Ok(*first)
    }

    fn u8(&mut self) -> Result<u8, FrameError> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, FrameError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, FrameError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, FrameError> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<String, FrameError> {
        let length = usize::from(self.u16()?);
        if length > TEXT_BYTES {
            return Err(FrameError::Text);
        }
        let (text, rest) = self.0.split_at_checked(length).ok_or(FrameError::Short)?;
        self.0 = rest;
        std::str::from_utf8(text).map(str::to_owned).map_err(|_| FrameError::Text)
    }

    fn tokens(&mut self, count: usize) -> Result<Vec<TokenId>, FrameError> {
        let length = count.checked_mul(4).ok_or(FrameError::Short)?;
        let (tokens, rest) = self.0.split_at_checked(length).ok_or(FrameError::Short)?;
        self.0 = rest;
        let id = |bytes: &[u8; 4]| {
            let token = TokenId::from_le_bytes(*bytes);
            if i32::try_from(token).is_ok() { Ok(token) } else { Err(FrameError::Token) }
        };
        let (chunks, _) = tokens.as_chunks::<4>();
        chunks.iter().map(id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello_bytes() -> Vec<u8> {
        let mut bytes = vec![1];
        bytes.extend(MAGIC);
        bytes.extend([1, 0, 16, 0, 0, 192, 0, 0, 0, 32, 0, 0, 0, 1]);
        for text in ["vllm", "0.32.0", "m"] {
            bytes.extend((text.len() as u16).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        bytes
    }

    #[test]
    fn a_hello_is_read() {
        let Ok(Incoming::Hello(hello)) = read(&hello_bytes()) else { panic!() };
        assert_eq!((hello.version, hello.max_draft, hello.vocabulary, hello.context), (1, 16, 49_152, 8_192));
        assert_eq!((hello.rows, &*hello.engine, &*hello.engine_version), (256, "vllm", "0.32.0"));
    }

    #[test]
    fn a_step_is_read() {
        let mut bytes = vec![4];
        bytes.extend(7_u64.to_le_bytes());
        bytes.extend([20_000_u32, 150, 3].iter().flat_map(|word| word.to_le_bytes()));
        bytes.extend([2, 0, 1, 1, 0]);
        bytes.extend([9, 0, 0, 0, 4, 0, 2, 0, 16, 0, 100, 0, 0, 0, 2, 0, 5, 0, 0, 0, 6, 0, 0, 0]);
        let row = StepRow { row: 9, scheduled: 4, sampled: 2, room: 16, length: 100, tokens: vec![5, 6] };
        let step = Step {
            sequence: 7,
            elapsed: 20_000,
            waited: 150,
            late: 3,
            skipped: 2,
            reads: true,
            rows: vec![row],
        };
        assert_eq!(read(&bytes), Ok(Incoming::Step(step)));
        assert_eq!(read(&bytes[..bytes.len() - 1]), Err(FrameError::Short));
        bytes.push(0);
        assert_eq!(read(&bytes), Err(FrameError::Long(1)));
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        assert_eq!(read(&[]), Err(FrameError::Short));
        assert_eq!(read(&[77]), Err(FrameError::Kind(77)));
        assert_eq!(read(&[3, 1, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255]), Err(FrameError::Short));
        assert_eq!(read(&[3, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 128]), Err(FrameError::Token));
        let mut other = hello_bytes();
        other[1] = b'g';
        assert_eq!(read(&other), Err(FrameError::Hello));
    }

    #[test]
    fn drafts_are_written() {
        let mut out = Vec::new();
        drafts(&mut out, &Drafts { sequence: 3, pause: 1, rows: vec![(9, vec![5, 6])] });
        assert_eq!(out[..5], [27, 0, 0, 0, 130]);
        assert_eq!(out[5..17], [3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0]);
        assert_eq!(out[17..], [9, 0, 0, 0, 0, 2, 5, 0, 0, 0, 6, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u8..7) {
            let _ = read(&[&[kind], &*bytes].concat());
        }
    }
}
