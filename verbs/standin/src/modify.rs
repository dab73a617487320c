//! `ibv_modify_qp`: which transitions there are, and what each needs.

use ibverbs_sys as sys;
use sys::ibv_qp_attr_mask as mask;
use sys::ibv_qp_state as qps;

use crate::execute::PSN_MASK;
use crate::options::UnknownRoute;
use crate::script::Call;
use crate::state::{QpRef, State};

/// `timeout` has 5 bits; `retry_cnt` and `rnr_retry` have 3.
const MAX_TIMEOUT: u8 = 31;
const MAX_RETRIES: u8 = 7;

struct Transition {
    from: qps::Type,
    to: qps::Type,
    required: u32,
    optional: u32,
}

const INIT: u32 = mask::IBV_QP_PKEY_INDEX.0 | mask::IBV_QP_PORT.0 | mask::IBV_QP_ACCESS_FLAGS.0;
const PATHS: u32 = mask::IBV_QP_ALT_PATH.0 | mask::IBV_QP_PATH_MIG_STATE.0;

/// Those of an RC QP, from Linux, `drivers/infiniband/core/verbs.c`: `qp_state_table`, which is
/// InfiniBand specification 10.3.1 and 11.2.5.2. To RESET and to ERR everything may go.
const TRANSITIONS: [Transition; 5] = [
    Transition { from: qps::IBV_QPS_RESET, to: qps::IBV_QPS_INIT, required: INIT, optional: 0 },
    Transition { from: qps::IBV_QPS_INIT, to: qps::IBV_QPS_INIT, required: 0, optional: INIT },
    Transition {
        from: qps::IBV_QPS_INIT,
        to: qps::IBV_QPS_RTR,
        required: mask::IBV_QP_AV.0
            | mask::IBV_QP_PATH_MTU.0
            | mask::IBV_QP_DEST_QPN.0
            | mask::IBV_QP_RQ_PSN.0
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC.0
            | mask::IBV_QP_MIN_RNR_TIMER.0,
        optional: mask::IBV_QP_ALT_PATH.0 | mask::IBV_QP_ACCESS_FLAGS.0 | mask::IBV_QP_PKEY_INDEX.0,
    },
    Transition {
        from: qps::IBV_QPS_RTR,
        to: qps::IBV_QPS_RTS,
        required: mask::IBV_QP_TIMEOUT.0
            | mask::IBV_QP_RETRY_CNT.0
            | mask::IBV_QP_RNR_RETRY.0
            | mask::IBV_QP_SQ_PSN.0
            | mask::IBV_QP_MAX_QP_RD_ATOMIC.0,
        optional: mask::IBV_QP_CUR_STATE.0
            | PATHS
            | mask::IBV_QP_ACCESS_FLAGS.0
            | mask::IBV_QP_MIN_RNR_TIMER.0,
    },
    Transition {
        from: qps::IBV_QPS_RTS,
        to: qps::IBV_QPS_RTS,
        required: 0,
        optional: mask::IBV_QP_CUR_STATE.0
            | PATHS
            | mask::IBV_QP_ACCESS_FLAGS.0
            | mask::IBV_QP_MIN_RNR_TIMER.0,
    },
];

/// Whether the transition exists and `given` fits it (Linux, as above: `ib_modify_qp_is_ok`).
fn is_ok(from: qps::Type, to: qps::Type, given: u32) -> bool {
    let given = given & !mask::IBV_QP_STATE.0;
    if matches!(to, qps::IBV_QPS_RESET | qps::IBV_QPS_ERR) {
        return given == 0;
    }
    let found = TRANSITIONS.iter().find(|row| row.from == from && row.to == to);
    found.is_some_and(|row| {
        given & row.required == row.required && given & !(row.required | row.optional) == 0
    })
}

impl State {
    /// Moves a QP to another state, or refuses and leaves it as it was.
    pub(crate) fn modify(
        &mut self,
        at: QpRef,
        attr: &sys::ibv_qp_attr,
        given: u32,
    ) -> Result<qps::Type, i32> {
        let has = |bit: sys::ibv_qp_attr_mask| given & bit.0 != 0;
        let from = self.qp(at).ok_or(libc::EINVAL)?.state;
        let to = if has(mask::IBV_QP_STATE) { attr.qp_state } else { from };
        self.kernel_call(at.device, Call::ModifyQp(to))?;
        if has(mask::IBV_QP_CUR_STATE) && attr.cur_qp_state != from {
            return Err(libc::EINVAL);
        }
        if !is_ok(from, to, given) {
            return Err(libc::EINVAL);
        }
        self.check_values(at, attr, given)?;
        let mut route = self.qp(at).and_then(|qp| qp.route);
        if has(mask::IBV_QP_AV) {
            route = self.route(at.device, &attr.ah_attr);
            let silent = self.devices[at.device].options.unknown_route == UnknownRoute::Silent;
            if route.is_none() && !silent {
                return Err(libc::EINVAL);
            }
        }
        match to {
            qps::IBV_QPS_RESET => self.reset(at),
            qps::IBV_QPS_ERR => self.enter_error(at),
            _ => {
                let Some(qp) = self.qp_mut(at) else { return Err(libc::EINVAL) };
                qp.state = to;
                qp.route = route;
                qp.set(attr, given);
            }
        }
        // A peer may have waited for this.
        self.push_along();
        Ok(to)
    }

