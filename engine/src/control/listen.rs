//! Accepting peers. Strangers get a bounded number of connections, a bounded time and a bounded number
//! of bytes; nothing they send ends the listener.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::sockopt::{set_ipv6_v6only, set_socket_reuseaddr};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::Instant;

use super::framing::{self, Kind, Wire};
use super::handshake::{self, HandshakeError};
use super::lanes::{LANE_ACCEPTED, LANE_REFUSED, Token, canonical, lane_id};
use super::peer::Letter;
use super::session::NewSession;
use super::{Core, NotAdmitted, lock};
use crate::config::LANES_MAX;
use crate::peers::LaneInfo;
use crate::wire::message::Refusal;

/// Connections at once that have not proved themselves. The next one shows the oldest out, so that
/// idle ones cannot keep peers from coming in.
const HANDSHAKES_MAX: usize = 64;
/// Connections that the kernel holds for us: all peers of a large deployment, back at once.
const BACKLOG: i32 = 1024;
/// Wait after an accept that failed for want of file descriptors or memory: both come back only when
/// something else is closed.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);
/// Lines a second about connections that came to nothing: strangers must not fill the log.
const LOG_LINES_MAX: u32 = 10;

/// Binds, for both address families where the address is that of all IPv6 interfaces.
pub(super) fn bind(addr: SocketAddr) -> io::Result<std::net::TcpListener> {
    let family = if addr.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    set_socket_reuseaddr(&socket, true)?;
    if addr.is_ipv6() {
        set_ipv6_v6only(&socket, !addr.ip().is_unspecified())?;
    }
    rustix::net::bind(&socket, &addr)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Accepts until the engine goes away.
pub(super) async fn run(core: Arc<Core>, listener: TcpListener) {
    let strangers = Strangers::new();
    let log = Arc::new(LogLimit::new());
    let accepting = async {
        loop {
            match listener.accept().await {
                Ok((stream, from)) => {
                    let Some((slot, shown_out)) = strangers.enter().await else { return };
                    let (task_core, log) = (Arc::clone(&core), Arc::clone(&log));
                    core.spawn(async move {
                        let closing = task_core.closing();
                        tokio::select! {
                            () = serve(&task_core, stream, canonical(from), slot, &log) => {}
                            () = shown_out => {}
                            () = closing => {}
                        }
                    });
                }
                Err(error) => {
                    log.say(|| tracing::debug!(%error, "cannot accept a connection"));
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            }
        }
    };
    tokio::select! {
        () = accepting => {}
        () = core.closing() => {}
    }
}

/// Connections that have not proved themselves, oldest first.
#[derive(Debug)]
struct Strangers {
    slots: Arc<Semaphore>,
    doors: Arc<Mutex<Doors>>,
}

#[derive(Debug, Default)]
struct Doors {
    next: u64,
    waiting: VecDeque<(u64, oneshot::Sender<()>)>,
}

/// A place among the strangers, held until a connection has proved itself or ends.
#[derive(Debug)]
struct Slot {
    number: u64,
    doors: Arc<Mutex<Doors>>,
    _place: OwnedSemaphorePermit,
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.doors).waiting.retain(|(number, _)| *number != self.number);
    }
}

impl Strangers {
    fn new() -> Self {
        Self { slots: Arc::new(Semaphore::new(HANDSHAKES_MAX)), doors: Arc::default() }
    }

    /// Takes a place, from the oldest if there is no other; and a future that ends when this one is
    /// the oldest and its place is taken.
    async fn enter(&self) -> Option<(Slot, impl Future<Output = ()> + use<>)> {
        let free = Arc::clone(&self.slots).try_acquire_owned();
        let place = match free {
            Ok(place) => place,
            Err(_) => {
                if let Some((_, door)) = lock(&self.doors).waiting.pop_front() {
                    let _ = door.send(());
                }
                // Never closed.
                Arc::clone(&self.slots).acquire_owned().await.ok()?
            }
        };
        let (door, shown_out) = oneshot::channel();
        let number = {
            let mut doors = lock(&self.doors);
            doors.next += 1;
            let number = doors.next;
            doors.waiting.push_back((number, door));
            number
        };
        let slot = Slot { number, doors: Arc::clone(&self.doors), _place: place };
        let shown_out = async {
            if shown_out.await.is_err() {
                // It has proved itself.
                std::future::pending().await
            }
        };
        Some((slot, shown_out))
    }
}

