//! The handshake, from both sides.
//!
//! Dialer's hello, listener's hello and proof, dialer's proof and pools, listener's welcome and pools.
//! Neither side says anything of its memory before the other has proved itself, which costs no
//! message: a stranger learns an incarnation, a name and a port, and no layout.

use std::io;

use bytes::Bytes;
use tokio::io::AsyncWriteExt;

use super::framing::{FrameError, PreambleError, Wire};
use super::proof::{self, Side};
use crate::config::Secret;
use crate::failure::CAUSE_BYTES_MAX;
use crate::ids::Incarnation;
use crate::memory::{LayoutMismatch, Pairing, PoolCard, pair_all};
use crate::wire::PROTOCOL_VERSION;
use crate::wire::message::{
    Carriers, Greeting, HELLO_FRAME_BYTES_MAX, Hello, LaneIo, MessageError, Refusal, encode,
};

/// What this engine says of itself in every handshake.
#[derive(Debug)]
pub(super) struct Identity {
    pub(super) incarnation: Incarnation,
    pub(super) name: String,
    pub(super) secret: Option<Secret>,
    pub(super) lanes: u16,
    pub(super) carriers: Carriers,
    pub(super) io: LaneIo,
    pub(super) silent_ms: u64,
    pub(super) listen_port: Option<u16>,
    pub(super) pools: Vec<PoolCard>,
}

/// A handshake that came to nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error("broken off: {0}")]
    Io(#[from] io::Error),
    /// One side refuses. The words are this side's view, whoever said it first.
    #[error("refused: {0}")]
    Refused(Refusal),
    #[error("the listener could not prove that it has the secret")]
    Unproven,
    #[error("{0}")]
    Protocol(String),
}

impl From<FrameError> for HandshakeError {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::Io(error) => Self::Io(error),
            FrameError::Closed | FrameError::Truncated => {
                Self::Io(io::Error::new(io::ErrorKind::UnexpectedEof, error.to_string()))
            }
            FrameError::TooLong { .. } => Self::Protocol(error.to_string()),
        }
    }
}

impl From<MessageError> for HandshakeError {
    fn from(error: MessageError) -> Self {
        Self::Protocol(format!("malformed greeting: {error}"))
    }
}

impl From<PreambleError> for HandshakeError {
    fn from(error: PreambleError) -> Self {
        match error {
            PreambleError::Io(error) => Self::Io(error),
            PreambleError::Version(theirs) => {
                Self::Refused(Refusal::Version { ours: PROTOCOL_VERSION, theirs })
            }
            PreambleError::Magic(_) | PreambleError::Kind(_) => Self::Protocol(error.to_string()),
        }
    }
}

/// A peer that proved itself and whose pools fit.
#[derive(Debug)]
pub(super) struct Greeted {
    pub(super) hello: Hello,
    /// Our pools against the peer's, in our order.
    pub(super) pairings: Vec<Pairing>,
    /// Whether both sides have RDMA.
    pub(super) rdma: bool,
}

/// How the dialer's side ends well.
#[derive(Debug)]
pub(super) enum Dialed {
    /// The listener said welcome.
    Welcome(Greeted),
    /// A session with this engine stands already, and is kept.
    Standing(Incarnation),
}

