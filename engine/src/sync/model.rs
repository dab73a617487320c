//! Stand-ins for what loom does not have. Each promises what the original promises, and no more: what
//! holds with them holds with the originals. With them goes what the models wait with.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use loom::sync::{Mutex, MutexGuard};
use loom::thread::{self, Thread};

/// `std::sync::OnceLock`: who gets the value sees what was done before it was set.
#[derive(Debug)]
pub(crate) struct OnceLock<T> {
    value: std::sync::OnceLock<T>,
    is_set: AtomicBool,
}

impl<T> OnceLock<T> {
    pub(crate) fn new() -> Self {
        Self { value: std::sync::OnceLock::new(), is_set: AtomicBool::new(false) }
    }

    pub(crate) fn get(&self) -> Option<&T> {
        self.is_set.load(Ordering::Acquire).then(|| self.value.get()).flatten()
    }

    /// Only one thread sets; std's would make a second one wait for the first.
    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        self.value.set(value)?;
        self.is_set.store(true, Ordering::Release);
        Ok(())
    }
}

/// `tokio::sync::Notify`, as far as [`Notify::notify_waiters`] goes: it wakes who is enlisted. Both take
/// one lock, as in tokio, so whoever enlists too late to be woken sees what was done before the call.
/// Tokio enlists at `notified()` already, this one at `enable()` or the first poll.
#[derive(Debug)]
pub(crate) struct Notify {
    list: Mutex<List>,
}

/// Who is enlisted, by number. One that is dropped stays and is woken for nothing, which is harmless.
#[derive(Debug, Default)]
struct List {
    next: u32,
    wakers: BTreeMap<u32, Option<Waker>>,
}

impl Notify {
    pub(crate) fn new() -> Self {
        Self { list: Mutex::new(List::default()) }
    }

    pub(crate) const fn notified(&self) -> Notified<'_> {
        Notified { notify: self, number: None }
    }

    pub(crate) fn notify_waiters(&self) {
        let woken = std::mem::take(&mut lock(&self.list).wakers);
        woken.into_values().flatten().for_each(Waker::wake);
    }
}

/// Woken once `notify_waiters` was called after it was enlisted.
#[derive(Debug)]
pub(crate) struct Notified<'a> {
    notify: &'a Notify,
    number: Option<u32>,
}

impl Notified<'_> {
    pub(crate) fn enable(self: Pin<&mut Self>) -> bool {
        self.get_mut().is_woken(None)
    }

    fn is_woken(&mut self, waker: Option<&Waker>) -> bool {
        let mut list = lock(&self.notify.list);
        let number = *self.number.get_or_insert_with(|| {
            let number = list.next;
            list.next += 1;
            list.wakers.insert(number, None);
            number
        });
        match list.wakers.get_mut(&number) {
            Some(enlisted) => {
                *enlisted = waker.cloned();
                false
            }
            None => true,
        }
    }
}

impl Future for Notified<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.get_mut().is_woken(Some(context.waker())) { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// Up or down; one thread can wait until it is up. Nothing is held while it waits, so that a thread
/// which waits for ever is reported and cleaned up by loom.
#[derive(Debug)]
pub(crate) struct Signal(Mutex<Level>);

#[derive(Debug, Default)]
struct Level {
    is_up: bool,
    raised: u32,
    waiting: Option<Thread>,
}

impl Signal {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Level::default()))
    }

    pub(crate) fn raise(&self) {
        let mut level = lock(&self.0);
        level.is_up = true;
        level.raised += 1;
        if let Some(waiting) = level.waiting.take() {
            waiting.unpark();
        }
    }

    pub(crate) fn lower(&self) {
        lock(&self.0).is_up = false;
    }

    /// How often it was raised.
    pub(crate) fn raised(&self) -> u32 {
        lock(&self.0).raised
    }

    pub(crate) fn wait(&self) {
        loop {
            let mut level = lock(&self.0);
            if level.is_up {
                return;
            }
            level.waiting = Some(thread::current());
            // Nobody runs in between: loom switches threads where they lock, not where they unlock.
            drop(level);
            thread::park();
        }
    }
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.raise();
    }
}

/// Drives a future on a thread of a model.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let woken = Arc::new(Signal::new());
    let waker = Waker::from(Arc::clone(&woken));
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        woken.wait();
        woken.lower();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics while holding it")
}