async fn serve(core: &Arc<Core>, stream: TcpStream, from: SocketAddr, slot: Slot, log: &LogLimit) {
    let served = tokio::time::timeout(core.connect_timeout(), accept(core, stream, from, slot));
    match served.await {
        Ok(Ok(())) => {}
        Ok(Err(HandshakeError::Refused(refusal @ (Refusal::Layout(_) | Refusal::Full(_))))) => {
            // From a peer that has the secret: somebody here has to act.
            tracing::warn!(%from, %refusal, "a peer is refused");
        }
        Ok(Err(error)) => {
            log.say(|| tracing::debug!(%from, %error, "a connection came to nothing"))
        }
        Err(_) => {
            log.say(|| tracing::debug!(%from, "a connection did not finish its handshake in time"))
        }
    }
}

async fn accept(
    core: &Arc<Core>,
    mut stream: TcpStream,
    from: SocketAddr,
    slot: Slot,
) -> Result<(), HandshakeError> {
    stream.set_nodelay(true)?;
    match framing::accept(&mut stream).await? {
        Kind::Control => accept_session(core, stream, from, slot).await,
        Kind::Lane => accept_lane(core, stream).await,
    }
}

async fn accept_session(
    core: &Arc<Core>,
    stream: TcpStream,
    addr: SocketAddr,
    slot: Slot,
) -> Result<(), HandshakeError> {
    let mut wire = Wire::new(stream);
    let greeted = handshake::answer(&core.identity, &mut wire).await?;
    // No stranger any more.
    drop(slot);
    match core.admit(Box::new(NewSession { greeted, wire, addr, dialed: false })).await {
        Ok(()) | Err(NotAdmitted::Stopped) => Ok(()),
        Err(NotAdmitted::Refused(mut session, refusal)) => {
            handshake::refuse(&mut session.wire, refusal).await
        }
    }
}

async fn accept_lane(core: &Arc<Core>, mut stream: TcpStream) -> Result<(), HandshakeError> {
    let mut token = Token::default();
    stream.read_exact(&mut token).await?;
    let owner = core.tokens.redeem(&token).and_then(|incarnation| core.peer(incarnation));
    // A peer that opens more lanes than any engine may have is stopped here.
    let owner = owner
        .filter(|peer| core.peers.lanes(peer.incarnation, LaneInfo::is_tcp) < LANES_MAX as usize);
    let Some(peer) = owner else {
        stream.write_u8(LANE_REFUSED).await?;
        return Err(HandshakeError::Protocol(
            "a lane's token is wrong, used or too old".to_owned(),
        ));
    };
    // Before the worker has the lane, or its frames could come first.
    stream.write_u8(LANE_ACCEPTED).await?;
    let id = lane_id(&token);
    peer.tell(Letter::Lane { id, stream: Ok(stream), dialed: false }).await;
    Ok(())
}

/// Lets through so many log lines a second.
#[derive(Debug)]
struct LogLimit(Mutex<(Instant, u32)>);

impl LogLimit {
    fn new() -> Self {
        Self(Mutex::new((Instant::now(), 0)))
    }

    fn say(&self, line: impl FnOnce()) {
        let allowed = {
            let mut window = lock(&self.0);
            if window.0.elapsed() >= Duration::from_secs(1) {
                *window = (Instant::now(), 0);
            }
            window.1 += 1;
            window.1 <= LOG_LINES_MAX
        };
        if allowed {
            line();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_cannot_fill_the_log() {
        let limit = LogLimit::new();
        let mut lines = 0;
        for _ in 0..1000 {
            limit.say(|| lines += 1);
        }
        assert!((LOG_LINES_MAX..100).contains(&lines), "{lines}");
    }

    #[test]
    fn all_interfaces_of_ipv6_are_bound_for_both_families() {
        let Ok(listener) = bind("[::]:0".parse().unwrap()) else {
            // A host without IPv6.
            return;
        };
        let port = listener.local_addr().unwrap().port();
        for ip in ["127.0.0.1", "::1"] {
            let addr = SocketAddr::new(ip.parse().unwrap(), port);
            std::net::TcpStream::connect(addr).unwrap();
        }
    }
}
