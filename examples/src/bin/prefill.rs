//! The prefill process. See `kvferry_examples::prefill`.

use std::process::ExitCode;

use clap::Parser;
use kvferry_examples::node::to_exit_code;
use kvferry_examples::prefill::{PrefillArgs, run};

fn main() -> ExitCode {
    to_exit_code("prefill", || run(&PrefillArgs::parse()))
}
