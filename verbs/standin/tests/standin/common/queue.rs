//! A QP of a test.

use std::ffi::c_int;
use std::ops::Range;

use kvferry_verbs_standin::sys;
use sys::ibv_qp_attr_mask as bits;
use sys::ibv_qp_state as qps;
use sys::ibv_wr_opcode as wr;

use super::{EVERYTHING, Node, SIGNALED, Seen, errno};
use crate::common::c;

/// How a QP is made and connected.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub send_wr: u32,
    pub recv_wr: u32,
    pub send_psn: u32,
    pub recv_psn: u32,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub rnr_timer: u8,
    pub mtu: sys::ibv_mtu,
    pub access: u32,
    pub dest_rd_atomic: u8,
    pub gid_index: u8,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            send_wr: 16,
            recv_wr: 16,
            send_psn: 7,
            recv_psn: 7,
            timeout: 14,
            retry_cnt: 6,
            rnr_retry: 7,
            rnr_timer: 1,
            mtu: sys::IBV_MTU_1024,
            access: EVERYTHING,
            dest_rd_atomic: 16,
            gid_index: 3,
        }
    }
}

/// A QP of a host.
pub struct Queue<'n> {
    pub node: &'n Node<'n>,
    pub qp: *mut sys::ibv_qp,
    pub setup: Setup,
}

/// A request.
#[derive(Clone)]
pub struct Work {
    pub wr_id: u64,
    pub opcode: u32,
    pub flags: u32,
    pub sges: Vec<sys::ibv_sge>,
    pub remote_addr: u64,
    pub rkey: u32,
    pub imm: u32,
}

impl Work {
    pub fn imm(mut self, imm: u32) -> Self {
        self.opcode = match self.opcode {
            wr::IBV_WR_SEND => wr::IBV_WR_SEND_WITH_IMM,
            _ => wr::IBV_WR_RDMA_WRITE_WITH_IMM,
        };
        self.imm = imm;
        self
    }

    pub fn flags(mut self, flags: u32) -> Self {
        self.flags = flags;
        self
    }

    pub fn rkey(mut self, rkey: u32) -> Self {
        self.rkey = rkey;
        self
    }
}

impl<'n> Queue<'n> {
    pub fn new(node: &'n Node<'n>, setup: Setup) -> Self {
        Self::with(node, setup, node.cq, std::ptr::null_mut())
    }

    pub fn with(
        node: &'n Node<'n>,
        setup: Setup,
        cq: *mut sys::ibv_cq,
        srq: *mut sys::ibv_srq,
    ) -> Self {
        let mut init = init(cq, srq, setup);
        let qp = c!(node.net.verbs, ibv_create_qp(node.pd, &raw mut init));
        assert!(!qp.is_null(), "errno {}", errno());
        Self { node, qp, setup }
    }

    pub fn number(&self) -> u32 {
        // SAFETY: the QP is there.
        unsafe { (*self.qp).qp_num }
    }

    pub fn modify(&self, attr: &sys::ibv_qp_attr, mask: u32) -> c_int {
        let mut attr = *attr;
        c!(self.node.net.verbs, ibv_modify_qp(self.qp, &raw mut attr, mask.cast_signed()))
    }

    pub fn enter(&self, state: qps::Type) -> c_int {
        self.modify(
            &sys::ibv_qp_attr { qp_state: state, ..Default::default() },
            bits::IBV_QP_STATE.0,
        )
    }

