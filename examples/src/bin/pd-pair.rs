//! Starts a prefill and a decode process, feeds both the same prompts, and checks every token.
//! See `kvferry_examples::pair`.

use clap::Parser;
use kvferry_examples::node::init_logging;
use kvferry_examples::pair::{PairArgs, run};

fn main() -> anyhow::Result<()> {
    init_logging();
    run(&PairArgs::parse())
}
