#![no_main]
libfuzzer_sys::fuzz_target!(|input: &[u8]| foretell_fuzz::drafts::run(input));
