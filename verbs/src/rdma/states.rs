//! The life of a queue pair, as data.

use std::fmt;

use ibverbs_sys as sys;
use sys::{ibv_qp_attr_mask as mask, ibv_qp_state as state};

use super::error::VerbsError;

/// Where a queue pair is in its life (InfiniBand specification, volume 1, 10.3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QpState {
    /// New.
    Reset,
    /// Takes receives.
    Init,
    /// Ready to receive: answers the peer.
    ReadyToReceive,
    /// Ready to send as well.
    ReadyToSend,
    /// The send queue is being drained.
    SendQueueDrained,
    /// The send queue has failed.
    SendQueueError,
    /// Failed or stopped: everything posted is flushed.
    Error,
    /// One that this crate does not know, by its code.
    Other(u32),
}

/// One way from a state to another, and the attributes it takes: bits of `ibv_qp_attr_mask`, apart
/// from `IBV_QP_STATE`, which all of them have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transition {
    pub(crate) from: QpState,
    pub(crate) to: QpState,
    pub(crate) required: u32,
    pub(crate) optional: u32,
}

/// Attributes of a transition, and the words of errors for them.
const NAMES: [(mask, &str); 14] = [
    (mask::IBV_QP_PKEY_INDEX, "the P_Key index"),
    (mask::IBV_QP_PORT, "the port"),
    (mask::IBV_QP_ACCESS_FLAGS, "the access"),
    (mask::IBV_QP_AV, "the address"),
    (mask::IBV_QP_PATH_MTU, "the path MTU"),
    (mask::IBV_QP_DEST_QPN, "the remote queue pair number"),
    (mask::IBV_QP_RQ_PSN, "the receive PSN"),
    (mask::IBV_QP_MAX_DEST_RD_ATOMIC, "the reads answered at once"),
    (mask::IBV_QP_MIN_RNR_TIMER, "the receiver-not-ready timer"),
    (mask::IBV_QP_SQ_PSN, "the send PSN"),
    (mask::IBV_QP_TIMEOUT, "the timeout"),
    (mask::IBV_QP_RETRY_CNT, "the retry count"),
    (mask::IBV_QP_RNR_RETRY, "the receiver-not-ready retry count"),
    (mask::IBV_QP_MAX_QP_RD_ATOMIC, "the reads asked at once"),
];

/// The transitions of RC queue pairs that this layer makes: InfiniBand specification, volume 1,
/// table 91; `ibv_modify_qp(3)`; and, what is enforced, `qp_state_table` of Linux'
/// `drivers/infiniband/core/verbs.c`. Beside these, every state leads to [`QpState::Error`] without
/// attributes.
pub(crate) const TRANSITIONS: [Transition; 3] = [
    Transition {
        from: QpState::Reset,
        to: QpState::Init,
        required: mask::IBV_QP_PKEY_INDEX.0 | mask::IBV_QP_PORT.0 | mask::IBV_QP_ACCESS_FLAGS.0,
        optional: 0,
    },
    Transition {
        from: QpState::Init,
        to: QpState::ReadyToReceive,
        required: mask::IBV_QP_AV.0
            | mask::IBV_QP_PATH_MTU.0
            | mask::IBV_QP_DEST_QPN.0
            | mask::IBV_QP_RQ_PSN.0
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC.0
            | mask::IBV_QP_MIN_RNR_TIMER.0,
        optional: mask::IBV_QP_ALT_PATH.0 | mask::IBV_QP_ACCESS_FLAGS.0 | mask::IBV_QP_PKEY_INDEX.0,
    },
    Transition {
        from: QpState::ReadyToReceive,
        to: QpState::ReadyToSend,
        required: mask::IBV_QP_SQ_PSN.0
            | mask::IBV_QP_TIMEOUT.0
            | mask::IBV_QP_RETRY_CNT.0
            | mask::IBV_QP_RNR_RETRY.0
            | mask::IBV_QP_MAX_QP_RD_ATOMIC.0,
        optional: mask::IBV_QP_CUR_STATE.0
            | mask::IBV_QP_ALT_PATH.0
            | mask::IBV_QP_ACCESS_FLAGS.0
            | mask::IBV_QP_MIN_RNR_TIMER.0
            | mask::IBV_QP_PATH_MIG_STATE.0,
    },
];

/// The attributes given for a transition, as a mask for `ibv_modify_qp`.
///
/// # Errors
/// [`VerbsError::Transition`] if there is no such way, or attributes are missing or too many.
pub(crate) fn check(from: QpState, to: QpState, given: u32) -> Result<i32, VerbsError> {
    let refused = |missing: String| Err(VerbsError::Transition { from, to, missing });
    let allowed = if to == QpState::Error {
        0
    } else {
        let mut ways = TRANSITIONS.iter().filter(|way| way.to == to);
        let Some(way) = ways.clone().find(|way| way.from == from) else {
            return refused(match ways.next() {
                Some(way) => format!("the state {} before it", way.from),
                None => "a way there".to_owned(),
            });
        };
        let missing = way.required & !given;
        if missing != 0 {
            return refused(names(missing));
        }
        way.required | way.optional
    };
    if given & !allowed != 0 {
        return refused(format!("the place for {}", names(given & !allowed)));
    }
    Ok((given | mask::IBV_QP_STATE.0).cast_signed())
}

