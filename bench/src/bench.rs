//! Rooms between two processes of this host, the engine and the yardstick in turns.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use comfy_table::Table;
use kvferry::{Chunk, Engine, EngineConfig, OpenOptions, PoolId, block_on};

use crate::shape::{Shape, now_us};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    shape: Shape,
    /// Measured rooms of each kind.
    #[arg(long, default_value_t = 11)]
    rooms: u64,
    /// Rooms of each kind before measuring.
    #[arg(long, default_value_t = 3)]
    warmup: u64,
    /// Afterwards, watch both engines idle for this many seconds.
    #[arg(long, default_value_t = 0)]
    idle_s: u64,
    /// Afterwards, run this many one-page rooms and compare memory and file descriptors.
    #[arg(long, default_value_t = 0)]
    growth: u64,
    /// One JSON line instead of the table.
    #[arg(long)]
    json: bool,
}

/// One measured room.
#[derive(Clone, Copy, Debug)]
struct Sample {
    us: f64,
    cpu_us: f64,
}

struct Peer {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Peer {
    fn start(shape: &Shape, engine: &Engine, plain: &TcpListener) -> Result<Self> {
        let connect = engine.listen_addr().context("the engine does not listen")?;
        let mut child = Command::new(std::env::current_exe()?)
            .arg("peer")
            .args(shape.to_args())
            .args(["--connect", &connect.to_string(), "--plain", &plain.local_addr()?.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take().context("no stdin")?;
        let stdout = BufReader::new(child.stdout.take().context("no stdout")?);
        Ok(Self { child, stdin, stdout })
    }

    fn tell(&mut self, line: &str) -> Result<()> {
        writeln!(self.stdin, "{line}")?;
        Ok(self.stdin.flush()?)
    }

    fn answer(&mut self) -> Result<Vec<u64>> {
        let mut line = String::new();
        if self.stdout.read_line(&mut line)? == 0 {
            bail!("the receiving process went away");
        }
        if line.trim() == "ready" {
            return Ok(Vec::new());
        }
        line.split_whitespace().map(|word| Ok(word.parse()?)).collect()
    }

    fn pair(&mut self) -> Result<(u64, u64)> {
        match self.answer()?[..] {
            [first, second] => Ok((first, second)),
            _ => bail!("the receiving process answered something else"),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let shape = &args.shape;
    let listen: std::net::SocketAddr = "127.0.0.1:0".parse()?;
    let (engine, _pool) =
        shape.engine(EngineConfig::default().name("bench-sender").listen(listen), false)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut peer = Peer::start(shape, &engine, &listener)?;
    let mut plain = crate::plain::Sender::accept(&listener, shape)?;
    peer.answer()?;
    let sources: std::sync::Arc<[u32]> = shape.sources().into();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..args.warmup + args.rooms {
        let kvferry = room(&engine, &mut peer, round, &sources)?;
        let yardstick = plain_room(&mut plain, &mut peer)?;
        if round >= args.warmup {
            ours.push(kvferry);
            theirs.push(yardstick);
        }
    }
    report(args, &engine, &ours, &theirs)?;
    if args.idle_s > 0 {
        idle(args, &mut peer)?;
    }
    if args.growth > 0 {
        growth(args, &engine, &mut peer)?;
    }
    drop(peer);
    block_on(engine.shutdown(Duration::from_secs(1)));
    Ok(())
}

/// One room: from before the first write to the later of both sides' knowing that it is done.
fn room(
    engine: &Engine,
    peer: &mut Peer,
    id: u64,
    sources: &std::sync::Arc<[u32]>,
) -> Result<Sample> {
    let room = engine.open(id.into(), OpenOptions::default())?;
    peer.tell(&format!("room {id}"))?;
    let granted = block_on(room.granted())?;
    let cpu = crate::cpu::used_us();
    let start = now_us();
    let positions =
        granted.pools.first().map_or(0, |pool| pool.positions).min(sources.len() as u32);
    let pages: std::sync::Arc<[u32]> = sources[..positions as usize].into();
    block_on(room.write(Chunk::new(PoolId::FIRST, pages, 0..positions)))?;
    room.finish(bytes::Bytes::new())?;
    block_on(room.done())?;
    let end = now_us();
    let cpu = crate::cpu::used_us() - cpu;
    block_on(room.released());
    let (landed, peer_cpu) = peer.pair()?;
    Ok(Sample { us: (end.max(landed) - start) as f64, cpu_us: (cpu + peer_cpu) as f64 })
}

fn plain_room(plain: &mut crate::plain::Sender, peer: &mut Peer) -> Result<Sample> {
    peer.tell("plain")?;
    let cpu = crate::cpu::used_us();
    let start = now_us();
    plain.send()?;
    let end = now_us();
    let cpu = crate::cpu::used_us() - cpu;
    let (landed, peer_cpu) = peer.pair()?;
    Ok(Sample { us: (end.max(landed) - start) as f64, cpu_us: (cpu + peer_cpu) as f64 })
}

fn report(args: &Args, engine: &Engine, ours: &[Sample], theirs: &[Sample]) -> Result<()> {
    let bytes = args.shape.room_bytes() as f64;
    let rate = |samples: &[Sample]| sorted(samples.iter().map(|sample| bytes / sample.us / 1e3));
    let cost =
        |samples: &[Sample]| sorted(samples.iter().map(|sample| sample.cpu_us / bytes * 1e3));
    let ratio = sorted(ours.iter().zip(theirs).map(|(our, their)| their.us / our.us));
    let io = engine.io().io.to_string();
    if args.json {
        let line = serde_json::json!({
            "page_bytes": args.shape.page_bytes,
            "pages": args.shape.pages,
            "rooms": args.rooms,
            "io": io,
            "gbytes_per_s": spread(&rate(ours)),
            "plain_gbytes_per_s": spread(&rate(theirs)),
            "ratio": spread(&ratio),
            "cpu_s_per_gb": spread(&cost(ours)),
            "plain_cpu_s_per_gb": spread(&cost(theirs)),
        });
        println!("{line}");
        return Ok(());
    }
    let mut table = Table::new();
    table.set_header(["", "GB/s median", "range", "CPU s/GB"]);
    for (name, samples) in
        [(format!("kvferry tcp/{io}"), ours), ("plain writev/readv".to_owned(), theirs)]
    {
        let [median, low, high] = spread(&rate(samples));
        let [cpu, ..] = spread(&cost(samples));
        table.add_row([
            name,
            format!("{median:.2}"),
            format!("{low:.2}–{high:.2}"),
            format!("{cpu:.2}"),
        ]);
    }
    let [median, low, high] = spread(&ratio);
    println!(
        "{} pages of {} bytes, {} rooms each in turns",
        args.shape.pages, args.shape.page_bytes, args.rooms
    );
    println!("{table}");
    println!("ratio (kvferry / plain, pairs): {median:.2} ({low:.2}–{high:.2})");
    Ok(())
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Median, least and greatest.
fn spread(sorted: &[f64]) -> [f64; 3] {
    match (sorted.first(), sorted.get(sorted.len() / 2), sorted.last()) {
        (Some(&low), Some(&median), Some(&high)) => [median, low, high],
        _ => [f64::NAN; 3],
    }
}

fn idle(args: &Args, peer: &mut Peer) -> Result<()> {
    peer.tell(&format!("idle {}", args.idle_s))?;
    let cpu = crate::cpu::used_us();
    std::thread::sleep(Duration::from_secs(args.idle_s));
    let ours = crate::cpu::used_us() - cpu;
    let (_, theirs) = peer.pair()?;
    let percent = |us: u64| us as f64 / (args.idle_s as f64 * 1e6) * 100.0;
    println!(
        "idle for {} s: sender {:.2} % of a core, receiver {:.2} %",
        args.idle_s,
        percent(ours),
        percent(theirs)
    );
    Ok(())
}

fn growth(args: &Args, engine: &Engine, peer: &mut Peer) -> Result<()> {
    let one: std::sync::Arc<[u32]> = args.shape.sources()[..1].into();
    let mut id = 1 << 32;
    let mut rooms = |count: u64, peer: &mut Peer| -> Result<()> {
        for _ in 0..count {
            room(engine, peer, id, &one)?;
            id += 1;
        }
        Ok(())
    };
    // The tables grow to their working size first.
    rooms((args.growth / 10).max(100), peer)?;
    let state = |peer: &mut Peer| -> Result<[u64; 4]> {
        peer.tell("state")?;
        let (kib, files) = peer.pair()?;
        Ok([crate::peer::resident_kib()?, crate::peer::open_files()?, kib, files])
    };
    let before = state(peer)?;
    let start = now_us();
    rooms(args.growth, peer)?;
    let us = (now_us() - start) as f64 / args.growth as f64;
    let after = state(peer)?;
    println!("{} one-page rooms, {us:.0} µs each with their grant:", args.growth);
    println!(
        "  sender   {} -> {} KiB resident, {} -> {} files",
        before[0], after[0], before[1], after[1]
    );
    println!(
        "  receiver {} -> {} KiB resident, {} -> {} files",
        before[2], after[2], before[3], after[3]
    );
    Ok(())
}
