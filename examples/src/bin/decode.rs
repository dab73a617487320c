//! The decode process. See `kvferry_examples::decode`.

use clap::Parser;
use kvferry_examples::decode::{DecodeArgs, run};
use kvferry_examples::node::init_logging;

fn main() -> anyhow::Result<()> {
    init_logging();
    run(&DecodeArgs::parse())
}
