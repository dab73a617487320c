//! Leaf: the io_uring driver. One ring a worker; submissions and task work are batched into one
//! system call a turn, and a turn with nothing to submit or to run makes none.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};
use rustix::io::Errno;

use super::driver::{Direction, Done, Driver, Outcome};
use crate::worker::wake::Wakeup;

/// Submissions that fit between two system calls. A fuller turn submits early.
const RING_ENTRIES: u32 = 256;
/// Completions that fit: every lane can have a receive, a send and many notifications ending at once.
const COMPLETION_ENTRIES: u32 = 4096;

/// `IORING_SEND_ZC_REPORT_USAGE`: have notifications say whether the kernel copied (Linux 6.2).
const REPORT_USAGE: u16 = 1 << 3;
/// `IORING_NOTIF_USAGE_ZC_COPIED`: a notification's answer.
const ZC_COPIED: u32 = 1 << 31;

const KEY_WAKEUP: u64 = u64::MAX;
const KEY_CANCEL: u64 = u64::MAX - 1;
const KEY_WATCHED: u64 = u64::MAX - 2;

/// See [`Driver`].
pub(crate) struct Uring {
    ring: IoUring,
    wakeup: Arc<Wakeup>,
    /// What else ends a sleep, and whether the ring polls it.
    watched: Option<(OwnedFd, bool)>,
    zero_copy: bool,
    /// Ends that had to be taken to make place for submissions.
    early: Vec<Done>,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("zero_copy", &self.zero_copy).finish_non_exhaustive()
    }
}

/// What the kernel offers of what the driver would use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UringFeatures {
    /// Completions are run by the worker when it asks, not whenever the kernel likes (6.1).
    pub(crate) defer_taskrun: bool,
    /// Vectored sends without a copy (6.1).
    pub(crate) sendmsg_zc: bool,
}

impl Uring {
    /// Must be called on the thread that will use the ring.
    ///
    /// # Errors
    /// Why io_uring cannot be used here, in words for an operator.
    pub(crate) fn new(wakeup: Arc<Wakeup>) -> Result<(Self, UringFeatures), String> {
        let (ring, defer_taskrun) = open_ring()?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err("the kernel's io_uring has no timed waits; Linux 5.11 or later is needed"
                .to_owned());
        }
        let mut probe = Probe::new();
        ring.submitter()
            .register_probe(&mut probe)
            .map_err(|error| format!("io_uring probe failed: {error}"))?;
        for (code, name) in [
            (opcode::RecvMsg::CODE, "RECVMSG"),
            (opcode::SendMsg::CODE, "SENDMSG"),
            (opcode::AsyncCancel::CODE, "ASYNC_CANCEL"),
            (opcode::PollAdd::CODE, "POLL_ADD"),
        ] {
            if !probe.is_supported(code) {
                return Err(format!("the kernel's io_uring has no {name}"));
            }
        }
        let sendmsg_zc = probe.is_supported(opcode::SendMsgZc::CODE);
        let mut uring =
            Self { ring, wakeup, watched: None, zero_copy: sendmsg_zc, early: Vec::new() };
        uring.arm_wakeup();
        Ok((uring, UringFeatures { defer_taskrun, sendmsg_zc }))
    }

    fn arm_wakeup(&mut self) {
        let poll = opcode::PollAdd::new(
            types::Fd(rustix::fd::AsFd::as_fd(&*self.wakeup).as_raw_fd()),
            libc::POLLIN as u32,
        )
        .build()
        .user_data(KEY_WAKEUP);
        // SAFETY: the poll names no memory, and the event fd lives as long as this driver.
        unsafe { self.push(&poll) };
    }

    /// # Safety
    /// What the entry names must stay valid until its completion.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: handed on to the caller.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            // Full: submit what is there. A kernel whose completion queue is full takes nothing
            // (EBUSY) until completions are taken.
            if self.ring.submit().is_err() {
                self.collect();
            }
        }
    }

    /// Takes the completions that are there.
    fn collect(&mut self) {
        let mut rearm = false;
        for entry in self.ring.completion() {
            match entry.user_data() {
                KEY_CANCEL => {}
                KEY_WATCHED => {
                    if let Some((_, armed)) = &mut self.watched {
                        *armed = false;
                    }
                }
                KEY_WAKEUP => {
                    self.wakeup.drain();
                    rearm = true;
                }
                key => self.early.push(decode(key, &entry)),
            }
        }
        if rearm {
            self.arm_wakeup();
        }
    }
}

