//! What handles see of a room, in every order that they and the worker can run in: `ci/loom`.
//!
//! A handle that is never woken is a deadlock, which loom reports.

use loom::model::Builder;
use loom::thread;

use super::*;
use crate::sync::block_on;

/// Preemptions that are tried with three threads: all of them take too long. With two, all are tried.
const PREEMPTIONS: usize = 4;
const QUEUED: u32 = 2;
const LANDED: Landed = Landed { page_writes: 3, bytes: 300 };

/// Runs the worker's part and each handle's, one thread each, on a room with two chunks queued.
fn together(worker: fn(&RoomCell), handles: &'static [fn(&RoomCell)]) {
    let mut model = Builder::new();
    if handles.len() > 1 {
        model.preemption_bound.get_or_insert(PREEMPTIONS);
    }
    model.check(move || {
        let cell = RoomCell::new(RoomId(7), Role::Sender, 0, &Arc::new(AtomicU32::new(1)));
        cell.queued_chunks.store(QUEUED, Ordering::Relaxed);
        let threads: Vec<_> = handles
            .iter()
            .map(|&handle| {
                let cell = Arc::clone(&cell);
                thread::spawn(move || handle(&cell))
            })
            .collect();
        worker(&cell);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

fn has_room(cell: &RoomCell) -> Option<()> {
    let room = cell.queued_chunks.load(Ordering::Relaxed) == 0 || cell.state().is_terminal();
    room.then_some(())
}

fn writer(cell: &RoomCell) {
    block_on(cell.wait_for_room(has_room));
}

fn writer_of_one(cell: &RoomCell) {
    let place = |cell: &RoomCell| cell.queued_chunks.load(Ordering::Relaxed) < QUEUED;
    block_on(cell.wait_for_room(|cell| place(cell).then_some(())));
}

fn post_all(cell: &RoomCell) {
    (0..QUEUED).for_each(|_| cell.chunk_posted());
}

/// The core ends while the fabric is polled, so its state may be shown before its end is told.
fn end(cell: &RoomCell) {
    cell.advance(RoomState::Transferring);
    cell.count(LANDED);
    cell.keep_aux(Bytes::from_static(b"aux"));
    cell.advance(RoomState::Success);
    cell.end(Ok(()), 5);
}

fn bound() -> Bound {
    Bound {
        peer: Incarnation(1),
        peer_addr: String::new(),
        epoch: Epoch(1),
        note: Bytes::new(),
        checksum: false,
        aux_bytes: 0,
        pools: Vec::new(),
    }
}

#[test]
fn a_writer_that_waits_for_room_is_woken_when_there_is() {
    together(post_all, &[writer]);
}

#[test]
fn two_writers_that_wait_for_room_are_both_woken() {
    together(post_all, &[writer, writer]);
}

#[test]
fn a_try_that_finds_no_place_keeps_no_writer_asleep() {
    /// If there is a place, the worker's own queue is full, and it is given back.
    fn tries(cell: &RoomCell) {
        if cell.take_place(QUEUED).is_some() {
            cell.chunk_dropped();
        }
    }
    together(RoomCell::chunk_posted, &[writer_of_one, tries]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_try_that_is_counted_for_a_moment_keeps_a_writer_asleep() {
    fn tries(cell: &RoomCell) {
        if cell.queued_chunks.fetch_add(1, Ordering::SeqCst) >= QUEUED {
            cell.queued_chunks.fetch_sub(1, Ordering::SeqCst);
        } else {
            cell.chunk_dropped();
        }
    }
    together(RoomCell::chunk_posted, &[writer_of_one, tries]);
}

#[test]
fn a_chunk_that_is_not_counted_as_waiting_is_counted_as_posted() {
    together(
        post_all,
        &[|cell| {
            let waiting = cell.take_place(QUEUED + 1).unwrap();
            assert!(u64::from(waiting) + cell.chunks() >= u64::from(QUEUED));
        }],
    );
}

#[test]
fn a_writer_that_waits_for_room_is_woken_by_the_end() {
    together(end, &[writer]);
}

#[test]
fn who_waits_for_the_verdict_is_woken_by_the_end() {
    together(end, &[|cell| block_on(cell.wait_for(|cell| cell.verdict().cloned())).unwrap()]);
}

#[test]
fn who_waits_for_the_grant_is_woken_by_it() {
    together(
        |cell| cell.bind(bound(), 5),
        &[|cell| block_on(cell.wait_for(|cell| cell.bound().map(drop)))],
    );
}

#[test]
fn who_waits_for_the_release_is_woken_by_it() {
    together(
        |cell| {
            end(cell);
            cell.release();
        },
        &[|cell| block_on(cell.wait_for(|cell| cell.is_released().then_some(())))],
    );
}

#[test]
fn who_sees_the_end_sees_all_of_it() {
    together(
        end,
        &[|cell| {
            if cell.state().is_terminal() {
                assert_eq!(cell.verdict(), Some(&Ok(())));
                assert_eq!(cell.landed(), LANDED);
                assert_eq!(cell.aux().map(|aux| &aux[..]), Some(&b"aux"[..]));
                assert_eq!(cell.timings_us(9).0, 5);
                assert!(!cell.holds_its_id());
            }
        }],
    );
}

#[test]
fn who_sees_the_verdict_sees_the_end() {
    together(
        end,
        &[|cell| {
            if cell.verdict().is_some() {
                assert_eq!((cell.state(), cell.landed()), (RoomState::Success, LANDED));
            }
        }],
    );
}

#[test]
fn who_sees_the_release_sees_the_end() {
    together(
        |cell| {
            end(cell);
            cell.release();
        },
        &[|cell| {
            if cell.is_released() {
                assert_eq!((cell.verdict(), cell.landed()), (Some(&Ok(())), LANDED));
            }
        }],
    );
}

#[test]
fn who_sees_the_release_finds_the_room_counted_out() {
    together(
        RoomCell::release,
        &[|cell| assert!(!cell.is_released() || cell.unreleased.load(Ordering::Relaxed) == 0)],
    );
}

#[test]
fn who_sees_the_grant_sees_the_state_shown_before_and_when_it_came() {
    together(
        |cell| {
            cell.advance(RoomState::WaitingForInput);
            cell.bind(bound(), 5);
        },
        &[|cell| {
            if cell.bound().is_some() {
                assert_eq!((cell.state(), cell.timings_us(9).0), (RoomState::WaitingForInput, 5));
            }
        }],
    );
}

#[test]
fn who_sees_a_receiver_wait_for_input_sees_its_grant() {
    together(
        |cell| {
            cell.bind(bound(), 5);
            cell.advance(RoomState::WaitingForInput);
        },
        &[|cell| assert!(cell.state() != RoomState::WaitingForInput || cell.bound().is_some())],
    );
}

#[test]
fn a_room_never_goes_back() {
    together(
        end,
        &[|cell| {
            let before = cell.state();
            assert!(before <= cell.state());
        }],
    );
}

#[test]
fn an_id_that_was_let_go_is_not_held_again() {
    together(
        end,
        &[RoomCell::give_up, |cell| {
            let held = cell.holds_its_id();
            assert!(held || !cell.holds_its_id());
        }],
    );
}

// Each step of the hand-over is needed: without it, loom finds the order in which a writer sleeps on.

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_writers_fence_a_writer_sleeps_on() {
    fn writer(cell: &RoomCell) {
        block_on(cell.wait_for(|cell| {
            cell.wants_room.store(true, Ordering::Relaxed);
            has_room(cell)
        }));
    }
    together(post_all, &[writer]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_workers_fence_a_writer_sleeps_on() {
    fn post_all(cell: &RoomCell) {
        for _ in 0..QUEUED {
            cell.queued_chunks.fetch_sub(1, Ordering::Relaxed);
            if cell.wants_room.load(Ordering::Relaxed)
                && cell.wants_room.swap(false, Ordering::Relaxed)
            {
                cell.changed.notify_waiters();
            }
        }
    }
    together(post_all, &[writer]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn who_looks_before_enlisting_sleeps_on() {
    async fn wait(cell: &RoomCell) {
        while cell.verdict().is_none() {
            cell.changed.notified().await;
        }
    }
    together(end, &[|cell| block_on(wait(cell))]);
}
