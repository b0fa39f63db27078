//! Reading an input: choices from its first bytes, the rest as text or bodies.

/// The rest of an input. At its end every choice is the first one.
pub struct Bytes<'a>(pub &'a [u8]);

impl<'a> Bytes<'a> {
    /// The next byte; 0 at the end.
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// A number below `bound`, by one byte.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound.max(1)
    }

    /// One of these.
    pub fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// True if there is nothing left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The rest, cut at the separator that no JSON text contains.
    pub fn bodies(&self) -> Vec<&'a [u8]> {
        self.0.split(|&byte| byte == SEPARATOR).collect()
    }
}

/// Stands between the bodies of an input: the record separator of ASCII.
pub const SEPARATOR: u8 = 0x1e;
