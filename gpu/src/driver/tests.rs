//! A stand-in for the driver, one per thread, and the promises kept on it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};

use super::{Driver, Table};
use crate::{Flush, GpuError, PointerKind, WritesOrdering};

/// What the stand-in answers.
#[derive(Default)]
struct Fake {
    init: c_int,
    devices: c_int,
    pci: &'static str,
    /// Device attributes; others are unknown to this "driver".
    attributes: HashMap<c_int, c_int>,
    /// (address, attribute) to value or error.
    pointers: HashMap<(u64, c_int), Result<u32, c_int>>,
}

thread_local! {
    static FAKE: RefCell<Fake> = RefCell::default();
}

fn fake<T>(read: impl FnOnce(&Fake) -> T) -> T {
    FAKE.with_borrow(read)
}

unsafe extern "C" fn init(flags: c_uint) -> c_int {
    assert_eq!(flags, 0);
    fake(|fake| fake.init)
}

unsafe extern "C" fn version(out: *mut c_int) -> c_int {
    // SAFETY: the caller passes a pointer to an int.
    unsafe { *out = 12_080 };
    0
}

unsafe extern "C" fn count(out: *mut c_int) -> c_int {
    // SAFETY: as above.
    unsafe { *out = fake(|fake| fake.devices) };
    0
}

unsafe extern "C" fn device(out: *mut c_int, ordinal: c_int) -> c_int {
    if ordinal >= fake(|fake| fake.devices) {
        return 101;
    }
    // SAFETY: as above.
    unsafe { *out = 40 + ordinal };
    0
}

/// Writes `text` and a zero, as far as there is room.
///
/// # Safety
/// `out` has room for `bytes` bytes.
unsafe fn put(text: &str, out: *mut c_char, bytes: c_int) {
    let room = usize::try_from(bytes).unwrap();
    for (at, byte) in text.bytes().chain([0]).take(room).enumerate() {
        // SAFETY: `at` is below `bytes`.
        unsafe { out.add(at).cast::<u8>().write(byte) };
    }
}

unsafe extern "C" fn name(out: *mut c_char, bytes: c_int, handle: c_int) -> c_int {
    assert_eq!(handle, 40, "the handle of cuDeviceGet, not the ordinal");
    // A name as long as the room and longer: unterminated.
    // SAFETY: as the caller promises.
    unsafe { put(&"Long GPU ".repeat(64), out, bytes) };
    0
}

unsafe extern "C" fn pci(out: *mut c_char, bytes: c_int, _: c_int) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { put(fake(|fake| fake.pci), out, bytes) };
    0
}

unsafe extern "C" fn memory(out: *mut usize, _: c_int) -> c_int {
    // SAFETY: the caller passes a pointer to a size.
    unsafe { *out = 141 << 30 };
    0
}

unsafe extern "C" fn attribute(out: *mut c_int, attribute: c_int, _: c_int) -> c_int {
    let Some(value) = fake(|fake| fake.attributes.get(&attribute).copied()) else { return 1 };
    // SAFETY: the caller passes a pointer to an int.
    unsafe { *out = value };
    0
}

unsafe extern "C" fn pointer(out: *mut c_void, attribute: c_int, address: u64) -> c_int {
    match fake(|fake| fake.pointers.get(&(address, attribute)).copied()) {
        Some(Ok(value)) => {
            // SAFETY: the caller passes a pointer to an int.
            unsafe { *out.cast::<u32>() = value };
            0
        }
        Some(Err(code)) => code,
        None => 1,
    }
}

fn start(fake: Fake) -> Result<Driver, GpuError> {
    FAKE.set(fake);
    Driver::start(Table {
        init,
        driver_version: version,
        device_count: count,
        device,
        device_name: name,
        device_pci_bus_id: pci,
        device_total_mem: memory,
        device_attribute: attribute,
        pointer_attribute: pointer,
    })
}

fn hopper() -> Fake {
    Fake {
        devices: 1,
        pci: "0000:9B:00.0",
        attributes: HashMap::from([
            (75, 9),
            (76, 0),
            (100, 0),
            (110, 1),
            (116, 1),
            (117, 1),
            (118, 100),
            (124, 1),
        ]),
        ..Fake::default()
    }
}

