//! Failures that callers bring about: what they give up, let pass, ask too much of or take away.

use std::task::Poll;
use std::time::Duration;

use kvferry::{
    AllocOptions, AuxSlot, Engine, FailureKind, GrantError, GrantSpec, IoMode, OpenOptions, Pool,
    Region, Role, RoomHandle, RoomId, RoomState, Secret,
};

use crate::common::{KV, Node, config, layout, local, wait};
use crate::link::{Carried, Link, ROOM, Says, land, until};
use crate::tamper::{Do, Gate, To};

pub fn a_room_that_a_caller_gives_up_fails_on_both_sides_in_the_callers_words(
    kind: FailureKind,
) -> Option<Carried> {
    let link = Link::new();
    let says = |by, cause| Says { kind, by, cause, pages: 1 };
    for by in [Role::Sender, Role::Receiver] {
        let (sending, receiving) = link.room(ROOM);
        land((&sending, &receiving), 0..1);
        let cause = match by {
            Role::Sender => "aborted by the prefill side: the client hung up",
            Role::Receiver => "aborted by the decode side: the client hung up",
        };
        match by {
            Role::Sender => sending.abort("the client hung up"),
            Role::Receiver => receiving.abort("the client hung up"),
        }
        link.known.assert_both_say((&sending, &receiving), says(by, cause));
        link.carry();
    }
    let dropped = "its handle was dropped before it ended";
    let (sending, receiving) = link.room(ROOM);
    land((&sending, &receiving), 0..1);
    drop(sending);
    link.known.assert_says(&wait(receiving.done()).unwrap_err(), says(Role::Sender, dropped));
    let (sending, receiving) = link.room(ROOM);
    land((&sending, &receiving), 0..1);
    drop(receiving);
    link.known.assert_says(&wait(sending.done()).unwrap_err(), says(Role::Receiver, dropped));
    Some(link.carry())
}

pub fn a_room_that_nobody_grants_ends_by_its_own_deadline_and_says_that_no_grant_came(
    kind: FailureKind,
) -> Option<Carried> {
    let link = Link::new();
    let alone = || {
        let soon = OpenOptions::default().grant_timeout(Duration::from_millis(100));
        let sending = link.prefill.engine.open(ROOM, soon).unwrap();
        let failure = wait(sending.done()).unwrap_err();
        assert_eq!((failure.kind, failure.seen_by), (kind, Role::Sender));
        assert_eq!((failure.epoch.0, failure.landed.bytes, failure.peer), (0, 0, None));
        assert_eq!(failure.causes, ["no grant came before the deadline"]);
        assert!(failure.to_string().contains("[no peer yet, seen by sender"), "{failure}");
        wait(sending.released());
    };
    alone();
    // A grant that was given up before the room was opened is none.
    drop(link.grant(GrantSpec::new(ROOM).pages(KV, [0])));
    // What is said of a later room arrives later.
    drop(link.room(RoomId(8)));
    alone();
    // Nor has a decode engine that may not connect any way to grant.
    let secret = |words: &str| Secret::new(words.as_bytes().to_vec()).unwrap();
    let listening = config(IoMode::Auto).listen(local()).secret(secret("0123456789abcdef"));
    let guarded = Node::start(listening, layout(8));
    let addr = guarded.engine.listen_addr().unwrap();
    let other = config(IoMode::Auto).secret(secret("fedcba9876543210"));
    let error = wait(Node::start(other, layout(8)).engine.connect(addr)).unwrap_err();
    assert!(error.to_string().contains("secret"), "{error}");
    let mut taller = layout(8);
    taller.head_bytes *= 2;
    let other = config(IoMode::Auto).secret(secret("0123456789abcdef"));
    let error = wait(Node::start(other, taller).engine.connect(addr)).unwrap_err();
    assert!(error.to_string().contains("head_bytes"), "{error}");
    Some(link.carry())
}

