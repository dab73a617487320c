//! The arrays behind a batch: written by safe code, tied together when they are posted.

use std::ptr;

use ibverbs_sys as sys;
use sys::{ibv_send_flags as send_flags, ibv_wr_opcode as opcode};

use super::batch::WrFlags;
use super::mr::Sge;
use super::post::BatchError;

/// Arrays for one chain, made once: as many requests as the send queue holds.
pub(crate) struct Arena {
    wrs: Box<[sys::ibv_send_wr]>,
    sges: Box<[sys::ibv_sge]>,
    max_sge: u32,
    max_inline_bytes: u32,
    /// Requests in the chain, and stretches of theirs.
    len: usize,
    sge_len: usize,
}

// SAFETY: the pointers in the requests are written and read only while a chain is posted, by whoever
// holds the arena alone.
unsafe impl Send for Arena {}
// SAFETY: a shared arena only tells its length.
unsafe impl Sync for Arena {}

/// What a request does besides naming its bytes.
pub(crate) struct What {
    pub(crate) opcode: opcode::Type,
    /// The number sent along, of those that have one.
    pub(crate) imm: u32,
    /// Address and key of the peer's memory, of those that have one.
    pub(crate) remote: (u64, u32),
}

impl Arena {
    pub(crate) fn new(max_wr: u32, max_sge: u32, max_inline_bytes: u32) -> Self {
        // Inline data needs one stretch, whatever was granted.
        let sges = max_wr as usize * max_sge.max(1) as usize;
        Self {
            wrs: vec![sys::ibv_send_wr::default(); max_wr as usize].into(),
            sges: vec![sys::ibv_sge::default(); sges].into(),
            max_sge,
            max_inline_bytes,
            len: 0,
            sge_len: 0,
        }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) const fn clear(&mut self) {
        (self.len, self.sge_len) = (0, 0);
    }

