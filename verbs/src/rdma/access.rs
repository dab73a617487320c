//! What may be done with memory, and with a queue pair.

use std::fmt;
use std::ops::{BitOr, BitOrAssign};

use ibverbs_sys::ibv_access_flags as flags;

/// A set of permissions: of registered memory, or of what peers may ask of a queue pair. Both must
/// allow what a peer does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Access(u32);

/// Bits that a provider may ignore if it does not know them (`IBV_ACCESS_OPTIONAL_RANGE` of
/// `<infiniband/ib_user_ioctl_verbs.h>`): only `ibv_reg_mr_iova2` takes them.
const OPTIONAL: u32 = 0x3ff0_0000;

const NAMES: [(Access, &str); 5] = [
    (Access::LOCAL_WRITE, "LOCAL_WRITE"),
    (Access::REMOTE_WRITE, "REMOTE_WRITE"),
    (Access::REMOTE_READ, "REMOTE_READ"),
    (Access::REMOTE_ATOMIC, "REMOTE_ATOMIC"),
    (Access::RELAXED_ORDERING, "RELAXED_ORDERING"),
];

impl Access {
    /// The NIC may read the memory for its own sends and writes; nothing else.
    pub const NONE: Self = Self(0);
    /// The NIC may write received and read data into it.
    pub const LOCAL_WRITE: Self = Self(flags::IBV_ACCESS_LOCAL_WRITE.0);
    /// Peers may write into it. Of memory it needs [`Access::LOCAL_WRITE`] too.
    pub const REMOTE_WRITE: Self = Self(flags::IBV_ACCESS_REMOTE_WRITE.0);
    /// Peers may read it.
    pub const REMOTE_READ: Self = Self(flags::IBV_ACCESS_REMOTE_READ.0);
    /// Peers may run atomic operations on it. Of memory it needs [`Access::LOCAL_WRITE`] too.
    pub const REMOTE_ATOMIC: Self = Self(flags::IBV_ACCESS_REMOTE_ATOMIC.0);
    /// Writes of the NIC may pass one another on their way through PCIe, which some hosts need for
    /// full bandwidth. Only a completion, or a message behind the writes, then says that they have
    /// landed; the bytes of one write may become visible in any order. Of memory only. It is an
    /// optional bit: a device or kernel that does not know it registers the memory without it.
    pub const RELAXED_ORDERING: Self = Self(flags::IBV_ACCESS_RELAXED_ORDERING.0);

    /// Whether everything in `other` is allowed.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// What either allows.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) const fn bits(self) -> u32 {
        self.0
    }

    /// The permissions among `bits` that have a name here.
    pub(crate) fn from_bits(bits: u32) -> Self {
        let known = NAMES.iter().fold(0, |known, (access, _)| known | access.0);
        Self(bits & known)
    }

    /// Whether it has bits that only the newer registration function takes.
    pub(crate) const fn has_optional(self) -> bool {
        self.0 & OPTIONAL != 0
    }

    /// What of it concerns a queue pair.
    pub(crate) const fn of_qp(self) -> u32 {
        self.0 & !OPTIONAL
    }
}

impl BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        self.union(other)
    }
}

impl BitOrAssign for Access {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut set = f.debug_set();
        for (access, name) in NAMES {
            if self.contains(access) {
                set.entry(&format_args!("{name}"));
            }
        }
        set.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_those_of_the_c_header() {
        // include/uapi/rdma/ib_user_ioctl_verbs.h: enum ib_uverbs_access_flags.
        let bits = NAMES.map(|(access, _)| access.bits());
        assert_eq!(bits, [1, 2, 4, 8, 1 << 20]);
    }

    #[test]
    fn only_relaxed_ordering_needs_the_newer_function_and_is_kept_from_queue_pairs() {
        let optional = NAMES.map(|(access, _)| access.has_optional());
        assert_eq!(optional, [false, false, false, false, true]);
        let access = Access::LOCAL_WRITE | Access::RELAXED_ORDERING;
        assert!(access.has_optional());
        assert_eq!(access.of_qp(), Access::LOCAL_WRITE.bits());
    }

    #[test]
    fn sets_hold_what_was_put_in_and_name_it() {
        let mut access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        assert!(access.contains(Access::LOCAL_WRITE) && !access.contains(Access::REMOTE_WRITE));
        assert!(access.contains(Access::NONE));
        access |= Access::REMOTE_WRITE;
        assert!(access.contains(Access::REMOTE_WRITE | Access::REMOTE_READ));
        assert_eq!(format!("{access:?}"), "{LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ}");
        assert_eq!(Access::from_bits(access.bits() | 1 << 6), access, "an unknown bit is left out");
    }
}
