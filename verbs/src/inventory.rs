//! RDMA devices as the kernel shows them in sysfs (`Documentation/ABI/stable/sysfs-class-infiniband`
//! of the Linux source).
//!
//! Reading is tolerant: a device whose driver hides or garbles something is still listed, what
//! could not be read is `None`, and the reason is in [`Inventory::faults`].

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::gid::{Gid, GidClass, GidEntry, GidType};
use crate::sysfs::{Absent, Fault, Reader, pci_function};

/// Most devices read; hosts with every virtual function exposed have a few hundred.
const MAX_DEVICES: usize = 1024;
/// Most ports read of a device; the specification allows 254 on a channel adapter.
const MAX_PORTS: usize = 254;
/// Most GID table slots read of a port; real tables have 16 to 256.
const MAX_GIDS: usize = 4096;

/// The RDMA devices of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inventory {
    /// The devices, by name (`mlx5_2` before `mlx5_10`). Empty when the kernel has none.
    pub devices: Vec<Device>,
    /// What could not be understood; empty on a healthy host.
    pub faults: Vec<Fault>,
    /// Further faults that were not kept.
    pub faults_dropped: usize,
}

/// One RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// Its name, as `libibverbs` spells it: `mlx5_0`, `rxe0`.
    pub name: String,
    /// The PCI function it is, or is part of, as `0000:3b:00.0`; `None` for software devices.
    pub pci_address: Option<String>,
    /// The NUMA node the PCI function hangs off; `None` if the firmware does not say.
    pub numa_node: Option<u32>,
    /// Firmware version.
    pub firmware: Option<String>,
    /// Its ports, by number.
    pub ports: Vec<Port>,
}

/// One port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Port {
    /// Its number; ports are counted from 1.
    pub number: u32,
    /// Logical state.
    pub state: Option<PortState>,
    /// State of the cable.
    pub physical_state: Option<PhysicalState>,
    /// What the cable speaks.
    pub link_layer: Option<LinkLayer>,
    /// Signalling rate of all lanes together, in Mbit/s. A port that is down may show a nominal
    /// rate.
    pub rate_mbit_s: Option<u64>,
    /// Local identifier; InfiniBand only, zero while the subnet manager has not assigned one.
    pub lid: Option<u32>,
    /// The used entries of its GID table, by index.
    pub gids: Vec<GidEntry>,
}

/// Logical state of a port (InfiniBand specification, `PortState`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PortState {
    /// No state change.
    Nop,
    /// No link.
    Down,
    /// Link, but the subnet manager has not configured it: is one running?
    Init,
    /// Configured, not yet carrying data.
    Armed,
    /// Carries data.
    Active,
    /// Was active; the link is recovering.
    ActiveDefer,
}

/// State of the cable (InfiniBand specification, `PortPhysicalState`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PhysicalState {
    /// Sleeping.
    Sleep,
    /// Looking for a partner: no cable, or nothing at its other end.
    Polling,
    /// Switched off.
    Disabled,
    /// Negotiating.
    Training,
    /// Up.
    LinkUp,
    /// Recovering from errors.
    ErrorRecovery,
    /// Under test.
    PhyTest,
}

/// What a port's cable speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE, or iWARP.
    Ethernet,
}

/// Why there is no inventory at all.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InventoryError {
    /// The list of devices exists and cannot be read.
    #[error("cannot list RDMA devices in {path}: {source}; is /sys mounted and readable?")]
    Unreadable {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Inventory {
    /// The devices of this host, from `/sys`.
    ///
    /// # Errors
    /// As [`Inventory::read`].
    pub fn host() -> Result<Self, InventoryError> {
        Self::read(Path::new("/sys"))
    }

    /// The devices of the sysfs tree at `root`, a function of that tree alone.
    ///
    /// A tree without `class/infiniband` is a host without RDMA drivers: an empty inventory.
    /// The kernel's tables may change between two reads, so an entry removed meanwhile shows up
    /// as a fault.
    ///
    /// # Errors
    /// [`InventoryError::Unreadable`] if `class/infiniband` exists and cannot be listed.
    pub fn read(root: &Path) -> Result<Self, InventoryError> {
        let class = root.join("class/infiniband");
        let mut reader = Reader::default();
        let mut names = match reader.names(&class, MAX_DEVICES) {
            Ok(names) => names,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(source) => return Err(InventoryError::Unreadable { path: class, source }),
        };
        names.sort_by(|a, b| name_key(a).cmp(&name_key(b)));
        let devices =
            names.into_iter().map(|name| Device::read(&mut reader, &class, name)).collect();
        Ok(Self { devices, faults: reader.faults, faults_dropped: reader.faults_dropped })
    }
}

impl Device {
    fn read(reader: &mut Reader, class: &Path, name: String) -> Self {
        let dir = class.join(&name);
        let pci = pci_function(&dir.join("device"));
        let numa_node = pci.as_ref().and_then(|(path, _)| {
            // -1 is the kernel's word for "unknown".
            reader
                .value(&path.join("numa_node"), Absent::Fine, "a NUMA node", |text| {
                    text.parse::<i32>().ok()
                })
                .and_then(|node| u32::try_from(node).ok())
        });
        let firmware =
            reader.text(&dir.join("fw_ver"), Absent::Fine).filter(|text| !text.is_empty());
        let ports_dir = dir.join("ports");
        let ports = reader
            .numbers(&ports_dir, Absent::Fault, MAX_PORTS)
            .into_iter()
            .map(|number| Port::read(reader, &ports_dir.join(number.to_string()), number))
            .collect();
        Self { name, pci_address: pci.map(|(_, address)| address), numa_node, firmware, ports }
    }
}

impl Port {
    /// Whether the port carries data now.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.state == Some(PortState::Active)
    }

    fn read(reader: &mut Reader, dir: &Path, number: u32) -> Self {
        let state = reader.value(&dir.join("state"), Absent::Fault, "a port state", parse_state);
        let physical_state = reader.value(
            &dir.join("phys_state"),
            Absent::Fault,
            "a physical port state",
            parse_physical_state,
        );
        let link_layer = reader.value(
            &dir.join("link_layer"),
            Absent::Fault,
            "a link layer",
            |text| match text {
                "InfiniBand" => Some(LinkLayer::InfiniBand),
                "Ethernet" => Some(LinkLayer::Ethernet),
                _ => None,
            },
        );
        let rate_mbit_s = reader.value(&dir.join("rate"), Absent::Fault, "a rate", parse_rate);
        let lid = reader.value(&dir.join("lid"), Absent::Fault, "a LID", |text| {
            u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
        });
        let lid = lid.filter(|_| link_layer == Some(LinkLayer::InfiniBand));
        let gids = read_gids(reader, dir, link_layer);
        Self { number, state, physical_state, link_layer, rate_mbit_s, lid, gids }
    }
}