    #[inline]
    fn push(&mut self, wr_id: u64, what: &What, sges: usize, flags: u32) -> Result<(), BatchError> {
        let Some(wr) = self.wrs.get_mut(self.len) else {
            return Err(BatchError::Full { max: self.wrs.len() as u32 });
        };
        wr.wr_id = wr_id;
        wr.num_sge = sges as i32;
        wr.opcode = what.opcode;
        wr.send_flags = flags;
        wr.__bindgen_anon_1.imm_data = what.imm.to_be();
        let (remote_addr, rkey) = what.remote;
        wr.wr.rdma = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey };
        self.len += 1;
        self.sge_len += sges;
        Ok(())
    }

    #[inline]
    pub(crate) fn gather(
        &mut self,
        wr_id: u64,
        what: &What,
        sges: &[Sge],
        flags: WrFlags,
    ) -> Result<(), BatchError> {
        if sges.len() > self.max_sge as usize {
            return Err(BatchError::TooManySges { given: sges.len(), max: self.max_sge });
        }
        let from = self.sge_len;
        self.push(wr_id, what, sges.len(), flags.bits())?;
        for (raw, &Sge { addr, bytes, lkey }) in self.sges[from..].iter_mut().zip(sges) {
            *raw = sys::ibv_sge { addr, length: bytes, lkey };
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn inline(
        &mut self,
        wr_id: u64,
        what: &What,
        data: &[u8],
        flags: WrFlags,
    ) -> Result<(), BatchError> {
        if data.len() > self.max_inline_bytes as usize {
            let max = self.max_inline_bytes;
            return Err(BatchError::InlineTooLong { given: data.len(), max });
        }
        let from = self.sge_len;
        self.push(wr_id, what, 1, flags.bits() | send_flags::IBV_SEND_INLINE.0)?;
        let (addr, length) = (data.as_ptr() as u64, data.len() as u32);
        self.sges[from] = sys::ibv_sge { addr, length, lkey: 0 };
        Ok(())
    }

    /// Ties the requests together. Gives the first, which is none of an empty chain.
    pub(crate) fn link(&mut self) -> *mut sys::ibv_send_wr {
        let (first, mut sge) = (self.wrs.as_mut_ptr(), self.sges.as_mut_ptr());
        for at in 0..self.len {
            let last = at + 1 == self.len;
            // SAFETY: `len` is within the array, and so are the stretches of its requests.
            unsafe {
                let wr = first.add(at);
                (*wr).next = if last { ptr::null_mut() } else { first.add(at + 1) };
                (*wr).sg_list = sge;
                sge = sge.add((*wr).num_sge as usize);
            }
        }
        if self.len == 0 { ptr::null_mut() } else { first }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WRITE: What = What { opcode: opcode::IBV_WR_RDMA_WRITE, imm: 0, remote: (0x7000, 9) };

    fn sge(n: u64) -> Sge {
        Sge { addr: n << 12, bytes: n as u32, lkey: n as u32 + 1 }
    }

    /// The chain as a provider walks it: numbers, flags and stretches.
    fn walk(first: *mut sys::ibv_send_wr) -> Vec<(u64, u32, Vec<Sge>)> {
        let (mut at, mut seen) = (first, Vec::new());
        // SAFETY: the chain ends with null, and its stretches are where it says.
        while let Some(wr) = unsafe { at.as_ref() } {
            let sges = (0..wr.num_sge as usize).map(|n| {
                // SAFETY: as above.
                let raw = unsafe { *wr.sg_list.add(n) };
                Sge { addr: raw.addr, bytes: raw.length, lkey: raw.lkey }
            });
            seen.push((wr.wr_id, wr.send_flags, sges.collect()));
            at = wr.next;
        }
        seen
    }

    proptest! {
        #[test]
        fn a_chain_is_what_was_pushed_and_fitted_and_nothing_else(
            max_wr in 1u32..20,
            max_sge in 1u32..5,
            pushes in prop::collection::vec((0usize..7, any::<bool>()), 0..40),
        ) {
            let mut arena = Arena::new(max_wr, max_sge, 16);
            for _ in 0..2 {
                arena.clear();
                let mut expected = Vec::new();
                for (id, &(sges, signaled)) in (0..).zip(&pushes) {
                    let sges: Vec<Sge> = (0..sges as u64).map(|n| sge(10 * id + n)).collect();
                    let flags = WrFlags::from(signaled);
                    let pushed = arena.gather(id, &WRITE, &sges, flags);
                    if sges.len() > max_sge as usize {
                        let given = sges.len();
                        prop_assert_eq!(pushed, Err(BatchError::TooManySges { given, max: max_sge }));
                    } else if expected.len() == max_wr as usize {
                        prop_assert_eq!(pushed, Err(BatchError::Full { max: max_wr }));
                    } else {
                        prop_assert_eq!(pushed, Ok(()));
                        expected.push((id, flags.bits(), sges));
                    }
                    prop_assert_eq!(arena.len, expected.len());
                }
                prop_assert_eq!(walk(arena.link()), expected);
            }
        }
    }

    #[test]
    fn requests_say_what_they_do() {
        let mut arena = Arena::new(2, 1, 0);
        let imm = What { opcode: opcode::IBV_WR_RDMA_WRITE_WITH_IMM, imm: 0x0102_0304, ..WRITE };
        let flags = WrFlags::SIGNALED | WrFlags::FENCE | WrFlags::SOLICITED;
        arena.gather(7, &imm, &[sge(1)], flags).unwrap();
        let wr = arena.link();
        // SAFETY: the chain has one request, whose unions were written as a write's.
        unsafe {
            assert_eq!((*wr).opcode, opcode::IBV_WR_RDMA_WRITE_WITH_IMM);
            assert_eq!((*wr).send_flags, 0b111, "enum ibv_send_flags of the header");
            assert_eq!((*wr).__bindgen_anon_1.imm_data.to_ne_bytes(), [1, 2, 3, 4]);
            assert_eq!(((*wr).wr.rdma.remote_addr, (*wr).wr.rdma.rkey), (0x7000, 9));
        }
    }

    #[test]
    fn inline_bytes_are_named_by_their_address_up_to_the_limit() {
        // A queue pair without stretches of memory still sends inline.
        let mut arena = Arena::new(2, 0, 16);
        let data = [5u8; 17];
        let error = arena.inline(1, &WRITE, &data, WrFlags::NONE).unwrap_err();
        assert_eq!(error, BatchError::InlineTooLong { given: 17, max: 16 });
        assert_eq!((arena.len, arena.link().is_null()), (0, true));
        arena.inline(1, &WRITE, &data[..16], WrFlags::NONE).unwrap();
        arena.inline(2, &WRITE, &[], WrFlags::SIGNALED).unwrap();
        let error = arena.inline(3, &WRITE, &[], WrFlags::NONE).unwrap_err();
        assert_eq!(error, BatchError::Full { max: 2 });
        let chain = walk(arena.link());
        assert_eq!((chain[0].1, chain[1].1), (8, 8 | 2), "IBV_SEND_INLINE of the header");
        let named = Sge { addr: data.as_ptr() as u64, bytes: 16, lkey: 0 };
        assert_eq!(chain[0].2, [named]);
        assert_eq!(chain[1].2[0].bytes, 0);
    }
}
