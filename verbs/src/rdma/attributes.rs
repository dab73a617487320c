//! What devices and ports can do.

use std::ffi::CStr;

use ibverbs_sys as sys;

use crate::inventory::{self, LinkLayer, PhysicalState, PortState};

/// What a device can do at most. A queue pair or memory region that needs much of one may get less
/// of another; only trying tells.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceAttributes {
    /// Firmware version.
    pub firmware: String,
    /// PCI vendor, or 0.
    pub vendor_id: u32,
    /// The vendor's own number for the model.
    pub part_id: u32,
    /// Ports, counted from 1.
    pub ports: u8,
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests in each queue of a queue pair.
    pub max_qp_wr: u32,
    /// Stretches of memory that one work request names; a read may take fewer.
    pub max_sge: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Bytes of one memory region.
    pub max_mr_size: u64,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Receives in a shared receive queue.
    pub max_srq_wr: u32,
    /// Stretches of memory of one receive in it.
    pub max_srq_sge: u32,
    /// Reads and atomics that a queue pair answers at once.
    pub max_qp_rd_atom: u32,
    /// Reads and atomics that a queue pair has under way at once.
    pub max_qp_init_rd_atom: u32,
}

/// A port as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortAttributes {
    /// Logical state.
    pub state: PortState,
    /// State of the cable; `None` for a number that means nothing.
    pub physical_state: Option<PhysicalState>,
    /// What the cable speaks.
    pub link_layer: LinkLayer,
    /// Largest packet payload it can be set to.
    pub max_mtu: Mtu,
    /// Largest packet payload it carries now; the smallest where a port that is down says nothing.
    pub active_mtu: Mtu,
    /// Longest message, in bytes.
    pub max_message_bytes: u32,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Local identifier of the subnet manager; 0 on Ethernet.
    pub sm_lid: u16,
    /// Entries of its GID table, used and unused.
    pub gid_table_len: u32,
    /// Entries of its P_Key table.
    pub pkey_table_len: u16,
    /// Signalling rate of all lanes together, in Mbit/s; 0 if it is not known. A port that is down
    /// may tell a nominal rate.
    pub rate_mbit_s: u64,
}

/// Payload of a packet at most (`enum ibv_mtu`; InfiniBand specification, volume 1, 9.2.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    Bytes256 = 1,
    /// 512 bytes.
    Bytes512 = 2,
    /// 1024 bytes.
    Bytes1024 = 3,
    /// 2048 bytes.
    Bytes2048 = 4,
    /// 4096 bytes.
    Bytes4096 = 5,
}

impl Mtu {
    /// The one with this code, 1 to 5.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Bytes256,
            2 => Self::Bytes512,
            3 => Self::Bytes1024,
            4 => Self::Bytes2048,
            5 => Self::Bytes4096,
            _ => return None,
        })
    }

    /// Its code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Its bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        128 << self as u8
    }

    /// The smallest, which everything carries, for a code that means nothing.
    pub(crate) fn from_raw(raw: sys::ibv_mtu) -> Self {
        u8::try_from(raw).ok().and_then(Self::from_code).unwrap_or(Self::Bytes256)
    }
}

impl DeviceAttributes {
    pub(crate) fn from_raw(raw: &sys::ibv_device_attr) -> Self {
        let count = |count: i32| u32::try_from(count).unwrap_or(0);
        let firmware = raw.fw_ver.map(|byte| byte.cast_unsigned());
        let firmware = CStr::from_bytes_until_nul(&firmware).unwrap_or_default();
        Self {
            firmware: firmware.to_string_lossy().into_owned(),
            vendor_id: raw.vendor_id,
            part_id: raw.vendor_part_id,
            ports: raw.phys_port_cnt,
            max_qp: count(raw.max_qp),
            max_qp_wr: count(raw.max_qp_wr),
            max_sge: count(raw.max_sge),
            max_cq: count(raw.max_cq),
            max_cqe: count(raw.max_cqe),
            max_mr: count(raw.max_mr),
            max_mr_size: raw.max_mr_size,
            max_srq: count(raw.max_srq),
            max_srq_wr: count(raw.max_srq_wr),
            max_srq_sge: count(raw.max_srq_sge),
            max_qp_rd_atom: count(raw.max_qp_rd_atom),
            max_qp_init_rd_atom: count(raw.max_qp_init_rd_atom),
        }
    }
}

