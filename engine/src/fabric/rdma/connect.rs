//! Making a lane: a queue pair on each side, joined by two messages over the session. All of it can block
//! (a route is looked up when a queue pair learns its peer), so it never happens on a worker.

use std::net::Ipv6Addr;
use std::sync::Arc;

use kvferry_verbs::{
    Access, AddressVector, GlobalRoute, InitAttributes, Mtu, Qp, QpOptions, RtrAttributes,
    RtsAttributes, VerbsError,
};
use serde::{Deserialize, Serialize};

use super::keys::{KeyTable, Keyed};
use super::lane::{SQ_WRS, WRITE_SGES};
use super::pairs::{RailPair, pair_gids};
use super::rails::{INLINE_BYTES, Place, Rails};
use crate::peers::{RdmaEnd, RdmaPath};
use crate::wire::rails::{GIDS_MAX, GidCard, RailCard, RailsCard};

/// How long the peer's NIC is told to wait before it writes again to one that had no receive ready: code
/// 18, 5 ms (InfiniBand specification, volume 1, table 45). Credits keep this from happening.
const MIN_RNR_TIMER: u8 = 18;
/// Times it does: finite, so that a receiver that never gets ready is an error, not a silence (7 means for
/// ever).
const RNR_RETRY: u8 = 6;
/// Reads that may be under way, the most any NIC in use takes.
const RD_ATOMIC_MAX: u8 = 16;
/// Hops a packet may take across a routed network.
const HOP_LIMIT: u8 = 64;

/// A lane cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaneFault {
    #[error(
        "{rail} has no room for another queue pair; use fewer queue pairs a rail, or fewer peers"
    )]
    NoPlace { rail: String },
    #[error("{rail}: {source}")]
    Verbs { rail: String, source: VerbsError },
    #[error(
        "no GID of {rail} can speak to the peer's {remote}: they are of different types or families; \
         choose by gid_index on both sides"
    )]
    NoGids { rail: String, remote: String },
    /// Nothing on the way to the peer's GIDs.
    #[error(
        "{rail} finds no way to the peer's {remote}: {tried}; check addresses, VLAN and routes"
    )]
    NoWay { rail: String, remote: String, tried: String },
    #[error("randomness could not be had: {0}")]
    Random(String),
    #[error("the peer's end of a lane is malformed: {0}")]
    Malformed(String),
}

/// The dialer's end, and where it may be reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Offer {
    /// Rail of the listener.
    to: u8,
    /// Rail of the dialer.
    from: u8,
    end: QpCard,
    gids: Vec<GidCard>,
}

/// The listener's end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Answer {
    end: QpCard,
    /// The dialer's GID that was chosen, by its place in the offer.
    yours: u8,
    mine: GidCard,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct QpCard {
    qp_num: u32,
    psn: u32,
    /// By the port's own code: 256 bytes × 2^(this - 1).
    mtu: u8,
    rd_atomic: u8,
}

/// A queue pair that waits for its other end.
#[derive(Debug)]
pub(crate) struct HalfLane {
    qp: Qp,
    place: Place,
    pair: RailPair,
    end: QpCard,
    gids: Vec<GidCard>,
}

impl HalfLane {
    pub(crate) const fn pair(&self) -> RailPair {
        self.pair
    }
}

/// A queue pair that can send and receive: what the worker adopts.
#[derive(Debug)]
pub(crate) struct RdmaLink {
    pub(super) qp: Qp,
    pub(super) place: Place,
    pub(super) rail: u8,
    pub(super) path: RdmaPath,
    /// Keys of the peer's memory, by the NIC at the other end.
    pub(super) remote: Arc<KeyTable>,
    /// Whether the other end stands already.
    pub(super) ready: bool,
}

impl RdmaLink {
    pub(crate) const fn path(&self) -> &RdmaPath {
        &self.path
    }
}

/// What a peer said of its rails, ready for use.
#[derive(Debug)]
pub(crate) struct RemoteRails {
    pub(crate) rails: Vec<RailCard>,
    /// By NIC.
    keys: Vec<Arc<KeyTable>>,
}

impl RemoteRails {
    /// The card's bounds have been checked.
    pub(crate) fn new(card: RailsCard) -> Self {
        let nics = card.rails.iter().map(|rail| usize::from(rail.nic) + 1).max().unwrap_or(0);
        let table = |nic: usize| {
            let keyed = card.keys.iter().filter_map(|keys| {
                let (addr, end) = (keys.addr, keys.addr + keys.bytes);
                Some(Keyed { addr, end, key: *keys.rkeys.get(nic)? })
            });
            Arc::new(KeyTable::new(keyed.collect()))
        };
        Self { keys: (0..nics).map(table).collect(), rails: card.rails }
    }

    fn rail(&self, index: u8) -> Result<(&RailCard, &Arc<KeyTable>), LaneFault> {
        let rail = self.rails.get(usize::from(index));
        let found = rail.and_then(|rail| Some((rail, self.keys.get(usize::from(rail.nic))?)));
        found.ok_or_else(|| LaneFault::Malformed(format!("there is no rail {index}")))
    }
}

