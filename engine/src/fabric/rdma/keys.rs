//! Keys of memory, by address: ours when a page is read, the peer's when one is written.

/// A stretch of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keyed {
    pub(crate) addr: u64,
    pub(crate) end: u64,
    pub(crate) key: u32,
}

/// Registered memory behind one NIC, ascending and not overlapping.
#[derive(Debug, Default)]
pub(crate) struct KeyTable(Vec<Keyed>);

impl KeyTable {
    /// The stretches must be ascending and must not overlap.
    pub(crate) fn new(stretches: Vec<Keyed>) -> Self {
        debug_assert!(stretches.windows(2).all(|pair| pair[0].end <= pair[1].addr));
        Self(stretches)
    }

    /// The stretch that an address lies in. `hint` is where the last one was found: pages of one chunk
    /// mostly lie together.
    #[inline]
    pub(crate) fn find(&self, addr: u64, hint: &mut usize) -> Option<Keyed> {
        if let Some(keyed) = self.0.get(*hint)
            && keyed.addr <= addr
            && addr < keyed.end
        {
            return Some(*keyed);
        }
        let after = self.0.partition_point(|keyed| keyed.addr <= addr);
        let at = after.checked_sub(1)?;
        let keyed = self.0.get(at).filter(|keyed| addr < keyed.end)?;
        *hint = at;
        Some(*keyed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_address_is_found_in_its_stretch_and_nowhere_else(
            lens in prop::collection::vec((0u64..50, 1u64..50), 1..20),
            asked in prop::collection::vec(0u64..2000, 1..50),
        ) {
            let mut end = 0;
            let mut stretches = Vec::new();
            for (key, (gap, bytes)) in lens.into_iter().enumerate() {
                let addr = end + gap;
                end = addr + bytes;
                stretches.push(Keyed { addr, end, key: key as u32 });
            }
            let table = KeyTable::new(stretches.clone());
            let mut hint = 0;
            for addr in asked {
                let want = stretches.iter().find(|keyed| keyed.addr <= addr && addr < keyed.end);
                prop_assert_eq!(table.find(addr, &mut hint), want.copied());
            }
        }
    }
}
