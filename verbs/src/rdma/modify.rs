//! Connecting a queue pair, and asking how it is.

use std::io;

use ibverbs_sys as sys;
use rustix::io::Errno;
use sys::ibv_qp_attr_mask as mask;

use super::access::Access;
use super::attributes::Mtu;
use super::error::{self, VerbsError};
use super::qp::{Capacities, Qp};
use super::route::AddressVector;
use super::states::{self, QpState};
use crate::inventory::PortState;

/// What a queue pair needs to take receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InitAttributes {
    /// The port it sends and receives through, counted from 1.
    pub port: u8,
    /// Index into the port's P_Key table; 0 where partitions are not used.
    pub pkey_index: u16,
    /// What the peer may do through it.
    pub access: Access,
}

/// What a queue pair needs to answer its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RtrAttributes {
    /// Payload of a packet, the same at both ends, at most what either port carries.
    pub path_mtu: Mtu,
    /// Number of the peer's queue pair, 24 bits.
    pub remote_qp_num: u32,
    /// Sequence number of the first packet from the peer, 24 bits: the peer's `sq_psn`.
    pub rq_psn: u32,
    /// Where the peer is.
    pub address: AddressVector,
    /// Reads of the peer's answered at once.
    pub max_dest_rd_atomic: u8,
    /// Code of how long the peer is told to wait when there is no receive for it, 5 bits: 1 is
    /// 0.01 ms, 12 is 0.64 ms, 31 is 492 ms, 0 is 655 ms (InfiniBand specification, volume 1,
    /// table 45).
    pub min_rnr_timer: u8,
}

/// What a queue pair needs to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RtsAttributes {
    /// Sequence number of its first packet, 24 bits: the peer's `rq_psn`.
    pub sq_psn: u32,
    /// Code of how long an answer is waited for, 5 bits: 4.096 µs × 2^this, up to four times that
    /// in hardware; 0 is for ever.
    pub timeout: u8,
    /// Times a packet that was not answered is sent again, 3 bits.
    pub retry_count: u8,
    /// Times the peer may say that it has no receive, 3 bits; 7 is for ever.
    pub rnr_retry: u8,
    /// Reads under way at once.
    pub max_rd_atomic: u8,
}

/// A queue pair as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct QpAttributes {
    /// Its state. Those below that it has not been given yet mean nothing.
    pub state: QpState,
    /// What it was granted.
    pub capacities: Capacities,
    /// What the peer may do through it.
    pub access: Access,
    /// The port it uses.
    pub port: u8,
    /// Index into the port's P_Key table.
    pub pkey_index: u16,
    /// Payload of a packet.
    pub path_mtu: Mtu,
    /// Number of the peer's queue pair.
    pub remote_qp_num: u32,
    /// Sequence number of the next packet from the peer.
    pub rq_psn: u32,
    /// Sequence number of its next packet.
    pub sq_psn: u32,
    /// See [`RtsAttributes::timeout`].
    pub timeout: u8,
    /// See [`RtsAttributes::retry_count`].
    pub retry_count: u8,
    /// See [`RtsAttributes::rnr_retry`].
    pub rnr_retry: u8,
}

/// Bits of a packet sequence number and of a queue pair number.
const PSN_BITS: u32 = 24;

impl Qp {
    /// From RESET to INIT: it takes receives.
    ///
    /// # Errors
    /// [`VerbsError::Transition`] from another state, [`VerbsError::BeyondLimits`] if there is no
    /// such port or P_Key index.
    pub fn to_init(&mut self, attributes: &InitAttributes) -> Result<(), VerbsError> {
        let mut raw = sys::ibv_qp_attr {
            port_num: attributes.port,
            pkey_index: attributes.pkey_index,
            qp_access_flags: attributes.access.of_qp(),
            ..Default::default()
        };
        let given = mask::IBV_QP_PORT | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_ACCESS_FLAGS;
        self.modify(QpState::Init, &mut raw, given, None)
    }

    /// From INIT to RTR: it answers its peer. Looks the route up, which can block.
    ///
    /// # Errors
    /// [`VerbsError::Transition`] from another state, [`VerbsError::BadAttribute`] if a number has
    /// too many bits, [`VerbsError::NoRoute`] if the address leads nowhere, [`VerbsError::PortDown`]
    /// if the port carries nothing.
    pub fn to_rtr(&mut self, attributes: &RtrAttributes) -> Result<(), VerbsError> {
        let RtrAttributes { remote_qp_num, rq_psn, address, min_rnr_timer, .. } = *attributes;
        fits("remote_qp_num", remote_qp_num, PSN_BITS)?;
        fits("rq_psn", rq_psn, PSN_BITS)?;
        fits("min_rnr_timer", min_rnr_timer.into(), 5)?;
        fits("sl", address.sl.into(), 4)?;
        fits("flow_label", address.global.map_or(0, |global| global.flow_label), 20)?;
        let mut raw = sys::ibv_qp_attr {
            path_mtu: attributes.path_mtu.code().into(),
            dest_qp_num: remote_qp_num,
            rq_psn,
            ah_attr: address.to_raw(),
            max_dest_rd_atomic: attributes.max_dest_rd_atomic,
            min_rnr_timer,
            ..Default::default()
        };
        let given = mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_AV
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(QpState::ReadyToReceive, &mut raw, given, Some(address))
    }

