//! From frames to work requests: one write for each stretch that is contiguous at the destination, its
//! sources gathered, and behind the last a send of the frame's header. One doorbell a chain.

use kvferry_verbs::{PostError, Sge};

use super::keys::KeyTable;
use super::lane::{ANSWERS_MAX, Current, Fault, Flight, Lane, Stage, WRITE_SGES};
use super::wr_id;
use crate::fabric::{Event, WorkStatus};
use crate::plan::Run;
use crate::wire::frame::{DataFrame, Frame};

/// Work requests in one chain: enough that the doorbell vanishes, few enough that the NIC starts early.
const CHAIN_WRS: u64 = 64;
/// Most bytes of one write: small against what all NICs take, large against what a write costs.
const WRITE_BYTES_MAX: u64 = 1 << 20;

/// One write, as it is put together.
struct Write {
    dst: u64,
    bytes: u64,
    /// Where the stretch of the peer's memory ends.
    dst_end: u64,
    rkey: u32,
    sges: [Sge; WRITE_SGES as usize],
    len: usize,
}

/// A page that is not in memory both NICs know.
struct Unkeyed {
    status: WorkStatus,
    addr: u64,
}

/// Where the last keys were found.
#[derive(Clone, Copy, Debug, Default)]
struct Hints {
    local: usize,
    remote: usize,
}

impl Lane {
    /// Posts what waits, as far as the queue has room, chain by chain.
    pub(super) fn transmit(&mut self, slot: u32, events: &mut Vec<Event>) {
        while self.stage == Stage::Open && !self.is_closing() && self.wrs_free() > 0 {
            if self.current.is_none() && !self.next_frame() {
                return;
            }
            self.post_chain(slot, events);
        }
    }

    fn next_frame(&mut self) -> bool {
        let Some(posting) = self.waiting.pop_front() else { return false };
        let runs = posting.runs.clone();
        self.current = Some(Current { posting, runs, rest: None, first_wr: self.posted });
        true
    }

    /// Posts one chain: the rest of the frame under way, and frames behind it, signalled at each frame's
    /// end and at the chain's.
    fn post_chain(&mut self, slot: u32, events: &mut Vec<Event>) {
        let limit = self.wrs_free().min(CHAIN_WRS);
        let (start, generation) = (self.posted, self.generation);
        let mut headers = [[0u8; crate::wire::frame::HEADER_BYTES]; CHAIN_WRS as usize];
        let mut free_headers = headers.iter_mut();
        let mut hints = Hints::default();
        let mut sent = 0;
        let (mut fault, mut signalled) = (None, true);
        let sge_max = (self.qp.max_send_sge() as usize).min(WRITE_SGES as usize);
        let Self { qp, local, remote, current, waiting, flights, dropped, bytes, .. } = self;
        let mut next_seq = self.sent;
        let mut wr = start;
        let mut batch = qp.batch();
        while wr < start + limit {
            let Some(frame) = current else {
                let Some(posting) = waiting.pop_front() else { break };
                let runs = posting.runs.clone();
                *current = Some(Current { posting, runs, rest: None, first_wr: wr });
                continue;
            };
            let last = wr + 1 == start + limit;
            match gather(frame, local, remote, &mut hints, sge_max) {
                Err(Unkeyed { status, addr }) => {
                    // Only its room is to blame, and what is posted of it does no harm.
                    let Some(Current { posting, first_wr, .. }) = current.take() else { break };
                    let (tag, payload) = (posting.tag, u64::from(posting.frame.payload_bytes));
                    events.push(Event::Unsendable { tag, status, addr });
                    if first_wr < wr {
                        dropped.push((posting, wr));
                    } else {
                        *bytes -= payload;
                    }
                }
                Ok(Some(write)) => {
                    let id = wr_id(slot, generation, wr);
                    let sges = &write.sges[..write.len];
                    if batch.write(id, sges, write.dst, write.rkey, last).is_err() {
                        // Cannot be: both limits are kept above.
                        fault = Some(broken("a chain longer than the queue"));
                        break;
                    }
                    wr += 1;
                    signalled = last;
                }
                Ok(None) => {
                    let Some(header) = free_headers.next() else { break };
                    next_seq += 1;
                    let data = DataFrame { seq: next_seq, ..frame.posting.frame };
                    *header = Frame::Data(data).encode();
                    let id = wr_id(slot, generation, wr);
                    if batch.send_inline(id, header, true).is_err() {
                        fault = Some(broken("a header that does not fit"));
                        break;
                    }
                    wr += 1;
                    signalled = true;
                    let Some(Current { posting, first_wr, .. }) = current.take() else { break };
                    let wrs = (first_wr, wr);
                    let (landed, answered) = (false, false);
                    flights.push_back(Flight { seq: next_seq, posting, wrs, landed, answered });
                    sent += 1;
                }
            }
        }
        if !signalled && fault.is_none() {
            // A frame was given up, and nothing else would tell the end of its writes.
            let id = wr_id(slot, generation, wr);
            match batch.write(id, &[], 0, 0, true) {
                Ok(()) => wr += 1,
                Err(error) => fault = Some(broken(&error.to_string())),
            }
        }
        let posted = if wr > start { batch.post() } else { Ok(()) };
        self.posted = wr;
        self.sent = next_seq;
        if let Err(PostError { source, .. }) = posted {
            // Credits keep a full queue from being posted to: the queue pair is broken, not busy.
            fault = Some(broken(&source.to_string()));
        }
        for flight in self.flights.iter().rev().take(sent).rev() {
            if !flight.posting.again {
                events.push(Event::Sent { tag: flight.posting.tag });
            }
        }
        if let Some(fault) = fault {
            self.fail(fault);
        }
    }

