//! The control plane: sessions between engines, who is alive, and the lanes that carry pages.
//!
//! One TCP session a pair of engines, whoever dialed. A task a peer owns the session and reports to
//! the worker through one bounded queue; a task an address dials and redials; a task listens. All of
//! them end when the control plane is shut down.

mod backoff;
mod dial;
mod error;
mod framing;
mod handshake;
mod lanes;
mod listen;
mod peer;
mod peer_table;
mod proof;
mod rails;
mod session;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};

pub use error::{ConnectError, ConnectStage};
pub(crate) use peer_table::PeerTable;

use crate::config::{EngineConfig, FabricChoice};
use crate::fabric::rdma::Rails;
use crate::ids::Incarnation;
use crate::memory::PoolCard;
use crate::wire::message::{Carriers, LaneIo, Refusal};
use crate::worker::mail::ToControl;
use crate::worker::wake::WorkerMail;
use dial::Target;
use handshake::{Identity, one_line};
use lanes::{LaneNumbers, Tokens};
use peer::{Letter, Peer, Verdict};
use session::{NewSession, heartbeat};

/// Longest that a goodbye may take: the peer's last messages, and its closing of the session.
const FAREWELL: Duration = Duration::from_millis(500);
/// Longest that an orderly shutdown may take before what is left of it is dropped.
const SHUTDOWN: Duration = Duration::from_secs(2);

/// What the control plane is made from.
#[derive(Debug)]
pub(crate) struct ControlSetup {
    pub(crate) config: Arc<EngineConfig>,
    pub(crate) incarnation: Incarnation,
    /// Our pools, in our order.
    pub(crate) cards: Vec<PoolCard>,
    pub(crate) io: LaneIo,
    /// The rails that were opened, or why there are none.
    pub(crate) rails: Result<Arc<Rails>, String>,
    pub(crate) worker: WorkerMail,
    pub(crate) from_worker: mpsc::Receiver<ToControl>,
    pub(crate) peers: Arc<PeerTable>,
}

/// How far the control plane is on its way out. Only ever moves forward.
#[derive(Clone, Debug)]
enum Phase {
    Running,
    /// New peers are refused, those known are told.
    Draining,
    /// Peers are told goodbye, for this reason.
    Closing(String),
    /// Whatever still runs is dropped where it stands.
    Closed,
}

/// What every task of the control plane shares.
#[derive(Debug)]
struct Core {
    config: Arc<EngineConfig>,
    identity: Identity,
    peers: Arc<PeerTable>,
    worker: WorkerMail,
    rails: Result<Arc<Rails>, String>,
    tokens: Tokens,
    lane_numbers: LaneNumbers,
    registry: Mutex<HashMap<Incarnation, Registered>>,
    targets: Mutex<HashMap<SocketAddr, Target>>,
    phase: watch::Sender<Phase>,
    rt: Handle,
}

#[derive(Debug)]
struct Registered {
    peer: Arc<Peer>,
    /// Where it listens, as far as this side can tell: another incarnation from there is its
    /// successor.
    home: Option<SocketAddr>,
}

/// A session that is not let in.
#[derive(Debug)]
enum NotAdmitted {
    Refused(Box<NewSession>, Refusal),
    Stopped,
}

/// The control plane of an engine. Clones are the same one.
#[derive(Clone, Debug)]
pub(crate) struct Control {
    core: Arc<Core>,
    listen_addr: Option<SocketAddr>,
}

impl Control {
    /// Binds and begins to accept.
    ///
    /// # Errors
    /// The operating system's, when the address cannot be bound.
    pub(crate) fn start(rt: &Handle, setup: ControlSetup) -> Result<Self, io::Error> {
        let ControlSetup { config, incarnation, cards, io, rails, worker, from_worker, peers } =
            setup;
        let listener = config.listen.map(listen::bind).transpose()?;
        let listen_addr = listener.as_ref().map(std::net::TcpListener::local_addr).transpose()?;
        let identity = Identity {
            incarnation,
            name: config.name.clone(),
            secret: config.secret.clone(),
            lanes: config.lanes,
            carriers: match (&rails, config.fabric) {
                (Err(_), _) => Carriers::Tcp,
                (Ok(_), FabricChoice::RequireRdma) => Carriers::RdmaOnly,
                (Ok(_), _) => Carriers::RdmaOrTcp,
            },
            io,
            silent_ms: config.peer_silent_ms,
            listen_port: listen_addr.map(|addr| addr.port()),
            pools: cards,
        };
        let core = Arc::new(Core {
            config,
            identity,
            peers,
            worker,
            rails,
            tokens: Tokens::default(),
            lane_numbers: LaneNumbers::default(),
            registry: Mutex::default(),
            targets: Mutex::default(),
            phase: watch::Sender::new(Phase::Running),
            rt: rt.clone(),
        });
        core.watch_rails()?;
        if let Some(listener) = listener {
            let listener = {
                let _entered = rt.enter();
                tokio::net::TcpListener::from_std(listener)?
            };
            core.spawn(listen::run(Arc::clone(&core), listener));
        }
        // Not one of the tasks that shutdown waits for: rooms end, and lanes close, after it. It ends
        // with the worker.
        rt.spawn(hear_worker(Arc::clone(&core), from_worker));
        Ok(Self { core, listen_addr })
    }

