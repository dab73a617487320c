//! Promises about the inventory, kept on invented sysfs trees.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;

use kvferry_verbs::{
    FaultKind, GidType, Inventory, InventoryError, LinkLayer, PhysicalState, Port, PortState,
    rank_gids,
};
use proptest::prelude::*;
use tempfile::TempDir;

const LINK_LOCAL: &str = "fe80:0000:0000:0000:ba59:9fff:fea7:1234";
const V4: &str = "0000:0000:0000:0000:0000:ffff:0a00:0105";
const EMPTY: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

/// An invented sysfs.
struct Sysfs(TempDir);

impl Sysfs {
    fn new() -> Self {
        let sysfs = Self(TempDir::new().unwrap());
        fs::create_dir_all(sysfs.root().join("class/infiniband")).unwrap();
        sysfs
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, path: &str, text: impl AsRef<[u8]>) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A device below the device directory `parent` (relative to `devices/`), as the kernel links it.
    fn device(&self, name: &str, parent: &str) {
        let dir = format!("devices/{parent}/infiniband/{name}");
        fs::create_dir_all(self.root().join(&dir).join("ports")).unwrap();
        symlink("../..", self.root().join(&dir).join("device")).unwrap();
        symlink(Path::new("../..").join(&dir), self.root().join("class/infiniband").join(name))
            .unwrap();
    }

    fn port(&self, device: &str, number: u32, layer: &str, state: &str, phys: &str, rate: &str) {
        let dir = format!("class/infiniband/{device}/ports/{number}");
        self.write(&format!("{dir}/state"), format!("{state}\n"));
        self.write(&format!("{dir}/phys_state"), format!("{phys}\n"));
        self.write(&format!("{dir}/link_layer"), format!("{layer}\n"));
        self.write(&format!("{dir}/rate"), format!("{rate}\n"));
        self.write(&format!("{dir}/lid"), "0x0\n");
        fs::create_dir_all(self.root().join(&dir).join("gids")).unwrap();
    }

    fn gid(&self, device: &str, index: u32, gid: &str, attributes: Option<(&str, &str)>) {
        let dir = format!("class/infiniband/{device}/ports/1");
        self.write(&format!("{dir}/gids/{index}"), format!("{gid}\n"));
        if let Some((kind, net_device)) = attributes {
            self.write(&format!("{dir}/gid_attrs/types/{index}"), format!("{kind}\n"));
            self.write(&format!("{dir}/gid_attrs/ndevs/{index}"), format!("{net_device}\n"));
        }
    }

    fn roce(&self, name: &str) {
        let pci = "pci0000:3a/0000:3a:00.0/0000:3b:00.0";
        self.device(name, pci);
        self.write(&format!("devices/{pci}/numa_node"), "1\n");
        self.write(&format!("class/infiniband/{name}/fw_ver"), "28.39.1002\n");
        self.port(name, 1, "Ethernet", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)");
        self.gid(name, 0, LINK_LOCAL, Some(("IB/RoCE v1", "eth0")));
        self.gid(name, 1, LINK_LOCAL, Some(("RoCE v2", "eth0")));
        self.gid(name, 2, V4, Some(("IB/RoCE v1", "eth0.7")));
        self.gid(name, 3, V4, Some(("RoCE v2", "eth0.7")));
        self.gid(name, 4, EMPTY, None);
    }

    fn read(&self) -> Inventory {
        Inventory::read(self.root()).unwrap()
    }

    fn only_port(&self) -> (Port, Inventory) {
        let inventory = self.read();
        (inventory.devices[0].ports[0].clone(), inventory)
    }
}

#[test]
fn a_roce_device_is_read_whole() {
    let sysfs = Sysfs::new();
    sysfs.roce("mlx5_0");
    let inventory = sysfs.read();
    assert_eq!(inventory.faults, []);
    let [device] = &inventory.devices[..] else { panic!("{inventory:?}") };
    assert_eq!(device.name, "mlx5_0");
    assert_eq!(device.pci_address.as_deref(), Some("0000:3b:00.0"));
    assert_eq!(device.numa_node, Some(1));
    assert_eq!(device.firmware.as_deref(), Some("28.39.1002"));
    let [port] = &device.ports[..] else { panic!("{device:?}") };
    assert!(port.is_up());
    assert_eq!(port.number, 1);
    assert_eq!(port.physical_state, Some(PhysicalState::LinkUp));
    assert_eq!(port.link_layer, Some(LinkLayer::Ethernet));
    assert_eq!(port.rate_mbit_s, Some(400_000));
    assert_eq!(port.lid, None, "RoCE has no LIDs");
    let indices: Vec<_> = port.gids.iter().map(|entry| entry.index).collect();
    assert_eq!(indices, [0, 1, 2, 3], "the empty slot is not an entry");
    let best = rank_gids(&port.gids)[0];
    assert_eq!((best.index, best.kind), (3, GidType::RoceV2));
    assert_eq!(best.net_device.as_deref(), Some("eth0.7"));
}