    /// Tells the peer how far its frames were counted, if that is new. One answer at a time says all.
    pub(super) fn answer_peer(&mut self, slot: u32) {
        if self.told == self.counted || self.answers.len() >= ANSWERS_MAX || self.is_closing() {
            return;
        }
        let wr = self.posted;
        let header = Frame::Ack { seq: self.counted }.encode();
        let id = wr_id(slot, self.generation, wr);
        let mut batch = self.qp.batch();
        let pushed = batch.send_inline(id, &header, true).map(|()| batch.post());
        match pushed {
            Ok(Ok(())) => {
                self.posted += 1;
                self.told = self.counted;
                self.answers.push_back(wr);
            }
            Ok(Err(PostError { source, .. })) => self.fail(broken(&source.to_string())),
            Err(error) => self.fail(broken(&error.to_string())),
        }
    }

    /// Writes nothing, to learn whether the path works.
    pub(super) fn prove(&mut self, slot: u32) {
        if self.stage != Stage::Waiting || self.is_closing() {
            return;
        }
        let wr = self.posted;
        let id = wr_id(slot, self.generation, wr);
        let mut batch = self.qp.batch();
        let pushed = batch.write(id, &[], 0, 0, true).map(|()| batch.post());
        match pushed {
            Ok(Ok(())) => {
                self.posted += 1;
                self.stage = Stage::Proving { wr };
            }
            Ok(Err(PostError { source, .. })) => self.fail(broken(&source.to_string())),
            Err(error) => self.fail(broken(&error.to_string())),
        }
    }

    /// The first fault of a lane is its cause.
    pub(super) fn fail(&mut self, fault: Fault) {
        if self.fault.is_none() {
            self.fault = Some(fault);
        }
    }
}

fn broken(why: &str) -> Fault {
    Fault { cause: format!("the queue pair takes no work: {why}"), culprit: None }
}

/// The next write of a frame; `None` when all of it has been written.
fn gather(
    frame: &mut Current,
    local: &KeyTable,
    remote: &KeyTable,
    hints: &mut Hints,
    sge_max: usize,
) -> Result<Option<Write>, Unkeyed> {
    let Some(first) = frame.rest.take().or_else(|| frame.runs.next()) else { return Ok(None) };
    let target = remote.find(first.dst, &mut hints.remote);
    let unkeyed = |status, addr| Unkeyed { status, addr };
    let target = target.ok_or_else(|| unkeyed(WorkStatus::RemoteAccess, first.dst))?;
    const NO_SGE: Sge = Sge { addr: 0, bytes: 0, lkey: 0 };
    let mut write = Write {
        dst: first.dst,
        bytes: 0,
        dst_end: target.end,
        rkey: target.key,
        sges: [NO_SGE; WRITE_SGES as usize],
        len: 0,
    };
    let mut next = Some(first);
    while let Some(run) = next {
        let joins = run.dst == write.dst + write.bytes && run.dst < write.dst_end;
        if !joins || write.len == sge_max || write.bytes == WRITE_BYTES_MAX {
            frame.rest = Some(run);
            break;
        }
        let source = local.find(run.src, &mut hints.local);
        let source = source.ok_or_else(|| unkeyed(WorkStatus::LocalProtection, run.src))?;
        let bytes = run
            .bytes
            .min(source.end - run.src)
            .min(write.dst_end - run.dst)
            .min(WRITE_BYTES_MAX - write.bytes);
        write.sges[write.len] = Sge { addr: run.src, bytes: bytes as u32, lkey: source.key };
        write.len += 1;
        write.bytes += bytes;
        next = if bytes == run.bytes {
            frame.runs.next()
        } else {
            let (src, dst) = (run.src + bytes, run.dst + bytes);
            Some(Run { src, dst, bytes: run.bytes - bytes })
        };
    }
    Ok(Some(write))
}
