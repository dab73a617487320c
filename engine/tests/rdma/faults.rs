//! Completions with errors: the room that is to blame fails, and no other. Scripted, so on the stand-in only.

use kvferry::{Failure, FailureKind, RoomHandle};
use kvferry_verbs_standin::sys::{ibv_wc_status as status, ibv_wr_opcode as opcode};
use kvferry_verbs_standin::{Call, DeviceOptions, Fault, Mode, Pick, World, WorldOptions};

use super::*;

const EIO: i32 = 5;

/// Rooms beside the one that fails.
const NEIGHBOURS: u32 = 15;
/// Pages of each.
const ROOM: u32 = 16;

/// Work is done later, so that an error finds other rooms' work in flight.
fn deferred(device: &mut DeviceOptions) {
    device.mode = Mode::Deferred { per_poll: 4, idle: Some(Duration::from_millis(1)) };
}

fn writes() -> Pick {
    Pick::any().device(0).opcode(opcode::IBV_WR_RDMA_WRITE)
}

/// Runs rooms of which one may fail; gives its failure on both sides, and the frames sent again.
fn run_with(script: impl FnOnce(&World, &Pair)) -> Option<(Failure, Failure)> {
    let rails = Rails::stand_in(WorldOptions::pair().with(deferred));
    let pair = rails.pair((NEIGHBOURS + 1) * ROOM);
    until("lanes are open", || open_paths(&pair.prefill.engine).len() == 2);
    pair.prefill.paint(9);
    let pages = |room: u32| (room * ROOM..(room + 1) * ROOM).collect::<Vec<u32>>();
    let scattered = |room: u32| pages(room).into_iter().rev().collect::<Vec<u32>>();
    let rooms: Vec<Crossing> =
        (0..=NEIGHBOURS).map(|room| start(&pair, room.into(), scattered(room))).collect();
    script(rails.world.as_ref().unwrap(), &pair);
    for (room, crossing) in rooms.iter().enumerate() {
        send(crossing, pages(room as u32));
    }
    let mut failed = Vec::new();
    for (room, crossing) in rooms.into_iter().enumerate() {
        match wait(crossing.receiving.done()) {
            Ok(_) => {
                wait(crossing.sending.done()).unwrap();
                for (src, dst) in pages(room as u32).into_iter().zip(scattered(room as u32)) {
                    let want = painted(1, 1, src, 9, 1024);
                    assert!(pair.decode.page(1, 1, dst) == want, "room {room} page {dst}");
                }
            }
            Err(there) => {
                let here = wait(crossing.sending.done()).unwrap_err();
                wait(crossing.sending.released());
                wait(crossing.receiving.released());
                failed.push((here, there));
            }
        }
    }
    assert!(failed.len() <= 1, "one room is to blame: {failed:?}");
    // The path is proved anew and carries on.
    until("lanes are open again", || open_paths(&pair.prefill.engine).len() == 2);
    let after = start(&pair, 1000, vec![0]);
    send(&after, vec![1]);
    finish(after);
    failed.pop()
}

fn blamed(code: status::Type, kind: FailureKind, words: &str) {
    let (here, there) = run_with(|world, _| {
        world.script(writes().nth(40), Fault::fail(code));
    })
    .expect("the room is to blame");
    assert_eq!(here.kind, kind, "{here}");
    assert_eq!(here.to_string(), there.to_string(), "both sides say the same");
    let line = here.to_string();
    for part in [words, "vendor error 0x", "QP 0x", "layers ", "positions ", "standin"] {
        assert!(line.contains(part), "{part:?} is not in: {line}");
    }
    println!("{line}");
}

#[test]
fn a_write_that_the_peers_nic_refuses_fails_its_room_alone_and_names_all_that_is_known() {
    blamed(status::IBV_WC_REM_ACCESS_ERR, FailureKind::RemoteAccess, "remote access error");
}

