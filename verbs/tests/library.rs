//! Promises about loading libibverbs, kept with stand-ins built on the spot and, where it is
//! installed, with the real one.

use std::path::PathBuf;
use std::process::Command;

use kvferry_verbs::{HostReport, Library, LibraryError};
use tempfile::TempDir;

/// Builds the stand-in; `devices` is how many it lists, or `-errno`.
fn stand_in(dir: &TempDir, devices: i32, dmabuf: bool) -> PathBuf {
    let output = dir.path().join(format!("libfake{devices}{dmabuf}.so"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/fake_ibverbs.rs");
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--edition=2024", "--crate-type=cdylib", "--check-cfg=cfg(dmabuf)", "-o"]);
    rustc.arg(&output).arg(source).env("FAKE_DEVICES", devices.to_string());
    if dmabuf {
        rustc.arg("--cfg=dmabuf");
    }
    assert!(rustc.status().expect("rustc runs").success());
    output
}

fn open(path: &PathBuf) -> Result<Library, LibraryError> {
    // SAFETY: the paths of these tests lead to stand-ins that keep libibverbs' ABI.
    unsafe { Library::open_named(path) }
}

#[test]
fn a_missing_library_is_said_to_be_missing_and_what_to_install() {
    // SAFETY: nothing by that name exists, so nothing is loaded.
    let error = unsafe { Library::open_named("libkvferry-no-such-thing.so.1") }.unwrap_err();
    assert!(
        matches!(&error, LibraryError::NoLibrary { name, .. } if name == "libkvferry-no-such-thing.so.1")
    );
    assert!(error.to_string().contains("libibverbs1"), "{error}");
    assert!(error.to_string().contains("cannot open shared object file"), "{error}");
}

#[test]
fn a_library_without_the_functions_is_refused_before_any_call() {
    // SAFETY: libc is loaded already, and exports none of libibverbs' names.
    let error = unsafe { Library::open_named("libc.so.6") }.unwrap_err();
    let LibraryError::MissingSymbol { library, symbol } = &error else { panic!("{error}") };
    assert_eq!((library.to_str(), *symbol), (Some("libc.so.6"), "ibv_get_device_list"));
}

#[test]
fn devices_are_named_and_dma_buf_support_is_told() {
    let dir = TempDir::new().unwrap();
    let library = open(&stand_in(&dir, 2, true)).unwrap();
    assert_eq!(library.devices().unwrap(), ["mlx5_0", "mlx5_\u{fffd}"]);
    assert!(library.supports_dmabuf());
    let library = open(&stand_in(&dir, 1, false)).unwrap();
    assert_eq!(library.devices().unwrap(), ["mlx5_0"]);
    assert!(!library.supports_dmabuf());
}

#[test]
fn no_devices_no_kernel_support_and_no_list_are_told_apart() {
    let dir = TempDir::new().unwrap();
    let error = |devices| open(&stand_in(&dir, devices, false)).unwrap().devices().unwrap_err();
    assert!(matches!(error(0), LibraryError::NoDevices));
    let enosys = rustix::io::Errno::NOSYS.raw_os_error();
    assert!(matches!(error(-enosys), LibraryError::NoKernelSupport));
    let eperm = rustix::io::Errno::PERM.raw_os_error();
    let failed = error(-eperm);
    let LibraryError::ListFailed { source } = &failed else { panic!("{failed}") };
    assert_eq!(source.raw_os_error(), Some(eperm));
}

#[test]
fn the_host_is_probed_without_a_panic_whatever_it_has() {
    let report = HostReport::probe();
    match (&report.library, &report.inventory) {
        (Ok(library), _) => {
            assert!(!library.devices.is_empty());
            println!("libibverbs works and sees {:?}", library.devices);
        }
        (Err(error), Ok(inventory)) => {
            assert!(!error.to_string().is_empty());
            println!(
                "SKIPPED the real library ({} devices in sysfs): {error}",
                inventory.devices.len()
            );
        }
        (Err(_), Err(error)) => panic!("this host's /sys cannot be read: {error}"),
    }
}

#[test]
fn a_library_inside_the_program_is_asked_for_the_same_functions() {
    extern "C" fn never_called() {
        std::process::abort();
    }
    let open = |missing: &str| {
        // SAFETY: these are not the functions of those names, but nothing is called.
        unsafe {
            Library::from_resolver("inside", |symbol| {
                if symbol == missing { std::ptr::null() } else { never_called as *const _ }
            })
        }
    };
    let library = open("").unwrap();
    assert_eq!(library.name(), "inside");
    assert!(library.clone().supports_dmabuf());
    assert!(!open("ibv_reg_dmabuf_mr").unwrap().supports_dmabuf());
    for required in ["ibv_get_device_list", "ibv_reg_mr_iova2", "ibv_ack_async_event"] {
        let error = open(required).unwrap_err();
        let LibraryError::MissingSymbol { library, symbol } = &error else { panic!("{error}") };
        assert_eq!((library.to_str(), *symbol), (Some("inside"), required));
    }
}
