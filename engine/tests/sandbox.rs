//! Where io_uring is refused, as container runtimes do it: a seccomp filter on a child process.
#![allow(missing_docs, reason = "tests document themselves by name")]

mod common;

use std::process::Command;

use common::{KV, Pair, config, wait};
use kvferry::{
    Chunk, Engine, EngineConfig, FabricInfo, GrantSpec, IoMode, LaneIo, OpenOptions, StartError,
};

/// Set in the child process; names what it is to do.
const CHILD: &str = "KVFERRY_TEST_SANDBOXED";

/// Runs one of this file's tests again, in a process that may not use io_uring.
fn in_sandbox(test: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "the sandboxed test failed:\n{out}{err}");
    assert!(out.contains("1 passed"), "the sandboxed test did not run:\n{out}");
}

/// Installs the filter when this is the child; says whether it is.
fn sandboxed() -> bool {
    if std::env::var_os(CHILD).is_none() {
        return false;
    }
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
    let rules = [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register]
        .map(|call| (call, Vec::new()))
        .into();
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter: BpfProgram =
        SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch).unwrap().try_into().unwrap();
    seccompiler::apply_filter_all_threads(&filter).unwrap();
    true
}

#[test]
fn where_io_uring_is_refused_rooms_cross_over_epoll_and_it_is_said_so() {
    if !sandboxed() {
        return in_sandbox("where_io_uring_is_refused_rooms_cross_over_epoll_and_it_is_said_so");
    }
    let pair = Pair::new(IoMode::Auto);
    let report = pair.decode.engine.io();
    assert_eq!(report.io, LaneIo::Epoll);
    let why = report.why_not.as_deref().unwrap();
    assert!(why.contains("io_uring_setup") && why.contains("seccomp"), "{why}");
    for engine in [&pair.prefill.engine, &pair.decode.engine] {
        let fabric = FabricInfo::Tcp { io: LaneIo::Epoll, peer_io: LaneIo::Epoll };
        assert!(engine.peers().iter().all(|peer| peer.fabric == fabric), "{:?}", engine.peers());
    }
    pair.prefill.paint(8);
    let sending = pair.prefill.engine.open(1.into(), OpenOptions::default()).unwrap();
    let receiving =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(1.into()).pages(KV, [5])).unwrap();
    wait(sending.write(Chunk::new(KV, [6], 0..1))).unwrap();
    sending.finish(bytes::Bytes::new()).unwrap();
    wait(receiving.done()).unwrap();
    pair.decode.assert_pages(8, &[(6, 5)]);
}

#[test]
fn where_io_uring_is_refused_and_required_the_engine_does_not_start() {
    if !sandboxed() {
        return in_sandbox("where_io_uring_is_refused_and_required_the_engine_does_not_start");
    }
    let error =
        Engine::builder(EngineConfig::default().io(IoMode::RequireIoUring)).start().unwrap_err();
    let StartError::IoUringRefused { why } = error else { panic!("{error}") };
    assert!(why.contains("seccomp"), "{why}");
}

#[test]
fn one_side_refused_io_uring_and_the_other_not_talk_and_know_it() {
    let pair = Pair::with(
        config(IoMode::Auto),
        config(IoMode::Epoll),
        common::layout(8),
        common::layout(8),
    );
    let ours = pair.prefill.engine.io().io;
    let seen = pair.decode.engine.peers().remove(0).fabric;
    assert_eq!(seen, FabricInfo::Tcp { io: LaneIo::Epoll, peer_io: ours });
    let sending = pair.prefill.engine.open(1.into(), OpenOptions::default()).unwrap();
    let receiving =
        pair.decode.engine.grant(pair.peer, GrantSpec::new(1.into()).pages(KV, [5])).unwrap();
    wait(sending.write(Chunk::new(KV, [6], 0..1))).unwrap();
    sending.finish(bytes::Bytes::new()).unwrap();
    wait(receiving.done()).unwrap();
}
