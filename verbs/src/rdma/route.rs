//! The way to a peer.

use ibverbs_sys as sys;

use crate::gid::Gid;

/// Where a peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressVector {
    /// The own port, counted from 1.
    pub port: u8,
    /// The peer's LID; 0 on Ethernet.
    pub lid: u16,
    /// Service level, 4 bits.
    pub sl: u8,
    /// The peer's GID and the way to it: always on Ethernet; on InfiniBand only across subnets.
    pub global: Option<GlobalRoute>,
}

/// The way to a GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GlobalRoute {
    /// The peer's GID.
    pub gid: Gid,
    /// Index of the own GID, of the same type and family.
    pub gid_index: u8,
    /// Traffic class; on RoCE v2 it holds the DSCP in its upper six bits.
    pub traffic_class: u8,
    /// Routers a packet may pass.
    pub hop_limit: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
}

impl AddressVector {
    pub(crate) fn to_raw(self) -> sys::ibv_ah_attr {
        let mut raw = sys::ibv_ah_attr {
            dlid: self.lid,
            sl: self.sl,
            port_num: self.port,
            ..Default::default()
        };
        if let Some(global) = self.global {
            raw.is_global = 1;
            raw.grh = sys::ibv_global_route {
                dgid: sys::ibv_gid { raw: global.gid.0.octets() },
                flow_label: global.flow_label,
                sgid_index: global.gid_index,
                hop_limit: global.hop_limit,
                traffic_class: global.traffic_class,
            };
        }
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_says_whether_it_has_a_gid() {
        let gid: Gid = "::ffff:10.1.1.2".parse().unwrap();
        let (traffic_class, hop_limit, flow_label) = (104, 64, 0x000a_bcde);
        let route = GlobalRoute { gid, gid_index: 3, traffic_class, hop_limit, flow_label };
        let address = AddressVector { port: 2, lid: 7, sl: 5, global: Some(route) };
        let raw = address.to_raw();
        assert_eq!((raw.port_num, raw.dlid, raw.sl, raw.is_global), (2, 7, 5, 1));
        assert_eq!((raw.grh.sgid_index, raw.grh.hop_limit, raw.grh.traffic_class), (3, 64, 104));
        assert_eq!(raw.grh.flow_label, 0x000a_bcde);
        // SAFETY: both views of the union are 16 bytes in which every value is valid.
        assert_eq!(unsafe { raw.grh.dgid.raw }, gid.0.octets(), "in network order");
        let raw = AddressVector { global: None, ..address }.to_raw();
        assert_eq!((raw.dlid, raw.is_global), (7, 0));
    }
}
