//! Queue pairs: their state, and how they break.

use std::time::Instant;

use ibverbs_sys as sys;
use sys::ibv_qp_state as qps;
use sys::ibv_wc_status as status;

use crate::cq::{Slot, Wc};
use crate::device::{Element, Route};
use crate::options::Statuses;
use crate::queue::{ReceiveQueue, SendQueue};
use crate::state::{QpRef, State};

/// `vendor_err` of an error that no script chose, or-ed with its status: a number that means nothing
/// to anyone, but tells errors apart.
pub const VENDOR_ERR: u32 = 0x5700;

/// What the oldest unanswered request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Nothing: it has not been tried, or there is none.
    No,
    /// A receive at the peer. Without an end where `rnr_retry` is 7.
    Receive { until: Option<Instant> },
    /// An answer from a peer that gives none, so far.
    Answer { until: Option<Instant> },
    /// An answer that is lost. The requests behind it arrive all the same.
    LostAnswer { until: Option<Instant> },
}

impl Wait {
    pub(crate) const fn until(self) -> Option<Instant> {
        match self {
            Self::No => None,
            Self::Receive { until } | Self::Answer { until } | Self::LostAnswer { until } => until,
        }
    }
}

pub(crate) struct Qp {
    /// The address of the caller's `ibv_qp`.
    pub(crate) handle: usize,
    pub(crate) context: u32,
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) srq: Option<u32>,
    pub(crate) cap: sys::ibv_qp_cap,
    pub(crate) signals_all: bool,
    pub(crate) state: qps::Type,
    /// What `ibv_modify_qp` has set so far.
    pub(crate) attr: sys::ibv_qp_attr,
    pub(crate) route: Option<Route>,
    /// PSN of the next packet sent, and of the next one expected.
    pub(crate) sq_psn: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq: SendQueue,
    pub(crate) rq: ReceiveQueue,
    pub(crate) wait: Wait,
    /// A script holds it.
    pub(crate) is_held: bool,
    /// It is in the list of QPs with unfinished work.
    pub(crate) is_noted: bool,
    /// Events that were fetched and not acknowledged.
    pub(crate) unacked: u32,
}

impl Qp {
    /// Whether it has a peer that it answers.
    pub(crate) const fn is_connected(&self) -> bool {
        matches!(self.state, qps::IBV_QPS_RTR | qps::IBV_QPS_RTS)
    }

    pub(crate) const fn has_work(&self) -> bool {
        self.state == qps::IBV_QPS_RTS && self.sq.answered < self.sq.posted
    }

    /// Whether its next request may be tried, be it once more.
    pub(crate) const fn is_able(&self) -> bool {
        self.has_work() && !self.is_held && self.sq.executed < self.sq.posted
    }

    /// Whether an answer was lost, so that no later one counts either.
    pub(crate) const fn is_lost(&self) -> bool {
        matches!(self.wait, Wait::LostAnswer { .. })
    }

    /// How many packets a message takes, and so how many PSNs.
    pub(crate) fn packets(&self, bytes: u64) -> u32 {
        bytes.div_ceil(self.mtu_bytes()).max(1) as u32
    }

    pub(crate) const fn mtu_bytes(&self) -> u64 {
        128 << self.attr.path_mtu
    }
}

impl State {
    /// The oldest unanswered request of a QP fails, and the QP breaks.
    pub(crate) fn fail(&mut self, at: QpRef, status: status::Type, vendor_err: u32) {
        let Some(qp) = self.qp_mut(at).filter(|qp| qp.has_work()) else { return };
        let position = qp.sq.answered;
        qp.sq.answered += 1;
        qp.sq.executed = qp.sq.executed.max(qp.sq.answered);
        let wc = Wc::failed(qp.sq.wqe(position).wr_id, status, vendor_err, at.qp_num);
        let cq = qp.send_cq;
        self.complete(at, cq, wc, Slot::Send(position), true);
        self.enter_error(at);
    }

    /// Breaks a QP: what is posted on it flushes, unsignaled requests, too; receives of a shared
    /// queue stay there, and an event says that the QP takes no more of them (InfiniBand
    /// specification, 10.3.1; Linux, `drivers/infiniband/sw/rxe/rxe_resp.c`: `flush_recv_queue`).
    pub(crate) fn enter_error(&mut self, at: QpRef) {
        let Some(qp) = self.qp_mut(at) else { return };
        if qp.state == qps::IBV_QPS_ERR {
            return;
        }
        qp.state = qps::IBV_QPS_ERR;
        qp.wait = Wait::No;
        let (context, srq) = (qp.context, qp.srq);
        self.flush(at);
        if srq.is_some() {
            let device = &mut self.devices[at.device];
            let element = Element::Qp(at.qp_num);
            device.report(context, sys::IBV_EVENT_QP_LAST_WQE_REACHED, element);
        }
    }

