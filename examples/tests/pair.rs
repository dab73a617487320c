//! The pair: every room done, every token equal to what one process alone generates.
#![allow(missing_docs, reason = "tests document themselves by name")]

mod common;

use std::collections::HashMap;

use common::{Said, pair};
use serde_json::Value;

/// Checks the lines of both sides from outside: each room once a side, with one epoch and equal
/// numbers.
fn assert_sides_agree(said: &Said, rooms: usize) {
    let lines = said.json();
    let (summary, lines) = lines.split_last().unwrap();
    let mut sides: HashMap<(u64, u64), Vec<&Value>> = HashMap::new();
    for line in lines {
        let of = |field: &str| line[field].as_u64().unwrap();
        sides.entry((of("room"), of("epoch"))).or_default().push(line);
    }
    assert_eq!(sides.len(), rooms);
    for (room, lines) in sides {
        let [sender, receiver] = lines[..] else { panic!("{room:?}: {lines:?}") };
        assert_eq!((&sender["role"], &receiver["role"]), (&"sender".into(), &"receiver".into()));
        for field in ["verdict", "page_writes", "bytes", "pages", "prompt_tokens", "fabric"] {
            assert_eq!(sender[field], receiver[field], "{field} of {room:?}");
        }
        assert_eq!((&sender["verdict"], &sender["released"]), (&"done".into(), &true.into()));
        assert_eq!(receiver["released"], true);
        let landed = (sender["page_writes"].as_u64().unwrap(), sender["pages"].as_u64().unwrap());
        assert_eq!(landed.0, landed.1 * 12, "6 layers, K and V");
        assert_ne!(sender["peer"], receiver["peer"]);
    }
    assert_eq!(summary["summary"]["done"], rooms);
    assert_eq!(summary["summary"]["wrong"], Value::Array(Vec::new()));
}

#[test]
fn default_rooms_are_done_with_equal_tokens_and_the_special_ones_are_among_them() {
    let said = pair(&[]).well();
    assert_eq!((said.rows().len(), said.done()), (8, 8), "{}", said.stdout);
    for special in ["empty last chunk", "id reused", "prefix cached", "all cached, aux alone"] {
        let rows = said.rows();
        let row = rows.iter().filter(|row| row.iter().any(|cell| cell == special));
        assert_eq!(row.count(), 1, "{special}:\n{}", said.stdout);
    }
    assert_eq!(said.stdout.matches("  -> ").count(), 8, "a text a room");
}

#[test]
fn sixty_four_rooms_at_once_are_done_and_both_sides_say_the_same_of_each() {
    assert_sides_agree(&pair(&["--rooms", "64", "--max-new", "8", "--json"]).well(), 64);
}

#[test]
fn epoll_carries_the_same_rooms_and_says_that_it_did() {
    let said = pair(&["--io", "epoll", "--json"]).well();
    assert_sides_agree(&said, 8);
    assert_eq!(said.stdout.matches("tcp/epoll").count(), 16);
}

#[test]
fn prompts_of_a_file_a_secret_and_a_small_pool_that_rooms_wait_for() {
    let dir = tempfile::tempdir().unwrap();
    let (prompts, secret) = (dir.path().join("prompts"), dir.path().join("secret"));
    let lines: Vec<_> = (0..12).map(|i| format!("{i} wandering pages\n\n")).collect();
    std::fs::write(&prompts, lines.concat().repeat(2)).unwrap();
    std::fs::write(&secret, "a secret of more than 16 bytes\n").unwrap();
    let (prompts, secret) = (prompts.to_str().unwrap(), secret.to_str().unwrap());
    let said = pair(&[
        "--prompts",
        prompts,
        "--secret-file",
        secret,
        "--pages",
        "12",
        "--page-tokens",
        "8",
        "--chunk-tokens",
        "8",
        "--max-new",
        "6",
        "--lanes",
        "1",
    ])
    .well();
    assert_eq!((said.rows().len(), said.done()), (24, 24), "{}", said.stdout);
}

#[test]
fn what_cannot_be_run_is_refused_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let short = dir.path().join("secret");
    std::fs::write(&short, "short").unwrap();
    for (args, words) in [
        (&["--chunk-tokens", "40"][..], "not a multiple of --page-tokens"),
        (&["--prompts", "/nowhere/prompts"][..], "the prompts /nowhere/prompts"),
        (&["--model", "/nowhere/model.gguf"][..], "/nowhere/model.gguf"),
        (&["--secret-file", short.to_str().unwrap()][..], "at least 16"),
        (&["--pages", "8"][..], "raise --pages"),
    ] {
        let said = pair(args);
        assert!(!said.ok && said.stderr.contains(words), "{args:?}: {}", said.stderr);
    }
}
