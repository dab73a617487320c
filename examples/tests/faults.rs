//! Faults with real signals: what is reported, by when, and who is not concerned.
#![allow(missing_docs, reason = "tests document themselves by name")]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;

use common::{PATIENCE, Said, Watched, pair};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

/// The failure lines of a side, each with all that it must say.
fn failure_lines<'a>(said: &'a Said, side: &str, kind: &str) -> Vec<&'a str> {
    let begin = format!("{side}: room ");
    let lines: Vec<_> = said.stdout.lines().filter(|line| line.starts_with(&begin)).collect();
    for line in &lines {
        for part in [kind, "[peer ", " page writes, ", " bytes; ", "to do: ", "docs/failures.md#"] {
            assert!(line.contains(part), "no {part:?} in {line}");
        }
    }
    lines
}

#[test]
fn killed_decode_fails_its_rooms_as_died_and_no_other() {
    let said = pair(&["--fault", "kill-decode"]).well();
    assert_eq!(failure_lines(&said, "prefill", "peer-died").len(), 4, "{}", said.stdout);
    assert_eq!((said.rows().len(), said.done()), (8, 4));
    assert!(said.stdout.contains("as promised: all 4 other rooms were done"));
}

#[test]
fn stopped_decode_fails_its_rooms_as_silent_and_learns_of_it_when_it_continues() {
    let said = pair(&["--fault", "stop-decode", "--rooms", "4"]).well();
    assert_eq!(failure_lines(&said, "prefill", "peer-silent").len(), 2, "{}", said.stdout);
    assert_eq!(failure_lines(&said, "decode", "").len(), 2, "{}", said.stdout);
    assert_eq!((said.rows().len(), said.done()), (4, 2));
}

#[test]
fn restarted_decode_is_served_the_same_ids_by_the_same_prefill() {
    let said = pair(&["--fault", "restart-decode"]).well();
    assert_eq!(failure_lines(&said, "prefill", "peer-died").len(), 4, "{}", said.stdout);
    assert_eq!((said.rows().len(), said.done()), (12, 8));
    let again = said.rows().iter().filter(|row| row.iter().any(|cell| cell == "id reused")).count();
    assert_eq!(again, 4);
}

#[test]
fn bad_room_fails_alone_with_the_same_words_on_both_sides() {
    let said = pair(&["--fault", "bad-room"]).well();
    assert_eq!((said.rows().len(), said.done()), (8, 7));
    let strip = |line: &str| line.split_once(": ").unwrap().1.to_owned();
    let prefill: Vec<_> =
        failure_lines(&said, "prefill", "aborted").into_iter().map(strip).collect();
    let decode: Vec<_> = failure_lines(&said, "decode", "aborted").into_iter().map(strip).collect();
    assert_eq!((prefill.len(), &prefill), (1, &decode));
    assert!(prefill[0].contains("the client hung up"));
}

#[test]
fn both_sides_of_a_failed_room_give_one_kind_cause_and_epoch_in_json() {
    let said = pair(&["--fault", "bad-room", "--io", "epoll", "--rooms", "4", "--json"]).well();
    let lines = said.json();
    let failed: Vec<&Value> = lines.iter().filter(|line| line["verdict"] == "failed").collect();
    let [sender, receiver] = failed[..] else { panic!("{}", said.stdout) };
    for field in ["room", "epoch", "kind", "cause", "line"] {
        assert_eq!(sender[field], receiver[field], "{field}");
        assert!(!sender[field].is_null(), "{field}");
    }
    assert_eq!((&sender["released"], &receiver["released"]), (&true.into(), &true.into()));
    let summary = &lines.last().unwrap()["summary"];
    assert_eq!((&summary["done"], &summary["failed"]), (&3.into(), &1.into()));
}

#[test]
fn a_child_that_hangs_ends_the_pair_with_what_it_waited_for_and_leaves_no_process() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pd-pair"));
    command.args(["--timeout-s", "1", "--pace-ms", "200", "--peer-silent-ms", "60000"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut driver = Watched(command.spawn().unwrap());
    let stderr = BufReader::new(driver.0.stderr.take().unwrap());
    let (heard, lines) = channel();
    std::thread::spawn(move || {
        stderr.lines().map_while(Result::ok).try_for_each(|l| heard.send(l))
    });
    let mut children = Vec::new();
    while children.len() < 2 {
        let line = lines.recv_timeout(PATIENCE).unwrap();
        let (_, pid) = line.split_once("ready: pid ").unwrap();
        children.push(Pid::from_raw(pid.split(',').next().unwrap().parse().unwrap()).unwrap());
    }
    kill_process(children[0], Signal::STOP).unwrap();
    let status = driver.wait().expect("pd-pair hangs with its child");
    let said: Vec<_> = lines.iter().collect();
    let said = said.join("\n");
    assert!(!status.success() && said.contains("waited 1s for every room"), "{said}");
    assert!(said.contains("room 2 with decode-0: ") && said.contains("prefill's end"), "{said}");
    for child in children {
        assert!(test_kill_process(child).is_err(), "{child:?} is still there");
    }
}