/// The dialer's side, behind the preamble. `standing` tells whether a session with an engine stands.
pub(super) async fn dial(
    us: &Identity,
    wire: &mut Wire,
    standing: impl Fn(Incarnation) -> bool,
) -> Result<Dialed, HandshakeError> {
    let ours = us.hello()?;
    send(wire, &Greeting::Hello(ours.clone())).await?;
    let (hello, proof) = match receive(wire).await? {
        Greeting::Answer { hello, proof } => (hello, proof),
        Greeting::Refused(refusal) => return Err(HandshakeError::Refused(refusal)),
        other => return Err(out_of_turn(&other)),
    };
    if let Some(refusal) = us.secret_differs(Side::Dialer, &hello) {
        return refuse(wire, refusal).await;
    }
    let transcript = transcript(&ours, &hello)?;
    if !proof::verify(us.secret.as_ref(), Side::Listener, &transcript, &proof) {
        let refusal = Refusal::Secret("the listener's proof does not fit".to_owned());
        let _ = send(wire, &Greeting::Refused(refusal)).await;
        return Err(HandshakeError::Unproven);
    }
    if standing(hello.incarnation) {
        let _ = send(wire, &Greeting::Refused(Refusal::Duplicate)).await;
        return Ok(Dialed::Standing(hello.incarnation));
    }
    let rdma = match us.carriers.agree(hello.carriers) {
        Ok(rdma) => rdma,
        Err(refusal) => {
            let _ = send(wire, &Greeting::Refused(mirrored(&hello, us))).await;
            return Err(HandshakeError::Refused(refusal));
        }
    };
    let proof = proof::prove(us.secret.as_ref(), Side::Dialer, &transcript);
    send(wire, &Greeting::Proof { proof, pools: us.pools.clone() }).await?;
    match receive(wire).await? {
        Greeting::Welcome { pools } => {
            let pairings = pair_all(&us.pools, &pools)
                .map_err(|mismatch| HandshakeError::Refused(Refusal::Layout(mismatch)))?;
            Ok(Dialed::Welcome(Greeted { hello, pairings, rdma }))
        }
        Greeting::Refused(Refusal::Duplicate) => Ok(Dialed::Standing(hello.incarnation)),
        Greeting::Refused(refusal) => Err(HandshakeError::Refused(refusal)),
        other => Err(out_of_turn(&other)),
    }
}

/// The listener's side, behind the preamble and up to its verdict: whoever gets the session sends
/// [`Identity::welcome`], or a refusal.
pub(super) async fn answer(us: &Identity, wire: &mut Wire) -> Result<Greeted, HandshakeError> {
    let hello = match receive(wire).await {
        Ok(Greeting::Hello(hello)) => hello,
        Ok(other) => return malformed(wire, out_of_turn(&other)).await,
        Err(error) => return malformed(wire, error).await,
    };
    if let Some(refusal) = us.secret_differs(Side::Listener, &hello) {
        return refuse(wire, refusal).await;
    }
    let ours = us.hello()?;
    let transcript = transcript(&hello, &ours)?;
    let proof = proof::prove(us.secret.as_ref(), Side::Listener, &transcript);
    send(wire, &Greeting::Answer { hello: ours, proof }).await?;
    let (proof, pools) = match receive(wire).await {
        Ok(Greeting::Proof { proof, pools }) => (proof, pools),
        Ok(Greeting::Refused(refusal)) => return Err(HandshakeError::Refused(refusal)),
        Ok(other) => return malformed(wire, out_of_turn(&other)).await,
        Err(error) => return malformed(wire, error).await,
    };
    if !proof::verify(us.secret.as_ref(), Side::Dialer, &transcript, &proof) {
        return refuse(wire, Refusal::Secret("the dialer's proof does not fit".to_owned())).await;
    }
    let rdma = match us.carriers.agree(hello.carriers) {
        Ok(rdma) => rdma,
        Err(refusal) => {
            let _ = send(wire, &Greeting::Refused(mirrored(&hello, us))).await;
            return Err(HandshakeError::Refused(refusal));
        }
    };
    match pair_all(&us.pools, &pools) {
        Ok(pairings) => Ok(Greeted { hello, pairings, rdma }),
        Err(mismatch) => {
            let LayoutMismatch { pool, field, ours, theirs } = mismatch.clone();
            let seen_there = LayoutMismatch { pool, field, ours: theirs, theirs: ours };
            let _ = send(wire, &Greeting::Refused(Refusal::Layout(seen_there))).await;
            Err(HandshakeError::Refused(Refusal::Layout(mismatch)))
        }
    }
}

