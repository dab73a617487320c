//! Queue pairs, registered memory and completions, through `libibverbs` as it was loaded.
//!
//! ```text
//! Library ─ Context ─┬─ CompletionChannel ─ Cq ─┐
//!                    └─ Pd ─┬─ Srq ─────────────┤
//!                           ├─ Mr               ├─ Qp ─ Batch
//!                           └───────────────────┘
//! ```
//! A handle holds what it was made from, so things are destroyed in the right order whatever order
//! handles are dropped in. None of them panics, and whatever is given to a safe function, a NIC only
//! ever touches memory that was moved in or registered by `unsafe` calls.

mod access;
mod arena;
mod attributes;
mod batch;
mod channel;
mod completion;
mod context;
mod cq;
mod error;
mod event;
mod ffi;
mod gids;
mod modify;
mod mr;
mod pd;
mod pieces;
mod post;
mod qp;
mod route;
mod srq;
mod states;

pub use access::Access;
pub use attributes::{DeviceAttributes, Mtu, PortAttributes};
pub use batch::{Batch, WrFlags};
pub use channel::CompletionChannel;
pub use completion::{Completion, Work, WorkError, WorkOpcode, WorkStatus};
pub use context::Context;
pub use cq::Cq;
pub use error::VerbsError;
pub use event::AsyncEvent;
pub(crate) use ffi::Functions;
pub use modify::{InitAttributes, QpAttributes, RtrAttributes, RtsAttributes};
pub use mr::{Mr, Sge};
pub use pd::Pd;
pub use post::{BatchError, PostError, PostFault};
pub use qp::{Capacities, Qp, QpOptions};
pub use route::{AddressVector, GlobalRoute};
pub use srq::{Recv, Srq, SrqOptions};
pub use states::QpState;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_handle_goes_to_any_thread() {
        fn goes<T: Send + Sync>() {}
        goes::<Context>();
        goes::<CompletionChannel>();
        goes::<Cq>();
        goes::<Pd>();
        goes::<Mr>();
        goes::<Srq>();
        goes::<Qp>();
        goes::<Batch<'_>>();
        goes::<VerbsError>();
        goes::<PostError>();
    }
}
