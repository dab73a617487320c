//! A room crosses: what travels, and what both sides say of it.
#![allow(missing_docs, reason = "tests document themselves by name")]

mod common;

use std::time::Duration;

use common::{KV, Pair, config, layout, wait};
use kvferry::{
    AuxSlot, Chunk, EngineConfig, FailureKind, GrantSpec, IoMode, OpenOptions, Region, RoomHandle,
    RoomState, WriteError, min_state, poll_many,
};

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
        assert_eq!(granted.pools[0].positions, 4);
        assert_eq!(sending.state(), RoomState::WaitingForInput);
        wait(sending.write(Chunk::new(KV, [0, 1], 0..2))).unwrap();
        wait(sending.write(Chunk::new(KV, [2, 63], 2..4))).unwrap();
        sending.finish("token".into()).unwrap();
        let received = wait(receiving.done()).unwrap();
        let report = wait(sending.done()).unwrap();
        assert_eq!(&received.aux[..], b"token");
        assert_eq!(received.report.landed, report.landed);
        assert_eq!((report.landed.page_writes, report.landed.bytes), (24, 24 * 1024));
        assert_eq!((report.epoch, report.chunks), (received.report.epoch, 2));
        assert_eq!((sending.state(), receiving.state()), (RoomState::Success, RoomState::Success));
        pair.decode.assert_pages(1, &[(0, 9), (1, 4), (2, 5), (63, 60)]);
        wait(sending.released());
        wait(receiving.released());
    });
}

#[test]
fn layers_can_be_written_one_by_one_in_any_order() {
    let pair = Pair::new(IoMode::Auto);
    pair.prefill.paint(2);
    let sending = pair.prefill.engine.open(1.into(), OpenOptions::default()).unwrap();
    let receiving =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(1.into()).pages(KV, [3, 1])).unwrap();
    for layer in [2, 0, 1] {
        wait(sending.write(Chunk::new(KV, [10, 11], 0..2).layers(layer..layer + 1))).unwrap();
    }
    sending.finish(bytes::Bytes::new()).unwrap();
    wait(receiving.done()).unwrap();
    pair.decode.assert_pages(2, &[(10, 3), (11, 1)]);
}

#[test]
fn an_empty_last_chunk_still_carries_aux_and_an_empty_room_ends() {
    let pair = Pair::new(IoMode::Auto);
    let sending = pair.prefill.engine.open(1.into(), OpenOptions::default()).unwrap();
    let slot = Region::from_vec(vec![0; 64]);
    let aux = AuxSlot { region: slot.clone(), offset: 16, len: 8 };
    let receiving = pair
        .decode
        .engine
        .grant(pair.peer, GrantSpec::new(1.into()).pages(KV, []).aux(aux))
        .unwrap();
    wait(sending.write(Chunk::new(KV, [], 0..0))).unwrap();
    let error = sending.finish(vec![1; 9].into()).unwrap_err();
    assert_eq!(error, WriteError::AuxTooLong { bytes: 9, granted: 8 });
    sending.finish("aux row".into()).unwrap();
    let received = wait(receiving.done()).unwrap();
    assert_eq!((&received.aux[..], received.report.landed.bytes), (&b"aux row"[..], 0));
    let mut row = [0; 8];
    slot.read_at(16, &mut row).unwrap();
    assert_eq!(&row, b"aux row\0");
    wait(sending.done()).unwrap();
}

#[test]
fn a_grant_may_come_before_the_room_is_opened() {
    let pair = Pair::new(IoMode::Auto);
    let receiving =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(3.into()).pages(KV, [0])).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let sending = pair.prefill.engine.open(3.into(), OpenOptions::default()).unwrap();
    wait(sending.write(Chunk::new(KV, [1], 0..1))).unwrap();
    sending.finish(bytes::Bytes::new()).unwrap();
    wait(receiving.done()).unwrap();
}

