//! Starts a prefill and a decode process, feeds both the same prompts, and checks every token.
//! See `kvferry_examples::pair`.

use std::process::ExitCode;

use clap::Parser;
use kvferry_examples::node::to_exit_code;
use kvferry_examples::pair::{PairArgs, run};

fn main() -> ExitCode {
    to_exit_code("pd-pair", || run(&PairArgs::parse()))
}
