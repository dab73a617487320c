//! Data lanes: TCP connections that are opened under a session, each with a token that is good once.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::sockopt::{set_tcp_congestion, set_tcp_user_timeout};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::backoff::Backoff;
use super::framing::{self, Kind};
use crate::config::{LANES_MAX, is_loopback};
use crate::ids::{Incarnation, LaneId};

/// Bytes of a lane token.
const TOKEN_BYTES: usize = 32;
/// A one-time password for one lane.
pub(super) type Token = [u8; TOKEN_BYTES];
/// Tokens of all peers that wait for their connection. A peer's own share is [`LANES_MAX`].
const TOKENS_MAX: usize = 16 << 10;
/// The listener's byte for a lane that stands.
pub(super) const LANE_ACCEPTED: u8 = 1;
/// The listener's byte for a token that is wrong, used or too old.
pub(super) const LANE_REFUSED: u8 = 0;

/// Tokens that were given out and not come back yet.
#[derive(Debug, Default)]
pub(super) struct Tokens(Mutex<HashMap<Token, (Incarnation, Instant)>>);

impl Tokens {
    fn lock(&self) -> MutexGuard<'_, HashMap<Token, (Incarnation, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Up to `lanes` new tokens for a peer, fewer when the table or the peer's share of it is full.
    pub(super) fn issue(&self, peer: Incarnation, lanes: u16, good_for: Duration) -> Vec<Token> {
        let now = Instant::now();
        let mut table = self.lock();
        table.retain(|_, (_, until)| *until > now);
        let held = table.values().filter(|(owner, _)| *owner == peer).count();
        let free =
            (LANES_MAX as usize).saturating_sub(held).min(TOKENS_MAX.saturating_sub(table.len()));
        let mut issued = Vec::new();
        for _ in 0..usize::from(lanes).min(free) {
            let mut token = [0; TOKEN_BYTES];
            // Without randomness there is no token; the peer asks again.
            if getrandom::fill(&mut token).is_err() {
                break;
            }
            table.insert(token, (peer, now + good_for));
            issued.push(token);
        }
        issued
    }

    /// Whose token this is. It is burned, whatever comes of it.
    pub(super) fn redeem(&self, token: &Token) -> Option<Incarnation> {
        let (peer, until) = self.lock().remove(token)?;
        (until > Instant::now()).then_some(peer)
    }

    /// Forgets the tokens of a peer that is given up.
    pub(super) fn forget(&self, peer: Incarnation) {
        self.lock().retain(|_, (owner, _)| *owner != peer);
    }
}

/// Lane numbers in use. A number is free again when the worker says that its lane is closed and quiet.
#[derive(Debug, Default)]
pub(super) struct LaneNumbers(Mutex<(HashSet<u16>, u16)>);

impl LaneNumbers {
    /// The next free number, never 0; `None` when 65,535 lanes stand.
    pub(super) fn take(&self) -> Option<u16> {
        let mut guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (used, last) = &mut *guard;
        // Counted upwards so that a number is not used again while an old log line still names it.
        let next = (1..=u16::MAX)
            .map(|step| last.wrapping_add(step))
            .find(|n| *n != 0 && !used.contains(n))?;
        used.insert(next);
        *last = next;
        Some(next)
    }

    pub(super) fn free(&self, lane: u16) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.remove(&lane);
    }
}

/// What the dialer of a session still has to do about lanes.
#[derive(Debug)]
pub(super) struct LaneDialing {
    /// Lanes that should stand.
    pub(super) wanted: usize,
    /// Connections under way.
    pub(super) dialing: usize,
    /// Tokens asked for, and when to give up waiting for them.
    asked: Option<(u16, Instant)>,
    not_before: Instant,
    backoff: Backoff,
}

impl LaneDialing {
    pub(super) fn new() -> Self {
        Self {
            wanted: 0,
            dialing: 0,
            asked: None,
            not_before: Instant::now(),
            backoff: Backoff::new(),
        }
    }

    /// A new session: what was asked on the old one will not be answered.
    pub(super) fn new_session(&mut self, wanted: usize) {
        self.wanted = wanted;
        self.asked = None;
    }

    /// How many lanes to ask for now, or when to look again.
    pub(super) fn due(
        &mut self,
        standing: usize,
        answer_within: Duration,
    ) -> Result<u16, Option<Instant>> {
        let now = Instant::now();
        if let Some((_, until)) = self.asked {
            if until > now {
                return Err(Some(until));
            }
            self.asked = None;
            self.failed();
        }
        let missing = self.wanted.saturating_sub(standing + self.dialing);
        if missing == 0 {
            return Err(None);
        }
        if self.not_before > now {
            return Err(Some(self.not_before));
        }
        let lanes = u16::try_from(missing).unwrap_or(u16::MAX);
        self.asked = Some((lanes, now + answer_within));
        Ok(lanes)
    }

