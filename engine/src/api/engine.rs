//! The engine: started once in a process, or once a GPU.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};

use super::group::Group;
use super::handle::HandleCore;
use super::recv::{GrantError, GrantSpec, RecvRoom};
use super::registry::Registry;
use super::send::{OpenError, OpenOptions, SendRoom, WriteError};
use super::start::EngineBuilder;
use crate::config::{EngineConfig, ROOM_TIMEOUT_MS_MAX};
use crate::control::{ConnectError, Control, PeerTable};
use crate::fabric::rdma::Rails;
use crate::ids::{Epoch, Incarnation, Micros, Role, RoomId};
use crate::memory::PoolId;
use crate::peers::{FabricInfo, PeerHealth, PeerInfo, RailInfo, RdmaReport};
use crate::room::cell::{RoomCell, Unreleased};
use crate::worker::run::IoReport;
use crate::worker::submit::{GrantOrder, Submission};
use crate::worker::wake::Wakeup;

/// How long a shutdown waits for rooms that it fails to be released.
const CLOSE_WAIT: Duration = Duration::from_secs(1);

/// A pool could not be taken out of the engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeregisterError {
    /// No such pool, or it is out already.
    #[error("there is no pool {0:?}")]
    NoSuchPool(PoolId),
    /// Rooms use it.
    #[error("pool {pool:?} is used by {rooms} rooms; let them end and be released first")]
    Busy {
        /// The pool.
        pool: PoolId,
        /// Rooms that have pages of it granted, live or not yet released.
        rooms: usize,
    },
    /// The engine is shut down.
    #[error("the engine is shut down")]
    Stopped,
}

/// What handles share with their engine.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Arc<EngineConfig>,
    pub(super) incarnation: Incarnation,
    pub(super) epoch_zero: Instant,
    pub(super) wakeup: Arc<Wakeup>,
    pub(super) submissions: mpsc::Sender<Submission>,
    pub(super) peers: Arc<PeerTable>,
    pub(super) registry: Registry,
    pub(super) unreleased: Unreleased,
    pub(super) next_epoch: AtomicU64,
    /// Pages of each pool; 0 once it is out.
    pub(super) pool_pages: Arc<[AtomicU32]>,
    /// Peers that this engine drains.
    pub(super) drained: Mutex<HashSet<Incarnation>>,
    pub(super) draining: AtomicBool,
    pub(super) runtime: tokio::runtime::Handle,
}

impl Shared {
    pub(crate) fn now(&self) -> Micros {
        Micros(u64::try_from(self.epoch_zero.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    pub(crate) fn submissions(&self) -> mpsc::Sender<Submission> {
        self.submissions.clone()
    }

    /// Queues a submission without waiting.
    pub(crate) fn submit(&self, submission: Submission) -> Result<(), WriteError> {
        self.submissions.try_send(submission).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => WriteError::Full,
            mpsc::error::TrySendError::Closed(_) => WriteError::Stopped,
        })?;
        self.wakeup.wake();
        Ok(())
    }

    /// Queues a submission that must not be lost; if the queue is full now, as soon as it is not.
    pub(crate) fn submit_soon(&self, submission: Submission) {
        match self.submissions.try_send(submission) {
            Ok(()) => self.wakeup.wake(),
            Err(mpsc::error::TrySendError::Full(submission)) => {
                let (queue, wakeup) = (self.submissions.clone(), Arc::clone(&self.wakeup));
                self.runtime.spawn(async move {
                    if queue.send(submission).await.is_ok() {
                        wakeup.wake();
                    }
                });
            }
            // The worker has stopped, and ended every room that was submitted before.
            Err(mpsc::error::TrySendError::Closed(_)) => {}
        }
    }

    pub(crate) fn pool_pages(&self, pool: PoolId) -> Option<u32> {
        self.pool_pages
            .get(pool.index())
            .map(|pages| pages.load(Ordering::Acquire))
            .filter(|&pages| pages > 0)
    }

    pub(crate) fn fabric_of(&self, peer: Incarnation) -> Option<FabricInfo> {
        self.peers.fabric(peer)
    }

    fn deadline(&self, asked: Option<Duration>, default_ms: u64) -> Micros {
        let asked = asked.map(|asked| u64::try_from(asked.as_millis()).unwrap_or(u64::MAX));
        self.now().after_ms(asked.unwrap_or(default_ms).min(ROOM_TIMEOUT_MS_MAX))
    }
}

#[derive(Debug)]
pub(super) struct Threads {
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
    pub(super) runtime: Mutex<Option<Runtime>>,
}

impl Threads {
    fn take_thread(&self) -> Option<JoinHandle<()>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn join(&self) {
        if let Some(thread) = self.take_thread() {
            let _ = thread.join();
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.join();
        if let Some(runtime) = self.runtime.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // Its tasks have been told to end; waiting for them here could be inside another runtime.
            runtime.shutdown_background();
        }
    }
}

/// An engine: one worker, its lanes and rooms, and the control plane that finds it peers.
///
/// It has a runtime of its own; its futures can be awaited on any executor, or with
/// [`crate::block_on`]. Dropping it is a [`Engine::shutdown`] without patience.
#[derive(Debug)]
pub struct Engine {
    pub(super) shared: Arc<Shared>,
    pub(super) control: Control,
    pub(super) io: IoReport,
    pub(super) rails: Result<Arc<Rails>, String>,
    pub(super) threads: Threads,
}

impl Engine {
    /// Begins with settings; pools are added before [`EngineBuilder::start`].
    #[must_use]
    pub const fn builder(config: EngineConfig) -> EngineBuilder {
        EngineBuilder { config, pools: Vec::new() }
    }

