//! Devices: what they own, their ports, and the events they report.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use ibverbs_sys as sys;

use crate::cq::{Channel, Cq};
use crate::ffi::gid_bytes;
use crate::memory::Mr;
use crate::options::{DeviceOptions, Gid, PortOptions};
use crate::qp::Qp;
use crate::queue::ReceiveQueue;
use crate::state::{QpRef, State, Table};

/// The first QP number and key of a device, and by how much those of the next device differ: the
/// ranges overlap, as they do on real hosts, but no two devices begin with the same number.
const FIRST_QP_NUM: u32 = 0x40;
const FIRST_KEY: u32 = 0x10;
const NEXT_DEVICE: u32 = 3;

pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) options: DeviceOptions,
    pub(crate) fatal: bool,
    pub(crate) contexts: Table<Context>,
    pub(crate) pds: Table<Pd>,
    pub(crate) mrs: Table<Mr>,
    pub(crate) channels: Table<Channel>,
    pub(crate) cqs: Table<Cq>,
    pub(crate) srqs: Table<Srq>,
    pub(crate) qps: Table<Box<Qp>>,
}

/// A device that was opened.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) async_fd: OwnedFd,
    pub(crate) events: VecDeque<Event>,
}

#[derive(Debug)]
pub(crate) struct Pd {
    pub(crate) context: u32,
}

#[derive(Debug)]
pub(crate) struct Srq {
    /// The address of the caller's `ibv_srq`.
    pub(crate) handle: usize,
    pub(crate) pd: u32,
    pub(crate) context: u32,
    pub(crate) queue: ReceiveQueue,
    /// Reports once when fewer receives than this wait; 0 if it does not.
    pub(crate) limit: u32,
    pub(crate) unacked: u32,
}

/// An asynchronous event that nobody has fetched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub(crate) kind: sys::ibv_event_type,
    pub(crate) element: Element,
}

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    Port(u8),
    Cq(u32),
    Srq(u32),
    Qp(u32),
}

/// Makes a descriptor readable; each call wakes also those who wait for an edge.
pub(crate) fn ring(fd: &OwnedFd) {
    // An eventfd of ours: it fails only with 2^64 events unread.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Takes back what [`ring`] did, after the last event was fetched.
pub(crate) fn silence(fd: &OwnedFd) {
    // It was rung, so this does not block.
    let _ = rustix::io::read(fd, &mut [0; 8]);
}

impl Device {
    pub(crate) fn new(name: String, index: usize, options: DeviceOptions) -> Self {
        let shift = NEXT_DEVICE * index as u32;
        Self {
            name,
            options,
            fatal: false,
            contexts: Table::new(0),
            pds: Table::new(0),
            mrs: Table::new(FIRST_KEY + shift),
            channels: Table::new(0),
            cqs: Table::new(0),
            srqs: Table::new(0),
            qps: Table::new(FIRST_QP_NUM + shift),
        }
    }

    pub(crate) fn port(&self, number: u8) -> Option<&PortOptions> {
        self.options.ports.get(usize::from(number).checked_sub(1)?)
    }

    /// The entry of a port's table, if it is in use.
    pub(crate) fn gid(&self, port: u8, index: usize) -> Option<Gid> {
        *self.port(port)?.gids.get(index)?
    }

    pub(crate) fn port_is_up(&self, number: u8) -> bool {
        !self.fatal && self.port(number).is_some_and(|port| port.up)
    }

    /// Reports to the one who opened the device as `context`.
    pub(crate) fn report(&mut self, context: u32, kind: sys::ibv_event_type, element: Element) {
        if let Some(context) = self.contexts.get_mut(context) {
            context.events.push_back(Event { kind, element });
            ring(&context.async_fd);
        }
    }

    /// Reports to everyone who opened the device.
    pub(crate) fn report_to_all(&mut self, kind: sys::ibv_event_type, element: Element) {
        for context in self.contexts.iter_mut() {
            context.events.push_back(Event { kind, element });
            ring(&context.async_fd);
        }
    }

    /// Forgets events about an object that is gone, as the kernel does for those that were not read
    /// (Linux, `drivers/infiniband/core/uverbs_main.c`: `ib_uverbs_release_uevent`).
    pub(crate) fn forget_events(&mut self, context: u32, element: Element) {
        if let Some(context) = self.contexts.get_mut(context) {
            let before = context.events.len();
            context.events.retain(|event| event.element != element);
            if before > 0 && context.events.is_empty() {
                silence(&context.async_fd);
            }
        }
    }

    /// The count of events about an object that were fetched and not acknowledged.
    pub(crate) fn unacked(&mut self, element: Element) -> Option<&mut u32> {
        match element {
            Element::Port(_) => None,
            Element::Cq(cq) => self.cqs.get_mut(cq).map(|cq| &mut cq.unacked_async),
            Element::Srq(srq) => self.srqs.get_mut(srq).map(|srq| &mut srq.unacked),
            Element::Qp(qp) => self.qps.get_mut(qp).map(|qp| &mut qp.unacked),
        }
    }
}

/// Where an address leads, and in which kind of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) device: usize,
    pub(crate) port: u8,
    pub(crate) kind: sys::ibv_gid_type,
}

