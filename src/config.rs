//! The process file and the policies: raw text to validated values.
