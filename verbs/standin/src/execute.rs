//! The requester's side of a request: when it is sent, and what its answer means.

use std::time::{Duration, Instant};

use ibverbs_sys as sys;
use sys::ibv_wc_opcode as wc;
use sys::ibv_wc_status as status;
use sys::ibv_wr_opcode as wr;

use crate::cq::{Slot, Wc};
use crate::device::Route;
use crate::memory::{Denied, LOCAL_WRITE};
use crate::qp::{VENDOR_ERR, Wait};
use crate::queue::Wqe;
use crate::respond::Answer;
use crate::script::Fault;
use crate::state::{QpRef, State};

/// PSNs have 24 bits.
pub(crate) const PSN_MASK: u32 = 0xff_ffff;

/// `rnr_retry` that is not counted down (InfiniBand specification, 9.7.5.2.8).
const RETRY_FOR_EVER: u8 = 7;

/// The delays that a responder without a receive asks for, by `min_rnr_timer`, in microseconds
/// (InfiniBand specification, 9.7.5.2.8; Linux, `drivers/infiniband/sw/rxe/rxe_comp.c`:
/// `rnrnak_usec`).
const RNR_TIMER_US: [u64; 32] = [
    655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840,
    5120, 7680, 10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840, 245_760,
    327_680, 491_520,
];

impl State {
    /// Tries the next request of a QP; whether it was carried out or failed, so that the next one
    /// may be tried.
    pub(crate) fn run_one(&mut self, at: QpRef) -> bool {
        let device = &self.devices[at.device];
        let Some(qp) = device.qps.get(at.qp_num).filter(|_| !device.fatal) else { return false };
        if !qp.is_able() {
            return false;
        }
        let wqe = qp.sq.wqe(qp.sq.executed);
        if !self.rules.is_empty() && !qp.is_lost() && qp.sq.judged == qp.sq.executed {
            match self.judge(at, &wqe) {
                Some(Fault::Fail { status, vendor_err, landed_bytes }) => {
                    self.land(at, &wqe, landed_bytes);
                    self.break_responder_for(at, status);
                    self.fail(at, status, vendor_err);
                    return true;
                }
                Some(Fault::LoseAnswer) => {
                    let until = self.retry_end(at);
                    self.set_wait(at, Wait::LostAnswer { until });
                }
                None => {}
            }
        }
        let answer = match self.check_local(at, &wqe) {
            Ok(()) => self.respond(at, &wqe),
            Err(status) => Answer::NotSent(status),
        };
        self.hear(at, &wqe, answer)
    }

    /// Asks the scripts, once, about the next request of a QP.
    fn judge(&mut self, at: QpRef, wqe: &Wqe) -> Option<Fault> {
        if let Some(qp) = self.qp_mut(at) {
            qp.sq.judged += 1;
        }
        self.fault_of(at, wqe)
    }

    /// What the requester makes of an answer to its next request. Once one answer is lost, it hears
    /// no other.
    fn hear(&mut self, at: QpRef, wqe: &Wqe, answer: Answer) -> bool {
        let Some(qp) = self.qp(at) else { return false };
        let (wait, is_lost) = (qp.wait, qp.is_lost());
        if matches!(answer, Answer::Done) {
            self.advance(at, wqe, is_lost);
            self.give_up_if_late(at, Instant::now);
            return true;
        }
        match answer {
            Answer::Done => {}
            _ if is_lost => {}
            Answer::Refused(status) | Answer::NotSent(status) => {
                self.fail(at, status, VENDOR_ERR | status);
                return true;
            }
            Answer::Silence if matches!(wait, Wait::Answer { .. }) => {}
            Answer::NoReceive if matches!(wait, Wait::Receive { .. }) => {}
            Answer::Silence => {
                let until = self.retry_end(at);
                self.set_wait(at, Wait::Answer { until });
            }
            Answer::NoReceive => {
                let until = self.rnr_end(at);
                self.set_wait(at, Wait::Receive { until });
            }
        }
        self.give_up_if_late(at, Instant::now);
        false
    }

