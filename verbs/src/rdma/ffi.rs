//! The functions of libibverbs, found by name. None of them is linked: this crate takes only types
//! and constants from `ibverbs-sys`.

use std::ffi::{c_char, c_int, c_uint, c_void};

use ibverbs_sys as sys;

use crate::library::LibraryError;

/// Declares the table: its fields, the names they are found by, and how it is filled.
macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions that must be there.
        #[derive(Clone, Copy)]
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
            /// Since rdma-core 34 (symbol version `IBVERBS_1.12`).
            pub(crate) ibv_reg_dmabuf_mr: Option<RegDmabufMr>,
            /// Since rdma-core 32 (symbol version `IBVERBS_1.11`).
            pub(crate) ibv_query_gid_table: Option<QueryGidTable>,
        }

        impl Functions {
            /// Names of the functions that must be there.
            #[cfg(test)]
            pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// Fills the table; `find` gives null for what it does not know.
            ///
            /// # Errors
            /// Those of `find`.
            ///
            /// # Safety
            /// What `find` finds must be the functions of those names, with libibverbs' ABI.
            pub(crate) unsafe fn resolve(
                mut find: impl FnMut(&'static str) -> Result<*const c_void, LibraryError>,
            ) -> Result<Self, LibraryError> {
                Ok(Self {
                    $($name: {
                        let found = find(stringify!($name))?;
                        // SAFETY: not null, and of this type, as the caller promises.
                        unsafe {
                            std::mem::transmute::<
                                *const c_void,
                                unsafe extern "C" fn($($arg),*) $(-> $result)?,
                            >(found)
                        }
                    },)*
                    // SAFETY: of this type, as the caller promises; null is `None`.
                    ibv_reg_dmabuf_mr: unsafe {
                        std::mem::transmute::<*const c_void, Option<RegDmabufMr>>(
                            find("ibv_reg_dmabuf_mr").unwrap_or(std::ptr::null()),
                        )
                    },
                    // SAFETY: as above.
                    ibv_query_gid_table: unsafe {
                        std::mem::transmute::<*const c_void, Option<QueryGidTable>>(
                            find("_ibv_query_gid_table").unwrap_or(std::ptr::null()),
                        )
                    },
                })
            }
        }
    };
}

type RegDmabufMr =
    unsafe extern "C" fn(*mut sys::ibv_pd, u64, usize, u64, c_int, c_int) -> *mut sys::ibv_mr;
type QueryGidTable = unsafe extern "C" fn(
    *mut sys::ibv_context,
    *mut sys::ibv_gid_entry,
    usize,
    u32,
    usize,
) -> isize;

functions! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut sys::ibv_device;
    ibv_free_device_list: fn(*mut *mut sys::ibv_device);
    ibv_get_device_name: fn(*mut sys::ibv_device) -> *const c_char;
    ibv_open_device: fn(*mut sys::ibv_device) -> *mut sys::ibv_context;
    ibv_close_device: fn(*mut sys::ibv_context) -> c_int;
    ibv_query_device: fn(*mut sys::ibv_context, *mut sys::ibv_device_attr) -> c_int;
    ibv_query_port: fn(*mut sys::ibv_context, u8, *mut sys::_compat_ibv_port_attr) -> c_int;
    ibv_alloc_pd: fn(*mut sys::ibv_context) -> *mut sys::ibv_pd;
    ibv_dealloc_pd: fn(*mut sys::ibv_pd) -> c_int;
    ibv_reg_mr: fn(*mut sys::ibv_pd, *mut c_void, usize, c_int) -> *mut sys::ibv_mr;
    ibv_reg_mr_iova2:
        fn(*mut sys::ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut sys::ibv_mr;
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

#[cfg(test)]
mod tests {
    use super::Functions;

    #[test]
    fn the_table_has_what_every_build_asks_a_library_for() {
        assert_eq!(Functions::NAMES, crate::library::REQUIRED_SYMBOLS);
    }
}
