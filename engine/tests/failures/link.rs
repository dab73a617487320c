//! Two engines with a proxy between them, rooms on it, and what a failure of one must say.

use std::time::Instant;

use kvferry::{
    Chunk, EngineConfig, Failure, FailureKind, GrantSpec, Incarnation, IoMode, OpenOptions,
    RecvRoom, Role, RoomHandle, RoomId, SendRoom,
};

use crate::common::{KV, Node, PATIENCE, config, layout, local, painted, wait};
use crate::tamper::Tamper;

/// Page writes of a page of every pool here: three layers of K and V.
pub const WRITES: u64 = 6;
/// Bytes of all of them.
pub const PAGE_BYTES: u64 = WRITES * 1024;
/// The room that every test begins with, and tries again.
pub const ROOM: RoomId = RoomId(7);

/// The decode side dials the prefill side through the proxy.
pub struct Link {
    pub prefill: Node,
    pub decode: Node,
    pub proxy: Tamper,
    /// The prefill engine, as the decode engine knows it.
    pub peer: Incarnation,
    pub known: Known,
}

/// Who the two sides are, and where each has the other: the prefill side first.
#[derive(Clone, Debug)]
pub struct Known {
    ids: [Incarnation; 2],
    addrs: [String; 2],
}

/// What a failure says besides the room.
#[derive(Clone, Copy, Debug)]
pub struct Says<'a> {
    pub kind: FailureKind,
    /// The side that saw it first.
    pub by: Role,
    /// Part of its causes.
    pub cause: &'a str,
    /// Pages landed, all of each.
    pub pages: u64,
}

impl Known {
    /// Checks everything that a failure of [`ROOM`] says, and its line.
    pub fn assert_says(&self, failure: &Failure, says: Says<'_>) {
        let (this, other) = if says.by == Role::Sender { (0, 1) } else { (1, 0) };
        assert_eq!((failure.kind, failure.seen_by), (says.kind, says.by), "{failure}");
        assert_eq!((failure.reporter, failure.room), (self.ids[this], ROOM), "{failure}");
        assert_eq!(failure.peer, Some(self.ids[other]), "{failure}");
        assert_eq!(failure.peer_addr.as_ref(), Some(&self.addrs[this]), "{failure}");
        let causes = failure.causes.join(": ");
        assert!(causes.contains(says.cause), "{failure}\ndoes not say {:?}", says.cause);
        let landed = (failure.landed.page_writes, failure.landed.bytes);
        assert_eq!(landed, (says.pages * WRITES, says.pages * PAGE_BYTES), "{failure}");
        assert_ne!(failure.epoch.0, 0, "{failure}");
        let line = failure.to_string();
        for part in [&self.addrs[this], says.cause, failure.remedy()] {
            assert!(line.contains(part), "{line}\nlacks {part:?}");
        }
    }

    /// Both ends have failed with the same words, and these are them.
    pub fn assert_both_say(
        &self,
        (sending, receiving): (&SendRoom, &RecvRoom),
        says: Says<'_>,
    ) -> Failure {
        let ours = wait(sending.done()).unwrap_err();
        let theirs = wait(receiving.done()).unwrap_err();
        self.assert_says(&ours, says);
        assert_eq!(ours.to_string(), theirs.to_string());
        assert_eq!(sending.report().failure.as_ref(), Some(&theirs));
        assert_eq!(receiving.report().failure.as_ref(), Some(&theirs));
        ours
    }
}

impl Link {
    pub fn new() -> Self {
        Self::with(|config| config)
    }

    /// Both sides with the same settings.
    pub fn with(set: impl Fn(EngineConfig) -> EngineConfig) -> Self {
        let prefill = Node::start(set(config(IoMode::Auto)).listen(local()), layout(64));
        Self::between(prefill, Node::start(set(config(IoMode::Auto)), layout(64)))
    }

