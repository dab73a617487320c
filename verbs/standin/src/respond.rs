//! The responder's side of a request, and the moving of its bytes.

use ibverbs_sys as sys;
use sys::ibv_wc_opcode as wc;
use sys::ibv_wc_status as status;
use sys::ibv_wr_opcode as wr;

use crate::cq::{Slot, Wc};
use crate::device::Element;
use crate::execute::PSN_MASK;
use crate::memory::{Denied, LOCAL_WRITE, REMOTE_READ, REMOTE_WRITE};
use crate::qp::VENDOR_ERR;
use crate::queue::{Receive, ReceiveQueue, Wqe};
use crate::state::{QpRef, State};

/// What comes of a request.
pub(crate) enum Answer {
    Done,
    /// Nothing is heard.
    Silence,
    /// The responder has no receive for it, yet.
    NoReceive,
    /// The responder refuses it, and has broken its QP.
    Refused(status::Type),
    /// It did not leave.
    NotSent(status::Type),
}

impl State {
    /// What the peer of `at` does with its next request, in the order of checks of the InfiniBand
    /// specification, 9.7.4, and of Linux, `drivers/infiniband/sw/rxe/rxe_resp.c`.
    pub(crate) fn respond(&mut self, at: QpRef, wqe: &Wqe) -> Answer {
        let Some(peer_at) = self.reach(at) else { return Answer::Silence };
        let (Some(qp), Some(peer)) = (self.qp(at), self.qp(peer_at)) else {
            return Answer::Silence;
        };
        let (mtu_bytes, packets) = (qp.mtu_bytes(), qp.packets(wqe.bytes));
        let is_read = wqe.opcode == wr::IBV_WR_RDMA_READ;
        let access = match wqe.opcode {
            wr::IBV_WR_RDMA_READ => REMOTE_READ,
            wr::IBV_WR_RDMA_WRITE | wr::IBV_WR_RDMA_WRITE_WITH_IMM => REMOTE_WRITE,
            _ => 0,
        };
        let is_allowed = peer.attr.qp_access_flags & access == access;
        let has_resources = !is_read || peer.attr.max_dest_rd_atomic > 0;
        let fits_mtu = mtu_bytes == peer.mtu_bytes()
            || is_read
            || wqe.bytes <= mtu_bytes.min(peer.mtu_bytes());
        let result = if !is_allowed || !has_resources || !fits_mtu {
            Err(status::IBV_WC_REM_INV_REQ_ERR)
        } else if access == 0 {
            self.deliver(at, peer_at, wqe)
        } else {
            self.access_memory(at, peer_at, wqe, access, mtu_bytes)
        };
        match result {
            Ok(true) => {
                if let Some(peer) = self.qp_mut(peer_at) {
                    peer.rq_psn = (peer.rq_psn + packets) & PSN_MASK;
                }
                Answer::Done
            }
            Ok(false) => Answer::NoReceive,
            Err(status) => {
                self.break_responder_for(at, status);
                Answer::Refused(status)
            }
        }
    }

    /// A write or a read. `Ok(false)` if it needs a receive that is not there.
    fn access_memory(
        &mut self,
        at: QpRef,
        peer: QpRef,
        wqe: &Wqe,
        access: u32,
        mtu_bytes: u64,
    ) -> Result<bool, status::Type> {
        let place = self.remote_span(peer, wqe, access);
        let place = place.map_err(|_| status::IBV_WC_REM_ACCESS_ERR);
        if wqe.opcode == wr::IBV_WR_RDMA_READ {
            self.scatter(at, place?);
            return Ok(true);
        }
        if wqe.opcode == wr::IBV_WR_RDMA_WRITE {
            self.gather(at, wqe, [place?]);
            return Ok(true);
        }
        if self.receives(peer).is_none_or(|(_, queue)| queue.waiting() == 0) {
            // Only the last packet needs the receive: those before it are checked, and land.
            let landed = wqe.bytes.saturating_sub(1) / mtu_bytes * mtu_bytes;
            if landed > 0 {
                self.gather(at, wqe, [place?.first(landed)]);
            }
            return Ok(false);
        }
        self.gather(at, wqe, [place?]);
        if let Some(receive) = self.take_receive(peer) {
            self.arrived(peer, receive, wc::IBV_WC_RECV_RDMA_WITH_IMM, wqe);
        }
        Ok(true)
    }