    fn set_wait(&mut self, at: QpRef, wait: Wait) {
        if let Some(qp) = self.qp_mut(at) {
            qp.wait = wait;
        }
    }

    /// The next request was carried out.
    fn advance(&mut self, at: QpRef, wqe: &Wqe, answer_is_lost: bool) {
        let Some(qp) = self.qp_mut(at) else { return };
        let position = qp.sq.executed;
        qp.sq_psn = (qp.sq_psn + qp.packets(wqe.bytes)) & PSN_MASK;
        qp.sq.executed += 1;
        qp.sq.judged = qp.sq.executed;
        if answer_is_lost {
            return;
        }
        qp.sq.answered = qp.sq.executed;
        qp.wait = Wait::No;
        if qp.signals_all || wqe.is_signaled() {
            let (opcode, bytes) = match wqe.opcode {
                wr::IBV_WR_RDMA_READ => (wc::IBV_WC_RDMA_READ, Some(wqe.bytes as u32)),
                wr::IBV_WR_SEND | wr::IBV_WR_SEND_WITH_IMM => (wc::IBV_WC_SEND, None),
                _ => (wc::IBV_WC_RDMA_WRITE, None),
            };
            let cq = qp.send_cq;
            let wc = Wc::sent(wqe.wr_id, opcode, bytes, at.qp_num);
            self.complete(at, cq, wc, Slot::Send(position), false);
        }
    }

    /// Whether the request's own memory may be used as it wants to.
    fn check_local(&self, at: QpRef, wqe: &Wqe) -> Result<(), status::Type> {
        let Some(qp) = self.qp(at) else { return Ok(()) };
        let options = &self.devices[at.device].options;
        if wqe.bytes > u64::from(options.limits.max_message_bytes) {
            return Err(status::IBV_WC_LOC_LEN_ERR);
        }
        if wqe.is_inline() {
            return Ok(());
        }
        let access = if wqe.opcode == wr::IBV_WR_RDMA_READ { LOCAL_WRITE } else { 0 };
        for &sge in qp.sq.sges(qp.sq.executed) {
            self.local_span(at.device, qp.pd, sge, access).map_err(|denied| match denied {
                Denied::Key => options.statuses.unknown_local_key(),
                Denied::Range => options.statuses.local_range(),
            })?;
        }
        Ok(())
    }

    /// The QP that a request of `at` arrives at. Not there: a port is down, nobody has the address or
    /// the number, or whoever has it takes the packet for somebody else's.
    pub(crate) fn reach(&self, at: QpRef) -> Option<QpRef> {
        let qp = self.qp(at)?;
        let route = qp.route?;
        let peer_at = QpRef { device: route.device, qp_num: qp.attr.dest_qp_num };
        let peer = self.qp(peer_at)?;
        let back = peer.route?;
        let ports_are_up = self.devices[at.device].port_is_up(qp.attr.port_num)
            && self.devices[route.device].port_is_up(route.port);
        let is_expected = peer.is_connected()
            && peer.attr.port_num == route.port
            && peer.attr.dest_qp_num == at.qp_num
            && back == Route { device: at.device, port: qp.attr.port_num, ..route }
            && peer.rq_psn == qp.sq_psn;
        (ports_are_up && is_expected).then_some(peer_at)
    }

    /// Until when a request of `at` is sent again while nothing answers.
    fn retry_end(&self, at: QpRef) -> Option<Instant> {
        let options = &self.devices[at.device].options;
        let attr = &self.qp(at)?.attr;
        let ends = attr.timeout != 0 && !options.statuses.retries_for_ever(attr.retry_cnt);
        ends.then(|| Instant::now() + options.retry_delay)
    }

    /// Until when a request of `at` is sent again while its peer has no receive.
    fn rnr_end(&self, at: QpRef) -> Option<Instant> {
        let retries = self.qp(at)?.attr.rnr_retry;
        let timer = self.qp(self.reach(at)?)?.attr.min_rnr_timer;
        let delay = Duration::from_micros(RNR_TIMER_US[usize::from(timer & 31)]);
        (retries != RETRY_FOR_EVER).then(|| Instant::now() + delay * u32::from(retries))
    }
}