impl PortState {
    pub(crate) const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0 => Self::Nop,
            1 => Self::Down,
            2 => Self::Init,
            3 => Self::Armed,
            4 => Self::Active,
            5 => Self::ActiveDefer,
            _ => return None,
        })
    }
}

impl PhysicalState {
    pub(crate) const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            1 => Self::Sleep,
            2 => Self::Polling,
            3 => Self::Disabled,
            4 => Self::Training,
            5 => Self::LinkUp,
            6 => Self::ErrorRecovery,
            7 => Self::PhyTest,
            _ => return None,
        })
    }
}

/// Where this host's sysfs shows a port.
#[cfg(feature = "rdma")]
fn port_dir(device: &str, port: u8) -> PathBuf {
    Path::new("/sys/class/infiniband").join(device).join(format!("ports/{port}"))
}

/// The rate of a port of this host, in Mbit/s, if the kernel shows it.
#[cfg(feature = "rdma")]
pub(crate) fn rate_of(device: &str, port: u8) -> Option<u64> {
    let path = port_dir(device, port).join("rate");
    Reader::default().value(&path, Absent::Fine, "a rate", parse_rate)
}

/// The used GIDs of a port of this host, as the kernel shows them.
#[cfg(feature = "rdma")]
pub(crate) fn gids_of(device: &str, port: u8, link_layer: LinkLayer) -> Vec<GidEntry> {
    read_gids(&mut Reader::default(), &port_dir(device, port), Some(link_layer))
}

fn read_gids(reader: &mut Reader, dir: &Path, link_layer: Option<LinkLayer>) -> Vec<GidEntry> {
    let mut entries = Vec::new();
    for index in reader.numbers(&dir.join("gids"), Absent::Fault, MAX_GIDS) {
        let path = dir.join(format!("gids/{index}"));
        let Some(gid) =
            reader.value(&path, Absent::Fault, "a GID", |text| text.parse::<Gid>().ok())
        else {
            continue;
        };
        // An empty slot reads as zero, and its attributes as EINVAL, so stop here.
        if gid.class() == GidClass::Unusable {
            continue;
        }
        // The kernel calls both InfiniBand and RoCE v1 "IB/RoCE v1": only the port tells them
        // apart.
        let kind = if link_layer == Some(LinkLayer::InfiniBand) {
            GidType::InfiniBand
        } else {
            let path = dir.join(format!("gid_attrs/types/{index}"));
            let kind = reader.value(&path, Absent::Fault, "a GID type", |text| match text {
                "IB/RoCE v1" => Some(GidType::RoceV1),
                "RoCE v2" => Some(GidType::RoceV2),
                _ => None,
            });
            let Some(kind) = kind else { continue };
            kind
        };
        let net_device = if kind == GidType::InfiniBand {
            None
        } else {
            let path = dir.join(format!("gid_attrs/ndevs/{index}"));
            reader.text(&path, Absent::Fault).filter(|name| !name.is_empty())
        };
        entries.push(GidEntry::new(index, gid, kind, net_device));
    }
    entries
}

/// Orders `mlx5_2` before `mlx5_10`.
fn name_key(name: &str) -> (&str, u64, &str) {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (stem, name[stem.len()..].parse().unwrap_or(u64::MAX), name)
}

/// The number of `4: ACTIVE`; the word after it is for people.
fn leading_number(text: &str) -> Option<u32> {
    text.split_once(':')?.0.parse().ok()
}

fn parse_state(text: &str) -> Option<PortState> {
    PortState::from_code(leading_number(text)?)
}

fn parse_physical_state(text: &str) -> Option<PhysicalState> {
    PhysicalState::from_code(leading_number(text)?)
}

/// `100 Gb/sec (4X EDR)` or `2.5 Gb/sec (1X)`; the kernel's only fraction is one digit.
fn parse_rate(text: &str) -> Option<u64> {
    let (number, _) = text.split_once(" Gb/sec")?;
    let (whole, tenth) = number.split_once('.').unwrap_or((number, "0"));
    if tenth.len() != 1 {
        return None;
    }
    let tenth: u64 = tenth.parse().ok()?;
    whole.parse::<u64>().ok()?.checked_mul(1000)?.checked_add(tenth * 100)
}