#[test]
fn a_write_whose_source_is_refused_fails_its_room_alone() {
    blamed(status::IBV_WC_LOC_PROT_ERR, FailureKind::LocalAccess, "local protection error");
}

#[test]
fn a_write_that_the_peers_nic_cannot_do_fails_its_room_alone() {
    blamed(status::IBV_WC_REM_OP_ERR, FailureKind::RemoteOperation, "remote operation error");
}

#[test]
fn a_receiver_without_receives_fails_the_room_alone() {
    blamed(status::IBV_WC_RNR_RETRY_EXC_ERR, FailureKind::ReceiverNotReady, "receiver-not-ready");
}

#[test]
fn a_path_that_stops_answering_fails_no_room() {
    let failed = run_with(|world, _| {
        world.script(writes().nth(40), Fault::fail(status::IBV_WC_RETRY_EXC_ERR));
    });
    assert_eq!(failed.map(|(here, _)| here.to_string()), None);
}

#[test]
fn writes_whose_answers_were_lost_are_not_counted_twice_and_fail_no_room() {
    let failed = run_with(|world, _| {
        world.script(writes().nth(40), Fault::LoseAnswer);
    });
    assert_eq!(failed.map(|(here, _)| here.to_string()), None);
}

#[test]
fn where_only_consequences_are_told_no_room_is_blamed() {
    let failed = run_with(|world, _| {
        world.script(writes().nth(40), Fault::fail(status::IBV_WC_WR_FLUSH_ERR));
    });
    assert_eq!(failed.map(|(here, _)| here.to_string()), None);
}

#[test]
fn a_queue_pair_that_breaks_by_itself_fails_no_room() {
    let failed = run_with(|world, _| {
        for device in 0..2 {
            let qp = world.qps(device).last().expect("a queue pair").qp_num;
            world.break_qp(device, qp);
        }
    });
    assert_eq!(failed.map(|(here, _)| here.to_string()), None);
}

#[test]
fn pages_under_a_queue_pair_that_can_be_neither_stopped_nor_destroyed_are_never_said_to_be_quiet() {
    let rails = Rails::stand_in(WorldOptions::pair().with(deferred));
    let pair = rails.pair_with(64, |config| config.fence_after_ms(50u64));
    until("lanes are open", || open_paths(&pair.prefill.engine).len() == 2);
    let world = rails.world.as_ref().unwrap();
    world.qps(0).iter().for_each(|qp| world.hold(0, qp.qp_num));
    let crossing = start(&pair, 1, vec![3]);
    wait(crossing.sending.write(Chunk::new(KV, vec![2], 0..1))).unwrap();
    until("the write is posted", || world.qps(0).iter().any(|qp| qp.posted > qp.executed));
    let stop = Call::ModifyQp(kvferry_verbs_standin::sys::ibv_qp_state::IBV_QPS_ERR);
    world.fail_calls(0, stop, EIO, 0, u64::MAX);
    world.fail_calls(0, Call::DestroyQp, EIO, 0, u64::MAX);
    crossing.sending.abort("the client hung up");
    wait(crossing.sending.done()).unwrap_err();
    // Ten times what the fence takes.
    let quiet = kvferry::block_on_timeout(crossing.sending.released(), Duration::from_millis(500));
    assert!(quiet.is_none(), "nobody knows what the NIC still reads");
    // Their engine ends all the same, and leaks what the NIC may still use.
}

#[test]
fn engines_that_end_leave_nothing_behind_on_the_nic() {
    let rails = Rails::stand_in(WorldOptions::pair().with(deferred));
    let pair = rails.pair(64);
    let crossing = start(&pair, 1, vec![3]);
    send(&crossing, vec![2]);
    finish(crossing);
    drop(pair);
    let world = rails.world.as_ref().unwrap();
    until("everything is destroyed", || world.leaks().is_empty());
    assert_eq!(world.refused_destructions(), 0);
}
