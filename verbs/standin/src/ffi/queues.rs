//! Shared receive queues and queue pairs.

use std::ffi::c_int;

use ibverbs_sys as sys;
use sys::ibv_qp_state as qps;

use super::{ContextHandle, code, pointer, refuse_in_use, wait_acknowledged};
use crate::device::{Element, Srq};
use crate::options::Limits;
use crate::qp::{Qp, Wait};
use crate::queue::{ReceiveQueue, SendQueue};
use crate::script::Call;
use crate::state::QpRef;

pub(super) unsafe extern "C" fn ibv_create_srq(
    pd: *mut sys::ibv_pd,
    init: *mut sys::ibv_srq_init_attr,
) -> *mut sys::ibv_srq {
    // SAFETY: the caller passes a domain of `ibv_alloc_pd`, whose context is open.
    let (context, pd_number) = unsafe { ((*pd).context, (*pd).handle) };
    // SAFETY: as above.
    let handle = unsafe { ContextHandle::of(context) };
    // SAFETY: the caller passes attributes.
    let (srq_context, attr) = unsafe { ((*init).srq_context, (*init).attr) };
    let mut state = handle.lock();
    pointer(state.kernel_call(handle.device, Call::CreateSrq).and_then(|()| {
        let device = &mut state.devices[handle.device];
        let limits = device.options.limits;
        let fits =
            (1..=limits.max_srq_wr).contains(&attr.max_wr) && attr.max_sge <= limits.max_srq_sge;
        if !fits {
            return Err(libc::EINVAL);
        }
        if device.srqs.alive() == limits.max_srq {
            return Err(libc::ENOMEM);
        }
        let number = device.srqs.insert(Srq {
            handle: 0,
            pd: pd_number,
            context: handle.number,
            queue: ReceiveQueue::new(attr.max_wr, attr.max_sge),
            limit: 0,
            unacked: 0,
        });
        // SAFETY: zeros are a valid mutex and condition, as on Linux pthread_mutex_init(3) and
        // pthread_cond_init(3) make them.
        let (mutex, cond) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let srq = sys::ibv_srq {
            context,
            srq_context,
            pd,
            handle: number,
            mutex,
            cond,
            events_completed: 0,
        };
        let srq = Box::into_raw(Box::new(srq));
        if let Some(queue) = device.srqs.get_mut(number) {
            queue.handle = srq.expose_provenance();
        }
        Ok(srq)
    }))
}

/// Only the limit can be changed; the depth is fixed.
pub(super) unsafe extern "C" fn ibv_modify_srq(
    srq: *mut sys::ibv_srq,
    attr: *mut sys::ibv_srq_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: the caller passes a queue of this module, whose context is open, and attributes.
    let (handle, number, limit) =
        unsafe { (ContextHandle::of((*srq).context), (*srq).handle, (*attr).srq_limit) };
    let mut state = handle.lock();
    let srq = state.devices[handle.device].srqs.get_mut(number);
    code(srq.filter(|_| mask.cast_unsigned() == sys::IBV_SRQ_LIMIT).ok_or(libc::EINVAL).and_then(
        |srq| {
            if limit as usize > srq.queue.depth() {
                return Err(libc::EINVAL);
            }
            srq.limit = limit;
            Ok(())
        },
    ))
}

pub(super) unsafe extern "C" fn ibv_query_srq(
    srq: *mut sys::ibv_srq,
    attr: *mut sys::ibv_srq_attr,
) -> c_int {
    // SAFETY: the caller passes a queue of this module, whose context is open.
    let (handle, number) = unsafe { (ContextHandle::of((*srq).context), (*srq).handle) };
    let state = handle.lock();
    let Some(srq) = state.devices[handle.device].srqs.get(number) else { return libc::EINVAL };
    let max_sge = srq.queue.max_sge() as u32;
    let filled =
        sys::ibv_srq_attr { max_wr: srq.queue.depth() as u32, max_sge, srq_limit: srq.limit };
    // SAFETY: the caller passes a place for attributes.
    unsafe { *attr = filled };
    0
}

