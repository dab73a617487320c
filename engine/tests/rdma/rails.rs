//! Several rails: all are used, one that dies is done without, and comes back.

use std::process::Command;

use kvferry_verbs_standin::WorldOptions;

use super::*;

/// Takes the link of the prefill side's rail down, or up again.
fn set_link(rails: &Rails, rail: usize, up: bool) {
    if let Some(world) = &rails.world {
        let device = 2 * rail;
        return if up { world.port_up(device, 1) } else { world.port_down(device, 1) };
    }
    let device = &rails.rails(true)[rail];
    let netdev = std::fs::read_to_string(format!(
        "/sys/class/infiniband/{device}/ports/1/gid_attrs/ndevs/0"
    ))
    .unwrap();
    let state = if up { "up" } else { "down" };
    let status = Command::new("ip").args(["link", "set", netdev.trim(), state]).status().unwrap();
    assert!(status.success());
}

fn rails_used(engine: &kvferry::Engine) -> Vec<String> {
    let mut rails: Vec<String> = open_paths(engine).into_iter().map(|(rail, _)| rail).collect();
    rails.sort();
    rails.dedup();
    rails
}

#[test]
fn every_rail_carries_lanes() {
    for count in [2, 4] {
        let Some(rails) = Rails::new(count) else { return };
        let pair = rails.pair(64);
        until("every rail has a lane", || rails_used(&pair.prefill.engine).len() == count);
        until("on both sides", || rails_used(&pair.decode.engine).len() == count);
    }
}

#[test]
fn engines_with_unequal_numbers_of_rails_use_all_of_them() {
    // Three devices there, one here.
    let rails = Rails::stand_in(WorldOptions::devices(4));
    let names = rails.world.as_ref().unwrap().device_names();
    let one = rails.config(true);
    let one = {
        let rdma = one.rdma.clone().rails(vec![names[0].clone()]);
        one.rdma(rdma)
    };
    let three = rails.config(false);
    let three = {
        let rdma = three.rdma.clone().rails(names[1..].to_vec());
        three.rdma(rdma)
    };
    let pair = Pair::with(one, three, layout(64), layout(64));
    until("every rail has a lane", || rails_used(&pair.decode.engine).len() == 3);
    pair.prefill.paint(4);
    let crossing = start(&pair, 1, vec![5, 6, 7]);
    send(&crossing, vec![0, 1, 2]);
    finish(crossing);
    pair.decode.assert_pages(4, &[(0, 5), (1, 6), (2, 7)]);
}

#[test]
fn a_rail_whose_addresses_change_stays_in_use() {
    let rails = Rails::stand_in(WorldOptions::pair());
    let pair = rails.pair(64);
    until("lanes are open", || open_paths(&pair.prefill.engine).len() == 2);
    // The last entry of its table, which nobody uses, changes; then the port says something else, so
    // that what was said before has been heard.
    let world = rails.world.as_ref().unwrap();
    world.set_gid(0, 1, 7, None);
    world.port_down(1, 1);
    until("the other port is heard of", || open_paths(&pair.decode.engine).is_empty());
    assert!(pair.prefill.engine.rdma().rails[0].up, "a changed table takes no rail down");
    world.port_up(1, 1);
    until("lanes are open again", || open_paths(&pair.prefill.engine).len() == 2);
    let crossing = start(&pair, 1, vec![3]);
    send(&crossing, vec![2]);
    finish(crossing);
}

#[test]
fn a_rail_that_dies_in_mid_transfer_costs_no_room_and_comes_back() {
    const PAGES: u32 = 4096;
    const ROOM: u32 = 256;
    let Some(rails) = Rails::new(2) else { return };
    let pair = rails.pair(PAGES);
    until("both rails are up", || rails_used(&pair.prefill.engine).len() == 2);
    pair.prefill.paint(6);
    let pages = |room: u32| (room * ROOM..(room + 1) * ROOM).collect::<Vec<u32>>();
    let scattered = |room: u32| pages(room).into_iter().rev().collect::<Vec<u32>>();
    let rooms: Vec<Crossing> =
        (0..PAGES / ROOM).map(|room| start(&pair, room.into(), scattered(room))).collect();
    for (room, crossing) in rooms.iter().enumerate() {
        if room == 3 {
            set_link(&rails, 0, false);
        }
        send(crossing, pages(room as u32));
    }
    rooms.into_iter().for_each(finish);
    for room in 0..PAGES / ROOM {
        for (src, dst) in pages(room).into_iter().zip(scattered(room)) {
            let want = painted(2, 0, src, 6, 1024);
            assert!(pair.decode.page(2, 0, dst) == want, "room {room} page {dst}");
        }
    }
    let dead = format!("{}:1", rails.rails(true)[0]);
    until("its lanes are gone", || !rails_used(&pair.prefill.engine).contains(&dead));
    set_link(&rails, 0, true);
    until("it comes back", || rails_used(&pair.prefill.engine).contains(&dead));
    let after = start(&pair, 1000, vec![0]);
    send(&after, vec![1]);
    finish(after);
}
