//! What a lane needs of the kernel: start a vectored operation, learn how it ended.
//!
//! Two drivers do it: io_uring and epoll. The lane above sees no difference: at most one operation a
//! direction is in flight, and each started operation ends in exactly one [`Done`] (a zero-copy send
//! in one more, its notification).

use std::os::fd::{OwnedFd, RawFd};
use std::ptr::NonNull;
use std::time::Duration;

use rustix::io::Errno;

use crate::wire::frame::HEADER_BYTES;

/// Most memory strips in one operation. 256 strips of 4 KiB pages make 1 MiB.
pub(crate) const STRIPS_PER_OP: usize = 256;

/// Direction of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Receive,
    Send,
    /// A send straight from the pages, which the kernel goes on reading until it is notified.
    SendZeroCopy,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Bytes moved. `more`: the kernel still reads the pages; a notification follows.
    Moved { bytes: usize, more: bool },
    /// Nothing moved. `more` as above.
    Failed { errno: Errno, more: bool },
    /// The kernel reads the pages no more. `copied`: it had copied them after all.
    #[cfg_attr(not(feature = "io-uring"), allow(dead_code, reason = "only io_uring sends so"))]
    Notified { copied: bool },
}

/// The end of an operation, or of its zero-copy tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) lane: u32,
    pub(crate) direction: Direction,
    /// The number given to [`Driver::start`].
    pub(crate) ticket: u32,
    pub(crate) outcome: Outcome,
}

/// Frame headers one direction of a lane has memory for: as many frames can be under way in the
/// strips of an operation, or held by zero-copy sends.
pub(crate) const HEADERS_PER_LANE: usize = 64;

/// The message header and strips of one operation, and memory for frame headers, at an address that
/// stays.
#[derive(Debug)]
pub(crate) struct OpMemory {
    message: libc::msghdr,
    strips: [libc::iovec; STRIPS_PER_OP],
    headers: [[u8; HEADER_BYTES]; HEADERS_PER_LANE],
}

/// Owns an [`OpMemory`] without the uniqueness that a `Box` asserts: its address is the kernel's while
/// an operation is in flight.
#[derive(Debug)]
pub(crate) struct OpMemoryBox(NonNull<OpMemory>);

// SAFETY: the box is the only owner of its memory, which holds no thread-bound state.
unsafe impl Send for OpMemoryBox {}

impl OpMemoryBox {
    pub(crate) fn new() -> Self {
        const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: `msghdr` is plain data for which all zeroes (null pointers, zero lengths) is valid.
        let message = unsafe { std::mem::zeroed() };
        let headers = [[0; HEADER_BYTES]; HEADERS_PER_LANE];
        Self(NonNull::from(Box::leak(Box::new(OpMemory {
            message,
            strips: [EMPTY; STRIPS_PER_OP],
            headers,
        }))))
    }

    /// Lays out the strips of the next operation.
    ///
    /// # Safety
    /// No operation may be in flight on this memory.
    pub(crate) unsafe fn fill(
        &mut self,
        strips: impl Iterator<Item = (u64, usize)>,
    ) -> *mut libc::msghdr {
        let memory = self.0.as_ptr();
        // SAFETY: the memory is owned and, as the caller promises, nobody else's now; the pointers put
        // into the header stay inside the same allocation.
        unsafe {
            let mut len = 0;
            for (slot, (addr, bytes)) in (*memory).strips.iter_mut().zip(strips) {
                *slot = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: bytes };
                len += 1;
            }
            (*memory).message.msg_iov = (&raw mut (*memory).strips).cast();
            (*memory).message.msg_iovlen = len;
            &raw mut (*memory).message
        }
    }

    /// Address of a header's memory.
    pub(crate) fn header_addr(&self, slot: usize) -> u64 {
        assert!(slot < HEADERS_PER_LANE, "header slot out of range");
        // SAFETY: the slot was checked; only an address is made, nothing is read.
        unsafe { (&raw const (*self.0.as_ptr()).headers[slot]) as u64 }
    }

    /// Copies a header out.
    ///
    /// # Safety
    /// No receive into it may be in flight.
    pub(crate) unsafe fn header(&self, slot: usize) -> [u8; HEADER_BYTES] {
        assert!(slot < HEADERS_PER_LANE, "header slot out of range");
        // SAFETY: the slot was checked; the memory is owned, initialised at birth, and, as the caller
        // promises, not being received into.
        unsafe { (*self.0.as_ptr()).headers[slot] }
    }

    /// Puts a header in.
    ///
    /// # Safety
    /// No send of it may be in flight.
    pub(crate) unsafe fn set_header(&mut self, slot: usize, header: [u8; HEADER_BYTES]) {
        assert!(slot < HEADERS_PER_LANE, "header slot out of range");
        // SAFETY: the slot was checked; the memory is owned and, as the caller promises, not being sent.
        unsafe { (*self.0.as_ptr()).headers[slot] = header };
    }
}

impl Drop for OpMemoryBox {
    fn drop(&mut self) {
        // SAFETY: made by `Box::leak` in `new` and freed only here; lanes are dropped only
        // when no operation is in flight on them.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// Starts operations and says how they ended.
pub(crate) trait Driver {
    /// Whether [`Driver::reap`] finds completions without a system call.
    const SPINS: bool;

    /// Gets ready for operations on a lane's socket.
    fn add(&mut self, lane: u32, fd: RawFd) -> Result<(), Errno>;

    /// Forgets a lane on which nothing is in flight.
    fn remove(&mut self, lane: u32, fd: RawFd);

    /// Whether zero-copy sends can be started.
    fn can_zero_copy(&self) -> bool;

    /// Starts an operation. None may be in flight on this lane in this direction (for sends: of
    /// either kind, their notifications apart). The `ticket` (of 24 bits) comes back with its ends.
    ///
    /// # Safety
    /// `message`, its strips and the memory they name must stay valid, and the strips' memory may be
    /// written (receive) or must not change (send), until the operation's [`Done`]; after a `more`,
    /// the strips' memory until the notification.
    unsafe fn start(
        &mut self,
        lane: u32,
        fd: RawFd,
        direction: Direction,
        ticket: u32,
        message: *mut libc::msghdr,
    );

    /// Asks an operation in flight to end now; its [`Done`] tells how far it came.
    fn cancel(&mut self, lane: u32, direction: Direction, ticket: u32);

    /// Submits what was started and collects what has ended, without blocking.
    fn reap(&mut self, done: &mut Vec<Done>);

    /// Has sleeps also end while this is readable.
    fn watch(&mut self, fd: OwnedFd);

    /// Sleeps until an operation ends, the worker is woken, or the time is over.
    fn sleep(&mut self, timeout: Duration);
}