impl Rails {
    /// Makes the dialer's end, to be told to the peer. `skip` first pairs of GIDs have been tried.
    pub(crate) fn offer(
        self: &Arc<Self>,
        pair: RailPair,
        remote: &RemoteRails,
        skip: usize,
    ) -> Result<(HalfLane, Vec<u8>), LaneFault> {
        let ours = &self.rail_cards()[usize::from(pair.local)];
        let (theirs, _) = remote.rail(pair.remote)?;
        // In the order in which they are to be tried.
        let mut gids: Vec<GidCard> = Vec::new();
        let pairs = pair_gids(&ours.gids, &theirs.gids);
        let turn = if pairs.is_empty() { 0 } else { skip % pairs.len() };
        for &(i, _) in pairs.iter().cycle().skip(turn).take(pairs.len()) {
            if !gids.contains(&ours.gids[i]) {
                gids.push(ours.gids[i]);
            }
        }
        if gids.is_empty() {
            let (rail, remote) = (ours.name.clone(), theirs.name.clone());
            return Err(LaneFault::NoGids { rail, remote });
        }
        let (qp, place, end) = self.queue_pair(pair.local)?;
        let half = HalfLane { qp, place, pair, end, gids: gids.clone() };
        let offer = Offer { to: pair.remote, from: pair.local, end, gids };
        Ok((half, encode(&offer)?))
    }

    /// Makes the listener's end for an offer, joined to the dialer's.
    pub(crate) fn answer(
        self: &Arc<Self>,
        offer: &[u8],
        remote: &RemoteRails,
    ) -> Result<(RdmaLink, Vec<u8>), LaneFault> {
        let offer: Offer = decode(offer)?;
        if offer.gids.len() > GIDS_MAX {
            return Err(LaneFault::Malformed("too many GIDs".to_owned()));
        }
        let (theirs, keys) = remote.rail(offer.from)?;
        let ours = self.rail_cards().get(usize::from(offer.to));
        let ours =
            ours.ok_or_else(|| LaneFault::Malformed(format!("there is no rail {}", offer.to)))?;
        let (mut qp, place, end) = self.queue_pair(offer.to)?;
        // Theirs are in the order in which they want them tried.
        let mut pairs = pair_gids(&ours.gids, &offer.gids);
        pairs.sort_by_key(|&(_, j)| j);
        let mut tried = Vec::new();
        for (i, j) in pairs {
            let (mine, yours) = (ours.gids[i], offer.gids[j]);
            match self.join(&mut qp, offer.to, (&end, &offer.end), (theirs, mine, yours)) {
                Ok(mtu_bytes) => {
                    let path = RdmaPath {
                        local: rdma_end(ours, mine, &end),
                        remote: rdma_end(theirs, yours, &offer.end),
                        mtu_bytes,
                    };
                    let remote = Arc::clone(keys);
                    let rail = offer.to;
                    let link = RdmaLink { qp, place, rail, path, remote, ready: false };
                    let answer = Answer { end, yours: j as u8, mine };
                    return Ok((link, encode(&answer)?));
                }
                Err(error) => tried.push(failed_way(mine, yours, &error)),
            }
        }
        let (rail, remote) = (ours.name.clone(), theirs.name.clone());
        Err(if tried.is_empty() {
            LaneFault::NoGids { rail, remote }
        } else {
            LaneFault::NoWay { rail, remote, tried: tried.join("; ") }
        })
    }

    /// Joins the dialer's end to the listener's.
    pub(crate) fn complete(
        self: &Arc<Self>,
        half: HalfLane,
        answer: &[u8],
        remote: &RemoteRails,
    ) -> Result<RdmaLink, LaneFault> {
        let Answer { end: theirs_end, yours, mine } = decode(answer)?;
        let HalfLane { mut qp, place, pair, end, gids } = half;
        let (theirs, keys) = remote.rail(pair.remote)?;
        let ours = &self.rail_cards()[usize::from(pair.local)];
        let ours_gid = gids.get(usize::from(yours)).copied();
        let ours_gid = ours_gid
            .ok_or_else(|| LaneFault::Malformed("a GID that was not offered".to_owned()))?;
        match self.join(&mut qp, pair.local, (&end, &theirs_end), (theirs, ours_gid, mine)) {
            Ok(mtu_bytes) => {
                let path = RdmaPath {
                    local: rdma_end(ours, ours_gid, &end),
                    remote: rdma_end(theirs, mine, &theirs_end),
                    mtu_bytes,
                };
                let (rail, remote) = (pair.local, Arc::clone(keys));
                Ok(RdmaLink { qp, place, rail, path, remote, ready: true })
            }
            Err(error) => {
                let (rail, remote) = (ours.name.clone(), theirs.name.clone());
                let tried = failed_way(ours_gid, mine, &error);
                Err(LaneFault::NoWay { rail, remote, tried })
            }
        }
    }

