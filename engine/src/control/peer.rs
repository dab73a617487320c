//! One peer, from its first session to its end.
//!
//! One task a peer owns its session and says everything about it to the worker, so that what the
//! worker hears is in order: up before the session's messages, down or gone behind them.

mod running;

pub(super) use self::running::Running;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use super::lanes::LaneDialing;
use super::rails::{Made, RailDialing};
use super::session::{End, NewSession};
use super::{Core, PeerTable};
use crate::config::LANES_MAX;
use crate::failure::FailureKind;
use crate::ids::{Incarnation, LaneId};
use crate::peers::PeerHealth;
use crate::worker::mail::ToWorker;

/// Letters a peer's task may have waiting: its lanes, and a few sessions that try at once.
const MAILBOX_LETTERS: usize = LANES_MAX as usize;

/// A letter to a peer's task.
#[derive(Debug)]
pub(super) enum Letter {
    /// A session with this peer, authenticated.
    Session { session: Box<NewSession>, verdict: oneshot::Sender<Verdict> },
    /// A lane, or why it could not be dialed.
    Lane { id: LaneId, stream: io::Result<TcpStream>, dialed: bool },
    /// An end of an RDMA lane.
    Made(Box<Made>),
    /// Another incarnation answers at, or comes from, the address this peer listens on. `settled` is
    /// dropped once this peer is known to be gone, or to live behind the same address.
    Supplanted { by: Incarnation, settled: oneshot::Sender<()> },
    /// Nobody listens any more where this peer was dialed.
    NobodyListens { cause: String },
}

/// What became of an offered session.
#[derive(Debug)]
pub(super) enum Verdict {
    Taken,
    /// Another session of the two engines is kept.
    Duplicate(Box<NewSession>),
    /// The task is at its end; a new one may take the session.
    Ended(Box<NewSession>),
}

/// What others want of a peer. Never blocks whoever wants it.
#[derive(Clone, Debug, Default)]
pub(super) struct Orders {
    pub(super) drain: bool,
    pub(super) expel: Option<String>,
    pub(super) leave: Option<String>,
    /// Lanes the worker has closed so far.
    pub(super) lanes_lost: u64,
    /// Times that rails changed.
    pub(super) rails_changed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// No session yet.
    New,
    Up,
    Down,
    Gone,
}

/// How a peer is, for whoever waits for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerState {
    pub(super) life: Life,
    pub(super) lanes: usize,
}

/// The handle of a peer's task.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) incarnation: Incarnation,
    letters: mpsc::Sender<Letter>,
    pub(super) orders: watch::Sender<Orders>,
    pub(super) state: watch::Sender<PeerState>,
}

impl Peer {
    pub(super) fn spawn(core: &Arc<Core>, incarnation: Incarnation) -> Arc<Self> {
        let (letters, mailbox) = mpsc::channel(MAILBOX_LETTERS);
        let orders = watch::Sender::new(Orders::default());
        let state = watch::Sender::new(PeerState { life: Life::New, lanes: 0 });
        let task_orders = orders.subscribe();
        let peer = Arc::new(Self { incarnation, letters, orders, state });
        let task = PeerTask {
            core: Arc::clone(core),
            peer: Arc::clone(&peer),
            mailbox,
            orders: task_orders,
            lanes: LaneDialing::new(),
            rails: RailDialing::default(),
            lanes_lost: 0,
            supplanted: None,
        };
        core.spawn(task.run());
        peer
    }

    pub(super) fn is_up(&self) -> bool {
        self.state.borrow().life == Life::Up
    }

    /// Sends a letter; it is dropped when the task has ended.
    pub(super) async fn tell(&self, letter: Letter) {
        let _ = self.letters.send(letter).await;
    }

    /// Offers a session. `None`: the engine is being torn down.
    pub(super) async fn offer(&self, session: Box<NewSession>) -> Option<Verdict> {
        let (verdict, answer) = oneshot::channel();
        match self.letters.send(Letter::Session { session, verdict }).await {
            Ok(()) => answer.await.ok(),
            Err(mpsc::error::SendError(Letter::Session { session, .. })) => {
                Some(Verdict::Ended(session))
            }
            Err(_) => None,
        }
    }

    /// Counts the lanes anew, for whoever waits for one.
    pub(super) fn count_lanes(&self, table: &PeerTable) {
        self.state
            .send_modify(|state| state.lanes = table.lanes(self.incarnation, |lane| lane.open));
    }

    /// Resolves when the peer's session does not stand.
    pub(super) async fn not_up(&self) {
        let _ = self.state.subscribe().wait_for(|state| state.life != Life::Up).await;
    }

    /// Resolves when the peer is given up.
    pub(super) async fn gone(&self) {
        let _ = self.state.subscribe().wait_for(|state| state.life == Life::Gone).await;
    }
}

/// Somebody else is at this peer's address, and this peer is asked for a sign of life.
#[derive(Debug)]
struct Supplanted {
    by: Incarnation,
    /// When to look next.
    check_at: Instant,
    /// Bytes received when a whole heartbeat had passed: what came before may be from before it died.
    baseline: Option<u64>,
    _settled: oneshot::Sender<()>,
}

pub(super) struct PeerTask {
    pub(super) core: Arc<Core>,
    pub(super) peer: Arc<Peer>,
    mailbox: mpsc::Receiver<Letter>,
    orders: watch::Receiver<Orders>,
    lanes: LaneDialing,
    pub(super) rails: RailDialing,
    lanes_lost: u64,
    supplanted: Option<Supplanted>,
}

