//! Scripts: what goes wrong, and when.

use std::ops::Range;

use ibverbs_sys as sys;

use crate::qp::VENDOR_ERR;
use crate::queue::Wqe;
use crate::state::{QpRef, State};

/// Which requests a script is about: those that every condition fits, counted in the order in which
/// they start to execute.
#[derive(Debug, Clone)]
pub struct Pick {
    device: Option<usize>,
    qp_num: Option<u32>,
    opcode: Option<sys::ibv_wr_opcode::Type>,
    remote: Option<Range<u64>>,
    skip: u64,
    times: u64,
}

impl Pick {
    /// The next request of any QP.
    #[must_use]
    pub const fn any() -> Self {
        Self { device: None, qp_num: None, opcode: None, remote: None, skip: 0, times: 1 }
    }

    /// Posted on this device.
    #[must_use]
    pub const fn device(mut self, device: usize) -> Self {
        self.device = Some(device);
        self
    }

    /// Posted on the QP of this number. Numbers are a device's own: name the device, too.
    #[must_use]
    pub const fn qp(mut self, qp_num: u32) -> Self {
        self.qp_num = Some(qp_num);
        self
    }

    /// Of this opcode.
    #[must_use]
    pub const fn opcode(mut self, opcode: sys::ibv_wr_opcode::Type) -> Self {
        self.opcode = Some(opcode);
        self
    }

    /// Writing to or reading from any of these remote addresses.
    #[must_use]
    pub const fn touching(mut self, remote: Range<u64>) -> Self {
        self.remote = Some(remote);
        self
    }

    /// Not the first that fits but the `n`-th, from 1.
    #[must_use]
    pub const fn nth(mut self, n: u64) -> Self {
        self.skip = n.saturating_sub(1);
        self
    }

    /// And the ones after it, `times` in all.
    #[must_use]
    pub const fn times(mut self, times: u64) -> Self {
        self.times = times;
        self
    }

    fn fits(&self, at: QpRef, wqe: &Wqe) -> bool {
        let end = wqe.remote_addr.saturating_add(wqe.bytes);
        self.device.is_none_or(|device| device == at.device)
            && self.qp_num.is_none_or(|qp_num| qp_num == at.qp_num)
            && self.opcode.is_none_or(|opcode| opcode == wqe.opcode)
            && self
                .remote
                .as_ref()
                .is_none_or(|remote| wqe.remote_addr < remote.end && remote.start < end)
    }
}

/// What becomes of a request that a script picked.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// It completes with this status, and its QP breaks. With a status that a responder gives
    /// (`REM_*`) the peer's QP breaks, too.
    Fail {
        /// `IBV_WC_*`. `IBV_WC_WR_FLUSH_ERR` is a device that reports nothing but consequences, as
        /// Soft-RoCE of Linux 6.12 was recorded to do (see [`Statuses`](crate::Statuses)).
        status: sys::ibv_wc_status::Type,
        /// The driver's own number for it.
        vendor_err: u32,
        /// How many bytes of a write land all the same: a message of many packets can break in its
        /// middle (InfiniBand specification, 9.9.3).
        landed_bytes: u64,
    },
    /// It arrives and is carried out, and so are the requests behind it; but its answer and all
    /// later ones are lost. After `retry_delay` it completes with `RETRY_EXC_ERR` and those behind
    /// it are flushed, though their bytes have landed (InfiniBand specification, 9.7.6.1.3: the
    /// requester cannot tell a lost request from a lost acknowledgement).
    LoseAnswer,
}

impl Fault {
    /// Fails with `status` and [`VENDOR_ERR`], and nothing lands.
    #[must_use]
    pub const fn fail(status: sys::ibv_wc_status::Type) -> Self {
        Self::Fail { status, vendor_err: VENDOR_ERR | status, landed_bytes: 0 }
    }
}

/// Names a rule of a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleId(pub(crate) usize);

