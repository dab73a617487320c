//! Completion queues and their channels.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ibverbs_sys as sys;

use crate::device::Element;
use crate::state::{QpRef, State};

/// What fills every field of a completion that the manual leaves undefined: of a failed one, all but
/// `wr_id`, `status`, `qp_num` and `vendor_err` (rdma-core, `libibverbs/man/ibv_poll_cq.3`). Code
/// that reads one of them sees nonsense, and flags that are set.
pub const POISON: u32 = 0x5a5a_5a5a;
const POISON_16: u16 = 0x5a5a;
const POISON_8: u8 = 0x5a;

/// `struct ibv_wc`, of which `ibverbs-sys` keeps some fields to itself.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Wc {
    wr_id: u64,
    status: u32,
    opcode: u32,
    vendor_err: u32,
    byte_len: u32,
    imm_data: u32,
    qp_num: u32,
    src_qp: u32,
    wc_flags: u32,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

const _: () = {
    assert!(size_of::<Wc>() == size_of::<sys::ibv_wc>());
    assert!(align_of::<Wc>() == align_of::<sys::ibv_wc>());
    assert!(std::mem::offset_of!(Wc, imm_data) == std::mem::offset_of!(sys::ibv_wc, imm_data));
    assert!(std::mem::offset_of!(Wc, wc_flags) == std::mem::offset_of!(sys::ibv_wc, wc_flags));
};

impl Wc {
    /// The defined fields of every completion; the rest is poisoned.
    pub(crate) const fn failed(wr_id: u64, status: u32, vendor_err: u32, qp_num: u32) -> Self {
        Self {
            wr_id,
            status,
            opcode: POISON,
            vendor_err,
            byte_len: POISON,
            imm_data: POISON,
            qp_num,
            src_qp: POISON,
            wc_flags: POISON,
            pkey_index: POISON_16,
            slid: POISON_16,
            sl: POISON_8,
            dlid_path_bits: POISON_8,
        }
    }

    /// A request that succeeded; only a read has a length.
    pub(crate) const fn sent(wr_id: u64, opcode: u32, bytes: Option<u32>, qp_num: u32) -> Self {
        let byte_len = match bytes {
            Some(bytes) => bytes,
            None => POISON,
        };
        let status = sys::ibv_wc_status::IBV_WC_SUCCESS;
        Self { opcode, byte_len, wc_flags: 0, ..Self::failed(wr_id, status, 0, qp_num) }
    }

    /// A message that arrived.
    pub(crate) const fn received(
        wr_id: u64,
        opcode: u32,
        bytes: u32,
        imm: Option<u32>,
        qp_num: u32,
    ) -> Self {
        let (imm_data, wc_flags) = match imm {
            Some(imm) => (imm, sys::ibv_wc_flags::IBV_WC_WITH_IMM.0),
            None => (POISON, 0),
        };
        Self { imm_data, wc_flags, ..Self::sent(wr_id, opcode, Some(bytes), qp_num) }
    }
}

/// What is free again once the completion was polled.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Slot {
    Send(u64),
    Receive,
    SharedReceive(u32),
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    wc: Wc,
    qp_num: u32,
    slot: Slot,
}

/// For which completions the caller wants an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Armed {
    No,
    Solicited,
    Any,
}

#[derive(Debug)]
pub(crate) struct Cq {
    /// The address of the caller's `ibv_cq`.
    pub(crate) handle: usize,
    pub(crate) context: u32,
    pub(crate) channel: Option<u32>,
    pub(crate) armed: Armed,
    entries: VecDeque<Entry>,
    depth: usize,
    overflowed: bool,
    /// How many entries there are, for a look without the lock.
    ready: Arc<AtomicU32>,
    pub(crate) unacked_completions: u32,
    pub(crate) unacked_async: u32,
}

impl Cq {
    pub(crate) fn new(context: u32, channel: Option<u32>, depth: usize) -> Self {
        Self {
            handle: 0,
            context,
            channel,
            armed: Armed::No,
            entries: VecDeque::with_capacity(depth),
            depth,
            overflowed: false,
            ready: Arc::default(),
            unacked_completions: 0,
            unacked_async: 0,
        }
    }

    pub(crate) const fn ready(&self) -> &Arc<AtomicU32> {
        &self.ready
    }

    fn publish(&self) {
        self.ready.store(self.entries.len() as u32, Ordering::Release);
    }
}

/// A completion channel.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) context: u32,
    pub(crate) fd: OwnedFd,
    /// CQs with an event that was not taken.
    pub(crate) events: VecDeque<u32>,
    /// CQs that report to it.
    pub(crate) cqs: u32,
}

impl State {
    /// Adds a completion of the QP `at` to one of its CQs. A full CQ loses it, once with an event;
    /// its QPs go on, and slots of lost completions stay in use (recorded of Soft-RoCE on Linux 6.1:
    /// an asynchronous CQ error, QP in RTS; `drivers/infiniband/sw/rxe/rxe_cq.c`: `rxe_cq_post`).
    /// Errors are always `solicited` (InfiniBand specification, 11.4.2.2).
    pub(crate) fn complete(&mut self, at: QpRef, cq: u32, wc: Wc, slot: Slot, solicited: bool) {
        let device = &mut self.devices[at.device];
        let Some(queue) = device.cqs.get_mut(cq) else { return };
        if queue.entries.len() == queue.depth {
            if !std::mem::replace(&mut queue.overflowed, true) {
                let context = queue.context;
                device.report(context, sys::IBV_EVENT_CQ_ERR, Element::Cq(cq));
            }
            return;
        }
        queue.entries.push_back(Entry { wc, qp_num: at.qp_num, slot });
        queue.publish();
        let wanted = match queue.armed {
            Armed::No => false,
            Armed::Solicited => solicited,
            Armed::Any => true,
        };
        if wanted {
            queue.armed = Armed::No;
            if let Some(channel) = queue.channel.and_then(|c| device.channels.get_mut(c)) {
                channel.events.push_back(cq);
                crate::device::ring(&channel.fd);
            }
        }
    }

    /// The oldest completion of a CQ; what it held is free.
    pub(crate) fn take_completion(&mut self, device: usize, cq: u32) -> Option<Wc> {
        let queue = self.devices[device].cqs.get_mut(cq)?;
        let entry = queue.entries.pop_front()?;
        queue.publish();
        self.free_slot(device, &entry);
        Some(entry.wc)
    }

    fn free_slot(&mut self, device: usize, entry: &Entry) {
        let device = &mut self.devices[device];
        match entry.slot {
            Slot::SharedReceive(srq) => {
                if let Some(srq) = device.srqs.get_mut(srq) {
                    srq.queue.free();
                }
            }
            slot => {
                let Some(qp) = device.qps.get_mut(entry.qp_num) else { return };
                match slot {
                    Slot::Send(position) => qp.sq.free(position),
                    Slot::Receive | Slot::SharedReceive(_) => qp.rq.free(),
                }
            }
        }
    }

    /// Throws away what a CQ holds of a QP.
    pub(crate) fn purge(&mut self, at: QpRef, cq: u32) {
        let Some(queue) = self.devices[at.device].cqs.get_mut(cq) else { return };
        let mut gone = Vec::new();
        queue.entries.retain(|entry| {
            let stays = entry.qp_num != at.qp_num;
            if !stays {
                gone.push(*entry);
            }
            stays
        });
        queue.publish();
        for entry in &gone {
            self.free_slot(at.device, entry);
        }
    }
}
