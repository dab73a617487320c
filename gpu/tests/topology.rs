//! Promises about topology, kept on invented sysfs trees.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use kvferry_gpu::topology::{self, Distance, PciAddress, TopologyError};
use tempfile::TempDir;

/// An invented sysfs.
struct Sysfs(TempDir);

impl Sysfs {
    fn new() -> Self {
        let sysfs = Self(TempDir::new().unwrap());
        fs::create_dir_all(sysfs.root().join("bus/pci/devices")).unwrap();
        sysfs
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    /// A function at `path` below `devices`, on NUMA node `node`.
    fn function(&self, path: &str, node: i32) -> PciAddress {
        let name = path.rsplit('/').next().unwrap();
        let dir = self.root().join("devices").join(path);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("numa_node"), format!("{node}\n")).unwrap();
        fs::write(dir.join("local_cpulist"), "0-1,4\n").unwrap();
        symlink(
            Path::new("../../../devices").join(path),
            self.root().join("bus/pci/devices").join(name),
        )
        .unwrap();
        name.parse().unwrap()
    }

    fn nodes(&self, online: &str) {
        fs::create_dir_all(self.root().join("devices/system/node")).unwrap();
        fs::write(self.root().join("devices/system/node/online"), online).unwrap();
    }

    /// Both ways, which must agree.
    fn distance(&self, a: PciAddress, b: PciAddress) -> Distance {
        let there = topology::distance(self.root(), a, b).unwrap();
        assert_eq!(there, topology::distance(self.root(), b, a).unwrap());
        there
    }
}

/// A switch below a root port of the host bridge of bus `3a`.
const SWITCH: &str = "pci0000:3a/0000:3a:00.0/0000:3b:00.0";

#[test]
fn a_nic_and_a_gpu_on_one_switch_are_nearest() {
    let sysfs = Sysfs::new();
    let gpu = sysfs.function(&format!("{SWITCH}/0000:3c:08.0/0000:3d:00.0"), 0);
    let nic = sysfs.function(&format!("{SWITCH}/0000:3c:10.0/0000:3e:00.0"), 0);
    let second_port = sysfs.function(&format!("{SWITCH}/0000:3c:10.0/0000:3e:00.1"), 0);
    assert_eq!(sysfs.distance(gpu, nic), Distance::Pix);
    assert_eq!(sysfs.distance(nic, second_port), Distance::Pix);
    assert_eq!(sysfs.distance(gpu, gpu), Distance::Pix);
}

#[test]
fn cascaded_switches_are_several_bridges() {
    let sysfs = Sysfs::new();
    let nic = sysfs.function(&format!("{SWITCH}/0000:3c:08.0/0000:3d:00.0"), 0);
    let gpu =
        sysfs.function(&format!("{SWITCH}/0000:3c:10.0/0000:3e:00.0/0000:3f:00.0/0000:40:00.0"), 0);
    assert_eq!(sysfs.distance(nic, gpu), Distance::Pxb);
}

#[test]
fn different_root_ports_meet_at_the_host_bridge() {
    let sysfs = Sysfs::new();
    let gpu = sysfs.function("pci0000:3a/0000:3a:00.0/0000:3b:00.0", 0);
    let nic = sysfs.function("pci0000:3a/0000:3a:02.0/0000:3c:00.0", 0);
    let on_the_root_bus = sysfs.function("pci0000:3a/0000:3a:05.0", 0);
    assert_eq!(sysfs.distance(gpu, nic), Distance::Phb);
    assert_eq!(sysfs.distance(gpu, on_the_root_bus), Distance::Phb);
}

#[test]
fn host_bridges_are_told_apart_by_numa_node() {
    let sysfs = Sysfs::new();
    let gpu = sysfs.function("pci0000:3a/0000:3a:00.0/0000:3b:00.0", 0);
    let near = sysfs.function("pci0000:5d/0000:5d:00.0/0000:5e:00.0", 0);
    let far = sysfs.function("pci0000:ae/0000:ae:00.0/0000:af:00.0", 1);
    assert_eq!(sysfs.distance(gpu, near), Distance::Node);
    assert_eq!(sysfs.distance(gpu, far), Distance::Sys);
}

#[test]
fn an_unknown_numa_node_is_far_unless_the_host_has_only_one() {
    let sysfs = Sysfs::new();
    let gpu = sysfs.function("pci0000:3a/0000:3a:00.0/0000:3b:00.0", 0);
    let lost = sysfs.function("pci0000:5d/0000:5d:00.0/0000:5e:00.0", -1);
    sysfs.nodes("0-1\n");
    assert_eq!(sysfs.distance(gpu, lost), Distance::Sys);
    sysfs.nodes("0\n");
    assert_eq!(sysfs.distance(gpu, lost), Distance::Node);
}

#[test]
fn the_same_bridge_name_in_two_domains_is_not_the_same_bridge() {
    let sysfs = Sysfs::new();
    let a = sysfs.function("pci0000:00/0000:00:00.0/0000:01:00.0", 0);
    let b = sysfs.function("pci0001:00/0001:00:00.0/0001:01:00.0", 1);
    assert_eq!(sysfs.distance(a, b), Distance::Sys);
}

