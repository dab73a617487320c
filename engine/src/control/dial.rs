//! Dialing: a task an address, which goes on after every loss until it is told to stop.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::backoff::Backoff;
use super::error::{ConnectError, ConnectStage};
use super::framing::{self, Kind, Wire};
use super::handshake::{self, Dialed, HandshakeError};
use super::peer::{Letter, Life};
use super::session::NewSession;
use super::{Core, NotAdmitted, lock};
use crate::config::FabricChoice;
use crate::ids::Incarnation;
use crate::wire::message::Refusal;

/// An address that is dialed.
#[derive(Debug)]
pub(super) struct Target {
    status: watch::Receiver<Status>,
    /// Dropped with the target: the task ends.
    _stop: oneshot::Sender<()>,
}

impl Target {
    /// Whether this peer is, or was last, at the address.
    pub(super) fn is_of(&self, peer: Incarnation) -> bool {
        self.status.borrow().peer == Some(peer)
    }
}

#[derive(Clone, Debug)]
struct Status {
    /// Who answered last.
    peer: Option<Incarnation>,
    outcome: Outcome,
}

#[derive(Clone, Debug)]
enum Outcome {
    Dialing,
    Up,
    Failed(Arc<ConnectError>),
}

/// See [`super::Control::connect`].
pub(super) async fn connect(
    core: &Arc<Core>,
    addr: SocketAddr,
) -> Result<Incarnation, ConnectError> {
    if core.closing_reason().is_some() {
        return Err(ConnectError::Stopped);
    }
    let deadline = Instant::now() + core.connect_timeout();
    let (mut status, joined) = target(core, addr);
    // What failed before this caller came is not its answer.
    let mut stale = joined;
    loop {
        let Status { peer, outcome } = status.borrow_and_update().clone();
        match outcome {
            Outcome::Failed(error) if !stale => return Err(error.duplicate()),
            Outcome::Up => {
                let peer = peer.and_then(|peer| core.peer(peer));
                if let Some(peer) = peer {
                    let mut state = peer.state.subscribe();
                    let settled = state.wait_for(|state| match state.life {
                        Life::Up => state.lanes > 0,
                        life => life == Life::Gone,
                    });
                    match timeout_at(deadline, settled).await {
                        Ok(Ok(state)) if state.life == Life::Up => return Ok(peer.incarnation),
                        // Gone again: the task says what comes of the next attempt.
                        Ok(_) => {}
                        Err(_) => return Err(no_lane(core, addr, peer.incarnation)),
                    }
                }
            }
            Outcome::Dialing | Outcome::Failed(_) => {}
        }
        stale = false;
        status.changed().await.map_err(|_| ConnectError::Stopped)?;
    }
}

/// How long a session that was agreed on may take to show here.
const SETTLE: Duration = Duration::from_millis(100);
/// Tries to reconnect within a peer's grace, at the least.
const TRIES_PER_GRACE: u32 = 8;

/// The task that dials an address, made if there is none; whether there was one.
fn target(core: &Arc<Core>, addr: SocketAddr) -> (watch::Receiver<Status>, bool) {
    let mut targets = lock(&core.targets);
    if let Some(target) = targets.get(&addr) {
        return (target.status.clone(), true);
    }
    let (said, status) = watch::channel(Status { peer: None, outcome: Outcome::Dialing });
    let (stop, stopped) = oneshot::channel();
    targets.insert(addr, Target { status: status.clone(), _stop: stop });
    drop(targets);
    let task_core = Arc::clone(core);
    core.spawn(async move {
        tokio::select! {
            () = keep_dialing(&task_core, addr, said) => {}
            () = task_core.closing() => {}
            _ = stopped => {}
        }
    });
    (status, false)
}

async fn keep_dialing(core: &Arc<Core>, addr: SocketAddr, said: watch::Sender<Status>) {
    let say = |peer, outcome| said.send_replace(Status { peer, outcome });
    let mut backoff = Backoff::new();
    let mut known = None;
    let grace = Duration::from_millis(core.config.reconnect_grace_ms);
    let mut lost: Option<Instant> = None;
    loop {
        match attempt(core, addr).await {
            Ok(incarnation) => known = Some(incarnation),
            Err(error) => {
                let Some(incarnation) = known else {
                    lock(&core.targets).retain(|at, target| {
                        *at != addr || !target.status.same_channel(&said.subscribe())
                    });
                    say(None, Outcome::Failed(Arc::new(error)));
                    return;
                };
                tracing::debug!(%addr, %error, "cannot reconnect");
                if error.nobody_listens()
                    && let Some(peer) = core.peer(incarnation)
                {
                    let cause = format!("nobody listens at {addr} any more");
                    peer.tell(Letter::NobodyListens { cause }).await;
                }
                say(known, Outcome::Failed(Arc::new(error)));
            }
        }
        // Whoever dialed: there is nothing to do while a session with that engine stands.
        while let Some(peer) = known.and_then(|known| core.peer(known))
            && peer.is_up()
        {
            say(known, Outcome::Up);
            peer.not_up().await;
            lost = Some(Instant::now());
            say(known, Outcome::Dialing);
            sleep_until(within_grace(backoff.retry_at(), lost, grace)).await;
        }
        if matches!(said.borrow().outcome, Outcome::Failed(_)) {
            sleep_until(within_grace(backoff.retry_at(), lost, grace)).await;
        }
    }
}

