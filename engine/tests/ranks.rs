//! Unequal ranks: what each pair moves follows from their layouts.
#![allow(missing_docs, reason = "tests document themselves by name")]

mod common;

use common::{KV, Node, config, local, painted, wait};
use kvferry::{
    AllocOptions, Chunk, Dtype, Engine, FailureKind, GrantSpec, HeadOrder, Incarnation, IoMode,
    OpenOptions, Planes, Pool, PoolLayout, RoomState,
};

const PAGE_TOKENS: u32 = 4;
const HEAD_BYTES: u32 = 32;
const HEADS: u32 = 4;

fn rank(layers: std::ops::Range<u32>, heads: std::ops::Range<u32>, order: HeadOrder) -> PoolLayout {
    PoolLayout {
        name: "kv".to_owned(),
        layers,
        planes: Planes::KeyValue,
        pages: 8,
        page_tokens: PAGE_TOKENS,
        dtype: Dtype::F16,
        total_heads: HEADS,
        heads,
        head_bytes: HEAD_BYTES,
        order,
    }
}

/// The bytes of one token of one head of the model, wherever it is held.
fn cell(layer: u32, plane: u32, page: u32, token: u32, head: u32) -> Vec<u8> {
    painted(layer * 5 + token, plane * 3 + head, page, 0, HEAD_BYTES as usize)
}

/// Writes or checks every cell that a rank holds of a page.
fn each_cell(
    node: &Node,
    page: u32,
    mut with: impl FnMut(&kvferry::Region, usize, (u32, u32, u32, u32)),
) {
    let layout = node.pool.layout().clone();
    let held = layout.heads.end - layout.heads.start;
    for layer in layout.layers.clone() {
        for plane in 0..2 {
            let (region, at) = node.pool.locate(layer - layout.layers.start, plane, page).unwrap();
            for token in 0..PAGE_TOKENS {
                for head in layout.heads.clone() {
                    let h = head - layout.heads.start;
                    let row = match layout.order {
                        HeadOrder::TokenMajor => token * held + h,
                        HeadOrder::HeadMajor => h * PAGE_TOKENS + token,
                    };
                    with(region, at + (row * HEAD_BYTES) as usize, (layer, plane, token, head));
                }
            }
        }
    }
}

fn fill(node: &Node, page: u32) {
    each_cell(node, page, |region, at, (layer, plane, token, head)| {
        region.write_at(at, &cell(layer, plane, page, token, head)).unwrap();
    });
}

/// Checks that `page` holds the cells of the source page `of`.
fn check(node: &Node, page: u32, of: u32) {
    each_cell(node, page, |region, at, (layer, plane, token, head)| {
        let mut got = vec![0; HEAD_BYTES as usize];
        region.read_at(at, &mut got).unwrap();
        assert_eq!(
            got,
            cell(layer, plane, of, token, head),
            "layer {layer} plane {plane} token {token} head {head}"
        );
    });
}

fn start(layouts: &[PoolLayout], listen: bool) -> Vec<Node> {
    layouts
        .iter()
        .map(|layout| {
            let config = config(IoMode::Auto);
            Node::start(if listen { config.listen(local()) } else { config }, layout.clone())
        })
        .collect()
}

fn connect(decode: &Node, prefill: &[Node]) -> Vec<Incarnation> {
    prefill
        .iter()
        .map(|node| wait(decode.engine.connect(node.engine.listen_addr().unwrap())).unwrap())
        .collect()
}

#[test]
fn one_prefill_rank_feeds_two_decode_ranks_with_the_heads_each_holds() {
    for order in [HeadOrder::TokenMajor, HeadOrder::HeadMajor] {
        let prefill = start(&[rank(0..2, 0..4, order)], true);
        let decode = start(&[rank(0..2, 0..2, order), rank(0..2, 2..4, order)], false);
        (0..8).for_each(|page| fill(&prefill[0], page));
        let group = prefill[0].engine.open_group(1.into(), 2, OpenOptions::default()).unwrap();
        let mut receiving = Vec::new();
        for node in &decode {
            let peer = connect(node, &prefill)[0];
            receiving.push(
                node.engine.grant(peer, GrantSpec::new(1.into()).pages(KV, [6, 0, 3])).unwrap(),
            );
        }
        for room in group.rooms() {
            wait(room.write(Chunk::new(KV, [5, 1, 2], 0..3))).unwrap();
            room.finish(bytes::Bytes::new()).unwrap();
        }
        wait(group.done()).unwrap();
        assert_eq!(group.state(), RoomState::Success);
        for (node, room) in decode.iter().zip(&receiving) {
            let received = wait(room.done()).unwrap();
            assert_eq!(
                received.report.landed.bytes,
                3 * 2 * 2 * u64::from(PAGE_TOKENS * 2 * HEAD_BYTES)
            );
            for (to, of) in [(6, 5), (0, 1), (3, 2)] {
                check(node, to, of);
            }
        }
    }
}

