//! A worker's hold on a NIC: its completion queue, and the receives that peers' frame headers land in.

use std::sync::Arc;

use kvferry_verbs::{Access, CompletionChannel, Cq, Mr, Recv, Srq, VerbsError};

use super::complete::receive;
use super::rails::{Nic, RECEIVE_BYTES, Rails, RdmaError, nic_error};

/// Receives given back at once.
const REPOST_AT: usize = 32;

#[derive(Debug)]
pub(super) struct WorkerNic {
    pub(super) cq: Cq,
    srq: Srq,
    pub(super) channel: CompletionChannel,
    headers: Mr,
    /// Receives that were taken and are to be posted again.
    taken: Vec<u32>,
    recvs: Vec<Recv>,
    /// Those posted, by slot.
    posted: Vec<bool>,
    /// Lanes on it.
    pub(super) lanes: usize,
    /// Whether the completion queue was asked to wake the worker.
    pub(super) armed: bool,
}

impl WorkerNic {
    /// Fills the shared receive queue.
    ///
    /// # Errors
    /// The NIC's.
    pub(super) fn new(rails: &Arc<Rails>, nic: usize) -> Result<Self, RdmaError> {
        let nic = &rails.nics[nic];
        Self::open(nic).map_err(|source| nic_error(nic.context.name(), source))
    }

    fn open(nic: &Nic) -> Result<Self, VerbsError> {
        let receives = nic.receives;
        let bytes = receives as usize * RECEIVE_BYTES;
        let headers = nic.pd.register(vec![0u8; bytes], Access::LOCAL_WRITE)?;
        let mut this = Self {
            cq: nic.cq.clone(),
            srq: nic.srq.clone(),
            channel: nic.channel.clone(),
            headers,
            taken: (0..receives).collect(),
            recvs: Vec::with_capacity(REPOST_AT),
            posted: vec![false; receives as usize],
            lanes: 0,
            armed: false,
        };
        this.post_taken()?;
        Ok(this)
    }

    /// The header in a receive that has completed.
    pub(super) fn take_receive(&mut self, slot: u32) -> [u8; RECEIVE_BYTES] {
        let mut header = [0; RECEIVE_BYTES];
        if std::mem::replace(&mut self.posted[slot as usize], false) {
            // Never outside, and registered as long as this lives; zeroes would be no header.
            let _ = self.headers.read(slot as usize * RECEIVE_BYTES, &mut header);
            self.taken.push(slot);
        }
        header
    }

    /// Gives receives back, a few at a time.
    pub(super) fn repost(&mut self) {
        if self.taken.len() >= REPOST_AT {
            // What is not taken now is tried again.
            let _ = self.post_taken();
        }
    }

    /// Gives every receive back.
    pub(super) fn refill(&mut self) {
        let _ = self.post_taken();
    }

    fn post_taken(&mut self) -> Result<(), VerbsError> {
        let recvs = &mut self.recvs;
        while !self.taken.is_empty() {
            let from = self.taken.len().saturating_sub(REPOST_AT);
            recvs.clear();
            for &slot in &self.taken[from..] {
                let at = slot as usize * RECEIVE_BYTES;
                let sge = self.headers.sge(at as u64, RECEIVE_BYTES as u32)?;
                recvs.push(receive(slot, sge));
            }
            let posted = match self.srq.post(recvs) {
                Ok(()) => recvs.len(),
                Err(error) => error.posted,
            };
            for &slot in &self.taken[from..from + posted] {
                self.posted[slot as usize] = true;
            }
            self.taken.drain(from..from + posted);
            if posted < recvs.len() {
                break;
            }
        }
        Ok(())
    }
}
