//! The worker's thread: pinned, then its ring opened, then ready; turning until it is stopped.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::stats::SharedStats;
use super::wake::Wakeup;
use super::{Limits, Queues, Worker};
use crate::config::{EngineConfig, FabricChoice, IoMode};
use crate::fabric::rdma::{Rails, RdmaError, RdmaFabric};
use crate::fabric::tcp::TcpFabric;
use crate::fabric::tcp::driver::Driver;
use crate::fabric::tcp::epoll::Epoll;
use crate::fabric::{Fabric, Routed};
use crate::ids::{Incarnation, Micros};
use crate::memory::PageMap;
use crate::wire::message::LaneIo;

/// Longest sleep: how stale published counters can be.
const SLEEP_MAX: Duration = Duration::from_millis(500);
/// Longest sleep while something waits for a queue to have room: nobody says when it has.
const BACKLOG_SLEEP: Duration = Duration::from_millis(1);
/// Turns between two looks at the published counters while busy.
const TURNS_PER_PUBLISH: u64 = 1024;
/// Polls of an idle worker between two looks at the clock.
const SPINS_PER_CLOCK: u32 = 16;

/// What a worker is made from.
#[derive(Debug)]
pub(crate) struct WorkerSetup {
    pub(crate) config: Arc<EngineConfig>,
    pub(crate) identity: Incarnation,
    pub(crate) epoch_zero: Instant,
    pub(crate) queues: Queues,
    pub(crate) wakeup: Arc<Wakeup>,
    pub(crate) pools: Vec<Arc<PageMap>>,
    /// First layer of each pool, by its number in the model.
    pub(crate) first_layers: Vec<u32>,
    pub(crate) pool_pages: Arc<[AtomicU32]>,
    pub(crate) stats: Arc<SharedStats>,
}

/// How the worker does I/O, and why not better.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoReport {
    /// How lanes are read and written.
    pub io: LaneIo,
    /// Completions are run when the worker asks for them (`IORING_SETUP_DEFER_TASKRUN`, Linux 6.1).
    pub defer_taskrun: bool,
    /// The kernel has vectored zero-copy sends (`SENDMSG_ZC`, Linux 6.1).
    pub sendmsg_zc: bool,
    /// Why io_uring is not used, when it is not.
    pub why_not: Option<String>,
}

/// The worker could not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkerError {
    #[error("cannot pin the worker to CPU {cpu}: {source}")]
    Pin { cpu: usize, source: std::io::Error },
    #[error("io_uring is required and cannot be used: {0}")]
    IoUring(String),
    #[error(transparent)]
    Rdma(RdmaError),
    #[error(transparent)]
    Os(#[from] std::io::Error),
}

/// What a worker that is ready reports.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) io: IoReport,
    /// The rails that were opened, or why there are none.
    pub(crate) rails: Result<Arc<Rails>, String>,
}

