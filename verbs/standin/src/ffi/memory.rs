//! Protection domains and memory regions.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;

use ibverbs_sys as sys;

use super::{ContextHandle, code, pointer, refuse_in_use};
use crate::device::Pd;
use crate::memory::{Mapping, Mr, check_access, is_mapped, page_bytes};
use crate::script::Call;

pub(super) unsafe extern "C" fn ibv_alloc_pd(context: *mut sys::ibv_context) -> *mut sys::ibv_pd {
    // SAFETY: the caller passes an open context.
    let handle = unsafe { ContextHandle::of(context) };
    let mut state = handle.lock();
    pointer(state.kernel_call(handle.device, Call::AllocPd).and_then(|()| {
        let device = &mut state.devices[handle.device];
        if device.pds.alive() == device.options.limits.max_pd {
            return Err(libc::ENOMEM);
        }
        let number = device.pds.insert(Pd { context: handle.number });
        Ok(Box::into_raw(Box::new(sys::ibv_pd { context, handle: number })))
    }))
}

pub(super) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut sys::ibv_pd) -> c_int {
    // SAFETY: the caller passes a domain of `ibv_alloc_pd`, whose context is open.
    let (handle, number) = unsafe { (ContextHandle::of((*pd).context), (*pd).handle) };
    let mut state = handle.lock();
    let device = &state.devices[handle.device];
    let in_use = device.mrs.iter().any(|(_, mr)| mr.pd == number)
        || device.qps.iter().any(|(_, qp)| qp.pd == number)
        || device.srqs.iter().any(|(_, srq)| srq.pd == number);
    if let Err(error) = refuse_in_use(&mut state, in_use) {
        return error;
    }
    state.devices[handle.device].pds.remove(number);
    // SAFETY: `ibv_alloc_pd` made it of a box, and it is not used after this.
    drop(unsafe { Box::from_raw(pd) });
    0
}

pub(super) unsafe extern "C" fn ibv_reg_mr(
    pd: *mut sys::ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut sys::ibv_mr {
    let iova = addr.addr() as u64;
    // SAFETY: as the caller promises; this is what the library does, too (rdma-core,
    // `libibverbs/verbs.c`: `ibv_reg_mr`).
    unsafe { ibv_reg_mr_iova2(pd, addr, length, iova, access.cast_unsigned()) }
}

pub(super) unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut sys::ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut sys::ibv_mr {
    // SAFETY: as the caller promises.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, iova, access.cast_unsigned()) }
}

pub(super) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut sys::ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut sys::ibv_mr {
    // The memory is reached by its address alone from now on.
    let host = addr.expose_provenance();
    // SAFETY: the caller passes a domain of `ibv_alloc_pd`, whose context is open.
    pointer(unsafe {
        register(
            pd,
            Call::RegMr,
            addr,
            |number| {
                if !is_mapped(host, length) {
                    return Err(libc::EFAULT);
                }
                Ok(Mr::new(number, host, iova, length as u64, access))
            },
            access,
            length,
        )
    })
}

pub(super) unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut sys::ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut sys::ibv_mr {
    let access = access.cast_unsigned();
    // What the library leaves in `mr->addr` (rdma-core, `libibverbs/verbs.c`: `ibv_reg_dmabuf_mr`).
    let addr = std::ptr::without_provenance_mut(offset as usize);
    // SAFETY: the caller passes a domain of `ibv_alloc_pd`, whose context is open.
    pointer(unsafe {
        register(
            pd,
            Call::RegDmabufMr,
            addr,
            |number| {
                let page = page_bytes() as u64;
                // Linux, `drivers/infiniband/core/uverbs_std_types_mr.c`.
                if offset % page != iova % page {
                    return Err(libc::EINVAL);
                }
                if fd < 0 {
                    return Err(libc::EBADF);
                }
                // SAFETY: the caller passes a descriptor that is open during the call.
                let fd = BorrowedFd::borrow_raw(fd);
                Ok(Mr::of_mapping(number, Mapping::new(fd, offset, length)?, iova, access))
            },
            access,
            length,
        )
    })
}

/// # Safety
/// `pd` must be a domain of `ibv_alloc_pd`, and its context open.
unsafe fn register(
    pd: *mut sys::ibv_pd,
    call: Call,
    addr: *mut c_void,
    make: impl FnOnce(u32) -> Result<Mr, c_int>,
    access: c_uint,
    length: usize,
) -> Result<*mut sys::ibv_mr, c_int> {
    // SAFETY: as the caller promises.
    let (context, number) = unsafe { ((*pd).context, (*pd).handle) };
    // SAFETY: as the caller promises.
    let handle = unsafe { ContextHandle::of(context) };
    let mut state = handle.lock();
    state.kernel_call(handle.device, call)?;
    check_access(access)?;
    let device = &mut state.devices[handle.device];
    let limits = device.options.limits;
    if length == 0 || length as u64 > limits.max_mr_size {
        return Err(libc::EINVAL);
    }
    let mr = make(number)?;
    let pinned: u64 = device.mrs.iter().map(|(_, mr)| mr.pinned_bytes()).sum();
    let too_many = device.mrs.alive() == limits.max_mr
        || pinned.saturating_add(mr.pinned_bytes()) > limits.max_pinned_bytes;
    if too_many {
        return Err(libc::ENOMEM);
    }
    let number = device.mrs.insert(mr);
    let Some(mr) = device.mrs.get_mut(number) else { return Err(libc::ENOMEM) };
    mr.set_number(number);
    let (lkey, rkey) = mr.keys();
    let mr = sys::ibv_mr { context, pd, addr, length, handle: number, lkey, rkey };
    Ok(Box::into_raw(Box::new(mr)))
}

/// Work under way is no obstacle: it fails where it would have used the keys.
pub(super) unsafe extern "C" fn ibv_dereg_mr(mr: *mut sys::ibv_mr) -> c_int {
    // SAFETY: the caller passes a region of this module, whose context is open.
    let (handle, number) = unsafe { (ContextHandle::of((*mr).context), (*mr).handle) };
    let mut state = handle.lock();
    code(state.scripted(handle.device, Call::DeregMr).map(|()| {
        state.devices[handle.device].mrs.remove(number);
        // SAFETY: `register` made it of a box, and it is not used after this.
        drop(unsafe { Box::from_raw(mr) });
    }))
}
