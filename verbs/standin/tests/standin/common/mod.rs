//! What the tests share: the C functions by their types, and one host each.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use kvferry_verbs_standin::{World, WorldOptions, sys};
use sys::ibv_access_flags as access;

mod node;
mod queue;

pub use node::{Node, Seen, is_readable, poll};
pub use queue::{
    Queue, Setup, TO_INIT, TO_RTR, TO_RTS, Work, connected, connected_as, init, statuses,
    with_receive,
};

/// Bytes that each host registers.
pub const BYTES: usize = 1 << 16;

pub const SIGNALED: u32 = sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
pub const INLINE: u32 = sys::ibv_send_flags::IBV_SEND_INLINE.0;
pub const SOLICITED: u32 = sys::ibv_send_flags::IBV_SEND_SOLICITED.0;
pub const EVERYTHING: u32 = access::IBV_ACCESS_LOCAL_WRITE.0
    | access::IBV_ACCESS_REMOTE_WRITE.0
    | access::IBV_ACCESS_REMOTE_READ.0;

macro_rules! verbs {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of libibverbs as a loader finds them.
        pub struct Verbs {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Verbs {
            pub fn of(world: &World) -> Self {
                Self { $($name: {
                    let found = world.resolve(stringify!($name));
                    assert!(!found.is_null(), stringify!($name));
                    // SAFETY: the type is that of the function of this name.
                    unsafe {
                        std::mem::transmute::<
                            *const c_void,
                            unsafe extern "C" fn($($argument),*) $(-> $result)?
                        >(found)
                    }
                },)* }
            }
        }
    };
}

verbs! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut sys::ibv_device;
    ibv_free_device_list: fn(*mut *mut sys::ibv_device);
    ibv_get_device_name: fn(*mut sys::ibv_device) -> *const c_char;
    ibv_get_device_guid: fn(*mut sys::ibv_device) -> u64;
    ibv_open_device: fn(*mut sys::ibv_device) -> *mut sys::ibv_context;
    ibv_close_device: fn(*mut sys::ibv_context) -> c_int;
    ibv_query_device: fn(*mut sys::ibv_context, *mut sys::ibv_device_attr) -> c_int;
    ibv_query_port: fn(*mut sys::ibv_context, u8, *mut c_void) -> c_int;
    ibv_query_gid: fn(*mut sys::ibv_context, u8, c_int, *mut sys::ibv_gid) -> c_int;
    ibv_query_pkey: fn(*mut sys::ibv_context, u8, c_int, *mut u16) -> c_int;
    _ibv_query_gid_table:
        fn(*mut sys::ibv_context, *mut sys::ibv_gid_entry, usize, u32, usize) -> isize;
    _ibv_query_gid_ex:
        fn(*mut sys::ibv_context, u32, u32, *mut sys::ibv_gid_entry, u32, usize) -> c_int;
    ibv_alloc_pd: fn(*mut sys::ibv_context) -> *mut sys::ibv_pd;
    ibv_dealloc_pd: fn(*mut sys::ibv_pd) -> c_int;
    ibv_reg_mr: fn(*mut sys::ibv_pd, *mut c_void, usize, c_int) -> *mut sys::ibv_mr;
    ibv_reg_mr_iova2: fn(*mut sys::ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut sys::ibv_mr;
    ibv_reg_dmabuf_mr: fn(*mut sys::ibv_pd, u64, usize, u64, c_int, c_int) -> *mut sys::ibv_mr;
    ibv_dereg_mr: fn(*mut sys::ibv_mr) -> c_int;
    ibv_create_comp_channel: fn(*mut sys::ibv_context) -> *mut sys::ibv_comp_channel;
    ibv_destroy_comp_channel: fn(*mut sys::ibv_comp_channel) -> c_int;
    ibv_create_cq: fn(
        *mut sys::ibv_context, c_int, *mut c_void, *mut sys::ibv_comp_channel, c_int
    ) -> *mut sys::ibv_cq;
    ibv_destroy_cq: fn(*mut sys::ibv_cq) -> c_int;
    ibv_get_cq_event:
        fn(*mut sys::ibv_comp_channel, *mut *mut sys::ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut sys::ibv_cq, c_uint);
    ibv_create_srq: fn(*mut sys::ibv_pd, *mut sys::ibv_srq_init_attr) -> *mut sys::ibv_srq;
    ibv_modify_srq: fn(*mut sys::ibv_srq, *mut sys::ibv_srq_attr, c_int) -> c_int;
    ibv_query_srq: fn(*mut sys::ibv_srq, *mut sys::ibv_srq_attr) -> c_int;
    ibv_destroy_srq: fn(*mut sys::ibv_srq) -> c_int;
    ibv_create_qp: fn(*mut sys::ibv_pd, *mut sys::ibv_qp_init_attr) -> *mut sys::ibv_qp;
    ibv_modify_qp: fn(*mut sys::ibv_qp, *mut sys::ibv_qp_attr, c_int) -> c_int;
    ibv_query_qp: fn(
        *mut sys::ibv_qp, *mut sys::ibv_qp_attr, c_int, *mut sys::ibv_qp_init_attr
    ) -> c_int;
    ibv_destroy_qp: fn(*mut sys::ibv_qp) -> c_int;
    ibv_get_async_event: fn(*mut sys::ibv_context, *mut sys::ibv_async_event) -> c_int;
    ibv_ack_async_event: fn(*mut sys::ibv_async_event);
}

/// Calls a C function of a test's own world with pointers that the test holds.
macro_rules! c {
    ($verbs:expr, $name:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the test passes what came from the same world and is still there.
        unsafe { ($verbs.$name)($($argument),*) }
    };
}
pub(crate) use c;

pub fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// A world and its functions. Whatever a test made in it must be gone at its end.
pub struct Net {
    pub world: World,
    pub verbs: Verbs,
}

impl Net {
    pub fn new(options: WorldOptions) -> Self {
        let world = World::new(options);
        let verbs = Verbs::of(&world);
        Self { world, verbs }
    }

    pub fn pair() -> Self {
        Self::new(WorldOptions::pair())
    }

    /// Opens a device by its name, as one that shares the process with other worlds has to.
    pub fn open(&self, device: usize) -> *mut sys::ibv_context {
        let wanted = &self.world.device_names()[device];
        let mut count = 0;
        let list = c!(self.verbs, ibv_get_device_list(&raw mut count));
        let found = (0..count as usize).find_map(|index| {
            // SAFETY: the list holds `count` devices.
            let device = unsafe { *list.add(index) };
            let name = c!(self.verbs, ibv_get_device_name(device));
            // SAFETY: a name is a C string that lives as long as the list.
            let name = unsafe { CStr::from_ptr(name) };
            (name.to_str().unwrap() == wanted).then_some(device)
        });
        let context = c!(self.verbs, ibv_open_device(found.expect("the device is listed")));
        c!(self.verbs, ibv_free_device_list(list));
        context
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.world.leaks(), Vec::<String>::new());
        }
    }
}
