//! Every kind of failure, provoked for real: what both sides say, what had landed, and that the same
//! room id can be tried again afterwards.
#![allow(missing_docs, unreachable_pub, reason = "tests document themselves by name")]

mod common;
#[path = "common/tamper.rs"]
mod tamper;

#[path = "failures/caller.rs"]
mod caller;
#[path = "failures/first.rs"]
mod first;
#[path = "failures/link.rs"]
mod link;
#[path = "failures/path.rs"]
mod path;
#[path = "failures/peer.rs"]
mod peer;
#[path = "failures/process.rs"]
mod process;

use kvferry::FailureKind::{self, *};

/// Kinds that this fabric has not: completion errors of RDMA, provoked where a fabric has them.
const IN_SIMULATION: [FailureKind; 4] =
    [LocalAccess, RemoteAccess, RemoteOperation, ReceiverNotReady];

/// Kinds after which this peer takes no more rooms.
const LAST: [FailureKind; 1] = [PeerDraining];

/// A test a kind, and a table of them. Retrying the same room id after any failure is safe: where the
/// peer still takes rooms, each test ends by carrying it to done.
macro_rules! provoked {
    ($($kind:ident: $module:ident::$test:ident,)+) => {
        const PROVOKED: &[(FailureKind, &str)] = &[$(($kind, stringify!($test)),)+];

        $(#[test]
        fn $test() {
            let carried = $module::$test($kind);
            assert_eq!(carried.is_none(), LAST.contains(&$kind), "the same room id is tried again");
        })+
    };
}

provoked! {
    Aborted: caller::a_room_that_a_caller_gives_up_fails_on_both_sides_in_the_callers_words,
    PeerDied: peer::a_killed_peer_is_known_dead_on_the_other_side_and_a_path_cut_for_good_on_both,
    PeerRestarted: peer::a_peer_restarted_at_its_address_is_known_as_another_and_the_request_goes_to_that,
    PeerSilent: peer::a_stopped_peer_is_silent_and_hears_the_same_words_when_it_goes_on,
    PeerForgot: peer::a_room_that_ended_while_its_session_was_lost_and_is_remembered_no_more_was_forgotten,
    PeerDraining: caller::a_grant_that_a_drained_peer_gets_is_refused_and_others_are_told_at_the_call,
    GrantTimeout: caller::a_room_that_nobody_grants_ends_by_its_own_deadline_and_says_that_no_grant_came,
    DeadlineExceeded: caller::a_room_that_is_not_over_in_time_says_how_far_it_was,
    VerdictUnknown: path::a_verdict_that_is_lost_on_the_way_is_unknown_to_the_sender_and_stands_at_the_receiver,
    GrantRevoked: path::a_write_under_a_grant_that_was_revoked_is_refused_and_its_reason_may_come_late,
    OutsideGrant: path::a_frame_that_names_what_was_not_granted_fails_its_room_and_nothing_of_it_is_placed,
    CountMismatch: path::a_room_whose_counts_do_not_agree_fails_whatever_has_landed,
    ChecksumMismatch: path::a_source_page_that_changes_under_its_transfer_and_a_bit_that_turns_on_the_way_are_found,
    AuxTooLong: caller::an_aux_row_that_does_not_fit_its_slot_fails_the_room_and_touches_nothing,
    GrantRefused: caller::a_grant_that_finds_no_place_to_wait_is_refused_and_those_before_it_stand,
    PoolGone: caller::a_grant_of_a_pool_that_is_taken_out_under_it_fails_and_of_another_pool_it_is_done,
    RoomBusy: peer::an_id_that_is_granted_again_while_the_sender_has_its_earlier_epoch_is_busy,
    LaneLost: path::a_room_that_loses_lane_after_lane_or_whose_writes_nobody_remembers_fails_with_that,
    ProtocolViolation: path::what_the_protocol_does_not_allow_fails_the_rooms_it_concerns_and_the_peers_go_on,
    Shutdown: caller::a_shutdown_fails_the_rooms_that_are_left_on_both_sides,
}

#[test]
fn every_kind_is_provoked_once_here_or_in_simulation() {
    for kind in FailureKind::ALL {
        let here = PROVOKED.iter().filter(|(provoked, _)| provoked == kind).count();
        let elsewhere = IN_SIMULATION.iter().filter(|provoked| *provoked == kind).count();
        assert_eq!(
            here + elsewhere,
            1,
            "{kind} is provoked by {here} tests and {elsewhere} elsewhere"
        );
    }
    assert_eq!(PROVOKED.len() + IN_SIMULATION.len(), FailureKind::ALL.len());
}
