//! Where PCI functions sit: how far a NIC is from a GPU, and which CPUs are near a device.
//!
//! Everything here is a function of a sysfs tree, `/sys` on a live host ([`HOST`]). A device's
//! real path there spells out the bridges above it:
//!
//! ```text
//! devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:08.0/0000:3d:00.0
//!         host bridge root port    switch up    switch down  the device
//! ```
//!
//! Virtual machines often show a flat tree, in which everything is [`Distance::Phb`] apart. What
//! access control (ACS) does to peer-to-peer traffic is not visible here at all.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use thiserror::Error;

/// The sysfs of this host.
pub const HOST: &str = "/sys";

/// Highest CPU number accepted: Linux is built for at most 8192 CPUs (`NR_CPUS`, x86).
const MAX_CPUS: u32 = 8192;
/// Most bytes a sysfs file may have: one page, at its largest on Arm.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// A PCI function: domain, bus, device, function. Shown, and parsed in either case, as sysfs and
/// CUDA write it: `0000:3b:00.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PciAddress {
    /// Domain; above `ffff` behind some host controllers (VMD).
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device, below 32.
    pub device: u8,
    /// Function, below 8.
    pub function: u8,
}

/// What lies between two PCI functions, nearest first; names and meanings as in
/// `nvidia-smi topo -m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Distance {
    /// One bridge or switch at most.
    Pix,
    /// Several bridges, below one root port.
    Pxb,
    /// A host bridge: up to the CPU and down again.
    Phb,
    /// Two host bridges of one NUMA node.
    Node,
    /// The interconnect between NUMA nodes.
    Sys,
}

/// Where a device sits.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Locality {
    /// Its NUMA node; `None` if the firmware does not say.
    pub numa_node: Option<u32>,
    /// The CPUs near it, ascending; all of them when the node is unknown. The process may be
    /// confined to fewer: intersect with its affinity mask before pinning.
    pub cpus: Vec<u32>,
}

/// Why a place cannot be told.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// There is no such device in the tree.
    #[error("no PCI device {address} in {root}; is it hidden from this container or VM?")]
    NoSuchDevice {
        /// The device.
        address: PciAddress,
        /// The tree.
        root: PathBuf,
    },
    /// A file of the device cannot be read.
    #[error("cannot read {path}: {source}; is /sys mounted and readable?")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file or path is not what the kernel writes.
    #[error("{path} is not {expected}; the tree is not a sysfs this crate understands")]
    Malformed {
        /// The file or path.
        path: PathBuf,
        /// What was expected.
        expected: &'static str,
    },
}

/// Text that is no PCI address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("not a PCI address: write it as 0000:3b:00.0")]
pub struct BadPciAddress;