    pub fn between(prefill: Node, decode: Node) -> Self {
        let proxy = Tamper::to(prefill.engine.listen_addr().unwrap());
        let peer = wait(decode.engine.connect(proxy.addr())).unwrap();
        until("the prefill side knows its peer", || prefill.engine.peers().len() == 1);
        let ids = [&prefill, &decode].map(|node| node.engine.incarnation());
        let addrs = [&prefill, &decode].map(|node| node.engine.peers()[0].addr.to_string());
        Self { prefill, decode, proxy, peer, known: Known { ids, addrs } }
    }

    pub fn open(&self, room: RoomId) -> SendRoom {
        self.prefill.engine.open(room, OpenOptions::default()).unwrap()
    }

    pub fn grant(&self, spec: GrantSpec) -> RecvRoom {
        self.decode.engine.grant(self.peer, spec).unwrap()
    }

    /// A room of four pages, known to both sides.
    pub fn room(&self, room: RoomId) -> (SendRoom, RecvRoom) {
        self.room_of(GrantSpec::new(room).pages(KV, [0, 1, 2, 3]))
    }

    pub fn room_of(&self, spec: GrantSpec) -> (SendRoom, RecvRoom) {
        let (sending, receiving) = (self.open(spec.room), self.grant(spec));
        wait(sending.granted()).unwrap();
        (sending, receiving)
    }

    /// Waits until the two have met again. An attempt that began before they could fails.
    pub fn meet_again(&self) {
        until("the peers meet again", || {
            let met = wait(self.decode.engine.connect(self.proxy.addr()));
            met.is_ok_and(|peer| peer == self.peer)
        });
    }

    /// Tries [`ROOM`] again, after whatever became of it: all its bytes arrive, and nothing of the
    /// old epoch among them.
    pub fn carry(&self) -> Carried {
        self.carry_with(&self.open(ROOM))
    }

    /// As [`Link::carry`], with the sending side open already.
    pub fn carry_with(&self, sending: &SendRoom) -> Carried {
        let (from, to) = ([40, 41, 42], [50, 48, 49]);
        self.prefill.paint(77);
        let receiving = self.grant(GrantSpec::new(ROOM).pages(KV, to).checksum(true));
        wait(sending.write(Chunk::new(KV, from, 0..3))).unwrap();
        sending.finish("first token".into()).unwrap();
        let received = wait(receiving.done()).unwrap();
        let sent = wait(sending.done()).unwrap();
        assert_eq!(&received.aux[..], b"first token");
        assert_eq!(sent.epoch, received.report.epoch);
        assert_eq!((sent.landed.page_writes, sent.landed.bytes), (3 * WRITES, 3 * PAGE_BYTES));
        assert_eq!(received.report.landed, sent.landed);
        assert_pages(&self.decode, 77, from.into_iter().zip(to));
        wait(sending.released());
        wait(receiving.released());
        Carried
    }
}

/// [`ROOM`] was tried again and is done, byte by byte.
pub struct Carried;

/// Writes whole pages of the pool to the same positions, and waits until both sides know them landed.
pub fn land((sending, receiving): (&SendRoom, &RecvRoom), pages: std::ops::Range<u32>) {
    let landed = u64::from(pages.end) * WRITES;
    wait(sending.write(Chunk::new(KV, pages.clone().collect::<Vec<_>>(), pages))).unwrap();
    until("the pages have landed", || {
        sending.report().landed.page_writes == landed
            && receiving.report().landed.page_writes == landed
    });
}

/// Each page holds what its source was painted with.
pub fn assert_pages(node: &Node, salt: u8, pages: impl IntoIterator<Item = (u32, u32)>) {
    for (from, to) in pages {
        for (layer, plane) in (0..3).flat_map(|layer| [(layer, 0), (layer, 1)]) {
            let (got, want) =
                (node.page(layer, plane, to), painted(layer, plane, from, salt, 1024));
            assert!(got == want, "layer {layer} plane {plane} page {to} holds other bytes");
        }
    }
}

/// Waits for something that nobody says.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "it never came that {what}");
        std::thread::yield_now();
    }
}