#[test]
fn an_infiniband_port_has_a_lid_and_infiniband_gids() {
    let sysfs = Sysfs::new();
    sysfs.device("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0");
    sysfs.port("mlx5_0", 1, "InfiniBand", "4: ACTIVE", "5: LinkUp", "2.5 Gb/sec (1X SDR)");
    sysfs.write("class/infiniband/mlx5_0/ports/1/lid", "0x1f\n");
    // The kernel's name for the type of an InfiniBand GID; it has no network device.
    sysfs.gid("mlx5_0", 0, LINK_LOCAL, None);
    sysfs.write("class/infiniband/mlx5_0/ports/1/gid_attrs/types/0", "IB/RoCE v1\n");
    let (port, inventory) = sysfs.only_port();
    assert_eq!(inventory.faults, []);
    assert_eq!(port.lid, Some(0x1f));
    assert_eq!(port.rate_mbit_s, Some(2500));
    assert_eq!(port.gids[0].kind, GidType::InfiniBand);
    assert_eq!(inventory.devices[0].numa_node, None, "no numa_node file: unknown, not a fault");
}

#[test]
fn a_port_that_is_down_says_why() {
    let sysfs = Sysfs::new();
    sysfs.device("mlx5_0", "pci0000:00/0000:01:00.0");
    sysfs.write("devices/pci0000:00/0000:01:00.0/numa_node", "-1\n");
    sysfs.port("mlx5_0", 1, "Ethernet", "1: DOWN", "3: Disabled", "40 Gb/sec (4X QDR)");
    let (port, inventory) = sysfs.only_port();
    assert_eq!(inventory.faults, []);
    assert!(!port.is_up());
    assert_eq!(port.state, Some(PortState::Down));
    assert_eq!(port.physical_state, Some(PhysicalState::Disabled));
    assert_eq!(inventory.devices[0].numa_node, None, "-1 is unknown");
}

#[test]
fn a_scalable_function_belongs_to_the_pci_function_above_it() {
    let sysfs = Sysfs::new();
    sysfs.device("mlx5_4", "pci0000:08/0000:08:00.0/mlx5_core.sf.4");
    sysfs.write("devices/pci0000:08/0000:08:00.0/numa_node", "0\n");
    let device = &sysfs.read().devices[0];
    assert_eq!(device.pci_address.as_deref(), Some("0000:08:00.0"));
    assert_eq!(device.numa_node, Some(0));
}

#[test]
fn a_software_device_has_no_pci_address() {
    let sysfs = Sysfs::new();
    sysfs.device("rxe0", "virtual");
    assert_eq!(sysfs.read().devices[0].pci_address, None);
}

#[test]
fn devices_come_in_the_order_people_count() {
    let sysfs = Sysfs::new();
    for name in ["mlx5_10", "rxe0", "mlx5_2", "bnxt_re0"] {
        sysfs.device(name, &format!("virtual/{name}"));
    }
    let names: Vec<_> = sysfs.read().devices.into_iter().map(|device| device.name).collect();
    assert_eq!(names, ["bnxt_re0", "mlx5_2", "mlx5_10", "rxe0"]);
}

#[test]
fn a_host_without_rdma_has_an_empty_inventory() {
    let empty = TempDir::new().unwrap();
    let inventory = Inventory::read(empty.path()).unwrap();
    assert_eq!((inventory.devices.len(), inventory.faults.len()), (0, 0));
}

#[test]
fn a_list_that_cannot_be_read_is_an_error_that_names_the_path() {
    let root = TempDir::new().unwrap();
    fs::create_dir(root.path().join("class")).unwrap();
    fs::write(root.path().join("class/infiniband"), "not a directory").unwrap();
    let error = Inventory::read(root.path()).unwrap_err();
    let InventoryError::Unreadable { path, source } = &error else { panic!("{error}") };
    assert!(path.ends_with("class/infiniband"));
    assert_eq!(source.kind(), io::ErrorKind::NotADirectory);
    assert!(error.to_string().contains("is /sys mounted"), "{error}");
}

