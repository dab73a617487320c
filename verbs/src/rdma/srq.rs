//! Receives, and the queues that are shared for them.

use std::ffi::c_int;
use std::fmt;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ibverbs_sys as sys;

use super::error::VerbsError;
use super::mr::Sge;
use super::pd::Pd;
use super::post::{PostError, PostFault};

/// Receives posted by one call into the library: 3 KiB of stack.
const AT_ONCE: usize = 64;

/// Room for one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Recv {
    /// The number that its completion will have.
    pub wr_id: u64,
    /// Where the message goes; `None` for one without bytes, such as a write with a number.
    pub sge: Option<Sge>,
}

/// Size of a shared receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqOptions {
    /// Receives it holds.
    pub max_wr: u32,
    /// Stretches of memory of each.
    pub max_sge: u32,
}

/// A queue of receives that several queue pairs take from. Clones are the same one.
#[derive(Clone)]
pub struct Srq(Arc<Inner>);

struct Inner {
    raw: NonNull<sys::ibv_srq>,
    granted: SrqOptions,
    pd: Pd,
}

// SAFETY: the queue is used through libibverbs' functions alone, which may be called from any
// thread.
unsafe impl Send for Inner {}
// SAFETY: as above; posting locks the queue inside the provider.
unsafe impl Sync for Inner {}

impl Srq {
    pub(crate) fn create(pd: &Pd, options: SrqOptions) -> Result<Self, VerbsError> {
        let SrqOptions { max_wr, max_sge } = options;
        let mut init = sys::ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: sys::ibv_srq_attr { max_wr, max_sge, srq_limit: 0 },
        };
        // SAFETY: the domain is there. The function writes what it grants into `init`.
        let raw = unsafe { (pd.context().functions().ibv_create_srq)(pd.raw(), &raw mut init) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| VerbsError::create("ibv_create_srq", io::Error::last_os_error()))?;
        let granted = SrqOptions { max_wr: init.attr.max_wr, max_sge: init.attr.max_sge };
        Ok(Self(Arc::new(Inner { raw, granted, pd: pd.clone() })))
    }

    /// What it was granted, at least as much as was asked for.
    #[must_use]
    pub fn granted(&self) -> SrqOptions {
        self.0.granted
    }

    /// Posts receives, in order, with one call into the library for each 64 of them.
    ///
    /// # Errors
    /// [`PostError`] says how many were posted, and whether the queue is full.
    pub fn post(&self, recvs: &[Recv]) -> Result<(), PostError> {
        let post = self.0.pd.context().ops().post_srq_recv;
        let refused = || PostError { posted: 0, source: PostFault::no_operation() };
        let post = post.ok_or_else(refused)?;
        chain(recvs, |first, bad| {
            // SAFETY: the queue is there, and `first` begins a chain of valid receives.
            unsafe { post(self.raw(), first, bad) }
        })
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_srq {
        self.0.raw.as_ptr()
    }

    pub(crate) fn pd(&self) -> &Pd {
        &self.0.pd
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold their shared queue, so none uses it; it is destroyed once. The
        // result says nothing that could still be acted on.
        unsafe { (self.pd.context().functions().ibv_destroy_srq)(self.raw.as_ptr()) };
    }
}

impl fmt::Debug for Srq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Srq")
            .field("device", &self.0.pd.context().name())
            .field("granted", &self.0.granted)
            .finish()
    }
}

/// Gives receives to `post` as chains of C structures.
pub(crate) fn chain(
    recvs: &[Recv],
    mut post: impl FnMut(*mut sys::ibv_recv_wr, *mut *mut sys::ibv_recv_wr) -> c_int,
) -> Result<(), PostError> {
    let mut sges = [sys::ibv_sge::default(); AT_ONCE];
    let mut wrs = [sys::ibv_recv_wr::default(); AT_ONCE];
    let mut posted = 0;
    for recvs in recvs.chunks(AT_ONCE) {
        for (raw, recv) in sges.iter_mut().zip(recvs) {
            let Sge { addr, bytes, lkey } = recv.sge.unwrap_or_default();
            *raw = sys::ibv_sge { addr, length: bytes, lkey };
        }
        let (first, sge) = (wrs.as_mut_ptr(), sges.as_mut_ptr());
        for (at, recv) in recvs.iter().enumerate() {
            let last = at + 1 == recvs.len();
            let wr = sys::ibv_recv_wr {
                wr_id: recv.wr_id,
                next: if last { ptr::null_mut() } else { first.wrapping_add(at + 1) },
                sg_list: sge.wrapping_add(at),
                num_sge: c_int::from(recv.sge.is_some()),
            };
            // SAFETY: within `wrs`, since a chunk is not longer.
            unsafe { first.add(at).write(wr) };
        }
        let mut bad = ptr::null_mut();
        let code = post(first, &raw mut bad);
        if code != 0 {
            let error = PostError::new(code, first, recvs.len(), bad);
            return Err(PostError { posted: posted + error.posted, source: error.source });
        }
        posted += recvs.len();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    fn recv(wr_id: u64) -> Recv {
        let sge = Sge { addr: wr_id << 12, bytes: 64, lkey: 5 };
        Recv { wr_id, sge: (!wr_id.is_multiple_of(3)).then_some(sge) }
    }

    /// Takes a chain, or its beginning up to `room`, as a provider does.
    fn take(
        first: *mut sys::ibv_recv_wr,
        bad: *mut *mut sys::ibv_recv_wr,
        room: usize,
        taken: &mut Vec<Recv>,
    ) -> c_int {
        let (mut at, mut count) = (first, 0);
        // SAFETY: the chain ends with null, and its stretches are where it says.
        while let Some(wr) = unsafe { at.as_ref() } {
            if count == room {
                // SAFETY: the caller gives somewhere to write to.
                unsafe { *bad = at };
                return Errno::NOMEM.raw_os_error();
            }
            let sge = (wr.num_sge == 1).then(|| {
                // SAFETY: as above.
                let raw = unsafe { *wr.sg_list };
                Sge { addr: raw.addr, bytes: raw.length, lkey: raw.lkey }
            });
            taken.push(Recv { wr_id: wr.wr_id, sge });
            (at, count) = (wr.next, count + 1);
        }
        0
    }

    #[test]
    fn receives_go_in_order_and_in_one_call_for_each_64() {
        for (count, calls) in [(0, 0), (1, 1), (64, 1), (65, 2), (200, 4)] {
            let recvs: Vec<_> = (0..count).map(recv).collect();
            let (mut taken, mut called) = (Vec::new(), 0);
            chain(&recvs, |first, bad| {
                called += 1;
                take(first, bad, usize::MAX, &mut taken)
            })
            .unwrap();
            assert_eq!((taken, called), (recvs, calls));
        }
    }

    #[test]
    fn a_queue_that_fills_up_says_how_many_it_took() {
        let recvs: Vec<_> = (0..100).map(recv).collect();
        for room in [0, 1, 63, 64, 99] {
            let mut taken = Vec::new();
            let error = chain(&recvs, |first, bad| {
                let left = room - taken.len();
                take(first, bad, left, &mut taken)
            })
            .unwrap_err();
            assert!(error.is_full());
            assert_eq!((error.posted, &taken[..]), (room, &recvs[..room]));
        }
    }
}