    /// From RTR to RTS: it sends.
    ///
    /// # Errors
    /// [`VerbsError::Transition`] from another state, [`VerbsError::BadAttribute`] if a number has
    /// too many bits, [`VerbsError::BeyondLimits`] if the device has fewer reads under way.
    pub fn to_rts(&mut self, attributes: &RtsAttributes) -> Result<(), VerbsError> {
        let RtsAttributes { sq_psn, timeout, retry_count, rnr_retry, max_rd_atomic } = *attributes;
        fits("sq_psn", sq_psn, PSN_BITS)?;
        fits("timeout", timeout.into(), 5)?;
        fits("retry_count", retry_count.into(), 3)?;
        fits("rnr_retry", rnr_retry.into(), 3)?;
        let mut raw = sys::ibv_qp_attr {
            sq_psn,
            timeout,
            retry_cnt: retry_count,
            rnr_retry,
            max_rd_atomic,
            ..Default::default()
        };
        let given = mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(QpState::ReadyToSend, &mut raw, given, None)
    }

    /// Stops it: nothing more is sent or answered, and everything that is posted and has not
    /// completed is flushed, unsignaled work requests as well.
    ///
    /// # Errors
    /// [`VerbsError::DeviceGone`] or [`VerbsError::Os`].
    pub fn to_error(&mut self) -> Result<(), VerbsError> {
        self.modify(QpState::Error, &mut sys::ibv_qp_attr::default(), mask(0), None)
    }

    /// How it is now.
    ///
    /// # Errors
    /// [`VerbsError::DeviceGone`] or [`VerbsError::Os`].
    pub fn query(&self) -> Result<QpAttributes, VerbsError> {
        let mut raw = sys::ibv_qp_attr::default();
        let mut init = sys::ibv_qp_init_attr::default();
        let asked = mask::IBV_QP_STATE
            | mask::IBV_QP_CAP
            | mask::IBV_QP_ACCESS_FLAGS
            | mask::IBV_QP_PORT
            | mask::IBV_QP_PKEY_INDEX
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY;
        let functions = self.context().functions();
        // SAFETY: the queue pair is there, and the function fills both structures.
        let code = unsafe {
            let asked = asked.0.cast_signed();
            (functions.ibv_query_qp)(self.raw(), &raw mut raw, asked, &raw mut init)
        };
        error::check(code).map_err(|source| VerbsError::os("ibv_query_qp", source))?;
        Ok(QpAttributes::from_raw(&raw))
    }

    /// Its state now.
    ///
    /// # Errors
    /// As [`Qp::query`].
    pub fn state(&self) -> Result<QpState, VerbsError> {
        self.query().map(|attributes| attributes.state)
    }

    /// Moves it to another state; `address` is where it is to be connected to.
    fn modify(
        &mut self,
        to: QpState,
        raw: &mut sys::ibv_qp_attr,
        given: mask,
        address: Option<AddressVector>,
    ) -> Result<(), VerbsError> {
        let given = states::check(self.last_state, to, given.0)?;
        raw.qp_state = to.code();
        // SAFETY: the queue pair is there, and `raw` has the attributes that the mask names.
        let code = unsafe { (self.context().functions().ibv_modify_qp)(self.raw(), raw, given) };
        error::check(code).map_err(|source| self.refused(to, address, source))?;
        self.last_state = to;
        Ok(())
    }

    /// The error for a transition that the kernel refused: of a queue pair that is not where it was
    /// left, since it has failed, or of what it was given.
    fn refused(
        &self,
        to: QpState,
        address: Option<AddressVector>,
        source: io::Error,
    ) -> VerbsError {
        let errno = Errno::from_io_error(&source);
        if errno == Some(Errno::INVAL)
            && let Ok(from) = self.state()
            && from != self.last_state
        {
            let missing = format!("the state {}", self.last_state);
            return VerbsError::Transition { from, to, missing };
        }
        match (errno, address) {
            (
                Some(
                    Errno::INVAL
                    | Errno::NETUNREACH
                    | Errno::HOSTUNREACH
                    | Errno::TIMEDOUT
                    | Errno::NETDOWN
                    | Errno::NODATA
                    | Errno::NOENT,
                ),
                Some(address),
            ) => self.no_route(address, source),
            _ => VerbsError::create("ibv_modify_qp", source),
        }
    }

    /// The error for an address that the kernel refused.
    fn no_route(&self, address: AddressVector, source: io::Error) -> VerbsError {
        let port = address.port;
        match self.context().port(port) {
            Ok(now) if now.state != PortState::Active => {
                VerbsError::PortDown { port, state: now.state, source }
            }
            _ => VerbsError::NoRoute {
                gid: address.global.map(|global| global.gid),
                lid: address.lid,
                gid_index: address.global.map_or(0, |global| global.gid_index),
                source,
            },
        }
    }
}

impl QpAttributes {
    fn from_raw(raw: &sys::ibv_qp_attr) -> Self {
        Self {
            state: QpState::from_code(raw.qp_state),
            capacities: Capacities::from_raw(&raw.cap),
            access: Access::from_bits(raw.qp_access_flags),
            port: raw.port_num,
            pkey_index: raw.pkey_index,
            path_mtu: Mtu::from_raw(raw.path_mtu),
            remote_qp_num: raw.dest_qp_num,
            rq_psn: raw.rq_psn,
            sq_psn: raw.sq_psn,
            timeout: raw.timeout,
            retry_count: raw.retry_cnt,
            rnr_retry: raw.rnr_retry,
        }
    }
}

fn fits(attribute: &'static str, given: u32, bits: u32) -> Result<(), VerbsError> {
    let max = (1 << bits) - 1;
    if given > max { Err(VerbsError::BadAttribute { attribute, given, max }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_fits_exactly_if_it_has_the_bits() {
        assert!(fits("sl", 15, 4).is_ok());
        let error = fits("sl", 16, 4).unwrap_err();
        assert_eq!(error.to_string(), "sl is 16, at most 15 is possible");
        assert!(fits("rq_psn", 0x00ff_ffff, PSN_BITS).is_ok());
        assert!(fits("rq_psn", 0x0100_0000, PSN_BITS).is_err());
    }
}
