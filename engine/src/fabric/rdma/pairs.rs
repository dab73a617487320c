//! Which rails of two engines are joined, and by which of their GIDs. Pure.

use crate::wire::rails::{GidCard, GidKind, RailCard};

/// GID pairs that are tried on one path.
pub(crate) const GID_PAIRS_MAX: usize = 8;

/// A rail of each side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RailPair {
    pub(crate) local: u8,
    pub(crate) remote: u8,
}

/// Joins the rails that `usable` lets through: every rail of the side that has more is joined once, to the
/// one of the other side that looks nearest by its addresses, and the other side's are used evenly.
pub(crate) fn pair_rails(
    ours: &[RailCard],
    theirs: &[RailCard],
    usable: impl Fn(RailPair) -> bool,
) -> Vec<RailPair> {
    let fits = |pair: RailPair| {
        ours[pair.local as usize].infiniband == theirs[pair.remote as usize].infiniband
            && usable(pair)
    };
    let all = |local: usize, remote: usize| RailPair { local: local as u8, remote: remote as u8 };
    let ours_more = ours.len() >= theirs.len();
    let (many, few) = if ours_more { (ours, theirs) } else { (theirs, ours) };
    let mut used = vec![0usize; few.len()];
    let mut pairs = Vec::new();
    for (i, rail) in many.iter().enumerate() {
        let pair = |j: usize| if ours_more { all(i, j) } else { all(j, i) };
        let best = (0..few.len()).filter(|&j| fits(pair(j))).min_by_key(|&j| {
            let near = nearness(rail, &few[j]);
            // Turn by turn where the addresses tell nothing.
            let turn = (j + few.len() - i % few.len()) % few.len();
            (used[j], std::cmp::Reverse(near), turn)
        });
        // Evenly, but never against what the addresses say: a rail in the same subnet comes first.
        let same_net = (0..few.len())
            .filter(|&j| fits(pair(j)) && nearness(rail, &few[j]) >= SUBNET_BITS)
            .min_by_key(|&j| (used[j], std::cmp::Reverse(nearness(rail, &few[j]))));
        if let Some(j) = same_net.or(best) {
            used[j] += 1;
            pairs.push(pair(j));
        }
    }
    pairs.sort_unstable();
    pairs
}

/// Common leading bits of two IPv4-mapped GIDs that make a subnet of 256 addresses, the usual size of a
/// rail's; IPv6 subnets share 64, which all link-local addresses do.
const SUBNET_BITS: u32 = 96 + 24;

fn nearness(a: &RailCard, b: &RailCard) -> u32 {
    let of_gid = |a: &GidCard| b.gids.iter().map(|b| common_bits(a, b)).max();
    a.gids.iter().filter_map(of_gid).max().unwrap_or(0)
}

/// Leading bits that two GIDs share, if one can be spoken to from the other.
fn common_bits(a: &GidCard, b: &GidCard) -> u32 {
    if a.kind != b.kind {
        return 0;
    }
    (u128::from_be_bytes(a.gid) ^ u128::from_be_bytes(b.gid)).leading_zeros()
}

