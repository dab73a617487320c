//! The receiving process: told what to do in lines on stdin, answering in lines on stdout.

use std::io::{BufRead, Write};
use std::net::SocketAddr;

use anyhow::{Context, Result, bail};
use kvferry::{EngineConfig, GrantSpec, PoolId, block_on};

use crate::shape::{Shape, now_us};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) shape: Shape,
    /// Where the sending engine listens.
    #[arg(long)]
    pub(crate) connect: SocketAddr,
    /// Where the plain receiver is to connect.
    #[arg(long)]
    pub(crate) plain: SocketAddr,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let (engine, pool) = args.shape.engine(EngineConfig::default().name("bench-receiver"), true)?;
    let peer = block_on(engine.connect(args.connect))?;
    let mut plain = crate::plain::Receiver::connect(args.plain, &args.shape, &pool)?;
    let targets: std::sync::Arc<[u32]> = args.shape.targets().into();
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready")?;
    out.flush()?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let mut words = line.split_whitespace();
        let cpu = crate::cpu::used_us();
        match words.next() {
            Some("room") => {
                let id: u64 = words.next().context("a room needs an id")?.parse()?;
                let spec = GrantSpec::new(id.into()).pages(PoolId::FIRST, targets.clone());
                let room = engine.grant(peer, spec)?;
                block_on(room.done())?;
                let at = now_us();
                block_on(room.released());
                writeln!(out, "{at} {}", crate::cpu::used_us() - cpu)?;
            }
            Some("plain") => {
                plain.receive()?;
                writeln!(out, "{} {}", now_us(), crate::cpu::used_us() - cpu)?;
            }
            Some("idle") => {
                let seconds: u64 = words.next().context("idle needs seconds")?.parse()?;
                std::thread::sleep(std::time::Duration::from_secs(seconds));
                writeln!(out, "{} {}", now_us(), crate::cpu::used_us() - cpu)?;
            }
            Some("state") => writeln!(out, "{} {}", resident_kib()?, open_files()?)?,
            other => bail!("unknown command {other:?}"),
        }
        out.flush()?;
    }
    Ok(())
}

/// Resident memory of this process in KiB.
pub(crate) fn resident_kib() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse()?)
}

/// Open file descriptors of this process.
pub(crate) fn open_files() -> Result<u64> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count() as u64)
}
