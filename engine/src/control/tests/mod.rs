//! Whole engines' control planes over real sockets, with the test in the worker's place.

mod handshakes;
mod lanes;
mod liveness;
mod sessions;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use super::framing::{self, Kind, Wire};
use super::handshake::{Dialed, Greeted, Identity};
use super::{Control, ControlSetup, PeerTable, handshake};
use crate::config::{EngineConfig, Secret};
use crate::fabric::{Link, NewLane};
use crate::failure::FailureKind;
use crate::ids::{Epoch, Incarnation, RoomId};
use crate::memory::{PoolCard, PoolLayout};
use crate::peers::PeerHealth;
use crate::wire::message::{CONTROL_FRAME_BYTES_MAX, Carriers, LaneIo, Message, encode};
use crate::worker::mail::{PeerUp, ToControl, ToWorker};
use crate::worker::wake::{Wakeup, WorkerMail};

/// Longest that anything without a promised deadline may take here.
const LONG: Duration = Duration::from_secs(30);
/// Promised deadlines are held to this many times their length: the machine may be busy.
const SLACK: u32 = 5;

const SECRET: &[u8] = b"0123456789abcdef";

fn local() -> EngineConfig {
    EngineConfig::default().listen(Some("127.0.0.1:0".parse().unwrap()))
}

fn dialer() -> EngineConfig {
    EngineConfig::default()
}

fn with_secret(config: EngineConfig, secret: &[u8]) -> EngineConfig {
    config.secret(Secret::new(secret).unwrap())
}

fn card(name: &str, page_bytes: u32) -> PoolCard {
    let layout = PoolLayout::opaque(name, 0..2, 8, page_bytes);
    PoolCard { page_stride: layout.page_bytes(), layout }
}

fn tcp(lane: &NewLane) -> &std::net::TcpStream {
    match &lane.link {
        Link::Tcp { stream, .. } => stream,
        other => panic!("not a stream: {other:?}"),
    }
}

fn message(id: u64) -> Message {
    Message::Drained { epoch: Epoch(id) }
}

/// An engine without its worker.
struct Node {
    control: Control,
    incarnation: Incarnation,
    peers: Arc<PeerTable>,
    said: mpsc::Receiver<ToWorker>,
    worker: mpsc::Sender<ToControl>,
    /// What the worker would hold.
    outboxes: HashMap<Incarnation, mpsc::Sender<Message>>,
    lanes: HashMap<u16, std::net::TcpStream>,
}

impl Node {
    fn new(config: EngineConfig) -> Self {
        Self::with(&Handle::current(), config, vec![card("kv", 64)], None)
    }

    fn with(
        rt: &Handle,
        config: EngineConfig,
        cards: Vec<PoolCard>,
        incarnation: Option<Incarnation>,
    ) -> Self {
        Self::try_with(rt, config, cards, incarnation).unwrap()
    }

    fn try_with(
        rt: &Handle,
        config: EngineConfig,
        cards: Vec<PoolCard>,
        incarnation: Option<Incarnation>,
    ) -> std::io::Result<Self> {
        let incarnation = incarnation.unwrap_or_else(|| Incarnation::draw().unwrap());
        let (tx, said) = mpsc::channel(1 << 14);
        let (worker, from_worker) = mpsc::channel(64);
        let peers = Arc::new(PeerTable::default());
        let setup = ControlSetup {
            config: Arc::new(config),
            incarnation,
            cards,
            io: LaneIo::Epoll,
            rails: Err("not here".to_owned()),
            worker: WorkerMail::new(tx, Arc::new(Wakeup::new().unwrap())),
            from_worker,
            peers: Arc::clone(&peers),
        };
        let control = Control::start(rt, setup)?;
        let (outboxes, lanes) = Default::default();
        Ok(Self { control, incarnation, peers, said, worker, outboxes, lanes })
    }

    fn addr(&self) -> SocketAddr {
        self.control.listen_addr().unwrap()
    }

    /// The next thing said to the worker.
    async fn next(&mut self) -> ToWorker {
        let said = tokio::time::timeout(LONG, self.said.recv()).await;
        let said =
            said.expect("nothing was said to the worker").expect("the control plane is gone");
        match said {
            ToWorker::PeerUp(up) => {
                self.outboxes.insert(up.peer, up.outbox.clone());
                ToWorker::PeerUp(up)
            }
            ToWorker::LaneUp { peer, lane } => {
                let (number, kept) = (lane.number, tcp(&lane).try_clone().unwrap());
                assert_ne!(number, 0);
                assert!(self.lanes.insert(number, kept).is_none(), "lane {number} used twice");
                ToWorker::LaneUp { peer, lane }
            }
            said => said,
        }
    }

    async fn up(&mut self) -> PeerUp {
        loop {
            match self.next().await {
                ToWorker::PeerUp(up) => return up,
                ToWorker::LaneUp { .. } => {}
                other => panic!("a session was to come up, not {other:?}"),
            }
        }
    }

