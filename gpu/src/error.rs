//! Why a GPU cannot be used.

use thiserror::Error;

/// Why the CUDA driver, or one of its devices, cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GpuError {
    /// No CUDA driver library can be loaded.
    #[error(
        "no CUDA driver (libcuda.so.1): install the NVIDIA driver, or start the container with \
         its GPUs (--gpus all)"
    )]
    NoDriver,
    /// The library found is the toolkit's link-time stand-in (`CUDA_ERROR_STUB_LIBRARY`).
    #[error(
        "the libcuda found is the CUDA toolkit's stub, not a driver: take its stubs directory off \
         LD_LIBRARY_PATH"
    )]
    StubLibrary,
    /// The driver is too old for this crate.
    #[error("the CUDA driver has no function {symbol}: install a driver for CUDA 11.7 or later")]
    MissingSymbol {
        /// The missing function.
        symbol: &'static str,
    },
    /// The driver works and sees no device.
    #[error(
        "the CUDA driver sees no device: check nvidia-smi, CUDA_VISIBLE_DEVICES, and that \
         /dev/nvidia* is in the container"
    )]
    NoDevice,
    /// The devices are not up yet (`CUDA_ERROR_SYSTEM_NOT_READY`).
    #[error(
        "the GPUs are not ready: on NVSwitch systems start nvidia-fabricmanager of the driver's \
         version, and see its log"
    )]
    SystemNotReady,
    /// Library and kernel module are of different versions (`CUDA_ERROR_SYSTEM_DRIVER_MISMATCH`).
    #[error(
        "the CUDA driver library and the kernel module differ in version: reboot after a driver \
         update, or use a container image without its own libcuda"
    )]
    DriverMismatch,
    /// The driver described a device by something that is not a PCI address.
    #[error("the CUDA driver gave device {ordinal} the PCI address {text:?}, which is none")]
    BadPciAddress {
        /// The device.
        ordinal: u32,
        /// What it said.
        text: String,
    },
    /// A call failed for another reason.
    #[error("{call} failed with CUDA error {code}; see CUresult in the CUDA driver API reference")]
    Call {
        /// The function called.
        call: &'static str,
        /// The code, a `CUresult`; drivers newer than this crate may know more of them.
        code: i32,
    },
}