impl State {
    /// Where a QP of `device` sends what goes to `address`: to the port that has the GID, of the
    /// kind of the GID it sends from, or that has the LID.
    pub(crate) fn route(&self, device: usize, address: &sys::ibv_ah_attr) -> Option<Route> {
        let wanted = if address.is_global == 0 {
            None
        } else {
            let index = usize::from(address.grh.sgid_index);
            let kind = self.devices[device].gid(address.port_num, index)?.kind;
            Some(Some(Gid { bytes: gid_bytes(&address.grh.dgid), kind }))
        };
        let mut ports = self.devices.iter().enumerate().flat_map(|(device, owner)| {
            (1..).zip(&owner.options.ports).map(move |(port, options)| (device, port, options))
        });
        let (device, port, _) = ports.find(|(_, _, port)| match &wanted {
            Some(gid) => port.gids.contains(gid),
            None => port.lid != 0 && port.lid == address.dlid,
        })?;
        let kind = wanted.flatten().map_or(sys::IBV_GID_TYPE_IB, |gid| gid.kind);
        Some(Route { device, port, kind })
    }

    /// Takes a link down or up. Both are reported; nothing leaves or reaches a port that is down.
    pub(crate) fn set_port(&mut self, device: usize, port: u8, up: bool) {
        let owner = &mut self.devices[device];
        let index = usize::from(port) - 1;
        if std::mem::replace(&mut owner.options.ports[index].up, up) != up {
            let kind = if up { sys::IBV_EVENT_PORT_ACTIVE } else { sys::IBV_EVENT_PORT_ERR };
            owner.report_to_all(kind, Element::Port(port));
            self.push_along();
        }
    }

    /// Changes an entry of a port's table, and where the world's addresses lead.
    pub(crate) fn set_gid(&mut self, device: usize, port: u8, index: usize, gid: Option<Gid>) {
        let owner = &mut self.devices[device];
        owner.options.ports[usize::from(port) - 1].gids[index] = gid;
        owner.report_to_all(sys::IBV_EVENT_GID_CHANGE, Element::Port(port));
        for at in self.all_qps() {
            let Some(qp) = self.qp(at).filter(|qp| qp.is_connected()) else { continue };
            let route = self.route(at.device, &qp.attr.ah_attr);
            if let Some(qp) = self.qp_mut(at) {
                qp.route = route;
            }
        }
        self.push_along();
    }

    /// The device is gone: nothing executes, nothing completes, and every call that the kernel
    /// serves fails. Only its event says so (Linux, `drivers/infiniband/core/uverbs_main.c`:
    /// `ib_uverbs_free_hw_resources`).
    pub(crate) fn kill(&mut self, device: usize) {
        let owner = &mut self.devices[device];
        owner.fatal = true;
        owner.report_to_all(sys::IBV_EVENT_DEVICE_FATAL, Element::Port(1));
    }

    pub(crate) fn all_qps(&self) -> Vec<QpRef> {
        let devices = self.devices.iter().enumerate();
        devices
            .flat_map(|(device, owner)| {
                owner.qps.iter().map(move |(qp_num, _)| QpRef { device, qp_num })
            })
            .collect()
    }
}
