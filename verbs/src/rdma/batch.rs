//! Chains of work requests, posted with one doorbell.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{BitOr, BitOrAssign};
use std::ptr;

use ibverbs_sys as sys;
use sys::{ibv_send_flags as send_flags, ibv_wr_opcode as opcode};

use super::arena::What;
use super::mr::Sge;
use super::post::{BatchError, PostError, PostFault};
use super::qp::Qp;

/// How a work request is treated. `true` is [`WrFlags::SIGNALED`], `false` is [`WrFlags::NONE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct WrFlags(u32);

impl WrFlags {
    /// Its success is told by the next signaled one only. Failure is always told.
    pub const NONE: Self = Self(0);
    /// Its success has a completion of its own. The last request of a queue must have one now and
    /// then: only completions make room.
    pub const SIGNALED: Self = Self(send_flags::IBV_SEND_SIGNALED.0);
    /// It begins only when all reads before it have ended.
    pub const FENCE: Self = Self(send_flags::IBV_SEND_FENCE.0);
    /// The receive it ends in wakes a peer that waits for such ones alone.
    pub const SOLICITED: Self = Self(send_flags::IBV_SEND_SOLICITED.0);

    pub(crate) const fn bits(self) -> u32 {
        self.0
    }
}

impl From<bool> for WrFlags {
    fn from(signaled: bool) -> Self {
        if signaled { Self::SIGNALED } else { Self::NONE }
    }
}

impl BitOr for WrFlags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for WrFlags {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// A chain of work requests that is being put together for one queue pair. It allocates nothing.
/// Dropped, it posts nothing.
///
/// Two at once cannot be:
/// ```compile_fail,E0499
/// # fn f(qp: &mut kvferry_verbs::Qp) {
/// let mut one = qp.batch();
/// let mut two = qp.batch();
/// one.write(0, &[], 0, 0, true);
/// # }
/// ```
/// A queue pair cannot be destroyed, or dropped, under its batch:
/// ```compile_fail,E0505
/// # fn f(mut qp: kvferry_verbs::Qp) {
/// let batch = qp.batch();
/// qp.destroy();
/// batch.post();
/// # }
/// ```
/// ```compile_fail,E0505
/// # fn f(mut qp: kvferry_verbs::Qp) {
/// let batch = qp.batch();
/// drop(qp);
/// batch.post();
/// # }
/// ```
/// Inline data lives as long as the batch:
/// ```compile_fail,E0597
/// # fn f(qp: &mut kvferry_verbs::Qp) {
/// let mut batch = qp.batch();
/// {
///     let header = [0u8; 64];
///     batch.send_inline(0, &header, true);
/// }
/// batch.post();
/// # }
/// ```
/// And a batch that was posted is gone:
/// ```compile_fail,E0382
/// # fn f(qp: &mut kvferry_verbs::Qp) {
/// let mut batch = qp.batch();
/// batch.post();
/// batch.write(0, &[], 0, 0, true);
/// # }
/// ```
/// What the above get wrong, right:
/// ```
/// # use kvferry_verbs::*;
/// # fn f(qp: &mut Qp, source: &Mr, header: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
/// let mut batch = qp.batch();
/// batch.write(0, &[source.sge(0, 4096)?], 0x7000_0000, 0x1234, false)?;
/// batch.send_inline(1, header, WrFlags::SIGNALED | WrFlags::FENCE)?;
/// batch.post()?;
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is posted until `post` is called"]
pub struct Batch<'a> {
    qp: &'a mut Qp,
    inline: PhantomData<&'a [u8]>,
}

impl<'a> Batch<'a> {
    pub(crate) fn new(qp: &'a mut Qp) -> Self {
        qp.arena().clear();
        Self { qp, inline: PhantomData }
    }

    /// Work requests in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.qp.arena_ref().len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the bytes of `sges`, one after the other, to the peer's memory at `remote_addr`.
    ///
    /// # Errors
    /// [`BatchError`] if it does not fit; the batch stays as it was.
    pub fn write(
        &mut self,
        wr_id: u64,
        sges: &[Sge],
        remote_addr: u64,
        rkey: u32,
        flags: impl Into<WrFlags>,
    ) -> Result<(), BatchError> {
        let what = What { opcode: opcode::IBV_WR_RDMA_WRITE, imm: 0, remote: (remote_addr, rkey) };
        self.qp.arena().gather(wr_id, &what, sges, flags.into())
    }