#[test]
fn a_live_id_is_refused_and_an_ended_one_is_a_new_epoch() {
    let pair = Pair::new(IoMode::Auto);
    let mut epochs = Vec::new();
    for _ in 0..3 {
        let sending = pair.prefill.engine.open(5.into(), OpenOptions::default()).unwrap();
        let again = pair.prefill.engine.open(5.into(), OpenOptions::default());
        assert_eq!(again.unwrap_err(), kvferry::OpenError::Live(5.into()));
        let spec = GrantSpec::new(5.into()).pages(KV, [0]);
        let receiving = pair.decode.engine.grant(pair.peer, spec.clone()).unwrap();
        let again = pair.decode.engine.grant(pair.peer, spec);
        assert_eq!(again.unwrap_err(), kvferry::GrantError::Live(5.into()));
        wait(sending.write(Chunk::new(KV, [1], 0..1))).unwrap();
        sending.finish(bytes::Bytes::new()).unwrap();
        epochs.push(wait(receiving.done()).unwrap().report.epoch.unwrap());
        wait(sending.done()).unwrap();
    }
    epochs.dedup();
    assert_eq!(epochs.len(), 3);
}

#[test]
fn a_retry_of_a_failed_room_is_a_new_epoch_and_succeeds() {
    let pair = Pair::new(IoMode::Auto);
    pair.prefill.paint(3);
    let sending = pair.prefill.engine.open(5.into(), OpenOptions::default()).unwrap();
    let receiving =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(5.into()).pages(KV, [0])).unwrap();
    wait(sending.granted()).unwrap();
    receiving.abort("changed my mind");
    wait(sending.done()).unwrap_err();
    let sending = pair.prefill.engine.open(5.into(), OpenOptions::default()).unwrap();
    let receiving =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(5.into()).pages(KV, [0])).unwrap();
    wait(sending.write(Chunk::new(KV, [1], 0..1))).unwrap();
    sending.finish(bytes::Bytes::new()).unwrap();
    wait(receiving.done()).unwrap();
    pair.decode.assert_pages(3, &[(1, 0)]);
}

#[test]
fn an_abort_by_either_side_fails_both_with_the_same_words() {
    both(|io| {
        let pair = Pair::new(io);
        for (id, by_sender) in [(1, true), (2, false)] {
            let sending = pair.prefill.engine.open(id.into(), OpenOptions::default()).unwrap();
            let receiving = pair
                .decode
                .engine
                .grant(pair.peer, GrantSpec::new(id.into()).pages(KV, [0]))
                .unwrap();
            wait(sending.write(Chunk::new(KV, [1], 0..1))).unwrap();
            if by_sender {
                sending.abort("no longer wanted")
            } else {
                receiving.abort("no longer wanted")
            }
            let (ours, theirs) =
                (wait(sending.done()).unwrap_err(), wait(receiving.done()).unwrap_err());
            assert_eq!(ours.to_string(), theirs.to_string());
            assert_eq!(ours.kind, FailureKind::Aborted);
            assert!(ours.causes[0].contains("no longer wanted"), "{ours}");
            wait(sending.released());
            wait(receiving.released());
        }
    });
}

#[test]
fn a_dropped_handle_gives_its_room_up_on_both_sides() {
    let pair = Pair::new(IoMode::Auto);
    let sending = pair.prefill.engine.open(1.into(), OpenOptions::default()).unwrap();
    let receiving =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(1.into()).pages(KV, [0])).unwrap();
    wait(sending.granted()).unwrap();
    drop(sending);
    let failure = wait(receiving.done()).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Aborted);
    assert!(failure.causes[0].contains("dropped"), "{failure}");
}

#[test]
fn an_id_whose_handle_was_dropped_can_be_used_again_at_once() {
    let pair = Pair::new(IoMode::Auto);
    for _ in 0..100 {
        drop(pair.prefill.engine.open(1.into(), OpenOptions::default()).unwrap());
        let spec = GrantSpec::new(1.into()).pages(KV, [0]);
        drop(pair.decode.engine.grant(pair.peer, spec).unwrap());
    }
}

