//! A peer's task while a session stands: reading, lanes, and whether the peer is alive.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use super::{Letter, Life, PeerState, PeerTask, Supplanted, Verdict, restarted};
use crate::control::FAREWELL;
use crate::control::framing::{FrameError, FrameReader};
use crate::control::handshake::{Greeted, one_line};
use crate::control::lanes::{self, Token};
use crate::control::rails::rails_message;
use crate::control::session::{
    End, NewSession, OUTBOX_MESSAGES, OWN_MESSAGES, SILENT_TICKS, WriteEnd, Writer, heartbeat,
    silence_tick, ticks,
};
use crate::fabric::{Link, NewLane};
use crate::ids::{Incarnation, LaneId};
use crate::peers::{FabricInfo, LaneInfo, LanePath, PeerHealth, PeerInfo};
use crate::wire::message::{CONTROL_FRAME_BYTES_MAX, Carriers, Message};
use crate::worker::mail::{PeerUp, ToWorker};

/// The session that runs.
#[derive(Debug)]
pub(in crate::control) struct Running {
    addr: SocketAddr,
    pub(in crate::control) dialed: bool,
    since: Instant,
    pub(in crate::control) own: mpsc::Sender<Message>,
    /// What may carry pages.
    pub(in crate::control) carrier: Carriers,
    drain_said: bool,
}

impl PeerTask {
    /// Runs one session from its first byte to its last.
    pub(super) async fn session(&mut self, new: NewSession) -> End {
        let NewSession { greeted: Greeted { hello, pairings, rdma }, wire, addr, dialed } = new;
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
        let (outbox, outbox_waiting) = mpsc::channel(OUTBOX_MESSAGES);
        let (own, own_waiting) = mpsc::channel(OWN_MESSAGES);
        let up = PeerUp { peer, addr, pairings, outbox };
        if self.core.worker.send(ToWorker::PeerUp(up)).await.is_err() {
            return End::WorkerGone;
        }
        // Shown only now: whoever sees the peer may grant to it.
        self.core.peers.up(PeerInfo {
            incarnation: peer,
            name,
            addr,
            health,
            fabric,
            why_not_rdma: self.core.why_tcp(rdma),
            lanes,
            faults: Vec::new(),
        });
        self.lanes.new_session(usize::from(self.core.identity.lanes.min(hello.lanes)));
        self.peer.state.send_modify(|state| {
            *state =
                PeerState { life: Life::Up, lanes: self.core.peers.lanes(peer, |lane| lane.open) };
        });

        let tick = silence_tick(self.core.config.peer_silent_ms);
        let beat = heartbeat(hello.silent_ms);
        let mut reader = wire.reader;
        let mut writer = Writer::new(wire.writer, own_waiting, outbox_waiting, first, (beat, tick));
        let carrier = match (rdma, self.core.identity.carriers, hello.carriers) {
            (false, _, _) => Carriers::Tcp,
            (true, Carriers::RdmaOnly, _) | (true, _, Carriers::RdmaOnly) => Carriers::RdmaOnly,
            (true, _, _) => Carriers::RdmaOrTcp,
        };
        self.rails.new_session();
        if let Some(rails) = rails_message(&self.core.rails, rdma) {
            // The first of at most a few: there is room.
            let _ = own.try_send(rails);
        }
        let since = Instant::now();
        let running = Running { addr, dialed, since, own, carrier, drain_said: false };
        let end = {
            let reading = self.read(&mut reader, running);
            tokio::pin!(reading);
            tokio::select! {
                end = &mut reading => end,
                broken = writer.run() => match broken {
                    WriteEnd::Stalled => End::Silent(vec![broken.to_string()]),
                    WriteEnd::Io(error) => {
                        // What the peer said before it went is still to be read: it may say why.
                        let rest = tokio::time::timeout(tick, reading).await;
                        rest.unwrap_or_else(|_| broke(addr, &error))
                    }
                },
            }
        };
        match &end {
            End::Leave(reason) => {
                writer.farewell(reader, reason.clone(), FAREWELL).await;
            }
            // The worker ends before the control plane is shut down. Its last words, how its rooms
            // ended, may still wait here.
            End::WorkerGone => {
                let reason = self.core.closing_reason();
                let reason = reason.unwrap_or_else(|| "its worker has ended".to_owned());
                writer.farewell(reader, reason, FAREWELL).await;
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
            let rails_at = if running.dialed { self.dial_rails(&running) } else { None };
            let wants_tcp = running.dialed && self.wants_tcp(&running);
            let lanes_at = if wants_tcp { self.ask_for_lanes(&running) } else { None };
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
                        let (addr, ms) = (running.addr, self.core.config.peer_silent_ms);
                        return End::Silent(vec![format!("nothing was heard of {addr} for {ms} ms")]);
                    }
                }
                () = at(probe_at) => {
                    if let Some(end) = self.probe(reader.received()) {
                        return end;
                    }
                }
                () = at(lanes_at) => {}
                () = at(rails_at) => {}
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
                    tokens
                        .into_iter()
                        .take(dial)
                        .for_each(|token| self.dial_lane(running.addr, token));
                    Ok(())
                }
            },
            Ok(message) => {
                let Some(message) = self.rail_message(message, running)? else { return Ok(()) };
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
            Letter::Lane { id, stream, dialed } => self.lane(id, stream, dialed).await,
            Letter::Made(made) => self.made(*made, Some(running)).await,
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

    pub(super) fn supplant(&self, by: Incarnation, settled: oneshot::Sender<()>) -> Supplanted {
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
        let standing = self.core.peers.lanes(self.peer.incarnation, LaneInfo::is_tcp);
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
            let id = lanes::lane_id(&token);
            peer.tell(Letter::Lane { id, stream, dialed: true }).await;
        });
    }

    /// A lane stands: gives it a number, and to the worker.
    pub(super) async fn lane(&mut self, id: LaneId, stream: io::Result<TcpStream>, dialed: bool) {
        let peer = self.peer.incarnation;
        if dialed {
            self.lanes.dialing = self.lanes.dialing.saturating_sub(1);
        }
        let silent_ms = self.core.config.peer_silent_ms;
        let lane = match stream.and_then(|stream| lanes::ready(stream, silent_ms)) {
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
        self.core.peers.lane_up(
            peer,
            LaneInfo { lane: number, path: LanePath::Tcp { local, remote }, open: true },
        );
        let link = Link::Tcp { stream, leaves_host };
        let up = ToWorker::LaneUp { peer, lane: NewLane { id, number, link, say: None } };
        let _ = self.core.worker.send(up).await;
        self.peer.count_lanes(&self.core.peers);
    }
}

/// Resolves at a time, or never.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

fn frame_end(error: FrameError, addr: SocketAddr) -> End {
    match error {
        FrameError::Closed | FrameError::Truncated => End::Lost(vec![format!("{error} ({addr})")]),
        FrameError::Io(error) => broke(addr, &error),
        FrameError::TooLong { .. } => End::Violation(vec![error.to_string()]),
    }
}

fn broke(addr: SocketAddr, error: &io::Error) -> End {
    End::Lost(vec![format!("the session with {addr} broke"), error.to_string()])
}
