//! GIDs: what they are, and in which order to try them.

use std::fmt;
use std::net::{AddrParseError, Ipv6Addr};
use std::str::FromStr;

/// A port address: 128 bits with the syntax of an IPv6 address (InfiniBand Architecture
/// Specification, volume 1, 4.1.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gid(pub Ipv6Addr);

/// What kind of address a [`Gid`] holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GidClass {
    /// `::ffff:a.b.c.d`: the IPv4 address of the network device.
    Ipv4Mapped,
    /// Any other unicast IPv6 address.
    Global,
    /// `fc00::/7`: routed inside a site.
    UniqueLocal,
    /// `fe80::/10`: never routed; made from the MAC address, so it is there even when the
    /// interface has no address. Also the default subnet of InfiniBand.
    LinkLocal,
    /// Zero (an empty slot), loopback or multicast: no queue pair can be reached by it.
    Unusable,
}

/// How a port encapsulates packets sent with this GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GidType {
    /// InfiniBand.
    InfiniBand,
    /// RoCE v1: an Ethertype of its own, so no router passes it.
    RoceV1,
    /// RoCE v2: UDP port 4791 over IPv4 or IPv6.
    RoceV2,
}

/// One used entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GidEntry {
    /// Its index, as address handles and queue pairs want it.
    pub index: u32,
    /// The address.
    pub gid: Gid,
    /// The encapsulation.
    pub kind: GidType,
    /// The network device it belongs to (RoCE only): the interface, VLAN or bond whose address it
    /// is.
    pub net_device: Option<String>,
}

impl Gid {
    /// Classifies the address by its prefix.
    ///
    /// IPv4 link-local addresses (`169.254/16`) count as [`GidClass::Ipv4Mapped`]: unlike `fe80::`
    /// somebody configured them, and back-to-back rails are numbered with them.
    #[must_use]
    pub fn class(self) -> GidClass {
        let address = self.0;
        if let Some(v4) = address.to_ipv4_mapped() {
            return if v4.is_unspecified() || v4.is_loopback() || v4.is_multicast() {
                GidClass::Unusable
            } else {
                GidClass::Ipv4Mapped
            };
        }
        if address.is_unspecified() || address.is_loopback() || address.is_multicast() {
            GidClass::Unusable
        } else if address.is_unicast_link_local() {
            GidClass::LinkLocal
        } else if address.is_unique_local() {
            GidClass::UniqueLocal
        } else {
            GidClass::Global
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Gid {
    type Err = AddrParseError;

    /// Parses any IPv6 notation, the kernel's eight groups of four digits among them.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

impl From<[u8; 16]> for Gid {
    fn from(octets: [u8; 16]) -> Self {
        Self(octets.into())
    }
}

impl From<Ipv6Addr> for Gid {
    fn from(address: Ipv6Addr) -> Self {
        Self(address)
    }
}

impl GidEntry {
    /// An entry.
    #[must_use]
    pub const fn new(index: u32, gid: Gid, kind: GidType, net_device: Option<String>) -> Self {
        Self { index, gid, kind, net_device }
    }
}

/// The entries worth trying, best first; empty if there is none.
///
/// A wrong choice is found out late: a queue pair connects happily with a GID the peer cannot
/// answer to, and the first write ends, seconds later, with "retry exceeded". So the order is by
/// what is most likely to reach the peer, and what is likely to fail silently is left out:
///
/// 1. **RoCE v2 before RoCE v1.** v2 is routed and what switches are configured for. Both ends
///    must use the same version; v1 comes last, for hardware that has nothing else.
/// 2. **IPv4-mapped first**, because it exists only if an administrator gave the interface an
///    address, and nearly every RoCE network is numbered with IPv4; then global and unique-local
///    IPv6, which are equal.
/// 3. **Link-local only if there is nothing else.** It exists on every interface, configured or
///    not, so it says nothing about reachability and is never routed; index 0 is usually one.
///
/// InfiniBand entries keep their table order behind all RoCE entries (a port has only one of the
/// two), link-local ones included: there `fe80::` is the default subnet, not a missing address.
/// Ties keep table order. Try the next entry when connecting fails at once (`EINVAL`,
/// `ENETUNREACH`), and report the one chosen on both ends.
#[must_use]
pub fn rank_gids(entries: &[GidEntry]) -> Vec<&GidEntry> {
    let unconfigured = |entry: &GidEntry| {
        entry.kind != GidType::InfiniBand && entry.gid.class() == GidClass::LinkLocal
    };
    let mut ranked: Vec<&GidEntry> =
        entries.iter().filter(|entry| entry.gid.class() != GidClass::Unusable).collect();
    if !ranked.iter().all(|entry| unconfigured(entry)) {
        ranked.retain(|entry| !unconfigured(entry));
    }
    ranked.sort_by_key(|entry| {
        let kind = match entry.kind {
            GidType::RoceV2 => 0,
            GidType::RoceV1 => 1,
            GidType::InfiniBand => 2,
        };
        let class = match (entry.kind, entry.gid.class()) {
            (GidType::InfiniBand, _) | (_, GidClass::Ipv4Mapped) => 0,
            _ => 1,
        };
        (kind, class, entry.index)
    });
    ranked
}
