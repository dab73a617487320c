//! What becomes of work requests.

use std::fmt;

use ibverbs_sys as sys;
use sys::{ibv_wc_opcode as opcode, ibv_wc_status as status};

/// The end of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The number it was posted with.
    pub wr_id: u64,
    /// How it ended. Success of a send-side request is also that of every unsignaled one before it
    /// on its queue pair.
    pub result: Result<Work, WorkError>,
}

/// What a work request that succeeded did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Work {
    /// What it was.
    pub opcode: WorkOpcode,
    /// Bytes received or read; 0 for what was sent or written, where NICs say nothing.
    pub bytes: u32,
    /// The number sent along, as the sender gave it.
    pub imm: Option<u32>,
    /// Number of the own queue pair.
    pub qp_num: u32,
}

/// How a work request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{status}, vendor error {vendor_err:#x}, queue pair {qp_num:#x}")]
#[non_exhaustive]
pub struct WorkError {
    /// What happened.
    pub status: WorkStatus,
    /// The NIC's own number for it.
    pub vendor_err: u32,
    /// Number of the own queue pair.
    pub qp_num: u32,
}

/// What a work request was (`enum ibv_wc_opcode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WorkOpcode {
    /// A send, with or without a number.
    Send,
    /// A write, with or without a number.
    Write,
    /// A read.
    Read,
    /// A receive that a send ended in.
    Receive,
    /// A receive that a write with a number used up; it holds no data.
    ReceiveWriteImm,
    /// Anything else, by its code.
    Other(u32),
}

/// Declares the statuses: code, name, words.
macro_rules! statuses {
    ($($code:ident $name:ident $words:literal, $doc:literal;)*) => {
        /// Status of a work request that failed (`enum ibv_wc_status`; InfiniBand specification,
        /// volume 1, 11.6.2). Which one a mistake gives differs between NICs.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum WorkStatus {
            $(#[doc = $doc] $name,)*
            /// One that this crate does not know, by its code.
            Other(u32),
        }

        impl WorkStatus {
            /// Of every status that has a name.
            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$name),*];

            /// The status with this code. 0, success, is none.
            #[must_use]
            pub const fn from_code(code: u32) -> Self {
                match code {
                    $(status::$code => Self::$name,)*
                    code => Self::Other(code),
                }
            }

            /// Its code.
            #[must_use]
            pub const fn code(self) -> u32 {
                match self {
                    $(Self::$name => status::$code,)*
                    Self::Other(code) => code,
                }
            }

            const fn words(self) -> &'static str {
                match self {
                    $(Self::$name => $words,)*
                    Self::Other(_) => "unknown status",
                }
            }
        }
    };
}

