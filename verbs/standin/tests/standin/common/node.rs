//! A host of a test.

use std::ffi::{c_int, c_void};
use std::ops::Range;

use kvferry_verbs_standin::sys;

use super::{BYTES, EVERYTHING, Net, errno};
use crate::common::c;

/// A completion, as a caller reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    pub wr_id: u64,
    pub status: u32,
    pub vendor_err: u32,
    pub opcode: u32,
    pub bytes: u32,
    pub imm: u32,
    pub flags: u32,
    pub qp_num: u32,
}

/// A host: its device, one CQ with a channel, and registered memory.
pub struct Node<'n> {
    pub net: &'n Net,
    pub context: *mut sys::ibv_context,
    pub pd: *mut sys::ibv_pd,
    pub channel: *mut sys::ibv_comp_channel,
    pub cq: *mut sys::ibv_cq,
    pub mr: *mut sys::ibv_mr,
    memory: *mut u8,
}

impl<'n> Node<'n> {
    pub fn new(net: &'n Net, device: usize) -> Self {
        Self::with_cq(net, device, 256)
    }

    pub fn with_cq(net: &'n Net, device: usize, depth: c_int) -> Self {
        let verbs = &net.verbs;
        let context = net.open(device);
        assert!(!context.is_null());
        // SAFETY: the context is open.
        set_nonblocking(unsafe { (*context).async_fd });
        let pd = c!(verbs, ibv_alloc_pd(context));
        let channel = c!(verbs, ibv_create_comp_channel(context));
        // SAFETY: the channel was just made.
        set_nonblocking(unsafe { (*channel).fd });
        let nothing = std::ptr::null_mut();
        let cq = c!(verbs, ibv_create_cq(context, depth, nothing, channel, 0));
        let memory = Box::into_raw(vec![0u8; BYTES].into_boxed_slice()).cast::<u8>();
        let mr = c!(verbs, ibv_reg_mr(pd, memory.cast(), BYTES, EVERYTHING as c_int));
        assert!(!cq.is_null() && !mr.is_null());
        Self { net, context, pd, channel, cq, mr, memory }
    }

    pub fn addr(&self, offset: usize) -> u64 {
        (self.memory.addr() + offset) as u64
    }

    pub fn memory(&self) -> *mut c_void {
        self.memory.cast()
    }

    pub fn fill(&self, range: Range<usize>, byte: u8) {
        assert!(range.end <= BYTES);
        // SAFETY: the range is the node's own memory, which only this thread touches.
        unsafe { self.memory.add(range.start).write_bytes(byte, range.len()) };
    }