#[test]
fn as_many_rooms_as_max_rooms_and_as_many_again_once_they_are_released() {
    let few = |config: EngineConfig| config.max_rooms(4u32);
    let (a, b) = (few(config(IoMode::Auto)), few(config(IoMode::Auto)));
    let pair = Pair::with(a, b, layout(8), layout(8));
    for _ in 0..3 {
        let open = |id: u64| pair.prefill.engine.open(id.into(), OpenOptions::default());
        let rooms: Vec<_> = (0..4).map(|id| open(id).unwrap()).collect();
        assert_eq!(open(4).unwrap_err(), kvferry::OpenError::TooMany(4));
        for room in &rooms {
            room.abort("enough");
            wait(room.released());
        }
    }
}

#[tokio::test]
async fn an_engine_that_cannot_start_says_so_inside_a_runtime_too() {
    let error =
        kvferry::Engine::builder(config(IoMode::Auto).worker_cpu(1023usize)).start().unwrap_err();
    assert!(matches!(error, kvferry::StartError::Pin { cpu: 1023, .. }), "{error}");
}

#[tokio::test]
async fn an_engine_can_be_started_used_and_dropped_inside_a_runtime() {
    let pair = Pair::new(IoMode::Auto);
    let sending = pair.prefill.engine.open(1.into(), OpenOptions::default()).unwrap();
    let receiving =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(1.into()).pages(KV, [0])).unwrap();
    sending.write(Chunk::new(KV, [1], 0..1)).await.unwrap();
    sending.finish(bytes::Bytes::new()).unwrap();
    receiving.done().await.unwrap();
}

#[test]
fn a_room_without_a_grant_and_one_without_an_end_meet_their_deadlines() {
    let pair = Pair::new(IoMode::Auto);
    let alone = pair
        .prefill
        .engine
        .open(1.into(), OpenOptions::default().grant_timeout(Duration::from_millis(50)))
        .unwrap();
    let failure = wait(alone.done()).unwrap_err();
    assert_eq!((failure.kind, failure.epoch.0), (FailureKind::GrantTimeout, 0));
    assert_eq!(wait(alone.granted()).unwrap_err().kind, FailureKind::GrantTimeout);
    wait(alone.released());

    let sending = pair.prefill.engine.open(2.into(), OpenOptions::default()).unwrap();
    let spec = GrantSpec::new(2.into()).pages(KV, [0]).timeout(Duration::from_millis(50));
    let receiving = pair.decode.engine.grant(pair.peer, spec).unwrap();
    let (ours, theirs) = (wait(sending.done()).unwrap_err(), wait(receiving.done()).unwrap_err());
    assert_eq!(
        (ours.kind, theirs.kind),
        (FailureKind::DeadlineExceeded, FailureKind::DeadlineExceeded)
    );
    assert_eq!(ours.to_string(), theirs.to_string());
}