impl FromStr for PciAddress {
    type Err = BadPciAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_address(text).ok_or(BadPciAddress)
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// What lies between the functions `a` and `b` in the tree at `root`.
///
/// When the functions are on different host bridges and the NUMA node of one is unknown, the
/// answer is [`Distance::Node`] on a host with one node and the cautious [`Distance::Sys`]
/// otherwise.
///
/// # Errors
/// [`TopologyError::NoSuchDevice`] if the tree lacks one of them; [`TopologyError::Malformed`] or
/// [`TopologyError::Unreadable`] if the tree is not a sysfs.
pub fn distance(root: &Path, a: PciAddress, b: PciAddress) -> Result<Distance, TopologyError> {
    let chain_a = chain(root, a)?;
    let chain_b = chain(root, b)?;
    let common = chain_a.iter().zip(&chain_b).take_while(|(a, b)| a == b).count();
    let Some(last) = common.checked_sub(1) else {
        return between_host_bridges(root, a, b);
    };
    if chain_a == chain_b {
        return Ok(Distance::Pix);
    }
    if is_host_bridge(&chain_a[last]) {
        return Ok(Distance::Phb);
    }
    // Below a common bridge, one step down is a device on its bus, two are a device on another
    // port of the same switch.
    let steps = chain_a.len().max(chain_b.len()) - common;
    Ok(if steps <= 2 { Distance::Pix } else { Distance::Pxb })
}

/// Where the function `address` sits in the tree at `root`.
///
/// # Errors
/// As [`distance`].
pub fn locality(root: &Path, address: PciAddress) -> Result<Locality, TopologyError> {
    let dir = device_dir(root, address)?;
    let path = dir.join("local_cpulist");
    let text = read(&path)?;
    let cpus =
        parse_list(&text).ok_or(TopologyError::Malformed { path, expected: "a CPU list" })?;
    Ok(Locality { numa_node: numa_node(&dir)?, cpus })
}

fn between_host_bridges(
    root: &Path,
    a: PciAddress,
    b: PciAddress,
) -> Result<Distance, TopologyError> {
    let node = |address| numa_node(&device_dir(root, address)?);
    let same = match (node(a)?, node(b)?) {
        (Some(a), Some(b)) => a == b,
        _ => {
            // A host without NUMA support has no such file.
            let nodes = read(&root.join("devices/system/node/online"));
            nodes.map_or(true, |text| parse_list(&text).is_some_and(|nodes| nodes.len() == 1))
        }
    };
    Ok(if same { Distance::Node } else { Distance::Sys })
}

/// Names of the directories from the host bridge down to the device.
fn chain(root: &Path, address: PciAddress) -> Result<Vec<String>, TopologyError> {
    let path = device_dir(root, address)?;
    let names: Option<Vec<String>> = path
        .components()
        .map(|component| component.as_os_str().to_str().map(str::to_owned))
        .skip_while(|name| !name.as_deref().is_some_and(is_host_bridge))
        .collect();
    match names {
        Some(names) if names.len() > 1 => Ok(names),
        _ => Err(TopologyError::Malformed { path, expected: "a path below a PCI host bridge" }),
    }
}

/// The real directory of a function.
fn device_dir(root: &Path, address: PciAddress) -> Result<PathBuf, TopologyError> {
    let link = root.join("bus/pci/devices").join(address.to_string());
    fs::canonicalize(&link).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => {
            TopologyError::NoSuchDevice { address, root: root.to_path_buf() }
        }
        _ => TopologyError::Unreadable { path: link, source },
    })
}

/// The NUMA node of the device at `dir`; kernels without NUMA support have no such file, and -1
/// stands for unknown.
fn numa_node(dir: &Path) -> Result<Option<u32>, TopologyError> {
    let path = dir.join("numa_node");
    let text = match read(&path) {
        Err(TopologyError::Unreadable { source, .. })
            if source.kind() == io::ErrorKind::NotFound =>
        {
            return Ok(None);
        }
        other => other?,
    };
    match text.parse::<i32>() {
        Ok(node) => Ok(u32::try_from(node).ok()),
        Err(_) => Err(TopologyError::Malformed { path, expected: "a NUMA node" }),
    }
}

fn read(path: &Path) -> Result<String, TopologyError> {
    use io::Read as _;

    let mut text = String::new();
    fs::File::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES).read_to_string(&mut text))
        .map_err(|source| TopologyError::Unreadable { path: path.to_path_buf(), source })?;
    Ok(text.trim().to_owned())
}

/// `pci0000:3a`, domain and bus.
fn is_host_bridge(name: impl AsRef<str>) -> bool {
    let Some(rest) = name.as_ref().strip_prefix("pci") else { return false };
    let Some((domain, bus)) = rest.split_once(':') else { return false };
    hex(domain, 4, 8).is_some() && hex(bus, 2, 2).is_some()
}

fn parse_address(text: &str) -> Option<PciAddress> {
    let (domain, rest) = text.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let narrow = |text, digits| u8::try_from(hex(text, digits, digits)?).ok();
    let address = PciAddress {
        domain: hex(domain, 4, 8)?,
        bus: narrow(bus, 2)?,
        device: narrow(device, 2)?,
        function: narrow(function, 1)?,
    };
    (address.device < 32 && address.function < 8).then_some(address)
}

/// A hexadecimal number of `least` to `most` digits, without the sign Rust's parser allows.
fn hex(text: &str, least: usize, most: usize) -> Option<u32> {
    let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !digits || text.len() < least || text.len() > most {
        return None;
    }
    u32::from_str_radix(text, 16).ok()
}

/// `0-3,8,10-11`, ascending as the kernel writes it; an empty list is valid.
fn parse_list(text: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in text.split(',').filter(|_| !text.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        let ascending = numbers.last().is_none_or(|&before| before < first);
        if !ascending || first > last || last >= MAX_CPUS {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}
