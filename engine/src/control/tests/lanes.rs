//! Lanes: opened under a session, by token, and replaced when lost.

use std::io::{Read, Write};

use tokio::io::AsyncReadExt;

use super::*;
use crate::control::lanes::{LANE_ACCEPTED, LANE_REFUSED};
use crate::peers::{LaneInfo, LanePath};

fn ends(lane: &LaneInfo) -> (SocketAddr, SocketAddr) {
    match lane.path {
        LanePath::Tcp { local, remote } => (local, remote),
        LanePath::Rdma(_) => panic!("not a connection: {lane:?}"),
    }
}

#[tokio::test]
async fn both_sides_get_the_same_lanes_and_bytes_pass() {
    let (mut a, mut b) = pair(local().lanes(3u16), dialer().lanes(4u16)).await;
    for _ in 0..3 {
        a.lane().await;
        b.lane().await;
    }
    assert_eq!(a.peers.snapshot()[0].lanes.len(), 3, "as many as both allow");
    assert_eq!(b.peers.snapshot()[0].lanes.len(), 3);
    for info in &a.peers.snapshot()[0].lanes {
        let theirs = b.peers.snapshot()[0].lanes.clone();
        let (local, remote) = ends(info);
        let theirs = theirs.iter().find(|lane| ends(lane).0 == remote).expect("the other end");
        assert_eq!(ends(theirs).1, local);
        let (mut ours, mut other) = (&a.lanes[&info.lane], &b.lanes[&theirs.lane]);
        assert!(ours.nodelay().unwrap() && other.nodelay().unwrap());
        ours.write_all(b"page").unwrap();
        // The first byte behind the handshake is the worker's.
        let mut page = [0; 4];
        other.set_nonblocking(false).unwrap();
        other.read_exact(&mut page).unwrap();
        assert_eq!(&page, b"page");
    }
}

async fn present(addr: SocketAddr, token: [u8; 32]) -> u8 {
    let mut stream = open(addr, Kind::Lane).await;
    stream.write_all(&token).await.unwrap();
    stream.read_u8().await.unwrap()
}

#[tokio::test]
async fn a_lanes_token_is_good_once_and_a_wrong_one_never() {
    let mut a = Node::new(local());
    assert_eq!(present(a.addr(), [0; 32]).await, LANE_REFUSED, "no token was ever given out");
    let mut puppet = Puppet::dial(a.addr(), &identity(None)).await;
    assert_ne!(puppet.hello.hello.incarnation, Incarnation(0));
    a.up().await;
    puppet.send(&Message::LaneRequest { lanes: 1 }).await;
    let Message::LaneTokens { tokens } = puppet.message().await else { panic!("no tokens") };
    assert_eq!(tokens.len(), 1);
    let mut wrong = tokens[0];
    wrong[31] ^= 1;
    assert_eq!(present(a.addr(), wrong).await, LANE_REFUSED);
    assert_eq!(present(a.addr(), tokens[0]).await, LANE_ACCEPTED);
    a.lane().await;
    assert_eq!(present(a.addr(), tokens[0]).await, LANE_REFUSED, "used");
}

#[tokio::test]
async fn a_lost_lane_is_replaced_while_the_session_stands() {
    let (mut a, mut b) = pair(local(), dialer()).await;
    let old = [b.lane().await, b.lane().await];
    let theirs = [a.lane().await, a.lane().await];
    // A lane breaks: each side's worker notices for itself.
    let lanes = |node: &Node| node.peers.snapshot()[0].lanes.clone();
    let broken = lanes(&b).into_iter().find(|lane| lane.lane == old[0]).unwrap();
    let other = lanes(&a).into_iter().find(|lane| ends(lane).1 == ends(&broken).0).unwrap().lane;
    assert!(theirs.contains(&other));
    a.close_lane(b.incarnation, other).await;
    b.close_lane(a.incarnation, old[0]).await;
    let new = b.lane().await;
    a.lane().await;
    assert!(!old.contains(&new));
    for node in [&a, &b] {
        eventually("two lanes stand again", || node.peers.snapshot()[0].lanes.len() == 2).await;
    }
}

#[tokio::test]
async fn a_session_that_comes_back_keeps_its_lanes_and_dials_only_the_missing() {
    let (mut a, mut b) = (Node::new(local()), Node::new(dialer()));
    let wire = Cuttable::new(a.addr()).await;
    b.control.connect(wire.addr).await.unwrap();
    b.up().await;
    let old = [b.lane().await, b.lane().await];
    wire.cut(0);
    b.down().await;
    b.close_lane(a.incarnation, old[0]).await;
    b.up().await;
    let new = b.lane().await;
    assert!(!old.contains(&new));
    eventually("two lanes", || b.peers.snapshot()[0].lanes.len() == 2).await;
    assert!(b.peers.snapshot()[0].lanes.iter().any(|lane| lane.lane == old[1]));
    a.up().await;
}
