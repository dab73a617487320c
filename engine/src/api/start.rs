//! Starting an engine: its pools collected, its worker ready, its control plane listening.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::engine::{Engine, Shared, Threads};
use super::registry::Registry;
use crate::config::{ConfigError, EngineConfig};
use crate::control::{Control, ControlSetup, PeerTable};
use crate::fabric::rdma::RdmaError;
use crate::ids::Incarnation;
use crate::memory::{LayoutError, POOLS_MAX, Pool, PoolId};
use crate::room::cell::Unreleased;
use crate::worker::run::{Ready, WorkerError, WorkerSetup, spawn};
use crate::worker::stats::SharedStats;
use crate::worker::submit::{SUBMISSIONS, Submission};
use crate::worker::wake::{Wakeup, WorkerMail};
use crate::worker::{MAIL, Queues};

/// Reports of the worker that may wait for the control plane; more wait in the worker.
const OUTBOX: usize = 4096;
/// How often counters are published through the `metrics` facade.
const PUBLISH_EVERY: Duration = Duration::from_secs(1);
/// Threads of the control plane: one may be held up by a slow log while the other keeps heartbeats.
const CONTROL_THREADS: usize = 2;

/// An engine could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A setting cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The address cannot be listened on.
    #[error("cannot listen on {addr}: {source}; choose another address, or port 0 for a free one")]
    Listen {
        /// Address asked for.
        addr: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The worker cannot be pinned.
    #[error("cannot pin the worker to CPU {cpu}: {source}; choose a CPU this process may run on")]
    Pin {
        /// CPU asked for.
        cpu: usize,
        /// Why.
        source: std::io::Error,
    },
    /// io_uring is required and refused.
    #[error(
        "io_uring is required and cannot be used: {why}; allow it, or use IoMode::Auto to fall back to epoll"
    )]
    IoUringRefused {
        /// Why.
        why: String,
    },
    /// RDMA is required and cannot be had.
    #[error(
        "RDMA is required and cannot be used: {0}; or use FabricChoice::Auto to fall back to TCP"
    )]
    NoRdma(#[source] RdmaError),
    /// The operating system refused a thread, an event fd or randomness.
    #[error("the operating system refused: {0}")]
    Os(#[from] std::io::Error),
}

/// Collects an engine's pools before it starts: peers are told of them when they meet.
#[derive(Debug)]
pub struct EngineBuilder {
    pub(super) config: EngineConfig,
    pub(super) pools: Vec<Pool>,
}

impl EngineBuilder {
    /// Adds a pool. Both sides pair their pools by name.
    ///
    /// # Errors
    /// [`LayoutError::NotAdded`] for a second pool of a name, or more than [`POOLS_MAX`].
    pub fn pool(&mut self, pool: Pool) -> Result<PoolId, LayoutError> {
        let refused = |why| Err(LayoutError::NotAdded { pool: pool.layout.name.clone(), why });
        if self.pools.len() == POOLS_MAX {
            return refused("an engine has at most 16 pools");
        }
        if self.pools.iter().any(|other| other.layout.name == pool.layout.name) {
            return refused("there is one of this name already");
        }
        self.pools.push(pool);
        Ok(PoolId((self.pools.len() - 1) as u8))
    }

    /// Starts the engine: its worker, pinned and ready, and its control plane, listening.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running.
    pub fn start(self) -> Result<Engine, StartError> {
        let Self { config, pools } = self;
        config.validate()?;
        let config = Arc::new(config);
        let incarnation = Incarnation::draw().map_err(std::io::Error::other)?;
        let epoch_zero = Instant::now();
        let wakeup = Arc::new(Wakeup::new()?);
        let stats = Arc::new(SharedStats::default());
        let (submissions, take_submissions) = mpsc::channel(SUBMISSIONS);
        let (inbox, take_inbox) = mpsc::channel(MAIL);
        let (control, from_worker) = mpsc::channel(OUTBOX);
        let cards = pools.iter().map(Pool::card).collect();
        let pool_pages: Arc<[AtomicU32]> =
            pools.iter().map(|pool| AtomicU32::new(pool.layout.pages)).collect();

        // The worker first: a runtime must not be dropped where another one runs, and this can fail.
        let first_layers = pools.iter().map(|pool| pool.layout.layers.start).collect();
        let (thread, Ready { io, rails }) = spawn(WorkerSetup {
            config: Arc::clone(&config),
            identity: incarnation,
            epoch_zero,
            queues: Queues { submissions: take_submissions, inbox: take_inbox, control },
            wakeup: Arc::clone(&wakeup),
            pools: pools.into_iter().map(|pool| pool.map).collect(),
            first_layers,
            pool_pages: Arc::clone(&pool_pages),
            stats: Arc::clone(&stats),
        })
        .map_err(|error| match error {
            WorkerError::Pin { cpu, source } => StartError::Pin { cpu, source },
            WorkerError::IoUring(why) => StartError::IoUringRefused { why },
            WorkerError::Rdma(source) => StartError::NoRdma(source),
            WorkerError::Os(source) => StartError::Os(source),
        })?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(CONTROL_THREADS)
            .thread_name("kvferry-control")
            .enable_all()
            .build();
        let runtime = match runtime {
            Ok(runtime) => runtime,
            Err(error) => {
                // With its queue closed the worker stops.
                let _ = submissions.try_send(Submission::Stop);
                wakeup.wake();
                let _ = thread.join();
                return Err(error.into());
            }
        };
        let shared = Arc::new(Shared {
            config: Arc::clone(&config),
            incarnation,
            epoch_zero,
            wakeup: Arc::clone(&wakeup),
            submissions,
            peers: Arc::new(PeerTable::default()),
            registry: Registry::default(),
            unreleased: Unreleased::default(),
            next_epoch: AtomicU64::new(1),
            pool_pages,
            drained: Mutex::new(HashSet::new()),
            draining: AtomicBool::new(false),
            runtime: runtime.handle().clone(),
        });
        let setup = ControlSetup {
            config: Arc::clone(&config),
            incarnation,
            cards,
            io: io.io,
            rails: rails.clone(),
            worker: WorkerMail::new(inbox, wakeup),
            from_worker,
            peers: Arc::clone(&shared.peers),
        };
        let control = Control::start(runtime.handle(), setup);
        let threads =
            Threads { thread: Mutex::new(Some(thread)), runtime: Mutex::new(Some(runtime)) };
        let control = match control {
            Ok(control) => control,
            Err(source) => {
                shared.submit_soon(Submission::Stop);
                drop(threads);
                return Err(match config.listen {
                    Some(addr) => StartError::Listen { addr, source },
                    None => StartError::Os(source),
                });
            }
        };
        let label: Arc<str> =
            if config.name.is_empty() { incarnation.to_string() } else { config.name.clone() }
                .into();
        let lane_io = io.io;
        shared.runtime.spawn(async move {
            let mut ticks = tokio::time::interval(PUBLISH_EVERY);
            loop {
                ticks.tick().await;
                crate::observe::publish(&label, lane_io, &stats);
            }
        });
        Ok(Engine { shared, control, io, rails, threads })
    }
}
