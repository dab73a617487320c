//! Peers that are gone.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};

use kvferry_verbs::{Context, Library, WorkStatus};

use crate::rig::{ALL, BYTES, PORT, Patience, Rig, SEND_WRS, Side, USUAL, common_gids, saw, wait};

/// Set for the process that is to be killed: both devices' names.
const DEVICES: &str = "KVFERRY_TEST_PEER";
/// What a line of its is marked with, among what the test harness prints.
const MARK: &str = "peer: ";

#[test]
fn a_peer_whose_queue_pair_is_gone_is_given_up_after_the_retries() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    assert_eq!(a.write(0, 4096, &b), Ok(()));
    let crate::rig::End { qp, mr, .. } = b;
    qp.destroy().unwrap();
    let status = a.write_to(1, 4096, mr.addr(), mr.rkey());
    saw("peer's queue pair destroyed", status);
    assert_eq!(status, Err(WorkStatus::RetryExceeded));
    assert_eq!(a.write_to(2, 8, mr.addr(), mr.rkey()), Err(WorkStatus::Flushed));
}

#[test]
fn a_peer_that_was_killed_is_given_up_and_everything_is_accounted_for() {
    let Some(rig) = Rig::open() else { return };
    let mut a = rig.a.end(crate::rig::pattern(BYTES), ALL);
    let names = format!("{}:{}", rig.a.context.name(), rig.b.context.name());
    let (mut child, mut lines) = spawn(&names, a.qp.number());
    let told = next_line(&mut lines);
    let numbers: Vec<u64> = told.split(' ').map(|number| number.parse().unwrap()).collect();
    let [number, addr, rkey] = numbers[..] else { panic!("{told}") };
    let patience = Patience { retry_count: 3, ..USUAL };
    rig.a.join(&mut a.qp, &rig.b, number as u32, patience);
    assert_eq!(a.write_to(0, 4096, addr, rkey as u32), Ok(()));

    // Some are under way when it dies, or all have ended; then some are posted to nobody.
    let whole = a.mr.sge(0, BYTES as u32).unwrap();
    let mut post = |wr_ids: std::ops::RangeInclusive<u64>| {
        let mut batch = a.qp.batch();
        for wr_id in wr_ids {
            batch.write(wr_id, &[whole], addr, rkey as u32, true).unwrap();
        }
        batch.post().unwrap();
    };
    let (before, count) = (u64::from(SEND_WRS / 2), u64::from(SEND_WRS / 2 + 16));
    post(1..=before);
    let first = wait(&a.cq, 1)[0];
    assert!(first.result.is_ok(), "{first:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    post(before + 1..=count);

    let rest = wait(&a.cq, count as usize - 1);
    assert!(rest.iter().map(|completion| completion.wr_id).eq(2..=count));
    let failed = rest.iter().position(|completion| completion.result.is_err());
    let failed = failed.expect("writes to nobody succeed");
    let statuses = rest[failed..].iter().map(|completion| completion.result.unwrap_err().status);
    let statuses: Vec<_> = statuses.collect();
    saw("peer process killed", Err(statuses[0]));
    assert_eq!(statuses[0], WorkStatus::RetryExceeded);
    assert!(statuses[1..].iter().all(|status| status.is_flush()), "{statuses:?}");
}

fn spawn(names: &str, number: u32) -> (Child, impl Iterator<Item = String>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "peers::the_peer_that_is_killed", "--ignored", "--nocapture"])
        .env(DEVICES, names)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    writeln!(child.stdin.as_mut().unwrap(), "{number}").unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    (child, lines)
}

fn next_line(lines: &mut impl Iterator<Item = String>) -> String {
    let found = lines.find_map(|line| line.find(MARK).map(|at| line[at + MARK.len()..].to_owned()));
    found.expect("the peer has ended")
}

/// The other process: connects, says where it may be written, and waits to be killed.
#[test]
#[ignore = "a process that another test starts"]
fn the_peer_that_is_killed() {
    let names = std::env::var(DEVICES).expect("another test starts this");
    let (a, b) = names.split_once(':').unwrap();
    let library = Library::open().unwrap();
    let (a, b) = (Context::open(&library, a).unwrap(), Context::open(&library, b).unwrap());
    let (gid_a, gid_b) = common_gids(&a, &b).unwrap();
    let lid_a = a.port(PORT).unwrap().lid;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let number = line.trim().parse().unwrap();
    let side = Side::new(b, gid_b);
    let mut end = side.end(vec![0; BYTES], ALL);
    let gid = (side.link_layer == kvferry_verbs::LinkLayer::Ethernet).then_some(gid_a.gid);
    side.join_at(&mut end.qp, gid, lid_a, number, USUAL);
    println!("{MARK}{} {} {}", end.qp.number(), end.mr.addr(), end.mr.rkey());
    // Until it is killed, or its starter is gone.
    let _ = std::io::stdin().read_line(&mut line);
}
