//! One peer, from its first session to its end.
//!
//! One task a peer owns its session and says everything about it to the worker, so that what the
//! worker hears is in order: up before the session's messages, down or gone behind them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use super::Core;
use super::framing::{FrameError, FrameReader};
use super::handshake::{Greeted, one_line};
use super::lanes::{self, LaneDialing, Token};
use super::session::{
    End, NewSession, OUTBOX_MESSAGES, OWN_MESSAGES, SILENT_TICKS, WriteEnd, Writer, heartbeat,
    silence_tick, ticks,
};
use crate::config::LANES_MAX;
use crate::failure::FailureKind;
use crate::ids::Incarnation;
use crate::peers::{FabricInfo, LaneInfo, PeerHealth, PeerInfo};
use crate::wire::message::{CONTROL_FRAME_BYTES_MAX, Message};
use crate::worker::mail::{PeerUp, ToWorker};

/// Letters a peer's task may have waiting: its lanes, and a few sessions that try at once.
const MAILBOX_LETTERS: usize = LANES_MAX as usize;

/// A letter to a peer's task.
#[derive(Debug)]
pub(super) enum Letter {
    /// A session with this peer, authenticated.
    Session { session: Box<NewSession>, verdict: oneshot::Sender<Verdict> },
    /// A lane, or why it could not be dialed.
    Lane { stream: io::Result<TcpStream>, dialed: bool },
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

/// The session that runs.
#[derive(Debug)]
struct Running {
    addr: SocketAddr,
    dialed: bool,
    since: Instant,
    own: mpsc::Sender<Message>,
    drain_said: bool,
}

struct PeerTask {
    core: Arc<Core>,
    peer: Arc<Peer>,
    mailbox: mpsc::Receiver<Letter>,
    orders: watch::Receiver<Orders>,
    lanes: LaneDialing,
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
        let deadline = Instant::now() + std::time::Duration::from_millis(grace_ms);
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
                    Letter::Lane { stream, dialed } => self.lane(stream, dialed).await,
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

    /// Runs one session from its first byte to its last.
    async fn session(&mut self, new: NewSession) -> End {
        let NewSession { greeted: Greeted { hello, pairings }, wire, addr, dialed } = new;
        let peer = self.peer.incarnation;
        let first = if dialed { Ok(Vec::new()) } else { self.core.identity.welcome() };
        let first = match first {
            Ok(frame) => frame,
            Err(error) => return End::Lost(vec![error.to_string()]),
        };
        let name = one_line(&hello.name);
        let fabric = FabricInfo::Tcp { io: self.core.identity.io, peer_io: hello.io };
        let health = PeerHealth::Up;
        let lanes = Vec::new();
        tracing::info!(%peer, name, %addr, dialed, "session up");
        self.core.peers.up(PeerInfo { incarnation: peer, name, addr, health, fabric, lanes });
        let (outbox, outbox_waiting) = mpsc::channel(OUTBOX_MESSAGES);
        let (own, own_waiting) = mpsc::channel(OWN_MESSAGES);
        let up = PeerUp { peer, addr, pairings, outbox };
        if self.core.worker.send(ToWorker::PeerUp(up)).await.is_err() {
            return End::WorkerGone;
        }
        self.lanes.new_session(usize::from(self.core.identity.lanes.min(hello.lanes)));
        self.peer.state.send_modify(|state| {
            *state = PeerState { life: Life::Up, lanes: self.core.peers.lanes(peer) };
        });

        let tick = silence_tick(self.core.config.peer_silent_ms);
        let beat = heartbeat(hello.silent_ms);
        let mut reader = wire.reader;
        let mut writer = Writer::new(wire.writer, own_waiting, outbox_waiting, first, (beat, tick));
        let running = Running { addr, dialed, since: Instant::now(), own, drain_said: false };
        let end = {
            let reading = self.read(&mut reader, running);
            tokio::pin!(reading);
            tokio::select! {
                end = &mut reading => end,
                // What the peer said before it went is still to be read: it may say why.
                broken = writer.run() => match broken {
                    WriteEnd::Stalled => End::Silent(vec![broken.to_string()]),
                    WriteEnd::Io(error) => tokio::time::timeout(tick, reading)
                        .await
                        .unwrap_or_else(|_| End::Lost(vec![format!("the session with {addr} broke"), error.to_string()])),
                },
            }
        };
        match &end {
            End::Leave(reason) => {
                writer.farewell(reader, reason.clone(), super::FAREWELL).await;
            }
            // A session replaced before its welcome was written is told all the same: its dialer then
            // finds the one that is kept.
            End::Silent(_) | End::Replaced(_) => writer.write_now(),
            _ => {}
        }
        end
    }

