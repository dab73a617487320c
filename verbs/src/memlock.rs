//! How much memory this process may lock. Registering a region locks its pages, and the kernel
//! refuses with `ENOMEM` once the total passes `RLIMIT_MEMLOCK`, whose usual default (8 MiB or
//! less) is far below any KV pool.

use std::fs;

use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use thiserror::Error;

/// The locked-memory limit of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memlock {
    /// The limit in force, in bytes; `None` is unlimited.
    pub soft_bytes: Option<u64>,
    /// What the process may raise it to, in bytes; `None` is unlimited.
    pub hard_bytes: Option<u64>,
    /// The process has `CAP_IPC_LOCK` in the initial user namespace, so the kernel does not look
    /// at the limit (`ib_umem_get` asks for the capability there: one held only inside a
    /// container's own user namespace does not count).
    pub exempt: bool,
}

/// Why a region of some size cannot be locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemlockError {
    /// The process may raise the limit itself.
    #[error(
        "needs {need_bytes} bytes of locked memory, the limit is {soft_bytes}: raise it with \
         `ulimit -l` (hard limit: {})", Bytes(*hard_bytes)
    )]
    SoftTooLow {
        /// Bytes wanted.
        need_bytes: u64,
        /// Limit in force, in bytes.
        soft_bytes: u64,
        /// Limit it may be raised to, in bytes; `None` is unlimited.
        hard_bytes: Option<u64>,
    },
    /// Only an administrator can raise it.
    #[error(
        "needs {need_bytes} bytes of locked memory, the hard limit is {hard_bytes}: set memlock \
         to unlimited in /etc/security/limits.conf, LimitMEMLOCK=infinity in the systemd unit, or \
         --ulimit memlock=-1 for the container, and start the process anew"
    )]
    HardTooLow {
        /// Bytes wanted.
        need_bytes: u64,
        /// Highest limit the process may set, in bytes.
        hard_bytes: u64,
    },
}

/// A limit as a person reads it.
struct Bytes(Option<u64>);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(bytes) => bytes.fmt(f),
            None => f.write_str("unlimited"),
        }
    }
}

impl Memlock {
    /// Limits as given.
    #[must_use]
    pub const fn new(soft_bytes: Option<u64>, hard_bytes: Option<u64>, exempt: bool) -> Self {
        Self { soft_bytes, hard_bytes, exempt }
    }

    /// The limits of the calling process.
    #[must_use]
    pub fn of_this_process() -> Self {
        let limit = getrlimit(Resource::Memlock);
        // Unknown is not exempt: the check then errs on the side of a warning.
        let capable =
            capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
        let exempt = capable
            && fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| is_initial_uid_map(&map));
        Self { soft_bytes: limit.current, hard_bytes: limit.maximum, exempt }
    }

    /// Whether `need_bytes` can be locked in all: every region of the process together, since the
    /// kernel counts the total.
    ///
    /// # Errors
    /// [`MemlockError::SoftTooLow`] if the process can help itself, [`MemlockError::HardTooLow`]
    /// if only an administrator can.
    pub const fn check(&self, need_bytes: u64) -> Result<(), MemlockError> {
        if self.exempt {
            return Ok(());
        }
        match (self.soft_bytes, self.hard_bytes) {
            (_, Some(hard_bytes)) if hard_bytes < need_bytes => {
                Err(MemlockError::HardTooLow { need_bytes, hard_bytes })
            }
            (Some(soft_bytes), hard_bytes) if soft_bytes < need_bytes => {
                Err(MemlockError::SoftTooLow { need_bytes, soft_bytes, hard_bytes })
            }
            _ => Ok(()),
        }
    }
}

/// The initial user namespace maps every id to itself (`user_namespaces(7)`).
fn is_initial_uid_map(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_limit_that_suffices_passes() {
        assert_eq!(Memlock::new(None, None, false).check(u64::MAX), Ok(()));
        assert_eq!(Memlock::new(Some(8 * MIB), Some(8 * MIB), false).check(8 * MIB), Ok(()));
        assert_eq!(Memlock::new(Some(0), Some(0), true).check(8 * MIB), Ok(()), "exempt");
    }

    #[test]
    fn a_soft_limit_tells_the_user_and_a_hard_limit_tells_the_administrator() {
        let soft = Memlock::new(Some(MIB), None, false).check(2 * MIB).unwrap_err();
        assert!(matches!(soft, MemlockError::SoftTooLow { .. }));
        assert!(soft.to_string().contains("ulimit -l` (hard limit: unlimited)"), "{soft}");
        let hard = Memlock::new(Some(MIB), Some(MIB), false).check(2 * MIB).unwrap_err();
        assert_eq!(hard, MemlockError::HardTooLow { need_bytes: 2 * MIB, hard_bytes: MIB });
        assert!(hard.to_string().contains("LimitMEMLOCK=infinity"), "{hard}");
    }

    #[test]
    fn only_the_initial_namespace_exempts() {
        assert!(is_initial_uid_map("         0          0 4294967295\n"));
        assert!(!is_initial_uid_map("         0     100000      65536\n"));
        assert!(!is_initial_uid_map(""));
    }

    #[test]
    fn the_limits_agree_with_proc() {
        let limits = fs::read_to_string("/proc/self/limits").unwrap();
        let line = limits.lines().find(|line| line.starts_with("Max locked memory")).unwrap();
        let soft = line.split_whitespace().nth(3).unwrap();
        assert_eq!(Bytes(Memlock::of_this_process().soft_bytes).to_string(), soft);
    }
}
