//! Rooms that cross.

use super::*;

#[test]
fn rooms_cross_by_rdma_byte_for_byte_and_both_sides_say_by_which_rails() {
    let rails = Rails::new(1).unwrap();
    let pair = rails.pair(64);
    pair.prefill.paint(7);
    let crossing = start(&pair, 1, vec![9, 4, 11]);
    send(&crossing, vec![0, 1, 2]);
    finish(crossing);
    pair.decode.assert_pages(7, &[(0, 9), (1, 4), (2, 11)]);
    let ends = [(&pair.prefill, &pair.decode), (&pair.decode, &pair.prefill)];
    for (at, (node, other)) in ends.into_iter().enumerate() {
        until("both sides have open lanes", || !open_paths(&node.engine).is_empty());
        let peer = &node.engine.peers()[0];
        assert_eq!((peer.fabric, &peer.why_not_rdma), (FabricInfo::Rdma, &None));
        let report = node.engine.rdma();
        assert_eq!(report.why_not, None);
        assert_eq!(report.rails[0].rail, format!("{}:1", rails.rails(at == 0)[0]));
        let LanePath::Rdma(path) = &peer.lanes[0].path else { panic!("{:?}", peer.lanes) };
        let theirs = other.engine.peers()[0].lanes.clone();
        let joined = theirs.iter().any(|lane| {
            matches!(&lane.path, LanePath::Rdma(other) if other.local == path.remote && other.remote == path.local)
        });
        assert!(joined, "the two sides say the same of a lane: {path} and {theirs:?}");
        assert!(report.rails[0].gids.contains(&(path.local.gid_index, path.local.gid)));
    }
}

#[test]
fn scattered_pages_of_many_rooms_at_once_land_where_they_belong() {
    const PAGES: u32 = 2048;
    const ROOM: u32 = 128;
    let rails = Rails::new(1).unwrap();
    let pair = rails.pair(PAGES);
    pair.prefill.paint(3);
    // No two pages that follow one another do so on the other side.
    let source = |room: u32| (0..ROOM).map(|i| i * (PAGES / ROOM) + room).collect::<Vec<u32>>();
    let target = |room: u32| source(room).into_iter().rev().collect::<Vec<u32>>();
    let rooms: Vec<Crossing> =
        (0..PAGES / ROOM).map(|room| start(&pair, room.into(), target(room))).collect();
    for (room, crossing) in rooms.iter().enumerate() {
        send(crossing, source(room as u32));
    }
    rooms.into_iter().for_each(finish);
    for room in 0..PAGES / ROOM {
        for (src, dst) in source(room).into_iter().zip(target(room)) {
            for layer in 0..3 {
                for plane in 0..2 {
                    let want = painted(layer, plane, src, 3, 1024);
                    assert!(pair.decode.page(layer, plane, dst) == want, "room {room} page {dst}");
                }
            }
        }
    }
}

#[test]
fn a_checksum_and_ranks_of_unequal_size_work_over_rdma() {
    let rails = Rails::new(1).unwrap();
    let whole = layout(32);
    let mut half = layout(32);
    half.heads = 1..2;
    let pair = Pair::with(rails.config(true), rails.config(false), whole, half);
    pair.prefill.paint(5);
    let spec = GrantSpec::new(1.into()).pages(KV, [7, 3]).checksum(true);
    let receiving = pair.decode.engine.grant(pair.peer, spec).unwrap();
    let sending = pair.prefill.engine.open(1.into(), OpenOptions::default()).unwrap();
    wait(sending.granted()).unwrap();
    let crossing = Crossing { sending, receiving };
    send(&crossing, vec![20, 21]);
    finish(crossing);
    for (src, dst) in [(20, 7), (21, 3)] {
        let page = painted(2, 1, src, 5, 1024);
        // Of each token's two heads the second.
        let want: Vec<u8> = page.chunks(128).flat_map(|token| token[64..].to_vec()).collect();
        assert!(pair.decode.page(2, 1, dst) == want, "page {dst}");
    }
}

#[test]
fn an_idle_engine_sleeps_and_wakes_for_what_comes() {
    let rails = Rails::new(1).unwrap();
    let pair = rails.pair(64);
    pair.prefill.paint(1);
    for room in 0..5u64 {
        // Far longer than it spins.
        std::thread::sleep(Duration::from_millis(20));
        let crossing = start(&pair, room, vec![room as u32]);
        std::thread::sleep(Duration::from_millis(20));
        send(&crossing, vec![0]);
        finish(crossing);
    }
}

#[test]
fn memory_of_a_deregistered_pool_comes_back_to_its_owner() {
    use kvferry::{Engine, Pool, PoolLayout, Region};
    let rails = Rails::new(1).unwrap();
    let start = |prefill: bool, listen: bool| {
        let layout = PoolLayout::opaque("kv", 0..1, 4, 4096);
        let region = Region::from_vec(vec![u8::from(prefill); 4 * 4096]);
        let arrays = vec![kvferry::PageArray { region: region.clone(), offset: 0, stride: 4096 }];
        let config = rails.config(prefill);
        let config = if listen { config.listen(common::local()) } else { config };
        let mut builder = Engine::builder(config);
        builder.pool(Pool::new(layout, arrays).unwrap()).unwrap();
        (builder.start().unwrap(), region)
    };
    let ((prefill, _source), (decode, target)) = (start(true, true), start(false, false));
    let peer = wait(decode.connect(prefill.listen_addr().unwrap())).unwrap();
    let receiving = decode.grant(peer, GrantSpec::new(1.into()).pages(KV, [2])).unwrap();
    let sending = prefill.open(1.into(), OpenOptions::default()).unwrap();
    wait(sending.write(Chunk::new(KV, [0], 0..1))).unwrap();
    sending.finish(bytes::Bytes::new()).unwrap();
    wait(receiving.done()).unwrap();
    wait(sending.done()).unwrap();
    wait(receiving.released());
    wait(decode.deregister_pool(KV)).unwrap();
    drop(receiving);
    let memory = target.into_vec().expect("nothing holds it any more");
    assert!(memory[2 * 4096..3 * 4096].iter().all(|&byte| byte == 1));
}