impl PortAttributes {
    /// Reads only what the library's older function fills in: the fields up to `flags`.
    pub(crate) fn from_raw(raw: &sys::ibv_port_attr, device: &str, port: u8) -> Self {
        Self {
            state: PortState::from_code(raw.state).unwrap_or(PortState::Nop),
            physical_state: PhysicalState::from_code(raw.phys_state.into()),
            // Devices that say nothing are older than Ethernet ports (rdma-core,
            // libibverbs/examples/devinfo.c: link_layer_str).
            link_layer: match u32::from(raw.link_layer) {
                sys::IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                _ => LinkLayer::InfiniBand,
            },
            max_mtu: Mtu::from_raw(raw.max_mtu),
            active_mtu: Mtu::from_raw(raw.active_mtu),
            max_message_bytes: raw.max_msg_sz,
            lid: raw.lid,
            sm_lid: raw.sm_lid,
            gid_table_len: u32::try_from(raw.gid_tbl_len).unwrap_or(0),
            pkey_table_len: raw.pkey_tbl_len,
            rate_mbit_s: rate_mbit_s(raw.active_width, raw.active_speed, || {
                inventory::rate_of(device, port)
            }),
        }
    }
}

/// The fastest speed that the field can tell: faster ones are told as this one (Linux,
/// `drivers/infiniband/core/uverbs_std_types_device.c`: `copy_port_attr_to_resp`).
const NDR: u8 = 128;

/// A port's rate from the codes of its width and speed (Linux, `drivers/infiniband/core/sysfs.c`:
/// `rate_show`); `exact` is asked where they do not tell.
fn rate_mbit_s(width: u8, speed: u8, exact: impl FnOnce() -> Option<u64>) -> u64 {
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    };
    let lane_mbit_s = match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        NDR => 100_000,
        _ => 0,
    };
    let told = lanes * lane_mbit_s;
    if speed == NDR { exact().unwrap_or(told) } else { told }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtus_keep_their_codes_and_bytes() {
        let bytes = [256, 512, 1024, 2048, 4096];
        for (code, bytes) in (1..).zip(bytes) {
            let mtu = Mtu::from_code(code).unwrap();
            assert_eq!((mtu.code(), mtu.bytes()), (code, bytes));
        }
        assert_eq!((Mtu::from_code(0), Mtu::from_code(6)), (None, None));
        assert_eq!(Mtu::from_raw(0), Mtu::Bytes256, "what every port carries");
    }

    #[test]
    fn rates_are_lanes_times_speed_and_the_kernel_is_asked_beyond_what_the_field_tells() {
        assert_eq!(rate_mbit_s(1, 1, || None), 2_500, "Soft-RoCE");
        assert_eq!(rate_mbit_s(2, 32, || None), 100_000, "EDR");
        assert_eq!(rate_mbit_s(2, 64, || Some(1)), 200_000, "HDR");
        assert_eq!(rate_mbit_s(2, NDR, || None), 400_000, "NDR");
        assert_eq!(rate_mbit_s(2, NDR, || Some(800_000)), 800_000, "XDR");
        assert_eq!(rate_mbit_s(3, 3, || Some(1)), 0, "unknown codes");
    }

    #[test]
    fn a_port_is_read_up_to_where_the_function_fills_it() {
        let raw = sys::ibv_port_attr {
            state: 4,
            max_mtu: 5,
            active_mtu: 4,
            gid_tbl_len: 255,
            lid: 3,
            sm_lid: 1,
            active_width: 2,
            active_speed: 32,
            phys_state: 5,
            link_layer: 2,
            active_speed_ex: 0xdead,
            ..Default::default()
        };
        let port = PortAttributes::from_raw(&raw, "no_such_device", 1);
        assert_eq!((port.state, port.link_layer), (PortState::Active, LinkLayer::Ethernet));
        assert_eq!(port.physical_state, Some(PhysicalState::LinkUp));
        assert_eq!((port.max_mtu, port.active_mtu), (Mtu::Bytes4096, Mtu::Bytes2048));
        assert_eq!((port.lid, port.sm_lid, port.gid_table_len), (3, 1, 255));
        assert_eq!(port.rate_mbit_s, 100_000);
        let unsaid = sys::ibv_port_attr { link_layer: 0, state: 77, phys_state: 0, ..raw };
        let port = PortAttributes::from_raw(&unsaid, "no_such_device", 1);
        assert_eq!((port.link_layer, port.state), (LinkLayer::InfiniBand, PortState::Nop));
        assert_eq!(port.physical_state, None);
    }

    #[test]
    fn counts_that_are_negative_are_none_and_firmware_ends_at_its_nul() {
        let mut raw = sys::ibv_device_attr { max_qp: -1, max_sge: 30, ..Default::default() };
        raw.fw_ver[..6].copy_from_slice(&b"22.4\0x".map(u8::cast_signed));
        let attributes = DeviceAttributes::from_raw(&raw);
        assert_eq!((attributes.max_qp, attributes.max_sge), (0, 30));
        assert_eq!(attributes.firmware, "22.4");
    }
}
