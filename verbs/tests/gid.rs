//! Promises about GIDs.

use kvferry_verbs::{Gid, GidClass, GidEntry, GidType, rank_gids};
use proptest::prelude::*;

const LINK_LOCAL: &str = "fe80:0000:0000:0000:ba59:9fff:fea7:1234";
const V4: &str = "0000:0000:0000:0000:0000:ffff:0a00:0105";
const ULA: &str = "fd00:0000:0000:0000:0000:0000:0000:0001";
const GLOBAL: &str = "2001:0db8:0000:0000:0000:0000:0000:0001";

fn entries(table: &[(&str, GidType)]) -> Vec<GidEntry> {
    (0..)
        .zip(table)
        .map(|(index, (gid, kind))| GidEntry::new(index, gid.parse().unwrap(), *kind, None))
        .collect()
}

fn ranked(table: &[(&str, GidType)]) -> Vec<u32> {
    rank_gids(&entries(table)).iter().map(|entry| entry.index).collect()
}

#[test]
fn the_prefix_tells_the_class() {
    let class = |text: &str| text.parse::<Gid>().unwrap().class();
    assert_eq!(class(LINK_LOCAL), GidClass::LinkLocal);
    assert_eq!(class("febf::1"), GidClass::LinkLocal, "fe80::/10, not only fe80::/16");
    assert_eq!(class(V4), GidClass::Ipv4Mapped);
    assert_eq!(class("::ffff:169.254.3.1"), GidClass::Ipv4Mapped);
    assert_eq!(class(ULA), GidClass::UniqueLocal);
    assert_eq!(class(GLOBAL), GidClass::Global);
    for unusable in ["::", "::1", "ff02::1", "::ffff:0.0.0.0", "::ffff:127.0.0.1"] {
        assert_eq!(class(unusable), GidClass::Unusable, "{unusable}");
    }
}

#[test]
fn a_gid_reads_as_the_kernel_writes_it_and_shows_its_ipv4_address() {
    assert_eq!(V4.parse::<Gid>().unwrap().to_string(), "::ffff:10.0.1.5");
    assert!("fe80:0000".parse::<Gid>().is_err());
    assert!("".parse::<Gid>().is_err());
}

#[test]
fn roce_v2_over_ipv4_is_chosen_from_the_usual_mlx5_table() {
    let table = [
        (LINK_LOCAL, GidType::RoceV1),
        (LINK_LOCAL, GidType::RoceV2),
        (V4, GidType::RoceV1),
        (V4, GidType::RoceV2),
    ];
    assert_eq!(ranked(&table), [3, 2]);
}

#[test]
fn ipv6_follows_ipv4_and_v1_comes_last() {
    let table = [
        (V4, GidType::RoceV1),
        (GLOBAL, GidType::RoceV2),
        (ULA, GidType::RoceV2),
        (V4, GidType::RoceV2),
        (GLOBAL, GidType::RoceV1),
    ];
    assert_eq!(ranked(&table), [3, 1, 2, 0, 4]);
}

#[test]
fn link_local_is_offered_only_when_there_is_nothing_else() {
    let only = [(LINK_LOCAL, GidType::RoceV1), (LINK_LOCAL, GidType::RoceV2)];
    assert_eq!(ranked(&only), [1, 0]);
    assert_eq!(ranked(&[(LINK_LOCAL, GidType::RoceV2), (ULA, GidType::RoceV2)]), [1]);
}

#[test]
fn infiniband_keeps_its_table_order() {
    let table = [(LINK_LOCAL, GidType::InfiniBand), (GLOBAL, GidType::InfiniBand)];
    assert_eq!(ranked(&table), [0, 1]);
}

#[test]
fn nothing_usable_ranks_as_nothing() {
    assert!(ranked(&[]).is_empty());
    assert!(ranked(&[("::", GidType::RoceV2), ("ff02::1", GidType::RoceV2)]).is_empty());
}

fn any_entry() -> impl Strategy<Value = (Gid, GidType)> {
    let gid = prop_oneof![
        Just(LINK_LOCAL.parse().unwrap()),
        Just(V4.parse().unwrap()),
        Just("::".parse().unwrap()),
        any::<u128>().prop_map(|bits| Gid(bits.into())),
    ];
    let kind = prop_oneof![Just(GidType::RoceV1), Just(GidType::RoceV2), Just(GidType::InfiniBand)];
    (gid, kind)
}

proptest! {
    #[test]
    fn ranking_offers_something_whenever_something_is_usable(
        table in prop::collection::vec(any_entry(), 0..32)
    ) {
        let entries: Vec<_> = (0..)
            .zip(table)
            .map(|(index, (gid, kind))| GidEntry::new(index, gid, kind, None))
            .collect();
        let ranked = rank_gids(&entries);
        let usable =
            entries.iter().filter(|entry| entry.gid.class() != GidClass::Unusable).count();
        prop_assert_eq!(ranked.is_empty(), usable == 0);
        prop_assert!(ranked.len() <= usable);
        let mut indices: Vec<_> = ranked.iter().map(|entry| entry.index).collect();
        indices.sort_unstable();
        indices.dedup();
        prop_assert_eq!(indices.len(), ranked.len(), "no entry is offered twice");
    }
}