pub(super) unsafe extern "C" fn ibv_destroy_srq(srq: *mut sys::ibv_srq) -> c_int {
    // SAFETY: the caller passes a queue of this module, whose context is open.
    let (handle, number) = unsafe { (ContextHandle::of((*srq).context), (*srq).handle) };
    let leave = || {
        let mut state = handle.lock();
        let qps = &state.devices[handle.device].qps;
        let in_use = qps.iter().any(|(_, qp)| qp.srq == Some(number));
        refuse_in_use(&mut state, in_use)?;
        let device = &mut state.devices[handle.device];
        device.forget_events(handle.number, Element::Srq(number));
        Ok(())
    };
    let result = leave().and_then(|()| {
        wait_acknowledged(&handle.shared, "a shared receive queue", |state| {
            state.devices[handle.device].srqs.get(number).map_or(0, |srq| srq.unacked)
        })?;
        handle.lock().devices[handle.device].srqs.remove(number);
        Ok(())
    });
    if result.is_ok() {
        // SAFETY: it was made of a box, and is not used after this.
        drop(unsafe { Box::from_raw(srq) });
    }
    code(result)
}

/// Whether a device grants these capacities. A QP with a shared receive queue has none of its own.
fn check_capacities(cap: &sys::ibv_qp_cap, limits: &Limits) -> Result<(), c_int> {
    let fits = (1..=limits.max_qp_wr).contains(&cap.max_send_wr)
        && cap.max_recv_wr <= limits.max_qp_wr
        && cap.max_send_sge <= limits.max_sge
        && cap.max_recv_sge <= limits.max_sge
        && cap.max_inline_data <= limits.max_inline_bytes;
    if fits { Ok(()) } else { Err(libc::EINVAL) }
}

pub(super) unsafe extern "C" fn ibv_create_qp(
    pd: *mut sys::ibv_pd,
    init: *mut sys::ibv_qp_init_attr,
) -> *mut sys::ibv_qp {
    // SAFETY: the caller passes a domain of `ibv_alloc_pd`, whose context is open.
    let (context, pd_number) = unsafe { ((*pd).context, (*pd).handle) };
    // SAFETY: as above.
    let handle = unsafe { ContextHandle::of(context) };
    // SAFETY: the caller passes attributes.
    let wanted = unsafe { *init };
    // SAFETY: the queues are null or of this module, and there.
    let (send_cq, recv_cq, srq) = unsafe {
        let cq = |cq: *mut sys::ibv_cq| cq.as_ref().map(|cq| cq.handle);
        (cq(wanted.send_cq), cq(wanted.recv_cq), wanted.srq.as_ref().map(|srq| srq.handle))
    };
    let mut state = handle.lock();
    pointer(state.kernel_call(handle.device, Call::CreateQp).and_then(|()| {
        let device = &mut state.devices[handle.device];
        let (Some(send_cq), Some(recv_cq)) = (send_cq, recv_cq) else { return Err(libc::EINVAL) };
        if wanted.qp_type != sys::ibv_qp_type::IBV_QPT_RC {
            return Err(libc::EOPNOTSUPP);
        }
        let mut cap = wanted.cap;
        if srq.is_some() {
            (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
        }
        check_capacities(&cap, &device.options.limits)?;
        if device.qps.alive() == device.options.limits.max_qp {
            return Err(libc::ENOMEM);
        }
        let qp_num = device.qps.insert(Box::new(Qp {
            handle: 0,
            context: handle.number,
            pd: pd_number,
            send_cq,
            recv_cq,
            srq,
            cap,
            signals_all: wanted.sq_sig_all != 0,
            state: qps::IBV_QPS_RESET,
            attr: sys::ibv_qp_attr::default(),
            route: None,
            sq_psn: 0,
            rq_psn: 0,
            sq: SendQueue::new(&cap),
            rq: ReceiveQueue::new(cap.max_recv_wr, cap.max_recv_sge),
            wait: Wait::No,
            is_held: false,
            is_noted: false,
            unacked: 0,
        }));
        // SAFETY: zeros are a valid mutex and condition, as on Linux pthread_mutex_init(3) and
        // pthread_cond_init(3) make them.
        let (mutex, cond) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let qp = Box::into_raw(Box::new(sys::ibv_qp {
            context,
            qp_context: wanted.qp_context,
            pd,
            send_cq: wanted.send_cq,
            recv_cq: wanted.recv_cq,
            srq: wanted.srq,
            handle: qp_num,
            qp_num,
            state: qps::IBV_QPS_RESET,
            qp_type: wanted.qp_type,
            mutex,
            cond,
            events_completed: 0,
        }));
        if let Some(queue) = device.qps.get_mut(qp_num) {
            queue.handle = qp.expose_provenance();
        }
        // SAFETY: the capacities granted go back to where the wanted ones were.
        unsafe { (*init).cap = cap };
        Ok(qp)
    }))
}

/// # Safety
/// `qp` must be of this module and there, and its context open.
unsafe fn place<'a>(qp: *mut sys::ibv_qp) -> (&'a ContextHandle, QpRef) {
    // SAFETY: as the caller promises.
    let (handle, qp_num) = unsafe { (ContextHandle::of((*qp).context), (*qp).qp_num) };
    (handle, QpRef { device: handle.device, qp_num })
}

