//! Ports and their addresses.

use std::ffi::c_int;

use ibverbs_sys as sys;

use super::{ContextHandle, code, set_errno};
use crate::script::Call;

const LINK_UP: u8 = 5;
const DISABLED: u8 = 3;
/// 4 lanes of 25 Gbit/s.
const WIDTH_4X: u8 = 2;
const SPEED_EDR: u8 = 32;
/// Full membership of the default partition.
const PKEY: u16 = 0xffff;

/// The exported function fills a struct that ends before `port_cap_flags2` (rdma-core,
/// `libibverbs/verbs.c`: `struct _compat_ibv_port_attr`); nothing behind is touched.
pub(super) unsafe extern "C" fn ibv_query_port(
    context: *mut sys::ibv_context,
    number: u8,
    attr: *mut sys::_compat_ibv_port_attr,
) -> c_int {
    // SAFETY: the caller passes an open context.
    let handle = unsafe { ContextHandle::of(context) };
    let mut state = handle.lock();
    if let Err(error) = state.kernel_call(handle.device, Call::QueryPort) {
        return error;
    }
    let device = &state.devices[handle.device];
    let Some(port) = device.port(number) else { return libc::EINVAL };
    let link_layer = match port.lid {
        0 => sys::IBV_LINK_LAYER_ETHERNET,
        _ => sys::IBV_LINK_LAYER_INFINIBAND,
    };
    let (state, phys_state) = match port.up {
        true => (sys::ibv_port_state::IBV_PORT_ACTIVE, LINK_UP),
        false => (sys::ibv_port_state::IBV_PORT_DOWN, DISABLED),
    };
    let filled = sys::ibv_port_attr {
        state,
        max_mtu: sys::IBV_MTU_4096,
        active_mtu: port.active_mtu,
        gid_tbl_len: port.gids.len() as c_int,
        max_msg_sz: device.options.limits.max_message_bytes,
        pkey_tbl_len: 1,
        lid: port.lid,
        max_vl_num: 1,
        active_width: WIDTH_4X,
        active_speed: SPEED_EDR,
        phys_state,
        link_layer: link_layer as u8,
        ..Default::default()
    };
    const BYTES: usize = std::mem::offset_of!(sys::ibv_port_attr, port_cap_flags2);
    // SAFETY: the caller passes a place for the old struct, which has this many bytes, and the new
    // one begins with it.
    unsafe {
        std::ptr::copy_nonoverlapping((&raw const filled).cast::<u8>(), attr.cast::<u8>(), BYTES);
    }
    0
}

pub(super) unsafe extern "C" fn ibv_query_gid(
    context: *mut sys::ibv_context,
    port: u8,
    index: c_int,
    gid: *mut sys::ibv_gid,
) -> c_int {
    // SAFETY: the caller passes an open context.
    let handle = unsafe { ContextHandle::of(context) };
    let state = handle.lock();
    let table = state.devices[handle.device].port(port).map(|port| &port.gids);
    let Some(entry) = table.and_then(|table| table.get(usize::try_from(index).ok()?)) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    // An entry that is not in use is all zeros (rdma-core, `libibverbs/verbs.c`: `ibv_query_gid`).
    let raw = entry.map_or([0; 16], |entry| entry.bytes);
    // SAFETY: the caller passes a place for an address.
    unsafe { *gid = sys::ibv_gid { raw } };
    0
}

fn entries(handle: &ContextHandle) -> Vec<sys::ibv_gid_entry> {
    let state = handle.lock();
    let ports = (1..).zip(&state.devices[handle.device].options.ports);
    let entries = ports.flat_map(|(port_num, port)| {
        (0..).zip(&port.gids).filter_map(move |(gid_index, gid)| {
            let gid_type = gid.as_ref()?.kind;
            let gid = sys::ibv_gid { raw: gid.as_ref()?.bytes };
            Some(sys::ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex: 0 })
        })
    });
    entries.collect()
}

/// The entries in use, of all ports; `-EINVAL` if they are more than `max_entries` (rdma-core,
/// `libibverbs/cmd_device.c`: `query_gid_table_fb`).
pub(super) unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut sys::ibv_context,
    to: *mut sys::ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    // SAFETY: the caller passes an open context.
    let entries = entries(unsafe { ContextHandle::of(context) });
    if flags != 0 || entry_size != size_of::<sys::ibv_gid_entry>() || entries.len() > max_entries {
        return -(libc::EINVAL as isize);
    }
    // SAFETY: the caller passes room for `max_entries` of this size.
    unsafe { std::ptr::copy_nonoverlapping(entries.as_ptr(), to, entries.len()) };
    entries.len() as isize
}

/// `ENODATA` for an entry that is not in use.
pub(super) unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut sys::ibv_context,
    port: u32,
    index: u32,
    to: *mut sys::ibv_gid_entry,
    flags: u32,
    entry_size: usize,
) -> c_int {
    // SAFETY: the caller passes an open context.
    let mut entries = entries(unsafe { ContextHandle::of(context) }).into_iter();
    if flags != 0 || entry_size != size_of::<sys::ibv_gid_entry>() {
        return libc::EINVAL;
    }
    code(entries.find(|e| (e.port_num, e.gid_index) == (port, index)).ok_or(libc::ENODATA).map(
        // SAFETY: the caller passes a place for one.
        |entry| unsafe { *to = entry },
    ))
}

pub(super) unsafe extern "C" fn ibv_query_pkey(
    context: *mut sys::ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut sys::__be16,
) -> c_int {
    // SAFETY: the caller passes an open context.
    let handle = unsafe { ContextHandle::of(context) };
    if handle.lock().devices[handle.device].port(port).is_none() || index != 0 {
        set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the caller passes a place for a P_Key.
    unsafe { *pkey = PKEY.to_be() };
    0
}