    pub fn bytes(&self, range: Range<usize>) -> Vec<u8> {
        assert!(range.end <= BYTES);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.memory.add(range.start), range.len()) }.to_vec()
    }

    /// The one byte that a range consists of.
    #[track_caller]
    pub fn byte(&self, range: Range<usize>) -> u8 {
        let bytes = self.bytes(range);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{bytes:?}");
        bytes[0]
    }

    pub fn lkey(&self) -> u32 {
        // SAFETY: the region is there as long as the node.
        unsafe { (*self.mr).lkey }
    }

    pub fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.mr).rkey }
    }

    pub fn sge(&self, range: Range<usize>) -> sys::ibv_sge {
        let length = range.len() as u32;
        sys::ibv_sge { addr: self.addr(range.start), length, lkey: self.lkey() }
    }

    /// Registers all memory once more.
    pub fn register(&self, pd: *mut sys::ibv_pd, access: u32) -> *mut sys::ibv_mr {
        let mr = c!(self.net.verbs, ibv_reg_mr(pd, self.memory(), BYTES, access as c_int));
        assert!(!mr.is_null());
        mr
    }

    pub fn poll(&self) -> Vec<Seen> {
        poll(self.cq)
    }

    /// Polls until there are `count` completions.
    pub fn wait(&self, count: usize) -> Vec<Seen> {
        let mut seen = Vec::new();
        while seen.len() < count {
            seen.extend(self.poll());
            std::thread::yield_now();
        }
        seen
    }

    /// What an event is, and the QP or port it is about.
    pub fn events(&self) -> Vec<(u32, u32)> {
        let verbs = &self.net.verbs;
        let mut events = Vec::new();
        let mut event = sys::ibv_async_event::default();
        while c!(verbs, ibv_get_async_event(self.context, &raw mut event)) == 0 {
            let kind = event.event_type;
            // SAFETY: the kind says which field is set, and objects of events are there.
            let about = unsafe {
                match kind {
                    sys::IBV_EVENT_CQ_ERR => (*event.element.cq).handle,
                    sys::IBV_EVENT_SRQ_LIMIT_REACHED => (*event.element.srq).handle,
                    sys::IBV_EVENT_QP_FATAL
                    | sys::IBV_EVENT_QP_REQ_ERR
                    | sys::IBV_EVENT_QP_ACCESS_ERR
                    | sys::IBV_EVENT_QP_LAST_WQE_REACHED => (*event.element.qp).qp_num,
                    _ => event.element.port_num.cast_unsigned(),
                }
            };
            c!(verbs, ibv_ack_async_event(&raw mut event));
            events.push((kind, about));
        }
        assert_eq!(errno(), libc::EAGAIN);
        events
    }

    pub fn arm(&self, solicited_only: bool) {
        // SAFETY: the CQ and its context are there.
        let armed = unsafe {
            (*self.context).ops.req_notify_cq.unwrap()(self.cq, c_int::from(solicited_only))
        };
        assert_eq!(armed, 0);
    }

    /// Whether the channel had an event, which is then acknowledged.
    pub fn has_event(&self) -> bool {
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        let verbs = &self.net.verbs;
        if c!(verbs, ibv_get_cq_event(self.channel, &raw mut cq, &raw mut context)) != 0 {
            assert_eq!(errno(), libc::EAGAIN);
            return false;
        }
        assert_eq!(cq, self.cq);
        c!(verbs, ibv_ack_cq_events(cq, 1));
        true
    }

    /// Sleeps until the channel has an event.
    pub fn sleep(&self) {
        // SAFETY: the channel is there as long as the node.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw((*self.channel).fd) };
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut fds, None), Ok(1));
        assert!(self.has_event());
    }
}

impl Drop for Node<'_> {
    fn drop(&mut self) {
        let verbs = &self.net.verbs;
        let codes = [
            c!(verbs, ibv_dereg_mr(self.mr)),
            c!(verbs, ibv_destroy_cq(self.cq)),
            c!(verbs, ibv_destroy_comp_channel(self.channel)),
            c!(verbs, ibv_dealloc_pd(self.pd)),
            c!(verbs, ibv_close_device(self.context)),
        ];
        let memory = std::ptr::slice_from_raw_parts_mut(self.memory, BYTES);
        // SAFETY: `new` made it of a box, and it is not registered any more.
        drop(unsafe { Box::from_raw(memory) });
        if !std::thread::panicking() {
            assert_eq!(codes, [0; 5]);
        }
    }
}

fn set_nonblocking(fd: c_int) {
    // SAFETY: the descriptor is open, as whoever owns it is there.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(fd).unwrap();
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
}

/// Whether a descriptor of the stand-in has something to be read.
pub fn is_readable(fd: c_int) -> bool {
    // SAFETY: the descriptor is open, as whoever owns it is there.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&now)).unwrap() == 1
}

pub fn poll(cq: *mut sys::ibv_cq) -> Vec<Seen> {
    let mut entries = [sys::ibv_wc::default(); 64];
    // SAFETY: the CQ and its context are there, and there is room for this many.
    let polled = unsafe {
        (*(*cq).context).ops.poll_cq.unwrap()(cq, entries.len() as c_int, entries.as_mut_ptr())
    };
    let seen = entries[..usize::try_from(polled).unwrap()].iter().map(|wc| {
        let (status, vendor_err) = wc.error().unwrap_or((0, 0));
        Seen {
            wr_id: wc.wr_id(),
            status,
            vendor_err,
            opcode: wc.opcode(),
            bytes: wc.len() as u32,
            imm: wc.imm_data,
            flags: wc.wc_flags.0,
            qp_num: wc.qp_num,
        }
    });
    seen.collect()
}