statuses! {
    IBV_WC_LOC_LEN_ERR LocalLength "local length error",
        "Longer than the receive that was posted for it, or than the port carries.";
    IBV_WC_LOC_QP_OP_ERR LocalQpOperation "local queue pair operation error",
        "The own NIC found the request or the queue pair inconsistent.";
    IBV_WC_LOC_EEC_OP_ERR LocalEecOperation "local EE context operation error",
        "Of reliable datagrams, which nobody implements.";
    IBV_WC_LOC_PROT_ERR LocalProtection "local protection error",
        "Own memory: a wrong key, a range outside it, or no permission.";
    IBV_WC_WR_FLUSH_ERR Flushed "flushed",
        "Not done, because the queue pair had failed before or was stopped: a consequence, never a \
         cause.";
    IBV_WC_MW_BIND_ERR WindowBind "memory window bind error",
        "A memory window could not be bound.";
    IBV_WC_BAD_RESP_ERR BadResponse "bad response",
        "The peer answered with something else.";
    IBV_WC_LOC_ACCESS_ERR LocalAccess "local access error",
        "A peer's write with a number went where it may not.";
    IBV_WC_REM_INV_REQ_ERR RemoteInvalidRequest "remote invalid request",
        "The peer's NIC does not take such a request: not allowed on its queue pair, or too long.";
    IBV_WC_REM_ACCESS_ERR RemoteAccess "remote access error",
        "The peer's memory: a wrong or revoked key, a range outside it, or no permission.";
    IBV_WC_REM_OP_ERR RemoteOperation "remote operation error",
        "The peer's NIC could not complete it.";
    IBV_WC_RETRY_EXC_ERR RetryExceeded "transport retry counter exceeded",
        "No answer: the peer, its queue pair or the way to it is gone, or never was.";
    IBV_WC_RNR_RETRY_EXC_ERR RnrRetryExceeded "receiver-not-ready retry counter exceeded",
        "The peer had no receive posted.";
    IBV_WC_LOC_RDD_VIOL_ERR LocalRddViolation "local RDD violation error",
        "Of reliable datagrams.";
    IBV_WC_REM_INV_RD_REQ_ERR RemoteInvalidRdRequest "remote invalid RD request",
        "Of reliable datagrams.";
    IBV_WC_REM_ABORT_ERR RemoteAborted "remote aborted",
        "The peer gave it up.";
    IBV_WC_INV_EECN_ERR InvalidEecn "invalid EE context number",
        "Of reliable datagrams.";
    IBV_WC_INV_EEC_STATE_ERR InvalidEecState "invalid EE context state",
        "Of reliable datagrams.";
    IBV_WC_FATAL_ERR Fatal "fatal error",
        "The device has failed.";
    IBV_WC_RESP_TIMEOUT_ERR ResponseTimeout "response timeout",
        "The peer did not answer in time.";
    IBV_WC_GENERAL_ERR General "general error",
        "None of the others.";
    IBV_WC_TM_ERR TagMatching "tag matching error",
        "Of tag matching.";
    IBV_WC_TM_RNDV_INCOMPLETE TagMatchingRendezvous "tag matching rendezvous incomplete",
        "Of tag matching.";
}

impl WorkStatus {
    /// Whether the request was only swept up after another one had failed, or the queue pair had
    /// been stopped.
    #[must_use]
    pub const fn is_flush(self) -> bool {
        matches!(self, Self::Flushed)
    }
}

impl fmt::Display for WorkStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.words(), self.code())
    }
}

impl WorkOpcode {
    const fn from_code(code: u32) -> Self {
        match code {
            opcode::IBV_WC_SEND => Self::Send,
            opcode::IBV_WC_RDMA_WRITE => Self::Write,
            opcode::IBV_WC_RDMA_READ => Self::Read,
            opcode::IBV_WC_RECV => Self::Receive,
            opcode::IBV_WC_RECV_RDMA_WITH_IMM => Self::ReceiveWriteImm,
            code => Self::Other(code),
        }
    }
}

impl Completion {
    /// Of nothing: to fill an array that [`Cq::poll`](crate::Cq::poll) writes to.
    pub const EMPTY: Self = Self {
        wr_id: 0,
        result: Err(WorkError { status: WorkStatus::General, vendor_err: 0, qp_num: 0 }),
    };