    /// Who this engine is until it ends.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.shared.incarnation
    }

    /// Where peers can reach it, when it listens. With port 0 asked for, the port it got.
    #[must_use]
    pub fn listen_addr(&self) -> Option<SocketAddr> {
        self.control.listen_addr()
    }

    /// The rails this engine has for RDMA, or why it has none.
    #[must_use]
    pub fn rdma(&self) -> RdmaReport {
        match &self.rails {
            Err(why) => RdmaReport { rails: Vec::new(), why_not: Some(why.clone()) },
            Ok(rails) => {
                let infos = rails.rail_cards().iter().enumerate();
                let infos = infos.map(|(at, card)| RailInfo::new(card, rails.is_up(at as u8)));
                RdmaReport { rails: infos.collect(), why_not: None }
            }
        }
    }

    /// How its lanes are driven, and why not better.
    #[must_use]
    pub const fn io(&self) -> &IoReport {
        &self.io
    }

    /// Every peer: its health, its fabric and its rails, before anything is sent to it.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerInfo> {
        self.shared.peers.snapshot()
    }

    /// Connects to a peer and its lanes. The address is kept: a peer that goes away is dialed again,
    /// until [`Engine::disconnect`].
    ///
    /// # Errors
    /// [`ConnectError`], naming the address and what stands in the way.
    pub async fn connect(&self, addr: SocketAddr) -> Result<Incarnation, ConnectError> {
        let control = self.control.clone();
        let task = self.shared.runtime.spawn(async move { control.connect(addr).await });
        task.await.unwrap_or(Err(ConnectError::Stopped))
    }

    /// Closes the session with a peer and forgets its address. Rooms with it fail.
    pub async fn disconnect(&self, peer: Incarnation, reason: &str) {
        let (control, reason) = (self.control.clone(), reason.to_owned());
        let task =
            self.shared.runtime.spawn(async move { control.disconnect(peer, &reason).await });
        let _ = task.await;
    }

    /// Opens a sending room. It waits for a grant of its id.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(&self, room: RoomId, options: OpenOptions) -> Result<SendRoom, OpenError> {
        let mut rooms = self.open_all(room, &[options.peer], options.grant_timeout)?;
        rooms.pop().ok_or(OpenError::EmptyGroup)
    }

    /// Opens `count` sending rooms of one id, each for the grant of another peer: one prefill rank
    /// that feeds several decode ranks.
    ///
    /// # Errors
    /// [`OpenError`]; none is opened then.
    pub fn open_group(
        &self,
        room: RoomId,
        count: usize,
        options: OpenOptions,
    ) -> Result<Group<SendRoom>, OpenError> {
        if count == 0 {
            return Err(OpenError::EmptyGroup);
        }
        self.open_all(room, &vec![options.peer; count], options.grant_timeout).map(Group::new)
    }

    fn open_all(
        &self,
        room: RoomId,
        peers: &[Option<Incarnation>],
        timeout: Option<Duration>,
    ) -> Result<Vec<SendRoom>, OpenError> {
        let shared = &self.shared;
        if shared.draining.load(Ordering::Acquire) {
            return Err(OpenError::Draining);
        }
        if peers.iter().flatten().any(|peer| self.is_drained(*peer)) {
            return Err(OpenError::Draining);
        }
        self.reserve(peers.len()).map_err(OpenError::TooMany)?;
        let now = shared.now();
        let cells: Vec<_> = peers
            .iter()
            .map(|peer| (*peer, RoomCell::new(room, Role::Sender, now.0, &shared.unreleased)))
            .collect();
        if !shared.registry.enter(Role::Sender, room, &cells) {
            cells.iter().for_each(|(_, cell)| cell.release());
            return Err(OpenError::Live(room));
        }
        let deadline = shared.deadline(timeout, shared.config.grant_timeout_ms);
        let mut rooms = Vec::with_capacity(cells.len());
        let mut refused = None;
        for (peer, cell) in cells {
            let open = Submission::Open { cell: Arc::clone(&cell), peer, deadline };
            match shared.submit(open) {
                Ok(()) => {
                    let core = HandleCore { cell, shared: Arc::downgrade(shared) };
                    rooms.push(SendRoom::new(core));
                }
                Err(error) => {
                    // Rooms of a group that were opened before it are given up with their handles.
                    cell.give_up();
                    cell.release();
                    refused = Some(error);
                }
            }
        }
        match refused {
            None => Ok(rooms),
            Some(error) => {
                shared.registry.tidy(Role::Sender, room);
                Err(if error == WriteError::Full { OpenError::Full } else { OpenError::Draining })
            }
        }
    }

    /// Grants pages to a room of a peer: from now until it has ended, the peer may write them.
    ///
    /// # Errors
    /// [`GrantError`]; nothing is granted then.
    pub fn grant(&self, peer: Incarnation, spec: GrantSpec) -> Result<RecvRoom, GrantError> {
        spec.check(|pool| self.shared.pool_pages(pool))?;
        self.grant_checked(peer, spec)
    }

    /// Grants the same pages to the room's part of each of several peers: one decode rank that is fed
    /// by several prefill ranks, each with the layers and heads it has.
    ///
    /// # Errors
    /// [`GrantError`]; what was granted before it is aborted.
    pub fn grant_group(
        &self,
        peers: &[Incarnation],
        spec: &GrantSpec,
    ) -> Result<Group<RecvRoom>, GrantError> {
        spec.check(|pool| self.shared.pool_pages(pool))?;
        if peers.is_empty() {
            return Err(GrantError::EmptyGroup);
        }
        let rooms: Result<Vec<_>, _> =
            peers.iter().map(|&peer| self.grant_checked(peer, spec.clone())).collect();
        rooms.map(Group::new)
    }

    fn grant_checked(&self, peer: Incarnation, spec: GrantSpec) -> Result<RecvRoom, GrantError> {
        let shared = &self.shared;
        if shared.draining.load(Ordering::Acquire) {
            return Err(GrantError::Draining);
        }
        match shared.peers.get(peer).map(|peer| peer.health) {
            Some(_) if self.is_drained(peer) => return Err(GrantError::PeerDraining(peer)),
            Some(PeerHealth::Up | PeerHealth::Reconnecting) => {}
            Some(PeerHealth::Draining) => return Err(GrantError::PeerDraining(peer)),
            Some(PeerHealth::Gone { .. }) | None => return Err(GrantError::NoPeer(peer)),
        }
        self.reserve(1).map_err(GrantError::TooMany)?;
        let cell = RoomCell::new(spec.room, Role::Receiver, shared.now().0, &shared.unreleased);
        if !shared.registry.enter(Role::Receiver, spec.room, &[(Some(peer), Arc::clone(&cell))]) {
            cell.release();
            return Err(GrantError::Live(spec.room));
        }
        let deadline = shared.deadline(spec.timeout, shared.config.room_timeout_ms);
        let aux_bytes = spec.aux_bytes();
        let order = GrantOrder {
            cell: Arc::clone(&cell),
            peer,
            epoch: Epoch(shared.next_epoch.fetch_add(1, Ordering::Relaxed)),
            deadline,
            pools: spec.pools,
            aux: spec.aux,
            aux_bytes,
            note: spec.note,
            checksum: spec.checksum,
        };
        if let Err(error) = shared.submit(Submission::Grant(Box::new(order))) {
            cell.release();
            return Err(if error == WriteError::Full {
                GrantError::Full
            } else {
                GrantError::Draining
            });
        }
        Ok(RecvRoom { core: HandleCore { cell, shared: Arc::downgrade(shared) } })
    }

    /// Takes places for rooms; they are given back when the rooms are released.
    fn reserve(&self, more: usize) -> Result<(), u32> {
        let limit = self.shared.config.max_rooms;
        let more = u32::try_from(more).unwrap_or(u32::MAX);
        let add = |live: u32| live.checked_add(more).filter(|&sum| sum <= limit);
        self.shared.unreleased.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).map(drop)
    }

    fn is_drained(&self, peer: Incarnation) -> bool {
        self.shared.drained.lock().unwrap_or_else(PoisonError::into_inner).contains(&peer)
    }

    /// Takes a pool out of the engine: its memory is the caller's again when this returns. Peers are
    /// still told of it, but nothing of it can be granted or written.
    ///
    /// # Errors
    /// [`DeregisterError::Busy`] while rooms use it; it stays usable.
    pub async fn deregister_pool(&self, pool: PoolId) -> Result<(), DeregisterError> {
        if self.shared.pool_pages(pool).is_none() {
            return Err(DeregisterError::NoSuchPool(pool));
        }
        let (reply, answer) = oneshot::channel();
        self.shared.submit_soon(Submission::DropPool { pool, reply });
        match answer.await {
            Ok(0) => Ok(()),
            Ok(rooms) => Err(DeregisterError::Busy { pool, rooms }),
            Err(_) => Err(DeregisterError::Stopped),
        }
    }

    /// Takes no more rooms with a peer, tells it so, and waits until those there are have ended and
    /// are released.
    pub async fn drain_peer(&self, peer: Incarnation) {
        self.shared.drained.lock().unwrap_or_else(PoisonError::into_inner).insert(peer);
        self.shared.submit_soon(Submission::Drain { peer: Some(peer) });
        self.control.drain(Some(peer));
        self.idle(Some(peer)).await;
    }

    async fn idle(&self, peer: Option<Incarnation>) {
        let (reply, answer) = oneshot::channel();
        self.shared.submit_soon(Submission::WhenIdle { peer, reply });
        let _ = answer.await;
    }

    /// Takes no more rooms, gives those there are until `deadline` to end, fails the rest with
    /// [`crate::FailureKind::Shutdown`] on both sides, and stops. Says whether every room ended by
    /// itself.
    pub async fn shutdown(self, deadline: Duration) -> bool {
        self.shared.draining.store(true, Ordering::Release);
        self.shared.submit_soon(Submission::Drain { peer: None });
        self.control.drain(None);
        let (reply, answer) = oneshot::channel();
        self.shared.submit_soon(Submission::WhenIdle { peer: None, reply });
        let runtime = self.shared.runtime.clone();
        let waited = runtime.spawn(async move { tokio::time::timeout(deadline, answer).await });
        let idle = matches!(waited.await, Ok(Ok(Ok(()))));
        self.stop().await;
        idle
    }

    /// Ends every room, closes every session, and waits for the worker.
    async fn stop(&self) {
        let Some(thread) = self.threads.take_thread() else { return };
        self.shared.draining.store(true, Ordering::Release);
        let (reply, answer) = oneshot::channel();
        self.shared.submit_soon(Submission::Stop);
        self.shared.submit_soon(Submission::WhenIdle { peer: None, reply });
        let control = self.control.clone();
        let task = self.shared.runtime.spawn(async move {
            let _ = tokio::time::timeout(CLOSE_WAIT, answer).await;
            // Bounded by itself.
            control.shutdown("the engine was shut down").await;
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        });
        let _ = task.await;
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        crate::block_on(self.stop());
    }
}
