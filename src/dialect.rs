//! How each engine is spoken to: what to send, how to read the answer.
//!
//! PURE codecs; one file per engine.
