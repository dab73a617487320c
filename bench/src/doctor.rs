//! What this host can do for the engine, and how to mend what it cannot.

use anyhow::Result;
use comfy_table::Table;
use kvferry::{Engine, EngineConfig};
use kvferry_gpu::{Device, Driver, PciAddress, topology};
use kvferry_verbs::HostReport;

/// Columns of the table: what a terminal shows, also where the output is no terminal.
const TABLE_COLUMNS: u16 = 110;

/// Prints one line a question. A host without RDMA or GPUs is no fault: the tcp fabric needs neither.
pub(crate) fn run() -> Result<()> {
    let mut table = Table::new();
    table
        .set_content_arrangement(comfy_table::ContentArrangement::Dynamic)
        .set_width(TABLE_COLUMNS);
    table.set_header(["what", "here", "so"]);
    io_uring(&mut table)?;
    let report = HostReport::probe();
    rdma(&mut table, &report);
    gpus(&mut table, &report);
    println!("{table}");
    Ok(())
}

fn io_uring(table: &mut Table) -> Result<()> {
    let engine = Engine::builder(EngineConfig::default()).start()?;
    let io = engine.io();
    let so = match (&io.why_not, io.sendmsg_zc) {
        (Some(why), _) => why.clone(),
        (None, true) => "lanes are batched; zero-copy sends where they leave the host".to_owned(),
        (None, false) => "lanes are batched; zero-copy sends need Linux 6.1".to_owned(),
    };
    table.add_row(["lane I/O", &io.io.to_string(), &so]);
    Ok(())
}

fn rdma(table: &mut Table, report: &HostReport) {
    match &report.inventory {
        Err(error) => drop(table.add_row(["RDMA devices", "unknown", &error.to_string()])),
        Ok(inventory) if inventory.devices.is_empty() => {
            table.add_row([
                "RDMA devices",
                "none",
                "nothing to do; the rdma fabric is a later release",
            ]);
        }
        Ok(inventory) => {
            for device in &inventory.devices {
                for port in &device.ports {
                    let name = format!("{} port {}", device.name, port.number);
                    let rate = port
                        .rate_mbit_s
                        .map_or_else(|| "unknown rate".to_owned(), |rate| format!("{rate} Mbit/s"));
                    let gid = kvferry_verbs::rank_gids(&port.gids).first().map_or_else(
                        || "no usable GID".to_owned(),
                        |gid| format!("GID index {}", gid.index),
                    );
                    let so = if port.is_up() {
                        format!("up, {gid}")
                    } else {
                        "down: check cable and link".to_owned()
                    };
                    table.add_row([name, rate, so]);
                }
            }
            for fault in &inventory.faults {
                table.add_row(["sysfs".to_owned(), "unreadable".to_owned(), format!("{fault:?}")]);
            }
        }
    }
    match &report.library {
        Ok(library) => drop(
            table.add_row([
                "libibverbs".to_owned(),
                library.devices.join(", "),
                if library.dmabuf {
                    "can register dma-buf"
                } else {
                    "no dma-buf: rdma-core 34 or later has it"
                }
                .to_owned(),
            ]),
        ),
        Err(error) => drop(table.add_row(["libibverbs", "not usable", &error.to_string()])),
    }
    let memlock = &report.memlock;
    let limit = match (memlock.exempt, memlock.soft_bytes) {
        (true, _) => "exempt".to_owned(),
        (false, None) => "unlimited".to_owned(),
        (false, Some(bytes)) => format!("{bytes} bytes"),
    };
    // A KV pool of one GPU is tens of GiB; asking for one tells whether any would fit.
    let so = memlock
        .check(64 << 30)
        .map_or_else(|error| error.to_string(), |()| "large pools can be registered".to_owned());
    table.add_row(["locked memory".to_owned(), limit, so]);
}

fn gpus(table: &mut Table, report: &HostReport) {
    let devices = match Driver::open().and_then(|driver| driver.devices()) {
        Ok(devices) => devices,
        Err(error) => {
            table.add_row(["GPUs", "none usable", &error.to_string()]);
            return;
        }
    };
    for device in &devices {
        let direct = device.gpudirect;
        let memory = match (direct.dma_buf, direct.rdma) {
            (true, _) => "dma-buf",
            (false, true) => "peer memory module only",
            (false, false) => "no GPUDirect RDMA",
        };
        let name = format!("GPU {} {}", device.ordinal, device.name);
        table.add_row([
            name,
            format!("{} at {}", memory, device.pci_address),
            nearest(report, device),
        ]);
    }
}

/// The RDMA device nearest to a GPU.
fn nearest(report: &HostReport, gpu: &Device) -> String {
    let devices = report.inventory.as_ref().map_or(&[][..], |inventory| &inventory.devices);
    devices
        .iter()
        .filter_map(|nic| {
            let address: PciAddress = nic.pci_address.as_deref()?.parse().ok()?;
            let distance =
                topology::distance(std::path::Path::new(topology::HOST), gpu.pci_address, address)
                    .ok()?;
            Some((distance, &nic.name))
        })
        .min()
        .map_or_else(
            || "no RDMA device to pair it with".to_owned(),
            |(distance, name)| format!("nearest NIC {name} ({distance:?})"),
        )
}
