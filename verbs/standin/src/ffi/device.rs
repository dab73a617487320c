//! Devices, their ports and addresses.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::sync::{Arc, Mutex, Weak};

use ibverbs_sys as sys;
use rustix::event::{EventfdFlags, eventfd};

use super::{ContextHandle, data, pointer, refuse_in_use, set_errno};
use crate::device::Context;
use crate::memory::page_bytes;
use crate::script::Call;
use crate::world::{Shared, lock, worlds};

/// The first half of a GUID of ours: locally administered.
const GUID_PREFIX: u64 = 0x025e << 48;

/// A device, as C sees it.
#[repr(C)]
pub(crate) struct DeviceHandle {
    ibv: sys::ibv_device,
    guid: u64,
    index: usize,
    shared: Weak<Shared>,
}

impl DeviceHandle {
    pub(crate) fn new(name: &str, world: u64, index: usize, shared: &Weak<Shared>) -> Self {
        let mut ibv = sys::ibv_device {
            _ops: sys::_ibv_device_ops::default(),
            node_type: sys::IBV_NODE_CA,
            transport_type: sys::IBV_TRANSPORT_IB,
            name: [0; 64],
            dev_name: [0; 64],
            dev_path: [0; 256],
            ibdev_path: [0; 256],
        };
        for (to, from) in ibv.name.iter_mut().zip(name.bytes()) {
            *to = from as c_char;
        }
        let guid = GUID_PREFIX | world << 16 | index as u64;
        Self { ibv, guid, index, shared: shared.clone() }
    }

    /// # Safety
    /// `device` must have come from a list that is not freed, or from a context that is open.
    unsafe fn of<'a>(device: *const sys::ibv_device) -> &'a Self {
        // SAFETY: lists hold nothing but these, whose worlds they keep alive, and `ibv` is the first
        // field of a C struct.
        unsafe { &*device.cast::<Self>() }
    }
}

/// What is known of a list that was given out.
struct List {
    length: usize,
    /// The worlds whose devices it names, kept alive by it.
    _worlds: Vec<Arc<Shared>>,
}

/// By their addresses.
static LISTS: Mutex<BTreeMap<usize, List>> = Mutex::new(BTreeMap::new());

pub(super) unsafe extern "C" fn ibv_get_device_list(
    count: *mut c_int,
) -> *mut *mut sys::ibv_device {
    let worlds = worlds();
    let handles = worlds.iter().flat_map(|world| &world.handles);
    let mut list: Vec<*mut sys::ibv_device> =
        handles.map(|handle| std::ptr::from_ref(handle).cast_mut().cast()).collect();
    if !count.is_null() {
        // SAFETY: the caller passes null or a place for an int.
        unsafe { *count = list.len() as c_int };
    }
    list.push(std::ptr::null_mut());
    let length = list.len();
    let list = Box::into_raw(list.into_boxed_slice()).cast::<*mut sys::ibv_device>();
    lock(&LISTS).insert(list.addr(), List { length, _worlds: worlds });
    list
}

pub(super) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut sys::ibv_device) {
    let Some(found) = lock(&LISTS).remove(&list.addr()) else { return };
    // SAFETY: it is a list of `ibv_get_device_list` of this length, and was not freed, or it would
    // not have been found.
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, found.length)) });
}

pub(super) unsafe extern "C" fn ibv_get_device_name(device: *mut sys::ibv_device) -> *const c_char {
    // SAFETY: the caller passes a device of a list or of a context.
    unsafe { DeviceHandle::of(device) }.ibv.name.as_ptr()
}

pub(super) unsafe extern "C" fn ibv_get_device_guid(device: *mut sys::ibv_device) -> sys::__be64 {
    // SAFETY: the caller passes a device of a list or of a context.
    unsafe { DeviceHandle::of(device) }.guid.to_be()
}

pub(super) unsafe extern "C" fn ibv_get_device_index(device: *mut sys::ibv_device) -> c_int {
    // SAFETY: the caller passes a device of a list or of a context.
    unsafe { DeviceHandle::of(device) }.index as c_int
}

pub(super) unsafe extern "C" fn ibv_open_device(
    device: *mut sys::ibv_device,
) -> *mut sys::ibv_context {
    // SAFETY: the caller passes a device of a list or of a context.
    let handle = unsafe { DeviceHandle::of(device) };
    pointer(open(handle, device))
}