#[test]
fn writes_that_cannot_be_are_refused_by_name_and_the_room_lives_on() {
    let pair = Pair::new(IoMode::Auto);
    let sending = pair.prefill.engine.open(1.into(), OpenOptions::default()).unwrap();
    assert_eq!(sending.try_write(&Chunk::new(KV, [0], 0..1)), Err(WriteError::NotGranted));
    let receiving =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(1.into()).pages(KV, [0, 1])).unwrap();
    wait(sending.granted()).unwrap();
    let refused = |chunk: Chunk| sending.try_write(&chunk).unwrap_err();
    assert_eq!(
        refused(Chunk::new(KV, [0, 1], 0..1)),
        WriteError::UnequalLengths { src: 2, dst: 1 }
    );
    assert_eq!(
        refused(Chunk::new(KV, [0], 2..3)),
        WriteError::OutsideGrant { from: 2, to: 3, granted: 2 }
    );
    assert_eq!(refused(Chunk::new(KV, [64], 0..1)), WriteError::NoSuchPage { page: 64, pages: 64 });
    let outside = WriteError::OutsideLayers { from: 2, to: 4, shared_from: 0, shared_to: 3 };
    assert_eq!(refused(Chunk::new(KV, [0], 0..1).layers(2..4)), outside);
    #[expect(clippy::reversed_empty_ranges, reason = "that it is reversed is the test")]
    let reversed = Chunk::new(KV, [0], 5..1);
    assert_eq!(refused(reversed), WriteError::UnequalLengths { src: 1, dst: 0 });
    wait(sending.write(Chunk::new(KV, [0, 1], 0..2))).unwrap();
    sending.finish(bytes::Bytes::new()).unwrap();
    assert_eq!(sending.finish(bytes::Bytes::new()), Err(WriteError::Finished));
    assert!(matches!(
        refused(Chunk::new(KV, [0], 0..1)),
        WriteError::Finished | WriteError::Ended(None)
    ));
    wait(receiving.done()).unwrap();
    wait(sending.done()).unwrap();
    assert_eq!(sending.try_write(&Chunk::new(KV, [0], 0..1)), Err(WriteError::Ended(None)));
}

#[test]
fn grants_that_cannot_be_are_refused_by_name() {
    use kvferry::GrantError;
    let pair = Pair::new(IoMode::Auto);
    let refused = |spec: GrantSpec| pair.decode.engine.grant(pair.peer, spec).unwrap_err();
    let spec = || GrantSpec::new(1.into());
    assert_eq!(refused(spec().pages(KV, [64])), GrantError::NoSuchPage { page: 64, pages: 64 });
    assert_eq!(refused(spec().pages(KV, [3, 4, 3])), GrantError::PageTwice(3));
    assert_eq!(refused(spec().pages(KV, [3]).pages(KV, [4])), GrantError::PoolTwice(KV));
    assert_eq!(refused(spec().note(vec![0; 257])), GrantError::NoteTooLong(257));
    let region = Region::from_vec(vec![0; 8]);
    assert!(matches!(
        refused(spec().aux(AuxSlot { region, offset: 4, len: 5 })),
        GrantError::AuxOutside(_)
    ));
    let stranger = pair.decode.engine.incarnation();
    let error = pair.decode.engine.grant(stranger, spec().pages(KV, [0])).unwrap_err();
    assert_eq!(error, GrantError::NoPeer(stranger));
}

#[test]
fn many_rooms_at_once_all_end_with_the_right_bytes() {
    both(|io| {
        let pair = Pair::with(config(io), config(io), layout(256), layout(256));
        pair.prefill.paint(9);
        let rooms: Vec<_> = (0..64u32)
            .map(|i| {
                let sending =
                    pair.prefill.engine.open(u64::from(i).into(), OpenOptions::default()).unwrap();
                let pages = [4 * i, 4 * i + 2, 4 * i + 3];
                let spec = GrantSpec::new(u64::from(i).into()).pages(KV, pages);
                (sending, pair.decode.engine.grant(pair.peer, spec).unwrap())
            })
            .collect();
        for (i, (sending, _)) in rooms.iter().enumerate() {
            let i = i as u32;
            wait(sending.write(Chunk::new(KV, [255 - i, i, 128], 0..3))).unwrap();
            sending.finish(bytes::Bytes::copy_from_slice(&i.to_le_bytes())).unwrap();
        }
        for (i, (sending, receiving)) in rooms.iter().enumerate() {
            assert_eq!(&wait(receiving.done()).unwrap().aux[..], &(i as u32).to_le_bytes());
            wait(sending.done()).unwrap();
        }
        let expect: Vec<_> =
            (0..64).flat_map(|i| [(255 - i, 4 * i), (i, 4 * i + 2), (128, 4 * i + 3)]).collect();
        pair.decode.assert_pages(9, &expect);
        let mut states = Vec::new();
        poll_many(rooms.iter().map(|(sending, _)| sending), &mut states);
        assert_eq!(states, vec![RoomState::Success; 64]);
        assert_eq!(
            min_state(rooms.iter().map(|(_, receiving)| receiving)),
            Some(RoomState::Success)
        );
    });
}

