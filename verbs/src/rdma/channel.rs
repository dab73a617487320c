//! Waking up for completions.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ibverbs_sys as sys;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::context::Context;
use super::error::VerbsError;

/// A descriptor that becomes readable when a completion queue that was asked for it
/// ([`Cq::request_notify`](crate::Cq::request_notify)) has a completion. Clones are the same one.
#[derive(Clone)]
pub struct CompletionChannel(Arc<Inner>);

struct Inner {
    context: Context,
    raw: NonNull<sys::ibv_comp_channel>,
}

// SAFETY: the channel is used through libibverbs' functions alone, which may be called from any
// thread; its descriptor, the only field that is read here, never changes.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl CompletionChannel {
    pub(crate) fn create(context: &Context) -> Result<Self, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.functions().ibv_create_comp_channel)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            VerbsError::create("ibv_create_comp_channel", io::Error::last_os_error())
        })?;
        let this = Self(Arc::new(Inner { context: context.clone(), raw }));
        // `take_events` must not block.
        fcntl_getfl(this.as_fd())
            .and_then(|flags| fcntl_setfl(this.as_fd(), flags | OFlags::NONBLOCK))
            .map_err(|errno| VerbsError::os("fcntl of a completion channel", errno.into()))?;
        Ok(this)
    }

    /// Takes what the channel has to say, without waiting: how many times one of its completion
    /// queues told of a completion. Each of those has to be asked again, and polled after that, to
    /// tell of the next.
    ///
    /// # Errors
    /// [`VerbsError::DeviceGone`] or [`VerbsError::Os`].
    pub fn take_events(&self) -> Result<usize, VerbsError> {
        let functions = self.0.context.functions();
        let mut events = 0;
        loop {
            let (mut cq, mut cookie) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is there and its descriptor does not block.
            let code =
                unsafe { (functions.ibv_get_cq_event)(self.raw(), &raw mut cq, &raw mut cookie) };
            if code != 0 {
                let source = io::Error::last_os_error();
                return match source.kind() {
                    io::ErrorKind::WouldBlock => Ok(events),
                    io::ErrorKind::Interrupted => continue,
                    _ => Err(VerbsError::os("ibv_get_cq_event", source)),
                };
            }
            // SAFETY: the queue has an event that is not acknowledged, so it has not been freed:
            // its destruction waits for that (`ibv_ack_cq_events(3)`).
            unsafe { (functions.ibv_ack_cq_events)(cq, 1) };
            events += 1;
        }
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_comp_channel {
        self.0.raw.as_ptr()
    }

    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the channel, which is there as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).fd) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: completion queues hold their channel, so none uses it; it is destroyed once. The
        // result says nothing that could still be acted on.
        unsafe {
            (self.context.functions().ibv_destroy_comp_channel)(self.raw.as_ptr());
        }
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionChannel").field("device", &self.0.context.name()).finish()
    }
}
