//! The CUDA driver library, loaded at run time.

use std::ffi::{c_char, c_int, c_uint, c_void};

use cudarc::driver::sys;

use crate::GpuError;

/// Codes of `CUresult` that this crate acts on. The calls below return plain integers, not
/// `sys::CUresult`: a Rust enum holding a code that a newer driver invented would be undefined
/// behaviour.
pub(crate) mod code {
    use super::{c_int, sys::CUresult};

    pub(crate) const SUCCESS: c_int = CUresult::CUDA_SUCCESS as c_int;
    pub(crate) const INVALID_VALUE: c_int = CUresult::CUDA_ERROR_INVALID_VALUE as c_int;
    pub(crate) const STUB_LIBRARY: c_int = CUresult::CUDA_ERROR_STUB_LIBRARY as c_int;
    pub(crate) const NO_DEVICE: c_int = CUresult::CUDA_ERROR_NO_DEVICE as c_int;
    pub(crate) const NOT_READY: c_int = CUresult::CUDA_ERROR_SYSTEM_NOT_READY as c_int;
    pub(crate) const MISMATCH: c_int = CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH as c_int;
}

/// The functions this crate calls, with the C types of `cuda.h`: `CUdevice` is an int, enums are
/// passed as ints, `CUdeviceptr` is 64 bits wide.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Table {
    pub(crate) init: unsafe extern "C" fn(c_uint) -> c_int,
    pub(crate) driver_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(crate) device_count: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(crate) device: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    pub(crate) device_name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
    pub(crate) device_pci_bus_id: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
    pub(crate) device_total_mem: unsafe extern "C" fn(*mut usize, c_int) -> c_int,
    pub(crate) device_attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    pub(crate) pointer_attribute: unsafe extern "C" fn(*mut c_void, c_int, u64) -> c_int,
}

/// A CUDA driver that is loaded, initialised and has at least one device. Cheap to copy; the
/// library stays loaded for the rest of the process.
#[derive(Debug, Clone, Copy)]
pub struct Driver {
    table: Table,
    version: u32,
    devices: u32,
}

impl Driver {
    /// Loads and initialises the driver. Asks for everything before the first call, so a host
    /// without CUDA, or with a broken one, gets an error and never a panic. May be called again;
    /// it creates no context.
    ///
    /// # Errors
    /// [`GpuError::NoDriver`], [`GpuError::StubLibrary`], [`GpuError::MissingSymbol`],
    /// [`GpuError::NoDevice`], [`GpuError::SystemNotReady`], [`GpuError::DriverMismatch`], or
    /// [`GpuError::Call`] for what else `cuInit` may say.
    pub fn open() -> Result<Self, GpuError> {
        // SAFETY: loads the driver under its well-known names, which runs its initialisers, as
        // every CUDA program does.
        if !unsafe { sys::is_culib_present() } {
            return Err(GpuError::NoDriver);
        }
        // SAFETY: as above; `culib` panics only if no library can be loaded, and one just was.
        let library = unsafe { sys::culib() };
        /// Looks a function up; the type comes from the field it is for.
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the field's type is the function's in `cuda.h`, with enums as ints.
                *unsafe { library.get($name) }
                    .map_err(|_| GpuError::MissingSymbol { symbol: $name })?
            };
        }
        Self::start(Table {
            init: symbol!("cuInit"),
            driver_version: symbol!("cuDriverGetVersion"),
            device_count: symbol!("cuDeviceGetCount"),
            device: symbol!("cuDeviceGet"),
            device_name: symbol!("cuDeviceGetName"),
            device_pci_bus_id: symbol!("cuDeviceGetPCIBusId"),
            device_total_mem: symbol!("cuDeviceTotalMem_v2"),
            device_attribute: symbol!("cuDeviceGetAttribute"),
            pointer_attribute: symbol!("cuPointerGetAttribute"),
        })
    }

    pub(crate) fn start(table: Table) -> Result<Self, GpuError> {
        // SAFETY: flags must be zero, and are.
        check("cuInit", unsafe { (table.init)(0) })?;
        let mut version = 0;
        // SAFETY: writes one int.
        check("cuDriverGetVersion", unsafe { (table.driver_version)(&raw mut version) })?;
        let mut count = 0;
        // SAFETY: writes one int.
        check("cuDeviceGetCount", unsafe { (table.device_count)(&raw mut count) })?;
        let version = u32::try_from(version).unwrap_or(0);
        match u32::try_from(count) {
            Ok(devices) if devices > 0 => Ok(Self { table, version, devices }),
            _ => Err(GpuError::NoDevice),
        }
    }

    /// The highest CUDA version the driver speaks, as (major, minor).
    #[must_use]
    pub const fn version(&self) -> (u32, u32) {
        // cuda.h: 1000 × major + 10 × minor.
        (self.version / 1000, self.version % 1000 / 10)
    }

    /// How many devices it sees; at least one.
    #[must_use]
    pub const fn device_count(&self) -> u32 {
        self.devices
    }

    pub(crate) const fn table(&self) -> &Table {
        &self.table
    }
}

/// The error a code stands for.
pub(crate) const fn check(call: &'static str, code: c_int) -> Result<(), GpuError> {
    Err(match code {
        code::SUCCESS => return Ok(()),
        code::STUB_LIBRARY => GpuError::StubLibrary,
        code::NO_DEVICE => GpuError::NoDevice,
        code::NOT_READY => GpuError::SystemNotReady,
        code::MISMATCH => GpuError::DriverMismatch,
        code => GpuError::Call { call, code },
    })
}

#[cfg(test)]
pub(crate) mod tests;