    /// As [`Batch::write`]; behind it, a receive of the peer's completes with the number `imm`.
    ///
    /// # Errors
    /// As [`Batch::write`].
    pub fn write_with_imm(
        &mut self,
        wr_id: u64,
        sges: &[Sge],
        remote_addr: u64,
        rkey: u32,
        imm: u32,
        flags: impl Into<WrFlags>,
    ) -> Result<(), BatchError> {
        let opcode = opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
        let what = What { opcode, imm, remote: (remote_addr, rkey) };
        self.qp.arena().gather(wr_id, &what, sges, flags.into())
    }

    /// As [`Batch::write`], with bytes that go into the work request itself: they need not be
    /// registered, and are free again once the batch is posted.
    ///
    /// # Errors
    /// As [`Batch::write`].
    pub fn write_inline(
        &mut self,
        wr_id: u64,
        data: &'a [u8],
        remote_addr: u64,
        rkey: u32,
        flags: impl Into<WrFlags>,
    ) -> Result<(), BatchError> {
        let what = What { opcode: opcode::IBV_WR_RDMA_WRITE, imm: 0, remote: (remote_addr, rkey) };
        self.qp.arena().inline(wr_id, &what, data, flags.into())
    }

    /// Reads the peer's memory at `remote_addr` into `sges`, one after the other.
    ///
    /// # Errors
    /// As [`Batch::write`].
    pub fn read(
        &mut self,
        wr_id: u64,
        sges: &[Sge],
        remote_addr: u64,
        rkey: u32,
        flags: impl Into<WrFlags>,
    ) -> Result<(), BatchError> {
        let what = What { opcode: opcode::IBV_WR_RDMA_READ, imm: 0, remote: (remote_addr, rkey) };
        self.qp.arena().gather(wr_id, &what, sges, flags.into())
    }

    /// Sends the bytes of `sges` as one message into a receive of the peer's.
    ///
    /// # Errors
    /// As [`Batch::write`].
    pub fn send(
        &mut self,
        wr_id: u64,
        sges: &[Sge],
        flags: impl Into<WrFlags>,
    ) -> Result<(), BatchError> {
        let what = What { opcode: opcode::IBV_WR_SEND, imm: 0, remote: (0, 0) };
        self.qp.arena().gather(wr_id, &what, sges, flags.into())
    }

    /// As [`Batch::send`], with a number beside the message.
    ///
    /// # Errors
    /// As [`Batch::write`].
    pub fn send_with_imm(
        &mut self,
        wr_id: u64,
        sges: &[Sge],
        imm: u32,
        flags: impl Into<WrFlags>,
    ) -> Result<(), BatchError> {
        let what = What { opcode: opcode::IBV_WR_SEND_WITH_IMM, imm, remote: (0, 0) };
        self.qp.arena().gather(wr_id, &what, sges, flags.into())
    }

    /// As [`Batch::send`], with bytes that go into the work request itself: they need not be
    /// registered, and are free again once the batch is posted.
    ///
    /// # Errors
    /// As [`Batch::write`].
    pub fn send_inline(
        &mut self,
        wr_id: u64,
        data: &'a [u8],
        flags: impl Into<WrFlags>,
    ) -> Result<(), BatchError> {
        let what = What { opcode: opcode::IBV_WR_SEND, imm: 0, remote: (0, 0) };
        self.qp.arena().inline(wr_id, &what, data, flags.into())
    }

    /// Posts them all, in order, with one doorbell. An empty batch posts nothing.
    ///
    /// # Errors
    /// [`PostError`] says how many were posted, and whether the queue was full.
    pub fn post(self) -> Result<(), PostError> {
        let qp = self.qp.raw();
        let post = self.qp.context().ops().post_send;
        let refused = || PostError { posted: 0, source: PostFault::no_operation() };
        let post = post.ok_or_else(refused)?;
        let arena = self.qp.arena();
        let first = arena.link();
        if first.is_null() {
            return Ok(());
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is there. The chain is in the arena, which nobody else touches, and
        // its inline data lives as long as `self`. The NIC itself checks keys and ranges.
        match unsafe { post(qp, first, &raw mut bad) } {
            0 => Ok(()),
            code => Err(PostError::new(code, first, arena.len(), bad)),
        }
    }
}

impl fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("qp", &self.qp).field("len", &self.len()).finish()
    }
}
