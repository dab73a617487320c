//! Completion channels, completion queues, and events of both kinds.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use ibverbs_sys as sys;
use rustix::event::{EventfdFlags, eventfd};

use super::{
    ContextHandle, code, pointer, refuse_in_use, set_errno, wait_acknowledged, wait_readable,
};
use crate::cq::{Channel, Cq};
use crate::device::{Element, Event, silence};
use crate::script::Call;
use crate::state::State;

#[repr(C)]
struct ChannelHandle {
    ibv: sys::ibv_comp_channel,
    number: u32,
}

/// A CQ, as C sees it, with a look at how full it is.
#[repr(C)]
pub(super) struct CqHandle {
    pub(super) ibv: sys::ibv_cq,
    pub(super) ready: Arc<AtomicU32>,
}

pub(super) unsafe extern "C" fn ibv_create_comp_channel(
    context: *mut sys::ibv_context,
) -> *mut sys::ibv_comp_channel {
    // SAFETY: the caller passes an open context.
    let handle = unsafe { ContextHandle::of(context) };
    let mut state = handle.lock();
    pointer(state.kernel_call(handle.device, Call::CreateCompChannel).and_then(|()| {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| error.raw_os_error())?;
        let ibv = sys::ibv_comp_channel { context, fd: fd.as_raw_fd(), refcnt: 0 };
        let channel = Channel { context: handle.number, fd, events: VecDeque::new(), cqs: 0 };
        let number = state.devices[handle.device].channels.insert(channel);
        Ok(Box::into_raw(Box::new(ChannelHandle { ibv, number })).cast())
    }))
}

pub(super) unsafe extern "C" fn ibv_destroy_comp_channel(
    channel: *mut sys::ibv_comp_channel,
) -> c_int {
    // SAFETY: the caller passes a channel of this module, whose context is open.
    let (handle, number) = unsafe {
        (ContextHandle::of((*channel).context), (*channel.cast::<ChannelHandle>()).number)
    };
    let mut state = handle.lock();
    let channels = &state.devices[handle.device].channels;
    let in_use = channels.get(number).is_some_and(|channel| channel.cqs > 0);
    if let Err(error) = refuse_in_use(&mut state, in_use) {
        return error;
    }
    state.devices[handle.device].channels.remove(number);
    // SAFETY: it was made of a box, and is not used after this.
    drop(unsafe { Box::from_raw(channel.cast::<ChannelHandle>()) });
    0
}

pub(super) unsafe extern "C" fn ibv_create_cq(
    context: *mut sys::ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut sys::ibv_comp_channel,
    comp_vector: c_int,
) -> *mut sys::ibv_cq {
    // SAFETY: the caller passes an open context.
    let handle = unsafe { ContextHandle::of(context) };
    // SAFETY: the caller passes null or a channel of this module.
    let channel_number = unsafe { channel.cast::<ChannelHandle>().as_ref() }.map(|c| c.number);
    let mut state = handle.lock();
    pointer(state.kernel_call(handle.device, Call::CreateCq).and_then(|()| {
        let device = &mut state.devices[handle.device];
        let limits = device.options.limits;
        let depth = u32::try_from(cqe).ok().filter(|depth| (1..=limits.max_cqe).contains(depth));
        let depth = depth.filter(|_| comp_vector == 0).ok_or(libc::EINVAL)?;
        if device.cqs.alive() == limits.max_cq {
            return Err(libc::ENOMEM);
        }
        let queue = Cq::new(handle.number, channel_number, depth as usize);
        let ready = Arc::clone(queue.ready());
        let number = device.cqs.insert(queue);
        // SAFETY: zeros are a valid mutex and condition, as on Linux pthread_mutex_init(3) and
        // pthread_cond_init(3) make them.
        let (mutex, cond) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let ibv = sys::ibv_cq {
            context,
            channel,
            cq_context,
            handle: number,
            cqe,
            mutex,
            cond,
            comp_events_completed: 0,
            async_events_completed: 0,
        };
        let cq = Box::into_raw(Box::new(CqHandle { ibv, ready }));
        if let Some(queue) = device.cqs.get_mut(number) {
            queue.handle = cq.expose_provenance();
        }
        if let Some(channel) = channel_number.and_then(|number| device.channels.get_mut(number)) {
            channel.cqs += 1;
        }
        Ok(cq.cast())
    }))
}

pub(super) unsafe extern "C" fn ibv_destroy_cq(cq: *mut sys::ibv_cq) -> c_int {
    // SAFETY: the caller passes a CQ of this module, whose context is open.
    let (handle, number) = unsafe { (ContextHandle::of((*cq).context), (*cq).handle) };
    let result = leave_cq(handle, number).and_then(|channel| {
        wait_acknowledged(&handle.shared, "a completion queue", |state| {
            let queue = state.devices[handle.device].cqs.get(number);
            queue.map_or(0, |queue| queue.unacked_completions + queue.unacked_async)
        })?;
        let mut state = handle.lock();
        let device = &mut state.devices[handle.device];
        device.cqs.remove(number);
        if let Some(channel) = channel.and_then(|channel| device.channels.get_mut(channel)) {
            channel.cqs -= 1;
        }
        Ok(())
    });
    if result.is_ok() {
        // SAFETY: it was made of a box, and is not used after this.
        drop(unsafe { Box::from_raw(cq.cast::<CqHandle>()) });
    }
    code(result)
}