/// The best ring the kernel allows: completions run when the worker asks (Linux 6.1), else in its next
/// system call (5.19), else whenever the kernel likes.
fn open_ring() -> Result<(IoUring, bool), String> {
    let build = |setup: fn(&mut io_uring::Builder) -> &mut io_uring::Builder| {
        let mut builder = IoUring::builder();
        setup(builder.setup_clamp().setup_cqsize(COMPLETION_ENTRIES)).build(RING_ENTRIES)
    };
    let deferred =
        build(|ring| ring.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag());
    if let Ok(ring) = deferred {
        return Ok((ring, true));
    }
    build(|ring| ring.setup_coop_taskrun().setup_taskrun_flag())
        .or_else(|_| build(|ring| ring))
        .map(|ring| (ring, false))
        .map_err(|error| {
            let hint = match error.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => {
                    " (refused: see kernel.io_uring_disabled and the container's seccomp profile)"
                }
                Some(libc::ENOSYS) => " (not in this kernel, or hidden by a seccomp profile)",
                Some(libc::ENOMEM) => " (out of locked memory: raise RLIMIT_MEMLOCK)",
                _ => "",
            };
            format!("io_uring_setup: {error}{hint}")
        })
}

const fn key(lane: u32, ticket: u32, direction: Direction) -> u64 {
    let code = match direction {
        Direction::Receive => 0,
        Direction::Send => 1,
        Direction::SendZeroCopy => 2,
    };
    (lane as u64) << 32 | ((ticket & 0x00ff_ffff) as u64) << 8 | code
}

impl Driver for Uring {
    const SPINS: bool = true;

    fn add(&mut self, _lane: u32, _fd: RawFd) -> Result<(), Errno> {
        Ok(())
    }

    fn remove(&mut self, _lane: u32, _fd: RawFd) {}

    fn can_zero_copy(&self) -> bool {
        self.zero_copy
    }

    unsafe fn start(
        &mut self,
        lane: u32,
        fd: RawFd,
        direction: Direction,
        ticket: u32,
        message: *mut libc::msghdr,
    ) {
        let fd = types::Fd(fd);
        let no_signal = libc::MSG_NOSIGNAL as u32;
        let entry = match direction {
            Direction::Receive => opcode::RecvMsg::new(fd, message).build(),
            Direction::Send => opcode::SendMsg::new(fd, message).flags(no_signal).build(),
            Direction::SendZeroCopy => {
                opcode::SendMsgZc::new(fd, message).ioprio(REPORT_USAGE).flags(no_signal).build()
            }
        };
        // SAFETY: `start`'s caller keeps the message and its memory valid until the end is told.
        unsafe { self.push(&entry.user_data(key(lane, ticket, direction))) };
    }

    fn cancel(&mut self, lane: u32, direction: Direction, ticket: u32) {
        let entry =
            opcode::AsyncCancel::new(key(lane, ticket, direction)).build().user_data(KEY_CANCEL);
        // SAFETY: a cancellation names no memory.
        unsafe { self.push(&entry) };
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let (submit, task_work) = {
            let submission = self.ring.submission();
            (!submission.is_empty(), submission.taskrun() || submission.cq_overflow())
        };
        if submit || task_work {
            // EBUSY and EAGAIN mean that completions must be taken first, which happens next.
            let _ = self.ring.submit();
        }
        self.collect();
        done.append(&mut self.early);
    }

    fn watch(&mut self, fd: OwnedFd) {
        self.watched = Some((fd, false));
    }

    fn sleep(&mut self, timeout: Duration) {
        if let Some((fd, armed @ false)) = &mut self.watched {
            *armed = true;
            let poll = opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), libc::POLLIN as u32);
            // SAFETY: the poll names no memory, and the file descriptor lives as long as this driver.
            unsafe { self.push(&poll.build().user_data(KEY_WATCHED)) };
        }
        let timespec = types::Timespec::from(timeout);
        let args = types::SubmitArgs::new().timespec(&timespec);
        // A time-out (ETIME) or a signal is an early return; the worker looks again.
        let _ = self.ring.submitter().submit_with_args(1, &args);
    }
}

fn decode(key: u64, entry: &cqueue::Entry) -> Done {
    let direction = match key & 0xff {
        0 => Direction::Receive,
        1 => Direction::Send,
        _ => Direction::SendZeroCopy,
    };
    let more = cqueue::more(entry.flags()) && direction == Direction::SendZeroCopy;
    let result = entry.result();
    let outcome = if cqueue::notif(entry.flags()) {
        Outcome::Notified { copied: result.cast_unsigned() & ZC_COPIED != 0 }
    } else {
        match usize::try_from(result) {
            Ok(bytes) => Outcome::Moved { bytes, more },
            Err(_) => Outcome::Failed { errno: Errno::from_raw_os_error(-result), more },
        }
    };
    Done { lane: (key >> 32) as u32, direction, ticket: (key >> 8) as u32 & 0x00ff_ffff, outcome }
}