    /// A new queue pair on a rail, initialised.
    fn queue_pair(self: &Arc<Self>, rail: u8) -> Result<(Qp, Place, QpCard), LaneFault> {
        let at = &self.rails[usize::from(rail)];
        let nic = &self.nics[at.nic];
        let verbs = |source| LaneFault::Verbs { rail: at.name.clone(), source };
        let place = self.place(at.nic);
        let place = place.ok_or_else(|| LaneFault::NoPlace { rail: at.name.clone() })?;
        let options = QpOptions {
            send_cq: &nic.cq,
            recv_cq: &nic.cq,
            srq: Some(&nic.srq),
            max_send_wr: SQ_WRS.min(nic.limits.max_qp_wr),
            max_recv_wr: 0,
            max_send_sge: WRITE_SGES.min(nic.limits.max_sge),
            max_recv_sge: 0,
            max_inline_bytes: INLINE_BYTES,
        };
        let mut qp = nic.pd.create_qp(&options).map_err(verbs)?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let init = InitAttributes { port: at.port, pkey_index: self.config.pkey_index, access };
        qp.to_init(&init).map_err(verbs)?;
        let mtu = nic.context.port(at.port).map_err(verbs)?.active_mtu;
        let mut psn = [0; 4];
        // Random, so that packets of an earlier queue pair of this number never fit this one.
        getrandom::fill(&mut psn).map_err(|error| LaneFault::Random(error.to_string()))?;
        let rd_atomic = RD_ATOMIC_MAX
            .min(u8::try_from(nic.limits.max_qp_rd_atom).unwrap_or(u8::MAX))
            .min(u8::try_from(nic.limits.max_qp_init_rd_atom).unwrap_or(u8::MAX));
        let end = QpCard {
            qp_num: qp.number(),
            psn: u32::from_le_bytes(psn) & 0x00ff_ffff,
            mtu: mtu as u8,
            rd_atomic,
        };
        Ok((qp, place, end))
    }

    /// Takes a queue pair to where it can send and receive. Gives the packet size in bytes.
    fn join(
        &self,
        qp: &mut Qp,
        rail: u8,
        (ours, theirs): (&QpCard, &QpCard),
        (their_rail, our_gid, their_gid): (&RailCard, GidCard, GidCard),
    ) -> Result<u32, VerbsError> {
        let card = &self.rail_cards()[usize::from(rail)];
        let mtu = Mtu::from_code(ours.mtu.min(theirs.mtu)).unwrap_or(Mtu::Bytes256);
        let subnet = |gid: &GidCard| gid.gid[..8] == our_gid.gid[..8];
        // On InfiniBand packets inside a subnet go by LID and need no global header.
        let global = (!card.infiniband || !subnet(&their_gid)).then(|| GlobalRoute {
            gid: their_gid.gid.into(),
            gid_index: our_gid.index as u8,
            traffic_class: self.config.traffic_class,
            hop_limit: HOP_LIMIT,
            flow_label: 0,
        });
        let address = AddressVector {
            port: self.rails[usize::from(rail)].port,
            lid: their_rail.lid,
            sl: self.config.service_level,
            global,
        };
        qp.to_rtr(&RtrAttributes {
            path_mtu: mtu,
            remote_qp_num: theirs.qp_num,
            rq_psn: theirs.psn,
            address,
            max_dest_rd_atomic: ours.rd_atomic.min(theirs.rd_atomic),
            min_rnr_timer: MIN_RNR_TIMER,
        })?;
        qp.to_rts(&RtsAttributes {
            sq_psn: ours.psn,
            timeout: self.config.timeout,
            retry_count: self.config.retry_count,
            rnr_retry: RNR_RETRY,
            max_rd_atomic: ours.rd_atomic.min(theirs.rd_atomic),
        })?;
        Ok(mtu.bytes())
    }
}

fn rdma_end(rail: &RailCard, gid: GidCard, end: &QpCard) -> RdmaEnd {
    RdmaEnd {
        rail: rail.name.clone(),
        gid: Ipv6Addr::from(gid.gid),
        gid_index: gid.index,
        lid: rail.lid,
        qp_num: end.qp_num,
    }
}

fn failed_way(ours: GidCard, theirs: GidCard, error: &VerbsError) -> String {
    let (from, to) = (Ipv6Addr::from(ours.gid), Ipv6Addr::from(theirs.gid));
    format!("from GID {from} (index {}) to {to}: {error}", ours.index)
}

fn encode<T: Serialize>(end: &T) -> Result<Vec<u8>, LaneFault> {
    postcard::to_stdvec(end).map_err(|error| LaneFault::Malformed(error.to_string()))
}

fn decode<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, LaneFault> {
    let (end, rest) = postcard::take_from_bytes(bytes)
        .map_err(|error| LaneFault::Malformed(error.to_string()))?;
    if rest.is_empty() {
        Ok(end)
    } else {
        Err(LaneFault::Malformed(format!("{} bytes too many", rest.len())))
    }
}