fn open(
    handle: &DeviceHandle,
    device: *mut sys::ibv_device,
) -> Result<*mut sys::ibv_context, c_int> {
    let shared = handle.shared.upgrade().ok_or(libc::ENODEV)?;
    let fd = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| error.raw_os_error())?;
    let async_fd = std::os::fd::AsRawFd::as_raw_fd(&fd);
    let number = {
        let mut state = shared.lock();
        state.kernel_call(handle.index, Call::OpenDevice)?;
        let contexts = &mut state.devices[handle.index].contexts;
        contexts.insert(Context { async_fd: fd, events: Default::default() })
    };
    // SAFETY: zeros are a valid mutex that is not locked, as pthread_mutex_init(3) makes it on Linux.
    let mutex = unsafe { std::mem::zeroed() };
    let ibv = sys::ibv_context {
        device,
        ops: data::OPS,
        cmd_fd: -1,
        async_fd,
        num_comp_vectors: 1,
        mutex,
        abi_compat: std::ptr::null_mut(),
    };
    Ok(Box::into_raw(Box::new(ContextHandle { ibv, shared, device: handle.index, number })).cast())
}

pub(super) unsafe extern "C" fn ibv_close_device(context: *mut sys::ibv_context) -> c_int {
    // SAFETY: the caller passes an open context.
    let handle = unsafe { ContextHandle::of(context) };
    {
        let mut state = handle.lock();
        let device = &state.devices[handle.device];
        let number = handle.number;
        let in_use = device.pds.iter().any(|(_, pd)| pd.context == number)
            || device.cqs.iter().any(|(_, cq)| cq.context == number)
            || device.channels.iter().any(|(_, channel)| channel.context == number);
        if let Err(error) = refuse_in_use(&mut state, in_use) {
            set_errno(error);
            return -1;
        }
        state.devices[handle.device].contexts.remove(number);
    }
    // SAFETY: `ibv_open_device` made it of a box, and it is not used after it was closed.
    drop(unsafe { Box::from_raw(context.cast::<ContextHandle>()) });
    0
}

pub(super) unsafe extern "C" fn ibv_query_device(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_device_attr,
) -> c_int {
    // SAFETY: the caller passes an open context.
    let handle = unsafe { ContextHandle::of(context) };
    // SAFETY: its device is there as long as the context.
    let guid = unsafe { DeviceHandle::of(handle.ibv.device) }.guid.to_be();
    let mut state = handle.lock();
    if let Err(error) = state.kernel_call(handle.device, Call::QueryDevice) {
        return error;
    }
    let options = &state.devices[handle.device].options;
    let limits = options.limits;
    let [max_pd, max_qp, max_qp_wr, max_sge, max_cq, max_cqe] = [
        limits.max_pd,
        limits.max_qp,
        limits.max_qp_wr,
        limits.max_sge,
        limits.max_cq,
        limits.max_cqe,
    ]
    .map(|limit| limit as c_int);
    let [max_mr, max_srq, max_srq_wr, max_srq_sge] =
        [limits.max_mr, limits.max_srq, limits.max_srq_wr, limits.max_srq_sge]
            .map(|limit| limit as c_int);
    let mut filled = sys::ibv_device_attr {
        node_guid: guid,
        sys_image_guid: guid,
        max_mr_size: limits.max_mr_size,
        page_size_cap: page_bytes() as u64,
        max_qp,
        max_qp_wr,
        max_sge,
        max_sge_rd: max_sge,
        max_cq,
        max_cqe,
        max_mr,
        max_pd,
        max_qp_rd_atom: limits.max_rd_atomic.into(),
        max_qp_init_rd_atom: limits.max_rd_atomic.into(),
        max_srq,
        max_srq_wr,
        max_srq_sge,
        max_pkeys: 1,
        phys_port_cnt: options.ports.len() as u8,
        ..Default::default()
    };
    for (to, from) in filled.fw_ver.iter_mut().zip(b"stand-in") {
        *to = *from as c_char;
    }
    // SAFETY: the caller passes a place for the attributes.
    unsafe { *attr = filled };
    0
}
