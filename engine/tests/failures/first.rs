//! The first failing reason wins: what comes after it changes nothing.

use std::time::Duration;

use kvferry::{Failure, FailureKind, GrantSpec, Role, RoomHandle};

use crate::common::{KV, wait};
use crate::link::{Link, ROOM, land};

/// What both sides say at first, and at last.
struct Said {
    sending: kvferry::SendRoom,
    receiving: kvferry::RecvRoom,
    first: [Failure; 2],
}

impl Said {
    fn of(sending: kvferry::SendRoom, receiving: kvferry::RecvRoom) -> Self {
        let first = [wait(sending.done()).unwrap_err(), wait(receiving.done()).unwrap_err()];
        Self { sending, receiving, first }
    }

    /// After everything that was under way has arrived, the words are the same.
    fn stays(&self, link: &Link) {
        link.carry();
        wait(self.sending.released());
        wait(self.receiving.released());
        let last = [self.sending.failure().unwrap(), self.receiving.failure().unwrap()];
        assert_eq!(self.first.each_ref(), last);
    }

    fn causes(&self) -> [&str; 2] {
        self.first.each_ref().map(|failure| failure.causes[0].as_str())
    }
}

#[test]
fn a_side_that_has_failed_keeps_its_words_whatever_the_other_side_says_next() {
    let link = Link::new();
    for round in 0..20 {
        let (sending, receiving) = link.room(ROOM);
        land((&sending, &receiving), 0..1);
        let sender_first = round % 2 == 0;
        if sender_first {
            sending.abort("first");
            wait(sending.done()).unwrap_err();
            receiving.abort("second");
        } else {
            receiving.abort("first");
            wait(receiving.done()).unwrap_err();
            sending.abort("second");
        }
        let said = Said::of(sending, receiving);
        let (mine, others) = if sender_first { (0, 1) } else { (1, 0) };
        assert!(said.causes()[mine].ends_with(": first"), "{:?}", said.causes());
        // The other side may have been given up by its own caller before it heard.
        let second = said.causes()[others].ends_with(": second");
        assert!(second || said.first[0] == said.first[1], "{:?}", said.causes());
        said.stays(&link);
    }
}

#[test]
fn of_two_aborts_at_once_no_side_takes_the_others_words_for_its_own_and_back() {
    let link = Link::new();
    for _ in 0..20 {
        let (sending, receiving) = link.room(ROOM);
        sending.abort("mine");
        receiving.abort("yours");
        let said = Said::of(sending, receiving);
        let each_its_own =
            said.first[0].seen_by == Role::Sender && said.first[1].seen_by == Role::Receiver;
        assert!(each_its_own || said.first[0] == said.first[1], "{:?}", said.causes());
        said.stays(&link);
    }
}

#[test]
fn a_deadline_that_passes_after_an_abort_changes_nothing() {
    let link = Link::new();
    let soon = Duration::from_millis(200);
    let spec = |room| GrantSpec::new(room).pages(KV, [0]).timeout(soon);
    let (sending, receiving) = link.room_of(spec(ROOM));
    sending.abort("first");
    let said = Said::of(sending, receiving);
    // A room that was granted later meets the same deadline.
    let (_sending, later) = link.room_of(spec(8.into()));
    assert_eq!(wait(later.done()).unwrap_err().kind, FailureKind::DeadlineExceeded);
    assert!(said.first.iter().all(|failure| failure.kind == FailureKind::Aborted));
    assert_eq!(said.first[0], said.first[1]);
    said.stays(&link);
}

#[test]
fn the_loss_of_the_peer_after_an_abort_changes_nothing() {
    let link = Link::new();
    for by in [Role::Sender, Role::Receiver] {
        let (sending, receiving) = link.room(ROOM);
        match by {
            Role::Sender => sending.abort("first"),
            Role::Receiver => receiving.abort("first"),
        }
        link.proxy.refuse(true);
        link.proxy.cut_everything();
        let said = Said::of(sending, receiving);
        let (mine, others) = if by == Role::Sender { (0, 1) } else { (1, 0) };
        assert_eq!(said.first[mine].kind, FailureKind::Aborted);
        assert!(said.causes()[mine].ends_with(": first"));
        // The other side heard it, or never could.
        let lost = said.first[others].kind == FailureKind::PeerDied;
        assert!(lost || said.first[0] == said.first[1], "{:?}", said.first);
        link.proxy.refuse(false);
        link.meet_again();
        said.stays(&link);
    }
}

#[test]
fn a_shutdown_after_an_abort_changes_nothing() {
    let link = Link::new();
    let (sending, receiving) = link.room(ROOM);
    receiving.abort("first");
    let Link { prefill, decode, .. } = link;
    assert!(wait(decode.engine.shutdown(Duration::from_secs(5))), "the room was over");
    let said = Said::of(sending, receiving);
    drop(prefill);
    assert_eq!(said.first[0], said.first[1]);
    assert!(said.causes()[0].ends_with(": first"));
    assert_eq!(said.sending.failure(), Some(&said.first[0]));
}