impl Identity {
    fn hello(&self) -> io::Result<Hello> {
        let mut nonce = [0; 32];
        getrandom::fill(&mut nonce).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Hello {
            incarnation: self.incarnation,
            name: self.name.clone(),
            nonce,
            has_secret: self.secret.is_some(),
            lanes: self.lanes,
            carriers: self.carriers,
            io: self.io,
            silent_ms: self.silent_ms,
            listen_port: self.listen_port,
        })
    }

    /// The frame that ends the listener's side.
    pub(super) fn welcome(&self) -> Result<Vec<u8>, MessageError> {
        encode(&Greeting::Welcome { pools: self.pools.clone() }, HELLO_FRAME_BYTES_MAX)
    }

    fn secret_differs(&self, this: Side, other: &Hello) -> Option<Refusal> {
        if self.secret.is_some() == other.has_secret {
            return None;
        }
        let (has, lacks) = match (this, self.secret.is_some()) {
            (Side::Dialer, true) | (Side::Listener, false) => ("dialer", "listener"),
            (Side::Dialer, false) | (Side::Listener, true) => ("listener", "dialer"),
        };
        Some(Refusal::Secret(format!("the {has} has a secret and the {lacks} has none")))
    }
}

/// Why the two sides cannot agree on what carries pages, as the other side would say it.
fn mirrored(theirs: &Hello, us: &Identity) -> Refusal {
    match theirs.carriers.agree(us.carriers) {
        Err(refusal) => refusal,
        Ok(_) => Refusal::Malformed("carriers that agree".to_owned()),
    }
}

fn transcript(dialer: &Hello, listener: &Hello) -> Result<[u8; 32], MessageError> {
    Ok(proof::transcript(dialer, listener)?)
}

/// Tells the other side why not, if it can be told, and says the same here.
pub(super) async fn refuse<T>(wire: &mut Wire, refusal: Refusal) -> Result<T, HandshakeError> {
    let _ = send(wire, &Greeting::Refused(refusal.clone())).await;
    Err(HandshakeError::Refused(refusal))
}

async fn malformed<T>(wire: &mut Wire, error: HandshakeError) -> Result<T, HandshakeError> {
    if let HandshakeError::Protocol(what) = &error {
        let _ = send(wire, &Greeting::Refused(Refusal::Malformed(what.clone()))).await;
    }
    Err(error)
}

fn out_of_turn(greeting: &Greeting) -> HandshakeError {
    let name = match greeting {
        Greeting::Hello(_) => "a hello",
        Greeting::Answer { .. } => "an answer",
        Greeting::Proof { .. } => "a proof",
        Greeting::Welcome { .. } => "a welcome",
        Greeting::Refused(_) => "a refusal",
    };
    HandshakeError::Protocol(format!("{name} out of turn"))
}

async fn send(wire: &mut Wire, greeting: &Greeting) -> Result<(), HandshakeError> {
    let frame = encode(greeting, HELLO_FRAME_BYTES_MAX)?;
    Ok(wire.writer.write_all(&frame).await?)
}

async fn receive(wire: &mut Wire) -> Result<Greeting, HandshakeError> {
    let body: Bytes = wire.reader.next(HELLO_FRAME_BYTES_MAX).await?;
    Ok(match Greeting::decode(&body)? {
        Greeting::Refused(refusal) => Greeting::Refused(tidy(refusal)),
        greeting => greeting,
    })
}

/// A stranger's words, fit for one line of a log.
pub(super) fn one_line(text: &str) -> String {
    let mut line = String::new();
    for c in text.chars() {
        if line.len() + c.len_utf8() > CAUSE_BYTES_MAX {
            break;
        }
        line.push(if c.is_control() { ' ' } else { c });
    }
    line
}

fn tidy(refusal: Refusal) -> Refusal {
    match refusal {
        Refusal::Secret(what) => Refusal::Secret(one_line(&what)),
        Refusal::Malformed(what) => Refusal::Malformed(one_line(&what)),
        Refusal::NoRdma(what) => Refusal::NoRdma(one_line(&what)),
        Refusal::Layout(LayoutMismatch { pool, field, ours, theirs }) => {
            Refusal::Layout(LayoutMismatch {
                pool: one_line(&pool),
                field: one_line(&field),
                ours: one_line(&ours),
                theirs: one_line(&theirs),
            })
        }
        other => other,
    }
}
