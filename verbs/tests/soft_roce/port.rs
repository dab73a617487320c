//! A port that goes down, and comes back.

use std::process::Command;
use std::time::Instant;

use kvferry_verbs::{AsyncEvent, InitAttributes, PortState, QpState, VerbsError, WorkStatus};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::rig::{ALL, PATIENCE, PORT, Patience, Rig, Side, USUAL, common_gids, saw};

/// A network device that is down until this is dropped.
struct Down(String);

impl Down {
    fn new(netdev: &str) -> Self {
        set(netdev, "down");
        Self(netdev.to_owned())
    }
}

impl Drop for Down {
    fn drop(&mut self) {
        set(&self.0, "up");
    }
}

fn set(netdev: &str, state: &str) {
    let status = Command::new("ip").args(["link", "set", netdev, state]).status().unwrap();
    assert!(status.success(), "ip link set {netdev} {state}");
}

/// Waits for an event, whatever others come before it.
fn wait_for(side: &Side, event: AsyncEvent) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        while let Some(came) = side.context.next_async_event().unwrap() {
            println!("event: {}: {came:?}", side.context.name());
            if came == event {
                return;
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(&side.context, PollFlags::IN)];
        let limit = Timespec::try_from(left).unwrap();
        assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "{event:?} did not come");
    }
}

/// Takes one side's link down under a write and up again; gives the first statuses of `a`: of the
/// write under way, and of one on another queue pair that was posted when the link was down.
fn down_and_up(rig: &mut Rig, own: bool) -> [WorkStatus; 2] {
    let patience = Patience { retry_count: 3, ..USUAL };
    let (mut a, b) = rig.pair_with(patience, ALL);
    let (mut late, late_b) = rig.pair_with(patience, ALL);
    assert_eq!(a.write(0, 4096, &b), Ok(()));
    assert_eq!(late.write(0, 4096, &late_b), Ok(()));
    for side in [&rig.a, &rig.b] {
        while side.context.next_async_event().unwrap().is_some() {}
    }

    let side = if own { &rig.a } else { &rig.b };
    let netdev = side.gid.net_device.clone().expect("a network device");
    let takes_down = std::thread::spawn(move || Down::new(&netdev));
    let deadline = Instant::now() + PATIENCE;
    let under_way = loop {
        if let Err(status) = a.write(1, 65_536, &b) {
            break status;
        }
        assert!(Instant::now() < deadline, "writes go on");
    };
    let down = takes_down.join().unwrap();
    wait_for(side, AsyncEvent::PortError { port: PORT });
    assert_ne!(side.context.port(PORT).unwrap().state, PortState::Active);
    let posted_later = late.write(1, 4096, &late_b).unwrap_err();
    assert_eq!(a.qp.state().unwrap(), QpState::Error);
    assert_eq!(a.write(2, 8, &b), Err(WorkStatus::Flushed));
    if own {
        no_way_for_new_ones(rig, b.qp.number());
    }

    drop(down);
    wait_for(side, AsyncEvent::PortActive { port: PORT });
    assert_eq!(side.context.port(PORT).unwrap().state, PortState::Active);
    // The other end of the cable follows, and the indices of GIDs may change.
    let deadline = Instant::now() + PATIENCE;
    let (gid_a, gid_b) = loop {
        let active = |side: &Side| side.context.port(PORT).unwrap().state == PortState::Active;
        match common_gids(&rig.a.context, &rig.b.context) {
            Some((a, b))
                if (a.gid, b.gid) == (rig.a.gid.gid, rig.b.gid.gid)
                    && active(&rig.a)
                    && active(&rig.b) =>
            {
                break (a, b);
            }
            _ => assert!(Instant::now() < deadline, "port and GID did not come back"),
        }
        std::thread::yield_now();
    };
    (rig.a.gid, rig.b.gid) = (gid_a, gid_b);
    let (mut a, b) = rig.pair();
    assert_eq!(a.write(0, 4096, &b), Ok(()));
    assert!(b.bytes(0, 4096) == crate::rig::pattern(4096));
    [under_way, posted_later]
}

/// What the kernel says to connecting over a port that is down differs.
fn no_way_for_new_ones(rig: &Rig, number: u32) {
    let mut end = rig.a.end(vec![0; 64], ALL);
    end.qp.to_init(&InitAttributes { port: PORT, pkey_index: 0, access: ALL }).unwrap();
    match end.qp.to_rtr(&rig.a.rtr(Some(rig.b.gid.gid), 0, number)) {
        Ok(()) => println!("connecting with the port down: accepted"),
        Err(error @ (VerbsError::PortDown { .. } | VerbsError::NoRoute { .. })) => {
            println!("connecting with the port down: {error}");
        }
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn a_port_that_goes_down_fails_its_queue_pairs_says_so_and_works_again_afterwards() {
    let Some(mut rig) = Rig::open() else { return };
    if !rig.is_soft() {
        println!("not run: the link of a real NIC is left alone");
        return;
    }
    for (whose, own) in [("own", true), ("peer's", false)] {
        let statuses = down_and_up(&mut rig, own);
        saw(&format!("{whose} port goes down under a write"), Err(statuses[0]));
        saw(&format!("{whose} port is down"), Err(statuses[1]));
        // The first is what the specification says, the others are Soft-RoCE's.
        let known = [WorkStatus::RetryExceeded, WorkStatus::LocalQpOperation, WorkStatus::Flushed];
        assert!(statuses.iter().all(|status| known.contains(status)), "{statuses:?}");
    }
}
