//! The data path: what `ibv_post_send`, `ibv_poll_cq` and their kin call through the table of a
//! context.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use ibverbs_sys as sys;
use sys::ibv_qp_state as qps;
use sys::ibv_wr_opcode as wr;

use super::ContextHandle;
use super::events::CqHandle;
use crate::cq::{Armed, Wc};
use crate::qp::Qp;
use crate::queue::{ReceiveQueue, Wqe};
use crate::script::Call;
use crate::state::QpRef;

pub(super) const OPS: sys::ibv_context_ops = sys::ibv_context_ops {
    poll_cq: Some(poll_cq),
    req_notify_cq: Some(req_notify_cq),
    post_srq_recv: Some(post_srq_recv),
    post_send: Some(post_send),
    post_recv: Some(post_recv),
    _compat_query_device: None,
    _compat_query_port: None,
    _compat_alloc_pd: None,
    _compat_dealloc_pd: None,
    _compat_reg_mr: None,
    _compat_rereg_mr: None,
    _compat_dereg_mr: None,
    alloc_mw: None,
    bind_mw: None,
    dealloc_mw: None,
    _compat_create_cq: None,
    _compat_cq_event: None,
    _compat_resize_cq: None,
    _compat_destroy_cq: None,
    _compat_create_srq: None,
    _compat_modify_srq: None,
    _compat_query_srq: None,
    _compat_destroy_srq: None,
    _compat_create_qp: None,
    _compat_query_qp: None,
    _compat_modify_qp: None,
    _compat_destroy_qp: None,
    _compat_create_ah: None,
    _compat_destroy_ah: None,
    _compat_attach_mcast: None,
    _compat_detach_mcast: None,
    _compat_async_event: None,
};

/// The gather or scatter list of a request.
///
/// # Safety
/// `list` must hold `length` entries, if that is more than none, during `'a`.
unsafe fn sges<'a>(list: *const sys::ibv_sge, length: c_int) -> Result<&'a [sys::ibv_sge], c_int> {
    match usize::try_from(length) {
        Ok(0) => Ok(&[]),
        // SAFETY: as the caller promises.
        Ok(length) => Ok(unsafe { std::slice::from_raw_parts(list, length) }),
        Err(_) => Err(libc::EINVAL),
    }
}

unsafe extern "C" fn post_send(
    qp: *mut sys::ibv_qp,
    list: *mut sys::ibv_send_wr,
    bad: *mut *mut sys::ibv_send_wr,
) -> c_int {
    // SAFETY: the caller passes a QP that is there, whose context is open.
    let (handle, qp_num) = unsafe { (ContextHandle::of((*qp).context), (*qp).qp_num) };
    let at = QpRef { device: handle.device, qp_num };
    let mut state = handle.lock();
    let mut next = list;
    let mut result = state.scripted(at.device, Call::PostSend);
    let Some(queue) = state.qp_mut(at) else { return libc::EINVAL };
    let is_broken = queue.state == qps::IBV_QPS_ERR;
    // SAFETY: the caller passes a list of requests that ends with null, and their lists with them.
    while let Some(request) = unsafe { next.as_ref() }.filter(|_| result.is_ok()) {
        // SAFETY: as above.
        result = unsafe { post_one(queue, request) };
        if result.is_ok() {
            next = request.next;
        }
    }
    // What stands before the bad one is posted.
    if is_broken {
        state.flush(at);
    } else {
        state.kick(at);
    }
    if let Err(error) = result {
        // SAFETY: the caller passes a place for the request that was not posted.
        unsafe { *bad = next };
        return error;
    }
    0
}

/// Posts a request, or says why not: `ENOMEM` where the queue is full (rdma-core,
/// `providers/mlx5/qp.c`: `mlx5_wq_overflow`), `EINVAL` where it can never be posted.
///
/// # Safety
/// The request's list must be what it says, and of an inline request the memory it names as well.
unsafe fn post_one(qp: &mut Qp, request: &sys::ibv_send_wr) -> Result<(), c_int> {
    if !matches!(qp.state, qps::IBV_QPS_RTS | qps::IBV_QPS_ERR) {
        return Err(libc::EINVAL);
    }
    if qp.sq.is_full() {
        return Err(libc::ENOMEM);
    }
    // SAFETY: as the caller promises.
    let sges = unsafe { sges(request.sg_list, request.num_sge) }?;
    // SAFETY: all fields of the unions are plain numbers, and which are meant depends on the opcode.
    let (imm, rdma) = unsafe { (request.__bindgen_anon_1.imm_data, request.wr.rdma) };
    let wqe = Wqe {
        wr_id: request.wr_id,
        opcode: request.opcode,
        flags: request.send_flags,
        imm,
        remote_addr: rdma.remote_addr,
        rkey: rdma.rkey,
        sges: sges.len() as u32,
        bytes: sges.iter().map(|sge| u64::from(sge.length)).sum(),
    };
    let is_known = matches!(
        wqe.opcode,
        wr::IBV_WR_RDMA_WRITE
            | wr::IBV_WR_RDMA_WRITE_WITH_IMM
            | wr::IBV_WR_RDMA_READ
            | wr::IBV_WR_SEND
            | wr::IBV_WR_SEND_WITH_IMM
    );
    let inline_fits = !wqe.is_inline()
        || (wqe.opcode != wr::IBV_WR_RDMA_READ && wqe.bytes <= u64::from(qp.cap.max_inline_data));
    if !is_known || !inline_fits || wqe.sges > qp.cap.max_send_sge {
        return Err(libc::EINVAL);
    }
    let mut room = qp.sq.push(wqe, sges);
    if wqe.is_inline() {
        for sge in sges {
            let from = std::ptr::with_exposed_provenance(sge.addr as usize);
            let (to, rest) = room.split_at_mut(sge.length as usize);
            // SAFETY: the caller promises this many bytes at that address; the queue's own memory
            // does not overlap with them.
            unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
            room = rest;
        }
    }
    Ok(())
}