#[test]
fn a_full_queue_is_back_pressure_and_nothing_is_lost() {
    let few = config(IoMode::Auto).max_queued_chunks(2u32);
    let pair = Pair::with(few, config(IoMode::Auto), layout(64), layout(64));
    let sending = pair.prefill.engine.open(1.into(), OpenOptions::default()).unwrap();
    let pages: Vec<u32> = (0..64).collect();
    let receiving =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(1.into()).pages(KV, pages)).unwrap();
    wait(sending.granted()).unwrap();
    pair.prefill.paint(4);
    let mut full = 0;
    for page in 0..64 {
        let chunk = Chunk::new(KV, [page], page..page + 1);
        if sending.try_write(&chunk) == Err(WriteError::Full) {
            full += 1;
            wait(sending.write(chunk)).unwrap();
        }
    }
    sending.finish(bytes::Bytes::new()).unwrap();
    let landed = wait(receiving.done()).unwrap().report.landed;
    assert_eq!(landed.page_writes, 64 * 6);
    pair.decode.assert_pages(4, &(0..64).map(|page| (page, page)).collect::<Vec<_>>());
    println!("{full} of 64 writes met a full queue");
}

#[test]
fn a_small_room_is_done_before_a_large_one_that_started_first() {
    let large = kvferry::PoolLayout::opaque("kv", 0..1, 513, 256 << 10);
    let pair = Pair::with(config(IoMode::Auto), config(IoMode::Auto), large.clone(), large);
    let open = |id: u64, pages: Vec<u32>| {
        let sending = pair.prefill.engine.open(id.into(), OpenOptions::default()).unwrap();
        let spec = GrantSpec::new(id.into()).pages(KV, pages);
        let receiving = pair.decode.engine.grant(pair.peer, spec).unwrap();
        wait(sending.granted()).unwrap();
        (sending, receiving)
    };
    let (big, big_receiving) = open(1, (0..512).collect());
    let (small, small_receiving) = open(2, vec![512]);
    wait(big.write(Chunk::new(KV, (0..512).collect::<Vec<_>>(), 0..512))).unwrap();
    big.finish(bytes::Bytes::new()).unwrap();
    wait(small.write(Chunk::new(KV, [512], 0..1))).unwrap();
    small.finish(bytes::Bytes::new()).unwrap();
    wait(small_receiving.done()).unwrap();
    let overtaken = big_receiving.report().landed.page_writes;
    assert!(overtaken < 512, "the small room waited for all of the large one");
    wait(big_receiving.done()).unwrap();
}

#[test]
fn a_pool_that_rooms_use_is_not_given_back_and_one_that_none_uses_is() {
    let pair = Pair::new(IoMode::Auto);
    let sending = pair.prefill.engine.open(1.into(), OpenOptions::default()).unwrap();
    let receiving =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(1.into()).pages(KV, [0])).unwrap();
    wait(sending.granted()).unwrap();
    for engine in [&pair.prefill.engine, &pair.decode.engine] {
        let error = wait(engine.deregister_pool(KV)).unwrap_err();
        assert_eq!(error, kvferry::DeregisterError::Busy { pool: KV, rooms: 1 });
    }
    wait(sending.write(Chunk::new(KV, [1], 0..1))).unwrap();
    sending.finish(bytes::Bytes::new()).unwrap();
    wait(receiving.done()).unwrap();
    wait(receiving.released());
    wait(pair.decode.engine.deregister_pool(KV)).unwrap();
    let error =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(2.into()).pages(KV, [0])).unwrap_err();
    assert_eq!(error, kvferry::GrantError::NoSuchPool(KV));
    let error = wait(pair.decode.engine.deregister_pool(KV)).unwrap_err();
    assert_eq!(error, kvferry::DeregisterError::NoSuchPool(KV));
}

