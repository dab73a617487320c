//! `kvferry`: measures the engine on this host, and says what this host can do.

mod bench;
mod cpu;
mod doctor;
mod peer;
mod plain;
mod shape;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Rooms over loopback, the engine and plain writev/readv in turns, with their ratio.
    Bench(bench::Args),
    /// What this host offers: io_uring, RDMA devices, GPUs; and how to mend what it lacks.
    Doctor,
    /// The receiving process of a measurement; started by `bench`.
    #[command(hide = true)]
    Peer(peer::Args),
}

fn main() -> Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()),
        )
        .with_writer(std::io::stderr)
        .init();
    match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Doctor => doctor::run(),
        Command::Peer(args) => peer::run(&args),
    }
}