    /// What a NIC wrote. Of a failure only four fields mean anything (`ibv_poll_cq(3)`): `wr_id`,
    /// `status`, `qp_num` and `vendor_err`.
    #[inline]
    pub(crate) fn from_wc(wc: &sys::ibv_wc) -> Self {
        let (wr_id, qp_num) = (wc.wr_id(), wc.qp_num);
        if let Some((code, vendor_err)) = wc.error() {
            let status = WorkStatus::from_code(code);
            return Self { wr_id, result: Err(WorkError { status, vendor_err, qp_num }) };
        }
        let opcode = WorkOpcode::from_code(wc.opcode());
        let bytes = match opcode {
            WorkOpcode::Send | WorkOpcode::Write => 0,
            // The field has 32 bits; only its accessor is wider.
            _ => wc.len() as u32,
        };
        let imm = wc.imm_data().map(u32::from_be);
        Self { wr_id, result: Ok(Work { opcode, bytes, imm, qp_num }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `struct ibv_wc`, of which `ibverbs-sys` lets nobody fill in all fields.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Wc {
        wr_id: u64,
        status: u32,
        opcode: u32,
        vendor_err: u32,
        byte_len: u32,
        imm_data: u32,
        qp_num: u32,
        src_qp: u32,
        wc_flags: u32,
        pkey_index: u16,
        slid: u16,
        sl: u8,
        dlid_path_bits: u8,
    }

    const WC: Wc = Wc {
        wr_id: 7,
        status: 0,
        opcode: opcode::IBV_WC_RECV,
        vendor_err: 0x55,
        byte_len: 4096,
        imm_data: 0x0102_0304_u32.to_be(),
        qp_num: 0x11,
        src_qp: 0,
        wc_flags: sys::ibv_wc_flags::IBV_WC_WITH_IMM.0,
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    };

    fn decode(wc: Wc) -> Completion {
        // SAFETY: the same C structure, field by field; all bits are valid in all fields.
        Completion::from_wc(&unsafe { std::mem::transmute::<Wc, sys::ibv_wc>(wc) })
    }

    #[test]
    fn a_success_tells_what_was_received_in_host_order() {
        let work =
            Work { opcode: WorkOpcode::Receive, bytes: 4096, imm: Some(0x0102_0304), qp_num: 0x11 };
        assert_eq!(decode(WC), Completion { wr_id: 7, result: Ok(work) });
        let without = decode(Wc { wc_flags: 0, ..WC });
        assert_eq!(without.result, Ok(Work { imm: None, ..work }));
        let opcode = opcode::IBV_WC_RECV_RDMA_WITH_IMM;
        let by_write = decode(Wc { opcode, ..WC }).result.unwrap();
        assert_eq!((by_write.opcode, by_write.bytes), (WorkOpcode::ReceiveWriteImm, 4096));
    }

    #[test]
    fn a_success_of_a_sender_tells_no_length() {
        for (code, opcode) in [
            (opcode::IBV_WC_SEND, WorkOpcode::Send),
            (opcode::IBV_WC_RDMA_WRITE, WorkOpcode::Write),
        ] {
            let work = decode(Wc { opcode: code, wc_flags: 0, ..WC }).result.unwrap();
            assert_eq!((work.opcode, work.bytes), (opcode, 0));
        }
        let read = decode(Wc { opcode: opcode::IBV_WC_RDMA_READ, wc_flags: 0, ..WC });
        assert_eq!(read.result.unwrap().bytes, 4096);
        let other = decode(Wc { opcode: opcode::IBV_WC_TSO, wc_flags: 0, ..WC });
        assert_eq!(other.result.unwrap().opcode, WorkOpcode::Other(opcode::IBV_WC_TSO));
    }

    #[test]
    fn a_failure_is_the_same_whatever_stands_in_the_other_fields() {
        let failed = Wc { status: status::IBV_WC_REM_ACCESS_ERR, ..WC };
        let status = WorkStatus::RemoteAccess;
        let error = WorkError { status, vendor_err: 0x55, qp_num: 0x11 };
        let expected = Completion { wr_id: 7, result: Err(error) };
        assert_eq!(decode(failed), expected);
        let garbage = Wc { opcode: !0, byte_len: !0, imm_data: !0, wc_flags: !0, ..failed };
        assert_eq!(decode(garbage), expected);
    }

    #[test]
    fn every_status_keeps_its_code_and_says_it() {
        for (code, &status) in (1..).zip(WorkStatus::ALL) {
            assert_eq!((status.code(), WorkStatus::from_code(code)), (code, status));
            assert!(status.to_string().ends_with(&format!(" ({code})")), "{status}");
            assert_eq!(status.is_flush(), code == 5, "{status}");
        }
        assert_eq!(WorkStatus::ALL.len(), 23);
        assert_eq!(WorkStatus::from_code(24), WorkStatus::Other(24));
        assert_eq!(WorkStatus::Other(99).to_string(), "unknown status (99)");
        assert_eq!(WorkStatus::RetryExceeded.to_string(), "transport retry counter exceeded (12)");
    }
}