    /// Tokens came: how many of them to dial. `None` when they are more than were asked for.
    pub(super) fn answered(&mut self, tokens: usize) -> Option<usize> {
        // Nothing asked: an answer that came too late. Another was asked for or will be.
        let Some((asked, _)) = self.asked.take() else { return Some(0) };
        if tokens > usize::from(asked) {
            return None;
        }
        if tokens == 0 {
            self.failed();
        }
        self.dialing += tokens;
        Some(tokens)
    }

    /// A lane was lost or could not be had: not again at once.
    pub(super) fn failed(&mut self) {
        self.not_before = self.backoff.retry_at();
    }
}

/// A lane's name on both sides. It goes over the session, so it tells nothing of the token.
pub(super) fn lane_id(token: &Token) -> LaneId {
    let digest: [u8; 32] = Sha256::digest(token).into();
    LaneId(u64::from_le_bytes(*digest.first_chunk().unwrap_or(&[0; 8])))
}

/// Opens one lane with its token.
pub(super) async fn dial(
    addr: SocketAddr,
    token: Token,
    within: Duration,
) -> io::Result<TcpStream> {
    let dialed = async {
        let mut stream = TcpStream::connect(addr).await?;
        stream.set_nodelay(true)?;
        framing::open(&mut stream, Kind::Lane)
            .await
            .map_err(|error| io::Error::other(error.to_string()))?;
        stream.write_all(&token).await?;
        match stream.read_u8().await? {
            LANE_ACCEPTED => Ok(stream),
            _ => {
                Err(io::Error::new(io::ErrorKind::PermissionDenied, "the lane's token was refused"))
            }
        }
    };
    match tokio::time::timeout(within, dialed).await {
        Ok(result) => result,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Silences of a peer after which a lane that is not acknowledged is closed.
const USER_TIMEOUT_SILENCES: u32 = 3;

/// A lane ready for the worker.
#[derive(Debug)]
pub(super) struct ReadyLane {
    pub(super) stream: std::net::TcpStream,
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    pub(super) leaves_host: bool,
}

/// Makes a connected stream into one for the worker: no delay, non-blocking, and given up when the
/// other end acknowledges nothing for some times `silent_ms`.
pub(super) fn ready(stream: TcpStream, silent_ms: u64) -> io::Result<ReadyLane> {
    let local = canonical(stream.local_addr()?);
    let remote = canonical(stream.peer_addr()?);
    stream.set_nodelay(true)?;
    // A lane whose bytes nobody acknowledges must not outlive the peer's silence by quarters of an hour.
    // Longer than that silence, which is the cause when both are.
    let silent_ms = u32::try_from(silent_ms).unwrap_or(u32::MAX);
    let _ = set_tcp_user_timeout(&stream, silent_ms.saturating_mul(USER_TIMEOUT_SILENCES));
    if is_loopback(&remote) {
        // A host-wide BBR paces loopback far below what it can do. Where Reno may not be chosen the
        // lane is slower, not broken. Across a network the host's choice stands.
        let _ = set_tcp_congestion(&stream, "reno");
    }
    let leaves_host = !is_loopback(&remote) && remote.ip() != local.ip();
    Ok(ReadyLane { stream: stream.into_std()?, local, remote, leaves_host })
}

/// An IPv4 peer of a dual-stack listener by its IPv4 address.
pub(super) fn canonical(addr: SocketAddr) -> SocketAddr {
    match addr.ip().to_canonical() {
        ip if ip == addr.ip() => addr,
        ip => SocketAddr::new(ip, addr.port()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Incarnation = Incarnation(1);

    #[test]
    fn a_token_is_good_once_for_its_owner_and_for_its_time() {
        let tokens = Tokens::default();
        let issued = tokens.issue(PEER, 2, Duration::from_secs(60));
        assert_ne!(issued[0], issued[1]);
        assert_eq!(tokens.redeem(&issued[0]), Some(PEER));
        assert_eq!(tokens.redeem(&issued[0]), None, "used");
        assert_eq!(tokens.redeem(&[0; TOKEN_BYTES]), None, "never issued");
        tokens.forget(PEER);
        assert_eq!(tokens.redeem(&issued[1]), None, "its owner is gone");
        let late = tokens.issue(PEER, 1, Duration::ZERO);
        assert_eq!(tokens.redeem(&late[0]), None, "too late");
    }

    #[test]
    fn a_peer_cannot_fill_the_token_table() {
        let tokens = Tokens::default();
        for _ in 0..10 {
            tokens.issue(PEER, u16::MAX, Duration::from_secs(60));
        }
        assert_eq!(tokens.lock().len(), LANES_MAX as usize);
        for other in 2..1000 {
            tokens.issue(Incarnation(other), u16::MAX, Duration::from_secs(60));
        }
        assert_eq!(tokens.lock().len(), TOKENS_MAX);
    }

    #[test]
    fn lane_numbers_are_unique_never_zero_and_come_back() {
        let numbers = LaneNumbers::default();
        let taken: HashSet<_> = std::iter::from_fn(|| numbers.take()).collect();
        assert_eq!(taken.len(), usize::from(u16::MAX));
        assert!(!taken.contains(&0));
        numbers.free(77);
        assert_eq!(numbers.take(), Some(77));
        assert_eq!(numbers.take(), None);
    }
}
