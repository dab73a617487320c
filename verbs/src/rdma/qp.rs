//! Queue pairs of type RC: reliable, connected to one other.

use std::fmt;
use std::io;
use std::ptr::{self, NonNull};

use ibverbs_sys as sys;

use super::arena::Arena;
use super::batch::Batch;
use super::context::Context;
use super::cq::Cq;
use super::error::{VerbsError, check};
use super::mr::Mr;
use super::pd::Pd;
use super::post::{PostError, PostFault};
use super::srq::{self, Recv, Srq};
use super::states::QpState;

/// What a queue pair is made with.
#[derive(Debug, Clone, Copy)]
pub struct QpOptions<'a> {
    /// Where sends, writes and reads complete.
    pub send_cq: &'a Cq,
    /// Where receives complete.
    pub recv_cq: &'a Cq,
    /// Where receives come from, instead of from a queue of its own.
    pub srq: Option<&'a Srq>,
    /// Sends, writes and reads that may be posted and not completed.
    pub max_send_wr: u32,
    /// Receives that may be posted; 0 with a shared queue.
    pub max_recv_wr: u32,
    /// Stretches of memory of one send, write or read.
    pub max_send_sge: u32,
    /// Stretches of memory of one receive; 0 with a shared queue.
    pub max_recv_sge: u32,
    /// Bytes that may stand in a work request itself.
    pub max_inline_bytes: u32,
}

/// What a queue pair was granted, at least as much as was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Capacities {
    /// Sends, writes and reads that may be posted and not completed.
    pub max_send_wr: u32,
    /// Receives that may be posted.
    pub max_recv_wr: u32,
    /// Stretches of memory of one send, write or read.
    pub max_send_sge: u32,
    /// Stretches of memory of one receive.
    pub max_recv_sge: u32,
    /// Bytes that may stand in a work request itself.
    pub max_inline_bytes: u32,
}

/// A queue pair. It is destroyed when it is dropped; then nothing of it reads or writes memory any
/// more.
pub struct Qp {
    /// Null once it is destroyed.
    raw: *mut sys::ibv_qp,
    number: u32,
    capacities: Capacities,
    arena: Arena,
    /// Where it was last moved to; it may have failed since.
    pub(super) last_state: QpState,
    attached: Vec<Mr>,
    pd: Pd,
    /// Held until the queue pair is destroyed.
    _cqs: (Cq, Cq),
    _srq: Option<Srq>,
}

// SAFETY: the queue pair is used through libibverbs' functions alone, which may be called from any
// thread; its fields that are read here do not change.
unsafe impl Send for Qp {}
// SAFETY: as above. What a shared queue pair offers, receiving and querying, libibverbs locks.
unsafe impl Sync for Qp {}

impl Qp {
    pub(crate) fn create(pd: &Pd, options: &QpOptions<'_>) -> Result<Self, VerbsError> {
        const NAME: &str = "ibv_create_qp";
        let QpOptions { send_cq, recv_cq, srq, .. } = *options;
        if !send_cq.context().is(pd.context()) || !recv_cq.context().is(pd.context()) {
            return Err(VerbsError::foreign(NAME, "a completion queue"));
        }
        // Linux allows it, and then hands the receives out under the keys of the other domain.
        if srq.is_some_and(|srq| !srq.pd().is(pd)) {
            return Err(VerbsError::foreign(NAME, "the shared receive queue"));
        }
        let mut init = sys::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: send_cq.raw(),
            recv_cq: recv_cq.raw(),
            srq: srq.map_or(ptr::null_mut(), Srq::raw),
            cap: sys::ibv_qp_cap {
                max_send_wr: options.max_send_wr,
                max_recv_wr: options.max_recv_wr,
                max_send_sge: options.max_send_sge,
                max_recv_sge: options.max_recv_sge,
                max_inline_data: options.max_inline_bytes,
            },
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queues are there, of one device, and held below. The function writes
        // what it grants into `init`.
        let raw = unsafe { (pd.context().functions().ibv_create_qp)(pd.raw(), &raw mut init) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| VerbsError::create(NAME, io::Error::last_os_error()))?
            .as_ptr();
        let capacities = Capacities::from_raw(&init.cap);
        let Capacities { max_send_wr, max_send_sge, max_inline_bytes, .. } = capacities;
        Ok(Self {
            raw,
            // SAFETY: the queue pair is there.
            number: unsafe { (*raw).qp_num },
            capacities,
            arena: Arena::new(max_send_wr, max_send_sge, max_inline_bytes),
            last_state: QpState::Reset,
            attached: Vec::new(),
            pd: pd.clone(),
            _cqs: (send_cq.clone(), recv_cq.clone()),
            _srq: srq.cloned(),
        })
    }