pub fn a_room_that_is_not_over_in_time_says_how_far_it_was(kind: FailureKind) -> Option<Carried> {
    let link = Link::new();
    let short = || {
        let spec = GrantSpec::new(ROOM).pages(KV, [0, 1, 2, 3]);
        link.room_of(spec.timeout(Duration::from_millis(1500)))
    };
    let says = |by, pages, cause| Says { kind, by, cause, pages };
    let (sending, receiving) = short();
    land((&sending, &receiving), 0..1);
    let state = "the deadline passed in state Transferring";
    link.known.assert_both_say((&sending, &receiving), says(Role::Receiver, 1, state));
    link.carry();
    // The receiver's word does not arrive: the sender has its own.
    let (sending, receiving) = short();
    let gate = Gate::closed();
    let held = gate.clone();
    link.proxy.messages(move |to, _| {
        if to == To::Listener {
            held.pass();
        }
        Do::Forward
    });
    let state = "the deadline passed in state WaitingForInput";
    let ours = wait(sending.done()).unwrap_err();
    link.known.assert_says(&ours, says(Role::Sender, 0, state));
    link.known.assert_says(&wait(receiving.done()).unwrap_err(), says(Role::Receiver, 0, state));
    gate.open();
    link.proxy.be_honest();
    let carried = link.carry();
    assert_eq!(sending.failure(), Some(&ours), "the words that came late change nothing");
    Some(carried)
}

pub fn an_aux_row_that_does_not_fit_its_slot_fails_the_room_and_touches_nothing(
    kind: FailureKind,
) -> Option<Carried> {
    let link = Link::new();
    let sending = link.open(ROOM);
    // Said before the slot's length is known; afterwards finish() refuses it.
    sending.finish(vec![1; 100].into()).unwrap();
    let region = Region::from_vec(vec![0; 64]);
    let slot = AuxSlot { region: region.clone(), offset: 16, len: 8 };
    let receiving = link.grant(GrantSpec::new(ROOM).pages(KV, [0]).aux(slot));
    let says =
        Says { kind, by: Role::Receiver, cause: "an aux row of 100 bytes, 8 granted", pages: 0 };
    link.known.assert_both_say((&sending, &receiving), says);
    let mut after = vec![1; 64];
    region.read_at(0, &mut after).unwrap();
    assert_eq!(after, vec![0; 64]);
    Some(link.carry())
}

pub fn a_grant_that_finds_no_place_to_wait_is_refused_and_those_before_it_stand(
    kind: FailureKind,
) -> Option<Carried> {
    let small = config(IoMode::Auto).max_rooms(2u32).listen(local());
    let decode = Node::start(config(IoMode::Auto), layout(64));
    let link = Link::between(Node::start(small, layout(64)), decode);
    let spec = |room| GrantSpec::new(room).pages(KV, [0]);
    let waiting = [RoomId(1), RoomId(2)].map(|room| link.grant(spec(room)));
    let says = Says {
        kind,
        by: Role::Sender,
        cause: "too many grants wait on the sender for rooms to be opened",
        pages: 0,
    };
    let refused = link.grant(spec(ROOM));
    link.known.assert_says(&wait(refused.done()).unwrap_err(), says);
    wait(refused.released());
    for receiving in waiting {
        assert_eq!(receiving.state(), RoomState::WaitingForInput);
        let sending = link.open(receiving.id());
        wait(sending.granted()).unwrap();
        sending.finish(bytes::Bytes::new()).unwrap();
        wait(receiving.done()).unwrap();
        wait(sending.released());
    }
    Some(link.carry())
}

pub fn a_grant_that_a_drained_peer_gets_is_refused_and_others_are_told_at_the_call(
    kind: FailureKind,
) -> Option<Carried> {
    let link = Link::new();
    let (sending, receiving) = link.room(RoomId(1));
    let late = link.grant(GrantSpec::new(ROOM).pages(KV, [8]));
    std::thread::scope(|scope| {
        let dialer = link.decode.engine.incarnation();
        let drain = scope.spawn(move || wait(link.prefill.engine.drain_peer(dialer)));
        let says =
            Says { kind, by: Role::Sender, cause: "the prefill side was told to drain", pages: 0 };
        link.known.assert_says(&wait(late.done()).unwrap_err(), says);
        let again = || link.decode.engine.grant(link.peer, GrantSpec::new(ROOM).pages(KV, [8]));
        until("the peer is known to drain", || {
            matches!(again().map(drop), Err(GrantError::PeerDraining(_)))
        });
        assert!(!drain.is_finished(), "a drain ended before the rooms did");
        land((&sending, &receiving), 0..4);
        sending.finish(bytes::Bytes::new()).unwrap();
        wait(receiving.done()).unwrap();
        drain.join().unwrap();
    });
    None
}

/// The pool is deregistered between the call of `grant` and the worker's turn, which callers can not
/// bring about at will: one of many tries does.
pub fn a_grant_of_a_pool_that_is_taken_out_under_it_fails_and_of_another_pool_it_is_done(
    kind: FailureKind,
) -> Option<Carried> {
    loop {
        if let Some(carried) = pool_taken_out(kind) {
            return Some(carried);
        }
    }
}

