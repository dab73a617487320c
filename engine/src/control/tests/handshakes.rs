//! Who is let in, and what those who are not are told.

use tokio::io::AsyncReadExt;

use super::*;
use crate::config::LANES_MAX;
use crate::control::handshake::HandshakeError;
use crate::control::{ConnectError, ConnectStage};
use crate::memory::LayoutMismatch;
use crate::wire::message::{Greeting, HELLO_FRAME_BYTES_MAX, Refusal};
use crate::wire::{MAGIC, PROTOCOL_VERSION};

fn refusal(error: ConnectError) -> Refusal {
    match error {
        ConnectError::Refused { refusal, .. } => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

async fn assert_listens(node: &Node) {
    let config = EngineConfig { secret: node.control.core.config.secret.clone(), ..dialer() };
    let good = Node::new(config);
    assert_eq!(good.control.connect(node.addr()).await.unwrap(), node.incarnation);
    good.control.shutdown("it was only a test").await;
}

#[tokio::test]
async fn engines_meet_over_both_address_families_with_and_without_a_secret() {
    for listen in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
        for secret in [None, Some(SECRET)] {
            let mut config = local().listen(Some(listen.parse().unwrap())).name("listener");
            let mut other = dialer().name("dialer");
            if let Some(secret) = secret {
                (config, other) = (with_secret(config, secret), with_secret(other, secret));
            }
            let (mut a, mut b) = (Node::new(config), Node::new(other));
            let ip = match listen {
                "127.0.0.1:0" | "[::]:0" => "127.0.0.1",
                _ => "::1",
            };
            let addr = SocketAddr::new(ip.parse().unwrap(), a.addr().port());
            assert_eq!(b.control.connect(addr).await.unwrap(), a.incarnation, "{listen}");
            let (up_a, up_b) = (a.up().await, b.up().await);
            assert_eq!((up_a.peer, up_b.peer), (b.incarnation, a.incarnation));
            assert_eq!((up_a.pairings.len(), up_b.addr), (1, addr));
            assert_eq!(up_a.addr.ip(), addr.ip(), "an IPv4 peer has an IPv4 address");
            assert_eq!(a.peers.snapshot()[0].name, "dialer");
            assert_eq!(b.peers.snapshot()[0].name, "listener");
            assert!(!b.peers.snapshot()[0].lanes.is_empty(), "connect waits for a lane");
        }
    }
}

#[tokio::test]
async fn a_second_connect_returns_the_session_that_stands() {
    let (mut a, b) = pair(local(), dialer()).await;
    assert_eq!(b.control.connect(a.addr()).await.unwrap(), a.incarnation);
    // By another way to the same engine, too.
    let cuttable = Cuttable::new(a.addr()).await;
    assert_eq!(b.control.connect(cuttable.addr).await.unwrap(), a.incarnation);
    b.send_all(a.incarnation).await;
    assert_eq!(a.message().await, message(0), "the first session goes on");
}

impl Node {
    async fn send_all(&self, peer: Incarnation) {
        self.control.core.peer(peer).expect("the peer is registered");
        // The outbox of the session that came up first.
        self.outboxes[&peer].send(message(0)).await.expect("its session stands");
    }
}

#[tokio::test]
async fn a_listener_that_cannot_prove_the_secret_is_not_talked_to() {
    let a = Node::new(with_secret(local(), b"another secret....."));
    let b = Node::new(with_secret(dialer(), SECRET));
    let error = b.control.connect(a.addr()).await.unwrap_err();
    assert!(matches!(error, ConnectError::Unproven { .. }), "{error:?}");
    assert_listens(&a).await;
}

#[tokio::test]
async fn a_dialer_that_cannot_prove_the_secret_is_refused_and_sees_no_layout() {
    let a = Node::new(with_secret(local(), SECRET));
    let mut us = identity(None);
    us.secret = Some(Secret::new(*b"another secret.....").unwrap());
    let mut stream = open(a.addr(), Kind::Control).await;
    // A stranger that goes on although the answer's proof does not fit.
    let hello = crate::wire::message::Hello {
        carriers: Carriers::Tcp,
        incarnation: us.incarnation,
        name: String::new(),
        nonce: [1; 32],
        has_secret: true,
        lanes: 1,
        io: LaneIo::Epoll,
        silent_ms: 1000,
        listen_port: None,
    };
    let mut greet = async |greeting: &Greeting| {
        stream.write_all(&encode(greeting, HELLO_FRAME_BYTES_MAX).unwrap()).await.unwrap();
        let length = stream.read_u32_le().await.unwrap();
        let mut body = vec![0; length as usize];
        stream.read_exact(&mut body).await.unwrap();
        Greeting::decode(&body).unwrap()
    };
    let Greeting::Answer { .. } = greet(&Greeting::Hello(hello)).await else { panic!("no answer") };
    let forged = Greeting::Proof { proof: [7; 32], pools: us.pools };
    let told = greet(&forged).await;
    assert!(matches!(told, Greeting::Refused(Refusal::Secret(_))), "{told:?}");
    assert_listens(&a).await;
}

#[tokio::test]
async fn a_secret_on_one_side_only_is_refused_by_name() {
    let a = Node::new(with_secret(local(), SECRET));
    let error = refusal(Node::new(dialer()).control.connect(a.addr()).await.unwrap_err());
    assert!(error.to_string().contains("the listener has a secret"), "{error}");
    let b = Node::new(local());
    let with = Node::new(with_secret(dialer(), SECRET));
    let error = refusal(with.control.connect(b.addr()).await.unwrap_err());
    assert!(error.to_string().contains("the dialer has a secret"), "{error}");
    assert_listens(&a).await;
    assert_listens(&b).await;
}

#[tokio::test]
async fn another_version_is_told_by_name_on_both_sides() {
    let a = Node::new(local());
    let mut stream = TcpStream::connect(a.addr()).await.unwrap();
    let [m0, m1, m2, m3] = MAGIC;
    stream.write_all(&[m0, m1, m2, m3, 1, 99, 0]).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer, framing::preamble(Kind::Control), "the listener names its own version");

    let other = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = other.local_addr().unwrap();
    let answering = tokio::spawn(async move {
        let (mut stream, _) = other.accept().await.unwrap();
        stream.write_all(&[m0, m1, m2, m3, 1, 99, 0]).await.unwrap();
        stream.read_to_end(&mut Vec::new()).await.unwrap();
    });
    let error = Node::new(dialer()).control.connect(addr).await.unwrap_err();
    assert_eq!(refusal(error), Refusal::Version { ours: PROTOCOL_VERSION, theirs: 99 });
    answering.await.unwrap();
    assert_listens(&a).await;
}

