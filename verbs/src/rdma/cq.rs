//! Completion queues.

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ibverbs_sys as sys;
use rustix::io::Errno;

use super::channel::CompletionChannel;
use super::completion::Completion;
use super::context::Context;
use super::error::{VerbsError, check};

/// Completions taken from the library at once: 3 KiB of stack.
const AT_ONCE: usize = 64;

/// A completion queue. Clones are the same one. It must have room for everything that can complete
/// in it: one that overflows loses completions, and tells it only as
/// [`AsyncEvent::CqError`](crate::AsyncEvent::CqError).
#[derive(Clone)]
pub struct Cq(Arc<Inner>);

struct Inner {
    raw: NonNull<sys::ibv_cq>,
    depth: u32,
    context: Context,
    /// Held until the queue is destroyed.
    _channel: Option<CompletionChannel>,
}

// SAFETY: the queue is used through libibverbs' functions alone, which may be called from any
// thread.
unsafe impl Send for Inner {}
// SAFETY: as above; polling locks the queue inside the provider.
unsafe impl Sync for Inner {}

impl Cq {
    pub(crate) fn create(
        context: &Context,
        depth: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<Self, VerbsError> {
        if channel.is_some_and(|channel| !channel.context().is(context)) {
            return Err(VerbsError::foreign("ibv_create_cq", "the completion channel"));
        }
        let entries = i32::try_from(depth).unwrap_or(i32::MAX);
        let raw_channel = channel.map_or(ptr::null_mut(), CompletionChannel::raw);
        // SAFETY: the context is open and the channel, if any, is of it; completion vector 0 exists
        // on every device.
        let raw = unsafe {
            (context.functions().ibv_create_cq)(
                context.raw(),
                entries,
                ptr::null_mut(),
                raw_channel,
                0,
            )
        };
        let raw = NonNull::new(raw)
            .ok_or_else(|| VerbsError::create("ibv_create_cq", io::Error::last_os_error()))?;
        // SAFETY: the queue is there, and the field does not change unless it is resized, which
        // nobody does.
        let depth = u32::try_from(unsafe { (*raw.as_ptr()).cqe }).unwrap_or(0);
        let (context, channel) = (context.clone(), channel.cloned());
        Ok(Self(Arc::new(Inner { raw, depth, context, _channel: channel })))
    }

    /// Entries it was granted, at least as many as asked for.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.0.depth
    }

    /// Takes completions, as many as there are and fit into `into`, without waiting. Fewer than fit
    /// means that there were no more.
    ///
    /// # Errors
    /// [`VerbsError::DeviceGone`] if the queue or its device has failed.
    #[inline]
    pub fn poll(&self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let poll = self.0.context.ops().poll_cq;
        let poll = poll.ok_or_else(|| VerbsError::no_operation("ibv_poll_cq"))?;
        let mut taken = 0;
        let mut raw = [const { MaybeUninit::<sys::ibv_wc>::uninit() }; AT_ONCE];
        while taken < into.len() {
            let asked = (into.len() - taken).min(AT_ONCE);
            // SAFETY: the queue is there, and `raw` has room for `asked` entries.
            let count = unsafe { poll(self.raw(), asked as i32, raw.as_mut_ptr().cast()) };
            let Ok(count) = usize::try_from(count) else {
                // What was taken before has to be told; the failure is told next time.
                return if taken > 0 { Ok(taken) } else { Err(failed(count)) };
            };
            for (raw, into) in raw[..count.min(asked)].iter().zip(&mut into[taken..]) {
                // SAFETY: the provider wrote this entry. All its fields are integers.
                *into = Completion::from_wc(unsafe { raw.assume_init_ref() });
            }
            taken += count.min(asked);
            if count < asked {
                break;
            }
        }
        Ok(taken)
    }

    /// Asks for one event on the completion channel when the next completion comes. One that came
    /// before this call may not be told of: poll after it, and sleep only if there was nothing.
    ///
    /// # Errors
    /// [`VerbsError::DeviceGone`] or [`VerbsError::Os`].
    pub fn request_notify(&self) -> Result<(), VerbsError> {
        let notify = self.0.context.ops().req_notify_cq;
        let notify = notify.ok_or_else(|| VerbsError::no_operation("ibv_req_notify_cq"))?;
        // SAFETY: the queue is there.
        check(unsafe { notify(self.raw(), 0) })
            .map_err(|source| VerbsError::os("ibv_req_notify_cq", source))
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_cq {
        self.0.raw.as_ptr()
    }

    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }
}

/// What a negative count says: some providers give an error number, most just -1.
#[cold]
fn failed(count: i32) -> VerbsError {
    let source = match count {
        -1 => Errno::IO.into(),
        count => io::Error::from_raw_os_error(count.checked_neg().unwrap_or(i32::MAX)),
    };
    VerbsError::DeviceGone { operation: "ibv_poll_cq", source }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold their completion queues, so none uses it; it is destroyed once.
        // The result says nothing that could still be acted on.
        unsafe { (self.context.functions().ibv_destroy_cq)(self.raw.as_ptr()) };
    }
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq")
            .field("device", &self.0.context.name())
            .field("depth", &self.0.depth)
            .finish()
    }
}