#[test]
fn a_drained_peer_takes_no_more_rooms_and_those_there_are_end() {
    let pair = Pair::new(IoMode::Auto);
    let sending = pair.prefill.engine.open(1.into(), OpenOptions::default()).unwrap();
    let receiving =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(1.into()).pages(KV, [0])).unwrap();
    wait(sending.granted()).unwrap();
    std::thread::scope(|scope| {
        let drain = scope.spawn(|| wait(pair.decode.engine.drain_peer(pair.peer)));
        let mut id = 100;
        loop {
            id += 1;
            match pair.decode.engine.grant(pair.peer, GrantSpec::new(id.into())) {
                Ok(room) => drop(room),
                Err(kvferry::GrantError::Full) => std::thread::yield_now(),
                Err(error) => {
                    assert_eq!(error, kvferry::GrantError::PeerDraining(pair.peer));
                    break;
                }
            }
        }
        assert!(!drain.is_finished(), "a drain ended before the rooms did");
        wait(sending.write(Chunk::new(KV, [1], 0..1))).unwrap();
        sending.finish(bytes::Bytes::new()).unwrap();
        wait(receiving.done()).unwrap();
        drain.join().unwrap();
    });
}

#[test]
fn a_shutdown_lets_rooms_end_and_fails_those_that_do_not_on_both_sides() {
    let pair = Pair::new(IoMode::Auto);
    let sending = pair.prefill.engine.open(1.into(), OpenOptions::default()).unwrap();
    let receiving =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(1.into()).pages(KV, [0])).unwrap();
    wait(sending.granted()).unwrap();
    let by_itself = wait(pair.decode.engine.shutdown(Duration::from_millis(50)));
    assert!(!by_itself);
    assert_eq!(receiving.failure().unwrap().kind, FailureKind::Shutdown);
    assert_eq!(wait(sending.done()).unwrap_err().kind, FailureKind::Shutdown);
    assert!(receiving.is_released());
}

#[test]
fn zero_copy_sends_carry_the_same_bytes_and_are_given_up_where_the_kernel_copies() {
    let zero_copy = |config: EngineConfig| config.zero_copy(kvferry::ZeroCopy::Try);
    let large = kvferry::PoolLayout::opaque("kv", 0..2, 64, 128 << 10);
    let (a, b) = (zero_copy(config(IoMode::Auto)), config(IoMode::Auto));
    let pair = Pair::with(a, b, large.clone(), large);
    println!("sendmsg_zc here: {}", pair.prefill.engine.io().sendmsg_zc);
    pair.prefill.paint(6);
    for round in 0..4u64 {
        let sending = pair.prefill.engine.open(round.into(), OpenOptions::default()).unwrap();
        let pages: Vec<u32> = (0..64).rev().collect();
        let receiving = pair
            .decode
            .engine
            .grant(pair.peer, GrantSpec::new(round.into()).pages(KV, pages))
            .unwrap();
        wait(sending.write(Chunk::new(KV, (0..64).collect::<Vec<_>>(), 0..64))).unwrap();
        sending.finish(bytes::Bytes::new()).unwrap();
        wait(receiving.done()).unwrap();
        wait(sending.released());
    }
    pair.decode.assert_pages(6, &(0..64).map(|page| (page, 63 - page)).collect::<Vec<_>>());
}

#[test]
fn peers_are_known_with_fabric_and_rails_before_anything_is_sent() {
    both(|io| {
        let pair = Pair::new(io);
        let peers = pair.decode.engine.peers();
        assert_eq!(peers.len(), 1);
        assert_eq!(peers[0].incarnation, pair.peer);
        assert_eq!(peers[0].health, kvferry::PeerHealth::Up);
        assert!(!peers[0].lanes.is_empty());
        let kvferry::FabricInfo::Tcp { io: ours, .. } = peers[0].fabric else {
            panic!("another fabric")
        };
        assert_eq!(ours, pair.decode.engine.io().io);
    });
}
