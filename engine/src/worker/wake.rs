//! How a sleeping worker is woken, and the mailbox of the control plane that does it.

#[cfg(all(test, kvferry_loom))]
mod loom_tests;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use tokio::sync::mpsc;

#[cfg(all(test, kvferry_loom))]
use self::loom_tests::EventFd;
use super::mail::ToWorker;
use crate::sync::{AtomicBool, Ordering, fence};

/// An event fd that is written only when the worker may be asleep: a busy worker costs its callers
/// no system call.
#[derive(Debug)]
pub(crate) struct Wakeup {
    fd: EventFd,
    /// Whoever makes it false writes the event fd.
    asleep: AtomicBool,
    /// Between `prepare_sleep` and `awake`; the worker's alone.
    drowsy: AtomicBool,
}

impl Wakeup {
    pub(crate) fn new() -> std::io::Result<Self> {
        let fd = EventFd::new()?;
        Ok(Self { fd, asleep: AtomicBool::new(false), drowsy: AtomicBool::new(false) })
    }

    /// To be called after something was put where the worker will look.
    pub(crate) fn wake(&self) {
        // Pairs with the fence in `prepare_sleep`: either the worker's last look sees what was put
        // there, or this load sees that it is about to sleep.
        fence(Ordering::SeqCst);
        let claim =
            || self.asleep.compare_exchange(true, false, Ordering::Relaxed, Ordering::Relaxed);
        if self.asleep.load(Ordering::Relaxed) && claim().is_ok() {
            self.fd.write();
        }
    }

    /// The worker says that it will sleep. It must look once more at all its queues after this, and
    /// sleep only if they are empty.
    pub(crate) fn prepare_sleep(&self) {
        self.drowsy.store(true, Ordering::Relaxed);
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The worker is awake again.
    pub(crate) fn awake(&self) {
        // A store would do. The swap is for loom, which does not know that a store after another
        // thread's exchange is later than it.
        self.asleep.swap(false, Ordering::Relaxed);
        self.drowsy.store(false, Ordering::Relaxed);
    }

    /// Empties the event fd after it was seen readable, unless the worker is about to sleep: it may
    /// have been woken for something that came right behind its last look, and no one writes twice.
    pub(crate) fn drain(&self) {
        if !self.drowsy.load(Ordering::Relaxed) {
            self.fd.drain();
        }
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(not(all(test, kvferry_loom)))]
#[derive(Debug)]
struct EventFd(std::os::fd::OwnedFd);

#[cfg(not(all(test, kvferry_loom)))]
impl EventFd {
    fn new() -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    fn write(&self) {
        // The counter cannot overflow: it is written once a sleep, and drained soon after. A failed
        // write of a valid event fd has no other cause.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn drain(&self) {
        let mut counter = [0u8; 8];
        let _ = rustix::io::read(&self.0, &mut counter);
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The control plane's way to the worker.
#[derive(Clone, Debug)]
pub(crate) struct WorkerMail {
    tx: mpsc::Sender<ToWorker>,
    wakeup: Arc<Wakeup>,
}

/// The worker is gone: the engine is shutting down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the worker has stopped")]
pub(crate) struct WorkerGone;

impl WorkerMail {
    pub(crate) const fn new(tx: mpsc::Sender<ToWorker>, wakeup: Arc<Wakeup>) -> Self {
        Self { tx, wakeup }
    }

    /// Waits for room in the mailbox, which holds back the session that is read.
    pub(crate) async fn send(&self, mail: ToWorker) -> Result<(), WorkerGone> {
        self.tx.send(mail).await.map_err(|_| WorkerGone)?;
        self.wakeup.wake();
        Ok(())
    }
}