/// A time to try again that leaves a peer whose session was just lost several tries within its grace:
/// our own patience must not be what kills it.
fn within_grace(retry_at: Instant, lost: Option<Instant>, grace: Duration) -> Instant {
    let now = Instant::now();
    match lost {
        Some(lost) if now < lost + grace => retry_at.min(now + grace / TRIES_PER_GRACE),
        _ => retry_at,
    }
}

/// Dials until a session with whoever answers stands, fails, or the time is up.
async fn attempt(core: &Arc<Core>, addr: SocketAddr) -> Result<Incarnation, ConnectError> {
    let deadline = Instant::now() + core.connect_timeout();
    let mut backoff = Backoff::new();
    loop {
        let connecting = timeout_at(deadline, TcpStream::connect(addr)).await;
        let stream = connecting
            .map_err(|_| timeout(core, addr, ConnectStage::Tcp))?
            .and_then(not_itself)
            .map_err(|source| ConnectError::Io { addr, source })?;
        let incarnation = timeout_at(deadline, greet(core, addr, stream))
            .await
            .map_err(|_| timeout(core, addr, ConnectStage::Handshake))??;
        // It stands here too, or is about to: its other end has said so.
        if let Some(peer) = core.peer(incarnation) {
            let mut state = peer.state.subscribe();
            let up = state.wait_for(|state| matches!(state.life, Life::Up | Life::Gone));
            // Not for long: it may have stood and been lost before anybody looked.
            let settled = timeout_at(deadline.min(Instant::now() + SETTLE), up).await;
            if settled.is_ok_and(|state| state.is_ok_and(|state| state.life == Life::Up)) {
                return Ok(incarnation);
            }
        }
        // The session that was kept ended before it was seen.
        let retry_at = backoff.retry_at();
        if retry_at >= deadline {
            return Err(timeout(core, addr, ConnectStage::Handshake));
        }
        sleep_until(retry_at).await;
    }
}

/// Shakes hands; returns whose session stands, be it this one or another.
async fn greet(
    core: &Arc<Core>,
    addr: SocketAddr,
    mut stream: TcpStream,
) -> Result<Incarnation, ConnectError> {
    let failed = |error: HandshakeError| match error {
        HandshakeError::Io(source) => ConnectError::Io { addr, source },
        HandshakeError::Refused(refusal) => ConnectError::Refused { addr, refusal },
        HandshakeError::Unproven => ConnectError::Unproven { addr },
        HandshakeError::Protocol(what) => ConnectError::Protocol { addr, what },
    };
    stream.set_nodelay(true).map_err(|source| ConnectError::Io { addr, source })?;
    framing::open(&mut stream, Kind::Control).await.map_err(|error| failed(error.into()))?;
    let mut wire = Wire::new(stream);
    let standing = |incarnation| core.peer(incarnation).is_some_and(|peer| peer.is_up());
    let greeted =
        match handshake::dial(&core.identity, &mut wire, standing).await.map_err(failed)? {
            Dialed::Welcome(greeted) => greeted,
            Dialed::Standing(incarnation) => return Ok(incarnation),
        };
    let incarnation = greeted.hello.incarnation;
    match core.admit(Box::new(NewSession { greeted, wire, addr, dialed: true })).await {
        Ok(()) | Err(NotAdmitted::Refused(_, Refusal::Duplicate)) => Ok(incarnation),
        Err(NotAdmitted::Refused(_, Refusal::Full(limit))) => {
            Err(ConnectError::TooManyPeers { limit })
        }
        Err(NotAdmitted::Refused(_, refusal)) => Err(ConnectError::Refused { addr, refusal }),
        Err(NotAdmitted::Stopped) => Err(ConnectError::Stopped),
    }
}

/// Dialing a free port of one's own host can connect a socket to itself (TCP's simultaneous open).
/// Nobody listens there.
fn not_itself(stream: TcpStream) -> io::Result<TcpStream> {
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(stream)
}

/// No lane came up in time; where only RDMA will do, why.
fn no_lane(core: &Core, addr: SocketAddr, peer: Incarnation) -> ConnectError {
    let info = core.peers.get(peer).filter(|_| core.config.fabric == FabricChoice::RequireRdma);
    match info.and_then(|info| info.why_not_rdma) {
        Some(cause) => {
            ConnectError::NoRdmaLane { addr, timeout_ms: core.config.connect_timeout_ms, cause }
        }
        None => timeout(core, addr, ConnectStage::Lanes),
    }
}

fn timeout(core: &Core, addr: SocketAddr, stage: ConnectStage) -> ConnectError {
    ConnectError::Timeout { addr, timeout_ms: core.config.connect_timeout_ms, stage }
}