#[tokio::test]
async fn a_layout_mismatch_names_the_field_and_both_values_on_both_sides() {
    let rt = Handle::current();
    let a = Node::with(&rt, local(), vec![card("kv", 64)], None);
    let b = Node::with(&rt, dialer(), vec![card("kv", 128)], None);
    let error = b.control.connect(a.addr()).await.unwrap_err();
    let seen = LayoutMismatch {
        pool: "kv".to_owned(),
        field: "head_bytes".to_owned(),
        ours: "128".to_owned(),
        theirs: "64".to_owned(),
    };
    assert_eq!(refusal(error), Refusal::Layout(seen));

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let dialing = tokio::spawn(async move { b.control.connect(addr).await });
    let (mut stream, _) = listener.accept().await.unwrap();
    framing::accept(&mut stream).await.unwrap();
    let error = handshake::answer(&identity(None), &mut Wire::new(stream)).await.unwrap_err();
    let HandshakeError::Refused(Refusal::Layout(mismatch)) = error else { panic!("{error:?}") };
    assert_eq!((mismatch.ours.as_str(), mismatch.theirs.as_str()), ("64", "128"));
    assert!(dialing.await.unwrap().is_err());
    assert!(a.peers.snapshot().is_empty());
}

#[tokio::test]
async fn whatever_strangers_send_the_listener_lives() {
    let a = Node::new(local().connect_timeout_ms(200u64));
    let preamble = framing::preamble(Kind::Control);
    let truncated = [&preamble[..], &100u32.to_le_bytes(), b"too few"].concat();
    let oversized = [&preamble[..], &u32::MAX.to_le_bytes()].concat();
    let garbage = [&preamble[..], &64u32.to_le_bytes(), &[0xff; 64]].concat();
    let out_of_turn =
        [&preamble[..], &encode(&Greeting::Refused(Refusal::Full(1)), 100).unwrap()].concat();
    let unknown_kind = [&MAGIC[..], &[9, 1, 0]].concat();
    let lane = [&framing::preamble(Kind::Lane)[..], &[1; 7]].concat();
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &b""[..],
        &truncated,
        &oversized,
        &garbage,
        &out_of_turn,
        &unknown_kind,
        &lane,
    ] {
        for stays in [false, true] {
            let mut stream = TcpStream::connect(a.addr()).await.unwrap();
            stream.write_all(bytes).await.unwrap();
            if stays {
                // Until the listener has had enough: closed or reset, and never for ever.
                let ended = tokio::time::timeout(LONG, stream.read_to_end(&mut Vec::new())).await;
                assert!(ended.is_ok(), "{bytes:?}");
            }
        }
    }
    // More idle strangers at once than there are slots: they time out and others get in.
    let mut idle = Vec::new();
    for _ in 0..100 {
        idle.push(TcpStream::connect(a.addr()).await.unwrap());
    }
    assert_listens(&a).await;
}

