//! What a device tells of its own accord.

use std::io;

use ibverbs_sys as sys;

use super::context::Context;
use super::error::VerbsError;

/// Something happened to a device, one of its ports, or an object of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// A port carries data again.
    PortActive {
        /// The port, counted from 1.
        port: u8,
    },
    /// A port carries no data any more.
    PortError {
        /// The port, counted from 1.
        port: u8,
    },
    /// A port's GID table changed: an interface got or lost an address.
    GidChange {
        /// The port, counted from 1.
        port: u8,
    },
    /// The subnet manager gave a port another LID.
    LidChange {
        /// The port, counted from 1.
        port: u8,
    },
    /// The device failed: nothing of it works until it is opened anew.
    DeviceFatal,
    /// A queue pair failed in a way that no completion tells of.
    QpFatal {
        /// Its number.
        qp_num: u32,
    },
    /// A queue pair in error takes no more receives from its shared queue: all it took have
    /// completed.
    LastWqeReached {
        /// Its number.
        qp_num: u32,
    },
    /// A completion queue overflowed or failed: completions are lost.
    CqError,
    /// A shared receive queue failed.
    SrqError,
    /// Anything else, by its number (`enum ibv_event_type`).
    Other(u32),
}

impl AsyncEvent {
    /// The next event of a device, if there is one.
    pub(crate) fn next(context: &Context) -> Result<Option<Self>, VerbsError> {
        let functions = context.functions();
        let mut raw = sys::ibv_async_event::default();
        // SAFETY: the context is open and its descriptor does not block.
        let code = unsafe { (functions.ibv_get_async_event)(context.raw(), &raw mut raw) };
        if code != 0 {
            let source = io::Error::last_os_error();
            return match source.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(VerbsError::os("ibv_get_async_event", source)),
            };
        }
        // SAFETY: the event has not been acknowledged, so the object it names has not been freed:
        // its destruction waits for that (`ibv_ack_async_event(3)`).
        let event = unsafe { Self::decode(&raw) };
        // SAFETY: the event was read above and is acknowledged once.
        unsafe { (functions.ibv_ack_async_event)(&raw mut raw) };
        Ok(Some(event))
    }

    /// # Safety
    /// What the event's type says it is about must be there.
    unsafe fn decode(raw: &sys::ibv_async_event) -> Self {
        // SAFETY: of every event that has a port this field is the one that was written.
        let port = || u8::try_from(unsafe { raw.element.port_num }).unwrap_or(u8::MAX);
        // SAFETY: of every event of a queue pair this is, and it is there as the caller promises.
        let qp_num = || unsafe { (*raw.element.qp).qp_num };
        match raw.event_type {
            sys::IBV_EVENT_PORT_ACTIVE => Self::PortActive { port: port() },
            sys::IBV_EVENT_PORT_ERR => Self::PortError { port: port() },
            sys::IBV_EVENT_GID_CHANGE => Self::GidChange { port: port() },
            sys::IBV_EVENT_LID_CHANGE => Self::LidChange { port: port() },
            sys::IBV_EVENT_DEVICE_FATAL => Self::DeviceFatal,
            sys::IBV_EVENT_QP_FATAL | sys::IBV_EVENT_QP_REQ_ERR | sys::IBV_EVENT_QP_ACCESS_ERR => {
                Self::QpFatal { qp_num: qp_num() }
            }
            sys::IBV_EVENT_QP_LAST_WQE_REACHED => Self::LastWqeReached { qp_num: qp_num() },
            sys::IBV_EVENT_CQ_ERR => Self::CqError,
            sys::IBV_EVENT_SRQ_ERR => Self::SrqError,
            other => Self::Other(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(event_type: u32, element: sys::ibv_async_event__bindgen_ty_1) -> AsyncEvent {
        // SAFETY: the tests give every event what it is about.
        unsafe { AsyncEvent::decode(&sys::ibv_async_event { element, event_type }) }
    }

    #[test]
    fn events_of_ports_name_the_port() {
        let port =
            |event_type| decode(event_type, sys::ibv_async_event__bindgen_ty_1 { port_num: 2 });
        assert_eq!(port(sys::IBV_EVENT_PORT_ERR), AsyncEvent::PortError { port: 2 });
        assert_eq!(port(sys::IBV_EVENT_PORT_ACTIVE), AsyncEvent::PortActive { port: 2 });
        assert_eq!(port(sys::IBV_EVENT_GID_CHANGE), AsyncEvent::GidChange { port: 2 });
        assert_eq!(port(sys::IBV_EVENT_LID_CHANGE), AsyncEvent::LidChange { port: 2 });
        assert_eq!(port(sys::IBV_EVENT_SM_CHANGE), AsyncEvent::Other(13));
    }

    #[test]
    fn events_of_queue_pairs_name_the_queue_pair() {
        // SAFETY: a plain C structure, for which zero is valid in every field.
        let mut qp: sys::ibv_qp = unsafe { std::mem::zeroed() };
        qp.qp_num = 0x42;
        let mut of =
            |event_type| decode(event_type, sys::ibv_async_event__bindgen_ty_1 { qp: &raw mut qp });
        let last = AsyncEvent::LastWqeReached { qp_num: 0x42 };
        assert_eq!(of(sys::IBV_EVENT_QP_LAST_WQE_REACHED), last);
        for fatal in
            [sys::IBV_EVENT_QP_FATAL, sys::IBV_EVENT_QP_REQ_ERR, sys::IBV_EVENT_QP_ACCESS_ERR]
        {
            assert_eq!(of(fatal), AsyncEvent::QpFatal { qp_num: 0x42 });
        }
    }

    #[test]
    fn events_of_other_objects_do_not_look_into_them() {
        let nothing = sys::ibv_async_event__bindgen_ty_1 { qp: std::ptr::null_mut() };
        assert_eq!(decode(sys::IBV_EVENT_CQ_ERR, nothing), AsyncEvent::CqError);
        assert_eq!(decode(sys::IBV_EVENT_SRQ_ERR, nothing), AsyncEvent::SrqError);
        assert_eq!(decode(sys::IBV_EVENT_DEVICE_FATAL, nothing), AsyncEvent::DeviceFatal);
        assert_eq!(decode(sys::IBV_EVENT_WQ_FATAL, nothing), AsyncEvent::Other(19));
        assert_eq!(decode(77, nothing), AsyncEvent::Other(77));
    }
}