    /// The address bound, with the port that was chosen.
    pub(crate) const fn listen_addr(&self) -> Option<SocketAddr> {
        self.listen_addr
    }

    /// Connects, and resolves when the session and at least one lane stand. From then on the address
    /// is redialed after every loss, until [`Control::disconnect`] or [`Control::shutdown`].
    ///
    /// # Errors
    /// [`ConnectError`], saying which step failed.
    pub(crate) async fn connect(&self, addr: SocketAddr) -> Result<Incarnation, ConnectError> {
        dial::connect(&self.core, addr).await
    }

    /// Says goodbye to a peer, and forgets the addresses it was dialed at. Resolves when the worker
    /// has been told.
    pub(crate) async fn disconnect(&self, peer: Incarnation, reason: &str) {
        lock(&self.core.targets).retain(|_, target| !target.is_of(peer));
        if let Some(peer) = self.core.peer(peer) {
            peer.orders.send_modify(|orders| orders.leave = Some(one_line(reason)));
            peer.gone().await;
        }
    }

    /// Tells one peer, or all of them, that this engine takes no more rooms. For all of them it also
    /// refuses peers that it does not know yet; those it knows may come back.
    pub(crate) fn drain(&self, peer: Option<Incarnation>) {
        let order = |peer: &Peer| peer.orders.send_modify(|orders| orders.drain = true);
        if let Some(peer) = peer {
            if let Some(peer) = self.core.peer(peer) {
                order(&peer);
            }
            return;
        }
        self.core.phase.send_if_modified(|phase| {
            let runs = matches!(phase, Phase::Running);
            if runs {
                *phase = Phase::Draining;
            }
            runs
        });
        // A peer that is registered from here on finds the phase changed.
        lock(&self.core.registry).values().for_each(|known| order(&known.peer));
    }

    /// Says goodbye to all peers and ends every task, within [`SHUTDOWN`].
    pub(crate) async fn shutdown(&self, reason: &str) {
        let phase = &self.core.phase;
        phase.send_if_modified(|phase| {
            let open = matches!(phase, Phase::Running | Phase::Draining);
            if open {
                *phase = Phase::Closing(one_line(reason));
            }
            open
        });
        lock(&self.core.targets).clear();
        if tokio::time::timeout(SHUTDOWN, phase.closed()).await.is_err() {
            tracing::warn!("the control plane is shut down before every peer was told");
        }
        phase.send_replace(Phase::Closed);
        phase.closed().await;
    }
}