    /// All attributes of every transition, to be chosen from by a mask.
    pub fn attributes(&self, peer: &Queue<'_>) -> sys::ibv_qp_attr {
        let mut dgid = sys::ibv_gid::default();
        let index = c_int::from(peer.setup.gid_index);
        let verbs = &self.node.net.verbs;
        assert_eq!(c!(verbs, ibv_query_gid(peer.node.context, 1, index, &raw mut dgid)), 0);
        let setup = self.setup;
        let grh = sys::ibv_global_route { dgid, sgid_index: setup.gid_index, ..Default::default() };
        let ah_attr = sys::ibv_ah_attr { grh, is_global: 1, port_num: 1, ..Default::default() };
        sys::ibv_qp_attr {
            port_num: 1,
            qp_access_flags: setup.access,
            ah_attr,
            path_mtu: setup.mtu,
            dest_qp_num: peer.number(),
            rq_psn: setup.recv_psn,
            sq_psn: setup.send_psn,
            max_dest_rd_atomic: setup.dest_rd_atomic,
            max_rd_atomic: 16,
            min_rnr_timer: setup.rnr_timer,
            timeout: setup.timeout,
            retry_cnt: setup.retry_cnt,
            rnr_retry: setup.rnr_retry,
            ..Default::default()
        }
    }

    /// From RESET to RTS.
    pub fn connect(&self, peer: &Queue<'_>) {
        self.connect_with(&self.attributes(peer));
    }

    pub fn connect_with(&self, attr: &sys::ibv_qp_attr) {
        for (state, mask) in
            [(qps::IBV_QPS_INIT, TO_INIT), (qps::IBV_QPS_RTR, TO_RTR), (qps::IBV_QPS_RTS, TO_RTS)]
        {
            let attr = sys::ibv_qp_attr { qp_state: state, ..*attr };
            assert_eq!(self.modify(&attr, mask | bits::IBV_QP_STATE.0), 0, "to state {state}");
        }
    }

    pub fn state(&self) -> qps::Type {
        let (mut attr, mut init) = (Default::default(), Default::default());
        let verbs = &self.node.net.verbs;
        let code = c!(verbs, ibv_query_qp(self.qp, &raw mut attr, 1, &raw mut init));
        assert_eq!(code, 0);
        attr.qp_state
    }

    fn work(&self, wr_id: u64, opcode: u32, own: Range<usize>) -> Work {
        let (sges, flags) = (vec![self.node.sge(own)], SIGNALED);
        Work { wr_id, opcode, flags, sges, remote_addr: 0, rkey: 0, imm: 0 }
    }

    /// A signaled write of own bytes to the same place of a peer's memory.
    pub fn write(&self, wr_id: u64, own: Range<usize>, peer: &Node<'_>) -> Work {
        let (remote_addr, rkey) = (peer.addr(own.start), peer.rkey());
        Work { remote_addr, rkey, ..self.work(wr_id, wr::IBV_WR_RDMA_WRITE, own) }
    }

    pub fn read(&self, wr_id: u64, own: Range<usize>, peer: &Node<'_>) -> Work {
        Work { opcode: wr::IBV_WR_RDMA_READ, ..self.write(wr_id, own, peer) }
    }

    pub fn send(&self, wr_id: u64, own: Range<usize>) -> Work {
        self.work(wr_id, wr::IBV_WR_SEND, own)
    }

    /// Posts a list; of a bad one its place in it and the error.
    pub fn post(&self, list: &[Work]) -> Result<(), (usize, c_int)> {
        let mut sges: Vec<_> = list.iter().map(|work| work.sges.clone()).collect();
        let mut requests: Vec<sys::ibv_send_wr> = Vec::new();
        for (work, sges) in list.iter().zip(&mut sges) {
            let mut request = sys::ibv_send_wr {
                wr_id: work.wr_id,
                sg_list: sges.as_mut_ptr(),
                num_sge: sges.len() as c_int,
                opcode: work.opcode,
                send_flags: work.flags,
                ..Default::default()
            };
            request.__bindgen_anon_1.imm_data = work.imm.to_be();
            request.wr.rdma.remote_addr = work.remote_addr;
            request.wr.rdma.rkey = work.rkey;
            requests.push(request);
        }
        let first = requests.as_mut_ptr();
        for index in 1..requests.len() {
            // SAFETY: both are inside the list, which is not moved any more.
            unsafe { (*first.add(index - 1)).next = first.add(index) };
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the QP and its context are there, and so is the list.
        let code =
            unsafe { (*(*self.qp).context).ops.post_send.unwrap()(self.qp, first, &raw mut bad) };
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the bad one is of the list.
        Err((usize::try_from(unsafe { bad.offset_from(first) }).unwrap(), code))
    }

    /// Posts receives of own memory; an empty range is none.
    pub fn receive(&self, wr_id: u64, own: Range<usize>) -> c_int {
        with_receive(self.node, wr_id, own, |receive, bad| {
            // SAFETY: the QP and its context are there.
            unsafe { (*(*self.qp).context).ops.post_recv.unwrap()(self.qp, receive, bad) }
        })
    }
}

impl Drop for Queue<'_> {
    fn drop(&mut self) {
        let code = c!(self.node.net.verbs, ibv_destroy_qp(self.qp));
        assert!(code == 0 || std::thread::panicking());
    }
}

