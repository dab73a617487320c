//! Devices as plain data.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use crate::driver::{check, code};
use crate::{Driver, Flush, FlushOptions, GpuError, PciAddress, WritesOrdering, flush_policy};

/// Room for a device's name, in bytes; the longest known are under 64.
const NAME_BYTES: usize = 256;
/// Room for a PCI address, in bytes; cuda.h asks for at least 13.
const PCI_BYTES: usize = 32;

/// One CUDA device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// Its number in this process, after `CUDA_VISIBLE_DEVICES`.
    pub ordinal: u32,
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// Where it sits: the same device has the same address in every process.
    pub pci_address: PciAddress,
    /// Its memory, in bytes.
    pub total_bytes: u64,
    /// Compute capability, as (major, minor).
    pub compute_capability: (u32, u32),
    /// It addresses pageable host memory through the host's own page tables: CPU and GPU share a
    /// coherent link (NVLink-C2C of Grace, NVLink of POWER9).
    pub coherent_host_link: bool,
    /// What it can do with a NIC.
    pub gpudirect: GpuDirect,
}

/// What a device can do with a NIC. A driver too old to know an attribute has not the feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuDirect {
    /// Memory can be exported as a dma-buf (`DMA_BUF_SUPPORTED`).
    pub dma_buf: bool,
    /// A NIC can reach the memory through the peer-memory kernel module (`.._RDMA_SUPPORTED`).
    /// Says nothing about whether that module is loaded.
    pub rdma: bool,
    /// So can memory of the virtual memory API, if allocated for it
    /// (`.._RDMA_WITH_CUDA_VMM_SUPPORTED`).
    pub rdma_with_vmm: bool,
    /// To whom a NIC's writes are ordered.
    pub writes_ordering: WritesOrdering,
    /// Which flushes there are.
    pub flush_options: FlushOptions,
}

impl GpuDirect {
    /// The flush a receiver owes this device; `several_paths` as for [`flush_policy`].
    #[must_use]
    pub const fn flush(&self, several_paths: bool) -> Flush {
        flush_policy(self.writes_ordering, self.flush_options, several_paths)
    }
}

impl Driver {
    /// All devices, by ordinal.
    ///
    /// # Errors
    /// As [`Driver::device`].
    pub fn devices(&self) -> Result<Vec<Device>, GpuError> {
        (0..self.device_count()).map(|ordinal| self.device(ordinal)).collect()
    }

    /// The device `ordinal`.
    ///
    /// # Errors
    /// [`GpuError::Call`] if there is no such device (`cuDeviceGet`, code 101) or a query fails;
    /// [`GpuError::BadPciAddress`] if its address cannot be understood.
    pub fn device(&self, ordinal: u32) -> Result<Device, GpuError> {
        let mut handle = 0;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: writes one `CUdevice`, an int.
        check("cuDeviceGet", unsafe { (self.table().device)(&raw mut handle, number) })?;

        let name = text::<NAME_BYTES>("cuDeviceGetName", |buffer, bytes| {
            // SAFETY: `buffer` has room for `bytes` bytes; `handle` came from `cuDeviceGet`.
            unsafe { (self.table().device_name)(buffer, bytes, handle) }
        })?;
        let pci = text::<PCI_BYTES>("cuDeviceGetPCIBusId", |buffer, bytes| {
            // SAFETY: as above.
            unsafe { (self.table().device_pci_bus_id)(buffer, bytes, handle) }
        })?;
        let Ok(pci_address) = pci.parse() else {
            return Err(GpuError::BadPciAddress { ordinal, text: pci });
        };
        let mut total_bytes = 0_usize;
        // SAFETY: writes one `size_t`.
        check("cuDeviceTotalMem", unsafe {
            (self.table().device_total_mem)(&raw mut total_bytes, handle)
        })?;

        let attribute = |attribute| self.attribute(attribute, handle);
        let flag = |attribute| Ok(self.attribute(attribute, handle)? == Some(1));
        let number = |value: Option<c_int>| value.and_then(|v| u32::try_from(v).ok()).unwrap_or(0);
        let writes_ordering =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?.unwrap_or(0);
        let flush_options =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?
                .unwrap_or(0);
        Ok(Device {
            ordinal,
            name,
            pci_address,
            total_bytes: total_bytes as u64,
            compute_capability: (
                number(attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?),
                number(attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?),
            ),
            coherent_host_link: flag(
                Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
            )?,
            gpudirect: GpuDirect {
                dma_buf: flag(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)?,
                rdma: flag(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)?,
                rdma_with_vmm: flag(
                    Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                )?,
                writes_ordering: WritesOrdering::from_attribute(writes_ordering),
                flush_options: FlushOptions::from_attribute(flush_options),
            },
        })
    }

    /// An attribute's value, or `None` if the driver does not know the attribute.
    fn attribute(&self, attribute: Attribute, handle: c_int) -> Result<Option<c_int>, GpuError> {
        let mut value = 0;
        // SAFETY: writes one int; `handle` came from `cuDeviceGet`.
        let code =
            unsafe { (self.table().device_attribute)(&raw mut value, attribute as c_int, handle) };
        if code == code::INVALID_VALUE {
            return Ok(None);
        }
        check("cuDeviceGetAttribute", code).map(|()| Some(value))
    }
}

/// The text `fill` writes into a buffer of `BYTES` bytes.
fn text<const BYTES: usize>(
    call: &'static str,
    fill: impl FnOnce(*mut c_char, c_int) -> c_int,
) -> Result<String, GpuError> {
    let mut buffer = [0_u8; BYTES];
    // One byte is held back, so that the text ends with a zero whatever the driver does.
    let bytes = c_int::try_from(BYTES - 1).unwrap_or(c_int::MAX);
    check(call, fill(buffer.as_mut_ptr().cast(), bytes))?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}