/// Posts a list of receives.
///
/// # Safety
/// `list` must be a list of receives that ends with null, and `bad` a place for one of them.
unsafe fn post_receives(
    queue: &mut ReceiveQueue,
    list: *mut sys::ibv_recv_wr,
    bad: *mut *mut sys::ibv_recv_wr,
) -> c_int {
    let mut next = list;
    // SAFETY: as the caller promises.
    while let Some(receive) = unsafe { next.as_ref() } {
        // SAFETY: as the caller promises.
        let result = match unsafe { sges(receive.sg_list, receive.num_sge) } {
            Err(error) => Err(error),
            Ok(_) if queue.is_full() => Err(libc::ENOMEM),
            Ok(sges) if sges.len() > queue.max_sge() => Err(libc::EINVAL),
            Ok(sges) => {
                queue.push(receive.wr_id, sges);
                Ok(())
            }
        };
        if let Err(error) = result {
            // SAFETY: as the caller promises.
            unsafe { *bad = next };
            return error;
        }
        next = receive.next;
    }
    0
}

unsafe extern "C" fn post_recv(
    qp: *mut sys::ibv_qp,
    list: *mut sys::ibv_recv_wr,
    bad: *mut *mut sys::ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller passes a QP that is there, whose context is open.
    let (handle, qp_num) = unsafe { (ContextHandle::of((*qp).context), (*qp).qp_num) };
    let at = QpRef { device: handle.device, qp_num };
    let mut state = handle.lock();
    let scripted = state.scripted(at.device, Call::PostRecv).err();
    let Some(queue) = state.qp_mut(at) else { return libc::EINVAL };
    let is_broken = queue.state == qps::IBV_QPS_ERR;
    let takes_none = queue.srq.is_some() || queue.state == qps::IBV_QPS_RESET;
    if let Some(error) = scripted.or_else(|| takes_none.then_some(libc::EINVAL)) {
        // SAFETY: the caller passes a place for the receive that was not posted.
        unsafe { *bad = list };
        return error;
    }
    // SAFETY: the caller passes a list of receives that ends with null.
    let result = unsafe { post_receives(&mut queue.rq, list, bad) };
    if is_broken {
        state.flush(at);
    }
    state.push_along();
    result
}

unsafe extern "C" fn post_srq_recv(
    srq: *mut sys::ibv_srq,
    list: *mut sys::ibv_recv_wr,
    bad: *mut *mut sys::ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller passes a queue that is there, whose context is open.
    let (handle, number) = unsafe { (ContextHandle::of((*srq).context), (*srq).handle) };
    let mut state = handle.lock();
    if let Err(error) = state.scripted(handle.device, Call::PostRecv) {
        // SAFETY: the caller passes a place for the receive that was not posted.
        unsafe { *bad = list };
        return error;
    }
    let Some(srq) = state.devices[handle.device].srqs.get_mut(number) else {
        return libc::EINVAL;
    };
    // SAFETY: the caller passes a list of receives that ends with null.
    let result = unsafe { post_receives(&mut srq.queue, list, bad) };
    state.push_along();
    result
}

unsafe extern "C" fn poll_cq(cq: *mut sys::ibv_cq, room: c_int, to: *mut sys::ibv_wc) -> c_int {
    // SAFETY: the caller passes a CQ that is there, whose context is open.
    let queue = unsafe { &*cq.cast::<CqHandle>() };
    // SAFETY: as above.
    let handle = unsafe { ContextHandle::of(queue.ibv.context) };
    // The usual case, without the lock: there is nothing, and nothing to move along.
    if queue.ready.load(Ordering::Acquire) == 0 && !handle.shared.polls_matter() {
        return 0;
    }
    let mut state = handle.lock();
    if state.scripted(handle.device, Call::PollCq).is_err() {
        return -1;
    }
    state.poll_moves();
    let mut polled = 0;
    while polled < room
        && let Some(completion) = state.take_completion(handle.device, queue.ibv.handle)
    {
        // SAFETY: the caller passes room for this many; `Wc` has the layout of `ibv_wc`.
        unsafe { to.cast::<Wc>().add(polled as usize).write(completion) };
        polled += 1;
    }
    polled
}

/// Only completions that come after this call are reported, as the specification has it (InfiniBand
/// specification, 11.4.2.2): a caller has to poll once more.
unsafe extern "C" fn req_notify_cq(cq: *mut sys::ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller passes a CQ that is there, whose context is open.
    let (handle, number) = unsafe { (ContextHandle::of((*cq).context), (*cq).handle) };
    let mut state = handle.lock();
    if let Err(error) = state.scripted(handle.device, Call::ReqNotifyCq) {
        return error;
    }
    let Some(queue) = state.devices[handle.device].cqs.get_mut(number) else {
        return libc::EINVAL;
    };
    queue.armed = match queue.armed {
        Armed::Any => Armed::Any,
        Armed::No | Armed::Solicited if solicited_only == 0 => Armed::Any,
        Armed::No | Armed::Solicited => Armed::Solicited,
    };
    0
}