impl PeerTask {
    async fn run(mut self) {
        if let Some(first) = self.first().await {
            let end = self.live(first).await;
            self.give_up(end).await;
        }
        // Whoever looks the peer up from here on gets a new task; whoever has this one is told so.
        self.peer.state.send_modify(|state| *state = PeerState { life: Life::Gone, lanes: 0 });
        self.core.forget(&self.peer);
        self.mailbox.close();
        while let Ok(letter) = self.mailbox.try_recv() {
            if let Letter::Session { session, verdict } = letter {
                let _ = verdict.send(Verdict::Ended(session));
            }
        }
    }

    /// The session the task was made for.
    async fn first(&mut self) -> Option<NewSession> {
        let deadline = Instant::now() + self.core.connect_timeout();
        loop {
            if self.ordered().is_some() {
                return None;
            }
            tokio::select! {
                Some(letter) = self.mailbox.recv() => {
                    if let Letter::Session { session, verdict } = letter
                        && verdict.send(Verdict::Taken).is_ok()
                    {
                        return Some(*session);
                    }
                }
                () = sleep_until(deadline) => return None,
                () = self.core.closing() => {}
                _ = self.orders.changed() => {}
            }
        }
    }

    /// Sessions, one after the other, until the peer is given up.
    async fn live(&mut self, mut session: NewSession) -> End {
        loop {
            let end = self.session(session).await;
            session = match end {
                End::Replaced(next) => {
                    self.down().await;
                    *next
                }
                End::Lost(causes) => {
                    self.down().await;
                    match self.back(causes).await {
                        Ok(next) => next,
                        Err(end) => return end,
                    }
                }
                end => return end,
            };
        }
    }

    async fn down(&self) {
        let peer = self.peer.incarnation;
        self.core.peers.health(peer, PeerHealth::Reconnecting);
        let _ = self.core.worker.send(ToWorker::PeerDown { peer }).await;
        self.peer.state.send_modify(|state| state.life = Life::Down);
    }

    /// Waits for a lost peer, at most for the grace.
    async fn back(&mut self, mut causes: Vec<String>) -> Result<NewSession, End> {
        if let Some(supplanted) = &self.supplanted {
            return Err(restarted(supplanted.by, causes));
        }
        let grace_ms = self.core.config.reconnect_grace_ms;
        let deadline = Instant::now() + Duration::from_millis(grace_ms);
        loop {
            if let Some(end) = self.ordered() {
                return Err(end);
            }
            tokio::select! {
                biased;
                Some(letter) = self.mailbox.recv() => match letter {
                    Letter::Session { session, verdict } => {
                        if verdict.send(Verdict::Taken).is_ok() {
                            return Ok(*session);
                        }
                    }
                    Letter::Lane { id, stream, dialed } => self.lane(id, stream, dialed).await,
                    Letter::Made(made) => self.made(*made, None).await,
                    Letter::Supplanted { by, settled } => {
                        self.supplanted = Some(self.supplant(by, settled));
                        return Err(restarted(by, causes));
                    }
                    Letter::NobodyListens { cause } => {
                        causes.push(cause);
                        return Err(End::Lost(causes));
                    }
                },
                () = self.core.closing() => {}
                _ = self.orders.changed() => {}
                () = sleep_until(deadline) => {
                    causes.push(format!("it did not come back within {grace_ms} ms"));
                    return Err(End::Lost(causes));
                }
            }
        }
    }

    /// Tells the worker why the peer is given up.
    async fn give_up(&self, end: End) {
        let (kind, mut causes) = match end {
            End::Lost(causes) => (FailureKind::PeerDied, causes),
            End::Restarted(causes) => (FailureKind::PeerRestarted, causes),
            End::Silent(causes) => (FailureKind::PeerSilent, causes),
            End::Violation(causes) => (FailureKind::ProtocolViolation, causes),
            End::Bye(reason) => {
                (FailureKind::Shutdown, vec!["the peer said goodbye".to_owned(), reason])
            }
            End::Leave(reason) => {
                (FailureKind::Shutdown, vec!["this engine said goodbye".to_owned(), reason])
            }
            End::Replaced(_) | End::WorkerGone => return,
        };
        causes.retain(|cause| !cause.is_empty());
        let peer = self.peer.incarnation;
        tracing::info!(%peer, %kind, cause = causes.join(": "), "peer given up");
        self.core.tokens.forget(peer);
        // Whoever connects while the worker is being told waits for what comes after.
        self.peer.state.send_modify(|state| state.life = Life::Down);
        self.core.peers.gone(peer, kind, causes.join(": "));
        let _ = self.core.worker.send(ToWorker::PeerGone { peer, kind, causes }).await;
    }

    /// What was ordered, if it ends the session.
    fn ordered(&self) -> Option<End> {
        let orders = self.orders.borrow();
        if let Some(cause) = &orders.expel {
            return Some(End::Violation(vec![cause.clone()]));
        }
        orders.leave.clone().or_else(|| self.core.closing_reason()).map(End::Leave)
    }
}

fn restarted(by: Incarnation, causes: Vec<String>) -> End {
    let first = format!("incarnation {by} answers at its address");
    End::Restarted(std::iter::once(first).chain(causes).collect())
}
