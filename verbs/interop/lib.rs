//! Holds tests only: `tests/interop.rs`.