#[test]
fn two_prefill_ranks_feed_one_decode_rank_each_with_its_heads() {
    for order in [HeadOrder::TokenMajor, HeadOrder::HeadMajor] {
        let prefill = start(&[rank(0..2, 0..2, order), rank(0..2, 2..4, order)], true);
        let decode = start(&[rank(0..2, 0..4, order)], false).remove(0);
        let peers = connect(&decode, &prefill);
        let spec = GrantSpec::new(1.into()).pages(KV, [6, 0]);
        let group = decode.engine.grant_group(&peers, &spec).unwrap();
        for node in &prefill {
            (0..8).for_each(|page| fill(node, page));
            let sending = node.engine.open(1.into(), OpenOptions::default()).unwrap();
            wait(sending.write(Chunk::new(KV, [7, 3], 0..2))).unwrap();
            sending.finish(bytes::Bytes::new()).unwrap();
            wait(sending.done()).unwrap();
        }
        wait(group.done()).unwrap();
        wait(group.released());
        check(&decode, 6, 7);
        check(&decode, 0, 3);
    }
}

#[test]
fn two_pipeline_ranks_feed_one_decode_rank_each_with_its_layers() {
    let order = HeadOrder::TokenMajor;
    let prefill = start(&[rank(0..2, 0..4, order), rank(2..5, 0..4, order)], true);
    let decode = start(&[rank(0..5, 0..4, order)], false).remove(0);
    let peers = connect(&decode, &prefill);
    let group =
        decode.engine.grant_group(&peers, &GrantSpec::new(1.into()).pages(KV, [6, 0])).unwrap();
    for node in &prefill {
        (0..8).for_each(|page| fill(node, page));
        let sending = node.engine.open(1.into(), OpenOptions::default()).unwrap();
        let granted = wait(sending.granted()).unwrap();
        assert_eq!(granted.pools[0].layers, node.pool.layout().layers);
        wait(sending.write(Chunk::new(KV, [7, 3], 0..2))).unwrap();
        sending.finish(bytes::Bytes::new()).unwrap();
        wait(sending.done()).unwrap();
    }
    wait(group.done()).unwrap();
    check(&decode, 6, 7);
    check(&decode, 0, 3);
}

#[test]
fn one_failed_room_fails_its_group_and_gives_the_others_up() {
    let order = HeadOrder::TokenMajor;
    let prefill = start(&[rank(0..2, 0..2, order), rank(0..2, 2..4, order)], true);
    let decode = start(&[rank(0..2, 0..4, order)], false).remove(0);
    let peers = connect(&decode, &prefill);
    let group =
        decode.engine.grant_group(&peers, &GrantSpec::new(1.into()).pages(KV, [6, 0])).unwrap();
    let rooms: Vec<_> = prefill
        .iter()
        .map(|node| node.engine.open(1.into(), OpenOptions::default()).unwrap())
        .collect();
    for room in &rooms {
        wait(room.granted()).unwrap();
    }
    kvferry::RoomHandle::abort(&rooms[1], "out of memory");
    let failure = wait(group.done()).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Aborted);
    assert!(failure.causes[0].contains("out of memory"), "{failure}");
    let other = wait(rooms[0].done()).unwrap_err();
    assert!(other.causes[0].contains("another room of its group failed"), "{other}");
}

#[test]
fn several_pools_travel_in_one_room() {
    let pools = || {
        let kv = rank(0..2, 0..4, HeadOrder::TokenMajor);
        [kv, PoolLayout::opaque("mamba", 0..3, 5, 100), PoolLayout::opaque("draft", 0..1, 4, 64)]
    };
    let build = |listen: bool, reversed: bool| {
        let config = config(IoMode::Auto);
        let mut builder = Engine::builder(if listen { config.listen(local()) } else { config });
        let mut layouts = pools().to_vec();
        if reversed {
            layouts.reverse();
        }
        let made: Vec<_> = layouts
            .into_iter()
            .map(|layout| {
                let pool = Pool::allocate(layout, AllocOptions { huge_pages: false }).unwrap();
                (builder.pool(pool.clone()).unwrap(), pool)
            })
            .collect();
        (builder.start().unwrap(), made)
    };
    // The two sides added their pools in another order: they are paired by name.
    let (prefill, from) = build(true, false);
    let (decode, to) = build(false, true);
    let peer = wait(decode.connect(prefill.listen_addr().unwrap())).unwrap();
    let find = |made: &[(kvferry::PoolId, Pool)], name: &str| {
        made.iter().find(|(_, pool)| pool.layout().name == name).cloned().unwrap()
    };
    let state = find(&from, "mamba").1;
    for layer in 0..3 {
        let (region, at) = state.locate(layer, 0, 4).unwrap();
        region.write_at(at, &[layer as u8 + 1; 100]).unwrap();
    }
    let sending = prefill.open(1.into(), OpenOptions::default()).unwrap();
    let spec =
        GrantSpec::new(1.into()).pages(find(&to, "kv").0, [1, 2]).pages(find(&to, "mamba").0, [3]);
    let receiving = decode.grant(peer, spec).unwrap();
    wait(sending.write(Chunk::new(find(&from, "kv").0, [0, 1], 0..2))).unwrap();
    wait(sending.write(Chunk::new(find(&from, "mamba").0, [4], 0..1))).unwrap();
    let error = wait(sending.write(Chunk::new(find(&from, "draft").0, [0], 0..1))).unwrap_err();
    assert_eq!(error, kvferry::WriteError::PoolNotGranted(find(&from, "draft").0));
    sending.finish(bytes::Bytes::new()).unwrap();
    wait(receiving.done()).unwrap();
    for layer in 0..3 {
        let (region, at) =
            find(&to, "mamba").1.locate(layer, 0, 3).map(|(r, at)| (r.clone(), at)).unwrap();
        let mut got = [0; 100];
        region.read_at(at, &mut got).unwrap();
        assert_eq!(got, [layer as u8 + 1; 100]);
    }
}
