//! `Wakeup` in every order its threads can run in: `ci/loom`.
//!
//! The queue here is the weakest that keeps its promise: a count of what was put in, which the worker
//! may see late. Tokio's queues, which the worker has, are tested under loom by tokio itself.

use std::os::fd::BorrowedFd;

use loom::model::Builder;
use loom::sync::atomic::AtomicU32;
use loom::thread;

use super::*;
use crate::sync::Signal;

/// The event fd: readable while its signal is up.
#[derive(Debug)]
pub(super) struct EventFd(Signal);

impl EventFd {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self(Signal::new()))
    }

    pub(super) fn write(&self) {
        self.0.raise();
    }

    pub(super) fn drain(&self) {
        self.0.lower();
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        unreachable!("a driver asks for it, and no driver runs in a model")
    }
}

/// A worker that knows no time: a wake-up that is lost leaves it asleep for ever, which loom reports.
struct Bench {
    wakeup: Wakeup,
    put: AtomicU32,
    protocol: Protocol,
}

/// The steps under test, so that it can be shown that each is needed.
#[derive(Clone, Copy)]
struct Protocol {
    wake: fn(&Wakeup),
    prepare_sleep: fn(&Wakeup),
    drain: fn(&Wakeup),
}

const OURS: Protocol =
    Protocol { wake: Wakeup::wake, prepare_sleep: Wakeup::prepare_sleep, drain: Wakeup::drain };

impl Bench {
    fn new(protocol: Protocol) -> Arc<Self> {
        Arc::new(Self { wakeup: Wakeup::new().unwrap(), put: AtomicU32::new(0), protocol })
    }

    fn put(&self) {
        self.put.fetch_add(1, Ordering::Release);
        (self.protocol.wake)(&self.wakeup);
    }

    /// As `Worker::turn`: first the queue, then the fabric, whose driver drains the event fd. (It asks
    /// first whether there is something to drain; that it is asked at all is what counts.)
    fn turn(&self, taken: &mut u32) -> bool {
        let before = std::mem::replace(taken, self.put.load(Ordering::Acquire));
        (self.protocol.drain)(&self.wakeup);
        *taken > before
    }

    /// As `turn_until_stopped`, until so many were taken.
    fn work(&self, items: u32) {
        let mut taken = 0;
        loop {
            self.turn(&mut taken);
            if taken == items {
                break;
            }
            (self.protocol.prepare_sleep)(&self.wakeup);
            if !self.turn(&mut taken) {
                self.wakeup.fd.0.wait();
            }
            self.wakeup.awake();
        }
    }
}

/// Preemptions that are tried with three threads: all of them take too long. With two, all are tried.
const PREEMPTIONS: usize = 5;

/// One worker, and for each number a thread that puts in so many.
fn all_is_taken(protocol: Protocol, producers: &'static [u32]) {
    let mut model = Builder::new();
    if producers.len() > 1 {
        model.preemption_bound.get_or_insert(PREEMPTIONS);
    }
    model.check(move || {
        let bench = Bench::new(protocol);
        let producers: Vec<_> = producers
            .iter()
            .map(|&items| {
                let bench = Arc::clone(&bench);
                thread::spawn(move || (0..items).for_each(|_| bench.put()));
                items
            })
            .collect();
        bench.work(producers.iter().sum());
    });
}

#[test]
fn what_was_put_before_a_wake_is_seen_before_or_after_the_sleep() {
    all_is_taken(OURS, &[1]);
}

#[test]
fn a_producer_that_wakes_twice_is_heard_twice() {
    all_is_taken(OURS, &[2]);
}

#[test]
fn two_producers_are_both_heard() {
    all_is_taken(OURS, &[1, 1]);
}

#[test]
fn a_busy_worker_costs_no_write() {
    loom::model(|| {
        let bench = Bench::new(OURS);
        bench.wakeup.prepare_sleep();
        bench.wakeup.awake();
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let bench = Arc::clone(&bench);
                thread::spawn(move || bench.put())
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(bench.wakeup.fd.0.raised(), 0);
    });
}

#[test]
fn of_two_producers_one_writes() {
    loom::model(|| {
        let bench = Bench::new(OURS);
        bench.wakeup.prepare_sleep();
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let bench = Arc::clone(&bench);
                thread::spawn(move || bench.put())
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(bench.wakeup.fd.0.raised(), 1);
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_wakers_fence_a_wake_up_is_lost() {
    fn wake(wakeup: &Wakeup) {
        if wakeup.asleep.load(Ordering::Relaxed) && wakeup.asleep.swap(false, Ordering::Relaxed) {
            wakeup.fd.write();
        }
    }
    all_is_taken(Protocol { wake, ..OURS }, &[1]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_sleepers_fence_a_wake_up_is_lost() {
    fn prepare_sleep(wakeup: &Wakeup) {
        wakeup.drowsy.store(true, Ordering::Relaxed);
        wakeup.asleep.store(true, Ordering::Relaxed);
    }
    all_is_taken(Protocol { prepare_sleep, ..OURS }, &[1]);
}

#[test]
#[should_panic(expected = "deadlock")]
fn drained_behind_the_last_look_a_wake_up_is_lost() {
    fn drain(wakeup: &Wakeup) {
        wakeup.fd.drain();
    }
    all_is_taken(Protocol { drain, ..OURS }, &[1]);
}