#[tokio::test]
async fn an_address_that_is_no_peer_is_told_apart() {
    let a = Node::new(local());
    let error = a.control.connect(a.addr()).await.unwrap_err();
    assert_eq!(refusal(error), Refusal::Itself);

    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = free.local_addr().unwrap();
    let mute = Node::new(dialer().connect_timeout_ms(200u64));
    let error = mute.control.connect(addr).await.unwrap_err();
    assert!(
        matches!(error, ConnectError::Timeout { stage: ConnectStage::Handshake, .. }),
        "{error:?}"
    );
    drop(free);
    let error = mute.control.connect(addr).await.unwrap_err();
    assert!(matches!(error, ConnectError::Io { .. }) && error.nobody_listens(), "{error:?}");

    let web = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = web.local_addr().unwrap();
    let answering = tokio::spawn(async move {
        let (mut stream, _) = web.accept().await.unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    });
    let error = a.control.connect(addr).await.unwrap_err();
    assert!(matches!(error, ConnectError::Protocol { .. }), "{error:?}");
    answering.await.unwrap();
    assert!(a.control.core.targets.lock().unwrap().is_empty(), "a failed connect leaves no target");
}

#[tokio::test]
async fn as_many_peers_as_allowed_and_no_more() {
    let (a, _b) = pair(local().max_peers(1u32), dialer()).await;
    let error = Node::new(dialer()).control.connect(a.addr()).await.unwrap_err();
    assert_eq!(refusal(error), Refusal::Full(1));
    let other = Node::new(local());
    let error = a.control.connect(other.addr()).await.unwrap_err();
    assert!(matches!(error, ConnectError::TooManyPeers { limit: 1 }), "{error:?}");
}

#[tokio::test]
async fn a_peer_that_breaks_the_protocol_is_expelled_and_the_listener_lives() {
    let mut a = Node::new(local());
    let too_long = u32::try_from(CONTROL_FRAME_BYTES_MAX + 1).unwrap().to_le_bytes().to_vec();
    let garbage = [&3u32.to_le_bytes()[..], &[0xff; 3]].concat();
    let tokens = Message::LaneTokens { tokens: vec![[0; 32]; 1] };
    let request = Message::LaneRequest { lanes: u16::try_from(LANES_MAX + 1).unwrap() };
    let request = encode(&request, 100).unwrap();
    for bytes in [too_long, garbage, request] {
        let mut puppet = Puppet::dial(a.addr(), &identity(None)).await;
        let peer = a.up().await.peer;
        puppet.wire.writer.write_all(&bytes).await.unwrap();
        let (gone, kind, causes) = a.gone().await;
        assert_eq!((gone, kind), (peer, FailureKind::ProtocolViolation), "{causes:?}");
        assert!(matches!(
            a.health(peer),
            Some(PeerHealth::Gone { kind: FailureKind::ProtocolViolation, .. })
        ));
    }
    // Tokens that nobody asked for are not dialed, and harm nobody.
    let mut puppet = Puppet::dial(a.addr(), &identity(None)).await;
    a.up().await;
    puppet.send(&tokens).await;
    puppet.send(&message(1)).await;
    assert_eq!(a.message().await, message(1));
    assert_listens(&a).await;
}

#[tokio::test]
async fn a_peer_that_the_worker_expels_is_given_up() {
    let (mut a, b) = pair(local(), dialer()).await;
    let cause = "wrote outside of every grant".to_owned();
    a.worker.send(ToControl::Expel { peer: b.incarnation, cause: cause.clone() }).await.unwrap();
    assert_eq!(a.gone().await, (b.incarnation, FailureKind::ProtocolViolation, vec![cause]));
}
