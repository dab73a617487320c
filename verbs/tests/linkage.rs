//! A program built with this crate starts on hosts without libibverbs. Alone in its process, since
//! other tests load it.
#![cfg(feature = "rdma")]

use std::hint::black_box;

use kvferry_verbs::{Context, Library, Pd, Qp};

/// The linker keeps what is used, so a test must use what would need it.
#[test]
fn no_program_needs_libibverbs_to_start() {
    black_box(Context::open as *const ());
    black_box(Pd::create_qp as *const ());
    black_box(Qp::destroy as *const ());
    black_box(Library::open as *const ());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    // What a program needs is mapped when it starts, as the C library is.
    assert!(maps.contains("libc.so"), "this cannot tell: {maps}");
    assert!(!maps.contains("libibverbs"), "{maps}");
}
