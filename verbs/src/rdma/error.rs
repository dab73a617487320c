//! What can go wrong, told by what can be done about it.

use std::io;

use rustix::io::Errno;
use thiserror::Error;

use super::states::QpState;
use crate::gid::Gid;
use crate::inventory::PortState;
use crate::library::LibraryError;

/// Why a call of this layer failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// The library cannot list devices.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// No device is called so.
    #[error("there is no RDMA device {device}; this host has {}", have.join(", "))]
    NoSuchDevice {
        /// The name asked for.
        device: String,
        /// The names there are.
        have: Vec<String>,
    },
    /// The device has no such port.
    #[error("device {device} has no port {port} ({source}); its ports are counted from 1")]
    NoSuchPort {
        /// The device.
        device: String,
        /// The port asked for.
        port: u8,
        /// What the call said.
        source: io::Error,
    },
    /// The port carries no data.
    #[error("port {port} is {state:?} ({source}); check its cable, switch port or subnet manager")]
    PortDown {
        /// The port.
        port: u8,
        /// Its state.
        state: PortState,
        /// What the call said.
        source: io::Error,
    },
    /// Memory could not be locked.
    #[error(
        "cannot register {bytes} bytes: {source}; the locked-memory limit is probably too low: \
         `ulimit -l`, LimitMEMLOCK=infinity in the systemd unit, or --ulimit memlock=-1 for the \
         container"
    )]
    Memlock {
        /// Bytes that were to be registered.
        bytes: u64,
        /// `ENOMEM`.
        source: io::Error,
    },
    /// The memory cannot be registered as asked.
    #[error(
        "cannot register {bytes} bytes: {source}; the memory must be mapped and of a kind the NIC \
         can reach, within max_mr_size, and remote write needs local write"
    )]
    BadMemory {
        /// Bytes that were to be registered.
        bytes: u64,
        /// `EINVAL` or `EFAULT`.
        source: io::Error,
    },
    /// The peer's address leads nowhere.
    #[error(
        "no way to {} from GID index {gid_index}: {source}; check that both GIDs are of one type \
         and family, and the addresses, VLAN and route of the network interface", Address(*gid, *lid)
    )]
    NoRoute {
        /// The peer's GID; `None` where it was addressed by LID.
        gid: Option<Gid>,
        /// The peer's LID.
        lid: u16,
        /// Index of the own GID, 0 without one.
        gid_index: u8,
        /// `EINVAL`, `ENETUNREACH`, `EHOSTUNREACH` or `ETIMEDOUT`.
        source: io::Error,
    },
    /// A queue pair cannot go from one state to another, or not with what was given.
    #[error("a queue pair cannot go from {from} to {to}: {missing} is missing")]
    Transition {
        /// Where it is.
        from: QpState,
        /// Where it was to go.
        to: QpState,
        /// Attributes, or the step that has to come before.
        missing: String,
    },
    /// A number has more bits than there are for it.
    #[error("{attribute} is {given}, at most {max} is possible")]
    BadAttribute {
        /// Its name.
        attribute: &'static str,
        /// As given.
        given: u32,
        /// The largest there is.
        max: u32,
    },
    /// Two things that are to be used together are of different devices or protection domains.
    #[error("{operation}: {what} is of another device or protection domain")]
    Foreign {
        /// The call.
        operation: &'static str,
        /// Which of them.
        what: &'static str,
    },
    /// More was asked for than the device grants.
    #[error(
        "{operation}: {source}; it asks for more than the device or port offers: compare with its \
         attributes"
    )]
    BeyondLimits {
        /// The call.
        operation: &'static str,
        /// `EINVAL`.
        source: io::Error,
    },
    /// The device or the kernel has no more of what was asked for.
    #[error(
        "{operation}: {source}; the device has no more of them, or the locked-memory limit \
         (`ulimit -l`) does not allow its queue"
    )]
    Exhausted {
        /// The call.
        operation: &'static str,
        /// `ENOMEM` or `ENOSPC`.
        source: io::Error,
    },
    /// The library, the kernel or the device cannot do it.
    #[error("{operation} is not supported: {why}")]
    Unsupported {
        /// The call.
        operation: &'static str,
        /// Who cannot.
        why: String,
    },
    /// This process may not.
    #[error(
        "{operation}: {source}; give the process access to /dev/infiniband (group rdma, or pass it \
         into the container)"
    )]
    NotPermitted {
        /// The call.
        operation: &'static str,
        /// `EPERM` or `EACCES`.
        source: io::Error,
    },
    /// The device was removed, or has failed.
    #[error("{operation}: {source}; the device is gone or has failed: open it anew")]
    DeviceGone {
        /// The call.
        operation: &'static str,
        /// `ENODEV`, `ENXIO` or `EIO`.
        source: io::Error,
    },
    /// A range that is not within the memory.
    #[error("{bytes} bytes at {offset} are not within {within} bytes of memory")]
    OutOfRange {
        /// Where it begins.
        offset: u64,
        /// Bytes of it.
        bytes: u64,
        /// Bytes there are.
        within: u64,
    },
    /// Anything else.
    #[error("{operation}: {source}")]
    Os {
        /// The call.
        operation: &'static str,
        /// What it said.
        source: io::Error,
    },
}

/// A peer's address as a person reads it.
struct Address(Option<Gid>, u16);

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(gid) => write!(f, "GID {gid}"),
            None => write!(f, "LID {:#x}", self.1),
        }
    }
}

impl VerbsError {
    /// The error for what the operating system said to `operation`.
    #[must_use]
    pub fn os(operation: &'static str, source: io::Error) -> Self {
        match Errno::from_io_error(&source) {
            Some(Errno::PERM | Errno::ACCESS) => Self::NotPermitted { operation, source },
            Some(Errno::NODEV | Errno::NXIO | Errno::IO) => Self::DeviceGone { operation, source },
            Some(Errno::OPNOTSUPP | Errno::NOSYS) => {
                Self::Unsupported { operation, why: format!("the kernel or device says: {source}") }
            }
            _ => Self::Os { operation, source },
        }
    }

    pub(crate) const fn foreign(operation: &'static str, what: &'static str) -> Self {
        Self::Foreign { operation, what }
    }

    /// The error for a function that the device's provider does not have.
    #[cold]
    pub(crate) fn no_operation(operation: &'static str) -> Self {
        Self::Unsupported {
            operation,
            why: "the device's provider has no such function".to_owned(),
        }
    }

    /// The error for a failed creation of an object.
    pub(crate) fn create(operation: &'static str, source: io::Error) -> Self {
        match Errno::from_io_error(&source) {
            Some(Errno::INVAL) => Self::BeyondLimits { operation, source },
            Some(Errno::NOMEM | Errno::NOSPC) => Self::Exhausted { operation, source },
            _ => Self::os(operation, source),
        }
    }

    /// The error for a failed registration of `bytes` bytes.
    pub(crate) fn register(operation: &'static str, bytes: u64, source: io::Error) -> Self {
        match Errno::from_io_error(&source) {
            Some(Errno::NOMEM) => Self::Memlock { bytes, source },
            Some(Errno::INVAL | Errno::FAULT) => Self::BadMemory { bytes, source },
            _ => Self::os(operation, source),
        }
    }

    /// The number the operating system gave, if it was asked.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        use std::error::Error as _;
        self.source()?.downcast_ref::<io::Error>()?.raw_os_error()
    }
}

/// The error for a function that returns an error number: 0 is success. Some old providers return
/// it negated.
pub(crate) fn check(code: i32) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code.checked_abs().unwrap_or(i32::MAX))),
    }
}