    /// Its number: what the peer sends to.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// What it was granted.
    #[must_use]
    pub const fn capacities(&self) -> Capacities {
        self.capacities
    }

    /// Sends, writes and reads that may be posted and not completed; also what a batch holds.
    #[must_use]
    pub const fn max_send_wr(&self) -> u32 {
        self.capacities.max_send_wr
    }

    /// Stretches of memory of one send, write or read.
    #[must_use]
    pub const fn max_send_sge(&self) -> u32 {
        self.capacities.max_send_sge
    }

    /// Keeps a region registered as long as the queue pair is there, for work requests that use it.
    pub fn attach(&mut self, mr: &Mr) {
        self.attached.push(mr.clone());
    }

    /// Begins a chain of work requests.
    pub fn batch(&mut self) -> Batch<'_> {
        Batch::new(self)
    }

    /// Posts receives to its own queue, in order, with one call into the library for each 64 of
    /// them.
    ///
    /// # Errors
    /// [`PostError`] says how many were posted, and whether the queue is full. A queue pair with a
    /// shared receive queue has none of its own.
    pub fn post_recv(&self, recvs: &[Recv]) -> Result<(), PostError> {
        let refused = || PostError { posted: 0, source: PostFault::no_operation() };
        if self._srq.is_some() {
            return Err(refused());
        }
        let post = self.context().ops().post_recv.ok_or_else(refused)?;
        srq::chain(recvs, |first, bad| {
            // SAFETY: the queue pair is there, and `first` begins a chain of valid receives.
            unsafe { post(self.raw, first, bad) }
        })
    }

    /// Destroys it, and says whether that worked. Completions that are still in its queues may be
    /// lost.
    ///
    /// # Errors
    /// [`VerbsError::Os`]: then it is not known what the NIC still does.
    pub fn destroy(mut self) -> Result<(), VerbsError> {
        self.destroy_raw().map_err(|source| VerbsError::os("ibv_destroy_qp", source))
    }

    fn destroy_raw(&mut self) -> io::Result<()> {
        let raw = std::mem::replace(&mut self.raw, ptr::null_mut());
        if raw.is_null() {
            return Ok(());
        }
        // SAFETY: the queue pair is there, and is destroyed once: the pointer was taken away above.
        check(unsafe { (self.context().functions().ibv_destroy_qp)(raw) })
    }

    pub(super) const fn raw(&self) -> *mut sys::ibv_qp {
        self.raw
    }

    pub(super) fn context(&self) -> &Context {
        self.pd.context()
    }

    pub(super) const fn arena(&mut self) -> &mut Arena {
        &mut self.arena
    }

    pub(super) const fn arena_ref(&self) -> &Arena {
        &self.arena
    }
}

impl Capacities {
    pub(super) const fn from_raw(raw: &sys::ibv_qp_cap) -> Self {
        Self {
            max_send_wr: raw.max_send_wr,
            max_recv_wr: raw.max_recv_wr,
            max_send_sge: raw.max_send_sge,
            max_recv_sge: raw.max_recv_sge,
            max_inline_bytes: raw.max_inline_data,
        }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // Who wants to know whether it worked calls `destroy`.
        let _ = self.destroy_raw();
    }
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp")
            .field("device", &self.context().name())
            .field("number", &format_args!("{:#x}", self.number))
            .field("capacities", &self.capacities)
            .finish_non_exhaustive()
    }
}