    /// A message into a receive. `Ok(false)` if there is none.
    fn deliver(&mut self, at: QpRef, peer: QpRef, wqe: &Wqe) -> Result<bool, status::Type> {
        let world = &*self;
        let Some((pd, queue)) = world.receives(peer) else { return Ok(false) };
        let Some((_, sges)) = queue.front() else { return Ok(false) };
        let places = || sges.iter().map(|&sge| world.local_span(peer.device, pd, sge, LOCAL_WRITE));
        let room: Result<u64, Denied> = places().map(|place| Ok(place?.bytes())).sum();
        let refused = match room {
            // The receive itself is broken.
            Err(_) => Some((status::IBV_WC_REM_OP_ERR, status::IBV_WC_LOC_PROT_ERR)),
            Ok(room) if room < wqe.bytes => {
                Some(world.devices[peer.device].options.statuses.too_long())
            }
            Ok(_) => {
                world.gather(at, wqe, places().flatten());
                None
            }
        };
        let Some(receive) = self.take_receive(peer) else { return Ok(false) };
        if let Some((requester, receiver)) = refused {
            let vendor_err = VENDOR_ERR | receiver;
            let wc = Wc::failed(receive.wr_id, receiver, vendor_err, peer.qp_num);
            self.complete_receive(peer, wc, true);
            self.break_responder(at, peer);
            return Err(requester);
        }
        self.arrived(peer, receive, wc::IBV_WC_RECV, wqe);
        Ok(true)
    }

    /// The receives a QP takes from, and whose protection domain they are of.
    fn receives(&self, at: QpRef) -> Option<(u32, &ReceiveQueue)> {
        let qp = self.qp(at)?;
        match qp.srq {
            None => Some((qp.pd, &qp.rq)),
            Some(srq) => self.devices[at.device].srqs.get(srq).map(|srq| (srq.pd, &srq.queue)),
        }
    }

    /// Takes the oldest receive; a shared queue that falls below its limit says so, once (Linux,
    /// `drivers/infiniband/sw/rxe/rxe_resp.c`: `get_srq_wqe`).
    fn take_receive(&mut self, at: QpRef) -> Option<Receive> {
        let qp = self.qp_mut(at)?;
        let Some(number) = qp.srq else { return qp.rq.take() };
        let device = &mut self.devices[at.device];
        let srq = device.srqs.get_mut(number)?;
        let receive = srq.queue.take()?;
        if srq.queue.waiting() < u64::from(srq.limit) {
            srq.limit = 0;
            let context = srq.context;
            device.report(context, sys::IBV_EVENT_SRQ_LIMIT_REACHED, Element::Srq(number));
        }
        Some(receive)
    }

    fn arrived(&mut self, at: QpRef, receive: Receive, opcode: wc::Type, wqe: &Wqe) {
        let has_imm =
            matches!(wqe.opcode, wr::IBV_WR_RDMA_WRITE_WITH_IMM | wr::IBV_WR_SEND_WITH_IMM);
        let imm = has_imm.then_some(wqe.imm);
        let wc = Wc::received(receive.wr_id, opcode, wqe.bytes as u32, imm, at.qp_num);
        self.complete_receive(at, wc, wqe.is_solicited());
    }

    fn complete_receive(&mut self, at: QpRef, wc: Wc, solicited: bool) {
        let Some(qp) = self.qp(at) else { return };
        let slot = qp.srq.map_or(Slot::Receive, Slot::SharedReceive);
        self.complete(at, qp.recv_cq, wc, slot, solicited);
    }

    /// Breaks the peer of `at` if it is the peer that gives `status`. Where no receive has told it,
    /// an event does (Linux, `drivers/infiniband/hw/mlx5/qp.c`: `mlx5_ib_qp_event`).
    pub(crate) fn break_responder_for(&mut self, at: QpRef, status: status::Type) {
        let event = match status {
            status::IBV_WC_REM_ACCESS_ERR => sys::IBV_EVENT_QP_ACCESS_ERR,
            status::IBV_WC_REM_INV_REQ_ERR | status::IBV_WC_REM_OP_ERR => sys::IBV_EVENT_QP_REQ_ERR,
            _ => return,
        };
        // A peer that is broken already is out of reach.
        let Some(peer) = self.reach(at) else { return };
        if let Some(context) = self.qp(peer).map(|qp| qp.context) {
            self.devices[peer.device].report(context, event, Element::Qp(peer.qp_num));
        }
        self.break_responder(at, peer);
    }

    /// A QP that is its own peer is broken by its own completion, which comes first.
    fn break_responder(&mut self, at: QpRef, peer: QpRef) {
        if peer != at {
            self.enter_error(peer);
        }
    }

    /// The first bytes of a write that fails land all the same.
    pub(crate) fn land(&mut self, at: QpRef, wqe: &Wqe, bytes: u64) {
        let writes = matches!(wqe.opcode, wr::IBV_WR_RDMA_WRITE | wr::IBV_WR_RDMA_WRITE_WITH_IMM);
        if writes
            && bytes > 0
            && let Some(peer) = self.reach(at)
            && let Ok(place) = self.remote_span(peer, wqe, REMOTE_WRITE)
        {
            self.gather(at, wqe, [place.first(bytes)]);
        }
    }
}