/// A CQ reports nothing more; the channel it reported to.
fn leave_cq(handle: &ContextHandle, number: u32) -> Result<Option<u32>, c_int> {
    let mut state = handle.lock();
    let device = &state.devices[handle.device];
    let in_use = device.qps.iter().any(|(_, qp)| [qp.send_cq, qp.recv_cq].contains(&number));
    refuse_in_use(&mut state, in_use)?;
    let device = &mut state.devices[handle.device];
    device.forget_events(handle.number, Element::Cq(number));
    let Some(queue) = device.cqs.get_mut(number) else { return Ok(None) };
    let channel_number = queue.channel.take();
    if let Some(channel) = channel_number.and_then(|number| device.channels.get_mut(number)) {
        let before = channel.events.len();
        channel.events.retain(|&cq| cq != number);
        if before > 0 && channel.events.is_empty() {
            silence(&channel.fd);
        }
    }
    Ok(channel_number)
}

pub(super) unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut sys::ibv_comp_channel,
    cq: *mut *mut sys::ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller passes a channel of this module, whose context is open.
    let (handle, number, fd) = unsafe {
        let number = (*channel.cast::<ChannelHandle>()).number;
        // SAFETY: the descriptor is open as long as the channel.
        (ContextHandle::of((*channel).context), number, BorrowedFd::borrow_raw((*channel).fd))
    };
    let taken = loop {
        if let Some(event) = take_cq_event(&mut handle.lock(), handle.device, number) {
            break event;
        }
        if let Err(error) = wait_readable(fd) {
            set_errno(error);
            return -1;
        }
    };
    let found = std::ptr::with_exposed_provenance_mut::<sys::ibv_cq>(taken);
    // SAFETY: a CQ is there until its events were acknowledged; the caller passes two places.
    unsafe {
        *cq = found;
        *cq_context = (*found).cq_context;
    }
    0
}

/// The address of the CQ of the next event.
fn take_cq_event(state: &mut State, device: usize, channel: u32) -> Option<usize> {
    let device = &mut state.devices[device];
    let channel = device.channels.get_mut(channel)?;
    let number = channel.events.pop_front()?;
    if channel.events.is_empty() {
        silence(&channel.fd);
    }
    let queue = device.cqs.get_mut(number)?;
    queue.unacked_completions += 1;
    Some(queue.handle)
}

pub(super) unsafe extern "C" fn ibv_ack_cq_events(cq: *mut sys::ibv_cq, events: c_uint) {
    // SAFETY: the caller passes a CQ of this module, whose context is open.
    let (handle, number) = unsafe { (ContextHandle::of((*cq).context), (*cq).handle) };
    if let Some(queue) = handle.lock().devices[handle.device].cqs.get_mut(number) {
        queue.unacked_completions = queue.unacked_completions.saturating_sub(events);
    }
    handle.shared.acknowledged.notify_all();
}

pub(super) unsafe extern "C" fn ibv_get_async_event(
    context: *mut sys::ibv_context,
    event: *mut sys::ibv_async_event,
) -> c_int {
    // SAFETY: the caller passes an open context.
    let handle = unsafe { ContextHandle::of(context) };
    // SAFETY: the descriptor is open as long as the context.
    let fd = unsafe { BorrowedFd::borrow_raw(handle.ibv.async_fd) };
    let taken = loop {
        if let Some(event) = take_async_event(&mut handle.lock(), handle.device, handle.number) {
            break event;
        }
        if let Err(error) = wait_readable(fd) {
            set_errno(error);
            return -1;
        }
    };
    // SAFETY: the caller passes a place for an event.
    unsafe { *event = taken };
    0
}

fn take_async_event(
    state: &mut State,
    device: usize,
    context: u32,
) -> Option<sys::ibv_async_event> {
    let device = &mut state.devices[device];
    let context = device.contexts.get_mut(context)?;
    let Event { kind, element } = context.events.pop_front()?;
    if context.events.is_empty() {
        silence(&context.async_fd);
    }
    if let Some(unacked) = device.unacked(element) {
        *unacked += 1;
    }
    let mut event = sys::ibv_async_event { event_type: kind, ..Default::default() };
    let at = std::ptr::with_exposed_provenance_mut::<c_void>;
    match element {
        Element::Port(port) => event.element.port_num = port.into(),
        Element::Cq(cq) => event.element.cq = at(device.cqs.get(cq)?.handle).cast(),
        Element::Srq(srq) => event.element.srq = at(device.srqs.get(srq)?.handle).cast(),
        Element::Qp(qp) => event.element.qp = at(device.qps.get(qp)?.handle).cast(),
    }
    Some(event)
}

pub(super) unsafe extern "C" fn ibv_ack_async_event(event: *mut sys::ibv_async_event) {
    // SAFETY: the caller passes an event of `ibv_get_async_event`; what it is about is there until
    // the event was acknowledged, and its kind says which field of the union is set.
    let (context, element) = unsafe {
        let element = (*event).element;
        match (*event).event_type {
            sys::IBV_EVENT_CQ_ERR => ((*element.cq).context, Element::Cq((*element.cq).handle)),
            sys::IBV_EVENT_QP_FATAL
            | sys::IBV_EVENT_QP_REQ_ERR
            | sys::IBV_EVENT_QP_ACCESS_ERR
            | sys::IBV_EVENT_QP_LAST_WQE_REACHED => {
                ((*element.qp).context, Element::Qp((*element.qp).qp_num))
            }
            sys::IBV_EVENT_SRQ_LIMIT_REACHED => {
                ((*element.srq).context, Element::Srq((*element.srq).handle))
            }
            _ => return,
        }
    };
    // SAFETY: an object's context is open as long as it is there.
    let handle = unsafe { ContextHandle::of(context) };
    if let Some(unacked) = handle.lock().devices[handle.device].unacked(element) {
        *unacked = unacked.saturating_sub(1);
    }
    handle.shared.acknowledged.notify_all();
}