#[test]
fn a_domain_nested_in_a_host_bridge_is_followed() {
    let sysfs = Sysfs::new();
    let nested = "pci0000:00/0000:00:0e.0/pci10000:e0";
    let a = sysfs.function(&format!("{nested}/10000:e0:06.0/10000:e1:00.0"), 0);
    let b = sysfs.function(&format!("{nested}/10000:e0:07.0/10000:e2:00.0"), 0);
    assert_eq!(a.domain, 0x10000);
    assert_eq!(sysfs.distance(a, b), Distance::Phb);
}

#[test]
fn distances_are_ordered_nearest_first() {
    use Distance::{Node, Phb, Pix, Pxb, Sys};
    assert!(Pix < Pxb && Pxb < Phb && Phb < Node && Node < Sys);
}

#[test]
fn locality_names_node_and_cpus() {
    let sysfs = Sysfs::new();
    let nic = sysfs.function("pci0000:3a/0000:3a:00.0/0000:3b:00.0", 1);
    let place = topology::locality(sysfs.root(), nic).unwrap();
    assert_eq!(place.numa_node, Some(1));
    assert_eq!(place.cpus, [0, 1, 4]);
    let lost = sysfs.function("pci0000:3a/0000:3a:01.0", -1);
    assert_eq!(topology::locality(sysfs.root(), lost).unwrap().numa_node, None);
}

#[test]
fn a_missing_device_and_a_missing_file_are_named() {
    let sysfs = Sysfs::new();
    let nic = sysfs.function("pci0000:3a/0000:3a:00.0/0000:3b:00.0", 1);
    let absent: PciAddress = "0000:ff:00.0".parse().unwrap();
    let error = topology::distance(sysfs.root(), nic, absent).unwrap_err();
    assert!(matches!(error, TopologyError::NoSuchDevice { address, .. } if address == absent));
    assert!(error.to_string().contains("0000:ff:00.0"), "{error}");

    let dir = sysfs.root().join("devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0");
    fs::remove_file(dir.join("numa_node")).unwrap();
    assert_eq!(topology::locality(sysfs.root(), nic).unwrap().numa_node, None, "no NUMA kernel");
    fs::remove_file(dir.join("local_cpulist")).unwrap();
    let error = topology::locality(sysfs.root(), nic).unwrap_err();
    let TopologyError::Unreadable { path, source } = &error else { panic!("{error}") };
    assert!(path.ends_with("local_cpulist"));
    assert_eq!(source.kind(), io::ErrorKind::NotFound);
}

#[test]
fn garbage_is_an_error_and_never_a_guess() {
    let sysfs = Sysfs::new();
    let nic = sysfs.function("pci0000:3a/0000:3a:00.0/0000:3b:00.0", 1);
    let dir = sysfs.root().join("devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0");
    for bad in ["3-1", "a", "1,,2", "0-4294967295", "5,1", "1-3,2", "-1", "9000"] {
        fs::write(dir.join("local_cpulist"), bad).unwrap();
        let error = topology::locality(sysfs.root(), nic).unwrap_err();
        assert!(matches!(error, TopologyError::Malformed { .. }), "{bad}: {error}");
    }
    fs::write(dir.join("local_cpulist"), "\n").unwrap();
    assert!(topology::locality(sysfs.root(), nic).unwrap().cpus.is_empty());
    fs::write(dir.join("local_cpulist"), [0xff, 0xfe]).unwrap();
    let error = topology::locality(sysfs.root(), nic).unwrap_err();
    assert!(matches!(error, TopologyError::Unreadable { .. }), "not text: {error}");
    fs::write(dir.join("local_cpulist"), vec![b'1'; 1 << 20]).unwrap();
    assert!(topology::locality(sysfs.root(), nic).is_err());
    fs::write(dir.join("local_cpulist"), "0").unwrap();
    fs::write(dir.join("numa_node"), "one").unwrap();
    assert!(topology::locality(sysfs.root(), nic).is_err());

    let stray = sysfs.function("platform/0000:01:00.0", 0);
    let error = topology::distance(sysfs.root(), stray, nic).unwrap_err();
    assert!(matches!(error, TopologyError::Malformed { .. }), "no host bridge: {error}");
}

#[test]
fn addresses_read_as_sysfs_and_cuda_write_them() {
    for (text, shown) in [
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("0000:9B:1F.7", "0000:9b:1f.7"),
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("10000:e1:00.0", "10000:e1:00.0"),
    ] {
        assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), shown);
    }
    for bad in [
        "",
        "3b:00.0",
        "0000:3b:00",
        "0000:3b:20.0",
        "0000:3b:00.8",
        "0000:+b:00.0",
        "0000:3b:00.0.0",
        "000000000:3b:00.0",
        "0000:3b:000.0",
        "../../etc",
    ] {
        assert!(bad.parse::<PciAddress>().is_err(), "{bad}");
    }
}

#[test]
fn every_device_of_this_host_has_a_place() {
    let root = Path::new(topology::HOST);
    let Ok(entries) = fs::read_dir(root.join("bus/pci/devices")) else {
        println!("SKIPPED: this host shows no PCI bus");
        return;
    };
    for entry in entries {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let address: PciAddress = name.parse().unwrap();
        assert_eq!(address.to_string(), name);
        topology::locality(root, address).unwrap();
        assert_eq!(topology::distance(root, address, address).unwrap(), Distance::Pix);
    }
}