    /// Completes what is posted on a broken QP.
    pub(crate) fn flush(&mut self, at: QpRef) {
        const FLUSHED: status::Type = status::IBV_WC_WR_FLUSH_ERR;
        while let Some(qp) = self.qp_mut(at).filter(|qp| qp.sq.answered < qp.sq.posted) {
            let position = qp.sq.answered;
            qp.sq.answered += 1;
            qp.sq.executed = qp.sq.executed.max(qp.sq.answered);
            let wr_id = qp.sq.wqe(position).wr_id;
            let wc = Wc::failed(wr_id, FLUSHED, VENDOR_ERR | FLUSHED, at.qp_num);
            let cq = qp.send_cq;
            self.complete(at, cq, wc, Slot::Send(position), true);
        }
        while let Some((cq, receive)) =
            self.qp_mut(at).and_then(|qp| Some((qp.recv_cq, qp.rq.take()?)))
        {
            let wc = Wc::failed(receive.wr_id, FLUSHED, VENDOR_ERR | FLUSHED, at.qp_num);
            self.complete(at, cq, wc, Slot::Receive, true);
        }
    }

    /// Empties a QP without a word.
    pub(crate) fn reset(&mut self, at: QpRef) {
        let Some(qp) = self.qp_mut(at) else { return };
        qp.state = qps::IBV_QPS_RESET;
        qp.attr = sys::ibv_qp_attr::default();
        qp.route = None;
        qp.wait = Wait::No;
        qp.sq.clear();
        qp.rq.clear();
        self.purge_completions(at);
    }

    /// Throws away the completions of a QP that ends, where its device does so.
    pub(crate) fn purge_completions(&mut self, at: QpRef) {
        if self.devices[at.device].options.destroy_keeps_completions {
            return;
        }
        let Some((send_cq, recv_cq)) = self.qp(at).map(|qp| (qp.send_cq, qp.recv_cq)) else {
            return;
        };
        self.purge(at, send_cq);
        self.purge(at, recv_cq);
    }

    /// `now` is only asked where something waits.
    pub(crate) fn give_up_if_late(&mut self, at: QpRef, now: impl Fn() -> Instant) {
        if self.deadline(at).is_some_and(|deadline| deadline <= now()) {
            self.give_up(at);
        }
    }

    /// The oldest unanswered request has waited long enough.
    pub(crate) fn give_up(&mut self, at: QpRef) {
        let Some(qp) = self.qp(at) else { return };
        let device = &self.devices[at.device];
        let status = match qp.wait {
            Wait::No => return,
            Wait::Receive { .. } => status::IBV_WC_RNR_RETRY_EXC_ERR,
            Wait::Answer { .. } | Wait::LostAnswer { .. } => {
                let is_down = !device.port_is_up(qp.attr.port_num);
                device.options.statuses.no_answer(is_down)
            }
        };
        self.fail(at, status, VENDOR_ERR | status);
    }
}

/// The rows of the table of [`Statuses`].
impl Statuses {
    const fn is_soft_roce(self) -> bool {
        matches!(self, Self::SoftRoce61 | Self::SoftRoce612)
    }

    pub(crate) const fn unknown_local_key(self) -> status::Type {
        match self {
            Self::Specified => status::IBV_WC_LOC_PROT_ERR,
            Self::SoftRoce61 => status::IBV_WC_LOC_QP_OP_ERR,
            Self::SoftRoce612 => status::IBV_WC_WR_FLUSH_ERR,
        }
    }

    pub(crate) const fn local_range(self) -> status::Type {
        match self {
            Self::Specified | Self::SoftRoce61 => status::IBV_WC_LOC_PROT_ERR,
            Self::SoftRoce612 => status::IBV_WC_WR_FLUSH_ERR,
        }
    }

    /// Of a message longer than its receive: what the sender sees, and what the receiver.
    pub(crate) const fn too_long(self) -> (status::Type, status::Type) {
        if self.is_soft_roce() {
            (status::IBV_WC_REM_OP_ERR, status::IBV_WC_LOC_QP_OP_ERR)
        } else {
            (status::IBV_WC_REM_INV_REQ_ERR, status::IBV_WC_LOC_LEN_ERR)
        }
    }

    const fn no_answer(self, own_port_is_down: bool) -> status::Type {
        match self {
            Self::SoftRoce612 if own_port_is_down => status::IBV_WC_WR_FLUSH_ERR,
            _ => status::IBV_WC_RETRY_EXC_ERR,
        }
    }

    pub(crate) const fn retries_for_ever(self, retry_cnt: u8) -> bool {
        self.is_soft_roce() && retry_cnt == 7
    }
}
