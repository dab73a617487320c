//! A room crosses: what travels, and what both sides say of it.
#![allow(missing_docs)]

mod common;

use common::{KV, Pair, wait};
use kvferry::{Chunk, GrantSpec, IoMode, OpenOptions, RoomHandle, RoomState};

fn both(test: impl Fn(IoMode)) {
    test(IoMode::Auto);
    test(IoMode::Epoll);
}

#[test]
fn a_room_carries_every_byte_to_the_granted_pages_and_touches_no_other() {
    both(|io| {
        let pair = Pair::new(io);
        pair.prefill.paint(1);
        let sending = pair.prefill.engine.open(7.into(), OpenOptions::default()).unwrap();
        assert_eq!(sending.state(), RoomState::Bootstrapping);
        let spec = GrantSpec::new(7.into()).pages(KV, [9, 4, 5, 60]).note("prefix=0");
        let receiving = pair.decode.engine.grant(pair.peer, spec).unwrap();
        let granted = wait(sending.granted()).unwrap();
        assert_eq!(&granted.note[..], b"prefix=0");
        assert_eq!(sending.state(), RoomState::WaitingForInput);
        wait(sending.write(Chunk::new(KV, [0, 1], 0..2))).unwrap();
        wait(sending.write(Chunk::new(KV, [2, 63], 2..4))).unwrap();
        sending.finish("token".into()).unwrap();
        let received = wait(receiving.done()).unwrap();
        let report = wait(sending.done()).unwrap();
        assert_eq!(&received.aux[..], b"token");
        assert_eq!(received.report.landed, report.landed);
        assert_eq!((report.landed.page_writes, report.landed.bytes), (24, 24 * 1024));
        assert_eq!((sending.state(), receiving.state()), (RoomState::Success, RoomState::Success));
        pair.decode.assert_pages(1, &[(0, 9), (1, 4), (2, 5), (63, 60)]);
        wait(sending.released());
        wait(receiving.released());
    });
}
