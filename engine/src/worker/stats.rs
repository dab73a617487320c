//! What the worker counts: plain numbers on its thread, published as atomics a few times a second.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! stats {
    ($($(#[doc = $doc:literal])+ $name:ident),+ $(,)?) => {
        /// The worker's own counters.
        #[derive(Debug, Default, Clone, Copy)]
        pub(crate) struct Stats {
            $($(#[doc = $doc])+ pub(crate) $name: u64,)+
        }

        /// The same counters, for other threads to read.
        #[derive(Debug, Default)]
        pub(crate) struct SharedStats {
            $($name: AtomicU64,)+
        }

        impl SharedStats {
            pub(crate) fn publish(&self, stats: &Stats) {
                $(self.$name.store(stats.$name, Ordering::Relaxed);)+
            }

            pub(crate) fn read(&self) -> Stats {
                Stats { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }

        impl Stats {
            /// Each counter under its name.
            pub(crate) fn each(&self, mut with: impl FnMut(&'static str, u64)) {
                $(with(concat!("kvferry_", stringify!($name), "_total"), self.$name);)+
            }
        }
    };
}

stats! {
    /// Payload bytes acknowledged as placed by peers.
    bytes_sent,
    /// Payload bytes placed here.
    bytes_placed,
    /// Data frames posted.
    frames_posted,
    /// Data frames placed here.
    frames_placed,
    /// Data frames posted again because their lane went down before they were placed.
    frames_replayed,
    /// Lanes that went down, for whatever reason.
    lanes_lost,
    /// Times every lane to a peer was closed because it did not let go of a room's pages.
    fences,
    /// Data frames drained because no grant covered them.
    frames_refused,
    /// Messages and acknowledgements that came too late or twice, and changed nothing.
    late_events,
    /// Turns of the worker in which something happened.
    busy_turns,
    /// Times the worker went to sleep.
    sleeps,
}
