//! Leaf: the driver for kernels and sandboxes without io_uring. The same operations as non-blocking
//! vectored calls, tried at once and again when epoll says so.

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll;
use rustix::io::Errno;

use super::driver::{Direction, Done, Driver, Outcome};
use crate::worker::wake::Wakeup;

/// Readiness events taken from the kernel at once.
const EVENTS_PER_CALL: usize = 64;
/// Busy reaps after which the kernel is asked all the same.
const REAPS_PER_LOOK: u32 = 4;
/// The event fd's key; lanes have smaller ones.
const WAKEUP_KEY: u64 = u64::MAX;
/// The watched file descriptor's key.
const WATCHED_KEY: u64 = u64::MAX - 1;

/// See [`Driver`].
pub(crate) struct Epoll {
    epoll: OwnedFd,
    wakeup: Arc<Wakeup>,
    watched: Option<OwnedFd>,
    /// By lane: the operations waiting for readiness, receive and send.
    waiting: Vec<[Option<Waiting>; 2]>,
    done: Vec<Done>,
    reaps: u32,
    events: Vec<epoll::Event>,
}

impl std::fmt::Debug for Epoll {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Epoll").field("lanes", &self.waiting.len()).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    fd: RawFd,
    message: *mut libc::msghdr,
}

impl Epoll {
    pub(crate) fn new(wakeup: Arc<Wakeup>) -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*wakeup, epoll::EventData::new_u64(WAKEUP_KEY), epoll::EventFlags::IN)?;
        Ok(Self {
            epoll,
            wakeup,
            watched: None,
            waiting: Vec::new(),
            done: Vec::new(),
            reaps: 0,
            events: Vec::with_capacity(EVENTS_PER_CALL),
        })
    }

    /// Tries the operation; it ends, or goes on waiting.
    fn attempt(&mut self, lane: u32, direction: Direction, op: Waiting) {
        // SAFETY: `start`'s caller keeps the message and its strips valid until the operation's end,
        // which has not been told yet.
        let call = || unsafe {
            match direction {
                Direction::Receive => libc::recvmsg(op.fd, op.message, libc::MSG_DONTWAIT),
                Direction::Send | Direction::SendZeroCopy => {
                    libc::sendmsg(op.fd, op.message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
                }
            }
        };
        let result = loop {
            match usize::try_from(call()) {
                Ok(bytes) => break Ok(bytes),
                // Its readiness has been consumed: it must be tried again now.
                Err(_) if last_errno() == Errno::INTR => {}
                Err(_) => break Err(last_errno()),
            }
        };
        let slot = &mut self.waiting[lane as usize][side(direction)];
        let outcome = match result {
            Ok(bytes) => Outcome::Moved { bytes, more: false },
            Err(Errno::AGAIN) => {
                *slot = Some(op);
                return;
            }
            Err(errno) => Outcome::Failed { errno, more: false },
        };
        *slot = None;
        self.done.push(Done { lane, direction, ticket: 0, outcome });
    }

    fn wait(&mut self, timeout: Duration) {
        self.events.clear();
        let timeout = rustix::time::Timespec {
            tv_sec: timeout.as_secs().cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // An interrupted wait is an early return; the worker looks again.
        let _ = epoll::wait(
            &self.epoll,
            rustix::buffer::spare_capacity(&mut self.events),
            Some(&timeout),
        );
        let events = std::mem::take(&mut self.events);
        for event in events.iter().copied() {
            let (key, flags) = (event.data.u64(), event.flags);
            if key == WAKEUP_KEY {
                self.wakeup.drain();
                continue;
            }
            let Ok(lane) = u32::try_from(key) else { continue };
            let broken = flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP);
            for (direction, ready) in [
                (
                    Direction::Receive,
                    flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::RDHUP),
                ),
                (Direction::Send, flags.contains(epoll::EventFlags::OUT)),
            ] {
                let waiting =
                    self.waiting.get(lane as usize).and_then(|lane| lane[side(direction)]);
                if let (Some(op), true) = (waiting, ready || broken) {
                    self.attempt(lane, direction, op);
                }
            }
        }
        self.events = events;
    }
}

const fn side(direction: Direction) -> usize {
    match direction {
        Direction::Receive => 0,
        Direction::Send | Direction::SendZeroCopy => 1,
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

impl Driver for Epoll {
    const SPINS: bool = false;

    fn add(&mut self, lane: u32, fd: RawFd) -> Result<(), Errno> {
        if self.waiting.len() <= lane as usize {
            self.waiting.resize(lane as usize + 1, [None; 2]);
        }
        // SAFETY: the lane owns the socket and removes it here before it closes it.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let flags = epoll::EventFlags::IN
            | epoll::EventFlags::OUT
            | epoll::EventFlags::RDHUP
            | epoll::EventFlags::ET;
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(lane.into()), flags)
    }

    fn remove(&mut self, lane: u32, fd: RawFd) {
        // SAFETY: as in `add`; the socket is still open.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let _ = epoll::delete(&self.epoll, fd);
        self.waiting[lane as usize] = [None; 2];
    }

    fn can_zero_copy(&self) -> bool {
        false
    }

    unsafe fn start(
        &mut self,
        lane: u32,
        fd: RawFd,
        direction: Direction,
        _ticket: u32,
        message: *mut libc::msghdr,
    ) {
        self.attempt(lane, direction, Waiting { fd, message });
    }

    fn cancel(&mut self, lane: u32, direction: Direction, _ticket: u32) {
        if self.waiting[lane as usize][side(direction)].take().is_some() {
            let outcome = Outcome::Failed { errno: Errno::CANCELED, more: false };
            self.done.push(Done { lane, direction, ticket: 0, outcome });
        }
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        // Operations that ended at once are handed over without asking the kernel, but not for ever:
        // a lane that always has something to read must not keep the others from being seen.
        self.reaps = self.reaps.wrapping_add(1);
        if self.done.is_empty() || self.reaps.is_multiple_of(REAPS_PER_LOOK) {
            self.wait(Duration::ZERO);
        }
        done.append(&mut self.done);
    }

    fn watch(&mut self, fd: OwnedFd) {
        let data = epoll::EventData::new_u64(WATCHED_KEY);
        // Without it a sleep ends by its time-out at the latest.
        let _ = epoll::add(&self.epoll, &fd, data, epoll::EventFlags::IN);
        self.watched = Some(fd);
    }

    fn sleep(&mut self, timeout: Duration) {
        if self.done.is_empty() {
            self.wait(timeout);
        }
    }
}
