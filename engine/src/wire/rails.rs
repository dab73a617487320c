//! What an engine says of its RDMA rails and of the memory that may be written through them. It goes over
//! the session, so only to peers that proved themselves.

use serde::{Deserialize, Serialize};

use super::message::MessageError;
use crate::memory::{LAYERS_MAX, POOLS_MAX};

/// Most rails of an engine: two ports on each of eight NICs.
pub(crate) const RAILS_MAX: usize = 16;
/// Longest rail name in bytes: a device name (`IBV_SYSFS_NAME_MAX` is 64) and a port.
const RAIL_NAME_BYTES_MAX: usize = 72;
/// Most GIDs that a rail is offered by, the best first.
pub(crate) const GIDS_MAX: usize = 8;
/// Most registered pieces of memory: every page array of every pool by itself fits many times over.
pub(crate) const KEYS_MAX: usize = 1 << 16;
/// Most page arrays of all pools: two planes of the most layers.
const ARRAYS_MAX: usize = 2 * LAYERS_MAX as usize * POOLS_MAX;

/// An engine's rails, and the memory behind them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RailsCard {
    pub(crate) rails: Vec<RailCard>,
    /// By the engine's pools.
    pub(crate) pools: Vec<PoolMemory>,
    /// Ascending by address, not overlapping.
    pub(crate) keys: Vec<RegionKeys>,
}

/// One port of a NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RailCard {
    /// Device and port, as `mlx5_0:1`.
    pub(crate) name: String,
    /// Which of a region's keys is this NIC's.
    pub(crate) nic: u8,
    pub(crate) infiniband: bool,
    /// Local identifier; InfiniBand only.
    pub(crate) lid: u16,
    /// The GIDs it may be addressed by, the best first.
    pub(crate) gids: Vec<GidCard>,
    pub(crate) rate_mbit_s: u64,
}

/// A GID and how it is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GidCard {
    pub(crate) gid: [u8; 16],
    /// Its place in the owner's table.
    pub(crate) index: u32,
    pub(crate) kind: GidKind,
}

/// How packets to a GID look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum GidKind {
    InfiniBand,
    RoceV1,
    RoceV2,
}

/// Where a pool's page arrays are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PoolMemory {
    /// First layer, by its number in the model.
    pub(crate) first_layer: u32,
    pub(crate) layers: u32,
    /// Address of page 0 and bytes from a page to the next, of each layer of the first plane, then of the
    /// second.
    pub(crate) arrays: Vec<(u64, u64)>,
}

/// A stretch of memory and its keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RegionKeys {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    /// By NIC.
    pub(crate) rkeys: Vec<u32>,
}

impl RailsCard {
    /// Checks every bound.
    ///
    /// # Errors
    /// [`MessageError`] naming what is out of bounds, or in no order.
    pub(crate) fn check(&self) -> Result<(), MessageError> {
        let bound = |what, given, max| {
            if given > max { Err(MessageError::Bound { what, given, max }) } else { Ok(()) }
        };
        bound("rails", self.rails.len(), RAILS_MAX)?;
        bound("pools of memory", self.pools.len(), POOLS_MAX)?;
        bound("page arrays", self.pools.iter().map(|pool| pool.arrays.len()).sum(), ARRAYS_MAX)?;
        bound("regions", self.keys.len(), KEYS_MAX)?;
        let invalid = |what: &str| Err(MessageError::Invalid(what.to_owned()));
        for rail in &self.rails {
            bound("rail name bytes", rail.name.len(), RAIL_NAME_BYTES_MAX)?;
            bound("GIDs", rail.gids.len(), GIDS_MAX)?;
            if self.keys.iter().any(|keys| keys.rkeys.len() <= usize::from(rail.nic)) {
                return invalid("a region without a key for every rail");
            }
        }
        let mut end = 0;
        for keys in &self.keys {
            bound("keys of a region", keys.rkeys.len(), RAILS_MAX)?;
            let Some(next) = keys.addr.checked_add(keys.bytes) else {
                return invalid("a region that is longer than memory");
            };
            if keys.addr < end || keys.bytes == 0 {
                return invalid("regions that are empty, overlap or are not in order");
            }
            end = next;
        }
        for pool in &self.pools {
            let layers = pool.layers as usize;
            let fits = pool.first_layer.checked_add(pool.layers).is_some();
            if !fits || layers == 0 || !matches!(pool.arrays.len() / layers, 1 | 2) {
                return invalid("page arrays that do not fit their layers");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card() -> RailsCard {
        let rail = RailCard {
            name: "mlx5_0:1".to_owned(),
            nic: 1,
            infiniband: false,
            lid: 0,
            gids: vec![GidCard { gid: [1; 16], index: 3, kind: GidKind::RoceV2 }],
            rate_mbit_s: 400_000,
        };
        let keys = |addr| RegionKeys { addr, bytes: 4096, rkeys: vec![1, 2] };
        let pool = PoolMemory { first_layer: 4, layers: 2, arrays: vec![(0, 64); 4] };
        RailsCard { rails: vec![rail], pools: vec![pool], keys: vec![keys(0), keys(4096)] }
    }

    #[test]
    fn a_card_that_could_not_be_used_is_refused() {
        assert_eq!(card().check(), Ok(()));
        let refused = |change: fn(&mut RailsCard)| {
            let mut card = card();
            change(&mut card);
            card.check().unwrap_err().to_string()
        };
        assert!(refused(|card| card.rails[0].nic = 2).contains("key for every rail"));
        assert!(refused(|card| card.keys.reverse()).contains("not in order"));
        assert!(refused(|card| card.keys[0].bytes = 4097).contains("overlap"));
        assert!(refused(|card| card.keys[1].bytes = u64::MAX).contains("longer than memory"));
        assert!(refused(|card| card.pools[0].arrays.truncate(1)).contains("do not fit"));
        assert!(refused(|card| card.rails[0].name = "x".repeat(100)).contains("rail name bytes"));
    }
}