fn names(bits: u32) -> String {
    let named = NAMES.iter().filter(|(bit, _)| bits & bit.0 != 0);
    let mut names: Vec<String> = named.map(|(_, name)| (*name).to_owned()).collect();
    let unnamed = NAMES.iter().fold(bits, |bits, (bit, _)| bits & !bit.0);
    if unnamed != 0 {
        names.push(format!("attribute {unnamed:#x}"));
    }
    names.join(", ")
}

impl QpState {
    pub(crate) const fn from_code(code: u32) -> Self {
        match code {
            state::IBV_QPS_RESET => Self::Reset,
            state::IBV_QPS_INIT => Self::Init,
            state::IBV_QPS_RTR => Self::ReadyToReceive,
            state::IBV_QPS_RTS => Self::ReadyToSend,
            state::IBV_QPS_SQD => Self::SendQueueDrained,
            state::IBV_QPS_SQE => Self::SendQueueError,
            state::IBV_QPS_ERR => Self::Error,
            code => Self::Other(code),
        }
    }

    pub(crate) const fn code(self) -> u32 {
        match self {
            Self::Reset => state::IBV_QPS_RESET,
            Self::Init => state::IBV_QPS_INIT,
            Self::ReadyToReceive => state::IBV_QPS_RTR,
            Self::ReadyToSend => state::IBV_QPS_RTS,
            Self::SendQueueDrained => state::IBV_QPS_SQD,
            Self::SendQueueError => state::IBV_QPS_SQE,
            Self::Error => state::IBV_QPS_ERR,
            Self::Other(code) => code,
        }
    }
}

impl fmt::Display for QpState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reset => "RESET",
            Self::Init => "INIT",
            Self::ReadyToReceive => "RTR",
            Self::ReadyToSend => "RTS",
            Self::SendQueueDrained => "SQD",
            Self::SendQueueError => "SQE",
            Self::Error => "ERR",
            Self::Other(code) => return write!(f, "state {code}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [QpState; 7] = [
        QpState::Reset,
        QpState::Init,
        QpState::ReadyToReceive,
        QpState::ReadyToSend,
        QpState::SendQueueDrained,
        QpState::SendQueueError,
        QpState::Error,
    ];

    #[test]
    fn the_way_to_rts_is_free_with_what_it_needs_and_with_what_it_may_have() {
        for Transition { from, to, required, optional } in TRANSITIONS {
            let state = mask::IBV_QP_STATE.0;
            for given in [required, required | optional] {
                assert_eq!(check(from, to, given).unwrap(), (given | state).cast_signed());
            }
        }
        for from in STATES {
            let stopped = check(from, QpState::Error, 0).unwrap();
            assert_eq!(stopped, mask::IBV_QP_STATE.0.cast_signed(), "{from} -> ERR");
        }
    }

    #[test]
    fn every_required_attribute_is_missed_by_its_name() {
        for Transition { from, to, required, .. } in TRANSITIONS {
            for bit in (0..32).map(|bit| 1 << bit).filter(|bit| required & bit != 0) {
                let error = check(from, to, required & !bit).unwrap_err();
                let VerbsError::Transition { from: f, to: t, missing } = &error else {
                    panic!("{error}")
                };
                assert_eq!((*f, *t), (from, to));
                let name = NAMES.iter().find(|(name, _)| name.0 == bit).map(|(_, name)| *name);
                assert_eq!(name, Some(missing.as_str()), "bit {bit:#x} has no words");
            }
        }
        let error = check(QpState::Init, QpState::ReadyToReceive, 0).unwrap_err().to_string();
        assert!(
            error.starts_with("a queue pair cannot go from INIT to RTR: the address, "),
            "{error}"
        );
    }

    #[test]
    fn no_other_way_is_open() {
        let open = |from, to| TRANSITIONS.iter().any(|way| way.from == from && way.to == to);
        for from in STATES {
            for to in STATES.into_iter().filter(|&to| to != QpState::Error && !open(from, to)) {
                let error = check(from, to, 0).unwrap_err();
                assert!(matches!(error, VerbsError::Transition { .. }), "{from} -> {to}: {error}");
            }
        }
        let error = check(QpState::Reset, QpState::ReadyToReceive, 0).unwrap_err().to_string();
        assert_eq!(
            error,
            "a queue pair cannot go from RESET to RTR: the state INIT before it is missing"
        );
    }

    #[test]
    fn attributes_that_do_not_belong_are_refused() {
        for Transition { from, to, required, optional } in TRANSITIONS {
            for bit in (0..32).map(|bit| 1 << bit).filter(|bit| (required | optional) & bit == 0) {
                if bit != mask::IBV_QP_STATE.0 {
                    assert!(check(from, to, required | bit).is_err(), "{from} -> {to}: {bit:#x}");
                }
            }
        }
        let error = check(QpState::Init, QpState::Error, mask::IBV_QP_SQ_PSN.0).unwrap_err();
        assert!(error.to_string().contains("the send PSN"), "{error}");
    }

    #[test]
    fn states_keep_their_codes() {
        for (code, state) in (0..).zip(STATES) {
            assert_eq!((state.code(), QpState::from_code(code)), (code, state));
        }
        assert_eq!(QpState::from_code(9), QpState::Other(9));
        assert_eq!(QpState::Other(9).to_string(), "state 9");
    }
}
