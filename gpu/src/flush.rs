//! When must a receiver flush before its GPU reads what a NIC has written?
//!
//! A completion tells the *host* that data has arrived. On its way the data took PCIe to the GPU,
//! the completion PCIe to host memory, and nothing orders the two: work that starts after the
//! completion may still find old bytes. What a device promises is told by two of its attributes
//! (CUDA driver API, `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING` and
//! `.._FLUSH_WRITES_OPTIONS`).

/// To whom a NIC's writes into a device's memory become visible in order, without a flush.
/// A larger one includes the smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum WritesOrdering {
    /// To nobody: a flush is needed before reading.
    None,
    /// To the device that owns the memory.
    Owner,
    /// To every CUDA device.
    AllDevices,
}

impl WritesOrdering {
    /// From the driver's number (0, 100, 200). The numbers grow with the scope, so one in between
    /// is rounded down, to the weaker promise.
    #[must_use]
    pub const fn from_attribute(value: i32) -> Self {
        match value {
            200.. => Self::AllDevices,
            100..200 => Self::Owner,
            _ => Self::None,
        }
    }
}

/// The flushes a device offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct FlushOptions {
    /// `cuFlushGPUDirectRDMAWrites` works: the host can flush.
    pub host: bool,
    /// Stream memory operations can flush: only of use to work enqueued behind them.
    pub memops: bool,
}

impl FlushOptions {
    /// From the driver's bit mask; bits not known here are left out.
    #[must_use]
    pub const fn from_attribute(value: i32) -> Self {
        Self { host: value & 1 != 0, memops: value & 2 != 0 }
    }
}

/// What the receiver does once per completed room, before it says that the room has landed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Flush {
    /// Nothing: the device orders a NIC's writes itself.
    None,
    /// Call `cuFlushGPUDirectRDMAWrites` with the owner as scope.
    Driver,
    /// Read a byte back through the NIC that wrote, over the same path: a PCIe read does not pass
    /// the writes before it, so its completion proves them placed.
    ReadBack,
}

/// The flush a device needs.
///
/// `several_paths` says that a NIC's writes can reach the device by more than one way: C2C beside
/// PCIe (data-direct, `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE`). Each way orders its own
/// writes only, yet the driver then reports [`WritesOrdering::AllDevices`] and its flush does
/// nothing, so both attributes are worthless and only reading back helps.
///
/// Otherwise a device that orders for its owner needs nothing, as does the driver's own flush,
/// which is a no-op there; a weaker one is flushed by the driver if it can, and by reading back if
/// it cannot. [`FlushOptions::memops`] alone does not help the host.
#[must_use]
pub const fn flush_policy(
    ordering: WritesOrdering,
    options: FlushOptions,
    several_paths: bool,
) -> Flush {
    if several_paths {
        return Flush::ReadBack;
    }
    match ordering {
        WritesOrdering::Owner | WritesOrdering::AllDevices => Flush::None,
        WritesOrdering::None if options.host => Flush::Driver,
        WritesOrdering::None => Flush::ReadBack,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDERINGS: [WritesOrdering; 3] =
        [WritesOrdering::None, WritesOrdering::Owner, WritesOrdering::AllDevices];

    #[test]
    fn a_device_that_orders_for_itself_is_not_flushed() {
        for mask in 0..4 {
            let options = FlushOptions::from_attribute(mask);
            for ordering in [WritesOrdering::Owner, WritesOrdering::AllDevices] {
                assert_eq!(flush_policy(ordering, options, false), Flush::None);
            }
        }
    }

    #[test]
    fn a_device_that_orders_nothing_is_flushed_by_the_driver_or_read_back() {
        let flush =
            |mask| flush_policy(WritesOrdering::None, FlushOptions::from_attribute(mask), false);
        assert_eq!(flush(0), Flush::ReadBack);
        assert_eq!(flush(1), Flush::Driver);
        assert_eq!(flush(2), Flush::ReadBack, "a stream's flush is not the host's");
        assert_eq!(flush(3), Flush::Driver);
    }

    #[test]
    fn several_paths_are_always_read_back() {
        for mask in 0..4 {
            for ordering in ORDERINGS {
                let options = FlushOptions::from_attribute(mask);
                assert_eq!(flush_policy(ordering, options, true), Flush::ReadBack);
            }
        }
    }

    #[test]
    fn unknown_attribute_values_promise_no_more_than_known_ones() {
        for (value, ordering) in [(-1, 0), (0, 0), (99, 0), (100, 1), (199, 1), (200, 2), (300, 2)]
        {
            assert_eq!(WritesOrdering::from_attribute(value), ORDERINGS[ordering], "{value}");
        }
        assert_eq!(FlushOptions::from_attribute(4), FlushOptions::default());
        let both = FlushOptions::from_attribute(7);
        assert!(both.host && both.memops);
    }
}