impl Core {
    /// Runs a task that ends, wherever it is, when the control plane is closed. What it holds of the
    /// phase is how shutdown knows that it runs.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut phase = self.phase.subscribe();
        self.rt.spawn(async move {
            tokio::select! {
                () = task => {}
                _ = phase.wait_for(|phase| matches!(phase, Phase::Closed)) => {}
            }
        });
    }

    /// Has every peer's task look at its lanes again.
    fn rouse_peers(&self) {
        let rouse = |peer: &Peer| peer.orders.send_modify(|orders| orders.rails_changed += 1);
        lock(&self.registry).values().for_each(|known| rouse(&known.peer));
    }

    fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.config.connect_timeout_ms)
    }

    fn is_draining(&self) -> bool {
        !matches!(*self.phase.borrow(), Phase::Running)
    }

    /// Why the engine goes away, once it does.
    fn closing_reason(&self) -> Option<String> {
        match &*self.phase.borrow() {
            Phase::Running | Phase::Draining => None,
            Phase::Closing(reason) => Some(reason.clone()),
            Phase::Closed => Some(String::new()),
        }
    }

    /// Resolves when the engine goes away.
    async fn closing(&self) {
        let closing = |phase: &Phase| matches!(phase, Phase::Closing(_) | Phase::Closed);
        let _ = self.phase.subscribe().wait_for(closing).await;
    }

    fn peer(&self, incarnation: Incarnation) -> Option<Arc<Peer>> {
        lock(&self.registry).get(&incarnation).map(|known| Arc::clone(&known.peer))
    }

    /// Takes a peer whose task ends out of the registry, unless another task has taken its place.
    fn forget(&self, peer: &Arc<Peer>) {
        let mut registry = lock(&self.registry);
        if registry.get(&peer.incarnation).is_some_and(|known| Arc::ptr_eq(&known.peer, peer)) {
            registry.remove(&peer.incarnation);
        }
    }

    /// Hands an authenticated session to its peer's task.
    async fn admit(self: &Arc<Self>, mut session: Box<NewSession>) -> Result<(), NotAdmitted> {
        let incarnation = session.greeted.hello.incarnation;
        let home = session.home();
        self.settle_elders(incarnation, home).await;
        loop {
            let peer = match self.register(incarnation, home, session.dialed) {
                Ok(peer) => peer,
                Err(refusal) => return Err(NotAdmitted::Refused(session, refusal)),
            };
            session = match peer.offer(session).await {
                Some(Verdict::Taken) => return Ok(()),
                Some(Verdict::Duplicate(session)) => {
                    return Err(NotAdmitted::Refused(session, Refusal::Duplicate));
                }
                // An ended task has left the registry before it says so: the next one is new.
                Some(Verdict::Ended(session)) => session,
                None => return Err(NotAdmitted::Stopped),
            }
        }
    }

    /// The task of a peer, made if there is none and there may be one.
    fn register(
        self: &Arc<Self>,
        incarnation: Incarnation,
        home: Option<SocketAddr>,
        dialed: bool,
    ) -> Result<Arc<Peer>, Refusal> {
        if incarnation == self.identity.incarnation {
            return Err(Refusal::Itself);
        }
        let mut registry = lock(&self.registry);
        if let Some(known) = registry.get_mut(&incarnation) {
            known.home = home.or(known.home);
            return Ok(Arc::clone(&known.peer));
        }
        if self.closing_reason().is_some() || (self.is_draining() && !dialed) {
            return Err(Refusal::Draining);
        }
        if registry.len() >= self.config.max_peers as usize {
            return Err(Refusal::Full(self.config.max_peers));
        }
        let peer = Peer::spawn(self, incarnation);
        registry.insert(incarnation, Registered { peer: Arc::clone(&peer), home });
        Ok(peer)
    }

    /// Gives up the peers that were where this one is: they were restarted. One that still speaks is
    /// another engine behind the same address (translated, say), and stays.
    async fn settle_elders(&self, by: Incarnation, home: Option<SocketAddr>) {
        let Some(home) = home else { return };
        let elders: Vec<_> = lock(&self.registry)
            .iter()
            .filter(|(incarnation, known)| **incarnation != by && known.home == Some(home))
            .map(|(_, known)| Arc::clone(&known.peer))
            .collect();
        for elder in elders {
            let (settled, answer) = oneshot::channel();
            let settling = async {
                elder.tell(Letter::Supplanted { by, settled }).await;
                let _ = answer.await;
            };
            let longest = heartbeat(self.config.peer_silent_ms) * 3;
            let _ = tokio::time::timeout(longest, settling).await;
        }
    }
}

/// Hears the worker until it is gone. Never waits for a peer's task, which may be waiting for the
/// worker.
async fn hear_worker(core: Arc<Core>, mut from_worker: mpsc::Receiver<ToControl>) {
    while let Some(said) = from_worker.recv().await {
        match said {
            ToControl::Ended(cell) => crate::observe::room_ended(&cell),
            ToControl::Expel { peer, cause } => {
                if let Some(peer) = core.peer(peer) {
                    peer.orders.send_modify(|orders| orders.expel = Some(one_line(&cause)));
                }
            }
            ToControl::LaneOpen { peer, lane } => {
                core.peers.lane_open(peer, lane);
                if let Some(peer) = core.peer(peer) {
                    peer.count_lanes(&core.peers);
                }
            }
            ToControl::LaneDown { peer, lane, cause } => {
                tracing::debug!(%peer, lane, cause, "lane down");
                core.peers.lane_down(peer, lane, &cause);
                core.lane_numbers.free(lane);
                if let Some(peer) = core.peer(peer) {
                    peer.count_lanes(&core.peers);
                    peer.orders.send_modify(|orders| orders.lanes_lost += 1);
                }
            }
        }
    }
}

// What the mutexes guard is whole between any two statements of their holders.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
