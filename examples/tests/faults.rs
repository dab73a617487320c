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

/// The fence is promised after 500 ms, and a release 200 ms later; with 5x slack.
const RELEASED_WITHIN_US: u64 = (500 + 200) * 5 * 1000;

/// Runs stop-decode, and checks from outside what it says. `None` where the kernel refuses the mode.
fn stop_decode(mode: &[&str]) -> Option<Vec<String>> {
    let args = [&["--fault", "stop-decode", "--rooms", "6", "--json"], mode].concat();
    let said = pair(&args);
    if said.stderr.contains("io_uring is required and cannot be used") {
        println!("SKIPPED: {}", said.stderr);
        return None;
    }
    let said = said.well();
    let lines = said.json();
    let (summary, lines) = lines.split_last().unwrap();
    let summary = &summary["summary"];
    let claims: Vec<String> = serde_json::from_value(summary["claims"].clone()).unwrap();
    // A machine that takes longer for all of it than the silence allowed loses this one.
    let kept = claims.iter().any(|claim| claim.ends_with("the one that nobody gave up was done"));
    let of = |role: &str, kind: &str| -> Vec<&Value> {
        lines.iter().filter(|line| line["role"] == role && line["kind"] == kind).collect()
    };
    for role in ["sender", "receiver"] {
        let pages_again =
            lines.iter().filter(|line| line["role"] == role && line["again"] != 0).count();
        assert!(pages_again > 0, "{role} used no page of a failed room again:\n{}", said.stdout);
        let (aborted, silent) = (of(role, "aborted").len(), of(role, "peer-silent").len());
        assert_eq!(aborted, 2, "{role}:\n{}", said.stdout);
        assert!(silent == 3 || !kept && silent == 4, "{role}:\n{}", said.stdout);
    }
    for (sent, received) in of("sender", "aborted").into_iter().zip(of("receiver", "aborted")) {
        assert_eq!((&sent["line"], &sent["epoch"]), (&received["line"], &received["epoch"]));
        assert!(sent["cause"].as_str().unwrap().contains("the client hung up"), "{sent}");
        let after_us = sent["after_abort_us"].as_u64().unwrap();
        assert!(after_us <= RELEASED_WITHIN_US, "released {after_us} us after it was given up");
        assert_eq!(sent["overwritten"], sent["pages"], "a page was not overwritten");
    }
    assert!(lines.iter().all(|line| line["released"] == true), "{}", said.stdout);
    // Done: three others, two later ones, two ids again. Failed: two given up, three for silence.
    let (done, failed) = if kept { (8, 5) } else { (7, 6) };
    assert_eq!((&summary["done"], &summary["failed"]), (&done.into(), &failed.into()), "{summary}");
    Some(claims)
}

#[track_caller]
fn assert_claimed(claims: &[String], words: &str) {
    assert!(claims.iter().any(|claim| claim.contains(words)), "no {words:?} in {claims:#?}");
}

/// What a room of a stopped process may cost: its own words, and nothing on either side that was written
/// after a release.
fn assert_quiet(claims: &[String]) {
    for words in [
        "2 of them that prefill gave up were released there",
        "all 3 other rooms were done meanwhile, and 2 more that were sent from",
        "it failed and released the same 2 rooms",
        "pages that rooms had there has a byte that prefill wrote after their release",
        "it was served the same 2 room ids",
        "3 of 3 rooms failed on prefill with peer-silent",
        "continued, it failed the same 3 rooms",
        "after all of it the same is true of the",
        "have the very bytes that were sent",
    ] {
        assert_claimed(claims, words);
    }
}

#[test]
fn pages_of_a_stopped_decode_are_quiet_once_released_over_io_uring() {
    if let Some(claims) = stop_decode(&["--io", "io-uring"]) {
        assert_quiet(&claims);
    }
}

#[test]
fn pages_of_a_stopped_decode_are_quiet_once_released_over_epoll() {
    assert_quiet(&stop_decode(&["--io", "epoll"]).unwrap());
}

#[test]
fn pages_that_the_kernel_sends_from_are_fenced_off_a_stopped_decode() {
    let Some(claims) = stop_decode(&["--io", "io-uring", "--zero-copy", "try"]) else { return };
    assert_quiet(&claims);
    let fences = claims.last().unwrap();
    if fences.contains("this kernel has no zero-copy sends") {
        println!("SKIPPED: {fences}");
        return;
    }
    let (_, count) = fences.rsplit_once(' ').unwrap();
    assert!(count.parse::<u64>().unwrap() > 0, "{fences}");
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