pub const TO_INIT: u32 =
    bits::IBV_QP_PKEY_INDEX.0 | bits::IBV_QP_PORT.0 | bits::IBV_QP_ACCESS_FLAGS.0;
pub const TO_RTR: u32 = bits::IBV_QP_AV.0
    | bits::IBV_QP_PATH_MTU.0
    | bits::IBV_QP_DEST_QPN.0
    | bits::IBV_QP_RQ_PSN.0
    | bits::IBV_QP_MAX_DEST_RD_ATOMIC.0
    | bits::IBV_QP_MIN_RNR_TIMER.0;
pub const TO_RTS: u32 = bits::IBV_QP_TIMEOUT.0
    | bits::IBV_QP_RETRY_CNT.0
    | bits::IBV_QP_RNR_RETRY.0
    | bits::IBV_QP_SQ_PSN.0
    | bits::IBV_QP_MAX_QP_RD_ATOMIC.0;

pub fn init(cq: *mut sys::ibv_cq, srq: *mut sys::ibv_srq, setup: Setup) -> sys::ibv_qp_init_attr {
    sys::ibv_qp_init_attr {
        send_cq: cq,
        recv_cq: cq,
        srq,
        cap: sys::ibv_qp_cap {
            max_send_wr: setup.send_wr,
            max_recv_wr: setup.recv_wr,
            max_send_sge: 4,
            max_recv_sge: 2,
            max_inline_data: 64,
        },
        qp_type: sys::ibv_qp_type::IBV_QPT_RC,
        ..Default::default()
    }
}

pub fn with_receive(
    node: &Node<'_>,
    wr_id: u64,
    own: Range<usize>,
    post: impl FnOnce(*mut sys::ibv_recv_wr, *mut *mut sys::ibv_recv_wr) -> c_int,
) -> c_int {
    let num_sge = c_int::from(!own.is_empty());
    let mut sge = node.sge(own);
    let next = std::ptr::null_mut();
    let mut receive = sys::ibv_recv_wr { wr_id, next, sg_list: &raw mut sge, num_sge };
    let mut bad = std::ptr::null_mut();
    let code = post(&raw mut receive, &raw mut bad);
    assert!(code == 0 || bad == &raw mut receive);
    code
}

/// Two connected QPs.
pub fn connected<'n>(a: &'n Node<'n>, b: &'n Node<'n>) -> (Queue<'n>, Queue<'n>) {
    connected_as(a, b, Setup::default())
}

pub fn connected_as<'n>(a: &'n Node<'n>, b: &'n Node<'n>, setup: Setup) -> (Queue<'n>, Queue<'n>) {
    let (qa, qb) = (Queue::new(a, setup), Queue::new(b, setup));
    qa.connect(&qb);
    qb.connect(&qa);
    (qa, qb)
}

/// The statuses of completions by their `wr_id`.
pub fn statuses(seen: &[Seen]) -> Vec<(u64, u32)> {
    seen.iter().map(|seen| (seen.wr_id, seen.status)).collect()
}