    /// Reads the session, and does what is asked meanwhile, until it ends.
    async fn read(&mut self, reader: &mut FrameReader<OwnedReadHalf>, mut running: Running) -> End {
        let mut silence = ticks(silence_tick(self.core.config.peer_silent_ms));
        let (mut heard, mut silent) = (reader.received(), 0);
        loop {
            if let Some(end) = self.ordered() {
                return end;
            }
            self.say_drain(&mut running);
            let lanes_at = if running.dialed { self.ask_for_lanes(&running) } else { None };
            let probe_at = self.supplanted.as_ref().map(|supplanted| supplanted.check_at);
            tokio::select! {
                frame = reader.next(CONTROL_FRAME_BYTES_MAX) => {
                    let handled = match frame {
                        Ok(body) => self.take(body, &running).await,
                        Err(error) => Err(frame_end(error, running.addr)),
                    };
                    if let Err(end) = handled {
                        return end;
                    }
                }
                Some(letter) = self.mailbox.recv() => {
                    if let Some(next) = self.letter(letter, &running).await {
                        return End::Replaced(next);
                    }
                }
                _ = silence.tick() => {
                    silent = if reader.received() == heard { silent + 1 } else { 0 };
                    heard = reader.received();
                    if silent >= SILENT_TICKS {
                        let ms = self.core.config.peer_silent_ms;
                        return End::Silent(vec![format!("nothing was heard of {} for {ms} ms", running.addr)]);
                    }
                }
                () = at(probe_at) => {
                    if let Some(end) = self.probe(reader.received()) {
                        return end;
                    }
                }
                () = at(lanes_at) => {}
                () = self.core.closing() => {}
                _ = self.orders.changed() => {}
            }
        }
    }

    /// One message. What is not for the control plane goes to the worker, and waits for room there.
    async fn take(&mut self, body: Bytes, running: &Running) -> Result<(), End> {
        let violation = |what: String| Err(End::Violation(vec![what]));
        let peer = self.peer.incarnation;
        match Message::decode(&body) {
            Err(error) => violation(format!("malformed message: {error}")),
            Ok(Message::Heartbeat) => Ok(()),
            Ok(Message::Drain) => {
                self.core.peers.health(peer, PeerHealth::Draining);
                Ok(())
            }
            Ok(Message::Bye { reason }) => Err(End::Bye(one_line(&reason))),
            Ok(Message::LaneRequest { .. }) if running.dialed => {
                violation("the listener of a session asked for lanes".to_owned())
            }
            Ok(Message::LaneRequest { lanes }) => {
                let lanes = lanes.min(u16::try_from(self.lanes.wanted).unwrap_or(u16::MAX));
                let good_for = self.core.connect_timeout();
                let tokens = self.core.tokens.issue(peer, lanes, good_for);
                // A peer that asks faster than it reads gets no answer, and asks again.
                let _ = running.own.try_send(Message::LaneTokens { tokens });
                Ok(())
            }
            Ok(Message::LaneTokens { tokens }) => match self.lanes.answered(tokens.len()) {
                None => violation(format!("{} lane tokens, more than asked for", tokens.len())),
                Some(dial) => {
                    tokens.into_iter().take(dial).for_each(|token| self.dial_lane(running.addr, token));
                    Ok(())
                }
            },
            Ok(message) => {
                let sent = self.core.worker.send(ToWorker::Message { peer, message }).await;
                sent.map_err(|_| End::WorkerGone)
            }
        }
    }

    /// One letter while a session stands. Returns the session that takes its place, if one does.
    async fn letter(&mut self, letter: Letter, running: &Running) -> Option<Box<NewSession>> {
        match letter {
            Letter::Session { session, verdict } => {
                if self.keeps(running, &session) {
                    let _ = verdict.send(Verdict::Duplicate(session));
                } else if verdict.send(Verdict::Taken).is_ok() {
                    return Some(session);
                }
            }
            Letter::Lane { stream, dialed } => self.lane(stream, dialed).await,
            Letter::Supplanted { by, settled } => {
                self.supplanted = Some(self.supplant(by, settled));
            }
            // It was true of an earlier session.
            Letter::NobodyListens { .. } => {}
        }
        None
    }