/// Pairs of GIDs to try on a path, by index into the two lists: the same kind and family, nearest first,
/// then in the owners' order of preference.
pub(crate) fn pair_gids(ours: &[GidCard], theirs: &[GidCard]) -> Vec<(usize, usize)> {
    let mapped = |gid: &GidCard| gid.gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    let local = |gid: &GidCard| gid.gid[0] == 0xfe && gid.gid[1] & 0xc0 == 0x80;
    let speaks = |a: &GidCard, b: &GidCard| {
        let alike = a.kind == GidKind::InfiniBand || (mapped(a), local(a)) == (mapped(b), local(b));
        a.kind == b.kind && alike
    };
    let mut pairs: Vec<(usize, usize)> = (0..ours.len())
        .flat_map(|i| (0..theirs.len()).map(move |j| (i, j)))
        .filter(|&(i, j)| speaks(&ours[i], &theirs[j]))
        .collect();
    // Link-local addresses say nothing of the subnet: last, whatever bits they share.
    pairs.sort_by_key(|&(i, j)| {
        let (a, b) = (&ours[i], &theirs[j]);
        (local(a), std::cmp::Reverse(common_bits(a, b)), i + j)
    });
    pairs.truncate(GID_PAIRS_MAX);
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(a: u8, b: u8, c: u8, d: u8) -> GidCard {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, a, b, c, d]);
        GidCard { gid, index: 1, kind: GidKind::RoceV2 }
    }

    fn link_local(last: u8) -> GidCard {
        let mut gid = [0; 16];
        (gid[0], gid[1], gid[15]) = (0xfe, 0x80, last);
        GidCard { gid, index: 0, kind: GidKind::RoceV2 }
    }

    fn rail(gid: GidCard) -> RailCard {
        RailCard {
            name: String::new(),
            nic: 0,
            infiniband: false,
            lid: 0,
            gids: vec![gid],
            rate_mbit_s: 0,
        }
    }

    fn rails(subnets: &[u8], host: u8) -> Vec<RailCard> {
        subnets.iter().map(|&net| rail(v4(10, 1, net, host))).collect()
    }

    fn paired(ours: &[RailCard], theirs: &[RailCard]) -> Vec<(u8, u8)> {
        pair_rails(ours, theirs, |_| true).iter().map(|p| (p.local, p.remote)).collect()
    }

    #[test]
    fn rails_in_one_subnet_are_joined_whatever_their_order() {
        assert_eq!(paired(&rails(&[1, 2, 3], 1), &rails(&[3, 1, 2], 2)), [(0, 1), (1, 2), (2, 0)]);
    }

    #[test]
    fn rails_on_a_routed_network_are_joined_one_to_one() {
        let apart =
            |nets: &[u8]| nets.iter().map(|&net| rail(v4(net, 0, 0, 1))).collect::<Vec<_>>();
        let pairs = paired(&apart(&[10, 11, 12, 13]), &apart(&[20, 21, 22, 23]));
        let (locals, remotes): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        assert_eq!(locals, [0, 1, 2, 3]);
        assert_eq!(remotes.iter().collect::<std::collections::BTreeSet<_>>().len(), 4);
    }

    #[test]
    fn every_rail_of_the_side_with_more_is_used_and_the_other_sides_evenly() {
        let (four, two) = (rails(&[1, 1, 1, 1], 1), rails(&[1, 1], 2));
        for (pairs, few) in [
            (paired(&four, &two), 1usize),
            (paired(&two, &four).iter().map(|&(a, b)| (b, a)).collect(), 1),
        ] {
            assert_eq!(pairs.len(), 4);
            for j in 0..=few as u8 {
                assert_eq!(pairs.iter().filter(|pair| pair.1 == j).count(), 2, "{pairs:?}");
            }
        }
    }

    #[test]
    fn a_rail_that_is_down_or_of_another_kind_is_not_joined() {
        let ours = rails(&[1, 2], 1);
        let pairs = pair_rails(&ours, &rails(&[1, 2], 2), |pair| pair.local != 0);
        assert_eq!(pairs, [RailPair { local: 1, remote: 1 }]);
        let mut theirs = rails(&[1], 2);
        theirs[0].infiniband = true;
        assert!(pair_rails(&ours, &theirs, |_| true).is_empty());
    }

    #[test]
    fn gids_are_tried_nearest_first_of_one_family_and_link_local_last() {
        let ours = [link_local(1), v4(10, 1, 1, 1), v4(192, 168, 0, 1)];
        let theirs = [v4(192, 168, 0, 2), link_local(2), v4(10, 1, 1, 2)];
        let pairs = pair_gids(&ours, &theirs);
        assert_eq!(pairs[..2], [(2, 0), (1, 2)], "both share 126 and 124 bits or more");
        assert_eq!(pairs.last(), Some(&(0, 1)));
        let v1 = GidCard { kind: GidKind::RoceV1, ..v4(10, 1, 1, 1) };
        assert!(pair_gids(&[v1], &theirs).is_empty(), "another kind cannot be spoken to");
    }
}