/// Starts the worker's thread and waits until it is ready.
pub(crate) fn spawn(setup: WorkerSetup) -> Result<(JoinHandle<()>, Ready), WorkerError> {
    let (ready, wait) = std::sync::mpsc::sync_channel(1);
    let thread =
        std::thread::Builder::new().name("kvferry-worker".to_owned()).spawn(move || {
            if let Some(cpu) = setup.config.worker_cpu
                && let Err(source) = pin(cpu)
            {
                let _ = ready.send(Err(WorkerError::Pin { cpu, source }));
                return;
            }
            // Devices are opened here, by the thread that uses them, after it was pinned.
            let opened = open_driver(&setup).and_then(|(driver, io)| {
                let (rdma, rails) = open_rails(&setup)?;
                Ok((driver, rdma, Ready { io, rails }))
            });
            match opened {
                #[cfg(feature = "io-uring")]
                Ok((Opened::Uring(driver), rdma, report)) => {
                    let _ = ready.send(Ok(report));
                    run(setup, driver, rdma);
                }
                Ok((Opened::Epoll(driver), rdma, report)) => {
                    let _ = ready.send(Ok(report));
                    run(setup, driver, rdma);
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        })?;
    match wait.recv() {
        Ok(Ok(report)) => Ok((thread, report)),
        Ok(Err(error)) => Err(error),
        Err(_) => {
            Err(WorkerError::Os(std::io::Error::other("the worker ended before it was ready")))
        }
    }
}

fn pin(cpu: usize) -> std::io::Result<()> {
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(std::io::Error::from(rustix::io::Errno::INVAL));
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

#[cfg_attr(
    feature = "io-uring",
    expect(clippy::large_enum_variant, reason = "one, moved once at start")
)]
enum Opened {
    #[cfg(feature = "io-uring")]
    Uring(crate::fabric::tcp::uring::Uring),
    Epoll(Epoll),
}

fn open_driver(setup: &WorkerSetup) -> Result<(Opened, IoReport), WorkerError> {
    let why_not = match setup.config.io {
        IoMode::Epoll => "epoll was asked for".to_owned(),
        #[cfg(feature = "io-uring")]
        IoMode::Auto | IoMode::RequireIoUring => {
            match crate::fabric::tcp::uring::Uring::new(Arc::clone(&setup.wakeup)) {
                Ok((driver, features)) => {
                    let report = IoReport {
                        io: LaneIo::IoUring,
                        defer_taskrun: features.defer_taskrun,
                        sendmsg_zc: features.sendmsg_zc,
                        why_not: None,
                    };
                    if !features.defer_taskrun || !features.sendmsg_zc {
                        tracing::info!(
                            defer_taskrun = features.defer_taskrun,
                            sendmsg_zc = features.sendmsg_zc,
                            "io_uring is used without what this kernel lacks"
                        );
                    }
                    return Ok((Opened::Uring(driver), report));
                }
                Err(why) => why,
            }
        }
        #[cfg(not(feature = "io-uring"))]
        IoMode::Auto | IoMode::RequireIoUring => {
            "kvferry was built without the feature io-uring".to_owned()
        }
    };
    if setup.config.io == IoMode::RequireIoUring {
        return Err(WorkerError::IoUring(why_not));
    }
    if setup.config.io == IoMode::Auto {
        tracing::warn!(why = %why_not, "io_uring cannot be used; lanes go over epoll");
    }
    let driver = Epoll::new(Arc::clone(&setup.wakeup)).map_err(std::io::Error::from)?;
    let report = IoReport {
        io: LaneIo::Epoll,
        defer_taskrun: false,
        sendmsg_zc: false,
        why_not: Some(why_not),
    };
    Ok((Opened::Epoll(driver), report))
}

/// Opens the rails, if they are wanted and can be had.
fn open_rails(setup: &WorkerSetup) -> Result<OpenedRails, WorkerError> {
    let EngineConfig { fabric, rdma, .. } = &*setup.config;
    if *fabric == FabricChoice::Tcp {
        return Ok((None, Err("TCP was asked for".to_owned())));
    }
    let opened = Rails::open(rdma, &setup.pools, &setup.first_layers)
        .and_then(|rails| Ok((RdmaFabric::new(Arc::clone(&rails))?, rails)));
    match opened {
        Ok((worker, rails)) => Ok((Some(worker), Ok(rails))),
        Err(error) if *fabric == FabricChoice::RequireRdma => Err(WorkerError::Rdma(error)),
        Err(error) => {
            let why = error.to_string();
            // A host without RDMA is no news; one whose RDMA does not work is.
            if error.is_absence() {
                tracing::debug!(%why, "pages go over TCP");
            } else {
                tracing::warn!(%why, "RDMA cannot be used; pages go over TCP");
            }
            Ok((None, Err(why)))
        }
    }
}

type OpenedRails = (Option<RdmaFabric>, Result<Arc<Rails>, String>);

fn run<D: Driver>(setup: WorkerSetup, driver: D, rdma: Option<RdmaFabric>) {
    let WorkerSetup {
        config, identity, epoch_zero, queues, wakeup, pools, pool_pages, stats, ..
    } = setup;
    let fabric = Routed::new(TcpFabric::new(driver, config.zero_copy), rdma);
    let limits = Limits {
        max_rooms: config.max_rooms as usize,
        max_peers: config.max_peers as usize,
        fence_after_ms: config.fence_after_ms,
    };
    let pools = (pools, pool_pages);
    let mut worker = Worker::new(identity, fabric, queues, pools, limits, stats);
    let clock = || Micros(u64::try_from(epoch_zero.elapsed().as_micros()).unwrap_or(u64::MAX));
    // A panic is a bug of ours. It must not leave callers waiting: rooms are ended all the same.
    let ran =
        catch_unwind(AssertUnwindSafe(|| turn_until_stopped(&mut worker, &config, &wakeup, clock)));
    let cause = match ran {
        Ok(()) => "the engine was shut down",
        Err(_) => "the worker panicked; this is a bug, report it with the log",
    };
    if !worker.close(clock(), cause) {
        tracing::error!("the kernel did not let go of the lanes' memory; it is leaked");
        std::mem::forget(worker);
    }
}

fn turn_until_stopped<D: Driver>(
    worker: &mut Worker<Routed<D>>,
    config: &EngineConfig,
    wakeup: &Wakeup,
    clock: impl Fn() -> Micros,
) {
    let mut now = clock();
    let mut idle_since = now;
    let mut spins = 0u32;
    let mut turns = 0u64;
    loop {
        let progress = worker.turn(now);
        turns += 1;
        if turns.is_multiple_of(TURNS_PER_PUBLISH) {
            worker.publish_stats();
            // Also drops the deadlines of rooms that have ended.
            worker.next_deadline();
        }
        if progress {
            now = clock();
            idle_since = now;
            continue;
        }
        if worker.is_stopped() {
            break;
        }
        if worker.fabric_mut().spins() {
            spins = (spins + 1) % SPINS_PER_CLOCK;
            if spins != 0 {
                std::hint::spin_loop();
                continue;
            }
            now = clock();
            if now.since(idle_since) < config.spin_us {
                continue;
            }
        }
        wakeup.prepare_sleep();
        now = clock();
        // Once more, now that whoever puts something in a queue will wake the worker for it.
        if !worker.turn(now) {
            worker.note_sleep();
            let due = worker.next_deadline();
            let longest = if worker.has_backlog() { BACKLOG_SLEEP } else { SLEEP_MAX };
            let until_due = due.map_or(longest, |at| Duration::from_micros(at.since(now)));
            worker.fabric_mut().sleep(until_due.min(longest));
        }
        wakeup.awake();
        now = clock();
        idle_since = now;
    }
    worker.publish_stats();
}
