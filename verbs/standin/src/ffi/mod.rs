//! The C functions. Each keeps the contract of its manual page: pointers come from functions of this
//! module, and nothing is used after it was destroyed.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs_sys as sys;
use rustix::event::{PollFd, PollFlags};

use crate::state::State;
use crate::world::{Locked, Shared};

mod data;
mod device;
mod events;
mod memory;
mod ports;
mod queues;

pub(crate) use device::DeviceHandle;

/// How long a destruction waits for events of the object to be acknowledged. libibverbs waits for
/// ever (`libibverbs/man/ibv_ack_async_event.3`); a test that forgets them should end.
const UNACKNOWLEDGED_LIMIT: Duration = Duration::from_secs(10);

/// An open device, as C sees it, and what it belongs to.
#[repr(C)]
struct ContextHandle {
    ibv: sys::ibv_context,
    shared: Arc<Shared>,
    device: usize,
    number: u32,
}

impl ContextHandle {
    /// # Safety
    /// `context` must have come from `ibv_open_device`, and must not be closed during `'a`.
    unsafe fn of<'a>(context: *const sys::ibv_context) -> &'a Self {
        // SAFETY: `ibv_open_device` makes nothing but these, and `ibv` is the first field of a C
        // struct.
        unsafe { &*context.cast::<Self>() }
    }

    fn lock(&self) -> Locked<'_> {
        self.shared.lock()
    }
}

/// The bytes of an address.
pub(crate) fn gid_bytes(gid: &sys::ibv_gid) -> [u8; 16] {
    // SAFETY: both fields of the union are 16 plain bytes.
    unsafe { gid.raw }
}

/// What a function returns that gives an error number.
fn code(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

/// What a function returns that sets `errno`.
fn pointer<T>(result: Result<*mut T, c_int>) -> *mut T {
    result.unwrap_or_else(|error| {
        set_errno(error);
        std::ptr::null_mut()
    })
}

fn set_errno(error: c_int) {
    // SAFETY: the calling thread's `errno`, which is always there.
    unsafe { *libc::__errno_location() = error };
}

/// Refuses to destroy what is in use, and counts it (Linux,
/// `drivers/infiniband/core/rdma_core.c`: a use count that is not zero gives `EBUSY`).
fn refuse_in_use(state: &mut State, in_use: bool) -> Result<(), c_int> {
    if in_use {
        state.refused_destructions += 1;
        return Err(libc::EBUSY);
    }
    Ok(())
}

/// Waits until every event of an object that was fetched was acknowledged, as destroying it does
/// (rdma-core, `libibverbs/man/ibv_ack_cq_events.3`, `ibv_ack_async_event.3`).
fn wait_acknowledged(
    shared: &Shared,
    what: &str,
    unacked: impl Fn(&mut State) -> u32,
) -> Result<(), c_int> {
    let until = Instant::now() + UNACKNOWLEDGED_LIMIT;
    let mut state = shared.lock_raw();
    loop {
        let events = unacked(&mut state);
        if events == 0 {
            return Ok(());
        }
        let Some(left) = until.checked_duration_since(Instant::now()) else {
            eprintln!("stand-in: {events} events of {what} were never acknowledged");
            return refuse_in_use(&mut state, true);
        };
        let waited = shared.acknowledged.wait_timeout(state, left);
        state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
    }
}

/// Waits until a descriptor is readable, or fails with `EAGAIN` if it does not block.
fn wait_readable(fd: BorrowedFd<'_>) -> Result<(), c_int> {
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|error| error.raw_os_error())?;
    if flags.contains(rustix::fs::OFlags::NONBLOCK) {
        return Err(libc::EAGAIN);
    }
    let polled = rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], None);
    polled.map(|_| ()).map_err(|error| error.raw_os_error())
}

macro_rules! functions {
    ($($module:ident { $($name:ident)* })*) => {
        /// The C function of libibverbs called `name`, of whatever world; null if the stand-in has none.
        /// [`World::resolve`](crate::World::resolve) can hide some.
        #[must_use]
        pub fn resolve(name: &str) -> *const c_void {
            match name {
                $($(stringify!($name) => $module::$name as *const c_void,)*)*
                _ => std::ptr::null(),
            }
        }

        /// Holds the functions to the types of those they stand in for. It is generic and never
        /// called, so that no code is made of it and nothing is linked.
        #[expect(dead_code, clippy::extra_unused_type_parameters)]
        fn have_the_types_of_libibverbs<T>() {
            $($(let _ = [$module::$name, sys::$name];)*)*
        }
    };
}

functions! {
    device {
        ibv_get_device_list ibv_free_device_list ibv_get_device_name ibv_get_device_guid
        ibv_get_device_index ibv_open_device ibv_close_device ibv_query_device
    }
    ports {
        ibv_query_port ibv_query_gid _ibv_query_gid_table _ibv_query_gid_ex ibv_query_pkey
    }
    memory {
        ibv_alloc_pd ibv_dealloc_pd ibv_reg_mr ibv_reg_mr_iova ibv_reg_mr_iova2 ibv_reg_dmabuf_mr
        ibv_dereg_mr
    }
    events {
        ibv_create_comp_channel ibv_destroy_comp_channel ibv_create_cq ibv_destroy_cq
        ibv_get_cq_event ibv_ack_cq_events ibv_get_async_event ibv_ack_async_event
    }
    queues {
        ibv_create_srq ibv_modify_srq ibv_query_srq ibv_destroy_srq ibv_create_qp ibv_modify_qp
        ibv_query_qp ibv_destroy_qp
    }
}