    /// Whether the session that stands is kept against a new one. The same dialer has come back: it
    /// knows that the old one is lost. Where both sides dialed at once, the smaller incarnation's
    /// session is kept, by the same rule on both sides. They dialed at once only if the sessions came
    /// up within one handshake's time: an older session is one that the other side has lost.
    fn keeps(&self, running: &Running, new: &NewSession) -> bool {
        let at_once = running.since.elapsed() < self.core.connect_timeout();
        let ours_is_smaller = self.core.identity.incarnation < self.peer.incarnation;
        running.dialed != new.dialed && at_once && ours_is_smaller == running.dialed
    }

    fn supplant(&self, by: Incarnation, settled: oneshot::Sender<()>) -> Supplanted {
        let check_at = Instant::now() + heartbeat(self.core.config.peer_silent_ms);
        Supplanted { by, check_at, baseline: None, _settled: settled }
    }

    /// Looks for a sign of life of a peer at whose address another one is.
    fn probe(&mut self, received: u64) -> Option<End> {
        let supplanted = self.supplanted.as_mut()?;
        match supplanted.baseline {
            None => {
                supplanted.baseline = Some(received);
                // One heartbeat, and half of one for its way.
                supplanted.check_at += heartbeat(self.core.config.peer_silent_ms) * 3 / 2;
                None
            }
            Some(baseline) if received > baseline => {
                self.supplanted = None;
                None
            }
            Some(_) => Some(restarted(supplanted.by, Vec::new())),
        }
    }

    fn say_drain(&self, running: &mut Running) {
        if !running.drain_said && (self.orders.borrow().drain || self.core.is_draining()) {
            running.drain_said = running.own.try_send(Message::Drain).is_ok();
        }
    }

    /// Asks for the lanes that are missing, or says when to look again.
    fn ask_for_lanes(&mut self, running: &Running) -> Option<Instant> {
        let lost = self.orders.borrow().lanes_lost;
        if lost != self.lanes_lost {
            self.lanes_lost = lost;
            self.lanes.failed();
        }
        let standing = self.core.peers.lanes(self.peer.incarnation);
        match self.lanes.due(standing, self.core.connect_timeout()) {
            Err(at) => at,
            Ok(lanes) => {
                // If there is no room the request times out and is made again.
                let _ = running.own.try_send(Message::LaneRequest { lanes });
                Some(Instant::now() + self.core.connect_timeout())
            }
        }
    }

    fn dial_lane(&self, addr: SocketAddr, token: Token) {
        let (peer, within) = (Arc::clone(&self.peer), self.core.connect_timeout());
        self.core.spawn(async move {
            let stream = lanes::dial(addr, token, within).await;
            peer.tell(Letter::Lane { stream, dialed: true }).await;
        });
    }

    /// A lane stands: gives it a number, and to the worker.
    async fn lane(&mut self, stream: io::Result<TcpStream>, dialed: bool) {
        let peer = self.peer.incarnation;
        if dialed {
            self.lanes.dialing = self.lanes.dialing.saturating_sub(1);
        }
        let lane = match stream.and_then(lanes::ready) {
            Ok(lane) => lane,
            Err(error) => {
                tracing::debug!(%peer, %error, "a lane could not be opened");
                self.lanes.failed();
                return;
            }
        };
        let Some(number) = self.core.lane_numbers.take() else {
            tracing::warn!(%peer, "a lane is refused: every lane number is in use");
            self.lanes.failed();
            return;
        };
        let lanes::ReadyLane { stream, local, remote, leaves_host } = lane;
        self.core.peers.lane_up(peer, LaneInfo { lane: number, local, remote });
        let up = ToWorker::LaneUp { peer, lane: number, stream, leaves_host };
        let _ = self.core.worker.send(up).await;
        self.peer.count_lanes(&self.core.peers);
    }
}

impl Peer {
    /// Counts the lanes anew, for whoever waits for one.
    pub(super) fn count_lanes(&self, table: &super::PeerTable) {
        self.state.send_modify(|state| state.lanes = table.lanes(self.incarnation));
    }
}

/// Resolves at a time, or never.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

fn restarted(by: Incarnation, causes: Vec<String>) -> End {
    let first = format!("incarnation {by} answers at its address");
    End::Restarted(std::iter::once(first).chain(causes).collect())
}

fn frame_end(error: FrameError, addr: SocketAddr) -> End {
    match error {
        FrameError::Closed | FrameError::Truncated => End::Lost(vec![format!("{error} ({addr})")]),
        FrameError::Io(error) => {
            End::Lost(vec![format!("the session with {addr} broke"), error.to_string()])
        }
        FrameError::TooLong { .. } => End::Violation(vec![error.to_string()]),
    }
}
