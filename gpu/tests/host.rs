//! Promises about the host's own driver; where there is none, that this is said.

use kvferry_gpu::{Driver, GpuError, PointerKind, topology};

/// The driver, or a printed reason to skip.
fn driver() -> Option<Driver> {
    match Driver::open() {
        Ok(driver) => Some(driver),
        Err(error) => {
            println!("SKIPPED: {error}");
            None
        }
    }
}

#[test]
fn opening_the_driver_twice_says_the_same_and_never_panics() {
    let count = |result: Result<Driver, GpuError>| result.map(|driver| driver.device_count());
    let first = count(Driver::open());
    assert_eq!(first, count(Driver::open()));
    if let Err(error) = first {
        println!("this host: {error}");
    }
}

#[test]
fn host_memory_is_host_memory_with_and_without_a_driver() {
    let bytes = [0_u8; 64];
    let address = bytes.as_ptr().addr() as u64;
    assert_eq!(PointerKind::of(None, address), PointerKind::Host);
    if let Some(driver) = driver() {
        assert_eq!(PointerKind::of(Some(&driver), address), PointerKind::Host);
        assert_eq!(PointerKind::of(Some(&driver), 0), PointerKind::Host);
    }
}

#[test]
fn every_device_of_the_driver_is_found_in_sysfs() {
    let Some(driver) = driver() else { return };
    let devices = driver.devices().unwrap();
    assert_eq!(devices.len(), driver.device_count() as usize);
    for device in devices {
        assert!(!device.name.is_empty() && device.total_bytes > 0, "{device:?}");
        let place = topology::locality(topology::HOST.as_ref(), device.pci_address).unwrap();
        println!("{device:?} at {place:?}");
    }
}