#[test]
fn what_init_refuses_is_told_apart() {
    let error = |init| start(Fake { init, devices: 1, ..Fake::default() }).unwrap_err();
    assert_eq!(error(34), GpuError::StubLibrary);
    assert_eq!(error(100), GpuError::NoDevice);
    assert_eq!(error(802), GpuError::SystemNotReady);
    assert_eq!(error(803), GpuError::DriverMismatch);
    let unknown = error(12_345);
    assert_eq!(unknown, GpuError::Call { call: "cuInit", code: 12_345 });
    assert!(unknown.to_string().contains("cuInit failed with CUDA error 12345"), "{unknown}");
}

#[test]
fn a_driver_without_devices_is_no_driver() {
    for devices in [0, -1] {
        assert_eq!(start(Fake { devices, ..Fake::default() }).unwrap_err(), GpuError::NoDevice);
    }
}

#[test]
fn a_device_is_read_whole() {
    let driver = start(hopper()).unwrap();
    assert_eq!(driver.version(), (12, 8));
    let devices = driver.devices().unwrap();
    let [device] = &devices[..] else { panic!("{devices:?}") };
    assert_eq!(device.pci_address.to_string(), "0000:9b:00.0");
    assert_eq!(device.total_bytes, 141 << 30);
    assert_eq!(device.compute_capability, (9, 0));
    assert!(device.name.starts_with("Long GPU ") && device.name.len() < 256, "cut, not overrun");
    assert!(!device.coherent_host_link);
    let direct = device.gpudirect;
    assert!(direct.dma_buf && direct.rdma && direct.rdma_with_vmm);
    assert_eq!(direct.writes_ordering, WritesOrdering::Owner);
    assert!(direct.flush_options.host && !direct.flush_options.memops);
    assert_eq!(direct.flush(false), Flush::None);
    assert_eq!(direct.flush(true), Flush::ReadBack);
}

#[test]
fn an_attribute_the_driver_does_not_know_is_a_feature_it_lacks() {
    let driver = start(Fake { attributes: HashMap::new(), ..hopper() }).unwrap();
    let direct = driver.device(0).unwrap().gpudirect;
    assert!(!direct.dma_buf && !direct.rdma);
    assert_eq!(direct.writes_ordering, WritesOrdering::None);
    assert_eq!(direct.flush(false), Flush::ReadBack);
}

#[test]
fn a_device_that_is_not_there_or_not_on_pci_is_an_error() {
    let driver = start(hopper()).unwrap();
    assert_eq!(driver.device(1).unwrap_err(), GpuError::Call { call: "cuDeviceGet", code: 101 });
    let driver = start(Fake { pci: "nowhere", ..hopper() }).unwrap();
    let text = "nowhere".to_owned();
    assert_eq!(driver.device(0).unwrap_err(), GpuError::BadPciAddress { ordinal: 0, text });
}

#[test]
fn every_kind_of_pointer_is_told_apart() {
    // Attributes: 2 memory type, 8 is managed, 9 device ordinal.
    let pointers = HashMap::from([
        ((1, 2), Ok(1)), // pinned host memory
        ((1, 8), Ok(0)),
        ((2, 2), Ok(2)), // device 3
        ((2, 8), Ok(0)),
        ((2, 9), Ok(3)),
        ((3, 2), Ok(2)), // managed, now on a device
        ((3, 8), Ok(1)),
        ((3, 9), Ok(0)),
        ((4, 2), Ok(3)), // array
        ((4, 8), Ok(0)),
        ((5, 2), Err(201)), // no valid context
        ((6, 2), Ok(2)),    // mapped memory that lives on the host
        ((6, 8), Ok(0)),
        ((6, 9), Ok(u32::MAX)),
        ((7, 2), Ok(2)), // freed between two queries
        ((7, 8), Err(1)),
    ]);
    let driver = start(Fake { pointers, ..hopper() }).unwrap();
    let of = |address| PointerKind::of(Some(&driver), address);
    assert_eq!(of(0), PointerKind::Host, "unknown to CUDA");
    assert_eq!(of(1), PointerKind::Host);
    assert_eq!(of(2), PointerKind::Device { ordinal: 3 });
    assert_eq!(of(3), PointerKind::Managed);
    for address in 4..=7 {
        assert_eq!(of(address), PointerKind::Unknown, "{address}");
    }
    assert_eq!(PointerKind::of(None, 2), PointerKind::Host);
}
