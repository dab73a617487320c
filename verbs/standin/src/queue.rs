//! Work queues: rings of fixed size, so that posting allocates nothing.

use ibverbs_sys as sys;

/// A send request as it was posted. Its gather list and its inline bytes are in the queue.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wqe {
    pub(crate) wr_id: u64,
    pub(crate) opcode: sys::ibv_wr_opcode::Type,
    pub(crate) flags: u32,
    /// As it was given, in network order.
    pub(crate) imm: u32,
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
    pub(crate) sges: u32,
    pub(crate) bytes: u64,
}

impl Wqe {
    pub(crate) const fn is_inline(&self) -> bool {
        self.flags & sys::ibv_send_flags::IBV_SEND_INLINE.0 != 0
    }

    pub(crate) const fn is_signaled(&self) -> bool {
        self.flags & sys::ibv_send_flags::IBV_SEND_SIGNALED.0 != 0
    }

    pub(crate) const fn is_solicited(&self) -> bool {
        self.flags & sys::ibv_send_flags::IBV_SEND_SOLICITED.0 != 0
    }
}

/// The send queue of a QP. Its positions count up for ever:
/// `freed` ≤ `answered` ≤ `executed` ≤ `posted`.
#[derive(Debug)]
pub(crate) struct SendQueue {
    wqes: Box<[Wqe]>,
    sges: Box<[sys::ibv_sge]>,
    inline: Box<[u8]>,
    max_sge: usize,
    max_inline_bytes: usize,
    pub(crate) posted: u64,
    /// The next one that its responder has not seen.
    pub(crate) executed: u64,
    /// The next one whose answer is not here. It lags behind `executed` while answers are lost.
    pub(crate) answered: u64,
    /// The next one whose slot is in use.
    freed: u64,
    /// The next one that no script was asked about.
    pub(crate) judged: u64,
}

impl SendQueue {
    pub(crate) fn new(cap: &sys::ibv_qp_cap) -> Self {
        let [depth, max_sge, max_inline_bytes] =
            [cap.max_send_wr, cap.max_send_sge, cap.max_inline_data].map(|n| n as usize);
        Self {
            wqes: vec![Wqe::default(); depth].into(),
            sges: vec![sys::ibv_sge::default(); depth * max_sge].into(),
            inline: vec![0; depth * max_inline_bytes].into(),
            max_sge,
            max_inline_bytes,
            posted: 0,
            executed: 0,
            answered: 0,
            freed: 0,
            judged: 0,
        }
    }

    fn slot(&self, position: u64) -> usize {
        // The remainder of a division by the length, which is a `usize`.
        (position % self.wqes.len() as u64) as usize
    }

    pub(crate) fn is_full(&self) -> bool {
        self.posted - self.freed == self.wqes.len() as u64
    }

    /// Adds a request; the caller has checked that there is room and that the lists fit.
    pub(crate) fn push(&mut self, wqe: Wqe, sges: &[sys::ibv_sge]) -> &mut [u8] {
        let slot = self.slot(self.posted);
        self.wqes[slot] = wqe;
        self.posted += 1;
        let first = slot * self.max_sge;
        if wqe.is_inline() {
            let first = slot * self.max_inline_bytes;
            &mut self.inline[first..first + self.max_inline_bytes]
        } else {
            self.sges[first..first + sges.len()].copy_from_slice(sges);
            &mut []
        }
    }

    pub(crate) fn wqe(&self, position: u64) -> Wqe {
        self.wqes[self.slot(position)]
    }

    pub(crate) fn sges(&self, position: u64) -> &[sys::ibv_sge] {
        let slot = self.slot(position);
        let first = slot * self.max_sge;
        &self.sges[first..first + self.wqes[slot].sges as usize]
    }

    pub(crate) fn inline(&self, position: u64) -> &[u8] {
        let slot = self.slot(position);
        let first = slot * self.max_inline_bytes;
        &self.inline[first..first + self.wqes[slot].bytes as usize]
    }

    /// The completion of the request at `position` was polled: its slot is free, and so are those of
    /// the unsignaled ones before it (rdma-core, `providers/mlx5/cq.c`: `handle_responder` and
    /// `mlx5_parse_cqe` move `wq->tail`).
    pub(crate) fn free(&mut self, position: u64) {
        self.freed = self.freed.max(position + 1);
    }

    pub(crate) fn clear(&mut self) {
        for position in [&mut self.executed, &mut self.answered, &mut self.freed, &mut self.judged]
        {
            *position = self.posted;
        }
    }
}

/// A receive as it was posted.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Receive {
    pub(crate) wr_id: u64,
    sges: usize,
}

/// The receive queue of a QP, or a shared one.
#[derive(Debug)]
pub(crate) struct ReceiveQueue {
    receives: Box<[Receive]>,
    sges: Box<[sys::ibv_sge]>,
    max_sge: usize,
    posted: u64,
    taken: u64,
    /// Slots in use: posted, or taken with a completion that was not polled.
    in_use: usize,
}

impl ReceiveQueue {
    pub(crate) fn new(depth: u32, max_sge: u32) -> Self {
        let [depth, max_sge] = [depth, max_sge].map(|n| n as usize);
        Self {
            receives: vec![Receive::default(); depth].into(),
            sges: vec![sys::ibv_sge::default(); depth * max_sge].into(),
            max_sge,
            posted: 0,
            taken: 0,
            in_use: 0,
        }
    }

    fn slot(&self, position: u64) -> usize {
        (position % self.receives.len() as u64) as usize
    }

    pub(crate) fn is_full(&self) -> bool {
        self.in_use == self.receives.len()
    }

    pub(crate) const fn max_sge(&self) -> usize {
        self.max_sge
    }

    pub(crate) const fn depth(&self) -> usize {
        self.receives.len()
    }

    /// How many wait for a message.
    pub(crate) const fn waiting(&self) -> u64 {
        self.posted - self.taken
    }

    /// Adds a receive; the caller has checked that there is room and that the list fits.
    pub(crate) fn push(&mut self, wr_id: u64, sges: &[sys::ibv_sge]) {
        let slot = self.slot(self.posted);
        let first = slot * self.max_sge;
        self.receives[slot] = Receive { wr_id, sges: sges.len() };
        self.sges[first..first + sges.len()].copy_from_slice(sges);
        self.posted += 1;
        self.in_use += 1;
    }

    /// The oldest receive that waits, and its scatter list.
    pub(crate) fn front(&self) -> Option<(Receive, &[sys::ibv_sge])> {
        (self.waiting() > 0).then(|| {
            let slot = self.slot(self.taken);
            let first = slot * self.max_sge;
            (self.receives[slot], &self.sges[first..first + self.receives[slot].sges])
        })
    }

    /// Takes the oldest receive that waits.
    pub(crate) fn take(&mut self) -> Option<Receive> {
        let (receive, _) = self.front()?;
        self.taken += 1;
        Some(receive)
    }

    /// The completion of a receive was polled, or thrown away.
    pub(crate) fn free(&mut self) {
        self.in_use -= 1;
    }

    /// Forgets the receives that wait.
    pub(crate) fn clear(&mut self) {
        self.in_use -= self.waiting() as usize;
        self.taken = self.posted;
    }
}
