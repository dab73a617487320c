//! One session's outbound half, and the ways a session ends.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::framing::{FrameReader, Wire};
use super::handshake::Greeted;
use crate::wire::message::{CONTROL_FRAME_BYTES_MAX, Message, encode};

/// Messages of the worker that may wait for a session. What does not fit waits in the worker.
pub(super) const OUTBOX_MESSAGES: usize = 1024;
/// Messages of the control plane itself that may wait: one drain, one lane request, one answer a
/// request.
pub(super) const OWN_MESSAGES: usize = 16;
/// Ticks of silence that make a peer silent. Counted, not timed: an engine that was itself stopped
/// finds one tick gone when it goes on, and listens for the others.
pub(super) const SILENT_TICKS: u32 = 6;
/// Bounds of the heartbeat. Below 10 ms it would cost more than it tells; above a second a peer that
/// was restarted behind the same address could not be told from a live one soon enough.
const HEARTBEAT: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// Small messages are put together up to this many bytes a write.
const COALESCE_BYTES: usize = 64 << 10;

/// A tick of the silence count.
pub(super) fn silence_tick(silent_ms: u64) -> Duration {
    (Duration::from_millis(silent_ms) / SILENT_TICKS).max(HEARTBEAT.0)
}

/// How often to speak to a peer that counts silence so: as often as it looks.
pub(super) fn heartbeat(silent_ms: u64) -> Duration {
    silence_tick(silent_ms).min(HEARTBEAT.1)
}

/// Ticks from one period on, without catching up on missed ones.
pub(super) fn ticks(period: Duration) -> Interval {
    let mut ticks = tokio::time::interval_at(Instant::now() + period, period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Why a session ended.
#[derive(Debug)]
pub(super) enum End {
    /// Closed or broken; the peer may come back.
    Lost(Vec<String>),
    /// A newer session of the same two engines takes its place.
    Replaced(Box<NewSession>),
    /// Another incarnation answers where the peer was.
    Restarted(Vec<String>),
    /// Nothing came, or nothing was taken, for too long.
    Silent(Vec<String>),
    /// The peer did what the protocol does not allow.
    Violation(Vec<String>),
    /// The peer goes away on purpose.
    Bye(String),
    /// This engine goes away, or sends the peer away, on purpose.
    Leave(String),
    /// Nobody is left to tell: the engine is being torn down.
    WorkerGone,
}

/// A session that stands and has not begun to run.
#[derive(Debug)]
pub(super) struct NewSession {
    pub(super) greeted: Greeted,
    pub(super) wire: Wire,
    /// The peer's end; the address dialed, where this side dialed.
    pub(super) addr: SocketAddr,
    /// Whether this side dialed.
    pub(super) dialed: bool,
}

impl NewSession {
    /// Where the peer listens, as far as this side can tell.
    pub(super) fn home(&self) -> Option<SocketAddr> {
        let port =
            if self.dialed { Some(self.addr.port()) } else { self.greeted.hello.listen_port };
        port.map(|port| SocketAddr::new(self.addr.ip().to_canonical(), port))
    }
}

/// Why nothing more can be written.
#[derive(Debug, thiserror::Error)]
pub(super) enum WriteEnd {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the peer took no byte that was sent to it")]
    Stalled,
}

/// The outbound half. Dropping [`Writer::run`] midway loses nothing: what is half written stays here.
#[derive(Debug)]
pub(super) struct Writer {
    half: OwnedWriteHalf,
    own: mpsc::Receiver<Message>,
    outbox: mpsc::Receiver<Message>,
    pending: Vec<u8>,
    written: usize,
    heartbeat: Duration,
    stall_tick: Duration,
}

impl Writer {
    /// `first` goes out before everything else: the listener's welcome.
    pub(super) fn new(
        half: OwnedWriteHalf,
        own: mpsc::Receiver<Message>,
        outbox: mpsc::Receiver<Message>,
        first: Vec<u8>,
        (heartbeat, stall_tick): (Duration, Duration),
    ) -> Self {
        Self { half, own, outbox, pending: first, written: 0, heartbeat, stall_tick }
    }

    /// Writes what comes, and a heartbeat when it is time, until it cannot.
    pub(super) async fn run(&mut self) -> WriteEnd {
        let mut heartbeat = ticks(self.heartbeat);
        loop {
            if let Err(end) = self.write_pending().await {
                return end;
            }
            let message = tokio::select! {
                biased;
                Some(message) = self.own.recv() => message,
                _ = heartbeat.tick() => Message::Heartbeat,
                Some(message) = self.outbox.recv() => message,
            };
            self.push(&message);
            while self.pending.len() < COALESCE_BYTES
                && let Ok(message) = self.outbox.try_recv()
            {
                self.push(&message);
            }
        }
    }

    fn push(&mut self, message: &Message) {
        match encode(message, CONTROL_FRAME_BYTES_MAX) {
            Ok(frame) => self.pending.extend_from_slice(&frame),
            // The bounds of every message lie below the frame's; its room ends by its deadline.
            Err(error) => tracing::error!(%error, "a control message cannot be sent"),
        }
    }

    async fn write_pending(&mut self) -> Result<(), WriteEnd> {
        let mut stall = ticks(self.stall_tick);
        let mut stalled = 0;
        while self.written < self.pending.len() {
            tokio::select! {
                wrote = self.half.write(&self.pending[self.written..]) => match wrote? {
                    0 => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                    bytes => {
                        self.written += bytes;
                        stalled = 0;
                    }
                },
                _ = stall.tick() => {
                    stalled += 1;
                    if stalled >= SILENT_TICKS {
                        return Err(WriteEnd::Stalled);
                    }
                }
            }
        }
        self.written = 0;
        self.pending.clear();
        // One large grant must not hold its megabytes for the life of the session.
        self.pending.shrink_to(COALESCE_BYTES);
        Ok(())
    }

    /// Puts one message that waits into the pending bytes.
    fn push_waiting(&mut self) -> bool {
        let message = self.own.try_recv().or_else(|_| self.outbox.try_recv());
        message.is_ok_and(|message| {
            self.push(&message);
            true
        })
    }

    /// Writes what waits as far as it goes without waiting.
    pub(super) fn write_now(mut self) {
        loop {
            while self.written < self.pending.len() {
                match self.half.try_write(&self.pending[self.written..]) {
                    Ok(bytes) if bytes > 0 => self.written += bytes,
                    _ => return,
                }
            }
            self.written = 0;
            self.pending.clear();
            if !self.push_waiting() {
                return;
            }
        }
    }

    /// Writes what waits, then goodbye, and waits for the peer to close, at most for `longest`.
    pub(super) async fn farewell(
        mut self,
        mut reader: FrameReader<OwnedReadHalf>,
        reason: String,
        longest: Duration,
    ) {
        // What is put there from now on would be lost without a word.
        self.outbox.close();
        let goodbye = async {
            self.write_pending().await?;
            while self.push_waiting() {
                self.write_pending().await?;
            }
            self.push(&Message::Bye { reason });
            self.write_pending().await?;
            self.half.shutdown().await?;
            reader.linger(longest).await;
            Ok::<_, WriteEnd>(())
        };
        let _ = tokio::time::timeout(longest, goodbye).await;
    }
}
