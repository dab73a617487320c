//! A port's GID table.

use std::io;

use ibverbs_sys as sys;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::context::Context;
use super::error::VerbsError;
use crate::gid::{Gid, GidClass, GidEntry, GidType};
use crate::inventory;

/// Most entries read of a device: 256 ports' worth of small tables, or one very large one.
const MAX_ENTRIES: u32 = 1 << 16;

/// The used entries of a port's table, by index: from the library where it has the function, from
/// sysfs where it is older than that.
pub(crate) fn table(context: &Context, port: u8) -> Result<Vec<GidEntry>, VerbsError> {
    let link_layer = context.port(port)?.link_layer;
    if let Some(query) = context.functions().ibv_query_gid_table {
        // It gives the tables of all ports.
        let ports = (1..=context.attributes()?.ports).filter_map(|port| context.port(port).ok());
        let len = ports.map(|port| port.gid_table_len).sum::<u32>().min(MAX_ENTRIES) as usize;
        let mut raw = vec![sys::ibv_gid_entry::default(); len];
        // SAFETY: the context is open, and the function writes at most `len` entries of this size.
        let count = unsafe {
            query(context.raw(), raw.as_mut_ptr(), len, 0, size_of::<sys::ibv_gid_entry>())
        };
        if let Ok(count) = usize::try_from(count) {
            raw.truncate(count);
            let of_port = raw.iter().filter(|entry| entry.port_num == u32::from(port));
            let mut entries: Vec<_> = of_port.filter_map(entry).collect();
            entries.sort_by_key(|entry| entry.index);
            return Ok(entries);
        }
        let source = io::Error::from_raw_os_error(i32::try_from(-count).unwrap_or(i32::MAX));
        if !matches!(Errno::from_io_error(&source), Some(Errno::OPNOTSUPP | Errno::NOSYS)) {
            return Err(VerbsError::os("ibv_query_gid_table", source));
        }
    }
    Ok(inventory::gids_of(context.name(), port, link_layer))
}

/// An entry; `None` if it is not in use, or of a type nobody knows.
fn entry(raw: &sys::ibv_gid_entry) -> Option<GidEntry> {
    // SAFETY: both views of the union are 16 bytes in which every value is valid.
    let gid = Gid::from(unsafe { raw.gid.raw });
    let kind = match raw.gid_type {
        sys::IBV_GID_TYPE_IB => GidType::InfiniBand,
        sys::IBV_GID_TYPE_ROCE_V1 => GidType::RoceV1,
        sys::IBV_GID_TYPE_ROCE_V2 => GidType::RoceV2,
        _ => return None,
    };
    let used = gid.class() != GidClass::Unusable;
    used.then(|| GidEntry::new(raw.gid_index, gid, kind, interface(raw.ndev_ifindex)))
}

/// The name of a network interface.
fn interface(index: u32) -> Option<String> {
    if index == 0 {
        return None;
    }
    let socket =
        socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
    rustix::net::netdevice::index_to_name(socket, index).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(gid: [u8; 16], gid_type: u32) -> sys::ibv_gid_entry {
        let gid = sys::ibv_gid { raw: gid };
        sys::ibv_gid_entry { gid, gid_index: 3, port_num: 1, gid_type, ndev_ifindex: 0 }
    }

    #[test]
    fn entries_keep_index_address_and_type() {
        let gid: Gid = "::ffff:10.1.1.2".parse().unwrap();
        for (code, kind) in [(0, GidType::InfiniBand), (1, GidType::RoceV1), (2, GidType::RoceV2)] {
            let expected = GidEntry::new(3, gid, kind, None);
            assert_eq!(entry(&raw(gid.0.octets(), code)), Some(expected));
        }
        assert_eq!(entry(&raw(gid.0.octets(), 9)), None);
        assert_eq!(entry(&raw([0; 16], 2)), None);
    }

    #[test]
    fn the_loopback_interface_has_its_name() {
        let socket =
            socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        let index = rustix::net::netdevice::name_to_index(socket, "lo").unwrap();
        assert_eq!(interface(index).as_deref(), Some("lo"));
        assert_eq!(interface(0), None);
        assert_eq!(interface(u32::MAX >> 1), None);
    }
}
