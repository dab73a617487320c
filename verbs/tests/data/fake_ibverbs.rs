//! A stand-in for libibverbs, compiled as a C library by `tests/library.rs`: it exports every
//! function a fabric needs, and its device list does what `FAKE_DEVICES` says when it was built:
//! a number of devices, or `-errno`.

use std::ffi::{c_char, c_int, c_void};

unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
}

static NAMES: [&[u8]; 2] = [b"mlx5_0\0", b"mlx5_\xff\0"];

#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut c_void {
    let devices: isize = env!("FAKE_DEVICES").parse().unwrap();
    if devices < 0 {
        unsafe { *__errno_location() = (-devices) as c_int };
        return std::ptr::null_mut();
    }
    let devices = devices as usize;
    let mut list: Vec<*mut c_void> =
        NAMES[..devices].iter().map(|name| name.as_ptr().cast_mut().cast()).collect();
    list.push(std::ptr::null_mut());
    unsafe { *count = devices as c_int };
    Box::into_raw(list.into_boxed_slice()).cast()
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_free_device_list(list: *mut *mut c_void) {
    let devices: usize = env!("FAKE_DEVICES").parse().unwrap();
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, devices + 1)) });
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_device_name(device: *mut c_void) -> *const c_char {
    device.cast()
}

macro_rules! never_called {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() { std::process::abort() }
    )* };
}

never_called! {
    ibv_open_device ibv_close_device ibv_query_device ibv_query_port ibv_query_gid ibv_alloc_pd
    ibv_dealloc_pd ibv_reg_mr ibv_reg_mr_iova2 ibv_dereg_mr ibv_create_comp_channel
    ibv_destroy_comp_channel ibv_create_cq ibv_destroy_cq ibv_get_cq_event ibv_ack_cq_events
    ibv_create_srq ibv_destroy_srq ibv_create_qp ibv_modify_qp ibv_query_qp ibv_destroy_qp
    ibv_get_async_event ibv_ack_async_event
}

#[cfg(dmabuf)]
never_called! { ibv_reg_dmabuf_mr }
