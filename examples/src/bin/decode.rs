//! The decode process. See `kvferry_examples::decode`.

use std::process::ExitCode;

use clap::Parser;
use kvferry_examples::decode::{DecodeArgs, run};
use kvferry_examples::node::to_exit_code;

fn main() -> ExitCode {
    to_exit_code("decode", || run(&DecodeArgs::parse()))
}
