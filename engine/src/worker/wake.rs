//! How a sleeping worker is woken, and the mailbox of the control plane that does it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::mpsc;

use super::mail::ToWorker;

/// An event fd that is written only when the worker may be asleep: a busy worker costs its callers
/// no system call.
#[derive(Debug)]
pub(crate) struct Wakeup {
    fd: OwnedFd,
    asleep: AtomicBool,
}

impl Wakeup {
    pub(crate) fn new() -> std::io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd, asleep: AtomicBool::new(false) })
    }

    /// To be called after something was put where the worker will look.
    pub(crate) fn wake(&self) {
        // Pairs with the fence in `prepare_sleep`: either the worker's last look sees what was put
        // there, or this load sees that it is about to sleep.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            // The counter cannot overflow: it is drained at every wake-up. A failed write of a valid
            // event fd has no other cause.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// The worker says that it will sleep. It must look once more at all its queues after this, and
    /// sleep only if they are empty.
    pub(crate) fn prepare_sleep(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The worker is awake again.
    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Empties the event fd after it was seen readable.
    pub(crate) fn drain(&self) {
        let mut counter = [0u8; 8];
        let _ = rustix::io::read(&self.fd, &mut counter);
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
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