#[derive(Debug)]
pub(crate) struct Rule {
    pick: Pick,
    fault: Fault,
    seen: u64,
    pub(crate) fired: u64,
}

impl Rule {
    pub(crate) const fn new(pick: Pick, fault: Fault) -> Self {
        Self { pick, fault, seen: 0, fired: 0 }
    }
}

/// A function of the library that a script can make fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// `ibv_open_device`.
    OpenDevice,
    /// `ibv_query_device`.
    QueryDevice,
    /// `ibv_query_port`.
    QueryPort,
    /// `ibv_alloc_pd`.
    AllocPd,
    /// `ibv_reg_mr` and its kin. `ENOMEM`: no more memory may be locked; `EFAULT`: the memory cannot
    /// be pinned, as that of a GPU without peer memory (Linux, `drivers/infiniband/core/umem.c`:
    /// `ib_umem_get`).
    RegMr,
    /// `ibv_reg_dmabuf_mr`. `EOPNOTSUPP`: the driver cannot (Linux,
    /// `drivers/infiniband/core/uverbs_std_types_mr.c`; recorded of Soft-RoCE on Linux 6.1, 6.12 and
    /// 7.3); `EINVAL`: this buffer cannot be reached from this device.
    RegDmabufMr,
    /// `ibv_dereg_mr`.
    DeregMr,
    /// `ibv_create_comp_channel`.
    CreateCompChannel,
    /// `ibv_create_cq`.
    CreateCq,
    /// `ibv_create_srq`.
    CreateSrq,
    /// `ibv_create_qp`.
    CreateQp,
    /// `ibv_modify_qp` to this state. `EINVAL`, `ENETUNREACH` or `ETIMEDOUT` to RTR: the address
    /// cannot be resolved (Linux, `drivers/infiniband/core/addr.c`).
    ModifyQp(sys::ibv_qp_state::Type),
    /// `ibv_destroy_qp`.
    DestroyQp,
    /// `ibv_post_send`: the first request of the list is the bad one.
    PostSend,
    /// `ibv_post_recv`, `ibv_post_srq_recv`.
    PostRecv,
    /// `ibv_poll_cq`, which then returns a negative number.
    PollCq,
    /// `ibv_req_notify_cq`.
    ReqNotifyCq,
}

#[derive(Debug)]
pub(crate) struct CallRule {
    pub(crate) device: usize,
    pub(crate) call: Call,
    pub(crate) errno: i32,
    pub(crate) skip: u64,
    pub(crate) times: u64,
}

impl State {
    /// What a script has for a request that starts to execute.
    pub(crate) fn fault_of(&mut self, at: QpRef, wqe: &Wqe) -> Option<Fault> {
        let mut found = None;
        for rule in self.rules.iter_mut().filter(|rule| rule.pick.fits(at, wqe)) {
            rule.seen += 1;
            let due = rule.seen > rule.pick.skip && rule.fired < rule.pick.times;
            if due && found.is_none() {
                rule.fired += 1;
                found = Some(rule.fault);
            }
        }
        found
    }

    /// Fails if a script says so of this call.
    pub(crate) fn scripted(&mut self, device: usize, call: Call) -> Result<(), i32> {
        for rule in self.call_rules.iter_mut().filter(|r| r.device == device && r.call == call) {
            if rule.skip > 0 {
                rule.skip -= 1;
            } else if rule.times > 0 {
                rule.times -= 1;
                return Err(rule.errno);
            }
        }
        Ok(())
    }

    /// The same for a call that the kernel serves: once the device is gone, it fails with `EIO`
    /// (Linux, `drivers/infiniband/core/uverbs_main.c`).
    pub(crate) fn kernel_call(&mut self, device: usize, call: Call) -> Result<(), i32> {
        self.scripted(device, call)?;
        if self.devices[device].fatal { Err(libc::EIO) } else { Ok(()) }
    }
}
