//! `prefill` and `decode` on their own: driven by lines, whatever the lines are.
#![allow(missing_docs, reason = "tests document themselves by name")]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{Node, PATIENCE};

const PROMPT: &str = r#""prompt":"A page is carried once, and read by every token after it.""#;

#[test]
fn lines_that_are_no_commands_are_answered_and_the_next_one_is_followed() {
    let mut prefill = Node::prefill(&[]);
    let mut decode = Node::decode(&prefill, &[]);
    let long = format!(r#"{{"cmd":"prefill","room":1,"prompt":"{}"}}"#, "x".repeat(2 << 20));
    let lines = [
        ("{", "not a command"),
        ("null", "not a command"),
        (r#"{"cmd":"prefill","room":"seven","prompt":"a"}"#, "not a command"),
        (r#"{"cmd":"land","room":7}"#, "unknown variant"),
        ("\u{1}\u{2}", "not a command"),
        (&long, "a line of over"),
        (r#"{"cmd":"abort","room":7,"reason":"no such"}"#, "no live room 7"),
        (r#"{"cmd":"prefill","room":7,"prompt":""}"#, "the prompt is empty"),
        (r#"{"cmd":"prefill","room":7,"tokens":[999]}"#, "token 999 is not in the vocabulary"),
        (r#"{"cmd":"decode","room":7,"prompt":"a"}"#, "not a command for prefill"),
        (r#"{"cmd":"resume","room":7}"#, "no live room 7"),
        (r#"{"cmd":"scan"}"#, "not a command for prefill"),
    ];
    for (line, words) in lines {
        prefill.say(line);
        let error = prefill.hear("error");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    for (line, words) in [
        ("[]", "not a command"),
        (r#"{"cmd":"decode","room":7,"prompt":"a","max_new":100000}"#, "exceed the context"),
        (r#"{"cmd":"decode","room":7,"prompt":"a","max_new":-1}"#, "not a command"),
        (r#"{"cmd":"prefill","room":7,"prompt":"a"}"#, "not a command for decode"),
        (r#"{"cmd":"resume","room":7}"#, "not a command for decode"),
    ] {
        decode.say(line);
        let error = decode.hear("error");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    prefill.say(&format!(r#"{{"cmd":"prefill","room":7,{PROMPT}}}"#));
    decode.say(&format!(r#"{{"cmd":"decode","room":7,{PROMPT},"max_new":3}}"#));
    assert_eq!(prefill.hear("room")["verdict"], "done");
    assert_eq!(decode.hear("text")["tokens"].as_array().unwrap().len(), 3);
    assert!(decode.end().success() && prefill.end().success());
}

#[test]
fn a_live_id_is_refused_on_both_sides_and_an_abort_frees_it() {
    let mut prefill = Node::prefill(&[]);
    let mut decode = Node::decode(&prefill, &[]);
    let (send, take) = (
        format!(r#"{{"cmd":"prefill","room":7,{PROMPT}}}"#),
        format!(r#"{{"cmd":"decode","room":7,{PROMPT}}}"#),
    );
    decode.say(&take);
    decode.hear("granted");
    decode.say(&take);
    assert_eq!(decode.hear("error")["room"], 7);
    decode.say(r#"{"cmd":"abort","room":7,"reason":"too late"}"#);
    assert!(decode.hear("room")["cause"].as_str().unwrap().contains("too late"));
    decode.hear("released");
    // The session keeps its order: behind a grant that came later, the abort has come too.
    decode.say(&take.replace("\"room\":7", "\"room\":8"));
    prefill.say(&send.replace("\"room\":7", "\"room\":8"));
    assert_eq!(decode.hear("room")["verdict"], "done");
    assert_eq!(prefill.hear("room")["verdict"], "done");
    prefill.say(&send);
    prefill.say(&send);
    assert!(prefill.hear("error")["message"].as_str().unwrap().contains("live already"));
    decode.say(&take);
    assert_eq!(decode.hear("room")["verdict"], "done");
    let sent = prefill.hear("room");
    assert_eq!((&sent["verdict"], &sent["epoch"]), (&"done".into(), &3.into()), "{sent}");
}

#[test]
fn sides_with_different_prompts_fail_the_room_and_say_what_to_do() {
    let mut prefill = Node::prefill(&[]);
    let mut decode = Node::decode(&prefill, &[]);
    prefill.say(&format!(r#"{{"cmd":"prefill","room":7,{PROMPT}}}"#));
    decode.say(r#"{"cmd":"decode","room":7,"prompt":"Another one"}"#);
    let (sent, received) = (prefill.hear("room"), decode.hear("room"));
    assert_eq!((&sent["kind"], &received["kind"]), (&"aborted".into(), &"aborted".into()));
    assert_eq!(sent["line"], received["line"]);
    assert!(sent["cause"].as_str().unwrap().contains("give both sides the same prompt"), "{sent}");
    prefill.hear("released");
    decode.hear("released");
}

#[test]
fn peers_are_named_with_their_fabric_and_lanes_before_anything_is_sent() {
    let mut prefill = Node::prefill(&["--name", "north"]);
    let mut decode = Node::decode(&prefill, &["--name", "south", "--lanes", "2"]);
    for (node, name) in [(&mut prefill, "south"), (&mut decode, "north")] {
        node.say(r#"{"cmd":"peers"}"#);
        let peers = node.hear("peers");
        let peer = &peers["peers"][0];
        assert_eq!((&peer["name"], &peer["health"]), (&name.into(), &"Up".into()), "{peers}");
        assert!(peer["fabric"].as_str().unwrap().starts_with("tcp/"), "{peers}");
    }
}

#[test]
fn metrics_of_both_sides_are_served_to_prometheus() {
    let metrics = ["--metrics-addr", "127.0.0.1:0"];
    let mut prefill = Node::prefill(&metrics);
    let mut decode = Node::decode(&prefill, &metrics);
    prefill.say(&format!(r#"{{"cmd":"prefill","room":7,{PROMPT}}}"#));
    decode.say(&format!(r#"{{"cmd":"decode","room":7,{PROMPT}}}"#));
    let bytes = prefill.hear("room")["bytes"].as_u64().unwrap();
    assert!(bytes > 0);
    decode.hear("text");
    for (node, role, counter) in [
        (&prefill, "sender", format!("kvferry_bytes_sent_total{{engine=\"prefill\"}} {bytes}")),
        (&decode, "receiver", format!("kvferry_bytes_placed_total{{engine=\"decode\"}} {bytes}")),
    ] {
        let addr = node.ready["metrics"].as_str().unwrap();
        let start = Instant::now();
        // Counters are published about once a second.
        let page = loop {
            let page = scrape(addr);
            if page.contains(&counter) {
                break page;
            }
            assert!(start.elapsed() < PATIENCE, "no {counter} in:\n{page}");
            std::thread::sleep(Duration::from_millis(50));
        };
        let rooms = page.lines().find(|line| {
            line.starts_with("kvferry_rooms_total") && line.contains(role) && line.contains("done")
        });
        assert!(rooms.is_some_and(|line| line.ends_with(" 1")), "{page}");
    }
}

fn scrape(addr: &str) -> String {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    page
}