#[test]
fn garbage_is_a_fault_of_its_own_and_spares_the_rest() {
    let sysfs = Sysfs::new();
    sysfs.roce("mlx5_0");
    let dir = "class/infiniband/mlx5_0/ports/1";
    sysfs.write(&format!("{dir}/state"), "ACTIVE\n");
    sysfs.write(&format!("{dir}/phys_state"), [0xff, 0xfe, 0x00]);
    sysfs.write(&format!("{dir}/rate"), vec![b'9'; 1 << 20]);
    sysfs.write(&format!("{dir}/gids/2"), "10.0.1.5\n");
    sysfs.write(&format!("{dir}/gid_attrs/types/3"), "RoCE v3\n");
    fs::remove_file(sysfs.root().join(dir).join("lid")).unwrap();
    sysfs.write("class/infiniband/mlx5_0/ports/one/state", "4: ACTIVE\n");
    let (port, inventory) = sysfs.only_port();

    assert_eq!((port.state, port.physical_state, port.rate_mbit_s), (None, None, None));
    assert_eq!(port.link_layer, Some(LinkLayer::Ethernet));
    let indices: Vec<_> = port.gids.iter().map(|entry| entry.index).collect();
    assert_eq!(indices, [0, 1]);
    let fault = |file: &str| {
        let path = sysfs.root().join("class/infiniband/mlx5_0/ports").join(file);
        let fault = inventory.faults.iter().find(|fault| fault.path == path);
        fault.unwrap_or_else(|| panic!("no fault for {file}: {:?}", inventory.faults)).kind.clone()
    };
    assert!(matches!(fault("1/state"), FaultKind::Malformed { .. }));
    assert_eq!(fault("1/phys_state"), FaultKind::NotText);
    assert_eq!(fault("1/rate"), FaultKind::TooLarge);
    assert!(matches!(fault("1/gids/2"), FaultKind::Malformed { .. }));
    assert!(matches!(fault("1/gid_attrs/types/3"), FaultKind::Malformed { .. }));
    assert_eq!(fault("1/lid"), FaultKind::Unreadable(io::ErrorKind::NotFound));
    assert!(matches!(fault("one"), FaultKind::Malformed { .. }));
    assert_eq!(inventory.faults.len(), 7);
    assert!(inventory.faults.iter().any(|fault| fault.to_string().contains("is not UTF-8")));
}

#[test]
fn a_device_with_nothing_in_it_is_still_listed() {
    let sysfs = Sysfs::new();
    fs::create_dir(sysfs.root().join("class/infiniband/mlx5_0")).unwrap();
    let inventory = sysfs.read();
    assert_eq!(inventory.devices[0].ports, []);
    assert_eq!(inventory.faults.len(), 1, "the missing ports directory");
}

#[test]
fn a_name_that_is_not_text_is_a_fault() {
    let sysfs = Sysfs::new();
    let name = std::ffi::OsStr::from_bytes(b"mlx5_\xff");
    fs::create_dir(sysfs.root().join("class/infiniband").join(name)).unwrap();
    let inventory = sysfs.read();
    assert_eq!(inventory.devices, []);
    assert_eq!(inventory.faults[0].kind, FaultKind::NotText);
}

#[test]
fn faults_are_bounded_and_the_rest_counted() {
    let sysfs = Sysfs::new();
    for number in 0..50 {
        fs::create_dir_all(sysfs.root().join(format!("class/infiniband/d/ports/{number}")))
            .unwrap();
    }
    let inventory = sysfs.read();
    assert_eq!(inventory.devices[0].ports.len(), 50);
    // Six missing files a port.
    assert_eq!(inventory.faults.len() + inventory.faults_dropped, 300);
    assert!(inventory.faults.len() < 300);
}

#[test]
fn too_many_gids_are_cut_off_with_a_fault() {
    let sysfs = Sysfs::new();
    let gids = "class/infiniband/d/ports/1/gids";
    for index in 0..4200 {
        sysfs.write(&format!("{gids}/{index}"), EMPTY);
    }
    let inventory = sysfs.read();
    let cut = |kind: &FaultKind| matches!(kind, FaultKind::TooMany { limit: 4096 });
    assert!(inventory.faults.iter().any(|fault| cut(&fault.kind)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_contents_break_the_reader(
        contents in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 9)
    ) {
        let sysfs = Sysfs::new();
        sysfs.roce("mlx5_0");
        let files = [
            "fw_ver", "ports/1/state", "ports/1/phys_state", "ports/1/link_layer",
            "ports/1/rate", "ports/1/lid", "ports/1/gids/0", "ports/1/gid_attrs/types/1",
            "ports/1/gid_attrs/ndevs/2",
        ];
        for (file, bytes) in files.iter().zip(&contents) {
            sysfs.write(&format!("class/infiniband/mlx5_0/{file}"), bytes);
        }
        let inventory = sysfs.read();
        prop_assert_eq!(inventory.devices.len(), 1);
        prop_assert_eq!(inventory.devices[0].ports.len(), 1);
    }
}