    /// Whether the values given can be those of this device.
    fn check_values(&self, at: QpRef, attr: &sys::ibv_qp_attr, given: u32) -> Result<(), i32> {
        let has = |bit: sys::ibv_qp_attr_mask| given & bit.0 != 0;
        let device = &self.devices[at.device];
        let max_rd_atomic = device.options.limits.max_rd_atomic;
        let own_port = self.qp(at).map_or(0, |qp| qp.attr.port_num);
        let address_is_wrong = |address: &sys::ibv_ah_attr| {
            let Some(port) = device.port(address.port_num) else { return true };
            let sgid = device.gid(address.port_num, usize::from(address.grh.sgid_index));
            // A RoCE address has a GRH, or there is nothing to route by.
            address.port_num != own_port
                || (address.is_global == 0 && port.lid == 0)
                || (address.is_global != 0 && sgid.is_none())
        };
        let mtu_is_wrong = |mtu: sys::ibv_mtu| {
            let active = device.port(own_port).map_or(0, |port| port.active_mtu);
            !(sys::IBV_MTU_256..=active).contains(&mtu)
        };
        let wrong = [
            has(mask::IBV_QP_PORT) && device.port(attr.port_num).is_none(),
            has(mask::IBV_QP_PKEY_INDEX) && attr.pkey_index != 0,
            has(mask::IBV_QP_AV) && address_is_wrong(&attr.ah_attr),
            has(mask::IBV_QP_PATH_MTU) && mtu_is_wrong(attr.path_mtu),
            has(mask::IBV_QP_DEST_QPN) && attr.dest_qp_num > PSN_MASK,
            has(mask::IBV_QP_MAX_DEST_RD_ATOMIC) && attr.max_dest_rd_atomic > max_rd_atomic,
            has(mask::IBV_QP_MAX_QP_RD_ATOMIC) && attr.max_rd_atomic > max_rd_atomic,
            has(mask::IBV_QP_MIN_RNR_TIMER) && attr.min_rnr_timer > MAX_TIMEOUT,
            has(mask::IBV_QP_TIMEOUT) && attr.timeout > MAX_TIMEOUT,
            has(mask::IBV_QP_RETRY_CNT) && attr.retry_cnt > MAX_RETRIES,
            has(mask::IBV_QP_RNR_RETRY) && attr.rnr_retry > MAX_RETRIES,
        ];
        if wrong.contains(&true) { Err(libc::EINVAL) } else { Ok(()) }
    }
}

impl crate::qp::Qp {
    /// Takes over the values given. Of a PSN the upper bits are not there.
    fn set(&mut self, attr: &sys::ibv_qp_attr, given: u32) {
        let own = &mut self.attr;
        macro_rules! take {
            ($($bit:ident => $field:ident),* $(,)?) => { $(
                if given & mask::$bit.0 != 0 {
                    own.$field = attr.$field;
                }
            )* };
        }
        take! {
            IBV_QP_PKEY_INDEX => pkey_index,
            IBV_QP_PORT => port_num,
            IBV_QP_ACCESS_FLAGS => qp_access_flags,
            IBV_QP_AV => ah_attr,
            IBV_QP_PATH_MTU => path_mtu,
            IBV_QP_DEST_QPN => dest_qp_num,
            IBV_QP_RQ_PSN => rq_psn,
            IBV_QP_MAX_DEST_RD_ATOMIC => max_dest_rd_atomic,
            IBV_QP_MIN_RNR_TIMER => min_rnr_timer,
            IBV_QP_TIMEOUT => timeout,
            IBV_QP_RETRY_CNT => retry_cnt,
            IBV_QP_RNR_RETRY => rnr_retry,
            IBV_QP_SQ_PSN => sq_psn,
            IBV_QP_MAX_QP_RD_ATOMIC => max_rd_atomic,
        }
        if given & mask::IBV_QP_RQ_PSN.0 != 0 {
            self.rq_psn = attr.rq_psn & PSN_MASK;
        }
        if given & mask::IBV_QP_SQ_PSN.0 != 0 {
            self.sq_psn = attr.sq_psn & PSN_MASK;
        }
    }
}
