//! The prefill process. See `kvferry_examples::prefill`.

use clap::Parser;
use kvferry_examples::prefill::{PrefillArgs, run};
use kvferry_examples::node::init_logging;

fn main() -> anyhow::Result<()> {
    init_logging();
    run(&PrefillArgs::parse())
}