    async fn down(&mut self) -> Incarnation {
        loop {
            match self.next().await {
                ToWorker::PeerDown { peer } => return peer,
                ToWorker::LaneUp { .. } => {}
                other => panic!("a session was to go down, not {other:?}"),
            }
        }
    }

    async fn gone(&mut self) -> (Incarnation, FailureKind, Vec<String>) {
        loop {
            match self.next().await {
                ToWorker::PeerGone { peer, kind, causes } => return (peer, kind, causes),
                ToWorker::LaneUp { .. } | ToWorker::PeerDown { .. } => {}
                other => panic!("a peer was to be gone, not {other:?}"),
            }
        }
    }

    async fn lane(&mut self) -> u16 {
        match self.next().await {
            ToWorker::LaneUp { lane, .. } => lane.number,
            other => panic!("a lane was to come up, not {other:?}"),
        }
    }

    async fn message(&mut self) -> Message {
        loop {
            match self.next().await {
                ToWorker::Message { message, .. } => return message,
                ToWorker::LaneUp { .. } => {}
                other => panic!("a message was to come, not {other:?}"),
            }
        }
    }

    async fn send(&self, peer: Incarnation, message: Message) {
        self.outboxes[&peer].send(message).await.unwrap();
    }

    fn health(&self, peer: Incarnation) -> Option<PeerHealth> {
        self.peers.get(peer).map(|info| info.health)
    }

    /// What a worker does with the lanes of a peer that is gone.
    async fn close_lane(&mut self, peer: Incarnation, lane: u16) {
        drop(self.lanes.remove(&lane));
        let down = ToControl::LaneDown { peer, lane, cause: "closed by the test".to_owned() };
        self.worker.send(down).await.unwrap();
    }
}

/// Two engines with a session between them, both told so.
async fn pair(listener: EngineConfig, dialer: EngineConfig) -> (Node, Node) {
    let (mut listener, mut dialer) = (Node::new(listener), Node::new(dialer));
    assert_eq!(dialer.control.connect(listener.addr()).await.unwrap(), listener.incarnation);
    assert_eq!(listener.up().await.peer, dialer.incarnation);
    assert_eq!(dialer.up().await.peer, listener.incarnation);
    (listener, dialer)
}

/// An engine of a test's own making: a handshake, and then whatever the test does.
struct Puppet {
    wire: Wire,
    hello: Greeted,
}

fn identity(listen_port: Option<u16>) -> Identity {
    Identity {
        carriers: Carriers::Tcp,
        incarnation: Incarnation::draw().unwrap(),
        name: "puppet".to_owned(),
        secret: None,
        lanes: 2,
        io: LaneIo::Epoll,
        silent_ms: 60_000,
        listen_port,
        pools: vec![card("kv", 64)],
    }
}

impl Puppet {
    async fn dial(addr: SocketAddr, us: &Identity) -> Self {
        let mut wire = Wire::new(open(addr, Kind::Control).await);
        match handshake::dial(us, &mut wire, |_| false).await.unwrap() {
            Dialed::Welcome(hello) => Self { wire, hello },
            Dialed::Standing(other) => panic!("a session with {other} stands"),
        }
    }

    async fn send(&mut self, message: &Message) {
        let frame = encode(message, CONTROL_FRAME_BYTES_MAX).unwrap();
        self.wire.writer.write_all(&frame).await.unwrap();
    }

    /// The next message that is no heartbeat.
    async fn message(&mut self) -> Message {
        loop {
            let body = self.wire.reader.next(CONTROL_FRAME_BYTES_MAX).await.unwrap();
            match Message::decode(&body).unwrap() {
                Message::Heartbeat => {}
                message => return message,
            }
        }
    }
}

async fn open(addr: SocketAddr, kind: Kind) -> TcpStream {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    framing::open(&mut stream, kind).await.unwrap();
    stream
}

/// A wire between two engines that can be cut, connection by connection.
struct Cuttable {
    addr: SocketAddr,
    cuts: watch::Sender<Option<usize>>,
}

impl Cuttable {
    /// Forwards to `to`. Connections count from 0 in the order they are made.
    async fn new(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (cuts, seen) = watch::channel(None);
        tokio::spawn(async move {
            for index in 0.. {
                let Ok((mut near, _)) = listener.accept().await else { return };
                let mut seen = seen.clone();
                tokio::spawn(async move {
                    let Ok(mut far) = TcpStream::connect(to).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        _ = seen.wait_for(|cut| *cut == Some(index)) => {}
                    }
                });
            }
        });
        Self { addr, cuts }
    }

    fn cut(&self, index: usize) {
        self.cuts.send_replace(Some(index));
    }
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + LONG;
    while !holds() {
        assert!(tokio::time::Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
