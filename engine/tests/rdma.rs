//! Rooms over RDMA: on real rails where `KVFERRY_RDMA` names some (`ci/rdma` runs this in a machine with
//! Soft-RoCE), on the stand-in for libibverbs otherwise.
#![cfg(feature = "rdma")]
#![allow(missing_docs, unreachable_pub, reason = "tests document themselves by name")]

mod common;
#[path = "common/rails.rs"]
mod rails_of_tests;

#[path = "rdma/fallback.rs"]
mod fallback;
#[path = "rdma/faults.rs"]
mod faults;
#[path = "rdma/rails.rs"]
mod rails;
#[path = "rdma/rooms.rs"]
mod rooms;

use std::time::{Duration, Instant};

use common::{KV, PATIENCE, Pair, layout, painted, wait};
use kvferry::{Chunk, FabricInfo, GrantSpec, LanePath, OpenOptions, RecvRoom, SendRoom};
use rails_of_tests::Rails;

/// A room under way: both handles.
struct Crossing {
    sending: SendRoom,
    receiving: RecvRoom,
}

/// Grants pages to a room and opens it.
fn start(pair: &Pair, room: u64, pages: Vec<u32>) -> Crossing {
    let spec = GrantSpec::new(room.into()).pages(KV, pages);
    let receiving = pair.decode.engine.grant(pair.peer, spec).unwrap();
    let sending = pair.prefill.engine.open(room.into(), OpenOptions::default()).unwrap();
    wait(sending.granted()).unwrap();
    Crossing { sending, receiving }
}

/// Writes and finishes a room.
fn send(crossing: &Crossing, pages: Vec<u32>) {
    let count = pages.len() as u32;
    wait(crossing.sending.write(Chunk::new(KV, pages, 0..count))).unwrap();
    crossing.sending.finish(bytes::Bytes::from_static(b"first token")).unwrap();
}

fn finish(crossing: Crossing) {
    let received = wait(crossing.receiving.done()).unwrap();
    assert_eq!(&received.aux[..], b"first token");
    wait(crossing.sending.done()).unwrap();
}

/// Waits until something is so.
fn until(what: &str, so: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Open RDMA lanes of an engine's first peer, as (rail, remote rail).
fn open_paths(engine: &kvferry::Engine) -> Vec<(String, String)> {
    let lanes = engine.peers().into_iter().flat_map(|peer| peer.lanes);
    let path = |lane: kvferry::LaneInfo| match lane.path {
        LanePath::Rdma(path) if lane.open => Some((path.local.rail, path.remote.rail)),
        _ => None,
    };
    lanes.filter_map(path).collect()
}