pub(super) unsafe extern "C" fn ibv_modify_qp(
    qp: *mut sys::ibv_qp,
    attr: *mut sys::ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: the caller passes a QP that is there, and attributes.
    let ((handle, at), attr) = unsafe { (place(qp), &*attr) };
    let mut state = handle.lock();
    code(state.modify(at, attr, mask.cast_unsigned()).map(|to| {
        // SAFETY: as above; the lock is held, and callers may read but not write this field.
        unsafe { (*qp).state = to };
    }))
}

pub(super) unsafe extern "C" fn ibv_query_qp(
    qp: *mut sys::ibv_qp,
    attr: *mut sys::ibv_qp_attr,
    _mask: c_int,
    init: *mut sys::ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller passes a QP that is there.
    let (handle, at) = unsafe { place(qp) };
    let state = handle.lock();
    let Some(found) = state.qp(at).filter(|_| !state.devices[at.device].fatal) else {
        return libc::EIO;
    };
    let (qp_state, cap) = (found.state, found.cap);
    // SAFETY: the caller passes a QP that is there and two places.
    unsafe {
        *attr = found.attr;
        (*attr).qp_state = qp_state;
        (*attr).cur_qp_state = qp_state;
        (*attr).cap = cap;
        // Of the next packets, as drivers report them (Linux, `drivers/infiniband/hw/mlx5/qp.c`:
        // `query_qp_attr`).
        (*attr).sq_psn = found.sq_psn;
        (*attr).rq_psn = found.rq_psn;
        *init = sys::ibv_qp_init_attr {
            qp_context: (*qp).qp_context,
            send_cq: (*qp).send_cq,
            recv_cq: (*qp).recv_cq,
            srq: (*qp).srq,
            cap,
            qp_type: (*qp).qp_type,
            sq_sig_all: found.signals_all.into(),
        };
        (*qp).state = qp_state;
    }
    0
}

pub(super) unsafe extern "C" fn ibv_destroy_qp(qp: *mut sys::ibv_qp) -> c_int {
    // SAFETY: the caller passes a QP that is there.
    let (handle, at) = unsafe { place(qp) };
    let leave = || {
        let mut state = handle.lock();
        state.scripted(at.device, Call::DestroyQp)?;
        // From here on nothing arrives, and nothing leaves.
        state.reset(at);
        state.devices[at.device].forget_events(handle.number, Element::Qp(at.qp_num));
        Ok(())
    };
    let result = leave().and_then(|()| {
        wait_acknowledged(&handle.shared, "a queue pair", |state| {
            state.qp(at).map_or(0, |qp| qp.unacked)
        })?;
        let mut state = handle.lock();
        state.devices[at.device].qps.remove(at.qp_num);
        state.push_along();
        Ok(())
    });
    if result.is_ok() {
        // SAFETY: it was made of a box, and is not used after this.
        drop(unsafe { Box::from_raw(qp) });
    }
    code(result)
}
