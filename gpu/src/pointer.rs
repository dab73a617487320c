//! Whose memory an address points to.

use std::ffi::c_int;

use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute as Attribute};

use crate::Driver;
use crate::driver::code;

/// What kind of memory an address points to, as CUDA sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PointerKind {
    /// Host memory: pageable, or pinned through CUDA. Also any address CUDA has never heard of;
    /// whether the CPU can read there is not looked at.
    Host,
    /// Memory of one device.
    Device {
        /// The device's number in this process.
        ordinal: u32,
    },
    /// Managed memory: it moves between host and devices, so it must not be registered with a
    /// NIC.
    Managed,
    /// CUDA knows it and it is none of these (an array), or CUDA cannot tell (a broken context).
    /// Treat it as not transferable.
    Unknown,
}

impl PointerKind {
    /// The kind of memory at `address`. Without a driver there is only host memory.
    ///
    /// Any address may be asked about: nothing is read there. The answer holds only while the
    /// allocation lives.
    #[must_use]
    pub fn of(driver: Option<&Driver>, address: u64) -> Self {
        let Some(driver) = driver else { return Self::Host };
        let query = |attribute| query(driver, attribute, address);

        let memory_type = match query(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
            Ok(memory_type) => memory_type,
            // The driver's word for an address that is in no allocation of its own.
            Err(code::INVALID_VALUE) => return Self::Host,
            Err(_) => return Self::Unknown,
        };
        // Managed memory reports the type of the place it is at now, so this goes first.
        match query(Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED) {
            Ok(0) => {}
            Ok(_) => return Self::Managed,
            Err(_) => return Self::Unknown,
        }
        if memory_type == CUmemorytype::CU_MEMORYTYPE_HOST as u32 {
            Self::Host
        } else if memory_type == CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 {
            match query(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
                // The ordinal is an int, -1 (CU_DEVICE_CPU) for memory of the virtual memory API
                // that lives on the host.
                Ok(ordinal) => match u32::try_from(ordinal.cast_signed()) {
                    Ok(ordinal) => Self::Device { ordinal },
                    Err(_) => Self::Unknown,
                },
                Err(_) => Self::Unknown,
            }
        } else {
            Self::Unknown
        }
    }
}

/// A pointer attribute of 32 bits or fewer, or the driver's code.
fn query(driver: &Driver, attribute: Attribute, address: u64) -> Result<u32, c_int> {
    // Attributes are ints or single bytes; the rest of the value stays zero. The host is
    // little-endian wherever CUDA runs.
    let mut value = 0_u32;
    // SAFETY: the attributes asked for are written as an int or less; the address is only looked
    // up in the driver's tables, not followed.
    let code = unsafe {
        (driver.table().pointer_attribute)((&raw mut value).cast(), attribute as c_int, address)
    };
    if code == code::SUCCESS { Ok(value) } else { Err(code) }
}