fn pool_taken_out(kind: FailureKind) -> Option<Carried> {
    let pools = ["kv"].into_iter().map(str::to_owned).chain((1..16).map(|n| format!("spare {n}")));
    let layouts: Vec<_> = pools
        .map(|name| {
            let mut layout = layout(64);
            layout.name = name;
            layout
        })
        .collect();
    let start = |config| {
        let mut builder = Engine::builder(config);
        let pools: Vec<_> = layouts
            .iter()
            .map(|layout| {
                Pool::allocate(layout.clone(), AllocOptions { huge_pages: false }).unwrap()
            })
            .collect();
        let ids: Vec<_> = pools.iter().map(|pool| builder.pool(pool.clone()).unwrap()).collect();
        (Node { engine: builder.start().unwrap(), pool: pools[0].clone() }, ids)
    };
    let (prefill, _) = start(config(IoMode::Auto).listen(local()));
    let (decode, pools) = start(config(IoMode::Auto));
    let link = Link::between(prefill, decode);
    for &pool in &pools[1..] {
        let mut deregister = std::pin::pin!(link.decode.engine.deregister_pool(pool));
        // Asked, and not answered yet.
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let asked = deregister.as_mut().poll(&mut context);
        let granted = link.decode.engine.grant(link.peer, GrantSpec::new(ROOM).pages(pool, [0]));
        if asked.is_pending() {
            wait(deregister).unwrap();
        } else {
            assert_eq!(asked, Poll::Ready(Ok(())));
        }
        let receiving = match granted {
            Ok(receiving) => receiving,
            Err(error) => {
                assert_eq!(error, GrantError::NoSuchPool(pool));
                continue;
            }
        };
        let failure = wait(receiving.done()).unwrap_err();
        assert_eq!((failure.kind, failure.seen_by), (kind, Role::Receiver));
        assert_eq!(failure.causes, ["a pool was deregistered before the grant was sent"]);
        assert_eq!((failure.epoch.0, failure.landed.bytes), (0, 0), "nobody was told of it");
        wait(receiving.released());
        return Some(link.carry());
    }
    None
}

pub fn a_shutdown_fails_the_rooms_that_are_left_on_both_sides(
    kind: FailureKind,
) -> Option<Carried> {
    let says = |by, cause| Says { kind, by, cause, pages: 1 };
    let begun = || {
        let link = Link::new();
        let (sending, receiving) = link.room(ROOM);
        land((&sending, &receiving), 0..1);
        (link, sending, receiving)
    };
    let stopped = "the engine was shut down";
    let (Link { prefill, decode, known, .. }, sending, receiving) = begun();
    assert!(!wait(decode.engine.shutdown(Duration::from_millis(20))));
    known.assert_both_say((&sending, &receiving), says(Role::Receiver, stopped));
    assert!(receiving.is_released());
    drop(prefill);
    // Without any patience: the engine is dropped.
    let (Link { prefill, decode, known, .. }, sending, receiving) = begun();
    drop(prefill);
    known.assert_both_say((&sending, &receiving), says(Role::Sender, stopped));
    drop(decode);
    // More rooms than messages fit in a session at once: each is told all the same.
    let link = Link::new();
    let rooms: Vec<_> = (0..3000)
        .map(|room| (link.open(RoomId(room)), link.grant(GrantSpec::new(RoomId(room)))))
        .collect();
    rooms.iter().for_each(|(sending, _)| drop(wait(sending.granted()).unwrap()));
    let Link { prefill, decode, .. } = link;
    drop(prefill);
    for (sending, receiving) in &rooms {
        let (ours, theirs) =
            (wait(sending.done()).unwrap_err(), wait(receiving.done()).unwrap_err());
        assert_eq!(ours.to_string(), theirs.to_string());
    }
    drop(decode);
    // A goodbye to one peer: each side says who said it.
    let (link, sending, receiving) = begun();
    wait(link.decode.engine.disconnect(link.peer, "moved to another node"));
    let ours = wait(sending.done()).unwrap_err();
    link.known.assert_says(&ours, says(Role::Sender, "the peer said goodbye: moved to another"));
    let theirs = wait(receiving.done()).unwrap_err();
    link.known.assert_says(&theirs, says(Role::Receiver, "this engine said goodbye: moved to"));
    link.meet_again();
    Some(link.carry())
}
