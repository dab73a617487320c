#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvferry::fuzzing::greeting(bytes));
